"""Every rung of every operation, in every dtype, keeps the promises of `contract.properties`.

Here are those of images; the others are in `test_contract_rows`, so that two processes share them.
"""

import pytest
import torch
from contract import exceptions, once, planted
from contract.cases import CHIP, subjects
from contract.held import Broken, Held
from contract.properties import PROPERTIES, gradients, hold

from course_lib import SIMULATED
from course_lib.operations import OPERATIONS

SUBJECTS = list(subjects())
#: The truth of no rows takes the mean of nothing.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what}")
    for what in ("Mean of empty slice", "invalid value", r"var_mean\(\)", ".*deterministic")
]


@pytest.fixture(autouse=True, scope="module")
def poisoned():
    """New memory is full of NaN, so that what a kernel leaves unwritten is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # the peers may be what they are
    yield
    torch.use_deterministic_algorithms(False)


def of_each(chosen):
    """Run a test on the subjects for which `chosen` is true."""
    parameters = [pytest.param(each, id=each.label) for each in SUBJECTS if chosen(each)]
    return pytest.mark.parametrize("subject", parameters)


def prove(subject, record_property):
    """Hold the subject to all that it promises, and note what is proved."""
    with once.for_both_gradients(subject):
        for name in hold(Held(subject)):
            record_property("proved", name)


@of_each(lambda subject: subject.operation.n_dims == 4)
def test_a_rung_keeps_its_promises(subject, record_property):
    prove(subject, record_property)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_truth_of_gradients(name, record_property):
    for direction in {"backward", "weights"} & set(OPERATIONS[name].passes):
        gradients(OPERATIONS[name], direction)
        record_property("proved", "gradients")


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", planted.DTYPES)
def test_what_is_right_is_taken(direction, dtype):
    subject = planted.planted("", direction, dtype)
    n_without = (not SIMULATED) + (not subject.has_numpy)
    assert len(list(hold(Held(subject)))) == len(PROPERTIES) - n_without
    gradients(subject.operation, "backward")


@pytest.mark.skipif(not SIMULATED, reason="on a GPU such a mistake may do harm")
@pytest.mark.parametrize("fault", planted.MISTAKES)
def test_a_planted_mistake_is_rejected(fault, record_property):
    name = planted.MISTAKES[fault]
    direction = "backward" if fault == "columns are not counted" else "forward"
    with pytest.raises(Broken) as caught:
        list(hold(Held(planted.planted(fault, direction)), (name,)))
    assert caught.value.property == name
    record_property("rejected", fault)


#: What runs that prove several properties at once see, and even the few of `exceptions.LEAN`.
JOINT = [fault for fault, name in planted.MISTAKES.items() if name in ("views", "out", "bits")]
SEEN_BY_FEW = [fault for fault in JOINT if fault != "out may lie in what is read"]


@pytest.mark.skipif(not SIMULATED, reason="on a GPU such a mistake may do harm")
@pytest.mark.parametrize(
    "fault, lean", [(fault, False) for fault in JOINT] + [(fault, True) for fault in SEEN_BY_FEW]
)
def test_a_planted_mistake_is_rejected_by_joint_runs(fault, lean):
    with pytest.raises(Broken):
        list(hold(Held(planted.planted(fault), lean), ("views", "out", "bits")))


@pytest.mark.parametrize("fault", planted.WRONG_TRUTHS)
def test_a_wrong_truth_is_rejected(fault, record_property):
    with pytest.raises(Broken, match="gradients"):
        gradients(planted.operation(fault), "backward")
    record_property("rejected", fault)


def test_every_way_that_this_chip_has_is_held_to_it():
    held = {(subject.name, subject.direction, subject.rung) for subject in SUBJECTS}
    for name, operation in OPERATIONS.items():
        for direction, of_pass in operation.passes.items():
            for variant in of_pass.variants:
                lacking = of_pass.ladder.named(variant).refusal(CHIP)
                by_ways = variant in exceptions.HELD_BY_WAYS.get(name, ())  # variants as well
                found = (name, direction, variant)
                assert found in held or by_ways or lacking, found


def test_every_exception_is_of_something():
    for each in exceptions.EXCEPTIONS:
        assert any(each.covers(subject, each.property) for subject in SUBJECTS), each
    there = {(subject.name, name) for subject in SUBJECTS for name in subject.named}
    assert {(name, rung) for name, rungs in exceptions.LEAN.items() for rung in rungs} <= there
