"""Rungs that work on rows, or on arrays of any shape: the promises that `test_contract` proves."""

from test_contract import of_each, poisoned, prove, pytestmark

__all__ = ["poisoned", "pytestmark"]


@of_each(lambda subject: subject.operation.n_dims != 4)
def test_a_rung_keeps_its_promises(subject, record_property):
    prove(subject, record_property)
