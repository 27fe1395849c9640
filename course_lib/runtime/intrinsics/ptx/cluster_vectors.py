"""Machine code of `intrinsics.cluster_vectors`, as `base` has that of `intrinsics` itself."""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from course_lib.runtime.intrinsics.ptx.base import (
    _F32,
    _I32,
    _I64,
    VECTOR_BYTES,
    _element_pointer,
    _since,
)
from course_lib.runtime.intrinsics.ptx.matrix import _places, _shared_address

# As in `nvvm_cluster`, with addresses of shared memory, which are 32 bits long.
_LOAD = """{
    .reg .u32 there;
    mapa.shared::cluster.u32 there, $4, $5;
    ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [there];
}"""


@intrinsic
def load_vector_from_cluster(typingctx, target, k, array, i, rank):
    for each, what in ((target, "local"), (array, "shared")):
        if getattr(each, "dtype", None) != types.float32:
            raise TypeError(f"load_vector_from_cluster needs a {what} array of float32, not {each}")

    def codegen(context, builder, sig, args):
        index = context.cast(builder, args[1], sig.args[1], types.int64)
        places = _places(context, builder, sig.args[0], args[0], index, 4)
        block = context.cast(builder, args[4], sig.args[4], types.int32)

        def keep(values):
            for place, value in zip(places, values, strict=True):
                builder.store(value, place)

        with builder.if_else(_since(builder, 900)) as (then, otherwise):
            with then:
                address = _shared_address(
                    context, builder, sig.args[2], args[2], sig.args[3], args[3]
                )
                kind = ir.FunctionType(ir.LiteralStructType([_F32] * 4), [_I32, _I32])
                # "memory" and the side effect: neither moved nor merged, another block may write.
                outputs = "=f,=f,=f,=f,r,r,~{memory}"
                found = builder.asm(kind, _LOAD, outputs, [address, block], True)
                keep([builder.extract_value(found, r) for r in range(4)])
            with otherwise:  # no clusters: the block's own
                pointer = _element_pointer(
                    context, builder, sig.args[2], args[2], sig.args[3], args[3]
                )
                words = builder.load(
                    builder.bitcast(pointer, ir.PointerType(ir.VectorType(_I32, 4))),
                    align=VECTOR_BYTES,
                )
                keep(
                    builder.bitcast(builder.extract_element(words, _I64(r)), _F32) for r in range(4)
                )
        return context.get_dummy_value()

    return types.void(target, k, array, i, rank), codegen
