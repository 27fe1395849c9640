"""What a warp multiplies: fragments of tiles in shared memory, held in registers.

A warp computes `rows`·`cols` of the product, in fragments of 16 rows and 8 columns. `acc`, the sums
of a lane, is a local array of 4 float32 for each fragment (`intrinsics.matrix` says which);
fragment (i, j) begins at 4·(i·cols/8 + j). Along k a tile is worked on
32 bytes at a time, a *step*.
"""

from course_lib import cuda
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.intrinsics.matrix import load_matrices, load_matrices_transposed, load_word

FRAGMENT_M, FRAGMENT_N = 16, 8
STEP_BYTES = 32


def load_a(tile, source, itemsize):
    """load(words, at, cache, base, i, step, lane): words[at : at+4] of the i-th 16 rows.

    `base` is where the tile's first column (or, `by_row`, its first k) of the first row lies.
    """
    PITCH, WIDTH = tile.pitch, VECTOR_BYTES // itemsize
    K_STEP = STEP_BYTES // itemsize

    @cuda.jit(device=True)
    def load_by_k(words, at, cache, base, i, step, lane):
        place = base + (i * FRAGMENT_M + lane % 16) * PITCH + lane // 16 * WIDTH + step * K_STEP
        load_matrices(words, at, cache, place)

    @cuda.jit(device=True)
    def load_by_row(words, at, cache, base, i, step, lane):
        k = step * K_STEP + lane // 16 * 8 + lane % 8
        place = base + k * PITCH + lane // 8 % 2 * 8 + i * FRAGMENT_M
        load_matrices_transposed(words, at, cache, place)

    @cuda.jit(device=True)
    def load_words_by_row(words, at, cache, base, i, step, lane):
        place = base + (step * K_STEP + lane % 4) * PITCH + lane // 4 + i * FRAGMENT_M
        for r in range(4):
            words[at + r] = load_word(cache, place + r % 2 * 8 + r // 2 * 4 * PITCH)

    return _chosen(source, itemsize, load_by_k, load_by_row, load_words_by_row)


def load_b(tile, source, itemsize):
    """load(words, at, cache, base, j, step, lane): words[at : at+4] of the j-th 16 columns.

    That is two fragments of 8 columns.
    """
    PITCH, WIDTH = tile.pitch, VECTOR_BYTES // itemsize
    K_STEP, PAIR_N = STEP_BYTES // itemsize, 2 * FRAGMENT_N

    @cuda.jit(device=True)
    def load_by_k(words, at, cache, base, j, step, lane):
        place = base + (j * PAIR_N + lane % 8 + lane // 16 * 8) * PITCH
        load_matrices(words, at, cache, place + lane // 8 % 2 * WIDTH + step * K_STEP)

    @cuda.jit(device=True)
    def load_by_row(words, at, cache, base, j, step, lane):
        k = step * K_STEP + lane % 16
        place = base + k * PITCH + lane // 16 * 8 + j * PAIR_N
        load_matrices_transposed(words, at, cache, place)

    @cuda.jit(device=True)
    def load_words_by_row(words, at, cache, base, j, step, lane):
        place = base + (step * K_STEP + lane % 4) * PITCH + lane // 4 + j * PAIR_N
        for r in range(4):
            words[at + r] = load_word(cache, place + r // 2 * 8 + r % 2 * 4 * PITCH)

    return _chosen(source, itemsize, load_by_k, load_by_row, load_words_by_row)


def _chosen(source, itemsize, by_k, by_row, words_by_row):
    if source != "by_row":
        return by_k
    return by_row if itemsize == 2 else words_by_row
