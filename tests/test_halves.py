"""`intrinsics.halves` and `intrinsics.pairs`: 16-bit numbers made in registers, and multiplied."""

import ml_dtypes
import numpy as np
import torch

from course_lib import SIMULATED, cuda
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics.halves import multiply_add_halves, pack_halves
from course_lib.runtime.intrinsics.matrix import load_word
from course_lib.runtime.intrinsics.pairs import as_pair

PLACE = "cpu" if SIMULATED else "cuda"


@cuda.jit
def product_kernel(a, b, c):
    """c (16 × 8) += a·bᵀ of float32 rounded to bfloat16, for a (16 × 16) and b (8 × 16)."""
    lane = cuda.threadIdx.x
    words_a, words_b = cuda.local.array(5, np.uint32), cuda.local.array(3, np.uint32)
    sums = cuda.local.array(5, np.float32)
    row, col = lane // 4, lane % 4 * 2
    for r in range(4):
        at = (row + r % 2 * 8) * 16 + r // 2 * 8 + col
        words_a[1 + r] = pack_halves(load_word(a, at), load_word(a, at + 1))
        sums[1 + r] = c[(row + r // 2 * 8) * 8 + col + r % 2]
    for r in range(2):
        at = row * 16 + r * 8 + col
        words_b[1 + r] = pack_halves(load_word(b, at), load_word(b, at + 1))
    multiply_add_halves(sums, 1, words_a, 1, words_b, 1)
    for r in range(4):
        c[(row + r // 2 * 8) * 8 + col + r % 2] = sums[1 + r]


@cuda.jit
def pack_kernel(low, high, words):
    i = cuda.grid(1)
    words[i] = pack_halves(load_word(low, i), load_word(high, i))


def test_the_product():
    a, b, c = torch.randn(16, 16), torch.randn(8, 16), torch.randn(16, 8)
    expected = c.double() + a.bfloat16().double() @ b.bfloat16().double().t()
    a, b, c = (tensor.to(PLACE) for tensor in (a, b, c))
    launch(product_kernel, 1, 32, a, b, c, flat=True)
    torch.testing.assert_close(c.cpu().double(), expected, rtol=1e-6, atol=1e-5)


def test_rounding():
    bits = np.random.default_rng(0).integers(0, 2**32, 2048, dtype=np.uint32)
    special = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 1]
    bits[: len(special)] = special
    low = bits.view(np.float32)
    low[np.isnan(low)] = 1.5  # which NaN comes out is the chip's own affair
    high = np.roll(low, 7).copy()
    words = np.zeros(len(bits), np.uint32)
    given = [torch.from_numpy(array).to(PLACE) for array in (low, high, words.view(np.int32))]
    launch(pack_kernel, len(bits) // 64, 64, given[0], given[1], given[2].view(torch.uint32))
    found = given[2].cpu().numpy().view(np.uint32)
    with np.errstate(over="ignore"):
        halves = [array.astype(ml_dtypes.bfloat16).view(np.uint16) for array in (low, high)]
    assert np.array_equal(found & 0xFFFF, halves[0])
    assert np.array_equal(found >> 16, halves[1])


@cuda.jit
def pair_kernel(like, low, high, words):
    i = cuda.grid(1)
    words[i] = as_pair(like, low[i], high[i])


def test_pairs_are_rounded_as_pytorch_rounds():
    low = torch.tensor([1.0, -2.5, 0.1, float("inf"), 1e-8, 70_000.0, 2049.0, float("nan")])
    high = low.flip(0)
    for dtype in (torch.float16, torch.bfloat16):
        words = torch.zeros(8, dtype=torch.int32, device=PLACE)
        like = torch.zeros(1, dtype=dtype, device=PLACE)
        numbers = low.to(PLACE), high.to(PLACE)
        launch(pair_kernel, 1, 8, like, *numbers, words.view(torch.uint32))
        expected = torch.stack((low, high), 1).to(dtype)
        torch.testing.assert_close(
            words.cpu().view(dtype).view(8, 2), expected, rtol=0, atol=0, equal_nan=True
        )
