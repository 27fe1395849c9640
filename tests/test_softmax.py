"""Softmax and log-softmax: every rung, both directions, against float64 and PyTorch."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from softmax_checks import DTYPES, PLACE, both, check, identical, randn, run

from course_lib.kernels import operation as kernels_operation
from course_lib.kernels import softmax
from course_lib.kernels.softmax import plan

#: Of rows in one piece; `strided` has tests of its own, along other axes.
VARIANTS = [variant for variant in softmax.FORWARD if variant != "strided"]
INF, NAN = math.inf, math.nan

every_variant = pytest.mark.parametrize("variant", VARIANTS)


@both
@every_variant
@settings(max_examples=12, deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), max_size=3)
    | st.tuples(st.integers(1, 3), st.integers(1, 400)),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    middle=st.sampled_from([0.0, -1e4, 1e4]),
    masked=st.sampled_from([0.0, 0.3, 0.95]),
    seed=st.integers(0, 2**32 - 1),
)
@example((), torch.float32, 1.0, 1e4, 0.0, 1)
@example((4, 1), torch.float16, 1.0, -1e4, 0.0, 2)
@example((1, 300), torch.float32, 30.0, -1e4, 0.95, 3)
def test_random_shapes(operation, variant, shape, dtype, spread, middle, masked, seed):
    x, dy = randn(*shape, seed=seed) * spread + middle, randn(*shape, dtype=dtype, seed=seed + 1)
    if x.dim():
        x[torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < masked] = -INF
    check(operation, x.to(dtype), dy, variant)


@both
@every_variant
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite(operation, variant, dtype):
    big = torch.finfo(dtype).max * 0.88  # 3e38 of float32
    rows = [
        [1, NAN, 2, 3, 0], [1, INF, 2, 3, 0], [1, -INF, 2, 3, 0], [-INF] * 5, [INF] * 5,
        [INF, -INF, 0, 1, 2], [NAN, -INF, -INF, -INF, -INF], [NAN] * 5, [INF, NAN, -INF, 0, 0],
        [-INF, -INF, 4, -INF, -INF], [big, -big, 0, 1, 2], [big] * 5, [-big] * 5, [big, 0, 0, 0, 0],
        [-big, -INF, -big, -INF, -INF], [0, 1, 2, 3, 4],
    ]  # fmt: skip
    x = torch.tensor(rows, device=PLACE).to(dtype)
    dy = randn(*x.shape, dtype=dtype)
    for order in (slice(None), [4, 3, 2, 1, 0]):
        y, _ = check(operation, x[:, order].contiguous(), dy, variant)
        wrong = [0, 1, 3, 4, 5, 6, 7, 8]
        assert y[wrong].isnan().all() and not y[-7:].isnan().any()


@both
@every_variant
def test_gradients_that_are_not_finite(operation, variant):
    if variant not in operation.BACKWARD:
        pytest.skip(f"{variant} has no backward pass")
    y = operation.forward(randn(5, 6))
    y[3, 2] = 0.0 if operation.name == "softmax" else -INF
    dy = randn(5, 6)
    dy[0, 1], dy[1, 1], dy[2, :2] = NAN, INF, torch.tensor([INF, -INF])
    dy[3, 2] = INF
    dx = operation.backward(dy, y, variant=variant)
    expected = getattr(torch, f"_{operation.name}_backward_data")(dy, y, -1, y.dtype)
    assert torch.allclose(dx, expected, atol=1e-6, equal_nan=True)
    assert not dx[4].isnan().any() and not dx[:4].isfinite().all(-1).any()


@both
@every_variant
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3), (3, 2, 0)])
def test_nothing_to_do(operation, variant, shape):
    x = torch.zeros(shape, device=PLACE)
    assert operation.forward(x, variant=variant).shape == x.shape
    if variant in operation.BACKWARD:
        assert operation.backward(x, x, variant=variant).shape == x.shape


@both
def test_by_default_a_row_is_held_where_it_fits(operation, monkeypatch):
    monkeypatch.setitem(plan.ROW_LIMIT, 1, 100)
    monkeypatch.setitem(plan.ROW_LIMIT, 2, 52)
    monkeypatch.setattr(plan, "team_plan", lambda *_: None)
    monkeypatch.setattr(kernels_operation, "_chosen", kernels_operation._chosen.__wrapped__)
    for n_cols, forward, backward in (
        (49, "registers", "registers"), (52, "registers", "registers"), (53, "registers", "split"),
        (97, "registers", "split"), (100, "registers", "split"), (101, "split", "split"),
    ):  # fmt: skip
        x, dy = randn(2, n_cols), randn(2, n_cols, seed=1)
        assert softmax.default_choice(operation.FORWARD, (x,)).rung == forward
        assert softmax.default_choice(operation.BACKWARD, (dy, x)).rung == backward
        y = run(operation.forward, (x,), "auto")
        assert identical(y, operation.forward(x, variant=forward))
        dx = run(operation.backward, (dy, y), "auto")
        assert identical(dx, operation.backward(dy, y, variant=backward))
    with pytest.raises(ValueError, match=(
        "'registers' takes rows of at most 97 elements, not 101: use one of .*, split, strided"
    )):  # fmt: skip
        operation.forward(x, variant="registers")
    with pytest.raises(ValueError, match="at most 49 elements, not 101"):
        operation.backward(dy, y, variant="registers")
