"""Wrong answers of lessons 0 to 2 by somebody who knew no more than the lessons."""

import math

import numpy as np

from bank import wrong
from course_lib import cuda

ONE_F = np.float32(1)

# ---- negative ------------------------------------------------------------------------------------


@cuda.jit(device=True)
def flipped(brightness):
    return np.float32(1) - brightness


@wrong("negative", "another line in place of line .*, `c = cuda.blockIdx.y")
@cuda.jit
def negative_r_along_x(x, y):
    r = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    c = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    if r >= x.shape[0] or c >= x.shape[1]:
        return
    y[r, c] = flipped(x[r, c])


@wrong("negative", "it changes its input x, .* in line .*`x")
@cuda.jit
def negative_over_its_input(x, y):
    col, row = cuda.grid(2)
    n_rows, n_cols = x.shape
    white = np.float32(1)
    if row < n_rows:
        if col < n_cols:
            x[row, col] = white - x[row, col]
            y[row, col] = x[row, col]


@wrong("negative", "were never written, in a launch")
@cuda.jit
def negative_grid_for_block(x, y):
    left = cuda.blockIdx.x * cuda.gridDim.x
    top = cuda.blockIdx.y * cuda.blockDim.y
    place = (top + cuda.threadIdx.y, left + cuda.threadIdx.x)
    if place[0] < x.shape[0] and place[1] < x.shape[1]:
        dark = x[place]
        y[place] = np.float32(1) - dark


# ---- swish_backward ------------------------------------------------------------------------------


@cuda.jit(device=True)
def steady_sigmoid(v):
    one = np.float32(1)
    small = math.exp(-abs(v))
    upper = one if v >= 0 else small
    return upper / (one + small)


@wrong("swish_backward", "wrong values in dx")
@cuda.jit
def swish_loses_the_sigmoid(dy, x, dx):
    k = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if k >= dx.size:
        return
    v, one = x[k], np.float32(1)
    s = steady_sigmoid(v)
    slope = v * s * (one - s)
    dx[k] = slope * dy[k]


@wrong("swish_backward", "overflows to infinity in line .*`grown = math.exp.v.`, before NaN is")
@cuda.jit
def swish_grows_too_far(dy, x, dx):
    for k in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        v = x[k]
        grown = math.exp(v)
        s = grown / (ONE_F + grown)
        dx[k] = dy[k] * s * (ONE_F + v * (ONE_F - s))


@wrong("swish_backward", "with its brackets elsewhere; line .*, `dx.i. = g")
@cuda.jit
def swish_dy_on_one_term(dy, x, dx):
    i = cuda.grid(1)
    n = x.size
    if not i < n:
        return
    g, v = dy[i], x[i]
    one = np.float32(1)
    e = math.exp(-abs(v))
    s = one / (one + e)
    if v < 0:
        s = e / (one + e)
    rest = one - s
    dx[i] = g * s + v * s * rest


# ---- nchw_index ----------------------------------------------------------------------------------


@wrong("nchw_index", r"with one size in place of another; line .*`plane = i // \(H \* H\)`")
@cuda.jit
def nchw_square_planes(x, bias, y):
    i = cuda.grid(1)
    if i >= x.size:
        return
    _, C, H, W = x.shape
    line = i // W
    plane = i // (H * H)
    w, h, c, n = i - line * W, line % H, plane % C, plane // C
    y[n, c, h, w] = bias[c] + x[n, c, h, w]


@wrong("nchw_index", r"out-of-bounds in line .*`y\[n, c, h, w\] =")
@cuda.jit
def nchw_guard_lets_one_through(x, bias, y):
    N, C, H, W = x.shape
    number = cuda.threadIdx.x + cuda.blockDim.x * cuda.blockIdx.x
    if number > N * C * H * W:
        return
    rest = number
    w = rest % W
    rest = rest // W
    h = rest % H
    rest = rest // H
    c = rest % C
    n = rest // C
    y[n, c, h, w] = x[n, c, h, w] + bias[c]


@cuda.jit(device=True)
def digits(i, C, H, W):
    per_plane = H * W
    return i // (C * per_plane), i // per_plane % C, i % per_plane // W, i % W


@wrong("nchw_index", "with `[+]=` in place of `=`; line .*`y.place. [+]= value")
@cuda.jit
def nchw_adds_to_y(x, bias, y):
    i = cuda.grid(1)
    if i < x.size:
        place = digits(i, x.shape[1], x.shape[2], x.shape[3])
        value = x[place]
        y[place] += value + bias[place[1]]


# ---- block_sum -----------------------------------------------------------------------------------


@wrong("block_sum", "barrier-mismatch in line .*the round is over")
@cuda.jit
def sum_barrier_in_the_if(x, y):
    partial = cuda.shared.array(256, np.float32)
    me, width = cuda.threadIdx.x, cuda.blockDim.x
    mine = np.float32(0)
    col = me
    while col < x.shape[1]:
        mine += x[cuda.blockIdx.x, col]
        col += width
    partial[me] = mine
    cuda.syncthreads()
    half = width >> 1
    while half:
        if me < half:
            partial[me] = partial[me] + partial[me + half]
            cuda.syncthreads()  # the round is over
        half >>= 1
    if me == 0:
        y[cuda.blockIdx.x] = partial[0]


@wrong("block_sum", "a limit that is one too large; line .*`while half > 1:`")
@cuda.jit
def sum_lacks_the_last_round(x, y):
    row, t, n_threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    pot = cuda.shared.array(256, np.float32)
    pot[t] = np.float32(0)
    for col in range(t, x.shape[1], n_threads):
        pot[t] += x[row, col]
    cuda.syncthreads()
    half = n_threads // 2
    while half > 1:
        if t < half:
            pot[t] += pot[t + half]
        half //= 2
        cuda.syncthreads()
    if t != 0:
        return
    y[row] = pot[0]


@cuda.jit(device=True)
def share(x, row, first, stride):
    found = np.float32(0)
    for col in range(first, x.shape[1], stride):
        found += x[row, col]
    return found


@wrong("block_sum", "uninitialised-read in line .*`partial.t. [+]= partial.t [+] step.`")
@cuda.jit
def sum_from_128(x, y):
    partial = cuda.shared.array(256, np.float32)
    t = cuda.threadIdx.x
    partial[t] = share(x, cuda.blockIdx.x, t, cuda.blockDim.x)
    cuda.syncthreads()
    for power in range(7, -1, -1):
        step = 1 << power
        if t < step:
            partial[t] += partial[t + step]
        cuda.syncthreads()
    if t == 0:
        y[cuda.blockIdx.x] = partial[0]


# ---- global_avg_pool -----------------------------------------------------------------------------


@wrong("global_avg_pool", "with `cuda.blockDim.x` in place of `H . W`; line .*`y.n, c. = pot")
@cuda.jit
def pool_mean_of_threads(x, y):
    pot = cuda.shared.array(256, np.float32)
    C, H, W = x.shape[1:]
    b, me = cuda.blockIdx.x, cuda.threadIdx.x
    n = b // C
    c = b - n * C
    pot[me] = np.float32(0)
    for h in range(H):
        for w in range(me, W, cuda.blockDim.x):
            pot[me] += x[n, c, h, w]
    cuda.syncthreads()
    half = cuda.blockDim.x >> 1
    while half >= 1:
        if me < half:
            pot[me] += pot[half + me]
        cuda.syncthreads()
        half >>= 1
    if me == 0:
        y[n, c] = pot[0] / np.float32(cuda.blockDim.x)


@cuda.jit(device=True)
def fold(pot, t, n_threads):
    step = n_threads // 2
    while step > 0:
        if t < step:
            pot[t] += pot[t + step]
        cuda.syncthreads()
        step //= 2


@wrong("global_avg_pool", "out-of-bounds in line .*`total [+]= x.n, c, row, col.`")
@cuda.jit
def pool_rows_of_h(x, y):
    pot = cuda.shared.array(256, np.float32)
    H, W = x.shape[2], x.shape[3]
    n, c = cuda.blockIdx.x // x.shape[1], cuda.blockIdx.x % x.shape[1]
    total, i = np.float32(0), cuda.threadIdx.x
    while i < H * W:
        row, col = i // H, i % H
        total += x[n, c, row, col]
        i += cuda.blockDim.x
    pot[cuda.threadIdx.x] = total
    cuda.syncthreads()
    fold(pot, cuda.threadIdx.x, cuda.blockDim.x)
    if cuda.threadIdx.x == 0:
        y[n, c] = pot[0] / np.float32(H * W)


@wrong("global_avg_pool", r"race in line [\s\S]*put cuda.syncthreads\(\) between them")
@cuda.jit
def pool_no_barrier_first(x, y):
    partial = cuda.shared.array(256, np.float32)
    _, C, H, W = x.shape
    t, n_threads = cuda.threadIdx.x, cuda.blockDim.x
    n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
    mine = np.float32(0)
    for i in range(t, H * W, n_threads):
        h = i // W
        mine += x[n, c, h, i - h * W]
    partial[t] = mine
    step = n_threads
    while step > 1:
        step = step // 2
        if t < step:
            partial[t] += partial[t + step]
        cuda.syncthreads()
    if t > 0:
        return
    y[n, c] = partial[0] / np.float32(H * W)
