"""`intrinsics.bits`: the bits of a number."""

import numpy as np
import torch
from tensors import PLACE

from course_lib import cuda
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics.bits import as_word


@cuda.jit
def words_kernel(x, words):
    i = cuda.threadIdx.x
    words[i] = as_word(x[i])


def test_a_word_has_the_bits_of_its_number():
    numbers = np.array([0, -0.0, 1, -2.5, 1e-40, np.inf, -np.inf, np.nan], np.float32)
    x = torch.from_numpy(numbers).to(PLACE)
    words = torch.zeros(len(numbers), dtype=torch.uint32, device=PLACE)
    launch(words_kernel, 1, len(numbers), x, words)
    assert np.array_equal(words.cpu().numpy(), numbers.view(np.uint32))
