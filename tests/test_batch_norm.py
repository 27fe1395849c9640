"""Batch normalisation: every rung, both directions, both memory formats, against float64."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import batch_norm
from course_lib.kernels.batch_norm import plan, walk
from course_lib.runtime.arrays import ArrayError

PLACE = "cpu" if SIMULATED else "cuda"
EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
#: Shapes of x, and their dtypes: every rung meets all.
IMAGES = [
    ((2, 3, 5, 7), torch.float32),
    ((1, 8, 4, 4), torch.float16),
    ((3, 16, 1, 1), torch.bfloat16),
    ((2, 20, 3, 2), torch.float32),
    ((5, 2, 1, 9), torch.bfloat16),
]
RIGHT = [name for name in batch_norm.VARIANTS if name != "one_pass"]

every_variant = pytest.mark.parametrize("variant", RIGHT)
every_backward = pytest.mark.parametrize("variant", batch_norm.BACKWARD_VARIANTS)
every_inference = pytest.mark.parametrize("variant", batch_norm.INFERENCE_VARIANTS)
every_format = pytest.mark.parametrize("layout", FORMATS)


def double(tensor):
    return None if tensor is None else tensor.detach().double().cpu().numpy()


def image(shape, dtype=torch.float32, layout="contiguous", mean=0.5, deviation=1.0):
    x = torch.randn(shape).mul(deviation).add(mean).to(PLACE, dtype)
    return x.to(memory_format=FORMATS[layout])


def affine(C, dtype=torch.float32):
    return [(torch.randn(C) + 0.3).to(PLACE, dtype) for _ in range(2)]


def statistics(C, dtype=torch.float32):
    return torch.randn(C).to(PLACE, dtype), (torch.rand(C) + 0.5).to(PLACE, dtype)


def within(found, expected, scale, slack=0.0):
    """Within a rounding of the dtype and a few of float32, for numbers of this scale."""
    relative = 3e-6 + (0 if found.dtype == torch.float32 else torch.finfo(found.dtype).eps)
    error = np.abs(double(found) - expected)
    assert (error <= relative * scale + slack).all(), (error / (relative * scale + slack)).max()


def check_forward(x, weight, bias, variant, *, relu=False, momentum=0.3, running=None, out=None):
    C = x.shape[1]
    running = statistics(C) if running is None else running
    before = [double(r) for r in running]
    y, mean, rstd = batch_norm.forward(
        x, weight, bias, *running, momentum=momentum, eps=EPS, relu=relu, variant=variant, out=out
    )
    expected, mean64, rstd64 = reference.batch_norm(
        double(x), double(weight), double(bias), eps=EPS, relu=relu
    )
    assert y.dtype == x.dtype and mean.dtype == rstd.dtype == torch.float32
    size = np.abs(double(weight) if weight is not None else np.ones(C))
    size = (size + np.abs(double(bias) if bias is not None else np.zeros(C)))[:, None, None]
    # The mean is a float32 sum, whose roundings show where it is large.
    lost = (1e-6 * np.abs(mean64) * rstd64)[:, None, None] * size
    within(y, expected, np.abs(expected) + 4 * size, lost)
    within(mean, mean64, np.abs(mean64) + 1 / rstd64)
    within(rstd, rstd64, rstd64, rstd64 * lost.max() ** 2)
    for found, wanted in zip(
        running, reference.batch_norm_running(double(x), *before, momentum), strict=True
    ):
        within(found, wanted, np.abs(wanted) + 1 + 1 / rstd64**2, (lost.max() / rstd64) ** 2)
    return y, mean, rstd


def check_backward(dy, x, weight, mean, rstd, variant, *, relu=False, y=None, training=True):
    found = batch_norm.backward(
        dy, x, weight, mean, rstd, relu=relu, y=y, training=training, variant=variant
    )
    arguments = double(x), double(weight), double(mean), double(rstd)
    expected = reference.batch_norm_backward(
        double(dy), *arguments, y=double(y) if relu else None, training=training
    )
    size = np.abs(double(dy)).mean() * (double(rstd) if weight is None else
                                        double(rstd) * np.abs(double(weight)))  # fmt: skip
    within(found[0], expected[0], np.abs(expected[0]) + 8 * size[:, None, None])
    n = x.numel() // x.shape[1]
    scale = np.abs(double(dy)).max() * np.abs(double(x) - double(mean)[:, None, None]).max()
    within(found[1], expected[1], np.abs(expected[1]) + 0.2 * n * scale * double(rstd))
    within(found[2], expected[2], np.abs(expected[2]) + 0.2 * n * np.abs(double(dy)).max())
    assert found[0].dtype == x.dtype
    assert x.is_contiguous() == found[0].is_contiguous()
    return found


@every_variant
@every_format
@pytest.mark.parametrize(("shape", "dtype"), IMAGES)
def test_forward(variant, layout, shape, dtype):
    x = image(shape, dtype, layout)
    y, _, _ = check_forward(x, *affine(shape[1]), variant)
    assert y.is_contiguous(memory_format=FORMATS[layout])


@every_backward
@every_format
@pytest.mark.parametrize(("shape", "dtype"), IMAGES)
def test_backward(variant, layout, shape, dtype):
    x, dy = image(shape, dtype, layout), image(shape, dtype, layout)
    weight, bias = affine(shape[1])
    relu = shape[0] > 1
    y, mean, rstd = batch_norm.forward(x, weight, bias, eps=EPS, relu=relu)
    check_backward(dy, x, weight, mean, rstd, variant, relu=relu, y=y)


@every_inference
@every_format
@pytest.mark.parametrize("relu", [False, True])
def test_inference(variant, layout, relu):
    for shape, dtype in IMAGES:
        x, (mean, var) = image(shape, dtype, layout), statistics(shape[1])
        weight, bias = affine(shape[1])
        y = batch_norm.inference(x, weight, bias, mean, var, eps=EPS, relu=relu, variant=variant)
        expected, _, _ = reference.batch_norm(
            double(x), double(weight), double(bias), eps=EPS, relu=relu, mean=double(mean),
            var=double(var),
        )  # fmt: skip
        within(y, expected, np.abs(expected) + 8)


@settings(max_examples=15, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, most) for most in (4, 12, 9, 9))),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(list(FORMATS)),
    variant=st.sampled_from(RIGHT),
    backward=st.sampled_from(list(batch_norm.BACKWARD_VARIANTS)),
    options=st.tuples(*[st.booleans()] * 4),
    own_dtype=st.booleans(),
)
def test_random_images(shape, dtype, layout, variant, backward, options, own_dtype):
    shape = (shape[0] + (shape[0] * shape[2] * shape[3] == 1), *shape[1:])
    with_weight, with_bias, relu, training = options
    x, dy = image(shape, dtype, layout), image(shape, dtype, layout)
    weight, bias = affine(shape[1], dtype if own_dtype else torch.float32)
    weight, bias = weight if with_weight else None, bias if with_bias else None
    y, mean, rstd = check_forward(x, weight, bias, variant, relu=relu)
    check_backward(dy, x, weight, mean, rstd, backward, relu=relu, y=y, training=training)


@every_format
@pytest.mark.parametrize("stray", [0.0, 1e4])
def test_a_stray_first_element_costs_little(layout, stray):
    # Sums start from the first element that they meet.
    x = image((4, 8, 33, 35), torch.float32, layout, 100.0, 0.1)
    x[0, :, 0, 0] = stray
    _, mean, rstd = batch_norm.forward(x, eps=EPS)
    _, mean64, rstd64 = reference.batch_norm(double(x), eps=EPS)
    np.testing.assert_allclose(double(rstd), rstd64, rtol=3e-5)
    np.testing.assert_allclose(double(mean), mean64, rtol=1e-6)


@pytest.mark.parametrize("mean, deviation", [(1000.0, 0.1), (-3e4, 3.0), (1e-4, 1e-6)])
@every_format
def test_a_large_mean_costs_nothing_but_in_one_pass(mean, deviation, layout):
    x = image((4, 8, 9, 9), torch.float32, layout, mean, deviation)
    for variant in RIGHT:
        check_forward(x, *affine(8), variant)
    if mean > 1:
        _, _, rstd = batch_norm.forward(x, eps=EPS, variant="one_pass")
        _, _, right = reference.batch_norm(double(x), eps=EPS)
        assert (np.abs(double(rstd) - right) > 0.05 * right).any()


def test_one_pass_is_right_for_a_small_mean():
    check_forward(image((2, 8, 5, 5), mean=0.1), *affine(8), "one_pass")


def in_parts(monkeypatch):
    """Make the planner share every channel out among blocks, as it does with large images."""
    monkeypatch.setattr(plan, "ALONE_BYTES", 0)
    monkeypatch.setattr(plan, "ENOUGH_CHANNELS", 10**9)
    monkeypatch.setattr(plan, "LEAST_PART", 64)
    monkeypatch.setattr(plan, "PIXEL_ROWS", 1)
    monkeypatch.setattr(plan, "WAVE", 24)
    monkeypatch.setattr(plan, "PART_THREADS", 64)
    monkeypatch.setattr(plan, "PASS_PART", 96)
    monkeypatch.setattr(plan, "WALK_PART", 96)
    monkeypatch.setattr(walk, "ENOUGH", 10**9)
    forget_plans()


def forget_plans():
    for planned in (plan.plan_planes, plan.plan_pass, plan.plan_walk, plan.plan_pixels):
        planned.cache_clear()


@pytest.fixture(autouse=True)
def plans_of_this_test_alone():
    yield
    forget_plans()


@every_format
@pytest.mark.parametrize("shape", [(6, 8, 5, 5), (1, 8, 13, 17), (2, 3, 20, 11)])
def test_channels_in_parts(monkeypatch, layout, shape):
    dtype = torch.bfloat16 if shape[0] == 1 else torch.float32
    in_parts(monkeypatch)
    assert not plan.plan_planes(shape[0], shape[1], shape[2] * shape[3], 4).cluster
    assert plan.plan_planes(shape[0], shape[1], shape[2] * shape[3], 4).n_parts > 1
    x, dy = image(shape, dtype, layout), image(shape, dtype, layout)
    weight, bias = affine(shape[1])
    for relu in (False, True):
        y, mean, rstd = check_forward(x, weight, bias, "vectorised", relu=relu)
        check_backward(dy, x, weight, mean, rstd, "vectorised", relu=relu, y=y)
    check_backward(dy, x, None, mean, rstd, "vectorised", training=False)
    running = statistics(shape[1])
    y = batch_norm.inference(x, weight, bias, *running)
    expected, _, _ = reference.batch_norm(
        double(x), double(weight), double(bias), mean=double(running[0]), var=double(running[1])
    )
    within(y, expected, np.abs(expected) + 8)


@settings(deadline=None)
@example(N=3, C=6, P=301 * 299, itemsize=2)
@given(
    N=st.integers(1, 512), C=st.integers(1, 3000), P=st.integers(1, 10**6) | st.integers(1, 400),
    itemsize=st.sampled_from([2, 4]),
)  # fmt: skip
def test_plans_are_what_the_kernels_expect(N, C, P, itemsize):
    plans = [plan.plan_planes(N, C, P, itemsize, most) for most in (1, 2, plan.CLUSTER)]
    plans += [plan.plan_pass(N, C, P, itemsize), plan.plan_walk(N, C, P, itemsize)]
    for found in plans:
        assert found.cluster in (0, found.n_parts) and found.cluster <= plan.CLUSTER
        assert N * P <= found.n_parts * found.length
        assert found.cluster or (found.n_parts - 1) * found.length < N * P
        assert found.block % found.team == 0 and found.block % 32 == 0
        assert found.team & (found.team - 1) == 0
    for merged in (True, False):
        found = plan.plan_pixels(N * P, C, itemsize, merged)
        assert (found.n_parts - 1) * found.length < N * P <= found.n_parts * found.length
        assert 256 % found.n_columns == 0 and found.n_parts <= 65535
        assert found.n_tiles * found.n_columns * 16 >= C * itemsize


@pytest.mark.parametrize("shape", [(6, 3, 5, 5), (1, 2, 13, 17), (2, 3, 20, 12), (2, 1, 1, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_channels_of_clusters(monkeypatch, shape, dtype):
    N, C, H, W = shape
    x, dy, (weight, bias) = image(shape, dtype), image(shape, dtype), affine(C)
    for least, most in ((1, 8), (64, 8), (1, 4)):
        monkeypatch.setattr(plan, "LEAST_SHARE", least)
        monkeypatch.setattr(plan, "CLUSTER", most)
        monkeypatch.setattr(batch_norm.vectorised, "CLUSTER", most)
        forget_plans()
        found = plan.plan_planes(N, C, H * W, x.element_size(), most)
        assert found.cluster == most or N * H * W * x.element_size() < 2 * most * least
        y, mean, rstd = check_forward(x, weight, bias, "vectorised", relu=True)
        check_backward(dy, x, weight, mean, rstd, "vectorised", relu=True, y=y)
        check_backward(dy, x, None, mean, rstd, "vectorised", training=False)


def walking(monkeypatch, lead):
    """Make large images of what else are small ones, and walk them."""
    in_parts(monkeypatch)
    monkeypatch.setattr(walk, "LEAD", lead)
    monkeypatch.setattr(walk, "ENOUGH", 0)


@pytest.mark.parametrize("shape", [(6, 3, 5, 5), (1, 5, 13, 17), (2, 3, 20, 12)])
@pytest.mark.parametrize("lead", [1, 7, 1000])
def test_a_walk_over_the_channels(monkeypatch, shape, lead):
    dtype = torch.bfloat16 if shape[0] == 1 else torch.float32
    walking(monkeypatch, lead)
    walked, real = [], walk.forward
    monkeypatch.setattr(walk, "forward", lambda *a: walked.append(1) or real(*a))
    x, (weight, bias) = image(shape, dtype), affine(shape[1])
    for relu in (False, True):
        check_forward(x, weight, bias, "vectorised", relu=relu)
    assert len(walked) == 2


@pytest.mark.skipif(not SIMULATED, reason="the simulator has other orders to offer")
@pytest.mark.parametrize("order", ["reverse", "random"])
def test_a_walk_in_any_order_of_blocks_leaves_its_counters_at_zero(monkeypatch, order):
    walking(monkeypatch, 2)
    made = []
    monkeypatch.setattr(
        walk.counters, "counters", lambda n, like: made.append(like.new_zeros(n).int()) or made[-1]
    )
    x, weight = image((4, 3, 9, 9)), affine(3)[0]
    found = []
    for how in ("forward", order):
        with simulator.options(order=how):
            found.append(batch_norm.forward(x, weight))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(made) == 2 and not any(counted.any() for counted in made)


def test_clusters_and_single_blocks_agree(monkeypatch):
    # On chips without clusters, a block takes the channel that a cluster takes elsewhere.
    x, weight = image((4, 2, 9, 9)), affine(2)[0]
    monkeypatch.setattr(plan, "LEAST_SHARE", 16)
    found = []
    for since in ((9, 0), (99, 0)):
        monkeypatch.setattr(batch_norm.vectorised, "CLUSTERS_SINCE", since)
        y, mean, rstd = check_forward(x, weight, None, "vectorised")
        found.append(check_backward(x, x, weight, mean, rstd, "vectorised"))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@every_variant
def test_finite_differences(variant):
    shape = (2, 3, 3, 2)
    x, dy, (weight, bias) = image(shape), image(shape), affine(3)
    _, mean, rstd = batch_norm.forward(x, weight, bias, eps=EPS, variant=variant)
    back = variant if variant in batch_norm.BACKWARD_VARIANTS else "block"
    dx, dweight, dbias = batch_norm.backward(dy, x, weight, mean, rstd, variant=back)
    inputs = [double(x), double(weight), double(bias)]
    for which, gradient in enumerate((dx, dweight, dbias)):
        for index in list(np.ndindex(*gradient.shape))[::5]:
            ends = []
            for step in (1e-4, -1e-4):
                moved = [array.copy() for array in inputs]
                moved[which][index] += step
                ends.append((reference.batch_norm(*moved, eps=EPS)[0] * double(dy)).sum())
            slope = (ends[0] - ends[1]) / 2e-4
            assert abs(slope - gradient[index].item()) < 2e-5 * max(1, abs(slope))


@every_variant
def test_memory_that_starts_anywhere_and_other_layouts(variant):
    weight, bias = affine(3)
    for start in (1, 2, 3):
        memory = torch.randn(2 * 3 * 5 * 6 + start, device=PLACE)
        x = memory[start:].view(2, 3, 5, 6)
        filled = torch.full((180 + 8,), 7.0, device=PLACE)
        out = filled[4 - start : 184 - start].view(2, 3, 5, 6)
        y, mean, rstd = check_forward(x, weight, bias, variant, out=out)
        assert y is out
        assert filled[: 4 - start].eq(7).all() and filled[184 - start :].eq(7).all()
        check_backward(out.clone(), x, weight, mean, rstd, "vectorised")
    x = torch.randn(4, 3, 6, 8, device=PLACE)
    for view in (x[:, :, ::2], x.transpose(2, 3), x[:1].expand(4, 3, 6, 8)):
        y, _, _ = check_forward(view, weight, bias, variant)
        assert y.is_contiguous()


@every_format
def test_gradients_of_another_memory_format(layout):
    x, (weight, bias) = image((2, 8, 4, 4), layout=layout), affine(8)
    y, mean, rstd = batch_norm.forward(x, weight, bias, relu=True)
    for dy in (torch.randn(2, 8, 4, 4, device=PLACE), image((2, 8, 4, 4), layout="channels_last"),
               torch.ones(1, device=PLACE).expand(2, 8, 4, 4)):  # fmt: skip
        check_backward(dy, x, weight, mean, rstd, "vectorised", relu=True, y=y)


@every_variant
def test_special_values(variant):
    x = image((2, 4, 4, 4))
    x[0, 1, 2, 3] = math.nan
    x[1, 2, 0, 0] = math.inf
    x[:, 3] = 5.0
    for layout in FORMATS.values():
        y, _, rstd = batch_norm.forward(x.to(memory_format=layout), variant=variant, relu=True)
        expected = F.relu(F.batch_norm(x, None, None, training=True))
        torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
        assert rstd[3].item() == pytest.approx(EPS**-0.5)


@every_variant
def test_empty_and_single(variant):
    y, mean, rstd = batch_norm.forward(torch.empty(0, 3, 4, 4, device=PLACE), variant=variant)
    assert y.shape == (0, 3, 4, 4) and mean.shape == rstd.shape == (3,)
    dx, dweight, dbias = batch_norm.backward(y, y, None, mean, rstd)
    assert dx.shape == y.shape and not dweight.any() and not dbias.any()
    with pytest.raises(ValueError, match="a variance needs two values a channel"):
        batch_norm.forward(torch.ones(1, 3, 1, 1, device=PLACE), variant=variant)


@every_format
def test_two_runs_agree_bit_for_bit_and_inputs_are_left_alone(monkeypatch, layout):
    in_parts(monkeypatch)
    x, dy, (weight, bias) = image((6, 8, 5, 5), layout=layout), image((6, 8, 5, 5)), affine(8)
    before = [t.clone() for t in (x, dy, weight, bias)]
    runs = []
    for _ in range(2):
        y, mean, rstd = batch_norm.forward(x, weight, bias, relu=True)
        found = batch_norm.backward(dy, x, weight, mean, rstd, relu=True, y=y)
        runs.append((y, mean, rstd, *found))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (x, dy, weight, bias), strict=True))


def test_errors_name_what_was_expected():
    x, (weight, bias), running = image((2, 3, 4, 4)), affine(3), statistics(3)
    with pytest.raises(ArrayError, match=r"x must have 4 dimensions, not shape \(3, 4, 4\)"):
        batch_norm.forward(x[0])
    with pytest.raises(ArrayError, match="x must be float32 or float16 or bfloat16, not float64"):
        batch_norm.forward(x.double())
    with pytest.raises(ArrayError, match=r"weight must have shape \(3,\), not \(4,\)"):
        batch_norm.forward(x, torch.ones(4, device=PLACE))
    with pytest.raises(ArrayError, match="bias must be float32, not float16"):
        batch_norm.forward(x, weight, bias.half())
    with pytest.raises(ValueError, match="running_mean and running_var must be given together"):
        batch_norm.forward(x, weight, bias, running[0])
    with pytest.raises(ArrayError, match="running_mean must be contiguous"):
        batch_norm.forward(x, None, None, torch.ones(6, device=PLACE)[::2], running[1])
    with pytest.raises(ValueError, match="unknown variant 'tree'; there are naive, one_pass"):
        batch_norm.forward(x, variant="tree")
    with pytest.raises(ArrayError, match="out must be contiguous"):
        batch_norm.forward(x, out=image((2, 3, 4, 4), layout="channels_last"))
    with pytest.raises(ValueError, match="inference needs running_mean and running_var"):
        batch_norm.inference(x, weight, bias, None, None)
    y, mean, rstd = batch_norm.forward(x, relu=True)
    with pytest.raises(ValueError, match="the gradient of a ReLU needs its output: pass y"):
        batch_norm.backward(x, x, None, mean, rstd, relu=True)
    with pytest.raises(ArrayError, match=r"dy must have shape \(2, 3, 4, 4\), not \(3, 4, 4\)"):
        batch_norm.backward(x[0], x, None, mean, rstd)
    with pytest.raises(ArrayError, match="rstd must be float32, not float16"):
        batch_norm.backward(x, x, None, mean, rstd.half())


@pytest.mark.skipif(not SIMULATED, reason="the sanitizer watches the simulator")
@every_format
def test_the_sanitizer_finds_nothing(monkeypatch, layout):
    x, dy, (weight, bias) = image((3, 8, 4, 5), layout=layout), image((3, 8, 4, 5)), affine(8)
    with simulator.sanitize() as report:
        for variant in batch_norm.VARIANTS:
            y, mean, rstd = batch_norm.forward(x, weight, bias, *statistics(8), variant=variant)
        for variant in batch_norm.BACKWARD_VARIANTS:
            batch_norm.backward(dy, x, weight, mean, rstd, relu=True, y=y, variant=variant)
        in_parts(monkeypatch)
        y, mean, rstd = batch_norm.forward(x, weight, bias, *statistics(8))
        batch_norm.backward(dy, x, weight, mean, rstd, relu=True, y=y)
        for variant in batch_norm.INFERENCE_VARIANTS:
            batch_norm.inference(x, weight, bias, *statistics(8), variant=variant)
        walking(monkeypatch, 3)
        batch_norm.forward(x, weight, bias, *statistics(8))
        monkeypatch.undo()
        monkeypatch.setattr(plan, "LEAST_SHARE", 64)
        forget_plans()
        y, mean, rstd = batch_norm.forward(x, weight, bias, *statistics(8))
        batch_norm.backward(dy, x, weight, mean, rstd, relu=True, y=y)
    assert not report.findings, report


@pytest.mark.gpu
@every_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("enough", [0, 10**9], ids=["walk", "parts"])
def test_large_images(monkeypatch, layout, dtype, enough):
    monkeypatch.setattr(walk, "ENOUGH", enough)
    for shape in ((32, 64, 112, 112), (256, 256, 14, 14), (512, 1024, 7, 7), (3, 6, 301, 299)):
        x, dy = image(shape, dtype, layout, 3.0, 2.0), image(shape, dtype, layout)
        weight, bias = affine(shape[1])
        y, mean, rstd = check_forward(x, weight, bias, "vectorised", relu=True)
        check_backward(dy, x, weight, mean, rstd, "vectorised", relu=True, y=y)


@pytest.mark.gpu
@pytest.mark.gpu_memory(40)
@every_format
def test_more_than_two_billion_elements(layout):
    x = torch.zeros(2, 8, 16400, 8200, device="cuda", dtype=torch.float16)
    x = x.to(memory_format=FORMATS[layout])
    x[1] = 1  # mean 1/2, deviation 1/2
    y, mean, rstd = batch_norm.forward(x, eps=0.0)
    torch.testing.assert_close(mean, torch.full_like(mean, 0.5), rtol=1e-5, atol=0)
    torch.testing.assert_close(rstd, torch.full_like(rstd, 2.0), rtol=1e-5, atol=0)
    assert y[1].eq(1).all() and y[0].eq(-1).all()
    dx, dweight, dbias = batch_norm.backward(y, x, None, mean, rstd)
    assert dx.abs().max() < 1e-3  # y is a function of the statistics alone
    torch.testing.assert_close(
        dweight, torch.full_like(dweight, x.numel() / 8.0), rtol=1e-4, atol=0
    )
