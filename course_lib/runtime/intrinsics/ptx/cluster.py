"""Machine code of `intrinsics.cluster`, as `base` has that of `intrinsics` itself.

Chips below sm_90 have no clusters: there, a block is a cluster of its own.
"""

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

from course_lib.runtime.intrinsics.ptx.base import _F32, _I32, _I64, _element_pointer, _since

# `mapa` turns the generic address of a byte of shared memory here into that of the same byte in
# the block of another rank.
_LOAD = "{ .reg .b64 there; mapa.u64 there, $1, $2; ld.f32 $0, [there]; }"
# Arriving releases what was written before to the cluster; waiting acquires what others wrote.
_SYNC = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"


def _choose(builder, result, with_clusters, without):
    """The value of `with_clusters()` from sm_90 on, of `without()` before."""
    chosen = cgutils.alloca_once(builder, result)
    with builder.if_else(_since(builder, 900)) as (then, otherwise):
        with then:
            builder.store(with_clusters(), chosen)
        with otherwise:
            builder.store(without(), chosen)
    return builder.load(chosen)


def _special_register(name, without):
    def codegen(context, builder, sig, args):
        def read():
            return builder.asm(ir.FunctionType(_I32, []), f"mov.u32 $0, %{name};", "=r", [], False)

        found = _choose(builder, _I32, read, lambda: _I32(without))
        return builder.zext(found, _I64)

    return codegen


@intrinsic
def cluster_rank(typingctx):
    return types.int64(), _special_register("cluster_ctarank", 0)


@intrinsic
def cluster_size(typingctx):
    return types.int64(), _special_register("cluster_nctarank", 1)


def _barrier(builder, instructions):
    # "memory": no access may be moved across it. Convergent: no branch may come to depend on it.
    nothing = ir.FunctionType(ir.VoidType(), [])
    builder.asm(nothing, instructions, "~{memory}", [], True).attributes.add("convergent")


@intrinsic
def cluster_sync(typingctx):
    def codegen(context, builder, sig, args):
        with builder.if_else(_since(builder, 900)) as (then, otherwise):
            with then:
                _barrier(builder, _SYNC)
            with otherwise:
                _barrier(builder, "bar.sync 0;")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def load_from_cluster(typingctx, array, index, rank):
    if not isinstance(array, types.Array) or array.dtype != types.float32:
        raise TypeError(f"load_from_cluster needs a shared array of float32, not {array}")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        block = context.cast(builder, args[2], sig.args[2], types.int32)

        def from_block():
            kind = ir.FunctionType(_F32, [pointer.type, _I32])
            # "memory" and the side effect: neither moved nor merged, another block may write.
            return builder.asm(kind, _LOAD, "=f,l,r,~{memory}", [pointer, block], True)

        return _choose(builder, _F32, from_block, lambda: builder.load(pointer))

    return types.float32(array, index, rank), codegen
