"""`intrinsics.words`: numbers moved and compared as they lie in memory."""

import math

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, cuda
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics.words import (
    as_float,
    lanes,
    largest,
    load_words,
    lowest_word,
    ordinary,
    select_bytes,
    store_floats,
    store_words,
    where_equal,
)

PLACE = "cpu" if SIMULATED else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1.5]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def moving_kernel(n):
    """Copies n elements from x[n] on: as they are, then by way of float32."""

    @cuda.jit
    def kernel(x, words_out, floats_out):
        words, floats = cuda.local.array(18, np.uint32), cuda.local.array(18, np.float32)
        load_words(words, 1, x, n, n)
        store_words(words_out, n, words[1:], n)
        for k in range(n):
            floats[1 + k] = as_float(x, words[1 + k // lanes(x)], k % lanes(x))
        store_floats(floats_out, n, floats, 1, n)

    return kernel


def bytes_kernel(n):
    @cuda.jit
    def kernel(x, out):
        words = cuda.local.array(8, np.uint32)
        load_words(words, 0, x, n, n)
        store_words(out, n, words, n)

    return kernel


@cuda.jit
def comparing_kernel(x, y, maximum, equal, fine, counts):
    word, result = cuda.local.array(2, np.uint32), cuda.local.array(1, np.uint32)
    n = lanes(x)
    i = cuda.grid(1)
    for k in range(n):  # a pair of numbers in every lane
        load_words(word, 0, x, i * n + k, 1)
        load_words(word, 1, y, i * n + k, 1)
        result[0] = largest(x, word[0], word[1])
        store_words(maximum, i * n + k, result, 1)
        result[0] = where_equal(x, word[0], word[1], word[0], lowest_word(x))
        store_words(equal, i * n + k, result, 1)
        fine[i * n + k] = ordinary(x, word[0])
    counts[i] = n


@cuda.jit
def lanes_kernel(x, y, maximum, chosen, fine):
    """Words of two lanes that differ."""
    word, result = cuda.local.array(2, np.uint32), cuda.local.array(1, np.uint32)
    i = cuda.grid(1)
    load_words(word, 0, x, i * 2, 2)
    load_words(word, 1, y, i * 2, 2)
    result[0] = largest(x, word[0], word[1])
    store_words(maximum, i * 2, result, 2)
    result[0] = where_equal(x, word[0], word[1], word[0], lowest_word(x))
    store_words(chosen, i * 2, result, 2)
    fine[i] = ordinary(x, word[0])


@cuda.jit
def bytes_of_two_kernel(a, b, c):
    c[0] = select_bytes(a[0], b[0], 0x7160)


def numbers(n, dtype):
    """Every pair of special numbers, then others."""
    pairs = torch.tensor([(p, q) for p in SPECIAL for q in SPECIAL])
    rest = torch.randint(-3, 4, (n - len(pairs), 2)).float()
    both = torch.cat([pairs, rest]).to(dtype)
    return both[:, 0].contiguous().to(PLACE), both[:, 1].contiguous().to(PLACE)


@every_dtype
@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_moving(dtype, n):
    x = torch.randn(3 * n).to(PLACE, dtype)
    words, floats = torch.full_like(x, 7), torch.full_like(x, 7)
    launch(moving_kernel(n), 1, 1, x, words, floats)
    for found in (words, floats):
        assert torch.equal(found[n : 2 * n], x[n : 2 * n])
        assert found[:n].eq(7).all() and found[2 * n :].eq(7).all()


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_moving_bytes(n):
    x = torch.randint(0, 256, (3 * n,)).to(PLACE, torch.uint8)
    out = torch.zeros_like(x)
    launch(bytes_kernel(n), 1, 1, x, out)
    assert (
        torch.equal(out[n : 2 * n], x[n : 2 * n]) and not out[:n].any() and not out[2 * n :].any()
    )


def expected_of(x, y):
    equal = torch.where(x == y, x, torch.full_like(x, -math.inf))
    return torch.maximum(x, y), equal, x > -math.inf


@every_dtype
def test_comparing(dtype):
    x, y = numbers(128, dtype)
    maximum, equal = torch.empty_like(x), torch.empty_like(x)
    fine = torch.empty(128, dtype=torch.uint8, device=PLACE)
    n_lanes = 4 // dtype.itemsize
    counts = torch.zeros(128 // n_lanes, dtype=torch.int64, device=PLACE)
    launch(
        comparing_kernel,
        len(counts) // 32,
        32,
        x,
        y,
        maximum,
        equal,
        fine.view(torch.uint8),
        counts,
    )
    assert counts.eq(n_lanes).all()
    for found, wanted in zip((maximum, equal), expected_of(x, y), strict=False):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(fine.bool(), expected_of(x, y)[2])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_lanes_are_apart(dtype):
    x, y = numbers(128, dtype)
    maximum, chosen = torch.empty_like(x), torch.empty_like(x)
    fine = torch.empty(64, dtype=torch.bool, device=PLACE)
    launch(lanes_kernel, 2, 32, x, y, maximum, chosen, fine.view(torch.uint8))
    wanted = expected_of(x, y)
    torch.testing.assert_close(maximum, wanted[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(chosen, wanted[1], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(fine, wanted[2].view(-1, 2).all(1))


def test_zeros_are_equal_and_the_largest_of_them_is_positive():
    x = torch.tensor([0.0, -0.0, -0.0, 0.0] * 32, device=PLACE)
    y = torch.tensor([-0.0, 0.0, -0.0, 0.0] * 32, device=PLACE)
    maximum, equal = torch.empty_like(x), torch.empty_like(x)
    fine, counts = torch.empty(128, dtype=torch.uint8, device=PLACE), torch.zeros_like(x)
    launch(comparing_kernel, 4, 32, x, y, maximum, equal, fine, counts)
    assert torch.signbit(maximum).eq(torch.tensor([0, 0, 1, 0] * 32, device=PLACE)).all()
    assert not equal.isinf().any()


def test_bytes_of_two_words():
    a, b = (torch.tensor([v], dtype=torch.int32, device=PLACE) for v in (0x33221100, 0x77665544))
    c = torch.zeros_like(a)
    launch(bytes_of_two_kernel, 1, 1, *(t.view(torch.uint32) for t in (a, b, c)))
    assert c.item() == 0x77116600


@pytest.mark.skipif(not SIMULATED, reason="on a GPU it ends the process")
def test_a_misaligned_access_is_an_error():
    x = torch.zeros(64)[1:]
    with pytest.raises(ValueError, match="misaligned 8-byte access: element 2 lies 4 bytes past"):
        launch(moving_kernel(2), 1, 1, x, x.clone(), x.clone())


@pytest.mark.skipif(SIMULATED, reason="the simulator takes any number")
def test_accesses_that_no_chip_has():
    x = torch.zeros(64, device=PLACE)
    with pytest.raises(Exception, match="load_words moves 1, 2, 4, 8 or a multiple of 16 bytes"):
        launch(moving_kernel(3), 1, 1, x, x.clone(), x.clone())
