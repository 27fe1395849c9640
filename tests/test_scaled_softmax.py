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
        for S in (8 * rng.randint(1, 5), rng.randint(1, 40)):
            shape = *(rng.randint(1, 3) for _ in range(3)), S
            options = dict(scale=rng.choice((0.125, 1, -0.7, 0.0)), causal=rng.random() < 0.5)
            x = numbers(*shape, dtype=dtype, seed=3)
            check(x, MASKS[mask](*shape, dtype), variant, **options)


@pytest.mark.parametrize("mask", ["nothing", "flags of keys", "numbers"])
@pytest.mark.parametrize("dtype, S", [(torch.float32, 600), (torch.bfloat16, 1101)])
def test_rows_of_a_block(mask, dtype, S):
    x = numbers(1, 1, 2, S, dtype=dtype)
    check(x, MASKS[mask](1, 1, 2, S, dtype), "registers", scale=0.5)


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


def test_long_rows_go_element_by_element(monkeypatch):
    monkeypatch.setattr(scaled_softmax, "ROW_LIMIT", 30)  # the simulator is slow
    x = numbers(1, 1, 2, 33)
    found = [scaled_softmax.forward(x, scale=0.5, variant=each) for each in ("auto", "online")]
    assert torch.equal(*found)
    for launcher, inputs in ((scaled_softmax.forward, (x,)), (scaled_softmax.backward, (x, x))):
        with pytest.raises(ValueError, match="rows of at most 30 scores, not 33: use one of o"):
            launcher(*inputs, variant="registers")


REFUSED = [
    (torch.ones(3, 5), {}, ArrayError, r"mask must broadcast to \(2, 3, 4\); its shape is \(3, 5"),
    (torch.ones(1, 2, 3, 4), {}, ArrayError, r"broadcast to \(2, 3, 4\); its shape is \(1, 2"),
    (torch.ones(3, 4).double(), {}, ArrayError, "mask must be bool or float32, not float64"),
    (None, dict(scale=True), TypeError, "scale must be a number, not True"),
    (None, dict(scale="a"), TypeError, "scale must be a number, not 'a'"),
]


@pytest.mark.parametrize("mask, options, error, words", REFUSED)
def test_bad_options_are_refused_in_words(mask, options, error, words):
    mask = mask if mask is None else mask.to(PLACE)
    with pytest.raises(error, match=words):
        scaled_softmax.forward(numbers(2, 3, 4), mask, **options)


def test_bad_shapes_are_refused_in_words():
    for x in (numbers(3), numbers(1, 1, 2, 3, 4)):
        with pytest.raises(ArrayError, match="x must have 2 to 4 dimensions, not shape"):
            scaled_softmax.forward(x)
    rows = torch.ones(1, device=PLACE).expand(1 << 16, 1 << 15, 1)
    with pytest.raises(ArrayError, match=r"fewer than 2\*\*31 rows, not 2147483648"):
        scaled_softmax.forward(rows)


def test_samples_share_a_mask_or_have_their_own():
    x, masks = numbers(3, 2, 2, 2, 5), numbers(3, 2, 1, 2, 5) > 0
    loop = [ops.scaled_softmax(*each, scale=0.5) for each in zip(x, masks, strict=True)]
    call = torch.vmap(lambda x, mask: ops.scaled_softmax(x, mask, scale=0.5))
    assert torch.equal(call(x, masks), torch.stack(loop))
    alone = torch.vmap(lambda mask: ops.scaled_softmax(x[0], mask, scale=0.5))
    assert torch.equal(alone(masks)[0], loop[0])
    y, dy = call(x, masks), numbers(3, 2, 2, 2, 5, seed=7)
    backward = torch.ops.course_lib.scaled_softmax_backward
    found = torch.vmap(lambda dy, y: backward(dy, y, 0.5, True))(dy, y)
    assert torch.equal(found, torch.stack([*map(lambda *g: backward(*g, 0.5, True), dy, y)]))
