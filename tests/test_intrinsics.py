"""Intrinsics: exact data movement, stated error elsewhere; the same kernels on GPU and twin."""

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, cuda
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import (
    block_max,
    block_online,
    block_sum,
    fast_exp,
    fast_reciprocal,
    load,
    load_vector,
    online_add,
    online_merge,
    store,
    store_vector,
    vector_width,
    warp_max,
    warp_online,
    warp_sum,
)

PLACE = "cpu" if SIMULATED else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@cuda.jit
def convert_kernel(x, y):
    i = cuda.grid(1)
    if i < x.shape[0]:
        store(y, i, load(x, i))


@cuda.jit
def copy_vector_kernel(x, y, widths):
    values = cuda.local.array(8, np.float32)
    width = vector_width(x)
    i = cuda.grid(1) * width
    if i + width <= x.shape[0]:
        load_vector(values, x, i)
        store_vector(y, i, values)
        widths[cuda.grid(1)] = width


@cuda.jit
def function_kernel(x, exponential, reciprocal):
    i = cuda.grid(1)
    if i < x.shape[0]:
        exponential[i] = fast_exp(x[i])
        reciprocal[i] = fast_reciprocal(x[i])


@cuda.jit
def warp_kernel(x, sums, largest):
    i = cuda.grid(1)
    sums[i] = warp_sum(x[i])
    largest[i] = warp_max(x[i])


@cuda.jit
def block_kernel(x, sums, largest):
    scratch = cuda.shared.array(32, np.float32)
    i = cuda.grid(1)
    sums[i] = block_sum(x[i], scratch)
    largest[i] = block_max(x[i], scratch)
    sums[i] += block_sum(x[i], scratch)  # the same scratch again: is it still being read?


@cuda.jit
def online_kernel(x, order, pairs):
    """pairs[i] = the pair of row i of x, its elements added in the order of row i of `order`."""
    i = cuda.grid(1)
    if i < x.shape[0]:
        m, s = np.float32(-np.inf), np.float32(0)
        for k in range(x.shape[1]):
            m, s = online_add(m, s, x[i, order[i, k]])
        pairs[i, 0] = m
        pairs[i, 1] = s


@cuda.jit
def merge_kernel(pairs, merged):
    """The pairs of each row of `pairs`, merged from the left, from the right, and as a tree."""
    i = cuda.grid(1)
    if i < pairs.shape[0]:
        m, s = pairs[i, 0, 0], pairs[i, 0, 1]
        for k in range(1, 4):
            m, s = online_merge(m, s, pairs[i, k, 0], pairs[i, k, 1])
        merged[i, 0, 0] = m
        merged[i, 0, 1] = s
        m, s = pairs[i, 3, 0], pairs[i, 3, 1]
        for k in range(1, 4):
            m, s = online_merge(pairs[i, 3 - k, 0], pairs[i, 3 - k, 1], m, s)
        merged[i, 1, 0] = m
        merged[i, 1, 1] = s
        m, s = online_merge(pairs[i, 0, 0], pairs[i, 0, 1], pairs[i, 1, 0], pairs[i, 1, 1])
        m1, s1 = online_merge(pairs[i, 2, 0], pairs[i, 2, 1], pairs[i, 3, 0], pairs[i, 3, 1])
        m, s = online_merge(m1, s1, m, s)
        merged[i, 2, 0] = m
        merged[i, 2, 1] = s


@cuda.jit
def threads_online_kernel(x, of_warp, of_block):
    scratch_m = cuda.shared.array(32, np.float32)
    scratch_s = cuda.shared.array(32, np.float32)
    i = cuda.grid(1)
    m, s = online_add(np.float32(-np.inf), np.float32(0), x[i])
    of_warp[i, 0], of_warp[i, 1] = warp_online(m, s)
    block_online(m, s, scratch_m, scratch_s)
    of_block[i, 0], of_block[i, 1] = block_online(m, s, scratch_m, scratch_s)


def all_patterns(dtype):
    """Every 16-bit pattern, or as many float32 patterns spread over all of them."""
    if dtype == torch.float32:
        step = 2**32 // 65521
        return torch.arange(-(2**31), 2**31, step).to(torch.int32).view(dtype)
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def same(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_load_and_store_round_as_pytorch(dtype, target):
    x = all_patterns(dtype).to(PLACE)
    if SIMULATED:
        x = x[:: 16 if len(x) > 4096 else 1]
    y = torch.zeros(len(x), dtype=target, device=PLACE)
    launch(convert_kernel, -(-len(x) // 128), 128, x, y)
    expected = x.to(target)
    assert same(y, expected)
    assert torch.equal(y.signbit()[~y.isnan()], expected.signbit()[~y.isnan()])


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_move_every_pattern(dtype):
    x = all_patterns(dtype)[:4096].contiguous().to(PLACE)
    width = 16 // dtype.itemsize
    x = x[: len(x) // width * width]
    y, widths = torch.zeros_like(x), torch.zeros(len(x) // width, dtype=torch.int32, device=PLACE)
    launch(copy_vector_kernel, -(-len(widths) // 64), 64, x, y, widths)
    assert widths.eq(width).all()
    assert same(y, x)


def test_fast_functions_keep_their_bounds():
    x = torch.cat([torch.linspace(-80, 80, 4001), torch.tensor([1e-3, -1e-3, 1e30])]).to(PLACE)
    exponential, reciprocal = torch.empty_like(x), torch.empty_like(x)
    launch(function_kernel, -(-len(x) // 128), 128, x, exponential, reciprocal)
    exact = x.double()
    # ex2.approx: 2 ulp; rounding x·log2(e) adds up to |x|·2⁻²⁴ of the result.
    bound = 2**-22 + exact.abs() * 2**-23
    inside = exact < 80
    error = (exponential.double() / exact.exp() - 1).abs()
    assert (error <= bound)[inside].all()
    finite = x != 0
    assert ((reciprocal.double() * exact - 1).abs() <= 2**-22)[finite].all()


def test_warp_reductions():
    x = torch.randn(4 * 32, device=PLACE)
    sums, largest = torch.empty_like(x), torch.empty_like(x)
    launch(warp_kernel, 2, 64, x, sums, largest)
    rows = x.view(4, 32)
    assert torch.allclose(sums.view(4, 32), rows.sum(1, keepdim=True).expand(4, 32), atol=1e-5)
    assert torch.equal(largest.view(4, 32), rows.amax(1, keepdim=True).expand(4, 32))


@pytest.mark.parametrize("block", [32, 64, 96, 256, 1024])
def test_block_reductions(block):
    x = torch.randn(2 * block, device=PLACE) - 50  # a wrong zero would win every maximum
    sums, largest = torch.empty_like(x), torch.empty_like(x)
    launch(block_kernel, 2, block, x, sums, largest)
    rows = x.view(2, block)
    expected = 2 * rows.double().sum(1, keepdim=True).expand(2, block)
    assert torch.allclose(sums.view(2, block).double(), expected, rtol=1e-5)
    assert torch.equal(largest.view(2, block), rows.amax(1, keepdim=True).expand(2, block))


@pytest.mark.parametrize("block", [32, 256])
def test_block_reductions_of_infinities(block):
    x = torch.zeros(2 * block, device=PLACE)
    x[3] = float("inf")
    sums, largest = torch.empty_like(x), torch.empty_like(x)
    launch(block_kernel, 2, block, x, sums, largest)
    assert sums[:block].eq(float("inf")).all() and sums[block:].eq(0).all()
    assert largest[:block].eq(float("inf")).all() and largest[block:].eq(0).all()


def pair_of(rows):
    """(m, s) of each row in float64; s is NaN with NaN or +inf in it."""
    rows = rows.double()
    numbers = torch.where(rows.isnan(), -torch.inf, rows)
    m = numbers.amax(-1, keepdim=True)
    s = (rows - torch.where(m == -torch.inf, 0, m)).exp().sum(-1, keepdim=True)
    return torch.cat([m, s], -1)


def check_pairs(found, rows):
    expected = pair_of(rows).expand(found.shape)
    assert torch.allclose(found[..., 1].double(), expected[..., 1], rtol=3e-6, equal_nan=True)
    valid = ~expected[..., 1].isnan()
    assert torch.equal(found[..., 0].double()[valid], expected[..., 0][valid])


def difficult_rows(n_cols):
    """Ordinary and masked rows, ties, a far offset; then none but -inf; then NaN and +inf."""
    x = 20 * torch.randn(9, n_cols, device=PLACE)
    x[1, ::2] = -torch.inf
    x[2] = 3.0
    x[3] -= 1e4
    x[4, :-1] = -torch.inf
    x[5] = -torch.inf
    x[6, n_cols // 2] = torch.nan
    x[7, n_cols // 3] = torch.inf
    x[8, 0], x[8, -1] = -torch.inf, torch.inf
    return x


def test_the_online_pair_in_any_order():
    x = difficult_rows(12)
    for seed in range(3):
        order = torch.stack([
            torch.randperm(12, generator=torch.Generator().manual_seed(seed + i)) for i in range(9)
        ]).to(PLACE)  # fmt: skip
        pairs = torch.zeros(9, 2, device=PLACE)
        launch(online_kernel, 1, 32, x, order, pairs)
        check_pairs(pairs, x)
        assert pairs[5].tolist() == [-torch.inf, 0] and pairs[6:, 1].isnan().all()


def test_merging_pairs_in_any_order():
    x = difficult_rows(16)
    parts = x.view(9 * 4, 4)
    order = torch.arange(4, device=PLACE).expand(36, 4).contiguous()
    pairs, merged = torch.zeros(36, 2, device=PLACE), torch.zeros(9, 3, 2, device=PLACE)
    launch(online_kernel, 2, 32, parts, order, pairs)
    check_pairs(pairs, parts)
    launch(merge_kernel, 1, 32, pairs.view(9, 4, 2), merged)
    check_pairs(merged, x[:, None])


@pytest.mark.parametrize("block", [32, 64, 96, 256, 1024])
def test_online_reductions(block):
    x = difficult_rows(block)
    of_warp, of_block = (torch.zeros(x.numel(), 2, device=PLACE) for _ in range(2))
    launch(threads_online_kernel, len(x), block, x.view(-1), of_warp, of_block)
    check_pairs(of_warp.view(-1, 32, 2), x.view(-1, 1, 32))
    check_pairs(of_block.view(len(x), block, 2), x[:, None])
    # In every thread alike, bit for bit.
    assert torch.equal(*(of_block.view(len(x), block, 2)[:6, k] for k in (0, -1)))


@pytest.mark.skipif(not SIMULATED, reason="a GPU's context does not survive a misaligned access")
def test_misaligned_vectors_are_refused():
    x = torch.randn(64)[1:]
    widths = torch.zeros(16, dtype=torch.int32)
    with pytest.raises(ValueError, match="misaligned 16-byte access: element 0 lies 4 bytes past"):
        launch(copy_vector_kernel, 1, 32, x, torch.empty(64), widths)
