"""Philox4x32-10: the published answers, and the same bits from kernels and from NumPy."""

import math
from types import FunctionType

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from course_lib import SIMULATED, cuda
from course_lib.reference.functions import fused_softmax as reference
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import philox

PLACE = "cpu" if SIMULATED else "cuda"
# Random123's own test vectors for philox4x32 with 10 rounds: counter, key, answer.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip
words32 = st.integers(0, 2**32 - 1)


@cuda.jit
def block_cipher_kernel(out, c0, c1, c2, c3, key0, key1):
    n0, n1, n2, n3 = philox.philox4x32(c0, c1, c2, c3, key0, key1)
    out[0] = n0
    out[1] = n1
    out[2] = n2
    out[3] = n3


@cuda.jit
def element_kernel(out, offset, key0, key1):
    i = cuda.grid(1)
    if i < out.shape[0]:
        out[i] = philox.philox_one(offset + i, key0, key1)


@cuda.jit
def group_kernel(out, group, key0, key1):
    i = cuda.grid(1)
    if 4 * i < out.shape[0]:
        n0, n1, n2, n3 = philox.philox_four(group + i, key0, key1)
        out[4 * i] = n0
        out[4 * i + 1] = n1
        out[4 * i + 2] = n2
        out[4 * i + 3] = n3


# What a GPU runs, in the simulator too, where `philox4x32` has a twin in Python's integers.
as_on_a_gpu = cuda.jit(device=True)(
    FunctionType(philox.philox4x32.py_func.__code__, philox.__dict__, "as_on_a_gpu")
)


@cuda.jit
def both_ciphers_kernel(out, c0, c1, c2, c3, key0, key1):
    n0, n1, n2, n3 = as_on_a_gpu(c0, c1, c2, c3, key0, key1)
    m0, m1, m2, m3 = philox.philox4x32(c0, c1, c2, c3, key0, key1)
    out[0] = n0 == m0
    out[1] = n1 == m1
    out[2] = n2 == m2
    out[3] = n3 == m3


def words(text):
    return [int(word, 16) for word in text.split()]


def numbers(counter, key):
    out = torch.full((4,), -1, dtype=torch.int64, device=PLACE)
    launch(block_cipher_kernel, 1, 1, out, *map(np.uint32, (*counter, *key)))
    return out.tolist()


@pytest.mark.parametrize("counter, key, answer", KNOWN)
def test_published_answers(counter, key, answer):
    assert numbers(words(counter), words(key)) == words(answer)
    assert reference.philox(words(counter), words(key)).tolist() == words(answer)


@settings(max_examples=40, deadline=None)
@given(counter=st.tuples(*[words32] * 4), key=st.tuples(words32, words32))
def test_kernel_and_numpy_agree(counter, key):
    assert numbers(counter, key) == reference.philox(counter, key).tolist()


@settings(max_examples=40, deadline=None)
@given(counter=st.tuples(*[words32] * 4), key=st.tuples(words32, words32))
def test_the_simulator_draws_what_a_gpu_does(counter, key):
    out = torch.zeros(4, dtype=torch.bool, device=PLACE)
    launch(both_ciphers_kernel, 1, 1, out, *map(np.uint32, (*counter, *key)))
    assert out.all()


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 50), offset=st.integers(0, 2**62), seed=st.integers(-(2**63), 2**64))
@example(n=9, offset=2**34 - 5, seed=0)  # the counter's low word overflows into the high one
@example(n=3, offset=2**63 - 4, seed=-1)
def test_the_number_of_an_element(n, offset, seed):
    out = torch.full((n,), -1, dtype=torch.int64, device=PLACE)
    launch(element_kernel, math.ceil(n / 32), 32, out, offset, *philox.key_of(seed))
    assert out.tolist() == reference.random_numbers(n, seed, offset).tolist()


def test_four_at_once_are_the_four_by_themselves():
    out = torch.full((64,), -1, dtype=torch.int64, device=PLACE)
    launch(group_kernel, 1, 32, out, 2**31 - 3, *philox.key_of(12345))
    assert out.tolist() == reference.random_numbers(64, 12345, 4 * (2**31 - 3)).tolist()


def test_keys():
    assert philox.key_of(2**32 * 7 + 5) == (5, 7)
    assert philox.key_of(-1) == philox.key_of(2**64 - 1) == (2**32 - 1, 2**32 - 1)
    assert all(type(word) is np.uint32 for word in philox.key_of(np.int64(3)))
    for wrong in (1.0, True, None, "1"):
        with pytest.raises(TypeError, match="seed must be an int"):
            philox.key_of(wrong)


def test_numbers_are_spread_evenly():
    found = reference.random_numbers(1 << 16, 2024, 0)
    counts = np.bincount(found >> 24, minlength=256)
    chi_squared = ((counts - 256) ** 2 / 256).sum()
    assert 180 < chi_squared < 350  # 255 degrees of freedom: five standard deviations are ±113
    bits = (found[:, None] >> np.arange(32) & 1).mean(axis=0)
    assert np.abs(bits - 0.5).max() < 5 * 0.5 / 256
    # Neighbours, and the four of one call, have nothing to do with each other.
    centred = found / 2**32 - 0.5
    for distance in (1, 2, 3, 4):
        product = (centred[distance:] * centred[:-distance]).mean()
        assert abs(product) < 5 / 12 / 256


@pytest.mark.gpu
def test_pytorch_draws_from_the_same_generator():
    # cuRAND gives thread i of PyTorch's kernel the counter (0, 0, i, 0); random_() of int32 keeps
    # the lower 31 bits of the first number.
    torch.manual_seed(31)
    theirs = torch.empty(64, dtype=torch.int32, device="cuda").random_().tolist()
    ours = [numbers((0, 0, i, 0), (31, 0))[0] & 0x7FFFFFFF for i in range(64)]
    assert ours == theirs
