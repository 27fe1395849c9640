"""Machine code of `intrinsics.pointers`, as `base` has that of `intrinsics` itself."""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.cudadrv import nvvm
from numba.cuda.extending import intrinsic
from numba.cuda.np import arrayobj

from course_lib.runtime.intrinsics.ptx.base import _I64


@intrinsic
def array_at(typingctx, address, n, like):
    if not isinstance(like, types.Array):
        raise TypeError(f"array_at needs an array to take the dtype of, not {like}")
    array_type = types.Array(like.dtype, 1, "C")

    def codegen(context, builder, sig, args):
        number = context.cast(builder, args[0], sig.args[0], types.int64)
        extent = context.cast(builder, args[1], sig.args[1], types.int64)
        found = arrayobj.make_array(array_type)(context, builder)
        # By way of global memory's own address space, so that the compiler knows where it is and
        # need not ask at every access.
        element = found.data.type.pointee
        there = builder.inttoptr(number, ir.PointerType(element, nvvm.ADDRSPACE_GLOBAL))
        size = context.get_abi_sizeof(context.get_data_type(like.dtype))
        arrayobj.populate_array(
            found,
            data=builder.addrspacecast(there, found.data.type),
            shape=[extent],
            strides=[_I64(size)],
            itemsize=_I64(size),
            meminfo=None,
        )
        return found._getvalue()

    return array_type(address, n, like), codegen
