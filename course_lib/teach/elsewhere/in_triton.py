"""The online softmax in Triton: a program for each row, which works on tiles of it."""

import os

from course_lib import SIMULATED

if SIMULATED:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton decides when it is imported

import triton
import triton.language as tl

TILE = 512  # columns that a program holds at a time: a power of two


@triton.jit
def softmax_online(x, y, n_cols, TILE: tl.constexpr):
    """Write the softmax of each row of x to y; both are pointers to float32 (rows, n_cols)."""
    first = tl.program_id(0).to(tl.int64) * n_cols
    place = tl.arange(0, TILE)
    m, s = float("-inf"), 0.0
    for start in range(0, n_cols, TILE):
        inside = start + place < n_cols
        tile = tl.load(x + first + start + place, mask=inside, other=float("-inf"))
        largest = tl.maximum(m, tl.max(tile, 0))
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        s = s * tl.exp(m - shift) + tl.sum(tl.exp(tile - shift), 0)
        m = largest
    for start in range(0, n_cols, TILE):
        inside = start + place < n_cols
        tile = tl.load(x + first + start + place, mask=inside)
        tl.store(y + first + start + place, tl.exp(tile - m) / s, mask=inside)


def softmax(x):
    """Return the softmax of each row of x, a NumPy array of float32 (rows, columns), as another.

    Without a GPU, Triton's own interpreter runs the kernel.
    """
    import torch

    there = torch.tensor(x, device="cpu" if SIMULATED else "cuda")
    y = torch.empty_like(there)
    softmax_online[(len(x),)](there, y, x.shape[1], TILE=TILE)
    return y.cpu().numpy()


def ptx(cc, divisible=False):
    """Return what the kernel becomes for a compute capability such as (9, 0), as text.

    divisible: n_cols is a multiple of 16, and so are both addresses, in bytes; Triton looks at its
    arguments, and compiles once more for those that are.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"x": "*fp32", "y": "*fp32", "n_cols": "i32", "TILE": "constexpr"}
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(3)} if divisible else {}
    source = ASTSource(softmax_online, types, {(3,): TILE}, attributes)
    target = GPUTarget("cuda", 10 * cc[0] + cc[1], 32)
    return triton.compile(source, target, {"enable_fp_fusion": True}).asm["ptx"]
