"""The launch cache: ``@cached_launch`` repeats what a launcher did for inputs that look alike.

Most of what a launcher does before it launches (checking arguments, choosing threads and blocks,
taking stock of every array) depends on the inputs' shapes, dtypes and device alone. So its first
run is noted: every launch, and every array that it made, which are its results and the workspace
between launches. A repetition is one key, one look-up, one call of the driver for each launch, new
results, and one piece of memory for all of the workspace. In a model of many small operations it
shows (notebook 04).

Arrays of the workspace that no two launches need at the same time have the same place in it:
launches of a stream follow one another, also those that get ready before (`launch`'s `overlap`),
since they wait before they touch memory. For the same reason the workspace can be given back as
soon as the launches that need it are started. So a run is cut in parts where nothing of the
workspace is needed on both sides and results may take its place, if that saves memory worth a call
of the allocator: gradients of a convolution, say, one after the other.

The key: dtype, shape, strides and device of each array, all other arguments, the stream, the thread
and what ladders were told to choose. Repeated are only calls with PyTorch tensors that begin on a
16-byte boundary, without `out`, and only runs whose arguments lay apart, and in which PyTorch did
nothing but make arrays and look at them in another shape: while a run is noted, a mode of PyTorch's
dispatcher watches. Every other call runs the launcher, as do all calls in the simulator and those
within a run that is being noted. What the launcher computes must not depend on what arrays hold.
"""

import functools
import inspect
import itertools
import sys
from threading import get_ident
from typing import NamedTuple

from course_lib.runtime.host import launch as launching
from course_lib.runtime.intrinsics import VECTOR_BYTES

MOST_REMEMBERED = 4096  # runs of one launcher; past it, all are forgotten
TRIES = 3  # to note a run: the first may have filled counters, or made what the others will use
APART = 512  # bytes: the boundaries on which pieces of the workspace begin, as PyTorch's arrays do
WORTH = 64 << 10  # bytes that a part of its own must save
#: What PyTorch may do while a run is noted.
MAKING = {"empty", "empty_strided", "new_empty", "empty_like", "new_empty_strided"}
LOOKING = {"view", "_unsafe_view", "slice", "select", "detach", "permute", "alias", "as_strided",
           "transpose", "t", "unsqueeze", "squeeze"}  # fmt: skip


def cached_launch(n_arrays):
    """For a function or method ``launcher(*arrays, *others, **options)``.

    n_arrays  how many of its arguments are arrays, the first ones; each but the first may be None

    Others and options must be hashable. The result is an array that the launcher made, or a tuple
    of them.
    """

    def decorate(launcher):
        known = {}
        first = int("self" in inspect.signature(launcher).parameters)
        end = first + n_arrays

        @functools.wraps(launcher)
        def call(*inputs, **options):
            if launching._recorders or not launching.on_gpu():
                return launcher(*inputs, **options)
            n_inputs = len(inputs)
            if "out" in options or n_inputs < end:
                return launcher(*inputs, **options)
            key = [inputs[0]] if first else []
            addresses, together = [], 0
            for x in inputs[first:end]:
                if x is None:
                    key.append(None)
                    addresses.append(0)
                    continue
                if type(x) not in launching.tensor_types or (index := x.get_device()) < 0:
                    return launcher(*inputs, **options)
                address = x.data_ptr()
                key += x.dtype, x.shape, x.stride(), index
                addresses.append(address)
                together |= address
            key += launching._stream_of(index), get_ident(), launching.choices
            if n_inputs > end:
                key += inputs[end:]
            if options:
                key += options.items()
            key = tuple(key)
            run = known.get(key, TRIES)
            if together % VECTOR_BYTES or run == 0:
                return launcher(*inputs, **options)
            if type(run) is tuple:  # `_is_plain`
                launch, empty_like = run
                result = empty_like(x)
                addresses.append(result.data_ptr())
                launch(addresses)
                return result
            if type(run) is not int:
                found = run(addresses)
                return launcher(*inputs, **options) if found is None else found
            if _share_memory(inputs[first:end]):
                return launcher(*inputs, **options)
            result, repetition = _noted(launcher, inputs, options, inputs[first:end])
            if len(known) >= MOST_REMEMBERED:
                known.clear()
            known[key] = repetition or run - 1
            return result

        return call

    return decorate


def _share_memory(arrays):
    """Whether an address may be one array's or another's: others of these looks may not share it.

    The launches tell arrays apart by their addresses.
    """
    ends = sorted((x.data_ptr(), x.data_ptr() + _bytes(x)) for x in arrays if x is not None)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(ends))


def _noted(launcher, inputs, options, arrays):
    """(the launcher's result, what repeats the run; or None where nothing can)."""
    watch = _watch_class()()
    with launching.recorded() as launches, watch:
        result = launcher(*inputs, **options)
    if watch.spoilt:
        return result, None
    results = result if isinstance(result, tuple) else (result,)
    memory = _memory(arrays, results, watch.made, launches)
    if memory is None:
        return result, None
    if _is_plain(launches, arrays, result):
        (kernel, grid, block, args, options), = launches
        launch = launching.prepare(kernel, grid, block, *args, **options).launch
        return result, (launch, sys.modules["torch"].empty_like)
    return result, _repetition(launches, memory, len(arrays), results, result is results)


def _is_plain(launches, arrays, result):
    """Whether a run is one launch, of the arrays and a result that looks like the last of them.

    It is repeated without `_repetition`, which takes half as long again.
    """
    if len(launches) != 1 or isinstance(result, tuple):
        return False
    given = [arg for arg in launches[0][3] if hasattr(arg, "data_ptr")]
    last, wanted = arrays[-1], (*arrays, result)
    return (
        len(given) == len(wanted)
        and all(a is b for a, b in zip(given, wanted, strict=True))
        and result.is_contiguous() and last.is_contiguous()
        and (result.shape, result.dtype) == (last.shape, last.dtype)
    )  # fmt: skip


@functools.cache
def _watch_class():
    # Made here, because the course does not import PyTorch unless somebody else has.
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        """Keeps the arrays that PyTorch makes; `spoilt` if it did more than that."""

        def __init__(self):
            super().__init__()
            self.made, self.spoilt = [], False

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            name = function.overloadpacket.__name__
            if name in MAKING:
                self.made.append(result)
            elif name not in LOOKING:
                self.spoilt = True
            return result

    return Watch


class _Stretch(NamedTuple):
    """Memory that a run knows: an argument's, a result's, or a piece of a part's workspace."""

    start: int
    end: int
    base: int  # position among the addresses of a repetition
    offset: int  # in bytes from that address


class _Part(NamedTuple):
    """Launches `first` to `end` of a run, and what is made for them."""

    first: int
    end: int
    n_bytes: int  # of the workspace
    offsets: dict  # {piece of the workspace: its offset}
    results: tuple  # the positions of those that these launches need first


def _memory(inputs, results, made, launches):
    """(the `_Stretch`es of a run, its `_Part`s); None if a result was not made by it.

    The addresses of a repetition are those of the inputs, of the results, of each part's workspace.
    """
    stretches = [_stretch(x, base) for base, x in enumerate(inputs) if x is not None]
    whole = {(x.data_ptr(), _bytes(x)) for x in made}
    own, needed = set(), []
    for base, x in enumerate(results, len(inputs)):
        if x.numel() and (x.data_ptr(), _bytes(x)) not in whole:
            return None
        own.add(x.data_ptr())
        needed.append((_bytes(x), (_times(x, launches) or (0, 0))[0]))
        stretches.append(_stretch(x, base))
    times, sizes = {}, {}
    for x in made:
        if x.numel() and x.data_ptr() not in own and (found := _times(x, launches)):
            piece = _stretch(x, 0)
            times[piece], sizes[piece] = found, -(-_bytes(x) // APART) * APART
    parts = _parts(len(launches), sizes, times, needed)
    for base, part in enumerate(parts, len(inputs) + len(results)):
        stretches += [
            piece._replace(base=base, offset=offset) for piece, offset in part.offsets.items()
        ]
    return stretches, parts


def _parts(n_launches, sizes, times, results):
    """The `_Part`s of a run.

    sizes    {piece of the workspace: bytes}
    times    {piece: (first launch that uses it, last one)}
    results  (bytes, first launch that uses it) of each
    """
    cuts = (
        n for n in range(1, n_launches)
        if not any(first < n <= last for first, last in times.values())
    )  # fmt: skip
    parts = []
    for first, end in reversed([*itertools.pairwise((0, *cuts, n_launches))]):
        mine = {piece: size for piece, size in sizes.items() if first <= times[piece][0] < end}
        offsets = _offsets(mine, times)
        n_bytes = max((offset + sizes[piece] for piece, offset in offsets.items()), default=0)
        needed = tuple(
            i for i, (_, since) in enumerate(results) if first <= since < end or not n_launches
        )
        after = parts[-1] if parts else None
        if after and _saved(n_bytes, after, results) < WORTH:
            parts[-1] = _Part(
                first, after.end, max(n_bytes, after.n_bytes), offsets | after.offsets,
                needed + after.results,
            )  # fmt: skip
        else:
            parts.append(_Part(first, end, n_bytes, offsets, needed))
    return parts[::-1]


def _saved(n_bytes, after, results):
    """Bytes that are saved if a workspace of `n_bytes` is given back before the part `after`."""
    return min(n_bytes - after.n_bytes, sum(results[i][0] for i in after.results))


def _stretch(x, base):
    return _Stretch(x.data_ptr(), x.data_ptr() + _bytes(x), base, 0)


def _times(x, launches):
    """(number of the first launch that was given memory of `x`, of the last); None if none was."""
    start, end = x.data_ptr(), x.data_ptr() + _bytes(x)
    found = [
        number
        for number, (_, _, _, args, _) in enumerate(launches)
        if any(start <= arg.data_ptr() < end for arg in args if hasattr(arg, "data_ptr"))
    ]
    return (found[0], found[-1]) if found else None


def _offsets(sizes, times):
    """{piece: its offset}: those in use at the same time lie apart, the others may not.

    sizes  {piece: bytes}
    times  {piece: (first launch that uses it, last one)}
    """
    offsets = {}
    for piece in sorted(sizes, key=sizes.get, reverse=True):
        first, last = times[piece]
        offset = 0
        for other in sorted(offsets, key=offsets.get):
            starts, ends = times[other]
            begin, end = offsets[other], offsets[other] + sizes[other]
            if starts <= last and first <= ends and offset + sizes[piece] > begin:
                offset = max(offset, end)
        offsets[piece] = offset
    return offsets


def _repetition(launches, memory, n_inputs, results, several):
    """A function of the inputs' addresses that does the run again, and returns its results.

    It returns None, and has done nothing, where a graph captures launches that need counters:
    graphs have their own.
    """
    torch = sys.modules["torch"]
    stretches, parts = memory
    steps, others = [], []
    for kernel, grid, block, args, options in launches:
        given, places = [arg for arg in args if hasattr(arg, "data_ptr")], []
        for i, array in enumerate(given):
            place = _place(array, stretches)
            if place is None:  # neither made in this run nor given to it: counters
                others.append(array)
            else:
                places.append((i, *place))
        prepared = launching.prepare(kernel, grid, block, *args, **options)
        steps.append((prepared.launch, [array.data_ptr() for array in given], places))
    looks = [(tuple(x.shape), tuple(x.stride()), x.dtype) for x in results]
    device, capturing = results[0].device, torch.cuda.is_current_stream_capturing
    empty, byte, kept = torch.empty_strided, torch.uint8, tuple(others)
    none_made, nowhere = [None] * len(looks), [0] * (len(results) + len(parts))
    schedule = [
        (place, part.n_bytes, [(i, *looks[i]) for i in part.results], steps[part.first : part.end])
        for place, part in enumerate(parts, len(results))
    ]

    def repeat(addresses):
        if kept and capturing():
            return None
        made = none_made[:]
        addresses += nowhere
        for place, n_bytes, needed, launches in schedule:
            for i, shape, strides, dtype in needed:
                x = made[i] = empty(shape, strides, dtype=dtype, device=device)
                addresses[n_inputs + i] = x.data_ptr()
            if n_bytes:
                space = empty((n_bytes,), (1,), dtype=byte, device=device)
                addresses[n_inputs + place] = space.data_ptr()
            for launch, values, places in launches:
                for i, base, offset in places:
                    values[i] = addresses[base] + offset
                launch(values)
            space = None  # what is made next may lie there: launches follow one another
        return tuple(made) if several else made[0]

    return repeat


def _place(array, stretches):
    """(base, offset) of an array that a launch was given; None if its memory is not the run's."""
    address = array.data_ptr()
    for start, end, base, offset in stretches:
        if start <= address < end or address == start:
            return base, offset + address - start
    return None


def _bytes(x):
    """Of the stretch of memory from a tensor's first element to its last."""
    if not x.numel():
        return 0
    last = sum((extent - 1) * stride for extent, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()
