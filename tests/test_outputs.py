"""`out` beside what a kernel still has to read: what the contract of every rung does not prove."""

import numpy as np
import pytest
import torch
from tensors import PLACE

from course_lib.kernels import (
    global_avg_pool,
    softmax,
)
from course_lib.runtime.host import outputs
from course_lib.runtime.host.arrays import ArrayError


def tensor(*shape):
    return torch.linspace(-1, 2, int(np.prod(shape)), device=PLACE).reshape(shape)


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
