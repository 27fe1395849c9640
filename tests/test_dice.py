"""The Dice loss: both directions, every option, against float64, PyTorch and differences."""

import itertools
import math

import numpy as np
import peers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import PLACE, double
from test_cross_entropy_strided import DTYPES, FLOOR, TOLERANCE, case

from course_lib import nn, ops, reference, simulator
from course_lib.kernels import dice
from course_lib.runtime.host.arrays import ArrayError

NAN, INF = math.nan, math.inf
BOTH = dict(dice_weight=0.4, cross_entropy_weight=0.6)
pytestmark = pytest.mark.seed(4)


def assert_close(actual, expected, size):
    """Equal to within the dtype's rounding and 2e-6 of `size`, what was added up."""
    values = double(actual)
    assert values.shape == expected.shape
    assert np.array_equal(np.isnan(values), np.isnan(expected))
    limit = TOLERANCE[actual.dtype] * np.abs(expected) + 2e-6 * size + FLOOR[actual.dtype]
    error = np.abs(values - expected)
    assert not (error > limit).any(), f"worst {np.nanmax(error / limit):.3g} times the limit"


def check(logits, target, weight=None, **options):
    """Both directions against float64; returns (loss, dlogits)."""
    own = {k: v for k, v in options.items() if k == "ignore_index"}
    loss, factors = dice.forward(logits, target, weight=weight, **options)
    assert loss.shape == () and loss.dtype == logits.dtype
    wanted = {**options, "weight": double(weight)}
    arguments = double(logits), target.cpu().numpy()
    sizes = abs(options.get("dice_weight", 1)) + abs(options.get("cross_entropy_weight", 0))
    expected = np.asarray(reference.dice_loss(*arguments, **wanted))
    assert_close(loss, expected, sizes)
    dloss = torch.randn(()).to(loss)
    out = torch.full_like(logits, NAN)
    dlogits = dice.backward(dloss, logits, target, factors, weight=weight, out=out, **own)
    assert dlogits is out
    expected = reference.dice_loss_backward(double(dloss), *arguments, **wanted)
    # The sums are known to within float32's rounding of them, and gradients are differences.
    largest = np.abs(np.nan_to_num(expected)).max(initial=0)
    factor = np.nan_to_num(np.abs(double(factors))).max(initial=0) * abs(double(dloss))
    heaviest = 1 if weight is None else max(1, double(weight).max())
    assert_close(dlogits, expected, largest + factor * heaviest)
    return loss, dlogits


@settings(max_examples=20, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 5), st.integers(1, 8))
    | st.tuples(st.integers(1, 2), st.integers(1, 40), st.sampled_from([1, 3, 8, 16]))
    | st.tuples(st.integers(1, 9), st.integers(1, 5)),
    dtype=st.sampled_from(DTYPES),
    weighted=st.booleans(),
    weights=st.sampled_from([(1.0, 0.0), (0.4, 0.6), (0.0, 1.0)]),
    smooth=st.sampled_from([1.0, 0.0, 1e-5]),
    ignore_index=st.sampled_from([-1, -100, 0]),
    offset=st.sampled_from([0.0, 1e4, -1e4]),
    seed=st.integers(0, 2**31),
)
def test_random_cases(shape, dtype, weighted, weights, smooth, ignore_index, offset, seed):
    torch.manual_seed(seed)
    tensors = case(shape, dtype, weighted, offset, ignore_index)
    check(
        *tensors, ignore_index=ignore_index, smooth=smooth, dice_weight=weights[0],
        cross_entropy_weight=weights[1],
    )  # fmt: skip


@pytest.mark.parametrize("n_classes", [2, 6, 12, 21, 30])  # every number of slots, and more
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_pixels", [16, 7])  # by vectors, by elements
def test_every_kernel(n_classes, dtype, n_pixels):
    check(*case((2, n_classes, n_pixels), dtype, weighted=True), ignore_index=-1, **BOTH)


def test_each_forward_kernel_is_some_images():
    taken = set()
    for dtype, n_classes, n_pixels in itertools.product(
        (torch.float32, torch.float16), range(1, 40), (7, 8)
    ):
        vectors, _, held = dice.forward_way(
            torch.empty(1, n_classes, n_pixels, dtype=dtype), n_classes, n_pixels
        )
        taken.add((vectors, held))
    assert taken == set(dice.FORWARD_KERNELS)


@pytest.mark.parametrize("options", [dict(), dict(smooth=0.0), BOTH])
def test_truth_is_that_of_the_definition(options):
    logits, target, weight = case((2, 5, 3, 4), weighted=True)
    logits, weight = logits.double().requires_grad_(), weight.double()
    expected = peers.dice_loss(logits, target, weight, ignore_index=-1, **options)
    (gradient,) = torch.autograd.grad(1.7 * expected, logits)
    arguments = double(logits), target.cpu().numpy()
    options = dict(weight=double(weight), ignore_index=-1, **options)
    assert reference.dice_loss(*arguments, **options) == pytest.approx(expected.item(), rel=1e-12)
    found = reference.dice_loss_backward(1.7, *arguments, **options)
    np.testing.assert_allclose(found, double(gradient), rtol=1e-10, atol=1e-14)
    for place in [tuple(np.random.randint(size) for size in found.shape) for _ in range(6)]:
        sides = []
        for step in (1e-5, -1e-5):
            moved = arguments[0].copy()
            moved[place] += step
            sides.append(1.7 * reference.dice_loss(moved, arguments[1], **options))
        assert (sides[0] - sides[1]) / 2e-5 == pytest.approx(found[place], abs=1e-8)


@pytest.mark.parametrize("smooth", [1.0, 0.0])
def test_where_nothing_counts_the_loss_is_nothing(smooth):
    options = dict(smooth=smooth, **BOTH)
    logits, target, _ = case((2, 3, 4, 4))
    target[:] = -1
    loss, dlogits = check(logits, target, ignore_index=-1, **options)
    assert loss == 0 and not dlogits.any()
    for shape in ((0, 3, 4), (2, 3, 0, 5)):
        logits = torch.empty(shape, device=PLACE)
        target = torch.empty((shape[0], *shape[2:]), dtype=torch.int64, device=PLACE)
        loss, factors = dice.forward(logits, target, **options)
        assert loss == 0 and dice.backward(loss, logits, target, factors).shape == shape


def test_empty_classes_are_defined():
    logits, target, _ = case((1, 4, 16))
    target[:] = 2  # the other classes are empty
    for smooth in (1.0, 0.0, 1e-6):
        loss, dlogits = check(logits, target, ignore_index=-1, smooth=smooth)
        assert loss.isfinite() and dlogits.isfinite().all()


@pytest.mark.parametrize("n_classes", [5, 30])
def test_values_that_are_not_finite(n_classes):
    logits, target, _ = case((1, n_classes, 16))
    target[:] = 1
    logits[0, :3, 4:7] = torch.tensor([NAN, INF, -INF], device=PLACE)
    target[0, 4:7] = -1  # ignored, whatever their logits
    loss, dlogits = check(logits, target, ignore_index=-1)
    assert loss.isfinite() and dlogits.isfinite().all() and not dlogits[0, :, 4:7].any()
    logits[0, 0, 9] = -INF  # masked: no probability
    loss, dlogits = check(logits, target, ignore_index=-1)
    assert loss.isfinite() and dlogits[0, 0, 9] == 0
    for value in (NAN, INF):
        logits[0, 2, 3] = value
        assert dice.forward(logits, target, ignore_index=-1)[0].isnan()


@pytest.mark.parametrize("index", [-2, 5, 2**40])
@pytest.mark.parametrize("n_classes", [5, 30])
def test_indices_out_of_range_are_nan(index, n_classes):
    if index == 5:
        index = n_classes
    logits, target, _ = case((1, n_classes, 16))
    target[0, 3] = index
    assert dice.forward(logits, target, ignore_index=-1)[0].isnan()
    assert dice.forward(logits, target, ignore_index=-1, dice_weight=0.0)[0].isnan()


def test_several_blocks_agree_bit_for_bit(monkeypatch):
    monkeypatch.setattr(dice, "PIXELS_OF_A_THREAD", 1)
    assert dice.forward_way(case((1, 30, 7, 43))[0], 30, 301)[2] is None  # read twice
    for n_classes in (3, 30):
        tensors = case((1, n_classes, 7, 43), weighted=True)
        first, second = (check(*tensors, ignore_index=-1, **BOTH)[0] for _ in range(2))
        assert torch.equal(first, second)
        monkeypatch.setattr(dice, "MOST_BLOCKS", 2)  # and a thread goes on to further pixels
        check(*tensors, ignore_index=-1, **BOTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 8), (1, 19, 8), (2, 6, 5), (1, 30, 3)])
def test_sanitizer_finds_nothing(shape, dtype):
    logits, target, weight = case(shape, dtype, weighted=True)
    with simulator.sanitize() as report:
        loss, factors = dice.forward(logits, target, weight=weight, ignore_index=-1, **BOTH)
        dice.backward(loss, logits, target, factors, weight=weight, ignore_index=-1)
    assert not report, str(report)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_logit_is_moved_once(dtype):
    logits, target, _ = case((1, 7, 512), dtype)
    least = logits.numel() * logits.itemsize // 32
    with simulator.trace() as trace:
        loss, factors = dice.forward(logits, target, ignore_index=-1)
    found = [site for site in trace.sites if site.source.startswith("load_vector")]
    assert sum(site.sectors for site in found) == least
    with simulator.trace() as trace:
        dice.backward(loss, logits, target, factors, ignore_index=-1)
    for what in ("load_vector", "store_vector"):
        found = [site for site in trace.sites if site.source.startswith(what)]
        assert sum(site.sectors for site in found) == least


def test_errors_name_what_was_expected():
    logits, target, weight = case((2, 5, 3, 4), weighted=True)
    for error, arguments, options, message in (
        (ValueError, (logits, target), dict(smooth=-1), "smooth must be a number from 0 on, not"),
        (ValueError, (logits, target), dict(smooth=NAN), "smooth must be a number from 0 on, not"),
        (ArrayError, (logits.int(), target), {}, "logits must be float32 or float16 or bfloat16"),
        (ArrayError, (logits[:, :0], target), {}, "with a class at least"),
        (ArrayError, (logits, target.int()), {}, "target must be int64, not int32"),
        (ArrayError, (logits, target), dict(weight=weight[:3]), r"weight must have shape \(5,\)"),
        (ArrayError, (logits, target), dict(weight=weight.half()), "weight must be float32"),
    ):
        with pytest.raises(error, match=message):
            dice.forward(*arguments, **options)
    loss, factors = dice.forward(logits, target, ignore_index=-1)
    saved = logits, target, factors
    with pytest.raises(ArrayError, match=r"dloss must have shape \(\), not \(1,\)"):
        dice.backward(loss[None], *saved)
    with pytest.raises(ArrayError, match=r"factors must have shape \(11,\)"):
        dice.backward(loss, logits, target, factors[1:])


def test_the_module():
    logits, target, weight = case((2, 3, 4, 4), weighted=True)
    module = nn.DiceLoss(weight, ignore_index=-1, cross_entropy_weight=0.5)
    expected = ops.dice_loss(logits, target, weight, ignore_index=-1, cross_entropy_weight=0.5)
    assert torch.equal(module(logits, target), expected)
    assert torch.equal(module(logits, target.clamp(0).byte()),
                       module(logits, target.clamp(0)))  # fmt: skip
    assert list(module.state_dict()) == ["weight"]
    assert "ignore_index=-1, smooth=1.0, dice_weight=1.0" in repr(module)
