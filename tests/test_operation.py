"""Ladders told from outside which rung to take."""

import pytest
import torch
from tensors import PLACE, randn

from course_lib import SIMULATED, ops
from course_lib.kernels import batch_norm, conv2d, gemm, linear
from course_lib.kernels.activation import relu
from course_lib.kernels.operation import Ladder, Refusal, Rung, Way
from course_lib.runtime.host import launch as launching


def launched(function, *inputs):
    """Names of the kernels that a call launches."""
    with launching.recorded() as launches:
        function(*inputs)
    return [getattr(kernel, "__name__", str(kernel)) for kernel, *_ in launches]


def images():
    return randn(1, 2, 4, 4), randn(3, 2, 3, 3)


def test_auto_takes_the_rung_that_was_chosen():
    x, weight = images()
    usual = launched(conv2d.forward, x, weight, None)
    with conv2d.FORWARD.choosing("tiled"):
        assert launched(conv2d.forward, x, weight, None) == ["tiled_kernel"]
        with conv2d.FORWARD.choosing("direct"):
            assert launched(conv2d.forward, x, weight, None) == ["direct_kernel"]
            with conv2d.FORWARD.choosing("auto"):
                assert launched(conv2d.forward, x, weight, None) == usual
        assert launched(conv2d.forward, x, weight, None) == ["tiled_kernel"]
    assert launched(conv2d.forward, x, weight, None) == usual != ["direct_kernel"]
    assert launching.choices == ()


def test_the_rung_that_a_caller_names_is_taken_all_the_same():
    x, weight = images()
    with conv2d.FORWARD.choosing("tiled"):
        assert launched(lambda: conv2d.forward(x, weight, None, variant="direct")) == [
            "direct_kernel"
        ]


def test_a_ladder_that_every_chip_climbs_to_one_rung():
    x = randn(64)
    before = launched(relu.forward, x)
    with relu.FORWARD.choosing("naive"):
        assert launched(relu.forward, x) != before
    assert launched(relu.forward, x) == before


def test_after_an_error_the_usual_rung_is_back():
    with pytest.raises(ZeroDivisionError), linear.FORWARD.choosing("naive"):
        raise ZeroDivisionError
    assert launching.choices == () and linear.FORWARD is gemm.FORWARD
    assert linear.FORWARD.rung("auto", randn(1)).name != "naive"


def test_a_way_can_be_chosen_as_a_rung_can():
    x, weight = torch.ones(4, 64, device=PLACE), torch.ones(40, 64, device=PLACE)
    assert launched(linear.forward, x, weight) == ["few_rows_kernel"]
    with linear.FORWARD.choosing("tensor_core/mma"):
        assert launched(linear.forward, x, weight) == ["tensor_core_kernel"]
    with linear.FORWARD.choosing("tensor_core"):
        assert launched(linear.forward, x, weight) == ["few_rows_kernel"]
    with pytest.raises(ValueError, match="unknown variant 'naive/mma'; .* tensor_core/mma, "):
        linear.forward(x, weight, variant="naive/mma")


def planned(problem, chip):
    if problem > 9:
        return Refusal(f"takes at most 9, not {problem}")
    return problem * chip.shared_bytes


#: `b` takes all, at double the cost of `a`, which takes little; `new` needs a later chip.
WAYS = Ladder(
    Rung("plain", list, ("k0",)),
    Rung(
        "some", prefer=lambda problem, chip: ("new", "b") if problem == 5 else ("a", "b"),
        ways=(
            Way("a", planned, list, ("k1",)), Way("b", lambda *_: "slow", list, ("k2", "k1")),
            Way("new", lambda *_: "fast", list, ("k3",), (9, 0)),
        ),
    ),
    auto="some",
)  # fmt: skip
FEW = Ladder(Rung("plain", list, ("k0",)), Rung("some", ways=WAYS["some"].ways[::2]), auto="plain")
OLD = launching.Chip((8, 0), 2, 108, 40 << 20, "old")
NEW = OLD._replace(capability=(9, 0))


@pytest.mark.parametrize("variant, problem, chip, name, plan", [
    ("auto", 3, OLD, "some/a", 6), ("some", 3, OLD, "some/a", 6),
    ("auto", 12, OLD, "some/b", "slow"),
    ("auto", 5, NEW, "some/new", "fast"), ("auto", 5, OLD, "some/b", "slow"),
    ("some/b", 3, OLD, "some/b", "slow"), ("some/new", 3, NEW, "some/new", "fast"),
    ("plain", 12, OLD, "plain", 12),
])  # fmt: skip
def test_the_best_way_that_takes_a_problem(variant, problem, chip, name, plan):
    found = WAYS.choose(variant, problem, chip)
    assert (found.variant, found.plan) == (name, plan) and found.rung == name.partition("/")[0]


@pytest.mark.parametrize("variant, chip, reason", [
    ("some/a", NEW, "takes at most 9, not 12: use one of plain, some"),
    ("some/new", OLD, "needs compute capability 9.0, and this GPU has 8.0: use one of plain, some"),
])  # fmt: skip
def test_a_way_asked_for_by_name_runs_or_says_why_it_can_not(variant, chip, reason):
    with pytest.raises(ValueError, match=f"variant '{variant}' {reason}"):
        WAYS.choose(variant, 12, chip)


def test_a_rung_gives_the_reason_of_a_way_that_the_chip_has():
    with pytest.raises(ValueError, match="'some' takes at most 9, not 12: use one of plain"):
        FEW.choose("some", 12, OLD)


def test_a_rung_has_the_kernels_of_its_ways():
    assert WAYS["some"].kernels == ("k1", "k2", "k3") and WAYS.kernels[0] == "k0"
    assert WAYS.variants == ("plain", "some", "some/a", "some/b", "some/new")
    assert WAYS["plain"].ways == (WAYS["plain"],) and list(WAYS) == ["plain", "some"]


def test_a_rung_that_there_is_not_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown variant 'fastest'; there are .*naive"):
        with batch_norm.FORWARD.choosing("fastest"):
            pass
    assert launching.choices == ()


def test_operators_follow_and_what_was_noted_is_not_repeated():
    """On a GPU, where operators repeat launches that they have noted, above all."""
    x, weight = randn(2, 4, 8, 8), randn(8, 4, 3, 3)
    usual = [ops.conv2d(x, weight) for _ in range(4)][-1]
    with conv2d.FORWARD.choosing("direct"):
        names = [launched(ops.conv2d, x, weight) for _ in range(4)]
        found = ops.conv2d(x, weight)
    assert names[0] == ["direct_kernel"] and (not SIMULATED or names == names[:1] * 4)
    torch.testing.assert_close(found, usual, rtol=1e-4, atol=1e-4)
    y, dy = randn(128).relu(), randn(128)
    leaf = y.clone().requires_grad_()
    with relu.FORWARD.choosing("naive"), relu.BACKWARD.choosing("naive"):
        (dx,) = torch.autograd.grad(ops.relu(leaf), leaf, dy)
    assert dx.device.type == PLACE and torch.equal(dx, dy * (y > 0))
