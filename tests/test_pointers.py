"""Arrays found by their address."""

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, cuda
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import load, store
from course_lib.runtime.intrinsics.pointers import array_at

PLACE = "cpu" if SIMULATED else "cuda"
HALF = np.float32(0.5)


@cuda.jit
def halve_kernel(table, lengths, like):
    # A block for each array of the table.
    n = lengths[cuda.blockIdx.x]
    array = array_at(table[cuda.blockIdx.x], n, like)
    for i in range(cuda.threadIdx.x, array.shape[0], cuda.blockDim.x):
        store(array, i, load(array, i) * HALF)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_arrays_of_a_table(dtype):
    arrays = [torch.arange(n, device=PLACE).to(dtype) for n in (1, 40, 0, 7)]
    arrays.append(arrays[1].clone()[3:9])  # begins within another's memory
    expected = [x / 2 for x in arrays]
    table = torch.tensor([x.data_ptr() for x in arrays], device=PLACE)
    lengths = torch.tensor([x.numel() for x in arrays], device=PLACE)
    launch(halve_kernel, len(arrays), 32, table, lengths, arrays[0])
    assert all(torch.equal(x, y) for x, y in zip(arrays, expected, strict=True))


@pytest.mark.skipif(not SIMULATED, reason="a GPU reads and writes what is there")
def test_the_simulator_knows_where_such_an_array_ends():
    @cuda.jit
    def beyond_kernel(table, like):
        array = array_at(table[0], 4, like)
        array[cuda.threadIdx.x] = HALF

    memory = torch.zeros(64)
    with pytest.raises(IndexError):
        launch(beyond_kernel, 1, 5, torch.tensor([memory.data_ptr()]), memory)
    assert memory[4] == 0
