# %% [markdown]
# # 9 · Convolution, backwards
#
# **After this lesson** you can derive all three gradients of a convolution, write two of them as
# convolutions again, check a derivation in three independent ways, say what stride and padding
# become on the way back, and choose between handing results out (with atomics) and collecting them,
# for speed and for results that are the same bits in every run.
#
# **You need** [lesson 8](08_convolution.ipynb) (all of it) and, of [lesson 2](02_reductions.ipynb),
# atomics and section 5 on the order of additions.
#
# **Time:** 90 minutes; there is a good place to pause after section 3. All cells together run in
# less than half a minute in the simulator. On a GPU the speeds are measured on your own machine,
# otherwise you see recorded ones. The words are collected in the [glossary](glossary.md).

# %%
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from course_lib import SIMULATED, bench, cuda, plot, reference, results_table, simulator
from course_lib.runtime.intrinsics import warp_sum
from course_lib.teach import TODO, check, hint, progress, solution, use

f, ZERO = np.float32, np.float32(0)
recorded = bench.load_records()

# %% [markdown]
# ## 1 · Who has read me?
#
# A network learns by gradients. Behind our layer somebody has found out how the loss reacts to each
# of its results, $dy_{n,k,p,q}$. We have to find how it reacts to each pixel, $dx$, to each weight,
# $d\text{weight}$, and to each bias, $db$. The first one is handed on to the layer before. The
# other two are what this layer learns from.
#
# The rule is always the same, the chain rule: a number counts through everything that it was used
# for. So of each number one has to ask: **who has read me, and what was I multiplied by?**
#
# Take one channel, one filter of 3 × 3, padding 1. Pixel (2, 3) is to be found out about. **Predict**: which
# results have read it? And which of them by the tap in the upper left corner?

# %%
def readers(h, w, size, stride, padding=1):
    """For each result, the tap (row, column) by which it has read pixel (h, w), if it has."""
    n_results = (size + 2 * padding - 3) // stride + 1
    found = np.full((n_results, n_results), "   ")
    for p in range(n_results):
        for q in range(n_results):
            r, s = h + padding - p * stride, w + padding - q * stride
            if 0 <= r < 3 and 0 <= s < 3:
                found[p, q] = f"{r},{s}"
    return found

# %%
pixel = np.zeros((6, 6), dtype=int)
pixel[2, 3] = 1
taps = np.array([[f"{r},{s}" for s in range(3)] for r in range(3)])
plot.grids([pixel, taps, readers(2, 3, 6, stride=1)],
           ["x, and a pixel of it", "the filter's taps", "y: who has read it, by which tap"],
           title="Each of nine results has read the pixel, each by another tap")

# %% [markdown]
# Nine results, and each has used another tap. Look at the order. On the left in the upper row
# stands tap 2,2, on the right in the lower row tap 0,0: the filter, **turned by half a turn**. That
# is easy to see, once one has thought about it. The result on the *left* of the pixel has the pixel
# on the *right* of its window.
#
# So the gradient of this pixel is a sum of nine products: each result's $dy$, times the tap by
# which that result has read the pixel. In a formula: tap $(r, s)$ of result $(p, q)$ met pixel $h =
# p \cdot \text{stride} - \text{padding} + r$. Solve that for $p$:
#
# $$ dx_{n,c,h,w} = \sum_{k} \sum_{r} \sum_{s} dy_{n,k,p,q} \cdot \text{weight}_{k,c,r,s}
# \qquad p = \frac{h + \text{padding} - r}{\text{stride}} \qquad q = \frac{w + \text{padding} - s}{\text{stride}} $$
#
# with two conditions: $p$ and $q$ must be **whole numbers**, and they must lie inside of $dy$. Note
# the sum over $k$. A channel of x was read by *all filters*. Forward, the sum went over the
# channels $c$ and there was a result for each filter $k$. Now it is the other way round.
#
# ### Stride and padding
#
# With a stride of 2 the windows stop at every second pixel only. **Predict** how many results have
# read pixel (2, 3) now, and how many pixel (3, 3).

# %%
sorts = [(2, 2), (2, 3), (3, 2), (3, 3)]
plot.grids([readers(h, w, 6, stride=2) for h, w in sorts],
           [f"readers of pixel {place}" for place in sorts],
           title="Stride 2: four sorts of pixels; 1, 2, 2 or 4 results have read them")

# %% [markdown]
# That is what "a whole number" means: of the nine taps only one, two, or four can have met a given
# pixel. The others would have stood between two stops. And a pixel may have been read by nobody.
# With 6 pixels, 3 taps, stride 2 and *no* padding, the window stops at 0 and at 2 and ends with
# pixel 4. Pixel 5 was never read, and its gradient is 0. Someone has to write that 0.
#
# Padding is the simplest of all. The zeros around the picture get gradients, too, but nobody wants
# them. In the formula they do not occur, since $h$ and $w$ are pixels of the picture.

# %% [markdown]
# ## 2 · The gradient is a convolution
#
# A sum of nine neighbours in $dy$, each times a tap: that *is* a convolution, over $dy$. Let us say
# it precisely. Take stride 1 first.
#
# - The picture is $dy$, with zeros around it. How many? Forward, the first window began $\text{padding}$ before the picture. To
#   collect from all who have read the very first pixel, one must go back $R - 1 - \text{padding}$ beyond the first result. With a padding of 0 that
#   makes $R - 1$ lines of zeros on each side. This is called a **full convolution**: even a window that touches only a single
#   number counts.
# - The filters are turned by half a turn.
# - Channels and filters have changed their parts: the picture $dy$ has $K$ channels, and there are
#   $C$ filters. The first two axes of the weights are **transposed**, that is, changed over.
#
# And with a stride of 2? Then put zeros *between* the numbers of $dy$ as well, so that they lie as
# far apart as the windows did. Where $p$ is no whole number, there is a zero. We call that
# `spread`:

# %%
dy_small = np.arange(1, 10).reshape(3, 3)
spread = np.zeros((8, 8), dtype=int)
spread[1:6:2, 1:6:2] = dy_small
plot.grids([dy_small, spread], ["dy", "spread, for a gradient of 6 × 6"],
           marked=[[(0, 0, 1, 1), (1, 2, 1, 1)], [(0, 0, 3, 3), (2, 3, 3, 3)]],
           title="Stride 2, padding 1: dy, and what the turned filter walks over, step by step")

# %% [markdown]
# (Framed are the windows of dx at (0, 0) and at (2, 3), and in `dy` a number that each of them
# sees. The second one sees two numbers, as it should: two results have read pixel (2, 3).)
#
# In mathematics, by the way, *convolution* is the name of the operation with the turned filter, and
# what networks do forward is a **correlation**. Here you have met the real one.
#
# ### Exercise: dx as a convolution
#
# Return `spread`, float32 of $(N, K, H + R - 1, W + S - 1)$, and `turned`, of $(C, K, R, S)$, such
# that a plain convolution of the two (stride 1, no padding) is $dx$ of $(N, C, H, W)$. The padding
# is less than R and S. NumPy's slices have steps: `a[1:6:2]` is elements 1, 3 and 5, and `a[::-1]`
# is all of them backwards.

# %% exercise="dx_as_convolution"
def dx_as_convolution(dy, weight, H, W, stride, padding):
    N, K, P, Q = dy.shape
    R, S = weight.shape[2:]
    spread = np.zeros((N, K, H + R - 1, W + S - 1), dtype=dy.dtype)
    TODO  # 1. put dy into it: where does the first number go, and how far apart are they?
    return spread, TODO  # 2. the weights, turned and transposed


check("dx_as_convolution", dx_as_convolution)

# %%
hint("dx_as_convolution")

# %% [markdown]
# Now the layer that goes with us through this lesson: 2 pictures with 3 channels of 9 × 8 pixels, 4
# filters, stride 2, padding 1. First we ask PyTorch's autograd for all three gradients.

# %%
rng = np.random.default_rng(0)
STRIDE, PADDING = 2, 1
x, weight, bias = (rng.normal(size=shape).astype(f) for shape in ((2, 3, 9, 8), (4, 3, 3, 3), 4))
leaves = [torch.tensor(each, requires_grad=True) for each in (x, weight, bias)]
y = F.conv2d(*leaves, stride=STRIDE, padding=PADDING)
dy = rng.normal(size=y.shape).astype(f)
y.backward(torch.tensor(dy))
theirs = [leaf.grad.numpy() for leaf in leaves]
print("y is", tuple(y.shape), "and x", x.shape)

# %%
spread, turned = use("dx_as_convolution", dx_as_convolution)(dy, weight, 9, 8, STRIDE, PADDING)
dx = reference.conv2d(spread, turned)
print(f"{np.mean(spread == 0):.0%} of spread are zeros")
print(f"largest difference from autograd {abs(dx - theirs[0]).max():.0e}")

# %% [markdown]
# So whoever has a fast convolution has a fast gradient for nothing: every rung of lesson 8 runs
# backwards. But nobody would *write down* `spread`. With a stride of 2 more than three quarters of
# it are zeros, and all products with them are wasted. It is implicit GEMM once more: keep the index
# calculation, and do not make the array.

# %% [markdown]
# ## 3 · Handing out or collecting
#
# There are two ways to write it as a kernel, and the choice between them comes up again and again,
# far beyond convolutions.
#
# **Scatter**: a thread for each *result*. It knows its window. So it hands out: to each pixel of
# the window, $dy$ times the tap. That is the forward kernel, with a write where there was a read.
# But neighbouring windows overlap, and many threads add to the same pixel at the same time. That
# needs atomics (lesson 2), and dx must be 0 before.

# %%
@cuda.jit
def scatter_dx(dy, weight, dx, stride, padding):
    C, H, W = dx.shape[1:]
    R, S = weight.shape[2:]
    K, P, Q = dy.shape[1:]
    i = cuda.grid(1)
    if i < dy.size:
        n, k, p, q = i // (K * P * Q), i // (P * Q) % K, i // Q % P, i % Q
        for c in range(C):
            for r in range(R):
                for s in range(S):
                    h, w = p * stride - padding + r, q * stride - padding + s
                    if h >= 0 and h < H and w >= 0 and w < W:
                        cuda.atomic.add(dx, (n, c, h, w), dy[n, k, p, q] * weight[k, c, r, s])


dx = np.zeros_like(x)
scatter_dx[3, 64](dy, weight, dx, STRIDE, PADDING)
print(f"largest difference from autograd {abs(dx - theirs[0]).max():.0e}")

# %% [markdown]
# **Gather**: a thread for each *pixel*. It asks who has read it, and collects. It writes one number, which nobody else writes: no atomics, no zeros
# before, and the sum stays in a register. **Predict:** which of the two does less arithmetic? Which is faster?
#
# ### Exercise: gather
#
# A thread for each number of dx. `down` is what stands above the line of the fraction in section 1.
# (Division and remainder of whole numbers round *down* in Python and in numba: $-1$ // 2 is $-1$,
# and the remainder is 1.)

# %% exercise="conv2d_dx"
@cuda.jit
def conv2d_dx(dy, weight, dx, stride, padding):
    C, H, W = dx.shape[1:]
    R, S = weight.shape[2:]
    K, P, Q = dy.shape[1:]
    i = cuda.grid(1)
    if i < dx.size:
        n, c, h, w = i // (C * H * W), i // (H * W) % C, i // W % H, i % W
        total = ZERO
        for r in range(R):
            for s in range(S):
                down, right = h + padding - r, w + padding - s
                p, q = TODO, TODO
                if TODO:  # has a window ever put tap (r, s) on this pixel?
                    for k in range(K):
                        total += TODO * weight[k, c, r, s]
        dx[n, c, h, w] = total


check("conv2d_dx", conv2d_dx)

# %%
hint("conv2d_dx")

# %% [markdown]
# ### The same numbers, other bits
#
# Both are right. Now run each of them six times with the threads in a random order, as they come on
# a GPU. **Predict** how many different results there will be.

# %%
def six_runs(kernel, n_threads):
    found = []
    for seed in range(6):
        dx = np.zeros_like(x)
        with simulator.options(order="random", seed=seed):
            simulator.run(kernel, -(-n_threads // 64), 64, dy, weight, dx, STRIDE, PADDING)
        found.append(dx)
    return found

# %%
scattered = six_runs(scatter_dx, dy.size)
gathered = six_runs(use("conv2d_dx", conv2d_dx), x.size)
for name, runs in (("scattered", scattered), ("gathered", gathered)):
    print(f"{name}: {len({run.tobytes() for run in runs})} different results in {len(runs)} runs, "
          f"largest difference from autograd {max(abs(run - theirs[0]).max() for run in runs):.0e}")

# %%
other = int((scattered[0] != scattered[1]).sum())
place = tuple(np.unravel_index(np.argmax(np.ptp(scattered, axis=0)), x.shape))
for run in scattered[:3]:
    print(f"dx{[int(i) for i in place]} scattered: {run[place]:.7f}, bits {run[place].view(np.uint32):032b}")
print(f"{other} of {x.size} numbers differ between the first two runs")
exact = reference.conv2d_backward(dy, x, weight, stride=STRIDE, padding=PADDING)[0][place]
plot.run_to_run({"scattered": [run[place] for run in scattered], "gathered": [run[place] for run in gathered]},
                exact, title="One number of dx in six runs")

# %% [markdown]
# float32 rounds after each addition, so another order gives other last bits (lesson 2). The
# scattered gradient is **not deterministic**: it depends on who came first. The gathered one adds
# its terms in the order of its loops, always the same, and is **deterministic**, to the last bit.
#
# Who cares about the last bit? Whoever looks for a mistake. Train a network twice with the same
# seed. If a single bit differs in the first step, the weights differ after it, and after a thousand
# steps there are two different networks. Was it your change that has made it better, or the other
# order? With deterministic kernels the same run gives the same network. That is why all kernels of
# this course are built this way, and why a training run of lesson 7 could be killed, go on, and end
# with the same bits.
#
# ### Which one is faster?
#
# Count, for our layer: how often does each write to memory?

# %%
with simulator.trace() as scatter_trace:
    scatter_dx[3, 64](dy, weight, np.zeros_like(x), STRIDE, PADDING)
with simulator.trace() as gather_trace:
    use("conv2d_dx", conv2d_dx)[7, 64](dy, weight, np.zeros_like(x), STRIDE, PADDING)
for name, trace in (("scatter", scatter_trace), ("gather", gather_trace)):
    asked = {op: sum(s.bytes for s in trace.sites if s.op == op) // 4 for op in ("load", "atomic", "store")}
    print(f"{name:8}" + ", ".join(f"{count:6,} numbers by {op}s" for op, count in asked.items()))

# %% [markdown]
# The arithmetic is the same, and so is what is read. But where gather writes each number of dx *once*, scatter has an atomic addition for **every
# single product**. An atomic is no ordinary write. It is carried out in the L2 cache, where the number is fetched, added to, and put back, and two
# that want the same number queue. In gather, the additions take place in a register, which costs one instruction with the product.
#
# (Gather has a price of its own. With a stride of 2, three quarters of its taps meet nobody, and
# neighbouring pixels have *different* taps that do, so the lanes of a warp are divergent. It loads the
# same numbers in more requests, each for fewer lanes: the table at the end of the lesson counts 1,022 requests
# against 405. A good kernel gives a warp pixels of one sort.)
#
# Measured, a layer of 8 pictures, 32 channels and 32 filters, 28 × 28 pixels. The kernels are the
# two that you see here. **Predict** the ratio.

# %%
@cache
def ways_measured():
    if not SIMULATED:
        from course_lib.benchmarks import lesson_09 as benchmark

        return benchmark.run()[0] | {"source": (bench.device_facts()["name"], "just now")}
    if found := bench.find(recorded, name="lesson_09.dx"):
        return found[0] | {"source": (recorded["device"]["name"], results_table.when(found[0]))}
    return print("lesson_09.dx has not been measured on a GPU yet.")


print("recorded on an", recorded["device"]["name"])

# %%
ways = ways_measured()
for row in ways["rows"] if ways else []:
    print(f"{row['label']:24}{row['microseconds']:9.1f} µs; in a second run {row['differing']:,} "
          f"of {8 * 32 * 28 * 28:,} numbers have other bits")
ways and plot.times(ways["rows"], title="The gradient of x: gathered is a little faster, and the same in every run",
                    device=ways["source"][0], date=ways["source"][1])

# %% [markdown]
# On an H200 the ratio is 1.15. That is little, for 288 atomics in the place of each write. For one
# thing, the atomics of a warp go to neighbouring pixels here, and a thread need not wait for them,
# since it does not ask for the old value. For another, gather is no good kernel yet. Like scatter, it
# loads two numbers for each product. The rung that `variant="auto"` takes does the same layer more than
# ten times as fast (section 7), and it gathers. But look at the bits: after scatter, most numbers of dx
# have others in the second run.
#
# As a rule: **who owns the result should collect it.** Scatter is for cases in which nobody can say
# who has read him (where the places come out of the data, as in a histogram).

# %% [markdown]
# A good place for a break. Next come the weights.

# %% [markdown]
# ## 4 · The gradient of the weights
#
# Who has read weight $(k, c, r, s)$? *All* results of filter $k$, in all pictures, and each has
# multiplied it by another pixel: the one that tap $(r, s)$ met.
#
# $$ d\text{weight}_{k,c,r,s} = \sum_n \sum_p \sum_q dy_{n,k,p,q} \cdot x_{n,c,h,w}
# \qquad h = p \cdot \text{stride} - \text{padding} + r \qquad w = q \cdot \text{stride} - \text{padding} + s $$
#
# It is the forward formula with the sums changed over. Put $dy$ on the picture as if *it* were a
# filter, a very large one, multiply and add up: that is the gradient of tap (0, 0). Move it on by
# one pixel: tap (0, 1). So it is a **correlation of x with dy**, this time without any turning. For
# stride 1 and padding 0:

# %%
picture, upstream = rng.integers(0, 4, (5, 5)), rng.integers(0, 3, (3, 3))
gradient = reference.conv2d(picture[None, None], upstream[None, None])[0, 0]
plot.windows(picture, upstream, gradient, [(0, 0), (1, 2)], names=("x", "dy", "dweight"),
             title="dy in the place of the filter gives the gradient of a filter of 3 × 3")

# %% [markdown]
# The work is the same as forward. But the shape of it is not. **Predict**, for a batch of 32
# pictures of 64 × 64: how many results are there, and how many terms has each?

# %%
for label, (N, C, K, H) in (("64 → 128 channels", (32, 64, 128, 64)), ("the first layer, 3 → 64", (32, 3, 64, 64))):
    print(f"{label:24} forward {N * K * H * H:10,} results of {C * 9:4,} terms; "
          f"dweight {K * C * 9:7,} results of {N * H * H:8,} terms")

# %% [markdown]
# Forward there are millions of results with short sums. Here there are few results with *very long*
# sums. A thread for each weight would leave most of the GPU idle: it has room for 270,336 threads,
# and the first layer has 1,728 weights. So the *sum* has to be shared. It is a **reduction**, the
# subject of lesson 2, with all its tools.
#
# ### Exercise: the gradient of the weights
#
# A warp for each weight, several warps in a block. The lanes share the pixels of $dy$, of all
# pictures, and add up with `warp_sum` (which gives the sum to all lanes). **Predict:** is this
# kernel deterministic?

# %% exercise="conv2d_dweight"
@cuda.jit
def conv2d_dweight(dy, x, dweight, stride, padding):
    H, W = x.shape[2:]
    C, R, S = dweight.shape[1:]
    N, _, P, Q = dy.shape
    i, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if i < dweight.size:
        k, c, r, s = i // (C * R * S), i // (R * S) % C, i // S % R, i % S
        total = ZERO
        for pixel in range(lane, N * P * Q, 32):
            n, p, q = pixel // (P * Q), TODO, TODO
            TODO  # the pixel of x that tap (r, s) met there; if it is inside, one product
        TODO  # add up, and let one lane write


check("conv2d_dweight", conv2d_dweight)

# %%
hint("conv2d_dweight")

# %% [markdown]
# It is deterministic: each lane has its pixels, and the shuffles add up in a fixed order.
#
# How do the lanes read? The pixels of $dy$ are neighbours, and with stride 1 those of $x$ are, too.
# Here the stride is 2:

# %%
kernel, dweight = use("conv2d_dweight", conv2d_dweight), np.zeros_like(weight)
with simulator.trace() as t:
    kernel[54, 64](dy, x, dweight, STRIDE, PADDING)
print(f"largest difference from autograd {abs(dweight - theirs[1]).max():.0e}")
plot.access_map(t, next(site for site in t.sites if site.array == "x"), steps=2)

# %% [markdown]
# ### As a product of matrices
#
# Lesson 8 wrote the convolution as filters times columns. Its gradient is $dy$ times the columns,
# lying on their side: a matrix with $K$ rows and $C \cdot R \cdot S$ columns, each element a sum
# over all $N \cdot P \cdot Q$ pixels. The columns need not be made, as before. So implicit GEMM
# does this pass as well. Only, there are few tiles of results: 128 filters × 576 terms are $1
# \times 4.5$ tiles of 128 × 128, for 132 multiprocessors!
#
# So the *sum* is cut into parts, and each part is given to other blocks. This is called **split-K**
# (the K stands for the length of the sum in a product of matrices, and not for our filters). Then
# the parts must be added, and there is the choice of section 3 again:
#
# - all blocks add to the weight atomically: one kernel, and other bits in every run;
# - each block writes its own *partial* gradient, and a second, small kernel adds them up in a fixed
#   order. It costs some memory and a launch, and the bits stay the same. The course's kernels do
#   this.
#
# Both, with your kernel, for eight pictures. A part is a picture here, and its partial gradient is
# what your kernel makes of that picture alone. (On a GPU all parts would run at the same time.)

# %%
@cuda.jit
def add_atomically(partial, dweight):  # a thread for each number of each part
    i = cuda.grid(1)
    if i < partial.size:
        cuda.atomic.add(dweight, i % dweight.size, partial[i // dweight.size, i % dweight.size])


@cuda.jit
def add_in_order(partial, dweight):  # a thread for each weight, which walks through the parts
    i = cuda.grid(1)
    if i < dweight.size:
        total = ZERO
        for part in range(partial.shape[0]):
            total += partial[part, i]
        dweight[i] = total

# %%
more = np.random.default_rng(1)
eight_dy, eight_x = (more.normal(size=(8, *each.shape[1:])).astype(f) for each in (dy, x))
partial = np.zeros((8, weight.size), dtype=f)
for n in range(8):
    kernel[54, 64](eight_dy[n : n + 1], eight_x[n : n + 1], partial[n].reshape(weight.shape), STRIDE, PADDING)
exact = reference.conv2d_backward(eight_dy, eight_x, weight, stride=STRIDE, padding=PADDING)[1].ravel()

# %%
for adding, n_threads in ((add_atomically, partial.size), (add_in_order, weight.size)):
    runs = []
    for seed in range(6):
        runs.append(np.zeros(weight.size, dtype=f))
        with simulator.options(order="random", seed=seed):
            simulator.run(adding, -(-n_threads // 64), 64, partial, runs[-1])
    print(f"{adding.__name__}: {len({run.tobytes() for run in runs})} different results in 6 runs, "
          f"largest error {max(abs(run - exact).max() for run in runs):.0e}")

# %% [markdown]
# The same parts, and the same choice as in section 3: who adds decides whether the bits stay.

# %% [markdown]
# ## 5 · The gradient of the bias
#
# Who has read the bias of channel $k$? Every result of channel $k$, and it was not multiplied by
# anything:
#
# $$ db_k = \sum_n \sum_p \sum_q dy_{n,k,p,q} $$
#
# ### Exercise: a plain sum
#
# A block for each channel, of 32 to 256 threads. Each warp has `warp_sum`; then the warps meet in
# shared memory.

# %% exercise="conv2d_dbias"
@cuda.jit
def conv2d_dbias(dy, dbias):
    partial = cuda.shared.array(8, np.float32)
    N, _, P, Q = dy.shape
    k, t, total = cuda.blockIdx.x, cuda.threadIdx.x, ZERO
    for pixel in range(t, N * P * Q, cuda.blockDim.x):
        total += dy[pixel // (P * Q), k, TODO, TODO]
    total = warp_sum(total)
    TODO  # 1. one lane of each warp leaves this sum in partial
    TODO  # 2. one thread adds up, and writes dbias[k]


check("conv2d_dbias", conv2d_dbias)

# %%
hint("conv2d_dbias")

# %% [markdown]
# This one is limited by memory: one addition for each number read. A layer that is followed by
# batch normalisation has no bias at all, since the mean is subtracted right after it.

# %% [markdown]
# ## 6 · Checked three ways
#
# A derivation on paper can be wrong, and so can a kernel. And if you compare a kernel with a
# formula that *you* have derived, both may be wrong together. So:
#
# 1. **finite differences**: no derivation at all, only the forward pass. Slow, not very exact, and
#    it cannot be fooled;
# 2. a **reference** that somebody else has written, in float64 (here both: PyTorch's autograd and
#    the course's own);
# 3. **another kernel** that goes another way: every rung of the ladder.

# %%
kernel, dbias = use("conv2d_dbias", conv2d_dbias), np.zeros_like(bias)
kernel[4, 64](dy, dbias)
mine = gathered[0], dweight, dbias
exact = reference.conv2d_backward(dy, x, weight, stride=STRIDE, padding=PADDING)
for name, own, torchs, double in zip(("dx", "dweight", "dbias"), mine, theirs, exact, strict=True):
    print(f"{name:8} largest difference from autograd {abs(own - torchs).max():.0e}, "
          f"from float64 {abs(own - double).max():.0e}")

# %%
def loss(which, place, step):
    """The loss, a sum of dy · y, with one number of x, weight or bias moved by a step."""
    moved = [each.astype(np.float64) for each in (x, weight, bias)]
    moved[which][place] += step
    return (dy * reference.conv2d(*moved, stride=STRIDE, padding=PADDING)).sum()


for which, place in ((0, (0, 0, 0, 0)), (0, (1, 2, 4, 5)), (1, (3, 1, 0, 2)), (2, (2,))):
    slope = (loss(which, place, 1e-4) - loss(which, place, -1e-4)) / 2e-4
    name = ("dx", "dweight", "dbias")[which]
    print(f"{name + str(list(place)):22} finite difference {slope:+.6f}, yours {mine[which][place]:+.6f}")

# %% [markdown]
# (A convolution is linear in x, in the weights and in the bias, so a finite difference has no error
# but that of rounding.)
#
# And the third way, the course's rungs, on a small piece. The ladders of the two large gradients,
# `conv2d.DX` and `conv2d.DWEIGHT`, have rungs of the same names, and `variant` is for both.
# (`few_channels` is made for the first layer of a network, where pictures have one to four channels.)

# %%
from course_lib.kernels import conv2d

small = [np.ascontiguousarray(each) for each in (dy[:1, :, :2, :2], x[:1, :1, :4, :4], weight[:, :1])]
options = dict(stride=STRIDE, padding=PADDING)
double = reference.conv2d_backward(*small, **options)
for variant in conv2d.DX:
    if variant != "depthwise":
        found = conv2d.backward(*map(cuda.to_device, small), variant=variant, **options)
        errors = [abs(each.copy_to_host() - one).max() for each, one in zip(found, double, strict=True)]
        print(f"{variant:14} largest errors: " + ", ".join(f"{error:.0e}" for error in errors))

# %% [markdown]
# ## 7 · Measured
#
# Both large gradients at the sizes of lesson 8, beside cuDNN. The FLOPs are the same as forward. **Predict:** which of the three passes is the slowest, for
# cuDNN and for us?

# %%
LADDER, SHAPES = (8, 32, 32, 28), [(32, 64, 128, 64), (32, 128, 128, 56), (64, 256, 256, 28)]


@cache
def measured_here(shape):
    from course_lib.benchmarks import conv2d as benchmark

    return {"records": benchmark.run(shapes=[shape], dtypes=["float32"])}


@cache
def measured(name, shape):
    """The measurement called `name`; None if there is none."""
    found = bench.find(recorded if SIMULATED else measured_here(shape), name=name, shape=shape)
    device = recorded["device"]["name"] if SIMULATED else bench.device_facts()["name"]
    return found[0] | {"source": (device, results_table.when(found[0]))} if found else None

# %%
def show(name, shape, title):
    record = measured(name, shape)
    if record is None:
        return print(f"{name} of {' × '.join(map(str, shape))} has not been measured on a GPU yet.")
    (device, date), limit = record["source"], record["peaks_tflops"]["fma"]
    ours, cudnn = (max(row["tflops"] for row in record["rows"] if row["kind"] == kind) for kind in ("ours", "peer"))
    title += f"\nours is {ours / cudnn:.1f} times as fast as cuDNN; the float32 units could do {limit:.0f}"
    return plot.arithmetic(record["rows"], {}, title=title, device=device, date=date)


show("conv2d.dx", LADDER, "The gradient of x: 8 pictures, 32 → 32 channels, 28 × 28")

# %%
show("conv2d.dweight", LADDER, "The gradient of the weights, the same layer")

# %% [markdown]
# The layer is the one of section 3, and there the simple gather took a quarter of the time that the rung `direct` takes here. Both are a
# thread for each pixel, with the same products. But look at the loops. In yours the filters are the *innermost* loop, so a thread finds out
# nine times whether a tap has met its pixel, for all filters at once. In `direct` they are the outermost, as in the formula, and it finds
# out anew for each of the 32 filters: $32 \cdot (3 + 9) = 384$ times, and each time it divides numbers of 64 bits, for which a GPU
# needs many instructions. (Nobody has profiled it; this is what one can count in `course_lib/kernels/conv2d/direct.py`.) *What does not
# depend on the inner loop belongs outside of it.*

# %%
n_found = 0
for shape in SHAPES:
    for name in ("conv2d.forward", "conv2d.dx", "conv2d.dweight"):
        if record := measured(name, shape):
            n_found += 1
            ours, cudnn = (min(row["microseconds"] for row in record["rows"]
                               if row["label"].startswith(who)) for who in ("ours", "cuDNN"))
            print(f"{name:15} {str(shape):20} ours {ours:7.0f} µs, cuDNN {cudnn:7.0f} µs "
                  f"({record['source'][0]}, {record['source'][1]})")
n_found or print("None of the three passes has been measured on a GPU yet.")

# %% [markdown]
# On an H200 the slowest pass is the forward one for cuDNN, and dweight for us.
#
# **Explaining the gap.** Beside the reasons of lesson 8:
#
# - *dx* is as good a product of matrices as the forward pass, with $C$ in the place of $K$. What
#   differs is how its factors lie in memory: of the transposed weights, neighbours in the sum lie
#   far apart. A small kernel puts them in order first. Then dx takes about as long as the forward
#   pass.
# - *dweight* has the long sums. The parts have to be written and added up, and both of its factors,
#   x and dy, change from step to step. And it goes by `mma`, where large forward passes and dx go by
#   the newer `wgmma` (lesson 8). That one takes 32-bit numbers only if the terms of a sum lie side by
#   side. Here the terms are pixels, and what lies side by side in our tiles are channels.
# - cuDNN's dweight of the third size comes to 117 TFLOP/s. That is more than the float32 units can
#   do, so it must be a way with fewer products, such as Winograd's (lesson 8). It has its price: the
#   records give its error as 1e-05, and ours as 8e-07.
# - cuDNN has kernels for the gradients that add up with atomics, and may choose them, unless
#   `torch.backends.cudnn.deterministic` is switched on. Ours are deterministic at all times.
#
# ## What the profiler says
#
# Here are the requests and sectors of the three gradients that you have written, and of the one
# with atomics. (An atomic request is counted with the sectors that it goes to.)

# %%
with simulator.trace() as bias_trace:
    use("conv2d_dbias", conv2d_dbias)[4, 64](dy, np.zeros_like(bias))
traces = {"dx, scattered": scatter_trace, "dx, gathered": gather_trace, "dweight": t, "dbias": bias_trace}
print(f"{'':14}{'requests':>10}{'sectors':>9}{'of them by atomics':>20}{'divergent':>12}")
for label, trace in traces.items():
    sites = [site for site in trace.sites if site.space == "global"]
    atomics = sum(site.sectors for site in sites if site.op == "atomic")
    ways = sum(branch.divergent for branch in trace.branches)
    print(f"{label:14}{sum(s.requests for s in sites):10,}{sum(s.sectors for s in sites):9,}{atomics:20,}{ways:12,}")

# %% [markdown]
# Gathered and scattered load the same 6,864 numbers, as counted in section 3. Divergent lanes spread the gathered ones over more
# requests, while the atomics of the scattered ones cost more sectors than all of its loads.
#
# In a real report, look for *L2 atomics* (the profiler calls them `red` or `atom`) in a backward
# kernel that is unexpectedly slow. They are the first thing to look at, most of all where
# many threads want the same few numbers.
#
# ## Where the real libraries go further
#
# - **Winograd and Fourier** methods exist for the gradients, too, and cuDNN chooses among them for
#   each of the three passes by itself.
# - **Strided gradients** are cut into four convolutions for a stride of 2, one for each sort of
#   pixel of section 1, none of which meets a zero.
# - **Overlapping**: dx is needed at once, by the layer before. dweight is needed at the end of the
#   step only. Frameworks that train on many GPUs send dweight to the others while the next layers
#   still run backwards.
# - **Not storing x**: dweight needs the input of every layer, which is most of the memory of
#   training. *Checkpointing* throws some inputs away and computes them again, as lesson 5 did with
#   a dropout mask. (It has nothing to do with the checkpoints of lesson 7, which are files.)
#
# ## Three questions
#
# <details><summary>1. A colleague forgets to turn the filter in the gradient of x. All of his tests pass. What do his filters look like?</summary>
#
# They stay the same when they are turned by half a turn, like a blur, or all ones. Tests need
# filters that are not symmetric, and the best are random ones. The checks of this course use those.
# </details>
#
# <details><summary>2. A layer that makes a picture twice as large is called a <em>transposed convolution</em>. Have you written one?</summary>
#
# Yes. It is the gradient of x of a convolution with stride 2, used forward: <code>conv2d_dx</code>
# as it is. And its gradient is an ordinary convolution.
# </details>
#
# <details><summary>3. In <code>scatter_dx</code>, would it help to let each thread first add up what it has for the same pixel?</summary>
#
# A thread has only one product for each pixel and filter, so there is nothing to add up, unless it
# takes all filters of a place. Then it has K products for each pixel of its window, and needs K
# times fewer atomics. But the bits still depend on the order. Collecting is that idea, carried to
# its end.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# [Lesson 10: the other layers](10_the_other_layers.ipynb). The product of matrices, climbed rung by
# rung up to the tensor cores; pooling that remembers where its maximum was; batch normalisation in
# training; and the optimisers.
