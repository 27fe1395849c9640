"""`cuda.reduce`: a two-operand Python function made into a reduction of a whole array."""

import functools

from course_lib.simulator.cuda_api.arrays import DeviceArray, to_device
from course_lib.simulator.cuda_api.device_api import names
from course_lib.simulator.cuda_api.primitives import Namespace
from course_lib.simulator.engine.kernel import Kernel

THREADS = 128
cuda = Namespace("cuda", **{name: names[name] for name in ("threadIdx", "syncthreads")})


@functools.lru_cache(maxsize=128)
def _kernel(function):
    functor = Kernel(function, device=True)

    def reduce_kernel(array, partials, result, init):
        tid = cuda.threadIdx.x
        if tid < array.size:
            total = array[tid]
            for place in range(tid + THREADS, array.size, THREADS):
                total = functor(total, array[place])
            partials[tid] = total
        cuda.syncthreads()
        width = THREADS // 2
        while width > 0:
            if tid < width and tid + width < array.size:
                partials[tid] = functor(partials[tid], partials[tid + width])
            cuda.syncthreads()
            width //= 2
        if tid == 0:
            result[0] = functor(partials[0], init)

    return Kernel(reduce_kernel)


class Reduce:
    """A reduction by `functor`, which must be associative: its order is not stated.

    Used as a decorator: ``total = cuda.reduce(lambda a, b: a + b)``; then ``total(array)``.
    """

    def __init__(self, functor):
        self._functor = getattr(functor, "py_func", functor)

    def __call__(self, arr, size=None, res=None, init=0, stream=0):
        """Reduce the first `size` elements of a 1-D array, starting from `init`.

        Returns the result, or writes it to `res[0]` and returns None.

        Raises
        ------
        TypeError if `arr` is not one-dimensional.
        """
        if arr.ndim != 1:
            raise TypeError("only support 1D array")
        if size is not None:
            arr = arr[:size]
        first = arr.dtype.type(init)
        if arr.size < 1:
            return first
        source = arr if isinstance(arr, DeviceArray) else to_device(arr)
        partials = to_device(source.copy_to_host()[:THREADS])
        result = to_device(source.copy_to_host()[:1])
        _kernel(self._functor)[1, THREADS](source, partials, result, first)
        if res is None:
            return result[0]
        res[:1].copy_to_device(result)
        return None
