"""Global average pooling: the mean of each plane of an image, y[n, c] = mean over h, w of x.

x is N·C·H·W, contiguous or channels-last; y is N·C. float32, float16 or bfloat16 in and out,
summed in float32. With `s` bytes an element the forward pass must move N·C·(H·W + 1)·s bytes (read
x, write y), one addition each; the backward pass as many (read dy, write dx), so memory is the
limit. dx[n, c, h, w] = dy[n, c] / (H·W): each element of a plane has an equal share in its mean.

============ ==================================================== ================================
rung         a plane is summed by                                 then
============ ==================================================== ================================
`naive`      one thread, element by element                       nothing is left to do
`shared`     a block, each thread every 256th element             a tree in shared memory
`warp`       a block, as before                                   shuffles, one barrier pair
`vectorised` some lanes or, if it is long, several blocks; 16     shuffles; partial sums of
             bytes at a time, several loads in flight             several blocks: a second kernel
============ ==================================================== ================================

Channels-last planes interleave, so there neighbouring threads take neighbouring channels (`nhwc`);
the rungs have the same names. `naive` and `shared`, to which a plane is one stretch of memory, copy
such images first. The backward pass has no sum. Its rungs are `naive` (a thread per element, which
must find its plane by a division; contiguous images), `per_plane` (a block per plane) and
`vectorised`.

Sums are taken in a fixed order: two runs agree bit for bit. Derivation: notebook 02.
"""

import functools
import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.global_avg_pool import nhwc
from course_lib.kernels.global_avg_pool.nhwc import vectorised_kernel as vectorised_nhwc_kernel
from course_lib.kernels.global_avg_pool.nhwc import warp_kernel as warp_nhwc_kernel
from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.host.outputs import output
from course_lib.runtime.intrinsics import (
    FULL_MASK,
    VECTOR_BYTES,
    allow_next_kernel,
    block_sum,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
    warp_sum,
)

BLOCK_SIZE = 256
DTYPES = ("float32", "float16", "bfloat16")
MAX_WIDTH = 8  # elements of the narrowest dtype in 16 bytes
UNROLL = 4  # vectors in flight per thread
FEW_PLANES = 132 * 2  # for the largest chip of today
ENOUGH_THREADS = 132 * 512  # keep that chip busy
MOST_AT_ONCE = 2**31 - 2**20  # elements that one launch of the backward kernel writes
ZERO = np.float32(0)


@cuda.jit
def naive_kernel(x, y, n_cols, scale):
    plane = cuda.grid(1)
    if plane < y.shape[0]:
        total = ZERO
        for i in range(n_cols):
            total += load(x, plane * n_cols + i)
        store(y, plane, total * scale)


@cuda.jit
def shared_kernel(x, y, n_cols, scale):
    partial = cuda.shared.array(BLOCK_SIZE, np.float32)
    plane, tid = cuda.blockIdx.x, cuda.threadIdx.x
    total = ZERO
    for i in range(tid, n_cols, BLOCK_SIZE):
        total += load(x, plane * n_cols + i)
    partial[tid] = total
    cuda.syncthreads()
    step = BLOCK_SIZE // 2
    while step > 0:
        if tid < step:
            partial[tid] += partial[tid + step]
        cuda.syncthreads()
        step //= 2
    if tid == 0:
        store(y, plane, partial[0] * scale)


@cuda.jit
def warp_kernel(x, y, n_cols, scale):
    scratch = cuda.shared.array(32, np.float32)
    plane, tid = cuda.blockIdx.x, cuda.threadIdx.x
    total = ZERO
    for i in range(tid, n_cols, BLOCK_SIZE):
        total += load(x, plane * n_cols + i)
    total = block_sum(total, scratch)
    if tid == 0:
        store(y, plane, total * scale)


@cuda.jit(device=True)
def vector_sum(x, start, stop, offset, rank, n_ranks):
    """This thread's share of the sum of x[start:stop]; `rank` of `n_ranks` threads.

    `offset` counts the elements from the last 16-byte boundary to x[0].
    """
    width = vector_width(x)
    values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    first = min(start + (-(start + offset) & (width - 1)), stop)  # the first boundary
    n_vectors = (stop - first) // width
    total = ZERO
    vector = rank
    # All loads of a batch come before its additions: memory answers them together.
    while vector + (UNROLL - 1) * n_ranks < n_vectors:
        for u in range(UNROLL):
            load_vector(values[u], x, first + (vector + u * n_ranks) * width)
        for u in range(UNROLL):
            for k in range(width):
                total += values[u, k]
        vector += UNROLL * n_ranks
    if vector < n_vectors:
        for u in range(UNROLL):
            for k in range(width):
                values[u, k] = ZERO
            if vector + u * n_ranks < n_vectors:
                load_vector(values[u], x, first + (vector + u * n_ranks) * width)
        for u in range(UNROLL):
            for k in range(width):
                total += values[u, k]
    # What is left: fewer than 16 bytes at either end, so n_ranks must be at least MAX_WIDTH.
    if start + rank < first:
        total += load(x, start + rank)
    if first + n_vectors * width + rank < stop:
        total += load(x, first + n_vectors * width + rank)
    return total


@cuda.jit
def vectorised_team_kernel(x, y, n_cols, scale, offset, team):
    # `team` neighbouring lanes, a power of two from MAX_WIDTH to 32, sum a plane.
    allow_next_kernel()
    wait_for_previous_kernel()
    thread = cuda.grid(1)
    plane, rank = thread // team, thread % team
    total = ZERO
    if plane < y.shape[0]:
        start = plane * n_cols
        total = vector_sum(x, start, start + n_cols, offset, rank, team)
    step = team // 2
    while step > 0:  # every lane takes part, also those without a plane
        total += cuda.shfl_xor_sync(FULL_MASK, total, step)
        step //= 2
    if plane < y.shape[0] and rank == 0:
        store(y, plane, total * scale)


@cuda.jit
def vectorised_block_kernel(x, y, n_cols, scale, offset, n_splits):
    # Block `plane * n_splits + part` sums one of a plane's parts; y is one element for each.
    allow_next_kernel()
    wait_for_previous_kernel()
    scratch = cuda.shared.array(32, np.float32)
    plane, part = cuda.blockIdx.x // n_splits, cuda.blockIdx.x % n_splits
    length = (n_cols + n_splits - 1) // n_splits
    start = plane * n_cols + part * length
    stop = min(start + length, (plane + 1) * n_cols)
    total = vector_sum(x, min(start, stop), stop, offset, cuda.threadIdx.x, cuda.blockDim.x)
    total = block_sum(total, scratch)
    if cuda.threadIdx.x == 0:
        store(y, cuda.blockIdx.x, total * scale)


@cuda.jit
def finish_kernel(partial, y, n_splits, inner, scale):
    """y[i] = scale · the sum of its partial sums, which lie `inner` apart: a warp for each."""
    allow_next_kernel()
    wait_for_previous_kernel()
    i = cuda.grid(1) // 32
    if i < y.shape[0]:
        base = i // inner * n_splits * inner + i % inner
        total = ZERO
        for part in range(cuda.threadIdx.x % 32, n_splits, 32):
            total += partial[base + part * inner]
        total = warp_sum(total)
        if cuda.threadIdx.x % 32 == 0:
            store(y, i, total * scale)


@cuda.jit
def naive_backward_kernel(dy, dx, n_cols, scale):
    i = cuda.grid(1)
    if i < dx.shape[0]:
        store(dx, i, load(dy, i // n_cols) * scale)


@cuda.jit
def per_plane_backward_kernel(dy, dx, n_cols, scale):
    plane = cuda.blockIdx.x
    share = load(dy, plane) * scale
    for i in range(cuda.threadIdx.x, n_cols, BLOCK_SIZE):
        store(dx, plane * n_cols + i, share)


@cuda.jit
def vectorised_backward_kernel(dy, dx, plane, n_cols, scale, head, multiplier, shift, batch):
    # Writes the planes from `plane` on, fewer than 2^31 elements; dx[:head] precedes the first
    # 16-byte boundary, and counting starts there. A thread writes `batch` times 16 bytes, which
    # belong to one plane or to two.
    allow_next_kernel()
    wait_for_previous_kernel()
    width = vector_width(dx)
    values = cuda.local.array(MAX_WIDTH, np.float32)
    origin, end = plane * n_cols, dx.shape[0]
    thread = cuda.blockIdx.x * cuda.blockDim.x * batch + cuda.threadIdx.x
    i = (thread - 1) * width + head  # thread 0 takes the head
    # max(i, 0) // n_cols by a multiplication: Granlund and Montgomery (1994).
    n = np.uint64(max(i, 0))
    high = (n * np.uint64(multiplier)) >> np.uint64(32)
    quotient = np.int64((high + n) >> np.uint64(shift))
    plane += quotient
    boundary = (quotient + 1) * n_cols  # counted from `origin`, as i is
    for _ in range(batch):
        first, last = max(i, 0), min(i + width, end - origin)
        if first < last:
            share = load(dy, plane) * scale
            following = share
            if boundary < last:
                following = load(dy, plane + 1) * scale
            for k in range(width):
                values[k] = share if first + k < boundary else following
            if last - first == width:
                store_vector(dx, origin + first, values)
            else:
                for j in range(first, last):
                    store(dx, origin + j, share if j < boundary else following)
        # With batches, planes are longer than this step: the next vector is one plane on at most.
        i += cuda.blockDim.x * width
        if i >= boundary:
            boundary += n_cols
            plane += 1


def forward(x, *, variant=AUTO, out=None):
    """y[n, c] = mean of x[n, c, :, :]; x N·C·H·W, contiguous or channels-last, y N·C.

    `out`, if given, receives y, and may be float32 whatever x is. The mean of an empty plane is
    NaN, as in PyTorch. An `x` of another memory layout is copied first. Raises
    ArrayError for a wrong rank, dtype, shape or device, ValueError for an unknown variant.
    """
    arrays.require(x, "x", dtypes=DTYPES, n_dims=4)
    rung = FORWARD.rung(variant, x)
    N, C, H, W = x.shape
    dtypes = dict.fromkeys((arrays.dtype_name(x), "float32"))
    y = output(out, (N, C), like=x, dtypes=dtypes, reads=dict(x=x))
    if N * C == 0:
        return y
    n_cols = H * W
    scale = np.float32(1 / n_cols if n_cols else math.nan)
    x, last = arrays.as_images(x)
    rung.launch(x, y, n_cols, scale, last)
    return y


def backward(dy, size, *, channels_last=False, variant=AUTO, out=None):
    """dx[n, c, h, w] = dy[n, c] / (H·W), from `dy` N·C and `size`, the pair (H, W).

    dx is N·C·H·W, of dy's dtype and device, contiguous or `channels_last`. Raises as `forward`, and
    ValueError where `naive` is to write channels-last.
    """
    arrays.require(dy, "dy", dtypes=DTYPES, n_dims=2)
    rung = BACKWARD.rung(variant, dy)
    H, W = size
    shape = (*dy.shape, H, W)
    dx = output(out, shape, like=dy, channels_last=channels_last, reads=dict(dy=dy))
    if math.prod(shape) == 0:
        return dx
    last = channels_last and not arrays.is_contiguous_array(dx)
    rung.launch(arrays.contiguous(dy), dx, H * W, np.float32(1 / (H * W)), last)
    return dx


# What the rungs launch, on channels-last images where `last` says so.


def _launch_by_element(kernel, planes_of_block, x, y, n_cols, scale, last):
    x = arrays.contiguous(x)
    n_blocks = math.ceil(arrays.size_of(y) / planes_of_block)
    launch(kernel, n_blocks, BLOCK_SIZE, x, y, n_cols, scale, flat=True)


def _launch_warp(x, y, n_cols, scale, last):
    if last:
        return nhwc.launch_warp(x, y, n_cols, scale)
    _launch_by_element(warp_kernel, 1, x, y, n_cols, scale, last)


def _launch_vectorised(x, y, n_cols, scale, last):
    if last:
        return nhwc.launch_vectorised(x, y, n_cols, scale, finish_kernel)
    n_planes, itemsize = arrays.size_of(y), x.dtype.itemsize
    offset = arrays.address_of(x) % VECTOR_BYTES // itemsize
    team, n_splits = plan(n_planes, n_cols * itemsize)
    if team <= 32:
        launch(
            vectorised_team_kernel, math.ceil(n_planes * team / BLOCK_SIZE), BLOCK_SIZE,
            x, y, n_cols, scale, offset, team, flat=True, overlap=True,
        )  # fmt: skip
        return
    partial, factor = y, scale
    if n_splits > 1:
        partial = arrays.empty((n_planes, n_splits), like=x, dtype="float32")
        factor = np.float32(1)
    launch(
        vectorised_block_kernel, n_planes * n_splits, team,
        x, partial, n_cols, factor, offset, n_splits, flat=True, overlap=True,
    )  # fmt: skip
    if n_splits > 1:
        launch(
            finish_kernel, math.ceil(n_planes * 32 / BLOCK_SIZE), BLOCK_SIZE,
            partial, y, n_splits, 1, scale, flat=True, overlap=True,
        )  # fmt: skip


def plan(n_planes, n_bytes):
    """(threads per plane, parts per plane) for `n_planes` planes of `n_bytes` each."""
    n_vectors = math.ceil(n_bytes / VECTOR_BYTES)
    # About 12 vectors for each thread; long planes get more rather than more threads.
    many = 24 if n_planes >= 2 * FEW_PLANES else 32
    wanted = min(n_vectors / 12, max(128, n_vectors / many))
    team = max(MAX_WIDTH, min(BLOCK_SIZE, 2 ** round(math.log2(max(1, wanted)))))
    # Few planes: more threads for each, as long as each has a few vectors to sum.
    most = 512 if n_planes < FEW_PLANES else 128
    while n_planes * team < ENOUGH_THREADS and team * 8 <= n_vectors and team < most:
        team *= 2
    n_splits = min(ENOUGH_THREADS // (n_planes * team), n_vectors // (team * UNROLL))
    return team, max(1, n_splits) if team > 32 else 1


def _launch_naive_backward(dy, dx, n_cols, scale, last):
    if last:
        raise ValueError(
            "variant 'naive' writes contiguous images: use 'per_plane' or 'vectorised'"
        )
    n_blocks = math.ceil(arrays.size_of(dy) * n_cols / BLOCK_SIZE)
    launch(naive_backward_kernel, n_blocks, BLOCK_SIZE, dy, dx, n_cols, scale, flat=True)


def _launch_per_plane_backward(dy, dx, n_cols, scale, last):
    if last:
        return nhwc.launch_per_plane_backward(dy, dx, n_cols, scale)
    n_planes = arrays.size_of(dy)
    launch(per_plane_backward_kernel, n_planes, BLOCK_SIZE, dy, dx, n_cols, scale, flat=True)


def _launch_vectorised_backward(dy, dx, n_cols, scale, last):
    if last:
        return nhwc.launch_vectorised_backward(dy, dx, n_cols, scale)
    if n_cols < MAX_WIDTH:  # 16 bytes may span more than two planes: element by element
        return _launch_naive_backward(dy, dx, n_cols, scale, last)
    width = VECTOR_BYTES // dx.dtype.itemsize
    shift = (n_cols - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << shift) - n_cols)) // n_cols + 1
    n_planes = arrays.size_of(dy)
    # The division by multiplication holds for numbers below 2^31.
    step = max(1, MOST_AT_ONCE // n_cols)
    for plane in range(0, n_planes, step):
        n = min(step, n_planes - plane) * n_cols
        offset = arrays.address_of(dx) // dx.dtype.itemsize + plane * n_cols
        head = -offset % width
        batch = UNROLL if n_cols > BLOCK_SIZE * width and n > ENOUGH_THREADS * width * 8 else 1
        n_blocks = math.ceil((n // width + 2) / (BLOCK_SIZE * batch))
        launch(
            vectorised_backward_kernel, n_blocks, BLOCK_SIZE,
            dy, dx, plane, n_cols, scale, head, multiplier, shift, batch, flat=True, overlap=True,
        )  # fmt: skip


def _by_element(name, kernel, planes_of_block):
    launcher = functools.partial(_launch_by_element, kernel, planes_of_block)
    return Rung(name, launcher, (kernel,))


FORWARD = Ladder(
    _by_element("naive", naive_kernel, BLOCK_SIZE),
    _by_element("shared", shared_kernel, 1),
    Rung("warp", _launch_warp, (warp_kernel, warp_nhwc_kernel)),
    Rung(
        "vectorised", _launch_vectorised,
        (vectorised_team_kernel, vectorised_block_kernel, vectorised_nhwc_kernel, finish_kernel),
    ),
    auto="vectorised",
)  # fmt: skip
BACKWARD = Ladder(
    Rung("naive", _launch_naive_backward, (naive_backward_kernel,)),
    Rung("per_plane", _launch_per_plane_backward,
         (per_plane_backward_kernel, nhwc.per_plane_backward_kernel)),
    Rung(
        "vectorised", _launch_vectorised_backward,
        (vectorised_backward_kernel, naive_backward_kernel, nhwc.vectorised_backward_kernel),
    ),
    auto="vectorised",
)  # fmt: skip


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    for dtype in DTYPES:
        image, sums, common = (dtype, 1), ("float32", 1), ["int64", "float32"]
        rows = [("forward naive", naive_kernel, []), ("forward shared", shared_kernel, [])]
        rows += [("forward warp", warp_kernel, [])]
        rows += [("forward vectorised, team", vectorised_team_kernel, ["int64"] * 2)]
        rows += [("forward vectorised, block", vectorised_block_kernel, ["int64"] * 2)]
        rows += [("backward naive", naive_backward_kernel, [])]
        rows += [("backward per_plane", per_plane_backward_kernel, [])]
        found = [(name, kernel, [image, image, *common, *more]) for name, kernel, more in rows]
        parts = [image, sums, *common, "int64", "int64"]
        found.append(("forward vectorised, in parts", vectorised_block_kernel, parts))
        numbers = ["int64", "int64", "float32"] + ["int64"] * 4
        found.append(("backward vectorised", vectorised_backward_kernel, [image, image, *numbers]))
        found.append(("finish", finish_kernel, [sums, image, "int64", "int64", "float32"]))
        for name, kernel, types in found:
            yield f"global_avg_pool {name} {dtype}", kernel, types
        for name, kernel, types in nhwc.specialisations(dtype):
            yield f"global_avg_pool {name} channels-last {dtype}", kernel, types
