"""`out` of every launcher: never memory that the kernel still has to read."""

import numpy as np
import pytest
import torch
from tensors import PLACE

from course_lib.kernels import (
    activation,
    batch_norm,
    bn_relu_softmax,
    conv2d,
    cross_entropy,
    dropout,
    global_avg_pool,
    linear,
    max_pool2d,
    softmax,
    softmax_dropout,
    squeeze_excite,
)
from course_lib.runtime import outputs
from course_lib.runtime.arrays import ArrayError


def tensor(*shape):
    return torch.linspace(-1, 2, int(np.prod(shape)), device=PLACE).reshape(shape)


def ones(*shape):
    return torch.ones(shape, device=PLACE)


def launchers():
    """name -> (function of x and out, shape of x, shape of out), for each array that one reads."""
    image, rows, four, eight = (2, 4, 3, 5), (6, 8), ones(4), [ones(8) for _ in range(4)]
    x, y = tensor(*image), tensor(*rows)
    _, indices = max_pool2d.forward(x, 1)
    _, stats = softmax_dropout.forward(y, 0.5, 1, 0)
    target = torch.zeros(6, dtype=torch.int64, device=PLACE)
    loss = cross_entropy.forward(y, target)
    dense = ones(3, 4), ones(3), ones(4, 3), four
    saved = squeeze_excite.forward(x, *dense)[1:]
    small = dense[0], dense[2], *saved
    return {
        "softmax": (lambda x, out: softmax.softmax.forward(x, out=out), rows),
        "softmax backward, dy": (lambda a, out: softmax.softmax.backward(a, y, out=out), rows),
        "softmax backward, y": (lambda a, out: softmax.log_softmax.backward(y, a, out=out), rows),
        "batch_norm": (lambda a, out: batch_norm.forward(a, out=out), image),
        "batch_norm inference": (
            lambda a, out: batch_norm.inference(a, None, None, four, four, out=out), image,
        ),
        "batch_norm backward, dy": (
            lambda a, out: batch_norm.backward(a, x, None, four, four, out=out), image,
        ),
        "batch_norm backward, x": (
            lambda a, out: batch_norm.backward(x, a, None, four, four, out=out), image,
        ),
        "conv2d": (lambda a, out: conv2d.forward(a, ones(4, 4, 1, 1), out=out), image),
        "max_pool2d": (lambda a, out: max_pool2d.forward(a, 1, out=out), image),
        "max_pool2d backward": (
            lambda a, out: max_pool2d.backward(a, indices, image, 1, out=out), image,
        ),
        "linear": (lambda a, out: linear.forward(a, ones(8, 8), out=out), rows),
        "cross_entropy backward": (
            lambda a, out: cross_entropy.backward(loss[0], a, target, *loss[1:], out=out), rows,
        ),
        "softmax_dropout": (lambda a, out: softmax_dropout.forward(a, 0.5, 1, 0, out=out), rows),
        "softmax_dropout backward": (
            lambda a, out: softmax_dropout.backward(a, y, stats, 0.5, 1, 0, out=out), rows,
        ),
        "bn_relu_softmax": (lambda a, out: bn_relu_softmax.forward(a, *eight, out=out), rows),
        "bn_relu_softmax backward": (
            lambda a, out: bn_relu_softmax.backward(a, y, y, *eight, out=out), rows,
        ),
        "squeeze_excite": (lambda a, out: squeeze_excite.forward(a, *dense, out=out), image),
        "squeeze_excite backward": (
            lambda a, out: squeeze_excite.backward(a, x, *small, out=out), image,
        ),
        "relu": (lambda a, out: activation.relu.forward(a, out=out), (6, 8)),
        "swish backward": (lambda a, out: activation.swish.backward(a, a, out=out), (6, 8)),
        "dropout": (lambda a, out: dropout.forward(a, 0.5, 1, 0, out=out), (6, 8)),
    }  # fmt: skip


#: Each element, or each row, is read before its result is written.
IN_PLACE = {"softmax", "softmax backward, dy", "softmax backward, y", "relu", "swish backward",
            "dropout"}  # fmt: skip


@pytest.mark.parametrize("name", launchers())
def test_out_overlaps_nothing_that_is_read(name):
    run, shape = launchers()[name]
    n = int(np.prod(shape))
    memory = tensor(2 * n)
    x, apart = memory[:n].view(shape), memory[n:].view(shape)
    expected = run(x, None)
    for wrong in (memory[1 : n + 1], memory[n - 1 : 2 * n - 1]):
        before = memory.clone()
        with pytest.raises(ArrayError, match="share"):
            run(x, wrong.view(shape))
        assert torch.equal(memory, before)
    found = run(x, apart)
    for ours, theirs in zip(*([y] if torch.is_tensor(y) else y for y in (found, expected)),
                            strict=True):  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    with pytest.raises(ArrayError, match="out (must be contiguous|has strides)"):
        run(x, memory[:1].expand(shape))
    if name in IN_PLACE:
        run(x, x)
        torch.testing.assert_close(x, expected, rtol=0, atol=0)
    else:
        with pytest.raises(ArrayError, match="share memory"):
            run(x, x)


def test_the_mean_of_planes_does_not_lie_in_them():
    memory = tensor(2 * 4 * 9)
    with pytest.raises(ArrayError, match="out and x share memory"):
        global_avg_pool.forward(memory.view(2, 4, 3, 3), out=memory[:8].view(2, 4))
    with pytest.raises(ArrayError, match="out and dy share memory"):
        global_avg_pool.backward(memory[5:13].view(2, 4), (3, 3), out=memory.view(2, 4, 3, 3))


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor], ids=["NumPy", "PyTorch"])
def test_memory_is_compared_by_its_bytes(kind):
    memory = kind(np.arange(24, dtype=np.float32))
    share = outputs.share_memory
    assert share(memory, memory[23:]) and share(memory[3:5], memory[4:6])
    assert not share(memory[:4], memory[4:]) and not share(memory[4:], memory[:4])
    assert not share(memory[4:4], memory)
    columns = memory.reshape(4, 6)
    assert share(columns[:, 1], memory[13:14]) and not share(columns[2:, 0], memory[:12])
    if kind is np.asarray:
        assert share(memory[::-1], memory[:1]) and not share(memory[:11:-1], memory[:12])
        assert share(memory.view(np.float16)[:3], memory[1:])


def test_what_is_copied_before_it_is_read_may_lie_in_out():
    memory = tensor(6, 8)
    expected = softmax.softmax.forward(memory.clone().t())
    out = memory.view(8, 6)
    assert softmax.softmax.forward(memory.t(), out=out) is out
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
