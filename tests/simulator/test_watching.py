"""What is watched: accesses without brackets, the interleaved order, and how findings are told."""

import re

import numpy as np
import pytest

from course_lib import simulator
from course_lib.simulator import cuda
from course_lib.simulator.engine.options import ORDERS

BODY = np.dtype([("mass", np.float32), ("place", np.float32, (3,))])
N = 8


def sanitized(kernel, grid, block, *args, **options):
    with simulator.options(**options), simulator.sanitize() as report:
        kernel[grid, block](*args)
    return report


@cuda.jit
def by_loop(x, y):
    for value in x:
        y[0] += value


@cuda.jit
def by_enumerate(x, y):
    for place, value in enumerate(x):
        y[0] += value
        y[1] = place


@cuda.jit
def by_zip(x, y):
    for one, other in zip(x, x[::-1]):  # noqa: B905
        y[0] += (one + other) / 2


@cuda.jit
def by_next(x, y):
    following = iter(x)
    for _ in range(x.size):
        y[0] += next(following)


@cuda.jit
def by_sum(x, y):
    y[0] = x.sum()


@cuda.jit
def by_function(x, y):
    y[0] = np.sum(x)


@cuda.jit
def by_builtin(x, y):
    y[0] = sum(x)


@cuda.jit
def by_flat(x, y):
    for value in x.reshape(2, 4).T.flat:  # not contiguous
        y[0] += value


@cuda.jit
def by_ndenumerate(x, y):
    for (row, column), value in np.ndenumerate(x.reshape(2, 4)):
        y[0] += value
        y[1] = row * 4 + column


@cuda.jit
def by_nditer(x, y):
    for value in np.nditer(x):
        y[0] += value.item()


@cuda.jit
def by_unpacking(x, y):
    a, b, c, d = x[:4]
    (e, f), (g, h) = x.reshape(4, 2)[2:]
    y[0] = a + b + c + d + e + f + g + h


@cuda.jit
def by_membership(x, y):
    if 100 not in x:
        y[0] = 28


ALL = [by_loop, by_enumerate, by_zip, by_next, by_sum, by_function, by_builtin, by_flat,
       by_ndenumerate, by_nditer, by_unpacking, by_membership]


@pytest.mark.parametrize("kernel", ALL)
def test_every_element_is_seen_once_and_the_result_is_the_same(kernel):
    x = np.arange(N, dtype=np.float32)
    plain, watched = np.zeros(2, np.float32), np.zeros(2, np.float32)
    kernel[1, 1](x, plain)
    assert not sanitized(kernel, 1, 1, x, watched)
    with simulator.trace() as trace:
        kernel[1, 1](x, np.zeros(2, np.float32))
    assert plain[0] == watched[0] == x.sum()
    loads = sum(site.requests for site in trace.sites if site.op == "load" and "y" not in
                site.source)
    assert loads == (2 * N if kernel is by_zip else N)
    moved = np.concatenate([site.addresses[:, 0] - site.base for site in trace.sites
                            if site.op == "load" and "y" not in site.source])
    assert set(moved) == set(range(0, 4 * N, 4))


def test_fields_are_traced_with_their_own_sizes():
    @cuda.jit
    def kernel(x):
        i = cuda.threadIdx.x
        x[i].mass += x[i]["place"][2]
        x[i].place[0] = x.mass[i]

    x = np.zeros(N, BODY)
    x["place"] = 5
    with simulator.trace() as trace:
        kernel[1, N](x)
    assert (x["mass"] == 5).all() and (x["place"] == [[5, 5, 5]]).all()
    counted = {(site.source, site.op): (site.requests, site.size) for site in trace.sites}
    assert counted == {
        ("x[i].mass", "load"): (1, 4), ("x[i].mass", "store"): (1, 4),
        ("x[i]['place'][2]", "load"): (1, 4), ("x[i].place[0]", "store"): (1, 4),
        ("x.mass[i]", "load"): (1, 4)}


def test_what_a_record_is_called_in_a_finding():
    @cuda.jit
    def kernel(x):
        own = x[0]
        own.mass = cuda.threadIdx.x
        x[0].place[1] = cuda.threadIdx.x

    first, second = sanitized(kernel, 1, 2, np.full(1, -1).astype(BODY))
    assert "race on global `own.mass`" in first.message
    assert "race on global `x[0].place[1]`" in second.message


def test_records_as_arguments_and_in_device_functions():
    @cuda.jit(device=True)
    def heavier(body, by):
        body.mass += by
        return body.mass

    @cuda.jit
    def kernel(one, x, y):
        y[0] = heavier(x[1], one.mass)
        y[1] = heavier(x[1], one["mass"])

    one, x, y = np.ones(1, BODY)[0], np.zeros(2, BODY), np.zeros(2, np.float32)
    assert not sanitized(kernel, 1, 1, one, x, y)
    assert y.tolist() == [1, 2] and x["mass"].tolist() == [0, 2]
    assert sanitized(kernel, 1, 2, one, x, np.zeros(2)).kinds() == ["race"]


def test_a_whole_array_read_outside_of_its_rows_is_told():
    @cuda.jit
    def kernel(x, y):
        for value in x[cuda.threadIdx.x]:
            y[0] += value

    assert not sanitized(kernel, 1, 1, np.zeros((2, 2)), np.zeros(1))
    report = sanitized(kernel, 1, 3, np.zeros((2, 2)), np.full(1, 7.0))
    assert "out-of-bounds" in report.kinds()


# -- the order in which all load before one stores -------------------------------------------------


@cuda.jit(device=True)
def counted(c):
    c[0] = c[0] + 1
    return c[0]


@cuda.jit
def lost_in_place(c):
    c[0] += 1


@cuda.jit
def lost_in_a_function(c):
    counted(c)


@cuda.jit
def lost_with_hints(c):
    cuda.stcg(c, 0, cuda.ldcg(c, 0) + 1)


@cuda.jit
def lost_by_two_atomics(c):
    cuda.atomic.exch(c, 0, cuda.atomic.add(c, 0, 0) + 1)


@cuda.jit
def counted_atomically(c):
    cuda.atomic.add(c, 0, 1)


@cuda.jit
def counted_under_a_lock(c):
    if cuda.threadIdx.x == 0:
        while cuda.atomic.cas(c, 1, 0, 1) != 0:
            cuda.nanosleep(np.uint32(20))
        cuda.threadfence()
        c[0] += 4
        cuda.threadfence()
        cuda.atomic.exch(c, 1, 0)


@cuda.jit
def counted_between_barriers(c):
    for turn in range(4):
        if cuda.threadIdx.x == turn:
            c[2 + cuda.blockIdx.x] += 1
        cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(c, 0, c[2 + cuda.blockIdx.x])


@pytest.mark.parametrize("kernel, left", [
    (lost_in_place, 1), (lost_in_a_function, 1), (lost_with_hints, 1), (lost_by_two_atomics, 1),
    (counted_atomically, 12),
    (counted_under_a_lock, 12), (counted_between_barriers, 12)])
def test_the_interleaved_order_shows_lost_updates(kernel, left):
    for order, count in (("forward", 12), ("reverse", 12), ("interleaved", left)):
        c = np.zeros(8, np.int32)
        with simulator.options(order=order):
            kernel[3, 4](c)
        assert c[0] == count, order
        races = left == 1 and kernel is not lost_by_two_atomics  # atomics alone never race
        assert bool(sanitized(kernel, 3, 4, np.zeros(8, np.int32), order=order)) == races


def test_the_interleaved_order_of_plain_kernels_checks_bounds():
    @cuda.jit
    def kernel(x):
        x[cuda.threadIdx.x] = 1

    x = np.zeros(4)
    with pytest.raises(simulator.OutOfBounds, match=r"index 4, but x has shape"):
        simulator.run(kernel, 1, 5, x, order="interleaved")
    simulator.run(kernel, 1, 4, x, order="interleaved")
    assert (x == 1).all()


def test_an_unknown_order_names_the_four():
    with pytest.raises(ValueError, match="forward, reverse, random, interleaved; got 'sideways'"):
        simulator.run(lost_in_place, 1, 1, np.zeros(1), order="sideways")


# -- barriers --------------------------------------------------------------------------------------


@cuda.jit(device=True)
def inner():
    cuda.syncthreads()


@cuda.jit(device=True)
def outer(times):
    for _ in range(times):
        inner()


def test_barriers_are_told_by_the_outermost_place_where_threads_part():
    @cuda.jit
    def calls(x):
        if x[cuda.threadIdx.x] > 0:
            outer(2)
        else:
            outer(2)

    @cuda.jit
    def rounds():
        for k in range(4):
            if k % 2 == cuda.threadIdx.x % 2:
                outer(1)

    @cuda.jit
    def the_same():
        for _ in range(2):
            outer(3)

    (finding,) = sanitized(calls, 1, 2, np.arange(2))
    assert finding.kind == "barrier-divergence" and "leads to while thread" in finding.message
    assert finding.source == "outer(2)"
    (finding,) = sanitized(rounds, 1, 2)
    assert "in round 1 of the loop while thread 1 waits there in round 2" in finding.message
    assert not sanitized(the_same, 2, 40)


def test_a_grid_barrier_counts_every_thread():
    @cuda.jit
    def kernel(first, threads):
        grid = cuda.cg.this_grid()
        if cuda.blockIdx.x >= first and cuda.threadIdx.x < threads:
            grid.sync()

    assert not sanitized(kernel, 3, 64, 0, 64)
    assert sanitized(kernel, 3, 64, 0, 32).kinds() == ["barrier-mismatch"]
    (finding,) = sanitized(kernel, 3, 64, 1, 64)
    assert "no thread of block 0 reaches the grid barrier" in finding.message


# -- waiting ---------------------------------------------------------------------------------------


def test_a_poll_that_ends_by_itself_is_none():
    @cuda.jit
    def kernel(x, y):
        while x[0] == 0:
            if y[1] == 0:
                return
            if y[1] > 5:
                break
            return
        table = cuda.local.array(1, np.int32)
        table[0] = 0
        while table[0] != 0:
            pass
        while x.shape[0] > 1 and x.size < 1:
            pass

    assert not sanitized(kernel, 1, 1, np.zeros(1, np.int32), np.zeros(2, np.int32))
    assert not sanitized(kernel, 1, 1, np.ones(1, np.int32), np.zeros(2, np.int32))


def test_a_store_after_a_fence_tells_of_what_was_done_before():
    """A lock that is given up by plain stores: they race with the atomics, what it guards doesn't.
    """
    @cuda.jit
    def kernel(lock, total, fenced):
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            cuda.nanosleep(np.uint32(20))
        if fenced:
            cuda.threadfence()
        total[0] += 1
        cuda.threadfence()
        lock[0] = 0

    for order in ORDERS:
        arrays = [np.zeros(1, np.int32), np.zeros(1, np.int32)]
        report = sanitized(kernel, 4, 1, *arrays, 1, order=order)
        assert [re.search(r"on global `(.*?)`.*; (.*) on", finding.message).groups()
                for finding in report] == [("lock[0]", "use cuda.atomic.exch")]
        assert arrays[1][0] == 4
    unfenced = sanitized(kernel, 4, 1, *arrays, 0)
    assert any("global `total[0]`" in finding.message for finding in unfenced)
