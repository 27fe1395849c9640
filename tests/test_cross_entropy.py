"""Cross-entropy: every rung, both directions, every option, against float64 and PyTorch."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import PLACE, double
from turns import in_turns

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import cross_entropy
from course_lib.runtime.host.arrays import ArrayError

# Half a unit in the last place of the result, and a few units of float32 arithmetic.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 4.5e-3}
FLOOR = {torch.float32: 1e-36, torch.float16: 6e-8, torch.bfloat16: 1e-36}  # half the smallest
FORMS = ("indices", "probabilities")
NAN, INF = math.nan, math.inf

OF_ROWS = [name for name in cross_entropy.FORWARD if name != "strided"]
every_variant = pytest.mark.parametrize("variant", OF_ROWS)
every_form = pytest.mark.parametrize("form", FORMS)
OPTIONS = list(itertools.product(FORMS, (False, True), (0.0, 0.1, 1.0), cross_entropy.REDUCTIONS))


def case(form, n_rows, n_classes, dtype=torch.float32, weighted=False, offset=0.0, ignored=False):
    """(logits, target, weight or None) on the device under test."""
    logits = torch.randn(n_rows, n_classes).mul(3).add(offset)
    if form == "probabilities":
        # Probabilities need not add up to 1, in PyTorch neither.
        target = torch.randn(n_rows, n_classes).softmax(1).mul(1.25).to(dtype)
    else:
        target = torch.randint(n_classes, (n_rows,))
        if ignored:
            target[torch.rand(n_rows) < 0.3] = -100
    weight = torch.rand(n_classes).add(0.2).to(PLACE, dtype) if weighted else None
    return logits.to(PLACE, dtype), target.to(PLACE), weight


def truth(logits, target, dloss=None, *, weight=None, **options):
    target = target.cpu().numpy() if target.dtype == torch.int64 else double(target)
    arguments = (double(logits), target)
    if dloss is None:
        return reference.cross_entropy(*arguments, weight=double(weight), **options)
    return reference.cross_entropy_backward(
        double(dloss), *arguments, weight=double(weight), **options
    )


def assert_close(actual, expected, terms):
    """Equal to within the dtype's rounding and 1e-6 of `terms`, the size of what was added up."""
    values = double(actual)
    assert values.shape == np.shape(expected)
    assert np.array_equal(np.isnan(values), np.isnan(expected))
    finite = np.isfinite(expected)
    assert np.array_equal(values[~finite], expected[~finite], equal_nan=True)
    error = np.abs(values - expected)[finite]
    limit = TOLERANCE[actual.dtype] * np.abs(expected)[finite] + FLOOR[actual.dtype]
    limit = limit + 1e-6 * np.broadcast_to(terms, values.shape)[finite]
    assert (error <= limit).all(), f"worst {np.max(error / limit):.3g} times the limit"


def loss_sizes(loss, saved):
    """What a loss near 0 is the difference of: about the sum of the row's target."""
    stats, normaliser = (double(tensor) for tensor in saved)
    mass = np.nan_to_num(stats[:, 2])
    with np.errstate(invalid="ignore"):
        return mass if loss.ndim else np.nan_to_num(mass.sum() / normaliser[0])


def gradient_sizes(logits, dloss, saved):
    """What a gradient is the difference of, at its largest in each row: dloss·mass·softmax(x)."""
    stats, normaliser = (double(tensor) for tensor in saved)
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = np.abs(double(dloss)) / normaliser * stats[:, 2]
    sizes = factor[:, None] * reference.softmax(double(logits)).max(1, keepdims=True, initial=0.0)
    return np.nan_to_num(sizes, posinf=0.0)


def both_directions(variant, logits, target, **options):
    """Run and check the forward and the backward pass."""
    loss, *saved = cross_entropy.forward(logits, target, variant=variant, **options)
    expected = truth(logits, target, **options)
    assert_close(loss, expected, loss_sizes(loss, saved))
    dloss = torch.randn(loss.shape).to(loss)
    out = torch.full_like(logits, NAN, memory_format=torch.contiguous_format)
    dlogits = cross_entropy.backward(
        dloss, logits, target, *saved, variant=variant, out=out, **options
    )
    assert dlogits is out
    expected = truth(logits, target, dloss, **options)
    assert_close(dlogits, expected, gradient_sizes(logits, dloss, saved))
    return loss, dlogits


@every_variant
@settings(max_examples=20, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 40))
    | st.tuples(st.integers(1, 3), st.integers(1, 700)),
    form=st.sampled_from(FORMS),
    dtype=st.sampled_from(list(TOLERANCE)),
    weighted=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(cross_entropy.REDUCTIONS),
    offset=st.sampled_from([0.0, 1e4, -1e4]),
    seed=st.integers(0, 2**31),
)
def test_random_cases(variant, shape, form, dtype, weighted, smoothing, reduction, offset, seed):
    torch.manual_seed(seed)
    logits, target, weight = case(form, *shape, dtype, weighted, offset, ignored=True)
    both_directions(
        variant, logits, target, weight=weight, label_smoothing=smoothing, reduction=reduction
    )


@pytest.mark.parametrize(
    "form, weighted, smoothing, reduction, variant", in_turns(OPTIONS, OF_ROWS)
)
def test_every_option_against_pytorch(form, weighted, smoothing, reduction, variant):
    logits, target, weight = case(form, 6, 21, weighted=weighted, ignored=True)
    options = dict(weight=weight, label_smoothing=smoothing, reduction=reduction)
    loss, dlogits = both_directions(variant, logits, target, **options)

    theirs = logits.double().requires_grad_()
    options["weight"] = None if weight is None else weight.double()
    soft = form == "probabilities"
    expected = F.cross_entropy(theirs, target.double() if soft else target, **options)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    dloss = torch.randn_like(expected)
    expected.backward(dloss)
    # The truth, too, is held against PyTorch's.
    np.testing.assert_allclose(truth(logits, target, **options), double(expected), rtol=1e-12)
    found = truth(logits, target, dloss, **options)
    np.testing.assert_allclose(found, double(theirs.grad), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("form, weighted, smoothing, reduction", OPTIONS)
def test_gradient_is_that_of_the_loss(form, weighted, smoothing, reduction):
    """Finite differences of the truth, whose gradient the kernels are held to."""
    logits, target, weight = case(form, 3, 4, weighted=weighted)
    options = dict(weight=weight, label_smoothing=smoothing, reduction=reduction)
    x, step = double(logits), 1e-5
    dloss = np.random.default_rng(1).normal(size=(3,) if reduction == "none" else ())
    analytic = truth(logits, target, torch.as_tensor(dloss), **options)
    for i, j in np.ndindex(x.shape):
        sides = []
        for sign in (1, -1):
            moved = x.copy()
            moved[i, j] += sign * step
            sides.append((dloss * truth(torch.from_numpy(moved), target, **options)).sum())
        numeric = (sides[0] - sides[1]) / (2 * step)
        assert abs(numeric - analytic[i, j]) < 1e-8


@every_variant
@every_form
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_special_values_as_in_pytorch(variant, form, smoothing):
    rows = [
        [1.0, -INF, 2.0, 0.5],
        [-INF] * 4,
        [0.0, INF, 1.0, 2.0],
        [0.0, 1.0, NAN, 2.0],
        [-INF, -INF, -INF, 7.0],
        [3e38, -3e38, 0.0, 1.0],
        [88.0, -200.0, 1e-40, -0.0],
    ]
    logits = torch.tensor(rows, device=PLACE)
    label = torch.tensor([0, 1, 0, 0, 3, 0, 3], device=PLACE)
    target = label if form == "indices" else F.one_hot(label, 4).float().mul(0.5).add(0.125)
    options = dict(label_smoothing=smoothing, reduction="none")
    loss, *saved = cross_entropy.forward(logits, target, variant=variant, **options)
    theirs = logits.clone().requires_grad_()
    expected = F.cross_entropy(theirs, target, **options)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6, equal_nan=True)
    dloss = torch.full_like(loss, 2.0)
    dlogits = cross_entropy.backward(dloss, logits, target, *saved, variant=variant, **options)
    expected.backward(dloss)
    torch.testing.assert_close(dlogits, theirs.grad, rtol=1e-6, atol=1e-6, equal_nan=True)


@every_variant
def test_masked_classes_cost_nothing(variant):
    """A class that is masked in every row might as well not be there."""
    logits, _, _ = case("indices", 5, 300)
    target = torch.arange(0, 10, 2, device=PLACE)
    fewer = logits[:, ::2]
    logits[:, 1::2] = -INF
    loss, dlogits = both_directions(variant, logits, target)
    expected, dexpected = both_directions(variant, fewer, target // 2)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert (dlogits[:, 1::2] == 0).all()


@every_variant
@every_form
def test_zero_probability_of_a_masked_class_is_nan_as_in_pytorch(variant, form):
    logits = torch.tensor([[0.0, -INF, 1.0]], device=PLACE)
    target = torch.tensor([[0.5, 0.0, 0.5]], device=PLACE)
    if form == "indices":  # a label says nothing of other classes, masked or not
        target = torch.tensor([0], device=PLACE)
    loss, *_ = cross_entropy.forward(logits, target, variant=variant)
    expected = F.cross_entropy(logits, target)
    assert expected.isnan() == (form == "probabilities")
    torch.testing.assert_close(loss, expected, equal_nan=True)


@every_variant
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("index", [4, -1, -99, 2**40, -(2**62)])
def test_indices_out_of_range_are_nan(variant, smoothing, index):
    logits, target, weight = case("indices", 4, 4, weighted=True)
    target[2] = index
    for reduction in ("none", "mean"):
        options = dict(weight=weight, label_smoothing=smoothing, reduction=reduction)
        loss, dlogits = both_directions(variant, logits, target, **options)
        affected = [2] if reduction == "none" else [0, 1, 2, 3]
        assert dlogits.isnan().all(dim=1).nonzero().flatten().tolist() == affected
        assert loss.isnan().nonzero().flatten().tolist() == ([2] if reduction == "none" else [])
        assert reduction == "none" or loss.isnan()


@every_variant
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_rows(variant, smoothing):
    logits, target, _ = case("indices", 5, 9)
    target[1] = target[3] = 2
    target[0] = target[2] = target[4] = 5
    logits[1] = NAN
    options = dict(ignore_index=2, label_smoothing=smoothing)
    loss, dlogits = both_directions(variant, logits, target, **options)
    expected = F.cross_entropy(logits[::2], target[::2], label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert (dlogits[1::2] == 0).all() and (dlogits[::2] != 0).all()
    # An index is ignored also where it names no class …
    target[1] = target[3] = 77
    again, _ = both_directions(variant, logits, target, **options | dict(ignore_index=77))
    assert torch.equal(again, loss)
    # … and the mean over nothing is NaN, its gradient 0.
    target.fill_(2)
    loss, dlogits = both_directions(variant, logits, target, **options)
    assert loss.isnan() and (dlogits == 0).all()
    assert F.cross_entropy(logits, target, **options).isnan()


@every_variant
@every_form
@pytest.mark.parametrize("reduction", cross_entropy.REDUCTIONS)
def test_no_rows(variant, form, reduction):
    logits, target, _ = case(form, 0, 5)
    loss, dlogits = both_directions(variant, logits, target, reduction=reduction)
    expected = F.cross_entropy(logits, target, reduction=reduction)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    assert dlogits.shape == (0, 5)


@every_variant
@pytest.mark.parametrize("shape, form", in_turns(
    [((1, 1),), ((7, 1),), ((1, 2),), ((2, 2600),), ((1, 9001),), ((300, 3),)], FORMS
))  # fmt: skip
def test_shapes(variant, shape, form):
    """One class; rows for lanes, for a block, for several blocks; more rows than fill one block."""
    if shape == (300, 3) and variant == "online" and SIMULATED:
        pytest.skip(
            "a block for each row: no more than a smaller number shows, and slow to simulate"
        )
    logits, target, weight = case(form, *shape, weighted=True)
    both_directions(variant, logits, target, weight=weight, label_smoothing=0.1)


@every_variant
@every_form
@pytest.mark.parametrize(
    "start, own_start, dtype", in_turns([(0, 0), (1, 1), (3, 3), (0, 2), (1, 0)], TOLERANCE)
)
def test_memory_that_starts_anywhere(variant, form, dtype, start, own_start):
    """Rows off the 16-byte boundaries; logits, target and gradient off by different amounts."""
    n_rows, n_classes = 3, 37
    logits, target, _ = case(form, n_rows, n_classes, dtype)

    def moved(array, by):
        room = torch.full((by + array.numel() + 8,), 7.0, dtype=dtype, device=PLACE)
        view = room[by : by + array.numel()].view(array.shape)
        view.copy_(array)
        return room, view

    _, logits = moved(logits, start)
    if form == "probabilities":
        _, target = moved(target, own_start)
    both_directions(variant, logits, target)
    loss, *saved = cross_entropy.forward(logits, target, variant=variant)
    room, out = moved(torch.full_like(logits, NAN), own_start)
    dloss = torch.ones_like(loss)
    cross_entropy.backward(dloss, logits, target, *saved, variant=variant, out=out)
    expected = truth(logits, target, dloss)
    assert_close(out, expected, gradient_sizes(logits, dloss, saved))
    behind = room[own_start + out.numel() :]
    assert (room[:own_start] == 7).all() and (behind == 7).all()


@every_form
def test_strided_arguments(form):
    logits, target, weight = case(form, 6, 10, weighted=True)
    twice = [torch.stack([a, a], dim=-1)[..., 0] for a in (logits, target, weight)]
    assert not any(array.is_contiguous() for array in twice)
    options = dict(weight=weight, reduction="none")
    loss, dlogits = both_directions("vectorised", *twice[:2], **options | dict(weight=twice[2]))
    expected, *saved = cross_entropy.forward(logits, target, **options)
    assert torch.equal(loss, expected)
    one = torch.ones((), device=PLACE)
    dlogits = cross_entropy.backward(one.expand(6), logits, target, *saved, **options)
    whole = cross_entropy.backward(one.repeat(6), logits, target, *saved, **options)
    assert torch.equal(dlogits, whole)


def test_the_sum_over_many_rows_takes_several_blocks(monkeypatch):
    monkeypatch.setattr(cross_entropy.finishing, "ROWS_PER_SUM", 8)
    for n_rows in (8, 9, 70):
        logits, target, weight = case("indices", n_rows, 3, weighted=True, ignored=True)
        for reduction in ("mean", "sum"):
            both_directions("vectorised", logits, target, weight=weight, reduction=reduction)


@settings(deadline=None)
@given(n_rows=st.integers(1, 2**20), n_bytes=st.integers(2, 2**22), together=st.booleans())
def test_plans_are_what_the_kernels_expect(n_rows, n_bytes, together):
    team, block = cross_entropy.rows.plan(n_rows, n_bytes, together)
    assert team & (team - 1) == 0 and 32 <= block <= 1024
    # A team that adds up is lanes of one warp or a whole block; otherwise blocks divide it.
    assert team == block or (team <= 32 if together else team % block == 0 or block % team == 0)
    # Where rows are many, nothing is gained by larger teams.
    assert n_rows < cross_entropy.rows.ENOUGH_THREADS or team <= cross_entropy.rows.MOST_BLOCK


def test_what_is_saved():
    logits, target, weight = case("indices", 4, 9, weighted=True)
    target[1] = -100
    _, stats, normaliser = cross_entropy.forward(logits, target, weight=weight)
    counted = [0, 2, 3]
    expected = logits.double().logsumexp(1)[counted]
    m, s = stats[counted, :2].double().T
    torch.testing.assert_close(m + s.log(), expected, rtol=1e-6, atol=0)
    assert torch.equal(stats[counted, 0], logits.amax(1)[counted])
    assert torch.equal(stats[counted, 3], weight[target[counted]])
    assert (stats[1] == 0).all()
    torch.testing.assert_close(normaliser, weight[target[counted]].sum().view(1))
    for reduction in ("sum", "none"):
        *_, normaliser = cross_entropy.forward(logits, target, reduction=reduction)
        assert normaliser.tolist() == [1.0]


def test_errors_name_what_was_expected():
    logits, target, weight = case("indices", 4, 5, weighted=True)
    forward = cross_entropy.forward
    with pytest.raises(ValueError, match="'strided' takes logits of more than two dimensions"):
        forward(logits, target, variant="strided")
    with pytest.raises(ArrayError, match="logits must be float32 or float16 or bfloat16, not int"):
        forward(logits.int(), target)
    with pytest.raises(ArrayError, match="logits must have 2 dimensions"):
        forward(logits[0], target)
    with pytest.raises(ArrayError, match=r"logits need a class at least, .* \(4, 0\)"):
        forward(logits[:, :0], target)
    with pytest.raises(ArrayError, match="target must be int64 or float32, not int32"):
        forward(logits, target.int())
    with pytest.raises(ArrayError, match="target must be int64 or float32, not float16"):
        forward(logits, logits.half())
    with pytest.raises(ArrayError, match=r"target of probabilities must have shape \(4, 5\)"):
        forward(logits, logits[:, 0])
    with pytest.raises(ArrayError, match=r"weight must have shape \(5,\), not \(4,\)"):
        forward(logits, target, weight=weight[:4])
    with pytest.raises(ArrayError, match="weight must be float32, not bfloat16"):
        forward(logits, target, weight=weight.bfloat16())
    with pytest.raises(ValueError, match="label_smoothing must be from 0 to 1, not 1.5"):
        forward(logits, target, label_smoothing=1.5)
    with pytest.raises(ValueError, match="label_smoothing must be from 0 to 1, not nan"):
        forward(logits, target, label_smoothing=NAN)
    with pytest.raises(ValueError, match="unknown reduction 'max'; there are mean, sum, none"):
        forward(logits, target, reduction="max")
    with pytest.raises(ValueError, match="ignore_index=3 means nothing for class probabilities"):
        forward(logits, logits, ignore_index=3)
    loss, stats, normaliser = forward(logits, target)
    saved = (logits, target, stats, normaliser)
    with pytest.raises(ArrayError, match=r"dloss must have shape \(4,\), not \(\)"):
        cross_entropy.backward(loss, *saved, reduction="none")
    with pytest.raises(ArrayError, match=r"stats must have shape \(4, 4\)"):
        cross_entropy.backward(loss, logits, target, stats[:, 0], normaliser)


@pytest.mark.skipif(not SIMULATED, reason="the sanitizer watches the simulator")
@every_variant
@every_form
def test_the_sanitizer_finds_nothing(variant, form):
    for shape in [(3, 21), (1, 1300)]:
        logits, target, weight = case(form, *shape, weighted=True)
        options = dict(weight=weight, label_smoothing=0.1, variant=variant)
        with simulator.sanitize() as report:
            loss, *saved = cross_entropy.forward(logits, target, **options)
            cross_entropy.backward(torch.ones_like(loss), logits, target, *saved, **options)
        assert not report.findings, report.findings


@pytest.mark.gpu
@every_variant
@every_form
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_language_model(variant, form, dtype):
    torch.manual_seed(0)
    logits = torch.randn(8192, 32000, device=PLACE, dtype=dtype).mul_(3)
    target = torch.randint(32000, (8192,), device=PLACE)
    if form == "probabilities":
        target = torch.randn(8192, 32000, device=PLACE).softmax(1).to(dtype)
    else:
        target[::7] = -100
    loss, *saved = cross_entropy.forward(logits, target, variant=variant)
    dloss = torch.full_like(loss, 1024.0)
    dlogits = cross_entropy.backward(dloss, logits, target, *saved, variant=variant)
    rows = torch.arange(0, 8192, 97, device=PLACE)
    saved[0], part, wanted = saved[0][rows], logits[rows].double().requires_grad_(), target[rows]
    wanted = wanted.double() if form == "probabilities" else wanted
    expected = F.cross_entropy(part, wanted, reduction="sum")
    (expected / saved[1].double() * 1024).sum().backward()
    sizes = gradient_sizes(part, dloss, saved)
    assert_close(dlogits[rows], double(part.grad), sizes)
    losses = cross_entropy.forward(logits, target, variant=variant, reduction="none")[0]
    expected = losses.double().sum() / saved[1].double()
    torch.testing.assert_close(loss.double().view(1), expected, rtol=2 * TOLERANCE[dtype], atol=0)


@pytest.mark.gpu
@pytest.mark.gpu_memory(16)
@every_variant
def test_more_than_two_billion_elements(variant):
    n_classes = 131_075
    n_rows = 2**31 // n_classes + 3
    logits = torch.zeros(n_rows, n_classes, device=PLACE, dtype=torch.bfloat16)
    logits[-1, -1] = 20.0
    target = torch.full((n_rows,), n_classes - 1, device=PLACE)
    loss, *saved = cross_entropy.forward(logits, target, variant=variant, reduction="none")
    expected = math.log(n_classes)
    assert ((loss[:-1] - expected).abs() < 0.05).all() and loss[-1] < 0.01
    dlogits = cross_entropy.backward(
        torch.ones_like(loss), logits, target, *saved, variant=variant, reduction="none"
    )
    assert (dlogits[:-1, -1] < -0.99).all() and dlogits[-1, -1].abs() < 0.01
    assert (dlogits[:, :-1] >= 0).all() and dlogits[-1].count_nonzero() == n_classes
