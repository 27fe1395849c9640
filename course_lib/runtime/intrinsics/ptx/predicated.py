"""Machine code of `intrinsics.predicated`, as `base` has that of `intrinsics` itself."""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.np import arrayobj

from course_lib.runtime.intrinsics.ptx.base import (
    _I16,
    _I32,
    _I64,
    _check,
    _check_local,
    _element_pointer,
    _from_bits,
    _unpack,
)

_LOAD = """{{
    .reg .pred valid;
    .reg .u64 there;
    setp.ne.s32 valid, $5, 0;
    cvta.to.global.u64 there, $4;
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
    @valid ld.global{cache}.v4.b32 {{$0, $1, $2, $3}}, [there];
}}"""

_LOAD_ONE = """{{
    .reg .pred valid;
    .reg .u64 there;
    setp.ne.s32 valid, $2, 0;
    cvta.to.global.u64 there, $1;
    mov.b{bits} $0, 0;
    @valid ld.global.b{bits} $0, [there];
}}"""


def _loader(name, cache):
    code = _LOAD.format(cache=cache)

    def typed(typingctx, target, array, index, valid):
        _check(array, name)
        _check_local(target, name)

        def codegen(context, builder, sig, args):
            pointer = _element_pointer(context, builder, sig.args[1], args[1], sig.args[2], args[2])
            local = arrayobj.make_array(sig.args[0])(context, builder, args[0]).data
            condition = context.cast(builder, args[3], sig.args[3], types.int32)
            kind = ir.FunctionType(ir.LiteralStructType([_I32] * 4), [pointer.type, _I32])
            # A side effect, so that it stays behind the barrier that it was written behind.
            found = builder.asm(kind, code, "=r,=r,=r,=r,l,r", [pointer, condition], True)
            words = ir.Constant(ir.VectorType(_I32, 4), ir.Undefined)
            for k in range(4):
                words = builder.insert_element(words, builder.extract_value(found, k), _I32(k))
            for k, value in enumerate(_unpack(builder, array.dtype, words)):
                builder.store(value, builder.gep(local, [_I64(k)]))
            return context.get_dummy_value()

        return types.void(target, array, index, valid), codegen

    return typed


@intrinsic
def load_vector_if(typingctx, target, array, index, valid):
    return _loader("load_vector_if", "")(typingctx, target, array, index, valid)


@intrinsic
def load_vector_once_if(typingctx, target, array, index, valid):
    return _loader("load_vector_once_if", ".cs")(typingctx, target, array, index, valid)


@intrinsic
def load_if(typingctx, array, index, valid):
    _check(array, "load_if")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        condition = context.cast(builder, args[2], sig.args[2], types.int32)
        word, name = (_I32, "r") if array.dtype == types.float32 else (_I16, "h")
        kind = ir.FunctionType(word, [pointer.type, _I32])
        code = _LOAD_ONE.format(bits=word.width)
        # A side effect: see above.
        bits = builder.asm(kind, code, f"={name},l,r", [pointer, condition], True)
        return _from_bits(builder, array.dtype, bits)

    return types.float32(array, index, valid), codegen
