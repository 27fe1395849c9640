"""Machine code of `intrinsics.signals`, as `base` has that of `intrinsics` itself."""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from course_lib.runtime.intrinsics.ptx.base import _I32, _element_pointer

_COUNT = "{ .reg .u64 a; cvta.to.global.u64 a, $1; atom.acq_rel.gpu.global.add.s32 $0, [a], $2; }"
_LOOK = "{ .reg .u64 a; cvta.to.global.u64 a, $1; ld.acquire.gpu.global.s32 $0, [a]; }"


def _check_flags(flags, name):
    if not isinstance(flags, types.Array) or flags.dtype != types.int32:
        raise TypeError(f"{name} takes an array of int32, not {flags}")


@intrinsic
def count(typingctx, flags, index, value):
    _check_flags(flags, "count")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        number = context.cast(builder, args[2], sig.args[2], types.int32)
        kind = ir.FunctionType(_I32, [pointer.type, _I32])
        return builder.asm(kind, _COUNT, "=r,l,r,~{memory}", [pointer, number], True)

    return types.int32(flags, index, value), codegen


@intrinsic
def look(typingctx, flags, index):
    _check_flags(flags, "look")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        kind = ir.FunctionType(_I32, [pointer.type])
        # The side effect: never moved nor merged, another block may write.
        return builder.asm(kind, _LOOK, "=r,l,~{memory}", [pointer], True)

    return types.int32(flags, index), codegen
