# %% [markdown]
# # 10 · The other layers
#
# **After this lesson** you can say why a matrix product in registers is faster than one in shared
# memory, multiply on a tensor core and know which lane holds which number, get the accuracy of float32
# from tensor cores for three products instead of one, pool and find the way back without atomics, compute a variance that survives large
# numbers, and write the step that makes a network learn.
#
# **You need** [lesson 8](08_convolution.ipynb) (convolution, tiles), [lesson
# 9](09_convolution_backward.ipynb) (scatter and gather), [lesson 4](04_softmax_at_the_limit.ipynb) (the
# roofline) and [lesson 5](05_fusing_softmax.ipynb) (batch normalisation).
#
# **Time:** 230 minutes; there are good places to pause after sections 2 and 4. All cells together run in
# less than half a minute in the simulator. Where something was measured on a GPU for the course, you see
# the record; where it was not, the lesson says so. The words are collected in the [glossary](glossary.md).

# %%
import math
from functools import cache

import numpy as np
import torch

from course_lib import SIMULATED, bench, cuda, plot, results_table, simulator
from course_lib.benchmarks.peaks import peaks_of
from course_lib.kernels import batch_norm, linear, max_pool2d, optimizers
from course_lib.runtime.host.launch import recorded as launches_of
from course_lib.runtime.intrinsics.matrix import load_word, multiply_add
from course_lib.teach import TODO, check, hint, progress, solution, use

# %% [markdown]
# Convolutions are most of a network for pictures, and you have them. What is missing until it can learn?
# A layer in which every output sees every input; one that makes pictures smaller; one that keeps numbers
# in a sensible range; and something that changes the weights. Each of them has one idea that is worth a
# section.
#
# This function finds what was measured for the course:

# %%
f, ZERO, ONE = np.float32, np.float32(0), np.float32(1)
rng, records = np.random.default_rng(0), bench.load_records()


@cache
def measured(name, shape=None, dtype="float32"):
    """The record called `name`; None, and a line that says so, if there is none."""
    wanted = {"name": name, "dtype": dtype} | ({} if shape is None else {"shape": shape})
    if found := bench.find(records, **wanted):
        source = {"device": records["device"]["name"], "date": results_table.when(found[0])}
        return found[0] | {"source": source}
    size = "" if shape is None else f" of {' × '.join(map(str, shape))}"
    return print(f"{name}{size} has not been measured on a GPU yet.")


print("records are of an", records["device"]["name"])

# %% [markdown]
# ## 1 · A matrix product, rung by rung
#
# In a **dense layer** (lesson 6; PyTorch calls it `Linear`) every output is a weighted sum of all inputs.
# For a whole batch: `x` has a row for each example and $I$ columns, `weight` has $O$ rows and $I$ columns, and
#
# $$ y_{m,o} = \sum_i x_{m,i} \cdot w_{o,i} + b_o . $$
#
# That is a product of two matrices, a GEMM (*general matrix multiplication*). Lesson 8 has made a convolution
# into one. So this is *the* kernel of the trade, and it pays to know its ladder. With $M$ rows, $N$ columns of
# the result and sums of $K$ products (these are the letters of all libraries; they have nothing to do with the $N$ pictures and $K$
# filters of lesson 8):

# %%
def flops(M, N, K):
    return 2 * M * N * K  # a product and an addition for each of the M·N·K terms


def fewest_bytes(M, N, K):
    return 4 * (M * K + N * K + M * N)  # each number read once, or written once


M = N = K = 4096
print(f"{flops(M, N, K) / 1e9:.0f} · 10⁹ FLOPs, {fewest_bytes(M, N, K) / 1e6:.0f} MB: "
      f"{flops(M, N, K) / fewest_bytes(M, N, K):.0f} FLOPs per byte at best")

# %% [markdown]
# FLOPs per byte are the **arithmetic intensity** (lesson 4). A chip like the H200 needs 16 of them before
# its arithmetic, and not its memory, is the limit. 683 is a lot more: a good matrix product should never wait for
# memory. The naive one does nothing else:

# %%
@cuda.jit
def matmul_naive(a, b, c):  # a is (M, K), b is (N, K), c is (M, N)
    col, row = cuda.grid(2)
    if row < c.shape[0] and col < c.shape[1]:
        total = ZERO
        for k in range(a.shape[1]):
            total += a[row, k] * b[col, k]
        c[row, col] = total

# %% [markdown]
# **Predict:** how many FLOPs does it do for each byte that it loads?
#
# <details><summary>Answer</summary>
#
# For each term two loads, 8 bytes, and two FLOPs: a quarter of a FLOP per byte. All loads of a 4096³ product
# together are 550 GB. (The caches catch many of them, or it would be slower still.)
# </details>
#
# **Tiled.** Lesson 8 had the cure. A block takes a square of the result, say $T \times T$. It copies a $T$ wide piece of
# its rows of `a` and of `b` to shared memory, a barrier, all threads compute with it, a barrier, the next piece. Each
# number that was loaded is now used $T$ times: $T / 4$ FLOPs per byte. With $T = 16$ that makes 4, with $T = 64$ it makes 16.
#
# But then *shared memory* becomes the limit. Each product still takes two loads from there. A multiprocessor can
# do 128 multiply-adds in a cycle, for which the lanes would need 256 numbers. Shared memory delivers 32.
#
# **Register-tiled.** So do the same thing once more, one level up. Let a thread have not one result but a small square of
# them, $r \times r$, in registers. For each $k$ it loads $r$ numbers of `a` and $r$ of `b`, and makes $r^2$ products of them:

# %%
for r in (1, 2, 4, 8):
    print(f"{r} × {r} results: {2 * r:2} loads for {r * r:2} multiply-adds, "
          f"{r * r / (2 * r):.1f} for each load, {r * r} sums in registers")

# %% [markdown]
# With 8 × 8, the 128 multiply-adds of a cycle need 32 numbers from shared memory, which is what it delivers.
# (The lanes of a warp share many of these loads as well: equal addresses are served at once.) And more than 8 × 8? It
# would fit: 8 × 16 are 128 sums and 24 numbers, with a few addresses some 155 of the 255 registers that a thread can have. But a
# multiprocessor has 65,536 registers in all. With 155 for each it has room for 422 threads, with the 90 or so of 8 × 8 for 728
# (lesson 4), and fewer warps are there to work while others wait.
#
# ### Exercise: four sums a thread
#
# A block of `SIDE` × `SIDE` threads makes a tile of `TILE` × `TILE` results, twice as wide, from `DEPTH` numbers of $k$ at a
# time. (Real tiles are larger. These are small so that the simulator is quick.) Thread `(tx, ty)` has rows `ty` and `ty + SIDE` of the tile,
# and columns `tx` and `tx + SIDE`. Put 0 into a tile where `a` or `b` has no number; then no sum has to care.

# %%
SIDE, TILE, DEPTH = 4, 8, 4


@cuda.jit(device=True)
def store(c, row, col, value):
    if row < c.shape[0] and col < c.shape[1]:
        c[row, col] = value

# %% exercise="matmul_registers"
@cuda.jit
def matmul_registers(a, b, c):
    sa = cuda.shared.array((TILE, DEPTH), np.float32)
    sb = cuda.shared.array((TILE, DEPTH), np.float32)
    (M, K), N = a.shape, b.shape[0]
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row, col = TILE * cuda.blockIdx.y + ty, TILE * cuda.blockIdx.x + tx
    line = TILE * cuda.blockIdx.x + ty  # the row of b that this thread copies
    s00 = s01 = s10 = s11 = ZERO
    for first in range(0, K, DEPTH):
        TODO  # 1. two numbers to each tile: rows ty and ty + SIDE, column tx, from k = first + tx
        TODO  # 2. for each of the DEPTH columns: four loads, four products; and mind the barriers
    store(c, row, col, s00)
    store(c, row, col + SIDE, s01)
    store(c, row + SIDE, col, s10)
    store(c, row + SIDE, col + SIDE, s11)


check("matmul_registers", matmul_registers)

# %%
hint("matmul_registers")

# %% [markdown]
# And now look inside. A tiled kernel with one result for each thread, beside yours, on the same 32 × 32 product. We
# count the numbers that all lanes together load from shared memory, and from global memory. **Predict** both ratios.

# %%
@cuda.jit
def matmul_tiled(a, b, c):  # TILE × TILE threads; sizes are multiples of the tile
    sa = cuda.shared.array((TILE, TILE), np.float32)
    sb = cuda.shared.array((TILE, TILE), np.float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    col, row = cuda.grid(2)
    total = ZERO
    for first in range(0, a.shape[1], TILE):
        sa[ty, tx] = a[row, first + tx]
        sb[ty, tx] = b[TILE * cuda.blockIdx.x + ty, first + tx]
        cuda.syncthreads()
        for k in range(TILE):
            total += sa[ty, k] * sb[tx, k]
        cuda.syncthreads()
    c[row, col] = total

# %%
a, b = rng.normal(size=(2, 32, 32)).astype(f)
kernels = {
    "tiled, one sum": (matmul_tiled, (TILE, TILE)),
    "four sums": (use("matmul_registers", matmul_registers), (SIDE, SIDE)),
}
for name, (kernel, block) in kernels.items():
    c = np.zeros((32, 32), dtype=f)
    with simulator.trace() as t:
        kernel[(4, 4), block](a, b, c)
    loads = {space: sum(s.lanes for s in t.sites if s.space == space and s.op == "load")
             for space in ("shared", "global")}
    print(f"{name:15} {loads}, largest error {abs(c - a @ b.T).max():.0e}")

# %% [markdown]
# Half the loads from shared memory for the same product, and as many from global memory, since the block's tile is
# the same. Two more rungs of the same ladder:
#
# - **vectorised**: 8 × 8 results for each thread; numbers come to shared memory by *asynchronous copies* of 16 bytes (lesson
#   4), and while one piece is multiplied the next ones are already under way;
# - **tensor core**: a part of the chip that was made for nothing else.

# %% [markdown]
# ## 2 · Tensor cores
#
# Lesson 8 had a glimpse of **tensor cores**, the units that multiply small matrices. Now we use one ourselves. One
# instruction, `mma.sync` (*matrix multiply-accumulate*), lets the 32 lanes of a warp do $C \mathrel{+}= A \cdot B^T$ with 16 rows of $A$, 8 rows of $B$ and 8 numbers in each. How many multiply-adds is that?
# $16 \cdot 8 \cdot 8 = 1024$, in one instruction; a normal one does 32, one in each lane.
#
# The three matrices lie in registers, and each lane holds a share of each, called its **fragment**: of $A$ four numbers, of $B$ two, of $C$
# four. Which ones is a matter of wiring, and one simply has to know. With $g$ = lane // 4 and $t$ = lane % 4:

# %%
lanes = np.arange(32)
g, t = lanes // 4, lanes % 4


def holds(shape, places):
    """Arrays that say for each element of a matrix which lane has it, and in which register."""
    lane, register = np.zeros((2, *shape), dtype=int)
    for k, (rows, cols) in enumerate(places):
        lane[rows, cols], register[rows, cols] = lanes, k
    return lane, register

# %%
of_a = holds((16, 8), [(g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)])
of_b = holds((8, 8), [(g, t), (g, t + 4)])
of_c = holds((16, 8), [(g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1)])
plot.fragments({"A: rows and k": of_a, "B: rows and k": of_b, "C: rows of A, rows of B": of_c}, lane=6,
               title="Which lane holds what (large), in which register (small); framed: lane 6")

# %% [markdown]
# Lane 6, say, has $g = 1$ and $t = 2$: of $A$ the numbers in rows 1 and 9, columns 2 and 6; of $C$ rows 1 and 9, columns 4 and
# 5. It gets results that depend on numbers of *other* lanes. The lanes exchange them inside of the instruction, so all 32 have to
# come to it together.
#
# In Python: `load_word(array, i)` gives the 32 bits of a float32 as they are, and
# `multiply_add(acc, 0, ra, 0, rb, 0, a)` is the instruction: `acc`, `ra` and `rb` are small arrays in registers, the zeros say where in
# them the fragments begin, and the last argument only tells the type. (They are functions of this course, made of one machine
# instruction each, and the simulator has twins of them.)
#
# ### Exercise: one warp, one tile
#
# `a` is 16 rows of $K$ numbers and `b` 8 rows of $K$, both flat: row $r$, column $j$ is at `r * K + j`. $K$ is a multiple of 8. `c` is
# not flat: an array of 16 × 8, the row of `a` first, then the row of `b`.

# %% exercise="mma_tile"
@cuda.jit
def mma_tile(a, b, K, c):
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    ra, rb = cuda.local.array(4, np.uint32), cuda.local.array(2, np.uint32)
    acc = cuda.local.array(4, np.float32)
    for i in range(4):
        acc[i] = ZERO
    for k in range(0, K, 8):
        TODO  # 1. this lane's fragments of columns k to k + 7: ra[0] to ra[3], rb[0] and rb[1]
        multiply_add(acc, 0, ra, 0, rb, 0, a)
    TODO  # 2. this lane's four results


check("mma_tile", mma_tile)

# %%
hint("mma_tile")

# %% [markdown]
# ### The price: TF32
#
# The price is the one of lesson 8. A float32 has 8 bits for its exponent (how large) and 23 for its **mantissa** (the digits). The tensor
# core takes the exponent and only the first *ten* bits of the mantissa: **TF32**. The sums have all 23 bits, though not the rounding of
# float32: what does not fit is cut off, of which more below. What does TF32 do to a
# result? We can round numbers to TF32 ourselves, since we know where the bits are:

# %%
def tf32(x):
    """x with ten bits of mantissa, rounded to the nearest."""
    bits = np.ascontiguousarray(x, dtype=f).view(np.uint32)
    bits = bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))
    return (bits & np.uint32(0xFFFFE000)).view(f)


for x in (1.0, 1.0005, 3.14159265, 10000.7):
    print(f"{x:<12} float32 {f(x):<12.9g} TF32 {tf32(f(x)).item():.9g}")

# %% [markdown]
# About three correct digits. Training forgives that, mostly, and PyTorch has a switch for it. Where it does not, there is lesson 8's trick.
# What TF32 has lost of a number is again a number, and a small one:
#
# $$ x = \text{big} + \text{small}, \qquad \text{big} = \text{TF32}(x), \qquad \text{small} = \text{TF32}(x - \text{big}) . $$
#
# Big and small together have 21 bits or more. The product of two such sums has four terms, of which small times small is too small to matter:
#
# $$ a \cdot b \approx \text{big}_a \cdot \text{big}_b + \text{big}_a \cdot \text{small}_b + \text{small}_a \cdot \text{big}_b $$
#
# Three products on the tensor core for one. This is **split TF32**. **Predict** its error, relative to float32's.

# %%
a, b = rng.normal(size=(2, 64, 1024)).astype(f)
exact = a.astype(np.float64) @ b.astype(np.float64).T


def error(c):
    return np.linalg.norm(c - exact) / np.linalg.norm(exact)


big_a, big_b = tf32(a), tf32(b)
small_a, small_b = tf32(a - big_a), tf32(b - big_b)
split = big_a @ big_b.T + (big_a @ small_b.T + small_a @ big_b.T)
for name, c in (("float32", a @ b.T), ("TF32", big_a @ big_b.T), ("split TF32", split)):
    print(f"{name:11} relative error {error(c):.0e}")

# %% [markdown]
# Split TF32 is as good as float32. And three products on tensor cores are still faster than one without: an H200 can
# do the following at most (in TFLOP/s, 10¹² FLOPs per second; *fma* is a normal multiply-add of float32):

# %%
limits = peaks_of((9, 0), 132, 1_980_000)  # capability, multiprocessors, kHz of an H200
for kind in ("fma", "split", "tf32", "bfloat16"):
    print(f"{kind:9} {limits[kind]:7.0f} TFLOP/s")

# %% [markdown]
# (That is what the units do in a cycle, times the highest clock, 1.98 GHz. NVIDIA's data sheet of the H200 has the same 67 for float32, but 495 and 990 for
# TF32 and bfloat16, without "sparsity": the same count at 1.83 GHz.
# The *split* is as exact as float32, at a third of TF32's speed.)
#
# Is our kernel's float32 as exact as that? It runs in the simulator, too. These are the rungs of `course_lib/kernels/linear`, each
# with its error on a small product:

# %%
x, weight = rng.normal(size=(2, 24, 72)).astype(f)
exact = x.astype(np.float64) @ weight.astype(np.float64).T
for variant in linear.FORWARD:
    y = linear.forward(cuda.to_device(x), cuda.to_device(weight), variant=variant).copy_to_host()
    print(f"{variant:15} relative error {error(y):.0e}")
y = linear.forward(cuda.to_device(x), cuda.to_device(weight), precision="tf32").copy_to_host()
print(f"{'… in TF32':15} relative error {error(y):.0e}")

# %% [markdown]
# The climb, measured, for 4096 × 4096 matrices. **Predict** the number of rungs that lie below a tenth of cuBLAS, which is
# NVIDIA's own library of matrix products.

# %%
def rates(record, title, *kinds):
    if record is None:
        return None
    rows = [row | {"label": f"{row['label']} (error {row['error']:.0e})"} for row in record["rows"]]
    ours, cublas = (max(row["tflops"] for row in rows if row["kind"] == kind) for kind in ("ours", "peer"))
    title += f": ours reaches {ours / cublas:.0%} of cuBLAS"
    peaks = {kind: record["peaks_tflops"][kind] for kind in kinds}
    return plot.arithmetic(rows, peaks, title=title, **record["source"])


rates(measured("linear.forward", (4096, 4096, 4096)), "4096 × 4096, float32", "fma", "split")

# %%
rates(measured("linear.forward.tf32", (4096, 4096, 4096)), "The same in TF32", "tf32")

# %%
rates(measured("linear.forward", (4096, 4096, 4096), "bfloat16"), "The same in bfloat16", "bfloat16")

# %% [markdown]
# One rung of five lies below a tenth of cuBLAS: `naive`, by far.
#
# **Explaining the gap.** `naive` waits for memory, `tiled` for shared memory. The limit of `register_tiled` and `vectorised` is
# normal arithmetic, the *fma* of the table above, and the first of them stays far below it. Its threads have 4 × 4 results each, two multiply-adds for
# a load; by the count of section 1 shared memory then allows half of the arithmetic, 33 TFLOP/s. And it does one thing at a time: all threads copy, number by
# number, with a check for the edge at each; a barrier; all multiply; a barrier. While they copy, nobody multiplies. `vectorised` has 8 × 8 results for each thread, copies by 16
# bytes, and copies ahead. `tensor_core` in float32 has the limit *split*, and reaches less:
# `mma.sync` comes from an older generation, and gets to roughly two thirds of what the tensor cores of sm_90 can (the H200's generation, also
# called *Hopper*). And there is work beside the products: to split every number, and to add up the sums of each step with ordinary units, since a
# tensor core cuts off where float32 rounds. cuBLAS uses no tensor cores for float32, so there its limit is *fma*, and ours is *split*.
#
# For TF32 and bfloat16, if the result is not too small, our kernel takes the instruction that came with sm_90, as cuBLAS does: `wgmma`, for four
# warps together. They tell it where two tiles lie in shared memory, and it reads the fragments there by itself; only the sums are in
# registers, dealt out to the lanes as before. And it is asynchronous, like the copies of lesson 4: while it multiplies, the warps fetch the next tiles.
# In bfloat16, to fetch is to copy. In TF32 it is not: a tensor core does not round, it cuts off the bits that it does not take, so that every
# product comes out a little too small, which no sum evens out. `wgmma` can take $A$ from registers, where it could be rounded, but $B$ only from
# shared memory, and on that way nobody rounds. Our kernel has both of them in shared memory. So each number comes to a register,
# is rounded, and is stored to shared memory. That is the limit now: it takes longer than the multiplying, although a register that has given
# its number away is loaded again at once. (Something can round on the way, and needs no registers: TMA, see the end of the lesson.)
#
# With float32's accuracy the dense layer does not use `wgmma`. The convolution of lesson 8 does, with numbers in two parts, and its large layers come
# to 96 to 130 TFLOP/s: what a product of float32 matrices could have as well.
#
# And the layers of a small network, where $M$ is the batch? The first linear layer of lesson 11 makes 256 numbers of 3,200, for 32
# pictures at a time. **Predict** what limits it.

# %%
M, K, N = 32, 3200, 256
print(f"{flops(M, N, K) / 1e6:.0f} · 10⁶ FLOPs, {fewest_bytes(M, N, K) / 1e6:.1f} MB: "
      f"{flops(M, N, K) / fewest_bytes(M, N, K):.0f} FLOPs per byte")
record = measured("linear.forward", (M, K, N))
rates(record, f"{M} × {K} × {N}")

# %%
for row in record["rows"] if record else ():
    print(f"{row['label']}: {row['microseconds']:.1f} µs")
for each in record["launches"][record["default"]] if record else ():
    print(f"ours is a launch of {each['grid'][0]} blocks, {each['block'][0]} threads each")

# %% [markdown]
# 3.7 MB are read in about a microsecond, and the arithmetic takes as long. Neither of the two explains a time that is more than ten times as long. Here the problem is another one: with tiles of 128 × 128, two blocks would have
# all of the work, and 130 multiprocessors none. So the tiles are smaller, and the *sum over k* is dealt out to several blocks, whose results are added at the end. (This is
# the split-K of lesson 9, also written *split k*. Lesson 6's blocks, which each have a share of a sum, did the same.) Even so there are 64 blocks for 132 multiprocessors, so more than half of them have nothing to do. In
# each block one step comes after the other, ask, wait, multiply, with four warps to fill the waiting; and to start a kernel and to end it takes its time, too. How much of the rest goes to
# which of these nobody has measured.
#
# The gradients of a dense layer are matrix products, too. From the rule "where does an input count, and with which factor":
#
# $$ dx = dy \cdot W \qquad\qquad dW = dy^T \cdot x \qquad\qquad db_o = \sum_m dy_{m,o} $$
#
# They differ from the forward pass only in which matrix lies crosswise in memory. So a training step costs three products for each
# such layer.
#
# A good place for a break.

# %% [markdown]
# ## 3 · Max pooling, and the way back
#
# **Max pooling** makes a picture smaller. It takes the largest number of each small window, usually 2 × 2, and goes on by a
# step of the same size, the **stride**. What is small but strong survives, where a mean would dilute it. Here are the edges of our
# photograph, halved twice in both ways, and drawn with the same black and white:

# %%
import matplotlib.cbook
import matplotlib.image

with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
    photo = matplotlib.image.imread(file, format="jpg")[20:532].mean(axis=2) / 255
photo = photo.reshape(256, 2, 256, 2).mean(axis=(1, 3))
edges = abs(np.diff(photo, axis=0, append=0)) + abs(np.diff(photo, axis=1, append=0))

# %%
def halved(picture, how):
    for _ in range(2):
        h, w = picture.shape
        picture = how(picture.reshape(h // 2, 2, w // 2, 2), axis=(1, 3))
    return picture


plot.images([edges, halved(edges, np.mean), halved(edges, np.max)],
            ["edges", "means of 4 × 4", "maxima of 4 × 4"], vmin=0, vmax=0.7, pixels=False,
            title="Pooled twice: in the means thin lines fade, the maxima keep them")

# %% [markdown]
# Look at the shoulders: a line that is a pixel wide has become faint among the means, and the maxima have it as bright as it was.
#
# Backward, only the largest element of a window had any say in the result, so it alone gets the gradient; the others get 0.
# Where was it? One could look again in the backward pass, and would have to keep and read the large `x` for that. Better
# to remember: the forward pass writes an **index** beside each maximum. PyTorch's is the place in the plane, `h * W + w`, in 8 bytes. **Predict:** for a window of 2 × 2,
# how many bits would do?
#
# ### Exercise: the maximum, and where it was
#
# `x` is (planes, H, W): N · C planes. Windows of `k` × `k`, no padding. If several elements are equally large, the *first* counts (all must
# agree on that, or gradients would differ from library to library). That holds for a window of nothing but −∞, too: its place is that of its first element.

# %% exercise="max_pool"
@cuda.jit
def max_pool(x, k, stride, y, at):
    i = cuda.grid(1)
    if i < y.size:
        H, W = x.shape[1:]
        OH, OW = y.shape[1:]
        plane, oh, ow = i // (OH * OW), i // OW % OH, i % OW
        TODO  # the largest of the window that begins at row oh · stride, column ow · stride
        y[plane, oh, ow] = TODO
        at[plane, oh, ow] = TODO  # its place in the plane


check("max_pool", max_pool)

# %%
hint("max_pool")

# %% [markdown]
# ### Backward: scatter or gather
#
# As in lesson 9, there are two ways to go back. **Scatter**: a thread for each *window* adds its `dy` to the place of its maximum. Windows may overlap (with `k` = 3 and
# stride 2 they do), so two threads may meet at one place. That needs atomics, and additions of floats in an order that changes from run to run
# give sums that differ in the last digit. We want the same bits in every run.
#
# **Gather**: a thread for each *element of x* asks all windows that cover it: *was it me?* Nobody else writes there. No atomics, always the same
# order, and every element is written, so nothing has to be set to 0 before. **Predict:** with `k` = 3 and stride 2, how many windows cover an
# element at most?

# %%
covered = np.zeros((9, 9), int)
for oh in range(4):
    for ow in range(4):
        covered[2 * oh : 2 * oh + 3, 2 * ow : 2 * ow + 3] += 1
plot.tables([covered], ["windows of 3 × 3, stride 2"], title="How many windows cover an element")

# %% [markdown]
# Four at most, at a corner where windows meet.
#
# Window `oh` covers the rows from `oh * stride` to `oh * stride + k - 1`. So row `h` is covered by the windows from `(h - k) // stride + 1` to `h // stride`,
# as far as there are such windows.
#
# ### Exercise: the gradient of max pooling

# %% exercise="max_pool_backward"
@cuda.jit
def max_pool_backward(dy, at, k, stride, dx):
    i = cuda.grid(1)
    if i < dx.size:
        H, W = dx.shape[1:]
        OH, OW = dy.shape[1:]
        plane, h, w = i // (H * W), i // W % H, i % W
        total = ZERO
        TODO  # add dy of each window that covers (h, w) and whose maximum was here
        dx[plane, h, w] = total


check("max_pool_backward", max_pool_backward)

# %%
hint("max_pool_backward")

# %% [markdown]
# Both of yours, beside PyTorch, with windows that overlap:

# %%
forward, backward = use("max_pool", max_pool), use("max_pool_backward", max_pool_backward)
x = rng.normal(size=(2, 9, 11)).astype(f)
y, dy = np.zeros((2, 4, 5), dtype=f), rng.normal(size=(2, 4, 5)).astype(f)
at, dx = np.zeros(y.shape, dtype=np.int32), np.zeros_like(x)
forward[2, 32](x, 3, 2, y, at)
backward[4, 64](dy, at, 3, 2, dx)
leaf = torch.tensor(x, requires_grad=True)
theirs = torch.nn.functional.max_pool2d(leaf, 3, 2)
theirs.backward(torch.tensor(dy))
print("y equal:", np.array_equal(y, theirs.detach()), "  largest difference of dx:",
      f"{abs(dx - leaf.grad.numpy()).max():.0e}")

# %% [markdown]
# There is nothing to compute here but comparisons, so memory is the limit. Count the bytes, for float32 and windows of 2 × 2, in sizes of $x$: read 1, write a
# quarter for `y`, and for indices in 8 bytes *a half*, more than `y` itself. Our layers keep an index in one byte instead, the place in the window.
# (Two bits would do for it, since a window of 2 × 2 has four places. But a byte is the least that a thread can store.)

# %%
def show(record, title):
    if record is None:
        return None
    times = {row["label"]: row["microseconds"] for row in record["rows"]}
    peers = {row["label"] for row in record["rows"] if row["kind"] == "peer"}
    fastest = min(peers, key=times.get)
    title += f"\n{fastest} takes {times[fastest] / times[record['default']]:.2f} times as long as "
    return plot.ladder(record["rows"], record["copy_gbps"], title=title + record["default"],
                       **record["source"])


show(measured("max_pool2d.forward", (64, 64, 224, 224)), "Max pooling, 2 × 2, 822 MB")

# %%
pooling, reading = measured("max_pool2d.forward", (64, 64, 224, 224)), measured("global_avg_pool.forward", (64, 192, 95, 95))
if pooling and reading:  # the limit of lesson 2's pooling is a kernel that only reads
    for name, gbps in (("a copy", pooling["copy_gbps"]), ("ours", max(row["gbps"] for row in pooling["rows"])),
                       ("reading alone (lesson 2)", reading["copy_gbps"])):
        print(f"{name:25} {gbps:,.0f} GB/s, {gbps / pooling['copy_gbps']:.0%} of the copy")

# %% [markdown]
# More than the limit? The line is the speed of a *copy*, half of whose bytes are written. Pooling writes less than a third as much as it reads, and
# reading alone is faster than copying. So a copy is not quite the right limit for it. (Backward, where more is written than read, ours stays below the line.)

# %%
show(measured("max_pool2d.backward", (64, 64, 224, 224)), "Its gradient")

# %% [markdown]
# `naive` is what you have written, a thread for each number. `rows` has a block for each row, which saves divisions, and is slower here all the same: by a tenth forward, by a third backward.
# Neither of them is limited by memory: they move what `vectorised` moves, in seven to eight times the time forward, and in 29 and 38 times backward. What they have in common is the walk through the window, which is made for *any* window: loops
# whose length is known only when they run, places counted in 64 bits, and at each number a check for the edge, for a NaN, and for which kind of index is wanted.
# PyTorch's kernel, in its turn, is between the two. Nobody has profiled by which of these `naive` takes three to four times as long as that.
#
# In the rung `vectorised` a thread makes several neighbouring outputs. It reads what they need 16 bytes at a time and keeps it in registers. The
# window's size is a constant of the kernel, so the loops over it are unrolled, and nothing is divided while it runs. (Windows that no kernel was made
# for go through shared memory.) PyTorch's kernel has one thread for each output, which loads its window number by number as well, and writes the long indices.

# %% [markdown]
# ## 4 · Batch normalisation, and a variance that goes wrong
#
# **Batch normalisation** (lesson 5) shifts and scales each channel so that its mean is 0 and its variance 1, over all pixels of all pictures of the batch; then come
# a learned weight and bias. Without it, deep networks are hard to train. It needs two numbers for each channel:
#
# $$ \mu = \frac{1}{n} \sum_i x_i \qquad\qquad \sigma^2 = \frac{1}{n} \sum_i (x_i - \mu)^2 $$
#
# The second sum needs $\mu$, so $x$ is read twice, and a third time to normalise it. Schoolbooks know a way to save one reading:
#
# $$ \sigma^2 = \frac{1}{n} \sum_i x_i^2 - \mu^2 . $$
#
# *Mean of the squares minus the square of the mean.* One pass for both sums. Let us normalise a part of our photograph with it, in float32.
# Then once more after adding 30,000 to every pixel. That changes the mean and nothing else; the normalised picture must be the same.
#
# **Predict:** is it?

# %%
def normalised(x, variance):
    return (x - x.mean(dtype=np.float64)) / np.sqrt(np.maximum(variance, 0) + f(1e-5))


def one_pass(x):
    n, total, squares = f(x.size), ZERO, ZERO
    for row in x:  # row by row, so that it is like a kernel's few additions in a chain
        total, squares = total + row.sum(), squares + (row * row).sum()
    return squares / n - (total / n) * (total / n)


part = (photo[60:188, 60:188] * 4).astype(f)
for offset in (0, 100, 30_000):
    moved = part + f(offset)
    print(f"offset {offset:6}: variance {one_pass(moved):9.4f}, "
          f"in float64 {moved.astype(np.float64).var():.4f}")

# %%
plot.images([normalised(part + f(o), one_pass(part + f(o))) for o in (0, 100, 30_000)],
            [f"offset {o:,}" for o in (0, 100, 30_000)], vmin=-2, vmax=2,
            title="Normalised by the one-pass variance")

# %% [markdown]
# It goes from right to rubbish. What happened? The squares are about $9 \cdot 10^8$. A float32 has 24 bits, so that near $9 \cdot 10^8$ it can only hold multiples of 64. The
# variance, about 1, is the difference of two such numbers. All of its digits are below what they can hold. This is called **cancellation**:
# two large, nearly equal numbers are subtracted, and what is left is their rounding. Here it is even negative, and the square root of that would not be a number.
# (`normalised` takes 0 instead. So it divides by $\sqrt{10^{-5}}$ alone, and all that is not quite the mean becomes black or white.)

# %%
offsets = 10.0 ** np.arange(0, 5.5, 0.5)
right = part.astype(np.float64).var()
wrong = [abs(one_pass(part + f(o)) - right) / right for o in offsets]
held = [abs((part + f(o)).astype(np.float64).var() - right) / right for o in offsets]
plot.curves(offsets, {"one pass, in float32": np.maximum(wrong, 1e-9),
                      "what the rounding of x itself costs": np.maximum(held, 1e-9)},
            xlabel="number added to each pixel", ylabel="relative error of the variance", log=True,
            title="Ten times the offset, a hundred times the error")

# %% [markdown]
# ### Welford
#
# B. P. Welford (1962) found a way to go through the numbers once and never square a large one. Keep a count $n$, the mean $m$ *so far*, and $m_2$, the sum
# of squared distances from it. A new value moves the mean a little:
#
# $$ \delta = x - m, \qquad n \leftarrow n + 1, \qquad m \leftarrow m + \frac{\delta}{n}, \qquad m_2 \leftarrow m_2 + \delta \cdot (x - m) $$
#
# where the last $m$ is the *new* one. Only distances are multiplied, and those are small. In the end $\sigma^2 = m_2 / n$.
#
# But a GPU has many threads, each with a share. Then two such triples have to become one (Chan, Golub and LeVeque, 1979). The means differ by $\delta = m_b - m_a$, and
#
# $$ m = m_a + \delta \, \frac{n_b}{n_a + n_b}, \qquad m_2 = m_{2,a} + m_{2,b} + \delta^2 \, \frac{n_a \, n_b}{n_a + n_b} . $$
#
# It is associative (but for rounding), like the online softmax of lesson 3: any tree will do.
#
# ### Exercise: mean and variance of each channel
#
# `x` is (N, C, P), a block for each channel, with 32 to 256 threads. A thread may get no value at all: then its count is 0.

# %% exercise="channel_moments"
@cuda.jit
def channel_moments(x, mean, variance):
    counts = cuda.shared.array(256, np.float32)
    means = cuda.shared.array(256, np.float32)
    squares = cuda.shared.array(256, np.float32)
    c, t, P = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[2]
    n = m = m2 = ZERO
    for i in range(t, x.shape[0] * P, cuda.blockDim.x):
        value = x[i // P, c, i % P]
        TODO  # 1. Welford: one more value
    counts[t], means[t], squares[t] = n, m, m2
    cuda.syncthreads()
    step = cuda.blockDim.x // 2
    while step > 0:
        TODO  # 2. thread t < step merges the triple of t + step into its own, if that has a count
        cuda.syncthreads()
        step //= 2
    if t == 0:
        mean[c] = means[0]
        variance[c] = squares[0] / counts[0]


check("channel_moments", channel_moments)

# %%
hint("channel_moments")

# %%
moments, found = use("channel_moments", channel_moments), []
for offset in (0, 100, 30_000):
    mean, variance = np.zeros((2, 1), dtype=f)
    moments[1, 256]((part + f(offset)).reshape(1, 1, -1), mean, variance)
    found.append(normalised(part + f(offset), variance[0]))
    print(f"offset {offset:6}: variance {variance[0]:.4f}")
plot.images(found, [f"offset {o:,}" for o in (0, 100, 30_000)], vmin=-2, vmax=2,
            title="Normalised by your variance")

# %% [markdown]
# ### Backward
#
# With $\hat{x}_i = (x_i - \mu) / \sigma$ for the normalised values and $w$ for the weight, $y_i = w \, \hat{x}_i + b$. The sums for the parameters are easy:
# $dw = \sum_i dy_i \, \hat{x}_i$ and $db = \sum_i dy_i$. But $x_i$ counts in *three* ways: directly, through $\mu$, and through $\sigma$.
#
# - If it were not for the other two, $dx_i = dy_i \cdot w / \sigma$.
# - **Through the mean.** Add a little to all $x$ at once, and nothing changes in $y$. So $\sum_i dx_i$ must be 0: take its mean off.
# - **Through the variance.** Stretch all $x$ a little away from $\mu$, and again nothing changes. So $\sum_i dx_i \hat{x}_i$ must be 0 as well: take that part off, too.
#
# $$ dx_i = \frac{w}{\sigma} \Big( dy_i - \frac{1}{n} \sum_j dy_j - \hat{x}_i \, \frac{1}{n} \sum_j dy_j \, \hat{x}_j \Big) $$
#
# Both sums are needed before the first $dx$: two readings of $x$ and $dy$, and one writing. Here it is, in NumPy, beside the course's kernel and PyTorch:

# %%
x, dy = (rng.normal(3, 2, size=(4, 3, 5, 5)).astype(f) for _ in range(2))
weight = np.array([1.0, 0.5, 2.0], dtype=f)


def batch_norm_backward(dy, x, weight, eps=1e-5):
    over = dict(axis=(0, 2, 3), keepdims=True)
    sigma = np.sqrt(x.var(**over) + eps)
    hat = (x - x.mean(**over)) / sigma
    w = weight[:, None, None]
    return w / sigma * (dy - dy.mean(**over) - hat * (dy * hat).mean(**over))


mine = batch_norm_backward(dy, x, weight)

# %%
y, mean, rstd = batch_norm.forward(cuda.to_device(x), cuda.to_device(weight))
ours, *_ = batch_norm.backward(cuda.to_device(dy), cuda.to_device(x), cuda.to_device(weight), mean, rstd)
leaf = torch.tensor(x, requires_grad=True)
torch.nn.functional.batch_norm(leaf, None, None, torch.tensor(weight), training=True).backward(
    torch.tensor(dy))
for name, found in (("the formula", mine), ("the kernel", ours.copy_to_host())):
    print(f"{name:12} largest difference from PyTorch {abs(found - leaf.grad.numpy()).max():.0e}")
print(f"without the two terms, the difference would be "
      f"{abs(weight[:, None, None] / x.std(axis=(0, 2, 3), keepdims=True) * dy - leaf.grad.numpy()).max():.1f}")

# %% [markdown]
# While training, a layer also keeps **running statistics**, a slowly moving mean of the batches' means and variances. A trained network uses those instead, so that
# a picture's result does not depend on who else is in its batch.
#
# The course's rungs: `naive` has a thread for each channel, `one_pass` (which is there to be seen going wrong) and `welford` a block for each channel, `vectorised` several blocks. Backward, `block` stands for the two in
# the middle. `naive` is not in these pictures: 128 channels are 128 threads, on a chip that has room for 270,336. Training moves three times the size of `x` forward,
# and five times backward. **Predict** what share of a copy's speed a block for each channel can reach, with 128 channels.

# %%
show(measured("batch_norm.forward", (128, 128, 112, 112)), "Batch normalisation in training, 822 MB")

# %%
show(measured("batch_norm.backward", (128, 128, 112, 112)), "Its gradient")

# %% [markdown]
# **Explaining the gap.** 128 channels make 128 blocks of 256 threads. That is an eighth of the threads that an H200 has room for, and each of them asks for 4 bytes at a time. By Little's law (lesson 4) they cannot get
# more than a small share of the bandwidth, by whatever formula: 9 % of the copy's speed, forward and backward. So Welford costs little beside one pass. `vectorised` deals a channel to several blocks, and its threads have several loads of 16 bytes in
# flight. Each adds up distances from a number near the mean, which needs no division for each value, and then the parts are merged by Chan's formula. Where it can, the second reading comes from the L2 cache. So
# it may even look faster than a copy.
#
# A good place for a break.

# %% [markdown]
# ## 5 · The step
#
# Now every layer can tell how the loss reacts to each of its weights. What remains is to change them. **Stochastic gradient descent**, SGD, goes downhill:
# $p \leftarrow p - \text{rate} \cdot g$, with the **learning rate** as the length of a step. (*Stochastic*, by chance, since $g$ comes from a batch that was picked at random.)
#
# A landscape that troubles it is a long valley: steep across, flat along. Take $\frac{1}{2}(100 x^2 + y^2)$. A rate that suits the flat direction makes it jump from wall to
# wall; one that suits the steep one takes for ever.
#
# **Momentum** lets the steps build up speed, like a ball: $v \leftarrow \beta v + g$, and $p \leftarrow p - \text{rate} \cdot v$. Jumps from wall to wall cancel in $v$, and what always has the same direction
# adds up. With $\beta = 0.9$, the speed is up to ten times a single step.
#
# **Adam** (Kingma and Ba, 2015) gives each weight a step length of its own. It keeps two running means, of the gradient and of its square:
#
# $$ m \leftarrow \beta_1 m + (1 - \beta_1) \, g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) \, g^2, \qquad p \leftarrow p - \text{rate} \cdot \frac{\hat m}{\sqrt{\hat v} + \epsilon} $$
#
# $\sqrt{v}$ is the usual size of this weight's gradients. Divided by that, all steps are about as long as the rate. Both means begin at 0 and are too small at first. So they are corrected, with
# the number of the step, counted from 1: $\hat m = m / (1 - \beta_1^{\text{step}})$, and $\hat v = v / (1 - \beta_2^{\text{step}})$.
#
# ### Exercise: a step of Adam

# %% exercise="adam_step"
@cuda.jit
def adam_step(p, g, m, v, step, rate, new_p, new_m, new_v):
    beta1, beta2 = np.float32(0.9), np.float32(0.999)
    correction1 = ONE - math.pow(beta1, np.float32(step))
    correction2 = ONE - math.pow(beta2, np.float32(step))
    for i in range(cuda.grid(1), p.size, cuda.gridsize(1)):
        new_m[i] = TODO
        new_v[i] = TODO
        new_p[i] = TODO  # with np.float32(1e-8) for epsilon


check("adam_step", adam_step)

# %%
hint("adam_step")

# %% [markdown]
# All three in the valley, from the same start; Adam's steps are your kernel's. Each has its own rate: SGD 0.018 (above 0.02 it would jump higher and higher from wall to wall), momentum 0.01, and Adam 0.3.
# **Predict** the order after 60 steps.

# %%
slope = np.array([100, 1], dtype=f)


def height(p):
    return float(0.5 * (slope * p * p).sum())


def descend(update, state):
    p = np.array([0.5, 5.0], dtype=f)
    heights = [height(p)]
    for step in range(1, 61):
        p, *state = update(p, slope * p, step, *state)
        heights.append(height(p))
    return heights

# %%
use_adam, zeros = use("adam_step", adam_step), np.zeros(2, dtype=f)


def adam(p, g, step, m, v):
    new = np.zeros((3, 2), dtype=f)
    use_adam[1, 32](p, g, m, v, step, f(0.3), *new)
    return new


def momentum(p, g, step, v):
    v = f(0.9) * v + g
    return p - f(0.01) * v, v

# %%
ways = {"SGD": descend(lambda p, g, step: (p - f(0.018) * g,), []),
        "SGD with momentum": descend(momentum, [zeros]), "Adam": descend(adam, [zeros, zeros])}
for name, heights in ways.items():
    print(f"{name:18} after 50 steps {heights[50]:.4f}, after 59 {heights[59]:.4f}, after 60 {heights[60]:.4f}")
plot.curves(range(61), ways, xlabel="steps done", ylabel="height above the bottom", log="y",
            title="Three ways down a valley: momentum and Adam leave SGD behind")

# %% [markdown]
# After 60 steps the order is momentum, Adam, SGD, and SGD is far behind. But look at the way. SGD goes down steadily, by a few percent a step: that is the flat direction.
# The other two overshoot and swing. After 50 steps Adam was the lower one, as for most of the way, and from one step to the next the distance between the two changes a lot. What is certain is the distance to SGD. (And
# all that for these three rates, in this valley.)
#
# ### One launch
#
# A step of SGD with momentum reads `p`, `g` and `v`, and writes `p` and `v`: five times the size of the weights. For a large network that is all there is to say. Our network
# of lesson 11 has eight arrays of weights and biases, the smallest with ten numbers. A launch for each costs the same few microseconds, whether it has ten numbers to update or a million.
#
# So the course's kernel takes them *all in one launch*, once it knows where they lie. A table in the device's memory says of each array where it lies and how long it is, and of each block which part of which array is its own. This is called a
# **multi-tensor** kernel; PyTorch's `fused=True` is another one.

# %%
shapes = [(64, 1, 3, 3), (64,), (128, 64, 3, 3), (128,), (256, 3200), (256,), (10, 256), (10,)]
sizes = [math.prod(shape) // 50 + 1 for shape in shapes]  # a fiftieth, for the simulator


def launches(variant):
    lists = [[torch.zeros(n, device="cpu" if SIMULATED else "cuda") for n in sizes] for _ in range(3)]
    table = optimizers.Table()
    with launches_of() as first:
        optimizers.sgd(*lists, lr=0.1, momentum=0.9, variant=variant, table=table)
    with launches_of() as again:
        optimizers.sgd(*lists, lr=0.1, momentum=0.9, variant=variant, table=table, again=True)
    return len(first), len(again)


print("launches of the first step and of the next: naive", launches("naive"), " fused", launches("fused"))

# %% [markdown]
# The eight launches of *naive* are the eight arrays. That the first step of *fused* has eight as well is chance: seven small kernels fill the table (the addresses of `p`, of `g` and of `v`, the lengths, each array's first block, each
# block's part, a counter that is set to 0), and the eighth is the step itself. From then on it is one. `again=True` says that all arrays lie where they lay, so that nobody looks;
# without it, the host compares the addresses, and what has moved is written again. Measured, with the small network and with six arrays of 17 million numbers. In brackets is the time of a call from Python, in which the host has to keep up. (`adamw` is Adam
# with weight decay, a small pull of each weight towards 0, of which lesson 11 says more.) *Foreach* is what PyTorch does by default:
# it goes through all arrays with one kernel for each *operation*, and so reads and writes the numbers several times.

# %%
for name in ("sgd.step", "adamw.step"):
    for record in bench.find(records, name=name):
        rows = ", ".join(f"{r['label']} {r['microseconds']:.1f} µs ({r['python_microseconds']:.1f} from Python)"
                         for r in record["rows"])
        print(f"{name}, {record['n_tensors']} arrays of {record['shape'][0]:,} numbers in all: {rows}")
    if not bench.find(records, name=name):
        print(f"{name} has not been measured on a GPU yet.")

# %% [markdown]
# ## What the profiler says
#
# Before you optimise a kernel, ask which limit it has, and measure against *that*. In this lesson there were four kinds:

# %%
def intensity(*sizes):
    return flops(*sizes) / fewest_bytes(*sizes)


kinds = [("matrix product, 4096³", intensity(4096, 4096, 4096), "arithmetic"),
         ("matrix product, batch 32", intensity(32, 256, 3200), "too few blocks, latency"),
         ("max pooling 2 × 2", 3 / (4 * 4 + 4 + 1), "memory"),  # 3 comparisons for each output
         ("batch normalisation", 10 / (3 * 4), "memory"),  # some ten operations for each number
         ("Adam", 14 / (7 * 4), "memory"), ("Adam, ten numbers", 14 / (7 * 4), "the launch")]
for name, per_byte, limit in kinds:
    print(f"{name:26} {per_byte:5.1f} FLOPs per byte: {limit}")

# %% [markdown]
# ## Where the real libraries go further
#
# - **cuBLAS and CUTLASS** have hundreds of matrix kernels and pick one for each size. On sm_90 they use `wgmma` and a unit that copies whole tiles without threads (TMA), and can round them to TF32; some warps only
#   copy, others only multiply.
# - **Emulated float32 and float64** on tensor cores, with more and cleverer parts than our two, are an active field (Ootomo and Yokota, 2022, is where our split comes from).
# - **Batch normalisation over several GPUs** merges Chan's triples between machines, with the same formula.
# - **Optimisers with 8-bit states** keep each of Adam's two means in one byte, and so move 16 bytes for each weight instead of 28.
#
# ## Three questions
#
# <details><summary>1. Why does a register-tiled kernel not take 16 × 16 results for each thread? That would be eight multiply-adds for each load.</summary>
#
# 256 sums need 256 registers, and a thread has 255 at most. The compiler would keep some sums in memory ("spilling"), and each use of those would cost more than the loads that were saved. And with so many registers
# only one block would fit on a multiprocessor, so that nobody could work while it waits.
# </details>
#
# <details><summary>2. All pixels of a channel are equal, say 3. What are the one-pass variance, Welford's, and the normalised values?</summary>
#
# Both should be 0. Welford's is: every distance is 0. One pass may give 0 or a tiny number of either sign, for 9 − 9 is exact here, but 0.1² · n / n − 0.1² need not be. The normalised values are 0 / √(0 + ε) = 0; this is what the ε
# under the root is for.
# </details>
#
# <details><summary>3. Somebody adds padding to max pooling and fills it with zeros, as for a convolution. What goes wrong?</summary>
#
# If all pixels of a window at the rim are negative, the zero of the padding wins. The result is a number that is nowhere in the picture, and the gradient goes to a place that does not exist. Padding for a maximum is minus infinity, or better: not looked at.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# Lesson 11 puts it all together: a network of nothing but our kernels learns to tell ten kinds of clothes.
