"""Every rung of every operation, in every dtype, keeps the promises of `contract.properties`."""

import pytest
from contract.cases import subjects
from contract.properties import Held, hold


@pytest.fixture(autouse=True, scope="module")
def _poisoned():
    """New memory is full of NaN, so that what a kernel leaves unwritten is seen."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("subject", subjects(), ids=lambda subject: subject.label)
def test_contract(subject, record_property):
    for name in hold(Held(subject)):
        record_property("proved", name)
