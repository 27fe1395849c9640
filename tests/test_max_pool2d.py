"""Max pooling: every rung, both directions, every option, against float64 and PyTorch."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import PLACE, double

from course_lib import reference
from course_lib.kernels import max_pool2d as pool
from course_lib.kernels.max_pool2d import plan, vectorised
from course_lib.kernels.max_pool2d.window import window_of
from course_lib.runtime.host.arrays import ArrayError
from course_lib.runtime.host.launch import Chip, planning

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
#: Shape of x, and the options.
CASES = [
    ((1, 1, 1, 1), dict(kernel_size=1)),
    ((2, 3, 8, 8), dict(kernel_size=2)),
    ((1, 2, 11, 11), dict(kernel_size=2)),
    ((2, 8, 7, 9), dict(kernel_size=3, stride=2, padding=1)),
    ((1, 5, 6, 10), dict(kernel_size=(3, 2), stride=(1, 3), padding=(1, 0))),
    ((2, 4, 9, 8), dict(kernel_size=3, stride=2, ceil_mode=True)),
    ((1, 3, 10, 7), dict(kernel_size=(2, 3), stride=(3, 1), dilation=(3, 2), padding=(1, 1))),
    ((1, 16, 5, 5), dict(kernel_size=2, stride=3, ceil_mode=True)),
    ((3, 1, 4, 4), dict(kernel_size=4, padding=2, stride=1)),
    ((2, 2, 3, 40), dict(kernel_size=(3, 5), stride=(1, 5))),
    ((1, 1, 12, 12), dict(kernel_size=5, stride=4, padding=2, ceil_mode=True)),
]

#: A chip of a single multiprocessor.
SMALL = Chip((9, 0), 227 << 10, 1, 60 << 20, "small")

every_variant = pytest.mark.parametrize("variant", pool.FORWARD)
every_format = pytest.mark.parametrize("layout", FORMATS)
every_case = pytest.mark.parametrize(("shape", "options"), CASES, ids=str)
#: The same, each with a dtype of its own.
TYPED = [(*case, DTYPES[i % 3]) for i, case in enumerate(CASES)]
every_typed_case = pytest.mark.parametrize(("shape", "options", "dtype"), TYPED, ids=str)


def image(shape, dtype=torch.float32, layout="contiguous"):
    """Few different values, so that many windows have equal ones."""
    x = torch.randint(-9, 10, shape).to(PLACE, dtype)
    return x.to(memory_format=FORMATS[layout])


def by_torch(x, options):
    # On the CPU and in float32: exact all the same.
    return F.max_pool2d(x.detach().cpu().float(), return_indices=True, **options)


def positions(indices, shape, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
    """Indices in the window as indices in the plane."""
    pairs = (kernel_size, stride or kernel_size, padding, dilation)
    (KH, KW), (SH, SW), (PH, PW), (DH, DW) = (v if isinstance(v, tuple) else (v, v) for v in pairs)
    k = indices.cpu().long()
    oh = torch.arange(k.shape[2])[:, None]
    ow = torch.arange(k.shape[3])
    return (oh * SH - PH + k // KW * DH) * shape[3] + ow * SW - PW + k % KW * DW


def check(x, options, variant, index_dtype="int32"):
    y, indices = pool.forward(x, variant=variant, index_dtype=index_dtype, **options)
    expected, at = by_torch(x, options)
    assert y.dtype == x.dtype and indices.dtype == getattr(torch, index_dtype)
    torch.testing.assert_close(y.cpu().float(), expected, rtol=0, atol=0, equal_nan=True)
    found = indices.cpu() if index_dtype != "uint8" else positions(indices, x.shape, **options)
    assert torch.equal(found.long(), at)
    return y, indices


def check_backward(dy, indices, at, x, options, variant):
    dx = pool.backward(dy, indices, x.shape, variant=variant, **options)
    dx = pool.backward(dy, indices, x.shape, variant=variant, **options, out=dx.fill_(math.nan))
    assert dx.dtype == dy.dtype
    values = np.where(at < 0, 0, double(dy))
    expected = reference.max_pool2d_backward(values, at, x.shape)
    size = reference.max_pool2d_backward(np.abs(values), at, x.shape)
    # A sum of up to KH·KW numbers in float32, with half a unit lost in each, rounded once.
    n_terms = np.prod(np.broadcast_to(options["kernel_size"], 2))
    relative = n_terms / 2 * torch.finfo(torch.float32).eps + torch.finfo(dy.dtype).eps / 2
    assert (np.abs(double(dx) - expected) <= relative * size).all()
    return dx


@every_variant
@every_format
@every_typed_case
def test_forward_and_backward(variant, layout, shape, options, dtype):
    x = image(shape, dtype, layout)
    index_dtype = {torch.float32: "int32", torch.float16: "uint8", torch.bfloat16: "int64"}[dtype]
    y, indices = check(x, options, variant, index_dtype)
    assert y.is_contiguous(memory_format=FORMATS[layout])
    dy = torch.randn(y.shape).to(PLACE, dtype).to(memory_format=FORMATS[layout])
    at = by_torch(x, options)[1].numpy()
    dx = check_backward(dy, indices, at, x, options, variant)
    assert dx.is_contiguous(memory_format=FORMATS[layout])


@every_case
def test_the_reference_agrees_with_pytorch(shape, options):
    x = image(shape)
    y, indices = reference.max_pool2d(double(x), **options)
    expected, at = by_torch(x, options)
    assert np.array_equal(y, double(expected)) and np.array_equal(indices, at)
    leaf = torch.from_numpy(double(x)).requires_grad_()
    F.max_pool2d(leaf, **options).backward(torch.ones(y.shape, dtype=torch.float64))
    assert np.array_equal(leaf.grad, reference.max_pool2d_backward(np.ones_like(y), indices, shape))


options_of_a_layer = st.fixed_dictionaries(
    dict(
        kernel_size=st.tuples(st.integers(1, 4), st.integers(1, 4)),
        stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
        dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        ceil_mode=st.booleans(),
    )
)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, most) for most in (2, 9, 14, 14))),
    options=options_of_a_layer,
    padded=st.tuples(st.booleans(), st.booleans()),
    layout=st.sampled_from(list(FORMATS)),
    dtype=st.sampled_from(DTYPES),
    variant=st.sampled_from(list(pool.FORWARD)),
    index_dtype=st.sampled_from(pool.INDEX_DTYPES),
)
def test_random_layers(shape, options, padded, layout, dtype, variant, index_dtype):
    reach = [d * (k - 1) + 1 for k, d in zip(
        options["kernel_size"], options["dilation"], strict=True)]  # fmt: skip
    options["padding"] = tuple(min(k // 2, r // 2) * p for k, r, p in zip(
        options["kernel_size"], reach, padded, strict=True))  # fmt: skip
    x = image(shape, dtype, layout)
    try:
        expected, at = by_torch(x, options)
    except RuntimeError:
        with pytest.raises(ValueError):
            pool.forward(x, variant=variant, **options)
        return
    y, indices = check(x, options, variant, index_dtype)
    # A window may step over all of a small image; nothing is there to have a gradient.
    dy, nothing = torch.randn_like(y), y.cpu().isinf()
    check_backward(dy, indices, at.where(~nothing, -1).numpy(), x, options, variant)


@every_variant
@pytest.mark.parametrize("index_dtype", ["int32", "uint8"])
def test_a_window_that_steps_over_all_columns_passes_no_gradient_on(variant, index_dtype):
    x = torch.tensor([[[[0.3, -1.0], [2.0, 0.5]]]], device=PLACE)
    options = dict(kernel_size=(1, 2), stride=(1, 1), dilation=(1, 3), padding=(0, 1))
    y, indices = pool.forward(x, variant=variant, index_dtype=index_dtype, **options)
    assert y.isneginf().all()
    dy = torch.tensor([[[[1.0], [7.0]]]], device=PLACE)
    assert not pool.backward(dy, indices, x.shape, variant=variant, **options).any()


@every_variant
@every_format
def test_special_values_as_in_pytorch(variant, layout):
    x = image((2, 4, 6, 6), layout=layout)
    x[0, 0, 1, 1] = math.nan
    x[0, 0, 1, 2], x[0, 0, 4, 4], x[0, 0, 4, 5] = math.inf, math.nan, math.nan
    x[0, 1] = -math.inf
    x[1, 2] = math.nan
    x[1, 3, 0] = -math.inf
    for options in (dict(kernel_size=2), dict(kernel_size=3, stride=2, padding=1)):
        for index_dtype in pool.INDEX_DTYPES:
            check(x, options, variant, index_dtype)


@pytest.fixture
def small_bands(monkeypatch):
    """Make the planner cut planes into bands, or put planes together, as with large inputs.

    The chip has one multiprocessor, which every problem gives enough blocks.
    """

    def choose(n_bytes, enough=1):
        monkeypatch.setattr(plan, "BAND_BYTES", n_bytes)
        monkeypatch.setattr(plan, "ENOUGH_BLOCKS", enough)
        monkeypatch.setattr(vectorised, "chip_of", lambda image: SMALL)
        plan.plan_forward.cache_clear()
        plan.plan_backward.cache_clear()

    yield choose
    plan.plan_forward.cache_clear()
    plan.plan_backward.cache_clear()


@every_typed_case
def test_bands_of_a_plane_and_several_planes(small_bands, shape, options, dtype):
    shape = (3, *shape[1:])
    x = image(shape, dtype)
    index_dtype = {torch.float32: "uint8", torch.float16: "int64", torch.bfloat16: "int32"}[dtype]
    at = by_torch(x, options)[1].numpy()
    for n_bytes, enough in ((260, 10**6), (1500, 2)):
        small_bands(n_bytes, enough)
        y, indices = check(x, options, "vectorised", index_dtype)
        dy = torch.randn(y.shape).to(PLACE, dtype)
        check_backward(dy, indices, at, x, options, "vectorised")


def test_what_the_planner_chooses(small_bands):
    small_bands(1024, 4)
    window = window_of((12, 12), 3, 2, 1, 1, False)
    assert plan.plan_forward(3, window, 4, SMALL).bands == 1  # a plane of 576 bytes, but few
    assert plan.plan_forward(40, window_of((5, 5), 2, 2, 0, 1, False), 4, SMALL).planes > 1
    found, a, b = plan.plan_backward(40, window, SMALL)
    assert (a, b) == (2, 2) and found.planes == 1
    assert plan.plan_backward(40, window_of((50, 20), 2, 2, 0, 1, False), SMALL)[0].bands > 1
    wide = window_of((4, 8000), 2, 2, 0, 1, False)
    assert plan.plan_forward(1, wide, 4, SMALL) is None


def test_few_planes_leave_no_multiprocessor_idle():
    chip = SMALL._replace(multiprocessors=132)
    for shape, kernel, stride, padding, name in (
        ((1, 3, 107, 90), 5, 1, 0, "pixel"),
        ((5, 8, 48, 101), 2, 2, 1, "band"),
        ((1, 3, 224, 224), 3, 1, 0, "band"),
    ):
        options = dict(kernel_size=kernel, stride=stride, padding=padding)
        with planning(chip) as launches:
            y, indices = pool.forward(torch.empty(shape, dtype=torch.bfloat16), **options)
            pool.backward(y, indices, shape, **options)
        names = [kernel.py_func.__name__ for kernel, *_ in launches]
        assert names == [f"{name}_kernel", f"{name}_backward_kernel"]
        assert all(n_blocks >= chip.multiprocessors for _, n_blocks, *_ in launches)


def test_rows_too_long_for_shared_memory():
    x = image((1, 1, 2, 13000))
    y, indices = check(x, dict(kernel_size=2, stride=(2, 100)), "vectorised")
    dx = pool.backward(y, indices, x.shape, 2, stride=(2, 100))
    assert dx.count_nonzero() == y.count_nonzero()


@settings(deadline=None)
@given(
    n_planes=st.integers(1, 10**6), H=st.integers(1, 3000), W=st.integers(1, 3000),
    kernel=st.integers(1, 9), stride=st.integers(1, 5), itemsize=st.sampled_from([2, 4]),
)  # fmt: skip
def test_plans_are_what_the_kernels_expect(n_planes, H, W, kernel, stride, itemsize):
    window = window_of((H, W), (min(kernel, H), min(kernel, W)), stride, 0, 1, False)
    forward = plan.plan_forward(n_planes, window, itemsize, SMALL)
    backward, a, b = plan.plan_backward(n_planes, window, SMALL)
    for found, n_rows, size in ((forward, window.OH, itemsize), (backward, H, 4)):
        if found is None:
            many_rounds = found is backward and a * b >= 2 * plan.FEW_ROUNDS
            assert W * min(kernel, H) * 4 > 40_000 or many_rounds
            continue
        assert found.elements * size <= plan.MOST_BYTES
        assert (found.bands - 1) * found.rows < n_rows <= found.bands * found.rows
        assert found.planes == 1 or found.bands == 1
        assert found.n_blocks == math.ceil(n_planes / found.planes) * found.bands
        assert found.planes == 1 or found.planes * n_rows * n_rows <= 2**22


def test_errors_name_what_was_expected():
    x = image((2, 3, 8, 8))
    with pytest.raises(ArrayError, match=r"x must have 4 dimensions, not shape \(3, 8, 8\)"):
        pool.forward(x[0], 2)
    with pytest.raises(ValueError, match="padding must be at most half of kernel_size, 2"):
        pool.forward(x, 2, padding=2)
    with pytest.raises(ValueError, match=r"windows that span 9 do not fit images of 8×8"):
        pool.forward(x, 9)
    with pytest.raises(ValueError, match="stride must be at least 1, not 0"):
        pool.forward(x, 2, stride=0)
    with pytest.raises(ValueError, match="kernel_size must be an int or a pair of ints"):
        pool.forward(x, (2, 2, 2))
    with pytest.raises(ValueError, match="indices must be int32 or int64 or uint8, not 'int8'"):
        pool.forward(x, 2, index_dtype="int8")
    with pytest.raises(ValueError, match="a byte can't tell 17×17 positions"):
        pool.forward(image((1, 1, 17, 17)), 17, index_dtype="uint8")
    with pytest.raises(ValueError, match="a byte can't tell 16×16 positions"):
        pool.forward(image((1, 1, 16, 16)), 16, index_dtype="uint8", relu=True)
    y, indices = pool.forward(x, 2)
    with pytest.raises(ArrayError, match=r"dy must have shape \(2, 3, 4, 4\), not \(2, 3, 8, 8\)"):
        pool.backward(x, indices, x.shape, 2)
    with pytest.raises(ArrayError, match="indices must be int32 or int64 or uint8, not float32"):
        pool.backward(y, y, x.shape, 2)
    with pytest.raises(ValueError, match="shape must be that of the input"):
        pool.backward(y, indices, (8, 8), 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_format
@pytest.mark.parametrize(
    "options",
    [
        dict(kernel_size=2),
        *(dict(kernel_size=3, stride=s, padding=p) for s, p in ((2, 1), (2, 0), (1, 1))),
    ],
)
def test_large_images(dtype, layout, options):
    for shape in ((64, 64, 112, 112), (512, 128, 11, 11), (4, 3, 500, 777)):
        x = image(shape, dtype, layout)
        leaf = x.clone().requires_grad_()
        expected, at = F.max_pool2d(leaf, return_indices=True, **options)
        dy = torch.randint_like(expected, -4, 5)  # sums of these are exact
        (dx,) = torch.autograd.grad(expected, leaf, dy)
        for index_dtype in pool.INDEX_DTYPES:
            y, indices = pool.forward(x, index_dtype=index_dtype, **options)
            assert torch.equal(y, expected)
            assert index_dtype == "uint8" or torch.equal(indices.long(), at)
            assert torch.equal(pool.backward(dy, indices, shape, **options), dx)


@pytest.mark.gpu
@pytest.mark.gpu_memory(24)
@every_format
def test_more_than_two_billion_elements(layout):
    shape = (2, 8, 16400, 8200)
    x = torch.zeros(shape, device="cuda", dtype=torch.float16).to(memory_format=FORMATS[layout])
    x[1, 7, 16399, 8199] = 3
    x[1, 7, 16398, 8196] = 2
    y, indices = pool.forward(x, 2, index_dtype="uint8")
    assert y.count_nonzero() == 2 and y[1, 7, -1, -1] == 3 and y[1, 7, -1, -2] == 2
    dx = pool.backward(y, indices, shape, 2)
    assert dx[1, 7, 16399, 8199] == 3 and dx.count_nonzero() == 2
