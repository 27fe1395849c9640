"""Cross-entropy of logits whose classes are not the last axis: the rung `strided`."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import PLACE, double

from course_lib import ops, reference, simulator
from course_lib.kernels import cross_entropy
from course_lib.kernels.cross_entropy import strided
from course_lib.runtime.host.arrays import ArrayError
from course_lib.runtime.host.launch import recorded

NAN, INF = math.nan, math.inf
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 4.5e-3}
FLOOR = {torch.float32: 1e-36, torch.float16: 6e-8, torch.bfloat16: 1e-36}  # half the smallest
DTYPES = list(TOLERANCE)
pytestmark = pytest.mark.seed(2)


def rows(logits):
    """float64 logits (n_rows, n_classes)."""
    return double(logits.movedim(1, -1).reshape(-1, logits.shape[1]))


def case(shape, dtype=torch.float32, weighted=False, offset=0.0, ignore_index=-1):
    """(logits, target, weight or None): a third of the pixels are ignored."""
    logits = torch.randn(shape).mul(3).add(offset)
    target = torch.randint(shape[1], (shape[0], *shape[2:]))
    target[torch.rand(target.shape) < 0.3] = ignore_index
    weight = torch.rand(shape[1]).add(0.2).to(PLACE, dtype) if weighted else None
    return logits.to(PLACE, dtype), target.to(PLACE), weight


def check(logits, target, weight, **options):
    """Both directions against float64; returns (loss, dlogits)."""
    options["weight"] = weight
    loss, stats, normaliser = cross_entropy.forward(logits, target, **options)
    assert stats.shape == (0, 4)
    pixels = (logits.shape[0], *logits.shape[2:])
    assert loss.dtype == logits.dtype
    assert loss.shape == (pixels if options.get("reduction") == "none" else ())
    dloss = torch.randn(loss.shape).to(loss)
    out = torch.full_like(logits, NAN, memory_format=torch.contiguous_format)
    dlogits = cross_entropy.backward(
        dloss, logits, target, stats, normaliser, out=out, **options
    )
    assert dlogits is out
    wanted = {**options, "weight": double(weight)}
    flat = rows(logits), target.reshape(-1).cpu().numpy()
    assert_close(loss, reference.cross_entropy(*flat, **wanted).reshape(loss.shape), 1)
    expected = reference.cross_entropy_backward(double(dloss).reshape(-1), *flat, **wanted)
    # What a gradient is the difference of: dloss·weight·softmax(x), and as much of the target.
    heaviest = 1 if weight is None else double(weight).max()
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.nan_to_num(np.abs(double(dloss)) / double(normaliser)[0] * heaviest, posinf=0)
    size = np.broadcast_to(size, pixels)[..., None]
    shape = (*pixels, logits.shape[1])
    assert_close(dlogits.movedim(1, -1), expected.reshape(shape), size)
    return loss, dlogits


def assert_close(actual, expected, size):
    values = double(actual)
    assert np.array_equal(np.isnan(values), np.isnan(expected))
    finite = np.isfinite(expected)
    assert np.array_equal(values[~finite], expected[~finite], equal_nan=True)
    limit = TOLERANCE[actual.dtype] * np.abs(expected) + 2e-6 * size + FLOOR[actual.dtype]
    assert (np.abs(values[finite] - expected[finite]) <= limit[finite]).all()


SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 5), st.integers(1, 8))


@settings(max_examples=20, deadline=None)
@given(
    shape=SHAPES | st.tuples(st.integers(1, 2), st.integers(1, 40), st.sampled_from([1, 3, 8, 16])),
    dtype=st.sampled_from(DTYPES),
    weighted=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(cross_entropy.REDUCTIONS),
    ignore_index=st.sampled_from([-1, -100, 0]),
    offset=st.sampled_from([0.0, 1e4, -1e4]),
    seed=st.integers(0, 2**31),
)
def test_random_cases(shape, dtype, weighted, smoothing, reduction, ignore_index, offset, seed):
    torch.manual_seed(seed)
    tensors = case(shape, dtype, weighted, offset, ignore_index)
    check(
        *tensors, ignore_index=ignore_index, label_smoothing=smoothing, reduction=reduction
    )


@pytest.mark.parametrize("n_classes", [2, 6, 12, 21])  # every number of slots
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_pixels", [8, 7])  # by vectors, by elements
def test_every_kernel(n_classes, dtype, n_pixels):
    for smoothing in (0.0, 0.1):
        tensors = case((2, n_classes, n_pixels), dtype, weighted=True)
        check(*tensors, ignore_index=-1, label_smoothing=smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("n_classes", [5, 19])
def test_special_values_as_in_pytorch(smoothing, n_classes):
    logits, _, _ = case((1, n_classes, 16))
    target = torch.ones(1, 16, dtype=torch.int64, device=PLACE)
    logits[0, 0, 0], logits[0, 0, 1], logits[0, 0, 2] = NAN, INF, -INF
    logits[0, :, 3], logits[0, 1, 4] = -INF, -INF  # all masked; the label itself
    logits[0, 3, 5:8] = torch.tensor([NAN, INF, -INF], device=PLACE)
    target[0, 5:8] = -1  # ignored, whatever their logits
    options = dict(ignore_index=-1, reduction="none", label_smoothing=smoothing)
    loss, dlogits = check(logits, target, None, **options)
    expected = F.cross_entropy(logits, target, **options)
    torch.testing.assert_close(loss, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert not dlogits[0, :, 5:8].any()


@pytest.mark.parametrize("index", [-2, 5, 2**40])
def test_indices_out_of_range_are_nan(index):
    logits, target, _ = case((1, 5, 8))
    target[0, 3] = index
    loss, dlogits = check(logits, target, None, ignore_index=-1, reduction="none")
    assert loss[0, 3].isnan() and dlogits[0, :, 3].isnan().all()
    assert not loss[0, [0, 1, 2, 4, 5, 6, 7]].isnan().any()
    loss, _, _ = cross_entropy.forward(logits, target, ignore_index=-1)
    assert loss.isnan()


def test_nothing_counts_and_nothing_is_there():
    logits, target, _ = case((2, 3, 4))
    target[:] = -1
    loss, dlogits = check(logits, target, None, ignore_index=-1, reduction="sum")
    assert loss == 0 and not dlogits.any()
    assert cross_entropy.forward(logits, target, ignore_index=-1)[0].isnan()  # as in PyTorch
    for shape in ((0, 3, 4), (2, 3, 0, 5)):
        logits = torch.empty(shape, device=PLACE)
        target = torch.empty((shape[0], *shape[2:]), dtype=torch.int64, device=PLACE)
        loss, *saved = cross_entropy.forward(logits, target, reduction="sum")
        assert loss == 0
        found = cross_entropy.backward(loss, logits, target, *saved, reduction="sum")
        assert found.shape == shape


def test_runs_agree_bit_for_bit_and_many_blocks_are_summed(monkeypatch):
    monkeypatch.setattr(strided, "BLOCK_SIZE", 32)
    monkeypatch.setattr(cross_entropy.finishing, "ROWS_PER_SUM", 4)
    logits, target, weight = case((3, 3, 11, 31), weighted=True)
    first, second = (check(logits, target, weight, ignore_index=-1)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 8), (1, 19, 8), (2, 6, 5)])
def test_sanitizer_finds_nothing(shape, dtype):
    logits, target, weight = case(shape, dtype, weighted=True)
    with simulator.sanitize() as report:
        for options in (dict(), dict(label_smoothing=0.1), dict(reduction="none")):
            options = options | dict(weight=weight, ignore_index=-1)
            loss, *saved = cross_entropy.forward(logits, target, **options)
            cross_entropy.backward(loss, logits, target, *saved, **options)
    assert not report, str(report)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_logit_is_moved_once(dtype):
    """Forward reads logits once, backward reads them and writes as many: in whole sectors."""
    logits, target, _ = case((1, 7, 256), dtype)
    least = logits.numel() * logits.itemsize // 32

    with simulator.trace() as trace:
        loss, *saved = cross_entropy.forward(logits, target, ignore_index=-1)
    vectors = [s for s in trace.sites if s.source.startswith("load_vector")]
    assert sum(site.sectors for site in vectors) == least
    with simulator.trace() as trace:
        cross_entropy.backward(loss, logits, target, *saved, ignore_index=-1)
    for what in ("load_vector", "store_vector"):
        found = [site for site in trace.sites if site.source.startswith(what)]
        assert sum(site.sectors for site in found) == least


def test_errors_name_what_was_expected():
    logits, target, _ = case((2, 5, 3, 4))
    forward = cross_entropy.forward
    with pytest.raises(ValueError, match="variant 'online' takes logits of two dimensions, not 4"):
        forward(logits, target, variant="online")
    with pytest.raises(ValueError, match="'strided' takes logits of more than two"):
        forward(logits[:, :, 0, 0], target[:, 0, 0], variant="strided")
    with pytest.raises(ArrayError, match=r"indices must have shape \(2, 3, 4\), not \(2, 4, 3\)"):
        forward(logits, target.mT)
    with pytest.raises(ArrayError, match=r"goes with logits of two dimensions, not shape \(2, 5,"):
        forward(logits, logits)
    with pytest.raises(ArrayError, match=r"logits need a class at least, .* \(2, 0, 3, 4\)"):
        forward(logits[:, :0], target)
    with pytest.raises(ArrayError, match=r"weight must have shape \(5,\), not \(4,\)"):
        forward(logits, target, weight=logits[0, :4, 0, 0])
    loss, *saved = forward(logits, target, ignore_index=-1, variant="strided")
    with pytest.raises(ArrayError, match=r"dloss must have shape \(2, 3, 4\), not \(\)"):
        cross_entropy.backward(loss, logits, target, *saved, reduction="none")


def kernel_names(function):
    with recorded() as launches:
        function()
    return [kernel.py_func.__name__ for kernel, *_ in launches]


def test_the_operator_reads_logits_as_they_lie():
    logits, target, weight = case((2, 5, 3, 4), weighted=True)
    names = kernel_names(lambda: ops.cross_entropy(logits, target, weight, ignore_index=-1))
    assert names == ["strided_kernel", "finish_kernel"]
    last = logits.to(memory_format=torch.channels_last).requires_grad_()
    names = kernel_names(lambda: ops.cross_entropy(last, target, ignore_index=-1))
    assert names == ["vectorised_kernel", "finish_kernel"]
    (found,) = torch.autograd.grad(ops.cross_entropy(last, target, ignore_index=-1), last)
    assert found.is_contiguous(memory_format=torch.channels_last)
