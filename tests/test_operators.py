"""Every function of `ops`, in every form, keeps the promises of `contract.operator_promises`."""

import functools

import pytest
import torch
from contract import operator_mistakes, wording
from contract.held import Broken
from contract.operator_exceptions import EXCEPTIONS
from contract.operator_promises import BY_NAME, FOR_A_GPU, keep, promises
from contract.operators import SUBJECTS, Held, quick
from tensors import PLACE, randn

from course_lib import SIMULATED, ops

held = functools.cache(Held)
MISTAKES = operator_mistakes.MISTAKES | operator_mistakes.ON_A_GPU


def marked(*row):
    """A row that ends in a promise, which may be one for a GPU alone."""
    return pytest.param(*row, marks=[pytest.mark.gpu] if row[-1] in FOR_A_GPU else [])


@pytest.mark.parametrize(
    "subject, promise", [marked(each, promise) for each in SUBJECTS for promise in promises(each)],
    ids=lambda each: getattr(each, "label", each),
)  # fmt: skip
def test_an_operator_keeps_its_promises(subject, promise, record_property):
    if keep(held(subject), promise):
        record_property("kept", promise)


def test_every_operator_is_held_to_them():
    assert {subject.name for subject in SUBJECTS} == set(ops.__all__)
    with quick():
        called = {operator._schema.name for each in SUBJECTS for operator in held(each).calls}
    registered = {name for name in torch._C._dispatch_get_all_op_names()
                  if name.startswith("course_lib::") and "planted" not in name}  # fmt: skip
    assert called == registered


def test_what_is_right_is_taken():
    with operator_mistakes.planted() as right:
        for promise in set(promises(right.subject)) - (FOR_A_GPU if SIMULATED else set()):
            assert keep(right, promise)


@pytest.mark.parametrize(
    "fault, promise", [marked(*row) for row in MISTAKES.items() if row[1] in BY_NAME]
)
def test_a_planted_mistake_is_rejected(fault, promise, record_property):
    with operator_mistakes.planted(fault) as wrong, pytest.raises(Broken) as caught:
        keep(wrong, promise)
    assert caught.value.property == promise
    record_property("rejected operator", fault)


def test_every_exception_is_of_something():
    for each in EXCEPTIONS:
        assert any(each.covers(subject, each.property) for subject in SUBJECTS), each


@pytest.mark.parametrize("label", wording.UNDIFFERENTIABLE)
def test_what_has_no_gradient_says_so(label):
    loss, shape, of_leaf, words = wording.UNDIFFERENTIABLE[label]
    function = getattr(ops, label.partition(" ")[0])
    x = randn(shape, requires_grad=True)
    leaf = torch.rand(of_leaf, device=PLACE).softmax(-1).requires_grad_()
    with torch.no_grad():
        loss(function, x, leaf)
    with pytest.raises(RuntimeError, match=words):
        loss(function, x, leaf).backward()
