"""The linear layer: every rung, both directions, against float64 and finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import linear, operation
from course_lib.kernels.gemm import plan, warpgroup_plan
from course_lib.runtime.host.arrays import ArrayError
from course_lib.runtime.host.launch import Chip, recorded

PLACE = "cpu" if SIMULATED else "cuda"
# Half a unit in the last place of the result, beside the error of the sum.
TOLERANCE = {torch.float32: 1e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
FLOOR = {torch.float32: 1e-36, torch.float16: 6e-8, torch.bfloat16: 1e-36}
#: Error of a sum, as a share of the sum of its terms' sizes.
OF_TERMS = {"float32": 1e-6, "tf32": 1.1e-3}
NAN, INF = math.nan, math.inf

every_variant = pytest.mark.parametrize("variant", linear.FORWARD)


def double(tensor):
    return None if tensor is None else tensor.detach().double().cpu().numpy()


def case(n_rows, n_in, n_out, dtype=torch.float32, bias=True):
    """(x, weight, bias or None, dy) on the device under test."""
    shapes = (n_rows, n_in), (n_out, n_in), (n_out,), (n_rows, n_out)
    x, weight, b, dy = (torch.randn(shape).to(PLACE, dtype) for shape in shapes)
    return x, weight, b if bias else None, dy


def assert_close(actual, expected, terms, precision="float32"):
    """Equal to within the dtype's rounding and a share of `terms`, what was added up."""
    values = double(actual)
    assert values.shape == np.shape(expected)
    assert np.array_equal(np.isnan(values), np.isnan(expected))
    finite = np.isfinite(expected)
    assert np.array_equal(values[~finite], expected[~finite], equal_nan=True)
    limit = TOLERANCE[actual.dtype] * np.abs(expected) + FLOOR[actual.dtype]
    with np.errstate(invalid="ignore"):
        limit = limit + OF_TERMS[precision] * np.nan_to_num(terms)
        ratio = np.abs(values - expected)[finite] / limit[finite]
    assert (ratio <= 1).all(), f"worst {np.max(ratio):.3g} times the limit"


def sizes(*tensors):
    return [None if tensor is None else np.abs(double(tensor)) for tensor in tensors]


def check_forward(x, weight, bias, activation="none", precision="float32", **options):
    y = linear.forward(x, weight, bias, activation=activation, precision=precision, **options)
    expected = reference.linear(*map(double, (x, weight)), double(bias), activation=activation)
    assert y.dtype == x.dtype and y.is_contiguous()
    assert_close(y, expected, reference.linear(*sizes(x, weight, bias)), precision)
    return y


def check_backward(dy, x, weight, precision="float32", **options):
    found = linear.backward(dy, x, weight, precision=precision, **options)
    expected = reference.linear_backward(*map(double, (dy, x, weight)))
    terms = reference.linear_backward(*sizes(dy, x, weight))
    for actual, wanted, scale, what in zip(found, expected, terms, "xwb", strict=True):
        assert actual.dtype == x.dtype
        assert_close(actual, wanted, scale, "float32" if what == "b" else precision)
    return found


@every_variant
@settings(max_examples=3 if SIMULATED else 40, deadline=None)
@given(
    shape=st.tuples(*[st.integers(0, 20 if SIMULATED else 300)] * 3),
    dtype=st.sampled_from(list(TOLERANCE)),
    bias=st.booleans(),
    activation=st.sampled_from(linear.ACTIVATIONS),
    seed=st.integers(0, 2**31),
)
def test_random_cases(variant, shape, dtype, bias, activation, seed):
    torch.manual_seed(seed)
    x, weight, bias, dy = case(*shape, dtype, bias)
    check_forward(x, weight, bias, activation, variant=variant)
    check_backward(dy, x, weight, variant=variant)


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6), (2, 0, 6), (1, 1, 1, 6)])
def test_any_number_of_dimensions(shape):
    x, weight, bias = (torch.randn(s).to(PLACE) for s in (shape, (5, 6), (5,)))
    y = check_forward(x, weight, bias, "relu")
    assert y.shape == (*shape[:-1], 5)
    check_backward(torch.randn(y.shape).to(PLACE), x, weight)


@every_variant
def test_special_values_as_in_pytorch(variant):
    x = torch.tensor([[1.0, INF, 2.0], [-INF, 0.0, 1.0], [NAN, 1.0, 1.0], [3e38, 3e38, 0.0]])
    weight = torch.tensor([[1.0, 1.0, 1.0], [0.5, -0.25, 1.0], [1.5, 0.0, 0.0], [-1.0, 1.0, 2.0]])
    bias = torch.tensor([0.0, 1.0, -INF, 0.0])
    expected = torch.nn.functional.linear(x, weight, bias)
    y = linear.forward(x.to(PLACE), weight.to(PLACE), bias.to(PLACE), variant=variant)
    torch.testing.assert_close(y.cpu(), expected, equal_nan=True)
    y = linear.forward(
        x.to(PLACE), weight.to(PLACE), bias.to(PLACE), activation="relu", variant=variant
    )
    torch.testing.assert_close(y.cpu(), torch.relu(expected), equal_nan=True)


def test_only_what_is_needed():
    x, weight, _, dy = case(4, 3, 2)
    every = linear.backward(dy, x, weight)
    for wanted in range(8):
        needs = tuple(bool(wanted & 1 << place) for place in range(3))
        found = linear.backward(dy, x, weight, needs=needs)
        for array, peer, needed in zip(found, every, needs, strict=True):
            assert array is None if not needed else torch.equal(array, peer)
    assert linear.backward(dy, x, weight, with_bias=False)[2] is None


@pytest.mark.parametrize("n_rows, n_cols", [(1, 1), (700, 3), (129, 33)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sums_of_columns(n_rows, n_cols, dtype):
    x, weight, _, dy = case(n_rows, 1, n_cols, dtype)
    dbias = linear.backward(dy, x, weight, needs=(False, False, True))[2]
    values = double(dy)
    assert_close(dbias, values.sum(0), np.abs(values).sum(0))


@pytest.mark.parametrize("arguments, options, error", [
    (((2, 3), (4, 3), (4,)), {"precision": "half"}, (ValueError, "unknown precision 'half'")),
    (((2, 3), (4, 3), (4,)), {"activation": "gelu"}, (ValueError, "unknown activation 'gelu'")),
    (((2, 3), (3,), (3,)), {}, (ArrayError, "weight must have 2 dimensions")),
    (((), (4, 3), (4,)), {}, (ArrayError, "x must have at least one dimension")),
])  # fmt: skip
def test_wrong_arguments(arguments, options, error):
    tensors = [torch.ones(shape, device=PLACE) for shape in arguments]
    with pytest.raises(error[0], match=error[1]):
        linear.forward(*tensors, **options)


def test_rows_off_boundaries_are_padded_in_large_products():
    chip = Chip((9, 0), 227 << 10, 132, 60 << 20, "H200")
    for lies in (("by_k", "by_k"), ("by_k", "by_row"), ("by_row", "by_row")):
        for n_rows, way in ((3109, "wgmma_padded"), (109, "split_k")):
            problem = plan.Problem(n_rows, 59, 3217, 2, "narrow", ("any", "any"), lies)
            found = linear.FORWARD.choose("auto", problem, chip)
            assert found.variant == f"tensor_core/{way}"
    for size, way in (((9824, 136, 89), "wgmma_padded"), ((64, 100, 20001), "split_k")):
        problem = plan.Problem(*size, 4, "tf32", ("any", "any"))
        assert linear.FORWARD.choose("auto", problem, chip).variant.startswith(f"tensor_core/{way}")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [(37, 301, 3), (70, 33, 16), (300, 67, 1)])
def test_few_outputs(size, dtype):
    x, weight, bias, dy = case(*size, dtype)
    with recorded() as launches:
        check_forward(x, weight, bias, "relu", variant="tensor_core")
        check_backward(dy, x, weight, variant="tensor_core")
    if size[2] % 8:
        assert [kernel.__name__ for kernel, *_ in launches][:3] == [
            "thin_rows_kernel", "thin_outer_kernel", "thin_columns_kernel"
        ]  # fmt: skip


@pytest.mark.parametrize("size", [(33, 75, 29), (9, 8, 17)])
def test_padded_rows(size):
    x, weight, bias, dy = case(*size, torch.bfloat16)
    check_forward(x, weight, bias, "relu", variant="tensor_core/wgmma_padded")
    check_backward(dy, x, weight, variant="tensor_core/wgmma_padded")
    if size[1] % 4:
        x, weight, bias, _ = case(*size, torch.float32)
        rounded = dict(precision="tf32", variant="tensor_core/wgmma_padded")
        check_forward(x, weight, bias, "relu", **rounded)


@pytest.mark.parametrize("variant", linear.FORWARD.variants)
@pytest.mark.skipif(not SIMULATED, reason="the sanitizer works on the simulator")
def test_clean_under_the_sanitizer(monkeypatch, variant):
    size, dtype = (9, 6, 5), torch.float32
    if "/" in variant:  # rows that begin on boundaries, which some ways need, or that are padded
        size, dtype = (9, 14, 5) if "padded" in variant else (8, 32, 16), torch.bfloat16
    # The smallest tiles, and as few ahead as a ring can have: all else is as in the larger ones.
    small = warpgroup_plan.SHAPES[2][-1]._replace(n_stages=3)
    monkeypatch.setattr(warpgroup_plan, "IN_PARTS", (small,))
    monkeypatch.setitem(warpgroup_plan.SHAPES, 2, (small,))
    monkeypatch.setattr(operation, "_chosen", operation._chosen.__wrapped__)
    x, weight, bias, dy = case(*size, dtype)
    with simulator.sanitize() as report:
        linear.forward(x, weight, bias, variant=variant)
        if variant in linear.BACKWARD.variants:
            # The tiles of `vectorised` take the simulator long; here they differ in nothing else.
            needs = *[variant != "vectorised"] * 2, True
            linear.backward(dy, x, weight, needs=needs, variant=variant)
    assert not report.findings, report
