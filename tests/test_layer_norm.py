"""Layer normalisation: what the contract does not prove, autograd, module, plan and large means."""

import copy

import pytest
import torch
import torch.nn.functional as F

from course_lib import SIMULATED, nn, ops
from course_lib.kernels import layer_norm
from course_lib.kernels.layer_norm import plan

DEVICE = "cpu" if SIMULATED else "cuda"
DTYPES = ("float32", "float16", "bfloat16")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def numbers(*shape, dtype=torch.float32, scale=1.0, shift=0.0, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale + shift
    return x.to(DEVICE, dtype)


def near(found, expected, tolerance):
    assert found.shape == expected.shape
    error = (found.double() - expected).norm() / expected.norm()
    assert error <= tolerance, f"{error:.1e}"


def gradients(function, shape, x, weight, bias, dy):
    """[y, dx, dweight, dbias] of those that there are."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    y = function(leaves[0], shape, *leaves[1:], 1e-3)
    y.backward(dy)
    return [y, *(leaf.grad for leaf in leaves if leaf is not None)]


@pytest.mark.parametrize("given", ["both", "weight", "bias", "neither"])
@pytest.mark.parametrize("name", DTYPES)
def test_gradients_of_the_operator(name, given):
    dtype = getattr(torch, name)
    x, dy = (numbers(3, 5, 4, 6, dtype=dtype, scale=2, shift=1, seed=n) for n in range(2))
    # Of float32 beside half rows, as autocast leaves them; over two axes.
    of_features = torch.float32 if given == "weight" else dtype
    weight = numbers(4, 6, dtype=of_features, seed=2) if given in ("both", "weight") else None
    bias = numbers(4, 6, dtype=of_features, seed=3) if given in ("both", "bias") else None
    found = gradients(ops.layer_norm, (4, 6), x, weight, bias, dy)
    doubles = [None if t is None else t.double() for t in (x, weight, bias, dy)]
    for ours, true in zip(found, gradients(F.layer_norm, (4, 6), *doubles), strict=True):
        assert ours.dtype == (of_features if ours.dim() == 2 else dtype)
        near(ours, true, TOLERANCE[dtype])


def test_only_what_is_asked_for_is_computed():
    x = numbers(4, 8)
    weight = numbers(8, seed=1)
    x.requires_grad_()
    y = ops.layer_norm(x, (8,), weight)
    assert y.grad_fn.name() == "LayerNormBackward"
    y.sum().backward()
    assert weight.grad is None
    only = numbers(8, seed=1).requires_grad_()
    ops.layer_norm(x.detach(), (8,), only).sum().backward()
    near(only.grad, F.layer_norm(x.detach().double(), (8,)).sum(0), 1e-5)
    twice = torch.autograd.grad(ops.layer_norm(x, (8,)).square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="course_lib.layer_norm has no second derivative"):
        twice.sum().backward()


def test_opcheck():
    x, weight, bias = (t.requires_grad_() for t in (numbers(3, 8), numbers(8), numbers(8)))
    torch.library.opcheck(torch.ops.course_lib.layer_norm.default, (x, weight, bias, 1e-5))
    mean, rstd = numbers(3), numbers(3).abs()
    for sums in (True, False):
        given = x.detach(), x.detach(), None, mean, rstd, sums
        torch.library.opcheck(torch.ops.course_lib.layer_norm_backward.default, given)


@pytest.mark.filterwarnings("ignore:.*vmap.*")
def test_vmap():
    x, weights = numbers(3, 4, 8), numbers(3, 8)
    shared = torch.vmap(lambda x: ops.layer_norm(x, (8,), weights[0]))(x)
    near(shared, F.layer_norm(x.double(), (8,), weights[0].double()), 1e-6)
    own = torch.vmap(lambda x, weight: ops.layer_norm(x, (8,), weight))(x, weights)
    near(own, F.layer_norm(x.double(), (8,)) * weights[:, None].double(), 1e-6)


@pytest.mark.gpu
def test_autocast_makes_float32():
    x, weight = numbers(3, 8, dtype=torch.float16), numbers(8, dtype=torch.float16)
    with torch.autocast("cuda"):
        assert ops.layer_norm(x, (8,), weight).dtype == F.layer_norm(x, (8,), weight).dtype


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}])
def test_the_module_takes_the_place_of_pytorchs(options):
    torch.manual_seed(1)
    theirs = torch.nn.Sequential(torch.nn.LayerNorm((3, 4), eps=0.1, **options), torch.nn.ReLU())
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    theirs = theirs.to(DEVICE)
    ours = copy.deepcopy(theirs)
    swapped = nn.replace_layers(ours, [torch.nn.LayerNorm])
    assert [type(layer) for layer in ours] == [nn.LayerNorm, torch.nn.ReLU]
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert repr(nn.LayerNorm((3, 4), eps=0.1, **options)) == repr(theirs[0])
    x = numbers(2, 5, 3, 4)
    results = []
    for network, leaf in ((ours, x.clone()), (theirs.double(), x.double())):
        y = network(leaf.requires_grad_())
        y.sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in network.parameters())])
    for mine, true in zip(*results, strict=True):
        near(mine, true, 1e-5)
    swapped.restore()
    assert type(ours[0]) is torch.nn.LayerNorm


@pytest.mark.parametrize("variant", layer_norm.FORWARD)
def test_rows_far_from_zero_keep_their_digits(variant):
    """As far as float32 has them: the mean is a thousand times the spread."""
    x = numbers(2, 96, shift=1e3)
    y, mean, rstd = layer_norm.forward(x, variant=variant)
    true = F.layer_norm(x.double(), (96,))
    near(y, true, 2e-6 if variant == "registers" else 2**-14)  # others: a digit of the mean
    near(mean, x.double().mean(-1), 1e-6)
    near(rstd, (x.double().var(-1, correction=0) + 1e-5).rsqrt(), 1e-4)


def test_statistics_of_rows_of_nothing():
    y, mean, rstd = layer_norm.forward(numbers(3, 0))
    assert y.shape == (3, 0) and (mean == 0).all() and rstd.isnan().all()
    dx, *sums = layer_norm.backward(numbers(0, 5), numbers(0, 5), None, numbers(0), numbers(0))
    assert dx.shape == (0, 5) and all((each == 0).all() and each.shape == (5,) for each in sums)


def test_padding_past_a_row_does_not_overflow():
    """x̂ of what is not there: (0 − mean)·rstd is infinite here."""
    x, dy = numbers(3, 20) * 0 + 3e37, numbers(3, 20, seed=1)
    mean, rstd = x[:, 0].clone(), numbers(3) * 0 + 316
    for variant in layer_norm.BACKWARD:
        found = layer_norm.backward(dy, x, None, mean, rstd, variant=variant)
        assert all(each.isfinite().all() for each in found), variant


@pytest.mark.parametrize("itemsize", [4, 2])
@pytest.mark.parametrize("vectors", [True, False])
def test_plans_hold_every_row(itemsize, vectors):
    """Whatever the length, the threads of a row have room for it, and no more than they may."""
    for n_cols in range(1, plan.FORWARD_LIMIT + 1, 7):
        plans = [(plan.forward_plan(n_cols, itemsize), plan.FORWARD_THREADS)]
        if n_cols <= plan.BACKWARD_LIMIT[vectors]:
            found = plan.backward_plan(n_cols, itemsize, vectors)
            plans.append((found, plan.BACKWARD_THREADS))
            assert found.n_threads * plan.record_bytes(vectors) <= 60 << 10  # a T4 has 64
        for found, most in plans:
            n_ranks = found.n_threads // found.n_teams
            assert n_ranks * found.n_slots * (16 // itemsize) >= n_cols
            assert found.n_threads <= most and found.n_threads % 32 == 0
            assert found.n_slots <= plan.most_slots(itemsize)


def test_long_rows_are_streamed():
    limit = plan.FORWARD_LIMIT
    chosen = layer_norm.default_variant
    assert [chosen("forward", n) for n in (limit, limit + 1)] == ["registers", "streamed"]
    for vectors, most in plan.BACKWARD_LIMIT.items():
        found = [chosen("backward", n, vectors) for n in (most, most + 1)]
        assert found == ["registers", "streamed"]
    x = numbers(1, limit + 8)
    with pytest.raises(ValueError, match="rows of at most 8,192 elements here, not 8,200"):
        layer_norm.forward(x, variant="registers")
    with pytest.raises(ValueError, match="rows of at most 6,144 elements here"):
        layer_norm.backward(x, x, None, x[:, 0], x[:, 0], variant="registers")
    y, *_ = layer_norm.forward(x)
    near(y, F.layer_norm(x.double(), x.shape[-1:]), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [
    (513, 768), (4099, 64), (70, 1023), (257, 3072), (33, 6144), (33, 6152), (129, 8192),
    (17, 3079), (5, 100_003), (200_000, 24), (3, 1 << 20),
])  # fmt: skip
def test_every_rung_on_a_gpu(shape, name):
    dtype = getattr(torch, name)
    x, dy = (numbers(*shape, dtype=dtype, shift=0.3, seed=n) for n in range(2))
    weight, bias = (numbers(shape[1], dtype=dtype, seed=n) for n in (2, 3))
    true = gradients(F.layer_norm, shape[1:], *(t.double() for t in (x, weight, bias, dy)))
    for variant in ("auto", *layer_norm.FORWARD):
        try:
            y, mean, rstd = layer_norm.forward(x, weight, bias, eps=1e-3, variant=variant)
        except ValueError:
            assert variant == "registers" and shape[1] > plan.FORWARD_LIMIT
            continue
        near(y, true[0], TOLERANCE[dtype])
    for variant in ("auto", *layer_norm.BACKWARD):
        try:
            found = layer_norm.backward(dy, x, weight, mean, rstd, variant=variant)
        except ValueError:
            assert variant == "registers" and shape[1] > min(plan.BACKWARD_LIMIT.values())
            continue
        again = layer_norm.backward(dy, x, weight, mean, rstd, variant=variant)
        assert all(map(torch.equal, found, again)), variant
        for part, expected in zip(found, true[1:], strict=True):
            near(part, expected, TOLERANCE[dtype] * (5 if part.dim() == 1 else 1))
    found = gradients(ops.layer_norm, shape[1:], x, weight, bias, dy)
    for part, expected in zip(found, true, strict=True):
        near(part, expected, TOLERANCE[dtype] * (5 if part.dim() == 1 else 1))
