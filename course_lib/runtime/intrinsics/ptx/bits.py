"""Machine code of `intrinsics.bits`, as `base` has that of `intrinsics` itself."""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic


@intrinsic
def as_word(typingctx, value):
    def codegen(context, builder, sig, args):
        number = context.cast(builder, args[0], sig.args[0], types.float32)
        return builder.bitcast(number, ir.IntType(32))

    return types.uint32(value), codegen
