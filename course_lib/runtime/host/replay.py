"""A launcher that has launched once need not think again: ``@replayed``.

Most of what a launcher does before it launches (checking its arguments, choosing threads and
blocks, taking stock of every array) comes out alike for inputs that look alike. `replayed` lets it
run once, notes the launch it made, and repeats that launch for inputs of the same looks: one key,
one look-up, one new array, one call of the driver. In a model of many small operations it shows
(notebook 04).

What a launch is remembered for: the launcher and its variant; dtype, shape and device of each
input; the stream, the thread and what ladders were told to choose. Repeated are only calls with
PyTorch tensors that are contiguous and begin on a 16-byte boundary, without `out`; what the
launcher made must have been one launch on the inputs and a result like the last of them. Every
other call runs the launcher, as do all calls in the simulator.
"""

import functools
import inspect
import sys
from threading import get_ident

from course_lib.runtime.host import launch as launching
from course_lib.runtime.intrinsics import VECTOR_BYTES

MOST_REMEMBERED = 4096  # launches of one launcher; past it, all are forgotten
_ORDINARY = object()  # remembered of calls that can't be repeated


def replayed(launcher):
    """For a method ``launcher(self, *inputs, variant=…, out=None) -> result`` of one launch."""
    known = {}
    parameters = inspect.signature(launcher).parameters.values()
    n_inputs = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) - 1  # without self

    @functools.wraps(launcher)
    def call(self, *inputs, out=None, **choice):
        if out is not None or len(inputs) != n_inputs or not launching.on_gpu():
            return launcher(self, *inputs, out=out, **choice)
        x = inputs[-1]
        if type(x) not in launching.tensor_types or not x.is_contiguous():
            return launcher(self, *inputs, **choice)
        index, address = x.get_device(), x.data_ptr()
        key = (
            self, x.dtype, x.shape, index, launching._stream_of(index), get_ident(),
            launching.choices,
        )  # fmt: skip
        addresses, together = [address], address
        if n_inputs > 1:
            for other in inputs[-2::-1]:
                if type(other) not in launching.tensor_types or not other.is_contiguous():
                    return launcher(self, *inputs, **choice)
                key += (other.dtype, other.shape, other.get_device())
                address = other.data_ptr()
                addresses.insert(0, address)
                together |= address
        if choice:
            key += tuple(choice.items())
        prepared = known.get(key)
        if prepared is _ORDINARY or together % VECTOR_BYTES:
            return launcher(self, *inputs, **choice)
        if prepared is None:
            with launching.recorded() as launches:
                result = launcher(self, *inputs, **choice)
            if len(known) >= MOST_REMEMBERED:
                known.clear()
            known[key] = _prepared(launches, inputs, result)
            return result
        result = sys.modules["torch"].empty_like(x)
        addresses.append(result.data_ptr())
        prepared.launch(addresses)
        return result

    return call


def _prepared(launches, inputs, result):
    """What repeats the only launch of `launches`; _ORDINARY where that would not be all."""
    if len(launches) != 1:
        return _ORDINARY
    kernel, grid, block, args, options = launches[0]
    operands = [arg for arg in args if hasattr(arg, "shape")]
    wanted = (*inputs, result)
    like = inputs[-1]
    if (
        len(operands) != len(wanted)
        or any(a is not b for a, b in zip(operands, wanted, strict=True))
        or not result.is_contiguous()
        or (result.shape, result.dtype, result.device) != (like.shape, like.dtype, like.device)
        or result.data_ptr() % VECTOR_BYTES
    ):
        return _ORDINARY
    return launching.prepare(kernel, grid, block, *args, **options)
