"""Machine code of `intrinsics.halves`, as `base` has that of `intrinsics` itself."""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from course_lib.runtime.intrinsics.ptx.base import _F32, _bfloat16_pair
from course_lib.runtime.intrinsics.ptx.matrix import _check_product, _multiplying


@intrinsic
def pack_halves(typingctx, low, high):
    def codegen(context, builder, sig, args):
        numbers = [
            builder.bitcast(context.cast(builder, arg, kind, types.uint32), _F32)
            for arg, kind in zip(args, sig.args, strict=True)
        ]
        return _bfloat16_pair(builder, *numbers)

    return types.uint32(low, high), codegen


@intrinsic
def multiply_add_halves(typingctx, acc, c, a, i, b, j):
    _check_product(acc, a, b, "multiply_add_halves")
    return types.void(acc, c, a, i, b, j), _multiplying(types.bfloat16)
