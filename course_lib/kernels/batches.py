"""Batches of a training set that lies on the GPU: drawn, normalised and counted by kernels.

A captured step of training must find its batch by itself: it reads from memory which step it is,
and counts on. What belongs to step k follows from k, the seed and the sizes alone:

order           the n images of an epoch are taken in the order of a permutation that nobody
                stores: a Feistel network over the next power of 4, whose rounds are Philox (Luby
                and Rackoff, 1988); a result beyond n is put through it again until it is below
learning rate   it rises in the first `rise` steps, then falls to 0 along a cosine

=================== ============================================================================
`next_batch`        x = pixel / 127.5 − 1 of the batch's images, and their labels; the learning
                    rate of the step; and counts the step
`normalise`         the same of all images, in their own order
`tally`             notes a step's loss, and how many of its logits are largest at their label
=================== ============================================================================

Each moves what it reads and writes once; with a batch of small images, launches are all it costs.
`reference.functions.batches` computes the same order on the host.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import allow_next_kernel, wait_for_previous_kernel
from course_lib.runtime.intrinsics.philox import philox4x32

BLOCK_SIZE = 256
N_ROUNDS = 6
SCALE, ONE, HALF = np.float32(1 / 127.5), np.float32(1), np.float32(0.5)
PI = np.float32(math.pi)


@cuda.jit(device=True)
def shuffled(i, n, half_bits, epoch, key0, key1):
    """Place `i` of the numbers below `n` in the order of `epoch`."""
    mask = (np.uint32(1) << np.uint32(half_bits)) - np.uint32(1)
    while True:
        left = np.uint32(np.uint32(i >> half_bits) & mask)
        right = np.uint32(np.uint32(i) & mask)
        for k in range(N_ROUNDS):
            drawn, _, _, _ = philox4x32(
                right, np.uint32(k), np.uint32(epoch), np.uint32(0), key0, key1
            )
            left, right = right, np.uint32(left ^ np.uint32(drawn & mask))
        i = (np.int64(left) << half_bits) | np.int64(right)
        if i < n:
            return i


@cuda.jit
def batch_kernel(
    images, labels, step, x, y, n, n_pixels, batch, first, half_bits, key0, key1
):  # fmt: skip
    # A block for each image, from the one at `first` in the batch on.
    allow_next_kernel()
    wait_for_previous_kernel()
    row, chosen = cuda.blockIdx.x, cuda.shared.array(1, np.int64)
    if cuda.threadIdx.x == 0:
        per_epoch = n // batch
        epoch = step[0] // per_epoch
        place = (step[0] - epoch * per_epoch) * batch + first + row
        chosen[0] = shuffled(place, n, half_bits, epoch, key0, key1)
        y[row] = labels[chosen[0]]
    cuda.syncthreads()
    i = np.int64(cuda.threadIdx.x)
    while i < n_pixels:
        value = np.float32(images[chosen[0] * n_pixels + i])
        x[row * n_pixels + i] = value * SCALE - ONE
        i += cuda.blockDim.x


@cuda.jit
def count_kernel(step, rate, highest, rise, total):
    # One thread: the learning rate of this step, and the number of the next.
    allow_next_kernel()
    wait_for_previous_kernel()
    k = step[0]
    if k < rise:
        rate[0] = highest * np.float32(k + 1) / np.float32(rise)
    else:
        angle = PI * np.float32(k - rise) / np.float32(total - rise)
        rate[0] = highest * (ONE + cuda.libdevice.fast_cosf(angle)) * HALF
    step[0] = k + 1


@cuda.jit
def normalise_kernel(images, x):
    allow_next_kernel()
    wait_for_previous_kernel()
    i = cuda.grid(1)
    if i < x.shape[0]:
        x[i] = np.float32(images[i]) * SCALE - ONE


@cuda.jit
def tally_kernel(loss, logits, labels, step, losses, right, n_rows, n_classes, per_epoch):
    # One block, after the step has been counted.
    allow_next_kernel()
    wait_for_previous_kernel()
    found, tid = cuda.shared.array(1, np.int32), cuda.threadIdx.x
    if tid == 0:
        found[0] = 0
    cuda.syncthreads()
    row = np.int64(tid)
    while row < n_rows:
        best, at = logits[row * n_classes], np.int64(0)
        for k in range(1, n_classes):
            value = logits[row * n_classes + k]
            if value > best:
                best, at = value, np.int64(k)
        if at == labels[row]:
            cuda.atomic.add(found, 0, 1)
        row += cuda.blockDim.x
    cuda.syncthreads()
    if tid == 0:
        place = (step[0] - 1) % per_epoch
        losses[place] = loss[0]
        right[place] = found[0]


def half_bits_of(n):
    """Bits of each half of the numbers that are permuted: 4 to the power of this is n or more."""
    return max(1, ((n - 1).bit_length() + 1) // 2)


def keys_of(seed):
    """The two words of the key that a `seed` from 0 to 2⁶⁴ − 1 gives."""
    return np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)


def next_batch(
    images, labels, step, rate, x, y, *, seed, highest, rise, total, batch=None, first=0
):  # fmt: skip
    """Fill x and y with the batch of the step that `step` tells, and `rate`; counts `step` on.

    images, labels  uint8 (n, ...) and int64 (n,)
    step, rate      int64 and float32, of one element each
    x, y            float32 and int64 (batch, ...), batch at most n
    seed            of the order, from 0 to 2⁶⁴ − 1
    highest, rise, total
                    the learning rate after `rise` steps, of `total`
    batch, first    x and y are a part of a batch of `batch` images, from number `first` on; None:
                    the whole

    Raises ArrayError for arrays that do not fit.
    """
    n, mine = len(labels), len(y)
    batch = mine if batch is None else batch
    arrays.require(images, "images", dtypes=("uint8",))
    n_pixels = arrays.size_of(images) // max(1, n)
    arrays.require(labels, "labels", shape=images.shape[:1], dtypes=("int64",))
    arrays.require(step, "step", shape=(1,), dtypes=("int64",), writable=True)
    arrays.require(rate, "rate", shape=(1,), dtypes=("float32",), writable=True)
    arrays.require(x, "x", dtypes=("float32",), writable=True)
    arrays.require(y, "y", shape=x.shape[:1], dtypes=("int64",), writable=True)
    if not 0 <= first < first + mine <= batch <= n:
        raise arrays.ArrayError(
            f"images {first} to {first + mine} are no part of a batch of {batch} of {n} images"
        )
    if arrays.size_of(x) != mine * n_pixels:
        raise arrays.ArrayError(
            f"x must have room for 1 to {n} images of {n_pixels} pixels, not shape {tuple(x.shape)}"
        )
    launch(
        batch_kernel, mine, BLOCK_SIZE, images, labels, step, x, y, n, n_pixels, batch, first,
        half_bits_of(n), *keys_of(seed), flat=True, overlap=True,
    )  # fmt: skip
    launch(
        count_kernel, 1, 1, step, rate, np.float32(highest), rise, total, flat=True, overlap=True
    )


def normalise(images, x):
    """x = pixel / 127.5 − 1 of uint8 `images`; x is float32, of as many elements."""
    arrays.require(images, "images", dtypes=("uint8",))
    arrays.require(x, "x", dtypes=("float32",), writable=True)
    n = arrays.size_of(images)
    if arrays.size_of(x) != n:
        raise arrays.ArrayError(f"x must have {n} elements, not shape {tuple(x.shape)}")
    if n:
        launch(
            normalise_kernel, math.ceil(n / BLOCK_SIZE), BLOCK_SIZE, images, x,
            flat=True, overlap=True,
        )  # fmt: skip


def tally(loss, logits, labels, step, losses, right):
    """losses[k] = loss and right[k] = right answers, for step number k of the epoch.

    To be called when `next_batch` has counted the step. losses is float32 and right int32, one
    element for each step of an epoch.
    """
    n_rows, n_classes = logits.shape
    launch(
        tally_kernel, 1, BLOCK_SIZE, loss, logits, labels, step, losses, right, n_rows, n_classes,
        len(losses), flat=True, overlap=True,
    )  # fmt: skip


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    count, number, sums = ("int64", 1), "int64", ("float32", 1)
    types = [("uint8", 1), count, count, sums, count, *[number] * 5, "uint32", "uint32"]
    yield "batches, next", batch_kernel, types
    yield "batches, normalise", normalise_kernel, [("uint8", 1), sums]
    yield "batches, count", count_kernel, [count, sums, "float32", number, number]
    types = [sums, sums, count, count, sums, ("int32", 1), *[number] * 3]
    yield "batches, tally", tally_kernel, types
