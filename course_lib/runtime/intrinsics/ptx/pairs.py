"""Machine code of `intrinsics.pairs`, as `base` has that of `intrinsics` itself."""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from course_lib.runtime.intrinsics.ptx.base import _BYTES, _check, _pack


@intrinsic
def as_pair(typingctx, like, low, high):
    _check(like, "as_pair")
    if _BYTES[like.dtype] != 2:
        raise TypeError(f"as_pair makes float16 or bfloat16, not {like.dtype}")

    def codegen(context, builder, sig, args):
        numbers = [
            context.cast(builder, arg, kind, types.float32)
            for arg, kind in zip(args[1:], sig.args[1:], strict=True)
        ]
        return _pack(builder, like.dtype, numbers)[0]

    return types.uint32(like, low, high), codegen
