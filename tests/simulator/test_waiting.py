"""Barriers, warp operations, grid groups, spin loops, deadlocks, orders."""

import contextlib
import re

import numpy as np
import pytest

from course_lib import simulator
from course_lib.simulator import Deadlock, SimulatorError, cuda

FULL = 0xFFFFFFFF


def test_exited_threads_do_not_count(jit):
    @jit
    def kernel(x):
        tid = cuda.threadIdx.x
        if tid >= 5:
            return
        cuda.syncthreads()
        x[tid] = 1

    x = np.zeros(8)
    kernel[1, 8](x)
    assert x.sum() == 5


def test_barrier_votes(jit):
    @jit
    def kernel(out):
        tid = cuda.threadIdx.x
        out[tid, 0] = cuda.syncthreads_count(tid % 3 == 0)
        out[tid, 1] = cuda.syncthreads_and(tid < 40)
        out[tid, 2] = cuda.syncthreads_and(tid < 39)
        out[tid, 3] = cuda.syncthreads_or(tid == 7)
        out[tid, 4] = cuda.syncthreads_or(tid == 77)

    out = np.zeros((40, 5))
    kernel[1, 40](out)
    assert (out == [14, 1, 0, 1, 0]).all()


def test_shuffles(jit):
    @jit
    def kernel(out):
        lane = cuda.laneid
        value = np.float32(lane) + 100 * (cuda.threadIdx.x // 32)
        out[cuda.threadIdx.x, 0] = cuda.shfl_sync(FULL, value, 5)
        out[cuda.threadIdx.x, 1] = cuda.shfl_up_sync(FULL, value, 3)
        out[cuda.threadIdx.x, 2] = cuda.shfl_down_sync(FULL, value, 4)
        out[cuda.threadIdx.x, 3] = cuda.shfl_xor_sync(FULL, value, 9)

    out = np.zeros((64, 4))
    kernel[1, 64](out)
    lane, base = np.arange(64) % 32, np.arange(64) // 32 * 100
    assert (out[:, 0] == base + 5).all()
    assert (out[:, 1] == base + np.where(lane >= 3, lane - 3, lane)).all()
    assert (out[:, 2] == base + np.where(lane < 28, lane + 4, lane)).all()
    assert (out[:, 3] == base + (lane ^ 9)).all()


def test_shuffle_from_an_absent_lane_is_undefined():
    @cuda.jit
    def kernel(out):
        out[cuda.threadIdx.x] = cuda.shfl_down_sync(FULL, np.float32(1), 8)

    out = np.zeros(16)
    kernel[1, 16](out)
    assert (out[:8] == 1).all() and np.isnan(out[8:]).all()


def test_votes_and_matches(jit):
    @jit
    def kernel(out):
        lane = cuda.laneid
        out[lane, 0] = cuda.all_sync(FULL, lane < 32)
        out[lane, 1] = cuda.all_sync(FULL, lane < 31)
        out[lane, 2] = cuda.eq_sync(FULL, lane < 0)
        out[lane, 3] = cuda.eq_sync(FULL, lane < 9)
        out[lane, 4] = cuda.match_any_sync(FULL, lane % 4)
        mask, same = cuda.match_all_sync(FULL, 7)
        out[lane, 5], out[lane, 6] = mask, same
        mask, same = cuda.match_all_sync(FULL, lane)
        out[lane, 7], out[lane, 8] = mask, same
        out[lane, 9] = cuda.lanemask_lt()

    out = np.zeros((32, 10), np.int64)
    kernel[1, 32](out)
    lane = np.arange(32)
    assert (out[:, :4] == [1, 0, 1, 0]).all()
    assert (out[:, 4] == 0x11111111 << lane % 4).all()
    assert (out[:, 5:9] == [FULL, 1, 0, 0]).all()
    assert (out[:, 9] == (1 << lane) - 1).all()


def test_a_lane_outside_its_own_mask():
    @cuda.jit
    def kernel():
        cuda.syncwarp(1)

    with pytest.raises(SimulatorError, match="lane 1 calls it with mask 0x00000001"):
        kernel[1, 2]()


def test_grid_sync_across_blocks(jit):
    @jit
    def kernel(x, out):
        group = cuda.cg.this_grid()
        i = cuda.grid(1)
        for step in range(3):
            out[i] = x[x.size - 1 - i] + step
            group.sync()
            x[i] = out[i]
            cuda.cg.this_grid().sync()

    x, out = np.arange(24), np.zeros(24)
    kernel[6, 4](x, out)
    assert (x == np.arange(24)[::-1] + 3).all()


def test_grid_barriers_need_all_blocks_at_once():
    @cuda.jit
    def kernel():
        cuda.cg.this_grid().sync()

    kernel[264, 1024]()
    with pytest.raises(simulator.LaunchError, match="265 blocks .* 264 fit"):
        kernel[265, 1024]()


def test_counting_loops_stay_plain_calls():
    @cuda.jit
    def kernel(x, out):
        i = cuda.grid(1)
        while i < min(x.shape[0], out.size):
            out[i] = x[i]
            i += cuda.gridsize(1)

    out = np.zeros(50)
    kernel[2, 4](np.arange(50.0), out)
    assert (out == np.arange(50)).all() and kernel.program().plain


def test_last_block_and_spin_between_blocks(jit):
    @jit
    def kernel(flag, out):
        if cuda.blockIdx.x == 0:
            if cuda.threadIdx.x == 0:
                while flag[0] != 3:
                    pass
            cuda.syncthreads()
            out[cuda.threadIdx.x] = flag[0]
        elif cuda.threadIdx.x == 0:
            cuda.threadfence()
            cuda.atomic.add(flag, 0, 1)

    flag, out = np.zeros(1, np.int32), np.zeros(4)
    kernel[4, 4](flag, out)
    assert (out == 3).all()


def test_a_loop_that_skips_its_step_waits():
    @cuda.jit
    def kernel(flag, out):
        if cuda.threadIdx.x == 0:
            i = 0
            while i < 3:
                if flag[0] == 0:
                    continue
                i += 1
            out[0] = i
        else:
            flag[0] = 1

    out = np.zeros(1)
    kernel[1, 2](np.zeros(1), out)
    assert out[0] == 3


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_spin_lock(jit, order):
    @jit
    def kernel(lock, total):
        done = False
        while not done:
            if cuda.atomic.cas(lock, 0, 0, 1) == 0:
                old = total[0]
                cuda.nanosleep(10)
                total[0] = old + 1
                cuda.threadfence()
                cuda.atomic.exch(lock, 0, 0)
                done = True

    lock, total = np.zeros(1, np.int32), np.zeros(1)
    with simulator.options(order=order):
        kernel[3, 40](lock, total)
    assert total[0] == 120


def test_deadlock_names_the_lines():
    @cuda.jit
    def kernel():
        if cuda.laneid < 4:
            cuda.syncwarp()
        elif cuda.laneid < 30:
            cuda.syncthreads()

    first = kernel.py_func.__code__.co_firstlineno
    with pytest.raises(Deadlock) as caught:
        kernel[2, 32]()
    text = str(caught.value)
    assert f"threads 0-3 wait for the lanes of mask 0xffffffff at a warp operation " \
           f"at {__file__}:{first + 3}" in text
    assert f"threads 4-29 wait at a block barrier at {__file__}:{first + 5}" in text
    assert "threads 30-31 have exited" in text
    assert "kernel" in text


def test_deadlock_at_the_grid(jit):
    @jit
    def kernel():
        if cuda.blockIdx.x == 0:
            cuda.cg.this_grid().sync()
        elif cuda.laneid:
            cuda.syncwarp(2 if cuda.laneid == 1 else FULL)
            cuda.cg.this_grid().sync()
        else:
            cuda.syncthreads()

    with pytest.raises(Deadlock, match="grid barrier"):
        kernel[2, 2]()


def test_endless_loops_end():
    @cuda.jit
    def waits(flag):
        while flag[0] == 0:
            pass

    @cuda.jit
    def counts(x):
        i = 0
        while i < 10:
            x[0] = i
            i -= 1

    @cuda.jit
    def with_barrier(x):
        width = 4
        while width > 0:
            cuda.syncthreads()
            width -= 0

    for kernel in (waits, counts, with_barrier):
        with simulator.options(max_steps=50_000), pytest.raises(Deadlock) as caught:
            kernel[1, 2](np.zeros(1))
        assert "endless loop" in str(caught.value)
        assert f"{__file__}:" in str(caught.value)


@pytest.mark.parametrize("order", ["forward", "reverse", "random", "interleaved"])
@pytest.mark.parametrize("sanitized", [False, True])
@pytest.mark.parametrize("more, end", [
    (0, ""), (1, "none of them changes|for ever|iterations passed|did not all leave")])
def test_all_threads_of_a_block_may_wait(order, sanitized, more, end):
    @cuda.jit
    def kernel(arrived, out, more):
        block, t = cuda.blockIdx.x, cuda.threadIdx.x
        right = (block + 1) % cuda.gridDim.x
        for step in range(cuda.gridDim.x):
            while cuda.atomic.add(arrived, block, 0) < step + more:
                pass
            cuda.threadfence()
            cuda.syncthreads()
            if t == 0:
                cuda.threadfence()
                cuda.atomic.add(arrived, right, 1)
        out[block, t] = 1

    arrived, out = np.zeros(6, np.int32), np.zeros((6, 256), np.int32)
    told = ""
    with simulator.options(order=order, seed=1, max_steps=25_000), contextlib.ExitStack() as stack:
        report = stack.enter_context(simulator.sanitize()) if sanitized else []
        try:
            kernel[6, 256](arrived, out, more)
        except Deadlock as error:
            told = str(error)
    told = told or "\n".join(map(str, report))
    assert re.search(end, told) if end else (out == 1).all() and not told, told


def test_waiting_in_vain_is_told_apart_from_long_work():
    """One thread waits while another goes round and round: not all wait."""
    @cuda.jit
    def kernel(flag, out):
        if cuda.threadIdx.x == 0:
            while cuda.atomic.add(flag, 0, 0) == 0:
                cuda.nanosleep(20)
        else:
            n, steps = 27, 0
            while n != 1:
                n = n // 2 if n % 2 == 0 else 3 * n + 1
                steps += 1
            out[0] = steps
            cuda.atomic.add(flag, 0, 1)

    out = np.zeros(1, np.int32)
    with simulator.options(max_steps=2000):
        kernel[1, 2](np.zeros(1, np.int32), out)
    assert out[0] == 111


def test_long_loops_are_not_endless():
    @cuda.jit
    def kernel(out):
        n = 27 + cuda.grid(1)
        steps = 0
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            steps += 1
        out[cuda.grid(1)] = steps

    out = np.zeros(4)
    with simulator.options(max_steps=1000):
        kernel[2, 2](out)
    assert out.tolist() == [111, 18, 18, 18]


def test_orders():
    seen = []

    @cuda.jit
    def kernel():
        seen.append((cuda.blockIdx.x, cuda.threadIdx.x))

    def run():
        seen.clear()
        kernel[3, 4]()
        return list(seen)

    forward = [(block, thread) for block in range(3) for thread in range(4)]
    assert run() == forward
    with simulator.options(order="reverse"):
        assert run() == forward[::-1]
    with simulator.options(order="random", seed=1):
        first = run()
        assert first == run() != forward and sorted(first) == forward
        with simulator.options(seed=2):
            assert run() != first
    assert run() == forward
    seen.clear()
    simulator.run(kernel, 3, 4, order="reverse")
    assert seen == forward[::-1]


def test_order_shows_a_race(jit):
    @jit
    def kernel(x):
        s = cuda.shared.array(32, np.int32)
        s[cuda.threadIdx.x] = cuda.threadIdx.x
        x[cuda.threadIdx.x] = s[31 - cuda.threadIdx.x]

    results = set()
    for order in ("forward", "reverse", "random"):
        x = np.zeros(32, np.int64)
        simulator.run(kernel, 1, 32, x, order=order)
        results.add(x.tobytes())
    assert len(results) == 3


def test_bad_options():
    with pytest.raises(ValueError, match="order"), simulator.options(order="sideways"):
        pass
    with pytest.raises(TypeError, match="speed"), simulator.options(speed=3):
        pass
    with pytest.raises(ValueError, match="max_steps"), simulator.options(max_steps=0):
        pass
    with pytest.raises(ValueError, match="order"):
        simulator.run(print, 1, 1, order="up")
