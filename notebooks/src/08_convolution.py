# %% [markdown]
# # 8 · Convolution
#
# **After this lesson** you can say what each result of a convolution is made of and how often each
# pixel is read, count its work and its bytes and tell from them what will be its limit, write it as
# a sum, with tiles in shared memory, and as a product of matrices, once with the matrix and once
# without ever making it.
#
# **You need** [lesson 2](02_reductions.ipynb) (shared memory, barriers, banks, access maps) and the
# roofline of [lesson 4](04_softmax_at_the_limit.ipynb).
#
# **Time:** 160 minutes; there are good places to pause after sections 3 and 5. All cells together
# run in less than half a minute in the simulator. On a GPU the speeds are measured on your own
# machine, otherwise you see recorded ones, where there are any yet. The words are collected in the
# [glossary](glossary.md).

# %%
from functools import cache

import matplotlib.cbook
import matplotlib.image
import numpy as np
import torch
import torch.nn.functional as F

from course_lib import SIMULATED, bench, cuda, plot, reference, results_table, simulator
from course_lib.teach import TODO, check, hint, progress, solution, use

f, ZERO = np.float32, np.float32(0)

# %% [markdown]
# ## 1 · A picture, seen through a window
#
# Lay a window of 3 × 3 pixels on a picture. Multiply each of the nine pixels by a number, and add
# up. That is one pixel of a new picture. Move the window on by one pixel and do it again, with the
# same nine numbers, and so on over the whole picture. This is a **convolution**. The nine numbers
# are its **filter** (also called its *weights*), and each of them is a **tap**.
#
# What it is good for depends on the numbers. Here are three filters. **Predict** what each of them
# does to a photograph, before you look: what becomes of a wall that has the same brightness
# everywhere? And of a place where dark meets bright?

# %%
blur = np.full((3, 3), 1 / 9)
upright = np.array([[1, 0, -1], [2, 0, -2], [1, 0, -1]])
lying = upright.T
filters = np.stack([blur, upright, lying])[:, None]  # K filters for 1 channel: (3, 1, 3, 3)

# %%
with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
    photo = matplotlib.image.imread(file, format="jpg")[20:532]
photo = photo.reshape(128, 4, 128, 4, 3).mean(axis=(1, 3)) / 255
grey = photo.mean(axis=2)[None, None]  # (N, C, H, W), one picture with one channel
found = reference.conv2d(grey, filters)[0]
plot.images([grey[0, 0], found[0], abs(found[1]), abs(found[2])],
            ["the photograph", "blur", "upright edges", "lying edges"], vmin=0, vmax=1,
            title="One photograph, and what three filters make of it")

# %% [markdown]
# The first filter takes the mean of nine neighbours. The second takes what is on the left minus what
# is on the right: 0 on a plain wall, and much at an upright edge. In a network nobody sets these
# numbers. They are learned, and hundreds of them at a time. That is the whole idea of a
# **convolutional network**: the same small filter everywhere, since a cat is a cat wherever it sits.
#
# ### What one result is made of
#
# A small picture, 6 × 6, dark on the left and bright on the right, and the second filter. Two
# neighbouring results are framed, with their windows. **Predict:** how many pixels do the two
# windows share?

# %%
x = np.repeat([[0, 0, 0, 9, 9, 9]], 6, axis=0)
y = reference.conv2d(x[None, None], upright[None, None])[0, 0]
plot.windows(x, upright, y, [(1, 1), (1, 2)], title="Two results, and the windows that they come from")

# %% [markdown]
# Six of nine. The windows **overlap**, and that is what makes a convolution interesting for us.
# Here is how often each pixel of x is read in all, for windows that move on by one pixel, and for
# windows that move on by two:

# %%
def times_read(size, stride):
    counts = np.zeros((size, size), dtype=int)
    for top in range(0, size - 2, stride):
        for left in range(0, size - 2, stride):
            counts[top : top + 3, left : left + 3] += 1
    return counts


plot.grids([times_read(7, 1), times_read(7, 2)], ["one pixel further", "two pixels further"],
           title="How often each pixel of a picture of 7 × 7 is read by windows of 3 × 3")

# %% [markdown]
# In the middle of a picture every pixel is read nine times. It *has* to be used nine times. It need
# not be fetched from memory nine times, and most of this lesson is about that.
#
# ### Padding, stride, dilation
#
# The result is smaller than the picture, since the window must not stick out. Three options change
# how it moves:
#
# - **padding**: put so many lines of zeros around the picture first. With a padding of 1 and a
#   filter of 3 × 3 the result is as large as the picture;
# - **stride**: move on by so many pixels at a time. A stride of 2 gives a result of half the height
#   and width;
# - **dilation**: leave gaps between the taps. With a dilation of 2 a filter of 3 taps reaches over
#   5 pixels, of which it reads the first, the third and the fifth.
#
# (Padding has the same name as the unused column of lesson 2, and nothing else in common with it.)

# %%
padded = reference.conv2d(x[None, None], upright[None, None], padding=1, stride=2)[0, 0]
plot.windows(x, upright, padded, [(0, 0), (1, 2)], padding=1, stride=2,
             title="Padding 1, stride 2")

# %% [markdown]
# ### Exercise: how large is the result?
#
# `size` pixels, a filter of `taps` taps: how many places can the window stop at? (Height and width
# do not know of each other, so one formula does for both. The filter always fits at least once.)

# %% exercise="output_size"
def output_size(size, taps, stride, padding, dilation):
    reach = TODO  # pixels from the first tap to the last one, both included
    return TODO


check("output_size", output_size)

# %%
hint("output_size")

# %% [markdown]
# ### Channels
#
# A photograph has three channels, and inside a network there are hundreds. A filter then has a 3 ×
# 3 window **for each channel**, and all the products are added up to *one* number. And there are
# $K$ such filters, each of which makes one channel of the result. With a **bias** for each filter:
#
# $$ y_{n,k,p,q} = b_k + \sum_{c=0}^{C-1} \sum_{r=0}^{R-1} \sum_{s=0}^{S-1}
# x_{n,\,c,\,h,\,w} \cdot \text{weight}_{k,c,r,s}
# \qquad h = p \cdot \text{stride} - \text{padding} + r \qquad w = q \cdot \text{stride} - \text{padding} + s $$
#
# It looks worse than it is. $(n, k, p, q)$ is the place of the result: picture, channel, row,
# column. $(c, r, s)$ walks over the filter. And the two small formulas say where tap $(r, s)$ lies
# on the picture. If that is outside, the tap meets a 0. (We leave out the dilation from here on: it
# would stand before $r$ and $s$.)
#
# | letter | what it counts | |
# |---|---|---|
# | N | pictures | |
# | C, H, W | channels, rows, columns of x | |
# | K, P, Q | channels, rows, columns of y | one filter for each channel of y |
# | R, S | rows and columns of a filter | |

# %% [markdown]
# ## 2 · A thread for each result
#
# The formula as it stands, with a thread for each number of y, in the order in which they lie in
# memory. It is called **direct** convolution. **Predict** two things before you write it. How many
# numbers does a thread read for a filter of 3 × 3 with 64 channels? And do neighbouring threads
# read neighbouring numbers?
#
# ### Exercise: direct convolution
#
# Any number of blocks may come, with enough threads for all results. `i` is the number of the
# result, in the order of memory: rows of Q numbers, P rows in a plane, K planes in a picture.

# %% exercise="conv2d_direct"
@cuda.jit
def conv2d_direct(x, weight, bias, y, stride, padding):
    C, H, W = x.shape[1:]
    R, S = weight.shape[2:]
    K, P, Q = y.shape[1:]
    i = cuda.grid(1)
    if i < y.size:
        n, k, p, q = TODO, TODO, TODO, i % Q
        total = bias[k]
        TODO  # the three sums; a tap outside of the picture adds nothing
        y[n, k, p, q] = total


check("conv2d_direct", conv2d_direct)

# %%
hint("conv2d_direct")

# %% [markdown]
# Yours and PyTorch's, on the photograph in colour, made smaller: three channels in, eight channels
# out.

# %%
rng = np.random.default_rng(0)
small = photo.reshape(32, 4, 32, 4, 3).mean(axis=(1, 3)).transpose(2, 0, 1)[None].astype(f)
weight, bias = rng.normal(size=(8, 3, 3, 3)).astype(f), rng.normal(size=8).astype(f)
y = np.zeros((1, 8, 16, 16), dtype=f)
kernel = use("conv2d_direct", conv2d_direct)
kernel[64, 32](small, weight, bias, y, 2, 1)
theirs = F.conv2d(*map(torch.tensor, (small, weight, bias)), stride=2, padding=1).numpy()
print(f"largest difference from PyTorch {abs(y - theirs).max():.0e}")

# %% [markdown]
# Now look inside. The example for the rest of this lesson has one picture of 16 × 16 pixels, four
# channels, eight filters of 3 × 3, padding 1, no bias. `x` has 4 KB, so y has 8 KB and the weights
# have 1.1 KB.

# %%
x = rng.normal(size=(1, 4, 16, 16)).astype(f)
weight = rng.normal(size=(8, 4, 3, 3)).astype(f)
expected = reference.conv2d(x, weight, padding=1)
y, none = np.zeros((1, 8, 16, 16), dtype=f), np.zeros(8, dtype=f)
with simulator.trace() as direct_trace:
    kernel[32, 64](x, weight, none, y, 1, 1)
print(f"largest error {abs(y - expected).max():.0e}")
plot.access_map(direct_trace, next(site for site in direct_trace.sites if site.array == "x"), steps=6)

# %% [markdown]
# The map shows the first warp. It has two rows of results. Its requests go from tap to tap: each
# line is the one above, moved on by one pixel. (The first three lines have fewer lanes: that is tap
# row 0, which lies above the picture for the first row of results.) So the order is good. But the
# same numbers are asked for again and again. How often? The unit of this picture is the size of x:

# %%
def asked_for(trace):
    """What the kernel asks memory for, in sizes of x: (array, "load" or "store", amount)."""
    sites = [site for site in trace.sites if site.space == "global" and site.array != "bias"]
    return [(site.array, site.op, site.bytes / (4 * 4 * 16 * 16)) for site in sites]


plot.asked({"direct": asked_for(direct_trace)}, title="What the threads of the direct kernel ask for")

# %% [markdown]
# Each pixel is asked for by nine taps of eight filters, 72 times, less what is outside: 66. And
# with each pixel a weight. All lanes of a warp want the *same* weight, so that is a single sector
# for a request; but it is a request all the same. In the inner loop there are **two loads for one
# multiplication**.

# %% [markdown]
# ## 3 · What will be the limit?
#
# Is that bad? Lesson 4 had a picture for such questions, the roofline: count the FLOPs and the
# bytes that *must* be moved, and divide. With at least 16 FLOPs per byte, an H200 is limited by
# arithmetic (67 TFLOP/s in float32), with less by memory (4.2 TB/s).
#
# There are two sorts of convolution to compare. In the usual one every filter looks at all
# channels. With **groups** the channels are dealt to so many parts, and a filter looks only at the
# $C / \text{groups}$ channels of its own part. The extreme is one channel for each: the **depthwise
# convolution**, which you met in EfficientNet.
#
# ### Exercise: FLOPs and bytes
#
# `N` pictures with `C` channels of `H` × `H` pixels, `K` filters of `R` × `R`, padded such that y
# is as high and wide as x, float32. A multiplication is a FLOP, and an addition is another one.
# Bytes: x, the weights and y, each moved once.

# %% exercise="convolution_work"
def convolution_work(N, C, K, H, R, groups):
    flops = TODO
    n_numbers = TODO  # of x, of the weights, of y
    return flops, 4 * n_numbers


check("convolution_work", convolution_work)

# %%
hint("convolution_work")

# %% [markdown]
# **Predict** for each of these layers, 32 pictures of 64 × 64, on which side of 16 it will be.

# %%
work = use("convolution_work", convolution_work)
LAYERS = {"3 × 3, 64 → 128 channels": (32, 64, 128, 64, 3, 1), "1 × 1, 64 → 128": (32, 64, 128, 64, 1, 1),
          "3 × 3, 3 → 64 (first layer)": (32, 3, 64, 64, 3, 1), "3 × 3 depthwise, 64": (32, 64, 64, 64, 3, 64)}
points = []
for label, layer in LAYERS.items():
    flops, n_bytes = work(*layer)
    best = min(67, flops / n_bytes * 4.2)  # TFLOP/s that the roof allows
    points.append({"label": label, "kind": "ours", "intensity": flops / n_bytes, "tflops": best})
    print(f"{label:28} {flops / 1e9:6.2f} · 10⁹ FLOPs, {n_bytes / 1e6:4.0f} MB: "
          f"{flops / n_bytes:6.1f} FLOPs per byte, {flops / best / 1e6:5.1f} µs at best")

# %%
plot.roofline(points, 4200, 67, title="Four layers, where they could be at best (float32, H200)")

# %% [markdown]
# One operation, and two worlds. In the 3 × 3 layer each number of x is used by $9 \cdot 128$
# products, and each number of y is the sum of $9 \cdot 64$. In the depthwise one it is 9 and 9,
# whatever the number of channels. So **the usual convolution is limited by arithmetic, and the
# depthwise one by memory**. For the depthwise one everything is done when each byte is moved once;
# it is a kernel like those of lessons 1 to 6, and a thread for each result, with good access and a
# cache that catches the overlap, is nearly all it takes. The course's rung `depthwise` takes one
# step more: a thread makes a few neighbouring results, so that a number it has loaded serves
# several of them.
#
# The usual one is new to us. Memory is *not* its limit, if the kernel is good. But look at what
# your direct kernel asks for: 8 bytes for each pair of FLOPs, that is a quarter of a FLOP per byte,
# hundreds of times less than the layer has to offer. All of this reuse has to be made by someone.
# The caches do some of it by themselves. But even the caches have a roof.
#
# ### A roof on every floor
#
# Lesson 2 said: shared memory has 32 banks, and each serves one word in a turn. A turn is a clock
# cycle. So a multiprocessor reads at most 32 numbers in a cycle out of its shared memory (the L1
# cache, which is the same piece of hardware, is no better). And it can do 128 multiplications with
# additions in a cycle: that is what 67 TFLOP/s are, divided by 132 multiprocessors and 2 · 10⁹
# cycles.
#
# **Predict:** a kernel has two loads from shared memory for each multiplication. What share of the
# arithmetic can it use at most?

# %%
words, products = 32, 128  # per cycle: what a multiprocessor reads, and what it multiplies and adds
for loads, text in ((2, "two loads for a product"), (1, "one"), (1 / 4, "one for four products")):
    print(f"{text:24} at most {min(1, words / loads / products):4.0%} of the arithmetic")

# %% [markdown]
# One eighth. (Where all lanes want the *same* word, one request still takes a turn.) To get to the
# limit, a number that was fetched from shared memory has to be used *four times* before the next
# one is fetched, and that can only happen in registers. Keep this in mind. It says what the ladder
# of this lesson must lead to: first from memory to shared memory, then from shared memory to
# registers.

# %% [markdown]
# A good place for a break. Next, the first of these two steps.

# %% [markdown]
# ## 4 · A tile and its halo
#
# Let a block make a **tile** of 8 × 8 results. Their windows overlap a lot. All together they need
# the 8 × 8 pixels, and one more line on each side: 10 × 10. This rim is called the **halo**, as
# around the moon. So the block fetches 100 pixels into shared memory once, and then each of its 64
# threads reads its nine from there.

# %%
tile = np.full((12, 12), " ")
tile[1:11, 1:11], tile[2:10, 2:10] = "h", "t"
plot.grids([tile], ["t: the tile's own pixels, h: its halo"], marked=[[(1, 1, 3, 3), (8, 8, 3, 3)]],
           shade=[(tile == "t") + 0.3 * (tile == "h")],
           title="What a block reads; framed are the windows of its first and its last result")

# %% [markdown]
# **Predict:** how many pixels does the block fetch for each result, where it was nine before? What
# would it be for tiles of 4 × 4? And of 32 × 32?

# %%
for side in (4, 8, 16, 32):
    print(f"tiles of {side:2} × {side:2}: {(side + 2) ** 2 / side**2:.2f} pixels for each result")

# %% [markdown]
# ### Exercise: the tile
#
# A block has 64 threads. `blockIdx.x` and `blockIdx.y` say which tile, `blockIdx.z` says which
# picture and which filter. The channels come one after another through the same shared memory, so
# remember lesson 2: one barrier after writing, one after reading. Filters of 3 × 3, stride 1,
# padding 1.

# %% exercise="conv2d_tiled"
TILE, HALO = 8, 10


@cuda.jit
def conv2d_tiled(x, weight, y):
    halo = cuda.shared.array((HALO, HALO), np.float32)
    C, H, W = x.shape[1:]
    K, t, total = y.shape[1], cuda.threadIdx.x, ZERO
    n, k = cuda.blockIdx.z // K, cuda.blockIdx.z % K
    top, left = TILE * cuda.blockIdx.y, TILE * cuda.blockIdx.x
    row, col = t // TILE, t % TILE
    for c in range(C):
        TODO  # 1. fetch the halo of channel c: 100 pixels, 64 threads; 0 outside of the picture
        for r in range(3):
            for s in range(3):
                total += TODO * weight[k, c, r, s]  # 2. and where do the barriers belong?
    if TODO:  # 3. is this result inside of y?
        y[n, k, top + row, left + col] = total


check("conv2d_tiled", conv2d_tiled)

# %%
hint("conv2d_tiled")

# %%
kernel, y = use("conv2d_tiled", conv2d_tiled), np.zeros_like(y)
with simulator.trace() as tiled_trace:
    kernel[(2, 2, 8), 64](x, weight, y)
print(f"largest error {abs(y - expected).max():.0e}")
plot.asked({"direct": asked_for(direct_trace), "tiled": asked_for(tiled_trace)},
           title="Asked for, from memory (not from shared memory)")

# %% [markdown]
# x is asked for 10 times instead of 66. (Eight filters times 1.56 would be 12.5, but a part of the
# halo is outside of the picture.) The weights are no better: 72 times, since now the taps that meet
# a 0 outside of the picture are multiplied as well. There is more to be had: a block
# that makes *eight filters* of its tile reads x once for all of them. That is what the course's
# rung `tiled` does, and it puts the weights into shared memory, too.
#
# Where does the halo come from, in sectors?

# %%
reads = next(site for site in tiled_trace.sites if site.array == "x")
plot.access_map(tiled_trace, reads, steps=6, title="The halo is fetched")

# %% [markdown]
# Rows of ten pixels, which begin anywhere, so a sector is often fetched for a few numbers. Wider
# tiles are better at this. And that is not the main trouble. In the inner loop there is still a
# load from shared memory, and a load of a weight, for each product: one eighth of the arithmetic.
# What is needed is reuse in *registers*: a thread should make many results at once, of several
# pixels *and* of several filters. There is an operation for which this is very well understood. So
# let us make a convolution look like it.

# %% [markdown]
# ## 5 · A convolution is a product of matrices
#
# The **product of two matrices** $A$ (with $M$ rows and $L$ columns) and $B$ ($L$ rows and $O$
# columns) has $M$ rows and $O$ columns. Each element is a sum over a row of $A$ and a column of
# $B$:
#
# $$ C_{i,j} = \sum_{l=1}^{L} A_{i,l} \cdot B_{l,j} $$
#
# Libraries call it **GEMM**, *general matrix multiplication*. It is the best studied kernel there
# is, and chips have units of their own for it.
#
# Now look at a convolution again. A result is a sum, too: over the taps of a filter and over what
# these taps meet. Write each filter as *one row* of numbers. That is matrix $A$: $K$ rows, $C \cdot
# R \cdot S$ columns. Then write what the window of each result sees as *one column*. That is matrix
# $B$: $C \cdot R \cdot S$ rows, and a column for each of the $N \cdot P \cdot Q$ results of a
# filter. The product of the two has every filter with every window. It *is* the convolution.
#
# The second matrix is made by a kernel called **im2col**, "image to columns". Here it is for a picture of 4 × 4 and a filter of
# 2 × 2. The pixels are numbered, so that one sees where each goes. **Predict** how often the 5 will be there.

# %%
picture = np.arange(16).reshape(4, 4)
windows = [picture[p : p + 2, q : q + 2].ravel() for p in range(3) for q in range(3)]
matrix = np.stack(windows, axis=1)
plot.grids([picture, matrix], ["x", "the matrix: a column for each window"],
           marked=[[(0, 0, 2, 2), (1, 1, 2, 2)], [(0, 0, 4, 1), (0, 4, 4, 1)]],
           title="im2col of a picture of 4 × 4, for a filter of 2 × 2")

# %% [markdown]
# Four times. Every pixel is *written down* as often as it is read: in the middle $R \cdot S$ times.
#
# ### Exercise: im2col
#
# A thread for each element of the matrix `columns`. Its row is a `term` of the sum, its column a
# `pixel` of y. Both are numbered as the arrays lie in memory: `term` counts $(c, r, s)$, and
# `pixel` counts $(n, p, q)$.

# %% exercise="im2col"
@cuda.jit
def im2col(x, columns, R, S, P, Q, stride, padding):
    H, W = x.shape[2:]
    i = cuda.grid(1)
    if i < columns.size:
        term, pixel = i // columns.shape[1], i % columns.shape[1]
        c, r, s = TODO, TODO, TODO
        n, p, q = TODO, TODO, TODO
        columns[term, pixel] = TODO  # the pixel of x that tap (r, s) meets, or 0


check("im2col", im2col)

# %%
hint("im2col")

# %% [markdown]
# Where does yours read, and where does it write? (Two requests of each are shown.)

# %%
kernel, columns = use("im2col", im2col), np.zeros((4 * 3 * 3, 16 * 16), dtype=f)
with simulator.trace() as im2col_trace:
    kernel[144, 64](x, columns, 3, 3, 16, 16, 1, 1)
plot.access_map(im2col_trace, steps=2, title="im2col: rows of x become rows of the matrix")

# %% [markdown]
# Neighbouring threads have neighbouring pixels, so both are coalesced. (The reads are moved by a
# pixel, for tap 0 of the filter, and its first row lies above the picture.) The product itself is
# left to NumPy for the moment. (`@` is Python's sign for it.)

# %%
y = (weight.reshape(8, 36) @ columns).reshape(8, 1, 16, 16).swapaxes(0, 1)
print(f"largest error {abs(y - expected).max():.0e}")

# %% [markdown]
# (The product has the filter first and then the pictures; y has the picture first. That is why the
# axes are changed over in the end. With one picture it makes no difference.)
#
# ### What it costs
#
# The matrix has to be written, and read again by the product. **Predict** how many times as large
# as x it is for the layers of section 3. Then compare the time that this copying takes, at 4.2
# TB/s, with the time of the arithmetic.

# %%
for label, (N, C, K, H, R, groups) in LAYERS.items():
    x_mb = 4 * N * C * H * H / 1e6
    columns_mb = R * R * x_mb
    copying, flops = 2 * columns_mb / 4.2, work(N, C, K, H, R, groups)[0]
    print(f"{label:28} x {x_mb:5.1f} MB, matrix {columns_mb:6.1f} MB: {copying:5.1f} µs to write and read it; "
          f"arithmetic {flops / 67e6:5.1f} µs")

# %% [markdown]
# Nine times as large, as it had to be. For the large layer, half as much time again as the
# arithmetic in float32 takes; and with the tensor cores of section 7, which multiply eight times as
# fast, several times as much. For the depthwise layer it would be madness. For a filter of 1 × 1
# the matrix *is* x, and there is nothing to be done at all: a 1 × 1 convolution is a product of
# matrices as it stands.
#
# And it takes room. 302 MB for one layer is no trifle, if a network has fifty. (The course's rung
# `im2col` therefore works on a few pictures at a time, and uses the same 64 MB again and again.)
# Still, for many years this was how convolutions were computed: a simple kernel, and a library's
# best one after it.

# %% [markdown]
# Another good place for a break. Next, the same product without the matrix.

# %% [markdown]
# ## 6 · A matrix that is never made
#
# How does a fast product of matrices work? Like your tiled kernel: a block makes a tile of the
# result. It goes along the sum in small steps. In each step it fetches a small tile of $A$ and a
# small tile of $B$ into shared memory, and all threads use all of it.
#
# Now the trick. The kernel fetches element $(\text{term}, \text{pixel})$ of matrix $B$ into shared
# memory. *It does not care where that comes from.* You have a formula that says which pixel of x it
# is. So do not make the matrix, and fetch **from x** instead, at the moment when the element is
# needed. The matrix exists only as an index calculation. This is **implicit GEMM**, and nearly all
# fast convolutions are of this kind.
#
# ### Exercise: implicit GEMM
#
# A block of 64 threads makes 8 filters × 8 pixels of the result, and takes 8 terms in each step: tile `a` has 8 filters × 8 terms
# of the weights (which come as a matrix, one row for each filter), and tile `b` has 8 terms × 8 pixels. Each thread fetches one
# number of each. The first is there. **Predict:** which three things may be *missing*, so that `b` must get a 0?

# %% exercise="implicit_gemm"
@cuda.jit
def implicit_gemm(x, weight, y, R, S, stride, padding):
    a = cuda.shared.array((TILE, TILE), np.float32)
    b = cuda.shared.array((TILE, TILE), np.float32)
    N, _, H, W = x.shape
    (K, n_terms), (P, Q) = weight.shape, y.shape[2:]
    row, col, total = cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE, ZERO
    k, pixel = TILE * cuda.blockIdx.y + row, TILE * cuda.blockIdx.x + col
    n, p, q = pixel // (P * Q), pixel // Q % P, pixel % Q
    for first in range(0, n_terms, TILE):
        known = k < K and first + col < n_terms
        a[row, col] = weight[k, first + col] if known else ZERO
        term = first + row
        b[row, col] = TODO  # 1. element (term, pixel) of the matrix, fetched from x
        TODO  # 2. add up the products of a's row and b's column; and the barriers
    if k < K and n < N:
        y[n, k, p, q] = total


check("implicit_gemm", implicit_gemm)

# %%
hint("implicit_gemm")

# %%
kernel, y = use("implicit_gemm", implicit_gemm), np.zeros_like(y)
with simulator.trace() as implicit_trace:
    kernel[(32, 1), 64](x, weight.reshape(8, 36), y, 3, 3, 1, 1)
print(f"largest error {abs(y - expected).max():.0e}")

# %% [markdown]
# To compare it with im2col, the product must be counted as well, which NumPy has made for us. The same kernel can make it: for
# a filter of 1 × 1 the matrix *is* the picture (section 5), so give it `columns` as a picture of 36 channels.

# %%
product = np.zeros_like(y)
with simulator.trace() as product_trace:
    kernel[(32, 1), 64](columns.reshape(1, 36, 16, 16), weight.reshape(8, 36), product, 1, 1, 1, 0)
print(f"largest error {abs(product - expected).max():.0e}")
traces = {"direct": direct_trace, "tiled": tiled_trace, "im2col": im2col_trace,
          "its product": product_trace, "implicit GEMM": implicit_trace}
found = {label: asked_for(trace) for label, trace in traces.items()}
found["its product"] = [("columns" if name == "x" else name, *rest) for name, *rest in found["its product"]]
found["im2col"] += found.pop("its product")
found = {label.replace("im2col", "im2col and its product"): parts for label, parts in found.items()}
plot.asked(found, title="Asked for, from memory: the matrix that is made costs 18 times x")

# %% [markdown]
# (What may be missing: the term, if the last step has fewer than eight; the pixel, if the last tile
# has fewer; and what the tap meets, if that is outside of the picture.)
#
# Each element of the matrix is fetched once for eight filters, and each weight once for eight
# pixels. That makes 8.3 times x (less than 9, since the padding is not read), and 9 times x for the
# weights. Nothing is written but y. im2col writes the matrix and reads it again, 9 times x each. And it is the *size of the tile* that decides: with tiles of
# 128 × 128 it would be a sixteenth of that.
#
# The access map of `b`, which is im2col's without im2col:

# %%
reads = next(site for site in implicit_trace.sites if site.array == "x")
plot.access_map(implicit_trace, reads, steps=6, title="Elements of a matrix that does not exist")

# %% [markdown]
# A warp fetches four terms of eight pixels: four pieces of a row of x.
#
# ### And the second step: registers
#
# Look at the inner loop of your kernel: `total += a[row, j] * b[j, col]`. Two loads from shared
# memory for one product. That is one eighth of the arithmetic, as before! But now the cure is easy
# to see. Let a thread make **8 × 8 results**. It reads 8 numbers of `a` and 8 numbers of `b` into
# registers, and multiplies each with each:
#
# | results of a thread | numbers read | products | numbers read for a product |
# |---|---|---|---|
# | 1 × 1 | 2 | 1 | 2 |
# | 4 × 4 | 8 | 16 | 1/2 |
# | 8 × 8 | 16 | 64 | 1/4 |
#
# And 1/4 was just what section 3 asked for. 64 sums, and the 16 numbers, need 80 registers; 16 × 16
# results would need 288, more than a thread can have. It is the same roofline on every floor: *the
# larger the tile, the more FLOPs for each byte*. A tile of results in shared memory protects the
# memory, a tile in registers protects the shared memory.
#
# The course's rung `implicit_gemm` does this: blocks of 64 × 64 results, 8 × 8 for each thread, and
# while one step is multiplied, the tiles of the next are already on their way by **asynchronous
# copies** (lesson 4) into a second pair of tiles. (Two pairs that take turns are called *double
# buffering*.) How one gets there step by step, for plain matrices, is the ladder of lesson 10.

# %% [markdown]
# ## 7 · A glimpse of tensor cores
#
# Since 2017 each multiprocessor has units that multiply small matrices: **tensor cores**. One
# instruction of a warp, `mma`, multiplies a matrix of 16 × 8 with one of 8 × 8, and adds the
# product to 16 × 8 sums. On an H200 they can do eight times as many FLOPs as the usual units, or
# sixteen times with numbers of 16 bits. To use them, a convolution has to be a product of matrices,
# and you have just turned it into one.
#
# There is a price. Tensor cores do not multiply float32 numbers. They take bfloat16, float16, or
# TF32: float32 without its last 13 binary digits. (The sums have all digits of float32; but a tensor
# core cuts off what does not fit, where the usual units round.) How much is lost?

# %%
def tf32(numbers):
    bits = (numbers.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)  # rounded
    return bits.view(f)


def error(y):
    return np.linalg.norm(y - expected) / np.linalg.norm(expected)


def convolve(x, weight):
    return reference.conv2d(x, weight, padding=1)  # products and sums of 64 bits


high, low = (tf32(x), tf32(weight)), (tf32(x - tf32(x)), tf32(weight - tf32(weight)))
three = convolve(*high) + convolve(high[0], low[1]) + convolve(low[0], high[1])
print(f"TF32: {error(convolve(*high)):.0e}; three products: {error(three):.0e}")

# %% [markdown]
# TF32 leaves three correct digits. For training a network that is mostly enough. And when it is
# not, there is a lovely trick: write each number as a **sum of two** TF32 numbers, the number
# rounded, and what the rounding has left over. Then
#
# $$ (x_1 + x_2) \cdot (w_1 + w_2) = x_1 w_1 + x_1 w_2 + x_2 w_1 + \underbrace{x_2 w_2}_{\text{too small to matter}} $$
#
# Three products on tensor cores, and about as exact as float32 (whose own rounding is about 1e-7). A
# third of eight times is still more than twice as fast as float32. This is called **split TF32**,
# and the course's rung `tensor_core`, which `variant="auto"` takes for most layers, does this with
# float32. (For long sums it does a little better; see section 8.)
#
# All rungs of `course_lib/kernels/conv2d`, on a corner of our example. You know all of them but
# `few_channels`. It is made for first layers, with one to four channels, for which memory is the
# limit, and uses no tensor cores. Our corner has one channel, so `variant="auto"` takes it here, and
# nothing is rounded to TF32 even if that is allowed:

# %%
from course_lib.kernels import conv2d

x, weight = np.ascontiguousarray(x[:, :1, :6, :6]), np.ascontiguousarray(weight[:, :1])
expected, corner = convolve(x, weight), (cuda.to_device(x), cuda.to_device(weight))
for variant in conv2d.FORWARD:
    if variant != "depthwise":  # for groups of one channel only
        y = conv2d.forward(*corner, padding=1, variant=variant).copy_to_host()
        print(f"{variant:14} error {error(y):.0e}")
y = conv2d.forward(*corner, padding=1, variant="auto", precision="tf32").copy_to_host()
print(f"{'auto':14} error {error(y):.0e}, with TF32 allowed")

# %% [markdown]
# ## 8 · Measured
#
# The measurements come from the course's benchmark `conv2d`. On a GPU, this function runs it;
# without one, it finds what was recorded, or says that nothing was.

# %%
recorded = bench.load_records()


@cache
def measured_here(shape):
    from course_lib.benchmarks import conv2d as benchmark

    return {"records": benchmark.run(shapes=[shape], directions=["forward"])}


@cache
def measured(name, shape):
    """The measurement called `name`; None, and a line that says so, if there is none."""
    found = bench.find(recorded if SIMULATED else measured_here(shape), name=name, shape=shape)
    device = recorded["device"]["name"] if SIMULATED else bench.device_facts()["name"]
    if found:
        return found[0] | {"source": (device, results_table.when(found[0]))}
    return print(f"{name} of {' × '.join(map(str, shape))} has not been measured on a GPU yet.")


print("recorded on an", recorded["device"]["name"])

# %%
LIMITS = {"fma": "float32", "tf32": "TF32", "bfloat16": "bfloat16", "split": "split TF32"}


def show(record, title, *limits):
    if record is None:
        return None
    device, date = record["source"]
    peaks = {LIMITS[kind]: record["peaks_tflops"][kind] for kind in limits}
    return plot.arithmetic(record["rows"], peaks, title=title, device=device, date=date)

# %% [markdown]
# First the whole ladder, at a small size: 8 pictures, 32 channels, 32 filters of 3 × 3, 28 × 28
# pixels. That is 0.1 · 10⁹ FLOPs, some two microseconds of arithmetic. **Predict** the order of the
# rungs; and whether any of them can come near a limit, if the work is so little. (`ours` is what
# runs if no rung is asked for.)

# %%
small = measured("conv2d.forward", (8, 32, 32, 28))
best = max(row["tflops"] for row in small["rows"]) if small else 0
show(small, "8 pictures, 32 → 32 channels, 28 × 28, float32: the best rate is\n"
     f"{best / small['peaks_tflops']['fma']:.0%} of the {small['peaks_tflops']['fma']:.0f} TFLOP/s of the float32 units" if small else "")

# %% [markdown]
# None comes near; the limit is far outside of the picture. One launch, and the way of a number from memory through the sum and back, take
# longer than this arithmetic. And large tiles do not pay here: with tiles of 64 × 64 results, 98
# blocks have all the work, on 132 multiprocessors, and half of each tile is empty, since there are
# only 32 filters. So `implicit_gemm` is behind `tiled`. cuDNN is ahead of us.
#
# Then the three sizes that the course holds itself to, in float32 accuracy. There are two limits, for two ways to compute. cuDNN,
# NVIDIA's library, was not allowed TF32 here, so its limit is that of the float32 units. Ours writes each number in two parts, as in
# section 7, and does the two small products in bfloat16, of which one instruction takes twice as many terms: three products cost
# as much as two of TF32, so its limit is *half* of TF32's. **Predict** what share of its limit a good kernel gets, and whether cuDNN
# is behind or ahead. (32 × 64 → 128, 64 × 64 stands for 32 pictures, 64 channels of x, 128 of y, 64 × 64 pixels.)

# %%
SHAPES = [(32, 64, 128, 64), (32, 128, 128, 56), (64, 256, 256, 28)]


def best_of(record, who):
    """The fastest row of `who`, in the memory format that suits it best."""
    N, C, K, H = record["shape"]
    found = [row for row in record["rows"] if row["label"].startswith(who)]
    return max(found, key=lambda row: row["tflops"]) | {"label": f"{N} × {C} → {K}, {H} × {H}: {who}"}

# %%
def show_sizes(records):
    if not all(records):
        return None
    rows = [best_of(record, who) for record in records for who in ("ours", "cuDNN")]
    ratios = [ours["tflops"] / cudnn["tflops"] for ours, cudnn in zip(rows[::2], rows[1::2], strict=True)]
    peaks, (device, date) = records[0]["peaks_tflops"], records[0]["source"]
    limits = {"float32 units": peaks["fma"], "numbers in two parts": peaks["tf32"] / 2}
    title = f"float32: ours is {min(ratios):.1f} to {max(ratios):.1f} times as fast as cuDNN"
    return plot.arithmetic(rows, limits, title=title, device=device, date=date)


show_sizes([measured("conv2d.forward", shape) for shape in SHAPES])

# %% [markdown]
# Now ours is ahead, at all three sizes, and reaches a third to a half of its own limit. And a bar may be
# *above* a limit, which is no mistake. The
# roof holds for the FLOPs that are really done. cuDNN keeps to the float32 units,
# and yet at the third size it is above their limit. Most likely it does fewer FLOPs: for filters of
# 3 × 3 there is a way to need fewer products: **Winograd's** method computes four neighbouring
# results with 16 products for each channel instead of 36, at the price of more additions (and a
# little accuracy). The TFLOP/s in these pictures are *useful* ones: what the formula needs, divided
# by the time.
#
# The same with fewer digits, where cuDNN may use tensor cores, too. **Predict** who is ahead now.
# bfloat16 wants its channels last in memory (lesson 6), as terms of the sum then lie side by side:

# %%
for name in ("conv2d.forward.tf32", "conv2d.forward.channels-last"):
    for shape in SHAPES:
        if record := measured(name, shape):
            ours, cudnn = (max(row["tflops"] for row in record["rows"] if row["label"].startswith(who))
                           for who in ("ours", "cuDNN"))  # in the memory format that suits it best
            limit = record["peaks_tflops"][record["limit"]]
            print(f"{LIMITS[record['limit']]:9} {str(shape):20} ours {ours:6.1f} TFLOP/s, cuDNN "
                  f"{cudnn:6.1f}, limit {limit:,.0f} ({record['source'][0]}, {record['source'][1]})")

# %% [markdown]
# **Explaining the gap.** What keeps a kernel from its limit, when arithmetic is the limit?
#
# - *The last round.* The first size has 1,024 tiles of 128 × 128 results for 132 multiprocessors.
#   That is 7.8 for each, and in the last round some stand idle. So the course's kernels have tiles
#   of several sizes, and take the one with which all rounds together are likely to be shortest.
# - *Everything else.* Index calculations, loads, and barriers are instructions as well, and each of
#   them takes a place at which a product could have been started.
# - *Tensor cores are hungry.* They multiply so fast that shared memory hardly keeps up. `mma` needs
#   its factors in registers first. The H100 and the H200 let tensor cores read them straight from
#   shared memory, by an instruction for four warps at a time (`wgmma`). The course takes it where
#   the chip has it, in large layers of stride 1, for the forward pass and for dx (lesson 9). It is
#   what makes float32 so fast above. But somebody has to split all these numbers into two parts, and
#   that takes time as well.
# - *Everybody stores at once.* All multiprocessors begin together, and get to the end of their
#   tiles together. Then all of them write, and none multiplies.
# - *The format.* In TF32 cuDNN's numbers above are of images with their channels last, which it
#   prefers by far; ours are of images as PyTorch makes them. The kernel wants channels last as
#   well, so that another one has to transpose them first (the same launch puts the weights in
#   order), and its time counts. bfloat16 has its channels last on both sides, and there cuDNN is
#   simply the better kernel.
# - *Rounding.* How exact a result is, is a part of the comparison. In float32, numbers in two parts
#   err a little more than cuDNN's. The records keep each candidate's error:

# %%
record = measured("conv2d.forward", SHAPES[0])
for row in record["rows"] if record else []:
    print(f"{row['label']:22} {row['tflops']:6.1f} TFLOP/s, error {row['error']:.1e}")
print("on an {} ({})".format(*record["source"]) if record else "Not measured yet.")

# %% [markdown]
# ## What the profiler says
#
# Requests and sectors of the four kernels, as the profiler would count them; you have them from the
# tracer. And, new in this lesson, the requests to *shared* memory, which no cache helps with.

# %%
print(f"{'kernel':16}{'global loads':>14}{'sectors':>10}{'shared loads':>14}{'bank conflicts':>16}")
for label, trace in traces.items():
    loads = [site for site in trace.sites if site.op == "load"]
    memory, shared = ([site for site in loads if site.space == s] for s in ("global", "shared"))
    print(f"{label:16}{sum(s.requests for s in memory):14,}{sum(s.sectors for s in memory):10,}"
          f"{sum(s.requests for s in shared):14,}{sum(s.bank_conflicts for s in shared):16,}")

# %% [markdown]
# (im2col and its product belong together.) Of the complete ones, implicit GEMM has the fewest global loads, and has moved the trouble into
# the column of shared loads: two for each product of a warp. (The tiled kernel has bank conflicts:
# the rows of its halo are ten numbers long, so that the four rows which a warp reads meet in some
# banks.) The rung with 8 × 8 results per thread divides that column by eight. For a kernel that is
# limited by arithmetic, look first at the line *tensor pipe* (or *FMA pipe*, for the usual units:
# *fused multiply-add*, a product and a sum in one instruction) of the report: how busy the units
# that multiply are. If they are not, look for who keeps them waiting: shared memory, barriers, or
# copies that come too late.
#
# ## Where the real libraries go further
#
# - **cuDNN** has dozens of kernels for one convolution: implicit GEMM with many sizes of tiles,
#   Winograd, Fourier transforms for large filters. In benchmark mode it tries them on your sizes,
#   and keeps the fastest.
# - **CUTLASS**, NVIDIA's open library of matrix products, is where one can read how it is done on
#   each chip.
# - Newer chips have a copying unit (*TMA*) which does the index calculation of implicit GEMM *in
#   hardware*: a mode of it is called im2col.
# - **Fusing** goes on: bias, batch normalisation and ReLU are applied to the sums while they are
#   still in registers. A whole layer more, and not a byte moved for it.
#
# ## Three questions
#
# <details><summary>1. A network for phones replaces each 3 × 3 convolution by a depthwise 3 × 3 and a 1 × 1. Eight times fewer FLOPs. Will it be eight times
# as fast on an H200?</summary>
#
# No. The depthwise part is limited by memory, and the 1 × 1 part reads and writes as many bytes as
# the old layer did, and now there are two layers. The bytes have doubled. On a chip with little
# arithmetic for each byte, such as a phone's, it pays; with tensor cores, FLOPs are cheap.
# </details>
#
# <details><summary>2. In <code>conv2d_tiled</code> somebody lets the threads at the edge of the picture return before the loop, since they have
# nothing to write. What happens?</summary>
#
# They had something to do: to fetch parts of the halo. And the barriers wait for them. The
# sanitizer reports threads that have left before a barrier.
# </details>
#
# <details><summary>3. Filters of 1 × 1, stride 1, no padding: which rungs of the ladder become the same?</summary>
#
# There is no overlap, so tiles have no halo; im2col copies x as it is; and implicit GEMM is plain
# GEMM. All that is left of the ladder is how well a product of matrices is computed.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# [Lesson 9](09_convolution_backward.ipynb) runs all of this backwards. There are two gradients to
# be found, that of the picture and that of the weights, and both of them turn out to be
# convolutions.
