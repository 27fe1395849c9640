"""Which tile of c a block computes."""

import numpy as np

from course_lib import cuda

BAND = 8  # rows of tiles that blocks go through together, column by column


@cuda.jit(device=True)
def place_of_block(M, N, tile_m, tile_n, n_splits):
    """(first row, first column, part of k) of this block.

    Blocks that run at the same time share what they read, if their tiles lie in a square rather
    than in a line: so BAND rows of tiles are gone through one column after another.
    """
    tiles_m, tiles_n = (M + tile_m - 1) // tile_m, (N + tile_n - 1) // tile_n
    block = np.int64(cuda.blockIdx.x)
    index, split = block // n_splits, block % n_splits
    band = index // (BAND * tiles_n)
    rows = min(tiles_m - band * BAND, BAND)
    inside = index - band * BAND * tiles_n
    return (band * BAND + inside % rows) * tile_m, inside // rows * tile_n, split
