"""Softmax of scaled and masked scores: every kind of mask on both rungs, beside the contract."""

import math
import random

import pytest
import torch
from tensors import PLACE, double

from course_lib import ops, reference
from course_lib.kernels import scaled_softmax
from course_lib.runtime.host.arrays import ArrayError

ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
every_variant = pytest.mark.parametrize("variant", scaled_softmax.FORWARD)


def numbers(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(PLACE, dtype)


def check(x, mask, variant, **options):
    """Both passes against float64; returns y."""
    y = scaled_softmax.forward(x, mask, variant=variant, **options)
    exact = mask
    if mask is not None:
        exact = double(mask) if mask.is_floating_point() else mask.cpu()
    truth = reference.scaled_softmax(double(x), exact, **options)
    near(y, truth, 1)
    dy = numbers(*x.shape, dtype=x.dtype, seed=1)
    dx = scaled_softmax.backward(dy, y, variant=variant, **options)
    truth = reference.scaled_softmax_backward(double(dy), double(y), **options)
    near(dx, truth, 4 * abs(options["scale"]))
    return y


def near(found, truth, size):
    assert found.shape == truth.shape
    assert abs(double(found) - truth).max(initial=0) <= 4 * size * ROUNDING[found.dtype]


#: {label: mask(B, H, T, S, dtype)}
MASKS = {
    "nothing": lambda *_: None,
    "flags of keys": lambda B, H, T, S, _: numbers(B, 1, 1, S) > 0.3,
    "flags of rows": lambda B, H, T, S, _: (numbers(H, T, 1) > 0).expand(B, H, T, S),
    "flags in columns": lambda B, H, T, S, _: (numbers(S, T) > 0).mT,
    "numbers": lambda *shape: numbers(*shape[:4], dtype=shape[4]),
    "numbers of heads": lambda B, H, T, S, dtype: numbers(H, 1, S, dtype=dtype),
    "numbers off a boundary": lambda *shape: numbers(shape[3] + 1, dtype=shape[4])[1:],
    "a number a row": lambda B, H, T, S, dtype: numbers(B, 1, T, 1, dtype=dtype),
}


@every_variant
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_beside_float64(variant, mask):
    rng = random.Random(mask)
    for dtype in ROUNDING:
        for S in (8 * rng.randint(1, 5), rng.randint(1, 40), 600)[: 2 + (variant != "online")]:
            shape = (1, 1, 2, S) if S == 600 else (rng.randint(1, 2), 2, rng.randint(1, 3), S)
            options = dict(scale=rng.choice((0.125, 1, -0.7, 0.0)), causal=rng.random() < 0.5)
            x = numbers(*shape, dtype=dtype, seed=3)
            check(x, MASKS[mask](*shape, dtype), variant, **options)


@every_variant
@pytest.mark.parametrize("S", [5, 8])
def test_what_is_not_seen_takes_no_part_and_a_row_that_sees_nothing_is_0(variant, S):
    x, mask = numbers(1, 2, 3, S), torch.ones(3, S, dtype=torch.bool, device=PLACE)
    mask[:, 2], mask[1] = False, False
    spoilt = x.masked_fill(~mask, math.nan).masked_fill(~torch.ones_like(mask).tril(), math.inf)
    y = check(x, mask, variant, scale=2.0, causal=True)
    assert (y[:, :, 1] == 0).all() and (y.sum(-1)[:, :, [0, 2]] > 0.999).all()
    options = dict(scale=2.0, causal=True, variant=variant)
    assert torch.equal(scaled_softmax.forward(spoilt, mask, **options), y)
    dy = numbers(*x.shape)
    unseen = dy.masked_fill(~torch.ones_like(mask).tril(), math.nan)
    found = [scaled_softmax.backward(each, y, **options) for each in (dy, unseen)]
    assert torch.equal(*found) and (found[0][:, :, 1] == 0).all()
    added = torch.zeros(3, S, device=PLACE).masked_fill(~mask, -math.inf)
    assert torch.equal(scaled_softmax.forward(x, added, **options), y)


def test_long_rows_go_element_by_element():
    x = numbers(1, scaled_softmax.ROW_LIMIT + 1)
    found = [scaled_softmax.forward(x, scale=0.5, variant=each) for each in ("auto", "online")]
    assert torch.equal(*found)
    for launcher, inputs in ((scaled_softmax.forward, (x,)), (scaled_softmax.backward, (x, x))):
        with pytest.raises(ValueError, match="rows of at most 12,288 scores, not 12,289: use"):
            launcher(*inputs, variant="registers")


def test_what_does_not_go_together_is_refused_in_words():
    x = numbers(2, 3, 4)
    for mask in (x[0, :, :3], x[None]):
        with pytest.raises(ArrayError, match=r"mask must broadcast to \(2, 3, 4\); its shape is"):
            scaled_softmax.forward(x, mask)
    with pytest.raises(TypeError, match="scale must be a number, not True"):
        scaled_softmax.forward(x, scale=True)
    for x in (numbers(3), numbers(1, 1, 2, 3, 4)):
        with pytest.raises(ArrayError, match="x must have 2 to 4 dimensions, not shape"):
            scaled_softmax.forward(x)
    with pytest.raises(ArrayError, match=r"fewer than 2\*\*31 rows, not 2147483648"):
        scaled_softmax.forward(torch.ones(1, device=PLACE).expand(1 << 16, 1 << 15, 1))


def test_samples_have_masks_of_their_own():
    x, masks = numbers(3, 2, 2, 5), numbers(3, 2, 1, 5) > 0
    backward = torch.ops.course_lib.scaled_softmax_backward
    for call, given in (
        (lambda x, mask: ops.scaled_softmax(x, mask, scale=0.5), (x, masks)),
        (lambda dy, y: backward(dy, y, 0.5, True), (x, x + 1)),
    ):
        assert torch.equal(torch.vmap(call)(*given), torch.stack([*map(call, *given)]))
