"""Machine code of `intrinsics.special`, as `base` has that of `intrinsics` itself."""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from course_lib.runtime.intrinsics.ptx.base import _special_function


@intrinsic
def fast_exp2(typingctx, x):
    def codegen(context, builder, sig, args):
        number = context.cast(builder, args[0], sig.args[0], types.float32)
        return _special_function(builder, "ex2.approx.ftz.f32", number)

    return types.float32(x), codegen
