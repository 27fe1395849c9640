"""Inference by kernels alone: the logits, one graph for each batch size, and what is refused."""

import pytest
import torch
from test_fashion_mnist_graph import NoArithmetic, networks

from course_lib import SIMULATED
from course_lib.train import GraphInference

pytestmark = pytest.mark.usefixtures("first_rungs")
PLACE = "cpu" if SIMULATED else "cuda"


def test_logits_are_pytorchs_without_its_arithmetic():
    ours, theirs = networks()
    infer = GraphInference(ours)
    x = torch.rand(3, 1, 28, 28, device=PLACE) - 0.5
    with torch.no_grad():
        expected = theirs(x)
    if SIMULATED:
        with NoArithmetic():
            found = infer(x)
    else:
        found = infer(x)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    # In another layout, of one image, and of none.
    other = x.expand(3, 1, 28, 28).transpose(2, 3)
    with torch.no_grad():
        torch.testing.assert_close(infer(other[:1]), theirs(other[:1]), rtol=1e-3, atol=1e-5)
    assert infer(x[:0]).shape == (0, 10)


def test_one_weight_is_laid_out_anew_and_stays_what_it_is():
    ours, _ = networks()
    before, weight = ours.conv2.weight.detach().clone(), ours.conv2.weight
    GraphInference(ours)
    assert ours.conv2.weight is weight and torch.equal(weight, before) and weight.requires_grad
    assert weight.is_contiguous(memory_format=torch.channels_last)
    place = weight.data_ptr()
    GraphInference(ours)
    assert weight.data_ptr() == place


def test_what_is_no_batch_of_images_is_refused():
    infer = GraphInference(networks()[0])
    for wrong in (torch.zeros(3, 28, 28), torch.zeros(3, 1, 28, 27), torch.zeros(1, 3, 28, 28)):
        with pytest.raises(
            ValueError, match=r"x must be float32 \(N, 1, 28, 28\), not torch.float"
        ):
            infer(wrong.to(PLACE))
    with pytest.raises(ValueError, match="not torch.uint8"):
        infer(torch.zeros(3, 1, 28, 28, dtype=torch.uint8, device=PLACE))
    with pytest.raises(ValueError, match="x is on meta, and the network on"):
        infer(torch.zeros(3, 1, 28, 28, device="meta"))
    with pytest.raises(ValueError, match="most_graphs must be 1 or more, not 0"):
        GraphInference(networks()[0], most_graphs=0)


@pytest.mark.gpu
@pytest.mark.parametrize("precision, error", [("float32", 1e-4), ("tf32", 1e-2)])
def test_graphs_of_several_sizes_take_turns(precision, error):
    ours, theirs = networks()
    infer = GraphInference(ours, precision=precision, most_graphs=3)
    for n in (1, 7, 32, 7, 1000, 1, 32):
        x = torch.rand(n, 1, 28, 28, device="cuda") - 0.5
        with torch.no_grad():
            expected = theirs.double()(x.double())
        off = (infer(x) - expected).norm() / expected.norm()
        assert off < error and len(infer.graphs) <= 3
    with torch.no_grad():  # what the weights become in place is seen
        for model in (ours, theirs):
            model.fc2.bias.add_(1)
    torch.testing.assert_close(infer(x).double(), expected + 1, rtol=0, atol=0.05)
