"""Machine code of the intrinsics: LLVM and inline PTX, compiled by NVVM.

Imported only where the real `numba.cuda` is in use; `runtime.intrinsics` documents each function
and holds its simulator twin.
"""

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic
from numba.cuda.np import arrayobj

_I1, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 16, 32, 64))
_F32, _F64 = ir.FloatType(), ir.DoubleType()
_F16 = ir.HalfType()
VECTOR_BYTES = 16
_BYTES = {types.float32: 4, types.float16: 2, types.bfloat16: 2}
_MAX_NAN_BF16 = 0x7FFF


def _check(array, name):
    if not isinstance(array, types.Array) or array.dtype not in _BYTES:
        raise TypeError(f"{name} takes arrays of float32, float16 or bfloat16, not {array}")


def _element_pointer(context, builder, array_type, array, index_type, index):
    view = arrayobj.make_array(array_type)(context, builder, array)
    index = context.cast(builder, index, index_type, types.int64)
    if array_type.ndim != 1 or array_type.layout != "C":
        raise TypeError(f"expected a contiguous one-dimensional array, not {array_type}")
    return builder.gep(view.data, [index])


def _from_bits(builder, dtype, bits):
    """A 16- or 32-bit pattern of `dtype` as an LLVM float."""
    if dtype == types.float32:
        return builder.bitcast(bits, _F32)
    if dtype == types.float16:
        return builder.fpext(builder.bitcast(bits, _F16), _F32)
    # bfloat16 is the upper half of a float32.
    return builder.bitcast(builder.shl(builder.zext(bits, _I32), _I32(16)), _F32)


def _to_bits(builder, dtype, value):
    if dtype == types.float32:
        return builder.bitcast(value, _I32)
    if dtype == types.float16:
        return builder.bitcast(builder.fptrunc(value, _F16), _I16)
    return builder.trunc(_bfloat16_pair(builder, value, _F32(0)), _I16)


def _since(builder, arch):
    """Whether the chip compiled for is at least `arch`, such as 800 for sm_80."""
    reflect = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_I32, [ir.PointerType(ir.IntType(8))]), "__nvvm_reflect"
    )
    name = cgutils.global_constant(
        builder.module, "nvvm_reflect_arch", cgutils.make_bytearray(b"__CUDA_ARCH\0")
    )
    # NVVM replaces this call by a constant, so a branch on it costs nothing.
    found = builder.call(reflect, [builder.bitcast(name, ir.PointerType(ir.IntType(8)))])
    return builder.icmp_unsigned(">=", found, _I32(arch))


def _bfloat16_pair(builder, low, high):
    """Two floats rounded to bfloat16, packed in 32 bits: one instruction from sm_80 on."""
    result = cgutils.alloca_once(builder, _I32)
    with builder.if_else(_since(builder, 800)) as (then, otherwise):
        with then:
            kind, code = ir.FunctionType(_I32, [_F32, _F32]), "cvt.rn.bf16x2.f32 $0, $1, $2;"
            builder.store(builder.asm(kind, code, "=r,f,f", [high, low], False), result)
        with otherwise:
            upper = builder.shl(_round_bfloat16(builder, high), _I32(16))
            builder.store(builder.or_(upper, _round_bfloat16(builder, low)), result)
    return builder.load(result)


def _round_bfloat16(builder, value):
    """Round to nearest even by integer arithmetic, NaN kept a NaN: for chips before sm_80."""
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _I32(0x7FFF))), _I32(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, _I32(_MAX_NAN_BF16), rounded)


@intrinsic
def load(typingctx, array, index):
    _check(array, "load")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        word = _I32 if array.dtype == types.float32 else _I16
        bits = builder.load(builder.bitcast(pointer, ir.PointerType(word)))
        return _from_bits(builder, array.dtype, bits)

    return types.float32(array, index), codegen


@intrinsic
def store(typingctx, array, index, value):
    _check(array, "store")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        number = context.cast(builder, args[2], sig.args[2], types.float32)
        bits = _to_bits(builder, array.dtype, number)
        builder.store(bits, builder.bitcast(pointer, ir.PointerType(bits.type)))
        return context.get_dummy_value()

    return types.void(array, index, value), codegen


@intrinsic
def vector_width(typingctx, array):
    _check(array, "vector_width")
    width = VECTOR_BYTES // _BYTES[array.dtype]
    return types.int64(array), lambda context, builder, sig, args: _I64(width)


def _check_local(array, name):
    if not isinstance(array, types.Array) or array.dtype != types.float32:
        raise TypeError(f"{name} needs a local array of float32, not {array}")


@intrinsic
def load_vector(typingctx, target, array, index):
    _check(array, "load_vector")
    _check_local(target, "load_vector")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[1], args[1], sig.args[2], args[2])
        local = arrayobj.make_array(sig.args[0])(context, builder, args[0]).data
        words = builder.load(
            builder.bitcast(pointer, ir.PointerType(ir.VectorType(_I32, 4))), align=VECTOR_BYTES
        )
        for k, value in enumerate(_unpack(builder, array.dtype, words)):
            builder.store(value, builder.gep(local, [_I64(k)]))
        return context.get_dummy_value()

    return types.void(target, array, index), codegen


def _unpack(builder, dtype, words):
    for k in range(4):
        word = builder.extract_element(words, _I32(k))
        if dtype == types.float32:
            yield builder.bitcast(word, _F32)
        elif dtype == types.bfloat16:
            yield builder.bitcast(builder.shl(word, _I32(16)), _F32)
            yield builder.bitcast(builder.and_(word, _I32(0xFFFF0000)), _F32)
        else:
            for shift in (0, 16):
                half = builder.trunc(builder.lshr(word, _I32(shift)), _I16)
                yield _from_bits(builder, dtype, half)


@intrinsic
def store_vector(typingctx, array, index, source):
    _check(array, "store_vector")
    _check_local(source, "store_vector")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        local = arrayobj.make_array(sig.args[2])(context, builder, args[2]).data
        values = [
            builder.load(builder.gep(local, [_I64(k)]))
            for k in range(VECTOR_BYTES // _BYTES[array.dtype])
        ]
        words = ir.Constant(ir.VectorType(_I32, 4), ir.Undefined)
        for k, word in enumerate(_pack(builder, array.dtype, values)):
            words = builder.insert_element(words, word, _I32(k))
        builder.store(
            words, builder.bitcast(pointer, ir.PointerType(words.type)), align=VECTOR_BYTES
        )
        return context.get_dummy_value()

    return types.void(array, index, source), codegen


def _pack(builder, dtype, values):
    if dtype == types.float32:
        return [builder.bitcast(value, _I32) for value in values]
    pairs = list(zip(values[::2], values[1::2], strict=True))
    if dtype == types.bfloat16:
        return [_bfloat16_pair(builder, low, high) for low, high in pairs]
    words = []
    for low, high in pairs:
        low, high = (builder.zext(_to_bits(builder, dtype, v), _I32) for v in (low, high))
        words.append(builder.or_(builder.shl(high, _I32(16)), low))
    return words


def _special_function(builder, instruction, x):
    kind = ir.FunctionType(_F32, [_F32])
    return builder.asm(kind, f"{instruction} $0, $1;", "=f,f", [x], False)


@intrinsic
def fast_exp(typingctx, x):
    def codegen(context, builder, sig, args):
        number = context.cast(builder, args[0], sig.args[0], types.float32)
        scaled = builder.fmul(number, _F32(1.4426950216293335))  # log2(e) as float32
        return _special_function(builder, "ex2.approx.ftz.f32", scaled)

    return types.float32(x), codegen


@intrinsic
def fast_reciprocal(typingctx, x):
    def codegen(context, builder, sig, args):
        number = context.cast(builder, args[0], sig.args[0], types.float32)
        return _special_function(builder, "rcp.approx.ftz.f32", number)

    return types.float32(x), codegen


def _dependency(instruction):
    def codegen(context, builder, sig, args):
        with builder.if_then(_since(builder, 900)):
            # "memory": no access may be moved across it.
            nothing = ir.FunctionType(ir.VoidType(), [])
            builder.asm(nothing, f"{instruction};", "~{memory}", [], True)
        return context.get_dummy_value()

    return codegen


@intrinsic
def wait_for_previous_kernel(typingctx):
    return types.void(), _dependency("griddepcontrol.wait")


@intrinsic
def allow_next_kernel(typingctx):
    return types.void(), _dependency("griddepcontrol.launch_dependents")
