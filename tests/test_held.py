"""`intrinsics.held`: products of a warpgroup whose left side is in registers."""

import numpy as np
import pytest
import torch
from test_warpgroup import has_them, in_panels

from course_lib import SIMULATED, cuda
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics.held import multiply_held, wait_for_products_but
from course_lib.runtime.intrinsics.pairs import as_pair
from course_lib.runtime.intrinsics.warpgroup import (
    show_to_products,
    tiles_in_shared,
    wait_for_products,
)

PLACE = "cpu" if SIMULATED else "cuda"
pytestmark = pytest.mark.skipif(not has_them(), reason="compute capability 9.0 alone has wgmma")


def product_kernel(columns, rows, w):
    """found[thread, r] = acc[r] of A·Bᵀ, then once more; A is held from word `w` on.

    What x has as rows of 128 bytes, lies in shared memory in panels of `rows` rows, with its chunks
    in their places.
    """
    n_sums, n_words, size = columns // 2, 16 + w, rows * columns

    @cuda.jit
    def kernel(a, x, found):
        tiles, tid = tiles_in_shared(x), cuda.threadIdx.x
        words = cuda.local.array(n_words, np.uint32)
        acc = cuda.local.array(n_sums, np.float32)
        for i in range(tid, size, 128):
            row, k = i // 64, i % 64
            tiles[row * 64 + (k // 8 ^ row % 8) * 8 + k % 8] = x[i]
        row, k = tid // 32 * 16 + tid % 32 // 4, tid % 4 * 2
        for step in range(4):
            for r in range(4):
                at = (row + r % 2 * 8) * 64 + step * 16 + r // 2 * 8 + k
                words[w + 4 * step + r] = as_pair(x, a[at], a[at + 1])
        for r in range(n_sums):
            acc[r] = np.float32(0)
        show_to_products()
        cuda.syncthreads()
        multiply_held(acc, words, w, tiles, 0, columns, rows)
        multiply_held(acc, words, w, tiles, 0, columns, rows)
        wait_for_products_but(1, acc, columns)
        wait_for_products(acc, columns)
        for r in range(n_sums):
            found[tid, r] = acc[r]

    return kernel


def as_matrix(found, columns):
    """What the threads hold, where it belongs."""
    product = np.empty((64, columns))
    for thread in range(128):
        row, col = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        for r in range(columns // 2):
            product[row + r // 2 % 2 * 8, r // 4 * 8 + col + r % 2] = found[thread, r]
    return product


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "columns, rows, w", [(64, 64, 0), (128, 64, 16), (256, 64, 0), (128, 128, 0)]
)
def test_a_product_of_what_registers_hold(dtype, columns, rows, w):
    generator = torch.Generator().manual_seed(columns)
    a, b = (torch.randint(-3, 4, (n, 64), generator=generator) for n in (64, columns))
    panels = in_panels(b.to(dtype)).reshape(-1, 64, 64)
    apart = torch.full((columns // 64, rows, 64), 7, dtype=dtype)  # beside what belongs to B
    apart[:, :64] = panels
    found = torch.full((128, columns // 2), float("nan"), device=PLACE)
    launch(
        product_kernel(columns, rows, w), 1, 128, a.float().reshape(-1).to(PLACE),
        apart.reshape(-1).to(PLACE), found, shared_bytes=2 * rows * columns,
    )  # fmt: skip
    assert np.array_equal(as_matrix(found.cpu().numpy(), columns), 2 * (a @ b.T).numpy())


@pytest.mark.skipif(not SIMULATED, reason="a GPU's compiler refuses, or its context is lost")
def test_what_a_tensor_core_would_take_otherwise_is_refused():
    a, found = torch.zeros(64 * 64), torch.zeros(128, 32)
    for columns, rows, dtype, error, says in (
        (32, 64, torch.float16, ValueError, "panels of 64 columns, which 32 are not"),
        (64, 32, torch.float16, ValueError, "panels have a multiple of 64 rows, not 32"),
        (64, 64, torch.float32, TypeError, "16-bit numbers, not float32|16-bit dtype"),
    ):
        x = torch.zeros(rows * columns, dtype=dtype)
        with pytest.raises(error, match=says):
            launch(product_kernel(columns, rows, 0), 1, 128, a, x, found, shared_bytes=1 << 15)
