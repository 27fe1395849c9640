"""Machine code of `runtime.shared_views`, like `nvvm` for the intrinsics of `intrinsics`."""

from numba.cuda import cgutils, cudaimpl, types
from numba.cuda.cudadrv import nvvm
from numba.cuda.extending import intrinsic
from numba.cuda.np import arrayobj

from course_lib.runtime.nvvm import VECTOR_BYTES, _check


@intrinsic
def dynamic_shared_view(typingctx, like):
    _check(like, "dynamic_shared_view")
    array_type = types.Array(like.dtype, 1, "C")
    stand_in = types.uint32 if like.dtype.bitwidth == 32 else types.uint16

    def codegen(context, builder, sig, args):
        # All arrays of no length lie at the start of the block's dynamic shared memory.
        value = cudaimpl._generic_array(
            context, builder, shape=(0,), dtype=stand_in,
            symbol_name="course_lib_dynamic_shared_view", addrspace=nvvm.ADDRSPACE_SHARED,
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
