"""Machine code of `intrinsics.streaming`, as `base` has that of `intrinsics` itself."""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.np import arrayobj

from course_lib.runtime.intrinsics.ptx.base import (
    _BYTES,
    _I32,
    _I64,
    VECTOR_BYTES,
    _check,
    _check_local,
    _element_pointer,
    _pack,
    _unpack,
)

_LOAD = "{ .reg .u64 a; cvta.to.global.u64 a, $4; ld.global.cs.v4.b32 {$0, $1, $2, $3}, [a]; }"
_STORE = "{ .reg .u64 a; cvta.to.global.u64 a, $0; st.global.cs.v4.b32 [a], {$1, $2, $3, $4}; }"


@intrinsic
def load_vector_once(typingctx, target, array, index):
    _check(array, "load_vector_once")
    _check_local(target, "load_vector_once")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[1], args[1], sig.args[2], args[2])
        local = arrayobj.make_array(sig.args[0])(context, builder, args[0]).data
        kind = ir.FunctionType(ir.LiteralStructType([_I32] * 4), [pointer.type])
        # A side effect, so that it stays behind the barrier that it was written behind.
        found = builder.asm(kind, _LOAD, "=r,=r,=r,=r,l", [pointer], True)
        words = ir.Constant(ir.VectorType(_I32, 4), ir.Undefined)
        for k in range(4):
            words = builder.insert_element(words, builder.extract_value(found, k), _I32(k))
        for k, value in enumerate(_unpack(builder, array.dtype, words)):
            builder.store(value, builder.gep(local, [_I64(k)]))
        return context.get_dummy_value()

    return types.void(target, array, index), codegen


@intrinsic
def store_vector_once(typingctx, array, index, source):
    _check(array, "store_vector_once")
    _check_local(source, "store_vector_once")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        local = arrayobj.make_array(sig.args[2])(context, builder, args[2]).data
        values = [
            builder.load(builder.gep(local, [_I64(k)]))
            for k in range(VECTOR_BYTES // _BYTES[array.dtype])
        ]
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, *[_I32] * 4])
        words = _pack(builder, array.dtype, values)
        builder.asm(kind, _STORE, "l,r,r,r,r,~{memory}", [pointer, *words], True)
        return context.get_dummy_value()

    return types.void(array, index, source), codegen
