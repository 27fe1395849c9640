"""The sanitizer's report, its rules one by one, and what it leaves alone."""

import ctypes
import linecache
import math

import ml_dtypes
import numpy as np
import pytest

from course_lib import simulator
from course_lib.simulator import cuda
from course_lib.simulator.errors import SourceMissing
from course_lib.simulator.observe import real
from course_lib.simulator.observe.observer import Observer, observing
from course_lib.simulator.observe.real import observing_with


def sanitized(kernel, grid, block, *args, shared=0, **options):
    with simulator.options(**options), simulator.sanitize() as report:
        kernel[grid, block, 0, shared](*args)
    return report


def line_of(kernel, text):
    import inspect

    lines, first = inspect.getsourcelines(kernel.py_func)
    return next(first + k for k, line in enumerate(lines) if text in line)


@cuda.jit
def racing(x, y):
    tile = cuda.shared.array(64, np.float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    y[tid] = tile[63 - tid]


def test_a_finding_says_everything():
    report = sanitized(racing, 1, 64, np.ones(64, np.float32), np.zeros(64, np.float32))
    (finding,) = report
    assert report and len(report) == 1 and report.kinds() == ["race"]
    assert finding.kind == "race"
    assert finding.line == line_of(racing, "y[tid]")
    assert finding.source == "y[tid] = tile[63 - tid]"
    assert finding.filename == __file__
    assert finding.block == 0 and finding.kernel == "racing"
    assert set(finding.threads) == {31, 32}
    assert finding.count == 64
    write = line_of(racing, "tile[tid] =")
    assert finding.lines == (write, write + 1)
    assert finding.message == (
        f"threads 32 and 31 race on shared `tile[32]`: line {write} writes it while line "
        f"{write + 1} reads it, with no barrier between; put cuda.syncthreads() between them")
    assert str(finding).startswith(f"race, line {finding.line}: threads")


@cuda.jit
def scaled(x, scale, y):
    i = cuda.grid(1)
    y[i] = x[i] * scale[i]


@pytest.mark.parametrize(
    "n, sizes, array, words",
    [
        (8, (6, 6, 6), "x", "guard it: only where the index is below x.size (here 6)"),
        # x has room for the thread: `scale[i]` is a wrong index, which a guard would hide.
        (8, (8, 1, 8), "scale", "look at how this index is computed"),
    ],
)
def test_a_guard_is_advised_only_where_no_array_has_room(n, sizes, array, words):
    arrays = [np.ones(size, np.float32) for size in sizes]
    (message,) = (f.message for f in sanitized(scaled, 1, n, *arrays) if f"`{array}[" in f.message)
    assert message.endswith(words)


@cuda.jit
def turned(x, y):
    row, col = cuda.grid(2)
    y[row, col] = x[col, row] if row < x.shape[0] and col < x.shape[1] else 0


def test_a_choice_is_a_guard():
    x = np.ones((3, 2), np.float32)
    (message,) = (f.message for f in sanitized(turned, 1, (3, 2), x, x.copy()))
    assert message.endswith("look at how this index is computed")


def test_nothing_found_is_false():
    @cuda.jit
    def kernel(x):
        x[cuda.grid(1)] += 1

    x = np.zeros(40, np.int32)
    report = sanitized(kernel, 4, 10, x)
    assert not report and str(report) == "nothing found"
    assert (x == 1).all()


def test_a_read_outside_gives_nan_and_a_write_is_dropped():
    @cuda.jit
    def kernel(x, y):
        i = cuda.grid(1)
        y[i] = x[i - 1]
        y[i + 100] = 7
        x[i, 0] if i > 99 else 0

    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    report = sanitized(kernel, 1, 4, x, y)
    assert report.kinds() == ["out-of-bounds"]
    assert len(report) == 2
    assert math.isnan(y[0]) and (y[1:] == 1).all()
    assert report.findings[0].message.startswith("thread 0 of block 0 reads `x[-1]`")


def test_atomics_outside_are_dropped_too():
    @cuda.jit
    def kernel(x):
        cuda.atomic.add(x, cuda.threadIdx.x, 1)

    x = np.zeros(3, np.int32)
    report = sanitized(kernel, 1, 4, x)
    assert report.kinds() == ["out-of-bounds"]
    assert x.tolist() == [1, 1, 1]


def test_without_the_sanitizer_bounds_and_deadlocks_raise_again():
    @cuda.jit
    def outside(x):
        x[cuda.threadIdx.x] = 1

    @cuda.jit
    def stuck(x):
        while cuda.atomic.add(x, 0, 0) == 0:
            cuda.nanosleep(1)

    x = np.zeros(2, np.int32)
    with simulator.options(max_steps=5000):
        assert sanitized(outside, 1, 3, x)
        with pytest.raises(simulator.OutOfBounds):
            outside[1, 3](x)
        x[:] = 0
        assert sanitized(stuck, 1, 1, x, max_steps=5000).kinds() == ["deadlock"]
        with pytest.raises(simulator.Deadlock):
            stuck[1, 1](x)


def test_other_errors_still_raise():
    @cuda.jit
    def kernel(x):
        x[0] = undefined_name  # noqa: F821

    with pytest.raises(NameError), simulator.sanitize():
        kernel[1, 1](np.zeros(1))


def test_threads_and_blocks_have_three_indices_where_there_are_more_dimensions():
    @cuda.jit
    def kernel(x):
        x[0] = cuda.threadIdx.y + 10 * cuda.threadIdx.x

    (finding,) = sanitized(kernel, (1, 1, 1), (2, 2), np.full(1, -1))
    assert finding.threads == ((0, 0, 0), (1, 0, 0))
    (finding,) = sanitized(kernel, (1, 2), 1, np.full(1, 5)) or [None]
    assert finding is None  # both blocks write the same value


def test_one_report_for_several_launches_and_nested_reports():
    @cuda.jit
    def kernel(x):
        x[0] = cuda.threadIdx.x

    with simulator.sanitize() as outer:
        kernel[1, 2](np.zeros(1))
        with simulator.sanitize() as inner:
            kernel[1, 2](np.zeros(1))
    assert len(outer) == len(inner) == 1
    assert outer.findings[0].count == 2 and inner.findings[0].count == 1


def test_arguments_that_overlap_are_one_memory():
    @cuda.jit
    def shift(x, y):
        i = cuda.grid(1)
        y[i] = x[i]

    data = np.arange(9, dtype=np.float32)
    assert not sanitized(shift, 1, 8, data[:8].copy(), data[1:])
    report = sanitized(shift, 1, 8, data[:8], data[1:])
    assert report.kinds() == ["race"]


def test_views_and_types_of_other_sizes_are_compared_by_the_byte():
    @cuda.jit
    def kernel(words, halves):
        if cuda.threadIdx.x == 0:
            words[1] = 1
        else:
            halves[2 + cuda.blockDim.y] = 7

    words = np.zeros(4, np.int32)
    report = sanitized(kernel, 1, 2, words, words.view(np.int16))
    assert report.kinds() == ["race"]

    @cuda.jit
    def rows(x):
        row = x[cuda.threadIdx.x]
        row[0] = row[1]
        x[cuda.threadIdx.x, 1:] = 3

    assert not sanitized(rows, 1, 4, np.zeros((4, 3)))


def test_small_index_types_do_not_wrap():
    @cuda.jit
    def kernel(x, y):
        y[x[cuda.grid(1)], x[0]] += 1

    x = np.array([200, 201, 202], np.uint8)
    y = np.zeros((300, 300), np.int16)
    assert not sanitized(kernel, 1, 3, x, y)
    assert y.sum() == 3 and y[202, 200] == 1


def test_one_atomic_does_not_make_the_others_order_it():
    """Only the writer's last access is atomic: the plain one before it still races."""
    @cuda.jit
    def kernel(x):
        if cuda.threadIdx.x == 0:
            x[0] = 5
            cuda.atomic.add(x, 0, 1)
        else:
            cuda.atomic.add(x, 0, 1)

    for order in ("forward", "reverse"):
        assert sanitized(kernel, 1, 2, np.zeros(1, np.int32), order=order).kinds() == ["race"]


def test_an_earlier_readers_block_is_not_forgotten():
    """Block 1 writes what both blocks have read: the first reader counts."""
    @cuda.jit
    def kernel(x, y):
        y[cuda.blockIdx.x] = x[0]
        if cuda.blockIdx.x == 1:
            x[0] = 9

    report = sanitized(kernel, 2, 1, np.zeros(1), np.zeros(2))
    assert report.kinds() == ["race-between-blocks"]
    assert sorted(report.findings[0].block) == [0, 1]


@cuda.jit
def counted(x, counts):
    counts[x[cuda.grid(1)]] = counts[x[cuda.grid(1)]] + 1


@cuda.jit
def shifted(x, y):
    i = cuda.grid(1)
    x[i] = x[i + 1]


@cuda.jit
def sorted_by_pairs(x, _):
    kept = cuda.shared.array(64, np.int32)
    tid = cuda.threadIdx.x
    kept[tid] = x[tid]
    cuda.syncthreads()
    far = 32
    while far > 0:
        other = tid ^ far
        if other > tid:
            if kept[tid] > kept[other]:
                kept[tid], kept[other] = kept[other], kept[tid]
        far >>= 1


@cuda.jit
def relaxed_in_place(x, y):
    grid, i = cuda.cg.this_grid(), cuda.grid(1)
    for _ in range(2):
        y[i] = x[i + 1]
        grid.sync()
        x[i] = y[i]


@pytest.mark.parametrize(
    "kernel, grid, block, words",
    [
        (sorted_by_pairs, 1, 64, "into the loop, after line {} and outside the `if` of line"),
        (relaxed_in_place, 2, 4, "put cuda.cg.this_grid().sync() after line {}, before the loop"),
    ],
)
def test_a_barrier_is_advised_where_all_threads_reach_it(kernel, grid, block, words):
    last = line_of(kernel, "kept[other], kept[tid]" if block == 64 else "x[i] = y[i]")
    values = np.arange(64, 0, -1, dtype=np.int32)
    report = sanitized(kernel, grid, block, values, np.zeros_like(values))
    assert report and all(words.format(last) in each.message for each in report)


@pytest.mark.parametrize(
    "kernel, grid, kind, cure",
    [
        (counted, 1, "race", "use cuda.atomic.add or its kin"),
        (counted, 2, "race-between-blocks", "use cuda.atomic.add or its kin"),
        (shifted, 1, "race", "cuda.syncthreads(), which orders the threads of one block alone"),
        (shifted, 2, "race-between-blocks", "or split the kernel into two launches"),
    ],
)
def test_no_barrier_is_advised_for_what_it_does_not_order(kernel, grid, kind, cure):
    """Two lines that race within a block and between blocks are told once, as the latter."""
    report = sanitized(kernel, grid, 4, np.zeros(9, np.int32), np.zeros(9, np.int32))
    assert report.kinds() == [kind] and all(each.message.endswith(cure) for each in report)


def test_accesses_in_a_twin_belong_to_the_callers_line():
    def twin(array, i):
        values = simulator.read_elements(array, i, 2)
        simulator.write_elements(array, 0, values)

    intrinsic = object()
    simulator.register_twin(intrinsic, twin)

    @cuda.jit
    def kernel(x):
        intrinsic(x, 2 * cuda.threadIdx.x)

    report = sanitized(kernel, 1, 2, np.arange(4.0))
    assert report.kinds() == ["race"]
    assert {finding.line for finding in report} == {line_of(kernel, "intrinsic(x")}


def test_a_device_function_is_reported_at_its_own_line():
    @cuda.jit(device=True)
    def spread(array, tid):
        array[0] = tid

    @cuda.jit
    def kernel(x):
        spread(x, cuda.threadIdx.x)

    (finding,) = sanitized(kernel, 1, 2, np.full(1, -1))
    assert finding.line == line_of(spread, "array[0]")
    assert finding.kernel == "kernel"


def test_chained_stores_are_watched():
    @cuda.jit
    def kernel(x, y):
        i = cuda.threadIdx.x
        y[i] = z = x[i] + 1
        x[i], y[i] = y[i], z
        y[i] += sum((x[0], x[1], x[2]))

    report = sanitized(kernel, 1, 3, np.zeros(3), np.zeros(3))
    assert report.kinds() == ["race"]
    alone = sanitized(kernel, 1, 1, np.zeros(3), np.zeros(3))
    assert not alone


@pytest.mark.parametrize("watch", [simulator.sanitize, simulator.trace])
def test_a_kernel_without_source_is_refused_by_name(jit, watch):
    def kernel(x):
        x[0] = cuda.threadIdx.x
        cuda.syncthreads()

    made = jit(kernel)
    made[1, 2](np.zeros(1))  # a plain launch runs it
    if jit.path == "greenlets":
        with pytest.raises(SourceMissing, match="kernel cannot be watched.* into a file or a note"):
            with watch():
                made[1, 2](np.zeros(1))
    else:
        with watch() as seen:
            made[1, 2](np.zeros(1))
        assert len(seen.sites if watch is simulator.trace else seen.findings) == 1


def test_a_device_function_without_source_is_refused_by_name():
    space = {}
    exec("def hidden(x):\n    x[0] = 1", space)
    hidden = cuda.jit(device=True)(space["hidden"])

    @cuda.jit
    def called(x):
        hidden(x)

    @cuda.jit
    def passed_on(x, choose):
        function = hidden if choose else None
        function(x)

    for kernel, arguments in ((called, ()), (passed_on, (1,))):
        x = np.zeros(1)
        kernel[1, 1](x, *arguments)
        assert x[0] == 1
        with pytest.raises(SourceMissing, match="hidden cannot be watched"):
            sanitized(kernel, 1, 1, x, *arguments)


def test_a_file_that_has_changed_since_is_told_apart(tmp_path):
    path = tmp_path / "edited.py"
    path.write_text("def kernel(x):\n    x[0] = 1\n")
    space = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    path.write_text("def kernel(x):\n    x[0] = 2.5 * x[1]\n")
    with pytest.raises(SourceMissing, match="has changed since"):
        sanitized(cuda.jit(space["kernel"]), 1, 1, np.zeros(2))


def test_what_is_typed_at_the_prompt_of_newer_pythons_is_watched(monkeypatch):
    text = "\n@cuda.jit\ndef kernel(x):\n    x[0] = cuda.threadIdx.x\n"
    space = {"cuda": cuda}
    exec(compile(text, "<python-input-3>", "exec"), space)
    codes = {space["kernel"].py_func.__code__: text.splitlines(keepends=True)}
    monkeypatch.setattr(linecache, "_getlines_from_code", lambda code: codes.get(code, []),
                        raising=False)
    (finding,) = sanitized(space["kernel"], 1, 2, np.full(1, -1))
    assert (finding.kind, finding.line) == ("race", 4)


def test_observers_see_every_event_once():
    events = []

    class Everything(Observer):
        wants_branches = True

        def wants_block(self, block):
            return block.index[0] == 0

        def on_launch(self, launch):
            events.append(("launch", launch.name))

        def on_load(self, thread, site, memory, offset, size):
            events.append(("load", site.text, memory.name, offset, size))

        def on_store(self, thread, site, memory, offset, size):
            events.append(("store", site.text, memory.space, offset, size))

        def on_branch(self, thread, site, taken):
            events.append(("branch", site.text, taken))

        def on_barrier(self, thread, site):
            events.append(("barrier", thread.tid))

        def on_exit(self, thread):
            events.append(("exit", thread.tid))

    @cuda.jit
    def kernel(x):
        tile = cuda.shared.array(1, np.int16)
        if x[1] > 0:
            tile[0] = x[1]
        cuda.syncthreads()

    with observing_with(Everything()), simulator.sanitize() as report:
        assert observing()
        kernel[2, 1](np.arange(2, dtype=np.int32))
    assert not observing()
    assert not report
    assert events == [
        ("launch", "kernel"), ("load", "x[1]", "x", 4, 4), ("branch", "x[1] > 0", True),
        ("load", "x[1]", "x", 4, 4), ("store", "tile[0]", "shared", 0, 2), ("barrier", 0),
        ("exit", 0)]


def test_memory_has_the_addresses_of_a_gpu():
    memories = {}

    class Addresses(Observer):
        def on_load(self, thread, site, memory, offset, size):
            memories[memory.name] = memory

    @cuda.jit
    def kernel(x, y):
        x[0] + y[0]

    base = np.ones(100, np.float32)
    with observing_with(Addresses()):
        kernel[1, 1](base[3:], np.ones(5))
    assert memories["x"].address % 512 == 12
    assert memories["y"].address % 512 == 0
    # They come in the order in which the host happens to keep them, and never overlap.
    first, second = sorted(memories.values(), key=lambda memory: memory.address)
    assert second.address >= first.address + first.nbytes


class FakeDeviceArray:
    """What the simulator needs to know of an array on a GPU."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.__cuda_array_interface__ = array.__array_interface__


class FakeDeviceBytes:
    """Memory of a FakeDeviceArray."""

    def __init__(self, address, size):
        self.bytes = np.frombuffer((ctypes.c_byte * size).from_address(address), np.uint8)

    def copy_to_host(self):
        return self.bytes.copy()

    def copy_to_device(self, host):
        self.bytes[...] = host


def test_device_arrays_are_copied_there_and_back(monkeypatch):
    @cuda.jit
    def kernel(x, parts, y):
        i = cuda.grid(1)
        y[i] = x[i] + parts[0][i]
        x[3 - i] = 0

    monkeypatch.setattr(real, "device_bytes", FakeDeviceBytes)
    device, other = FakeDeviceArray(np.arange(4.0)), FakeDeviceArray(np.ones(4))
    host = np.zeros(4)
    with simulator.sanitize() as report:
        simulator.run_on_copies(kernel, 1, 4, (device, (device, 3), host))
    assert report.kinds() == ["race"]  # the two arguments are one array in the copy as well
    assert host[:2].tolist() == [0, 2]
    assert (device.array == 0).all() and (other.array == 1).all()


def test_views_of_one_device_array_share_the_copy(monkeypatch):
    @cuda.jit
    def shift(left, right):
        i = cuda.grid(1)
        left[i] = right[i]

    @cuda.jit
    def mark(view):
        i = cuda.grid(1)
        view[i, 0] = 10 + i

    monkeypatch.setattr(real, "device_bytes", FakeDeviceBytes)
    base = np.arange(12, dtype=np.float32)
    views = FakeDeviceArray(base[:3]), FakeDeviceArray(base[1:4])
    with simulator.sanitize() as report:
        simulator.run_on_copies(shift, 1, 3, views)
    assert report.kinds() == ["race"]
    assert base.tolist() == [1, 2, 3, *range(3, 12)]
    # From the end, transposed and with gaps; what lies between stays as it is.
    simulator.run_on_copies(mark, 1, 2, (FakeDeviceArray(base[:3:-1].reshape(4, 2).T[:, 1::2]),))
    assert base.tolist() == [1, 2, 3, 3, 4, 5, 6, 7, 11, 10, 10, 11]


def test_device_arrays_of_any_layout_look_the_same_in_the_copy(monkeypatch):
    monkeypatch.setattr(real, "device_bytes", FakeDeviceBytes)
    record = np.dtype([("a", np.int32), ("b", np.float64)])
    base = np.arange(24, dtype=np.int64).reshape(2, 3, 4)
    for array in (base, base.T, base[:, ::-1, ::2], base[1, 2, 3:], np.array(5.0), base[:0],
                  np.zeros(3, record), base.astype(ml_dtypes.bfloat16)):
        given = FakeDeviceArray(array)
        copy = real._Copies((1, (given,))).on_host(given)
        assert copy.dtype == array.dtype and copy.shape == array.shape
        assert 0 in array.shape or copy.strides == array.strides
        assert (copy == array).all() and not np.shares_memory(copy, array)


def test_tensors_over_one_storage_share_the_copy():
    torch = pytest.importorskip("torch")
    from course_lib.simulator.observe.real import _Copies

    base = torch.arange(12, dtype=torch.bfloat16)
    copies = _Copies()
    rows, tail = copies.tensor(base.view(3, 4).t()), copies.tensor(base[8:])
    assert torch.equal(rows, base.view(3, 4).t()) and rows.stride() == (1, 4)
    rows[3, 2] = 99
    assert tail[3] == 99 and base[11] == 11
    copies.write_back()
    assert base[11] == 99


def test_an_index_that_is_wrong_in_another_way_still_raises():
    @cuda.jit
    def too_many(x):
        x[0, 0] = 1

    with pytest.raises(IndexError, match="too many"):
        sanitized(too_many, 1, 1, np.zeros(3))


def test_a_row_outside_is_garbage():
    @cuda.jit
    def kernel(x):
        row = x[cuda.threadIdx.x]
        row[0] += 1

    x = np.zeros((2, 3))
    report = sanitized(kernel, 1, 3, x)
    assert report.kinds() == ["out-of-bounds"]
    assert x.tolist() == [[1, 0, 0], [1, 0, 0]]


def test_a_device_function_called_twice_needs_a_barrier_at_its_end():
    @cuda.jit(device=True)
    def pass_on(tile, tid, value):
        tile[tid] = value
        cuda.syncthreads()
        return tile[(tid + 1) % 64]

    @cuda.jit
    def kernel(x):
        tile = cuda.shared.array(64, np.float32)
        tid = cuda.threadIdx.x
        x[tid] = pass_on(tile, tid, pass_on(tile, tid, x[tid]))

    (finding,) = sanitized(kernel, 1, 64, np.ones(64, np.float32))
    assert finding.line == line_of(pass_on, "return tile")
    assert "pass_on is called again" in finding.message


def test_a_flag_stored_after_a_fence_and_waited_for_is_no_race():
    @cuda.jit
    def fenced(flag, data, out):
        if cuda.blockIdx.x == 0:
            data[0] = 42
            cuda.threadfence()
            flag[0] = 1
        else:
            while flag[0] == 0:
                cuda.nanosleep(np.uint32(20))
            cuda.threadfence()
            out[0] = data[0]

    @cuda.jit
    def unfenced(flag, data, out):
        if cuda.blockIdx.x == 0:
            data[0] = 42
            flag[0] = 1
        else:
            while flag[0] == 0:
                cuda.nanosleep(np.uint32(20))
            out[0] = data[0]

    for order in ("forward", "reverse"):
        arrays = [np.zeros(1, np.int32) for _ in range(3)]
        assert not sanitized(fenced, 2, 1, *arrays, order=order)
        assert arrays[2][0] == 42
        arrays = [np.zeros(1, np.int32) for _ in range(3)]
        report = sanitized(unfenced, 2, 1, *arrays, order=order)
        assert report.kinds() == ["race-between-blocks"]
        assert all("cuda.threadfence()" in finding.message for finding in report)


@pytest.mark.parametrize("order", ["forward", "reverse", "random", "interleaved"])
@pytest.mark.parametrize("before, after, reader, clean", [
    (0, 1, 0, True), (0, 2, 0, True), (0, 0, 1, True), (0, 0, 0, False), (1, 0, 0, False),
    (0, 3, 0, False)], ids=["fence", "system", "readers", "none", "before", "block"])
@pytest.mark.parametrize("nested", [False, True])
def test_who_waits_for_a_flag_passes_a_fence_before_others_read(
        before, after, reader, clean, nested, order):
    @cuda.jit
    def by_condition(flag, data, out, before, after, reader):
        t = cuda.threadIdx.x
        if cuda.blockIdx.x == 0:
            data[t] = 7
            cuda.syncthreads()
            if t == 0:
                cuda.threadfence()
                cuda.atomic.add(flag, 0, 1)
        else:
            if t == 0:
                if before == 1:
                    cuda.threadfence()
                while cuda.atomic.add(flag, 0, 0) < 1:
                    pass
                if after == 1:
                    cuda.threadfence()
                if after == 2:
                    cuda.threadfence_system()
                if after == 3:
                    cuda.threadfence_block()
            cuda.syncthreads()
            if reader == 1:
                cuda.threadfence()
            out[t] = data[t]

    @cuda.jit(device=True)
    def wait(flag):
        if cuda.threadIdx.x == 0:
            while True:
                seen = cuda.atomic.cas(flag, 0, -1, -1)
                if seen >= 1:
                    break

    @cuda.jit
    def by_break(flag, data, out, before, after, reader):
        t = cuda.threadIdx.x
        if cuda.blockIdx.x == 0:
            data[t] = 7
            cuda.threadfence()
            cuda.syncthreads()
            if t == 0:
                cuda.atomic.exch(flag, 0, 1)
        else:
            if before == 1:
                cuda.threadfence()
            wait(flag)
            if after == 1:
                cuda.threadfence()
            if after == 2:
                cuda.threadfence_system()
            if after == 3:
                cuda.threadfence_block()
            cuda.syncthreads()
            if reader == 1:
                cuda.threadfence()
            out[t] = data[t]

    kernel = by_break if nested else by_condition
    arrays = [np.zeros(1, np.int32), np.zeros(8, np.int32), np.zeros(8, np.int32)]
    report = sanitized(kernel, 2, 8, *arrays, before, after, reader, order=order, seed=1)
    assert (arrays[2] == 7).all()
    if clean:
        assert not report, report
        return
    (finding,) = report
    lines = [line_of(kernel, "data[t] = 7"), line_of(kernel, "out[t] = data[t]"),
             line_of(wait, "cas") if nested else line_of(kernel, "while")]
    assert finding.kind == "race-between-blocks" and finding.lines == tuple(lines)
    assert f"the loop on line {lines[2]} that waits for the flag" in finding.message
    assert "there is no cuda.threadfence()" in finding.message


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("stays", [False, True])
def test_the_last_block_needs_no_fence_after_its_ticket(order, stays):
    """NVIDIA's threadFenceReduction: a ticket is drawn once, and nobody waits for it."""
    @cuda.jit
    def once(x, partial, ticket, y):
        last = cuda.shared.array(1, np.int32)
        t = cuda.threadIdx.x
        if t == 0:
            partial[cuda.blockIdx.x] = x[cuda.blockIdx.x]
            cuda.threadfence()
            last[0] = cuda.atomic.add(ticket, 0, 1) == cuda.gridDim.x - 1
        cuda.syncthreads()
        if last[0] and t == 1:
            for block in range(cuda.gridDim.x):
                y[0] += partial[block]

    @cuda.jit
    def in_a_loop(x, partial, ticket, y):
        item = cuda.shared.array(1, np.int32)
        t = cuda.threadIdx.x
        while True:
            if t == 0:
                cuda.threadfence()
                item[0] = cuda.atomic.add(ticket, 0, 1)
            cuda.syncthreads()
            mine = item[0]
            cuda.syncthreads()
            if mine >= x.size:
                break
            if t == 0:
                partial[mine] = x[mine]
        if mine == x.size + cuda.gridDim.x - 1 and t == 1:
            for k in range(x.size):
                y[0] += partial[k]

    x, y = np.ones(4, np.float32), np.zeros(1, np.float32)
    arrays = x, np.zeros(4, np.float32), np.zeros(1, np.int32), y
    kernel = in_a_loop if stays else once
    report = sanitized(kernel, 4, 32, *arrays, order=order, seed=1)
    assert not report and y[0] == 4, report
