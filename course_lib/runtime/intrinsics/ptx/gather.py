"""Machine code of `intrinsics.gather`, as `base` has that of `intrinsics` itself."""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from course_lib.runtime.intrinsics.ptx.base import (
    _BYTES,
    _F32,
    _I16,
    _I32,
    _I64,
    _check,
    _element_pointer,
    _from_bits,
    _since,
)

_GLOBAL, _SHARED = 1, 3  # address spaces
_COPY = "cp.async.ca.shared.global [$0], [$1], 4, $2;"


def _copy(builder, to, origin, valid):
    """4 bytes, or none of them and zeros instead."""
    shared = builder.addrspacecast(to, ir.PointerType(_F32, _SHARED))
    far = builder.addrspacecast(origin, ir.PointerType(_F32, _GLOBAL))
    size = builder.select(valid, _I32(4), _I32(0))
    kind = ir.FunctionType(ir.VoidType(), [_I32, _I64, _I32])
    operands = [builder.ptrtoint(shared, _I32), builder.ptrtoint(far, _I64), size]
    builder.asm(kind, _COPY, "r,l,r,~{memory}", operands, True)


def _load_and_store(builder, to, origin, valid, dtype):
    zero = builder.block
    with builder.if_then(valid):
        word = _I32 if _BYTES[dtype] == 4 else _I16
        bits = builder.load(builder.bitcast(origin, ir.PointerType(word)))
        value = _from_bits(builder, dtype, bits)
        loaded = builder.block
    merged = builder.phi(_F32)
    merged.add_incoming(_F32(0), zero)
    merged.add_incoming(value, loaded)
    builder.store(merged, to)


@intrinsic
def gather_async(typingctx, target, i, source, j, valid):
    _check(source, "gather_async")
    if not isinstance(target, types.Array) or target.dtype != types.float32:
        raise TypeError(f"gather_async needs a target of float32, not {target}")

    def codegen(context, builder, sig, args):
        valid = context.cast(builder, args[4], sig.args[4], types.boolean)
        place = context.cast(builder, args[3], sig.args[3], types.int64)
        place = builder.select(valid, place, _I64(0))
        to = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        origin = _element_pointer(context, builder, sig.args[2], args[2], types.int64, place)
        to = builder.bitcast(to, ir.PointerType(_F32))
        if source.dtype != types.float32:
            _load_and_store(builder, to, origin, valid, source.dtype)
            return context.get_dummy_value()
        with builder.if_else(_since(builder, 800)) as (then, otherwise):
            with then:
                _copy(builder, to, builder.bitcast(origin, ir.PointerType(_F32)), valid)
            with otherwise:
                _load_and_store(builder, to, origin, valid, source.dtype)
        return context.get_dummy_value()

    return types.void(target, i, source, j, valid), codegen
