"""The dense layers inside the kernels of squeeze and excitation, each function by itself.

That whole layers are right on all kinds of inputs: `test_squeeze_excite`.
"""

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, cuda, simulator
from course_lib.kernels import squeeze_excite as se
from course_lib.kernels.squeeze_excite import two_pass
from course_lib.kernels.squeeze_excite.dense import (
    BLOCK_SIZE,
    CHUNK,
    TOTALS,
    by_columns,
    by_rows,
    in_vectors,
    sum_slots,
)
from course_lib.kernels.squeeze_excite.problem import problem_of
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import VECTOR_BYTES

PLACE = "cpu" if SIMULATED else "cuda"
DTYPES = torch.float32, torch.float16, torch.bfloat16
ROWS, COLUMNS = 0, 1
#: (rows, length of a row, first row, rows of it, first column, columns of it)
PARTS = [
    (1, 1, 0, 1, 0, 1), (9, 8, 2, 7, 0, 8), (70, 32, 1, 69, 8, 24), (300, 16, 0, 300, 0, 16),
    (30, 40, 3, 20, 16, 24), (5, 600, 0, 5, 8, 592), (17, 13, 4, 11, 3, 9),
    (70, 300, 0, 70, 1, 299),
]  # fmt: skip


@cuda.jit
def layer_kernel(out, weight, vector, length, row, n_rows, col, n_cols, which, added, aligned):
    shared = cuda.shared.array(CHUNK, np.float32, alignment=VECTOR_BYTES)
    scratch = cuda.shared.array(BLOCK_SIZE, np.float32)
    i = cuda.threadIdx.x
    while i < vector.shape[0]:
        shared[i] = vector[i]
        i += cuda.blockDim.x
    cuda.syncthreads()
    if which == ROWS:
        by_rows(out, 2, weight, length, row, n_rows, col, n_cols, shared, added, aligned)
    else:
        by_columns(
            out, 2, weight, length, row, n_rows, col, n_cols, shared, scratch, added, aligned
        )


@cuda.jit
def in_vectors_kernel(out, weight, col, n_cols, aligned):
    out[0] = in_vectors(weight, col, n_cols, aligned)


@cuda.jit
def slots_kernel(out, slots, n, n_slots, R, first, count):
    totals = cuda.shared.array(TOTALS, np.float32)
    sum_slots(totals, slots, n, n_slots, R, first, count)
    i = cuda.threadIdx.x
    while i < count:
        out[i] = totals[i]
        i += cuda.blockDim.x


def layer(part, which, dtype, aligned, added, n_threads):
    """(what the kernel makes of a part of random weights, what it should be)."""
    n, length, row, n_rows, col, n_cols = part
    generator = torch.Generator().manual_seed(n * length)
    weight = torch.randn(n, length, generator=generator).to(dtype)
    # What lies beside the part is nobody's business.
    inside = weight[row : row + n_rows, col : col + n_cols].clone()
    weight.fill_(float("nan"))[row : row + n_rows, col : col + n_cols] = inside
    n_out, n_in = (n_rows, n_cols) if which == ROWS else (n_cols, n_rows)
    vector, out = torch.randn(n_in, generator=generator), torch.randn(n_out + 4)
    of_vector = (
        inside.double() @ vector.double() if which == ROWS else (vector.double() @ inside.double())
    )
    expected = out.double()
    expected[2:-2] = expected[2:-2] * added + of_vector
    out, weight, vector = (t.to(PLACE) for t in (out, weight, vector))
    launch(layer_kernel, 1, n_threads, out, weight, vector, *part[1:], which, added, aligned,
           flat=True)  # fmt: skip
    return out.cpu().double(), expected


@pytest.mark.parametrize("which", [ROWS, COLUMNS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_layer(part, dtype, which):
    for n_threads, added in ((256, False), (64, True)):
        for aligned in {False, part[1] * dtype.itemsize % VECTOR_BYTES == 0}:
            found, expected = layer(part, which, dtype, aligned, added, n_threads)
            assert torch.equal(found[[0, 1, -2, -1]], expected[[0, 1, -2, -1]])
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_which_parts_are_read_16_bytes_at_a_time():
    single, half = torch.float32, torch.float16
    cases = [
        (single, 4, 12, True, 1), (half, 8, 16, True, 1), (single, 4, 12, False, 0),
        (single, 2, 4, True, 0), (single, 4, 6, True, 0), (half, 4, 8, True, 0),
        (half, 8, 12, True, 0),
    ]  # fmt: skip
    for dtype, col, n_cols, aligned, expected in cases:
        out, weight = torch.zeros(1, device=PLACE), torch.zeros(1, device=PLACE, dtype=dtype)
        launch(in_vectors_kernel, 1, 32, out, weight, col, n_cols, aligned)
        assert out.item() == expected


@pytest.mark.parametrize("n_threads", [256, 64])
@pytest.mark.parametrize(
    "n_slots, R, first, count", [(1, 1, 0, 1), (12, 112, 0, 112), (93, 28, 0, 28), (40, 9, 4, 5)]
)
def test_the_sum_of_the_slots(n_slots, R, first, count, n_threads):
    N, size = 3, -(-R // 4) * 4
    slots = torch.randn(N, n_slots, size, generator=torch.Generator().manual_seed(R))
    out = torch.full((count,), float("nan"), device=PLACE)
    numbers = 1, n_slots, R, first, count
    launch(slots_kernel, 1, n_threads, out, slots.to(PLACE), *numbers, flat=True)
    expected = slots[1].double().sum(0)[first : first + count]
    assert torch.allclose(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not SIMULATED, reason="the sanitizer watches the simulator")
@pytest.mark.parametrize("which", [ROWS, COLUMNS])
def test_the_sanitizer_finds_nothing(which):
    for aligned in (False, True):
        with simulator.sanitize() as report:
            layer((9, 80, 1, 7, 8, 64), which, torch.float16, aligned, True, 64)
        assert not report.findings, report.findings


def weights_of(C, R, dtype, start):
    """The weights of a block, each of which begins `start` elements past a boundary."""
    generator = torch.Generator().manual_seed(C)
    found = []
    for shape in ((R, C), (R,), (C, R), (C,)):
        buffer = torch.zeros(start + np.prod(shape), dtype=dtype, device=PLACE)
        found.append(buffer[start:].view(shape))
        found[-1].copy_(torch.randn(shape, generator=generator) / shape[-1] ** 0.5)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_start_anywhere(dtype):
    C, R = 32, 16
    x, dy = (torch.randn(2, C, 3, 3).to(PLACE, dtype) for _ in range(2))
    results = []
    for start in (0, 1, 3):
        weights = weights_of(C, R, dtype, start)
        lies_well = two_pass.aligned(weights[0], C) and two_pass.aligned(weights[2], R)
        assert lies_well == (start == 0)
        y, *saved = se.forward(x, *weights, variant="two_pass")
        found = se.backward(dy, x, weights[0], weights[2], *saved, variant="two_pass")
        results.append([t.double() for t in (y, *saved, *found)])
    rounding = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for moved in results[1:]:
        for a, b in zip(moved, results[0], strict=True):
            assert torch.allclose(a, b, rtol=rounding, atol=rounding)


def test_rows_that_are_no_multiple_of_16_bytes_are_not_aligned():
    assert not two_pass.aligned(torch.zeros(6, 14), 14)
    assert not two_pass.aligned(torch.zeros(6, 12, dtype=torch.float16), 12)
    assert two_pass.aligned(torch.zeros(6, 12), 12)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("channels_last", [False, True])
def test_groups_begin_where_16_bytes_of_weights_may(itemsize, channels_last):
    for C, side in ((24, 190), (336, 24), (960, 12), (1632, 12), (2688, 12), (2000, 70), (37, 3)):
        for N in (1, 2, 8, 32):
            shape = N, C, side, side
            problem = problem_of(shape, 8, channels_last, "silu", "sigmoid", itemsize)
            plan = two_pass.cut_of(problem)
            assert plan.group * (plan.n_slots // plan.n_parts) >= C
            assert plan.group * (plan.n_slots // plan.n_parts - 1) < C
            if channels_last:  # as many channels as a block's columns of 16 bytes hold
                assert plan.group == plan.team * (16 // itemsize)
            else:
                assert plan.group * problem.n_pixels**2 < 2**32 or plan.group == 1
            if side == 12:
                assert plan.group % 8 == 0 or channels_last
