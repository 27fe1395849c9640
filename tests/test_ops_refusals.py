"""What PyTorch refuses our operators refuse, what it takes they take, and results lie as its do.

All by our kernels; scripts in `on_the_cpu` prove the same where operators run PyTorch.
"""

import extremes
import layouts
import operands
import pytest
import refusals
import torch
from tensors import choosing

from course_lib import SIMULATED, ops
from course_lib.kernels import conv2d, conv_transpose2d, linear

on_the_cpu = pytest.mark.skipif(not SIMULATED, reason="the cases are tensors on the CPU")


@pytest.mark.parametrize("label", operands.CASES)
def test_every_operand_in_every_layout(label):
    assert list(operands.faults(label)) == []


def test_every_operator_has_a_case():
    assert operands.missing() == []


@on_the_cpu
def test_every_case_and_every_operator():
    assert list(refusals.faults()) == []


@on_the_cpu
@pytest.mark.parametrize("operator", ops.__all__)
def test_extreme_numbers_and_sizes_give_what_pytorchs_do(operator):
    exact = torch.backends.cudnn.flags(allow_tf32=False)
    with exact, choosing("tiled", conv2d, linear), choosing("gather", conv_transpose2d):
        assert list(extremes.faults([operator])) == []


@on_the_cpu
def test_results_lie_in_memory_as_pytorchs_and_may_be_written_to():
    assert list(layouts.faults()) == []
