"""Machine code of the intrinsics of `runtime.mailbox`, like `nvvm` for those of `intrinsics`."""

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

from course_lib.runtime.nvvm import _F32, _I32, _I64, _element_pointer

_POST = "{ .reg .u64 a; cvta.to.global.u64 a, $0; st.relaxed.gpu.global.b64 [a], $1; }"
_LOOK = "{ .reg .u64 a; cvta.to.global.u64 a, $1; ld.relaxed.gpu.global.b64 $0, [a]; }"


def _check_box(box, name):
    if not isinstance(box, types.Array) or box.dtype != types.int64:
        raise TypeError(f"{name} takes an array of int64, not {box}")


@intrinsic
def post(typingctx, box, index, value, mark):
    _check_box(box, "post")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        number = context.cast(builder, args[2], sig.args[2], types.float32)
        low = builder.zext(builder.bitcast(number, _I32), _I64)
        high = builder.shl(context.cast(builder, args[3], sig.args[3], types.int64), _I64(32))
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I64])
        builder.asm(kind, _POST, "l,l,~{memory}", [pointer, builder.or_(low, high)], True)
        return context.get_dummy_value()

    return types.void(box, index, value, mark), codegen


@intrinsic
def look(typingctx, box, index):
    _check_box(box, "look")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        kind = ir.FunctionType(_I64, [pointer.type])
        # The side effect: never moved nor merged, another block may write.
        word = builder.asm(kind, _LOOK, "=l,l,~{memory}", [pointer], True)
        value = builder.bitcast(builder.trunc(word, _I32), _F32)
        return cgutils.pack_struct(builder, [value, builder.ashr(word, _I64(32))])

    return types.Tuple((types.float32, types.int64))(box, index), codegen
