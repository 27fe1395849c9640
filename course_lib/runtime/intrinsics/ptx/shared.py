"""Machine code of `intrinsics.shared`, as `base` has that of `intrinsics` itself."""

from llvmlite import ir
from numba.cuda import cgutils, cudaimpl, types
from numba.cuda.cudadrv import nvvm
from numba.cuda.extending import intrinsic
from numba.cuda.np import arrayobj

from course_lib.runtime.intrinsics.ptx.base import (
    _I32,
    _I64,
    VECTOR_BYTES,
    _check,
    _element_pointer,
    _since,
)

_NOTHING = ir.VoidType()
_COPY = """{
    .reg .u64 shared, global;
    cvta.to.shared.u64 shared, $0;
    cvta.to.global.u64 global, $1;
    cp.async.cg.shared.global [shared], [global], 16;
}"""
# numba makes dynamic shared arrays of these, of the same size.
_STAND_IN = {types.float32: types.uint32, types.float16: types.uint16, types.bfloat16: types.uint16}


@intrinsic
def dynamic_shared(typingctx, like):
    _check(like, "dynamic_shared")
    array_type = types.Array(like.dtype, 1, "C")
    stand_in = _STAND_IN[like.dtype]

    def codegen(context, builder, sig, args):
        value = cudaimpl._generic_array(
            context, builder, shape=(0,), dtype=stand_in,
            symbol_name="course_lib_dynamic_shared", addrspace=nvvm.ADDRSPACE_SHARED,
            can_dynsized=True, alignment=VECTOR_BYTES,
        )  # fmt: skip
        raw = arrayobj.make_array(types.Array(stand_in, 1, "C"))(context, builder, value)
        found = arrayobj.make_array(array_type)(context, builder)
        arrayobj.populate_array(
            found,
            data=builder.bitcast(raw.data, found.data.type),
            shape=cgutils.unpack_tuple(builder, raw.shape),
            strides=cgutils.unpack_tuple(builder, raw.strides),
            itemsize=raw.itemsize,
            meminfo=None,
        )
        return found._getvalue()

    return array_type(like), codegen


@intrinsic
def copy_async(typingctx, target, i, source, j):
    _check(target, "copy_async")
    if getattr(source, "dtype", None) != target.dtype:
        raise TypeError(f"copy_async takes two arrays of one dtype, not {target} and {source}")

    def codegen(context, builder, sig, args):
        to = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        origin = _element_pointer(context, builder, sig.args[2], args[2], sig.args[3], args[3])
        with builder.if_else(_since(builder, 800)) as (then, otherwise):
            with then:
                addresses = [builder.ptrtoint(pointer, _I64) for pointer in (to, origin)]
                kind = ir.FunctionType(_NOTHING, [_I64, _I64])
                builder.asm(kind, _COPY, "l,l,~{memory}", addresses, True)
            with otherwise:
                vector = ir.PointerType(ir.VectorType(_I32, 4))
                words = builder.load(builder.bitcast(origin, vector), align=VECTOR_BYTES)
                builder.store(words, builder.bitcast(to, vector), align=VECTOR_BYTES)
        return context.get_dummy_value()

    return types.void(target, i, source, j), codegen


@intrinsic
def wait_for_copies(typingctx):
    def codegen(context, builder, sig, args):
        with builder.if_then(_since(builder, 800)):
            kind = ir.FunctionType(_NOTHING, [])
            builder.asm(kind, "cp.async.wait_all;", "~{memory}", [], True)
        return context.get_dummy_value()

    return types.void(), codegen
