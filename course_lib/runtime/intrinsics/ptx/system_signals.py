"""Machine code of `intrinsics.system_signals`, as `base` has that of `intrinsics` itself."""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from course_lib.runtime.intrinsics.ptx.base import _I64, _element_pointer

_STORE = "{ .reg .u64 a; cvta.to.global.u64 a, $0; st.release.sys.global.s64 [a], $1; }"
_LOAD = "{ .reg .u64 a; cvta.to.global.u64 a, $1; ld.acquire.sys.global.s64 $0, [a]; }"


def _check_flags(flags, name):
    if not isinstance(flags, types.Array) or flags.dtype != types.int64:
        raise TypeError(f"{name} takes an array of int64, not {flags}")


@intrinsic
def store_release(typingctx, flags, index, value):
    _check_flags(flags, "store_release")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        number = context.cast(builder, args[2], sig.args[2], types.int64)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I64])
        builder.asm(kind, _STORE, "l,l,~{memory}", [pointer, number], True)
        return context.get_dummy_value()

    return types.void(flags, index, value), codegen


@intrinsic
def load_acquire(typingctx, flags, index):
    _check_flags(flags, "load_acquire")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        kind = ir.FunctionType(_I64, [pointer.type])
        # The side effect: never moved nor merged, another GPU may write.
        return builder.asm(kind, _LOAD, "=l,l,~{memory}", [pointer], True)

    return types.int64(flags, index), codegen
