# %% [markdown]
# # 6 · Squeeze and excitation
#
# **After this lesson** you can say why a network weighs its channels, write the four kernels of a
# squeeze-and-excitation block in both layouts of memory, fuse them so that blocks exchange one short
# vector, arrange work so that a second reading comes from the L2 cache, let blocks wait for each other
# without ever locking each other up, and run the whole block backwards.
#
# **You need** [lesson 2](02_reductions.ipynb) (barriers, shuffles, atomics, fences) and
# [lesson 5](05_fusing_softmax.ipynb) (counting bytes). Of [lesson 4](04_softmax_at_the_limit.ipynb) it
# helps to remember the caches.
#
# **Time:** 150 minutes; there are good places to pause after sections 2 and 5. All cells together
# run in less than a minute in the simulator. On a GPU the speeds are measured on your own
# machine, otherwise you see recorded ones, where there are any yet. The words are collected in the
# [glossary](glossary.md).

# %%
import math
import textwrap
from functools import cache

import matplotlib.cbook
import matplotlib.image
import numpy as np
import torch
import torchvision

from course_lib import SIMULATED, bench, cuda, plot, results_table, simulator
from course_lib.runtime.intrinsics import warp_sum
from course_lib.teach import TODO, check, hint, progress, solution, use

f, ZERO, ONE = np.float32, np.float32(0), np.float32(1)

# %% [markdown]
# ## 1 · Channels that one should listen to less
#
# Inside a network, a picture is no longer red, green and blue. It has dozens or hundreds of
# **channels**, each of which shows where in the picture something is: an edge, a colour, fur. A
# learned layer makes them. We make four by hand, from our photograph and from the same photograph with
# noise in it, as cameras take them at night.

# %%
with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
    photo = matplotlib.image.imread(file, format="jpg")[20:532]
photo = photo.reshape(128, 4, 128, 4, 3).mean(axis=(1, 3)) / 255
noise = np.random.default_rng(0).normal(0, 0.12, photo.shape)
photos = {"by day": photo, "at night": np.clip(photo + noise, 0, 1)}
names = ["brightness", "warm colours", "fine edges", "coarse edges"]

# %% [markdown]
# The channels: how bright a pixel is; how much more red than blue it has; how much it differs
# from its neighbours (fine edges); and the same after everything was blurred, which leaves the coarse
# edges only.

# %%
def blur(grey, size=7):
    wide = np.pad(grey, size // 2, mode="edge")
    return np.mean([wide[i : i + 128, j : j + 128] for i in range(size) for j in range(size)], axis=0)


def edges(grey):
    down, right = (np.diff(grey, axis=k, append=np.take(grey, [-1], k)) for k in (0, 1))
    return abs(down) + abs(right)

# %%
def channels(picture):
    grey = picture.mean(axis=2)
    warm = np.maximum(picture[:, :, 0] - picture[:, :, 2], 0)
    return np.stack([grey, warm, 2 * edges(grey), 5 * edges(blur(grey))])


x = np.stack([channels(picture) for picture in photos.values()]).astype(f)  # N, C, H, W
mean = x.mean(axis=(2, 3))
titles = [f"{name}: {value:.2f}" for name, value in zip(names * 2, mean.ravel(), strict=True)]
plot.images(list(x.reshape(8, 128, 128)), titles, vmin=0, vmax=1,
            title="Four channels by day (above) and at night, each with its mean")

# %% [markdown]
# Say the next layer is to draw the outlines of things. It adds up channels, with fixed weights that
# it has learned: the fine edges and the coarse edges, say, and nothing of the others. **Predict** what
# it draws by day, and at night.

# %%
outlines = x[:, 2] + x[:, 3]
plot.images(list(outlines), list(photos), vmin=0, vmax=1, title="Fine edges + coarse edges")

# %% [markdown]
# At night the fine edges are mostly noise, and drown the others. By day they are the best channel that
# there is. No *fixed* weight is right for both pictures. What one wants is a weight that
# depends on the picture.
#
# How could a network know what sort of picture it has? Look at the means above. Noise has doubled
# the mean of the fine edges, and left that of the coarse edges as it was. *Many fine edges and few
# coarse ones: this must be noise.* One number per channel, its mean over the whole picture, was enough to
# see it.
#
# That is **squeeze and excitation** (Jie Hu and others, 2018), a small block that sits between other layers:
#
# 1. **squeeze**: the mean of each channel over all pixels, $\text{mean}_{n,c}$. A picture becomes $C$
#    numbers;
# 2. **excite**: two small layers turn these into a **gate** for each channel, a number between
#    0 and 1;
# 3. **scale**: each channel is multiplied by its gate.
#
# $$ h_n = W_1 \,\text{mean}_n + b_1 \qquad g_n = \sigma\big(W_2 \,\text{swish}(h_n) + b_2\big) \qquad
# y_{n,c,p} = x_{n,c,p} \cdot g_{n,c} $$
#
# $W_1$ is a table with $R$ rows and $C$ columns, and row $r$ of it says how much each mean counts for
# $h_{n,r}$. Such a layer, in which every output is a weighted sum of all inputs, is called
# **dense**. The $R$ numbers of $h_n$ in the middle are the **hidden vector** of picture $n$. $\sigma$ is
# the sigmoid and swish is $x \cdot \sigma(x)$, both from lesson 1 (PyTorch calls swish SiLU). $R$ is small, in
# EfficientNet often $C / 24$, so the channels have to share a few thoughts about the picture.
#
# In a network $W_1, b_1, W_2, b_2$ are learned. Ours are set by hand, with a single thought ($R = 1$):
# "fine edges without coarse ones". If it is large, shut the fine edges and open the coarse ones.

# %%
weight1, bias1 = np.array([[0, 0, 40, -26]], dtype=f), np.array([-2], dtype=f)
weight2, bias2 = np.array([[0], [0], [-2], [0.6]], dtype=f), np.array([-3, -3, 3, 0], dtype=f)


def sigmoid_of(x):
    return 1 / (1 + np.exp(-x))


h = mean @ weight1.T + bias1
g = sigmoid_of((h * sigmoid_of(h)) @ weight2.T + bias2)
plot.channel_gates(dict(zip(photos, g, strict=True)), names, title="The gates of the two pictures")

# %%
y = x * g[:, :, None, None]
plot.images([*outlines, *(y[:, 2] + y[:, 3])], [f"{name}, {how}" for how in ("plain", "gated")
            for name in photos], vmin=0, vmax=1, title="The same sum, without the gates and with them")

# %% [markdown]
# By day next to nothing changes. At night the noise is gone, because the block has shut the channel
# that brought it. The layer behind did not change at all.
#
# Nearly every block of EfficientNet, the network of the next lesson, has such a squeeze and excitation
# in it. It needs little arithmetic, and as you will see in a moment, a lot of memory traffic. That is the
# sort of layer that one fuses.

# %% [markdown]
# ## 2 · Four kernels
#
# The classic way is a kernel for each step: mean, first layer, second layer, scale. It does not
# matter where in a plane a pixel lies, so we number the pixels of a plane from 0 to $P - 1$, with
# $P = H \cdot W$. There are two ways to put a batch into memory, and PyTorch uses both:
#
# - **channels first**, $(N, C, P)$: a whole plane, then the next channel's plane;
# - **channels last**, $(N, P, C)$: all channels of a pixel, then those of the next pixel.
#   Convolutions with tensor cores (the matrix units of the chip) like it better.
#
# ### Squeeze
#
# Channels first, a mean is the sum of a row, and you wrote it in lesson 2: neighbouring lanes take
# neighbouring *pixels*, and then the lanes add up what they have.
#
# Channels last, the neighbours in memory are *channels*. **Predict:** if lane $k$ takes channel $k$ and walks
# from pixel to pixel, how many sectors does a request of 32 lanes touch? And who has to add up
# between lanes?
#
# ### Exercise: the mean, channels last
#
# A block has picture `blockIdx.x` and 32 channels, from `32 * blockIdx.y` on. Lane `k` of *each* of its
# warps has channel `k` of these; the warps share the pixels. At most 8 warps, which meet in shared memory.

# %% exercise="squeeze"
@cuda.jit
def squeeze(x, mean):
    partial = cuda.shared.array((8, 32), np.float32)
    _, P, C = x.shape
    warp, lane, n_warps = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32, cuda.blockDim.x // 32
    n, c = cuda.blockIdx.x, 32 * cuda.blockIdx.y + lane
    total = ZERO
    TODO  # 1. this warp's share of the pixels of channel c, if there is such a channel
    partial[warp, lane] = total
    TODO  # 2. wait; then the first warp adds up its column, and writes the mean


check("squeeze", squeeze)

# %%
hint("squeeze")

# %% [markdown]
# No tree, no shuffle: a channel stays in its lane. And the access map of yours, for 2 pictures of 40 pixels
# with 64 channels:

# %%
kernel = use("squeeze", squeeze)
small = np.random.default_rng(1).normal(size=(2, 40, 64)).astype(f)
means = np.zeros((2, 64), dtype=f)
with simulator.trace() as t:
    kernel[(2, 2), 128](small, means)
print(f"largest error {abs(means - small.mean(axis=1)).max():.0e}")
plot.access_map(t, next(site for site in t.sites if site.array == "x"), steps=4)

# %% [markdown]
# ### Excite
#
# Here is a dense layer as a kernel, a thread for each number of its result. One launch for $W_1$ and one
# for $W_2$ would do.

# %%
@cuda.jit(device=True)
def sigmoid(x):
    return ONE / (ONE + math.exp(-x))


@cuda.jit
def dense(inputs, weight, bias, gated, y):
    n, i = cuda.blockIdx.x, cuda.threadIdx.x
    if i < bias.size:
        total = bias[i]
        for k in range(inputs.shape[1]):
            total += weight[i, k] * inputs[n, k]
        y[n, i] = sigmoid(total) if gated else total * sigmoid(total)


active, gate = np.zeros((2, 1), dtype=f), np.zeros((2, 4), dtype=f)
dense[2, 32](mean, weight1, bias1, False, active)
dense[2, 32](active, weight2, bias2, True, gate)
print(f"largest difference from the gates above: {abs(gate - g).max():.0e}")

# %% [markdown]
# How much work is that? The largest block of EfficientNet-B4 has 2,688 channels and 112 hidden numbers: 602,112
# multiplications for a picture, and as many additions. A chip like the H200 does so many in 0.02 microseconds,
# if all of it works at them. To *start* a kernel takes some microseconds. So the fewer kernels, the better.
#
# ### Exercise: both layers in one kernel
#
# A block for each picture. The hidden vector goes through shared memory; the backward pass will want `hidden`
# *before* swish, and the gate. **Predict** where the barrier must be, and what goes wrong without it.

# %% exercise="excite"
MOST = 128  # hidden numbers at most


@cuda.jit
def excite(mean, weight1, bias1, weight2, bias2, hidden, gate):
    active = cuda.shared.array(MOST, np.float32)
    n, R, C = cuda.blockIdx.x, bias1.size, bias2.size
    for r in range(cuda.threadIdx.x, R, cuda.blockDim.x):
        total = bias1[r]
        TODO  # 1. add up the first layer; write hidden[n, r], and to active[r] what swish makes of it
    TODO  # 2.
    for c in range(cuda.threadIdx.x, C, cuda.blockDim.x):
        total = bias2[c]
        TODO  # 3. add up the second layer; write gate[n, c]


check("excite", excite)

# %%
hint("excite")

# %% [markdown]
# ### Scale
#
# The last kernel multiplies. As in lesson 1, it walks through memory from one end to the other, which is always
# coalesced, and works out from the place `i` in memory which picture and which channel it has. Take a batch of 2
# pictures of 2 channels with 3 pixels, 12 numbers; **predict** the channel of place 7 in each layout:

# %%
n, c, p = np.indices((2, 2, 3))  # of each number, its picture, its channel, its pixel


def in_memory(numbers, channels_last):
    return (numbers.swapaxes(1, 2) if channels_last else numbers).ravel()


plot.thread_map(in_memory(c, False), in_memory(p, False), group="channel",
                title="Channels first: 12 places in memory; in each, the number of the pixel",
                alt="Pixels 0, 1, 2 of channel 0, then those of channel 1; the same for picture 1")

# %%
plot.thread_map(in_memory(c, True), in_memory(p, True), group="channel",
                title="Channels last: 12 places in memory; in each, the number of the pixel",
                alt="Pixel 0 of channels 0 and 1, pixel 1 of both, pixel 2; the same for picture 1")

# %% [markdown]
# ### Exercise: scale, in both layouts
#
# `x` and `y` are flat: one long row. Any number of blocks and threads may come.

# %% exercise="scale_channels"
@cuda.jit
def scale_channels(x, gate, y, n_pixels, channels_last):
    C = gate.shape[1]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        n = TODO
        c = TODO
        y[i] = x[i] * gate[n, c]


check("scale_channels", scale_channels)

# %%
hint("scale_channels")

# %% [markdown]
# ### All of it
#
# Your kernels, on the two photographs, channels last; and beside them the module of torchvision
# (PyTorch's library for pictures), with the same numbers in it. It keeps its weights as convolutions with
# a kernel of 1 × 1, which is a dense layer for one pixel.

# %%
pool, gates_of, scale = use("squeeze", squeeze), use("excite", excite), use("scale_channels", scale_channels)
last = np.ascontiguousarray(x.reshape(2, 4, -1).transpose(0, 2, 1))
means, hidden, gate = np.zeros((2, 4), dtype=f), np.zeros((2, 1), dtype=f), np.zeros((2, 4), dtype=f)
scaled = np.zeros_like(last)
pool[(2, 1), 256](last, means)
gates_of[2, 32](means, weight1, bias1, weight2, bias2, hidden, gate)
scale[64, 128](last.ravel(), gate, scaled.ravel(), 128 * 128, True)

# %%
module = torchvision.ops.SqueezeExcitation(4, 1, activation=torch.nn.SiLU)
numbers = (weight1[:, :, None, None], bias1, weight2[:, :, None, None], bias2)
module.load_state_dict(dict(zip(module.state_dict(), map(torch.tensor, numbers), strict=True)))
with torch.no_grad():
    theirs = module(torch.tensor(x)).numpy()
mine = scaled.transpose(0, 2, 1).reshape(x.shape)
print(f"largest difference from torchvision {abs(mine - theirs).max():.0e}")

# %% [markdown]
# Now count. **Predict:** how many times is each element of `x` read and written, in sizes of `x`? Call the
# size $N$ (bytes, not pictures). The means, the layers and the gates are so small that they do not count.

# %%
classic = [("mean", 1, 0), ("two layers", 0, 0), ("scale", 1, 1)]
plot.arrays_moved({"four kernels": classic, "one kernel": [("all of it", 1, 1)]},
                  title="A squeeze-and-excitation block")

# %% [markdown]
# $3N$, and one reading of the two seems to be one too many. But which kernel could save it? In lesson
# 5 the whole row stayed in registers between the two steps. Here, no pixel can be scaled before the
# *last* pixel of its picture was pooled, since each gate depends on all channels. A picture inside
# EfficientNet-B4 has up to 1.7 million numbers, 6.9 MB; a multiprocessor has a quarter of a megabyte of registers and nearly as
# much shared memory.
#
# There are two ways out. Let *many* multiprocessors hold a picture together, each a piece; or read it twice,
# but the second time from a cache. For both, blocks have to agree on the gates in the middle of
# their work. That is the subject of the next three sections.
#
# A good place for a break.

# %% [markdown]
# ## 3 · One exchange
#
# Let a picture be shared by $G$ blocks, each with a group of its channels. A block can take the means of its own
# channels, and in the end it can scale them. In between it needs its gates, and those depend on the hidden
# vector, which depends on the means of *all* groups.
#
# The obvious way: each block writes its means to memory; when all have done so, each reads all $C$ means
# and computes the hidden vector, for which it needs all of $W_1$. So every block does the whole first layer, again and
# again.
#
# Look at the formula once more. The hidden vector *before swish* is a sum over channels, and a sum can be taken
# in parts:
#
# $$ h = b_1 + \sum_{c} W_1[:, c] \cdot \text{mean}_c
#      = b_1 + \underbrace{\sum_{c \,\in\, \text{group } 0} W_1[:, c] \cdot \text{mean}_c}_{\text{from block } 0}
#            + \underbrace{\sum_{c \,\in\, \text{group } 1} W_1[:, c] \cdot \text{mean}_c}_{\text{from block } 1} + \dots $$
#
# Here $W_1[:, c]$ is column $c$. A function for which it does not matter whether one adds before or after it is
# called **linear**. So each block can do *its columns* of the first layer straight after pooling, and hand out a
# share of the hidden vector: $R$ numbers instead of means. Whoever adds up all shares and the bias has $h$.
# **Predict:** could one go on like this, and hand out shares of the *gates*?

# %%
def first_layer(columns):
    return weight1[:, columns] @ mean[1, columns]


shares = [first_layer([0, 1]), first_layer([2]), first_layer([3])]  # three blocks, at night
print("shares of the hidden vector:", *(f"{share[0]:.3f}" for share in shares))
print(f"their sum and the bias {sum(shares)[0] + bias1[0]:.3f}, all at once {h[1, 0]:.3f}")
together = sigmoid_of(sum(shares) + bias1) * (sum(shares) + bias1)
apart = sum(sigmoid_of(share) * share for share in shares)
print(f"swish of the sum {together[0]:.3f}, sum of the swishes {apart[0]:.3f}")

# %% [markdown]
# No: swish is not linear. After it, one needs the whole. So there has to be **one exchange**, and before
# swish is the right place for it, where little goes over and no work is done twice:
#
# | | hand over the means | hand over shares of the hidden vector |
# |---|---|---|
# | each block writes | $C / G$ numbers | $R$ numbers |
# | each block reads | $C$ numbers | $G \cdot R$ numbers |
# | of $W_1$ it needs | everything, $R \cdot C$ | its columns, $R \cdot C / G$ |
# | of $W_2$ it needs | its rows, $R \cdot C / G$ | its rows, $R \cdot C / G$ |
#
# Here are the two halves, as functions for a block of one warp. Lane $r$ has hidden number $r$, so $R$ is 32 at most, to
# keep the example short. Group $g$ has channels $g$, $g + G$, $g + 2G$, …, which come out right for any number of
# channels. From now on channels come first again.

# %%
@cuda.jit(device=True)
def pool_group(x, weight1, partial, n, g):
    lane, P, share = cuda.threadIdx.x, x.shape[2], ZERO
    for c in range(g, x.shape[1], partial.shape[1]):
        total = ZERO
        for p in range(lane, P, 32):
            total += x[n, c, p]
        mean = warp_sum(total) / np.float32(P)
        if lane < partial.shape[2]:
            share += weight1[lane, c] * mean
    if lane < partial.shape[2]:
        partial[n, g, lane] = share

# %%
@cuda.jit(device=True)
def scale_group(x, bias1, weight2, bias2, partial, y, n, g):
    cuda.threadfence()  # what others did before they announced it is seen from here on
    lane, active = cuda.threadIdx.x, ZERO
    if lane < bias1.size:
        total = bias1[lane]
        for k in range(partial.shape[1]):
            total += partial[n, k, lane]
        active = total * sigmoid(total)
    for c in range(g, x.shape[1], partial.shape[1]):
        product = weight2[c, lane] * active if lane < bias1.size else ZERO
        gate = sigmoid(bias2[c] + warp_sum(product))
        for p in range(lane, x.shape[2], 32):
            y[n, c, p] = x[n, c, p] * gate

# %% [markdown]
# `partial` has a place for each group, and everyone adds the places up in the same order. One place to which
# all groups add atomically would be shorter. But floats that are added in another order give another sum (lesson
# 2), so that the result would change a little from run to run.
#
# `scale_group` reads `x` again. Where will that come from?

# %% [markdown]
# ## 4 · L2, a second chance
#
# Each multiprocessor has a small L1 cache of its own (lesson 4). What a multiprocessor does not find there, it asks of the
# **L2 cache**, which all of them share, and all that they write goes there too. What was read lately
# is still in L2, unless other things have driven it out since. L2 answers more
# quickly than the memory and delivers more bytes per second. But most important: **what comes from L2 is no traffic
# on the memory.** (L1 does not help here: it is far too small for a picture, and the block that scales need not be
# on the multiprocessor that has pooled.)
#
# A model of a cache in a few lines: it holds so many pictures (read or written), and if it is full, the one that nobody has
# touched for the longest time has to go.

# %%
def from_memory(order, capacity):
    cache, missed = {}, []  # Python's dictionaries remember in which order things were put in
    for piece in order:
        missed.append(piece not in cache)
        cache.pop(piece, None)
        cache[piece] = True  # the youngest
        if len(cache) > capacity:
            cache.pop(next(iter(cache)))  # the oldest
    return missed

# %% [markdown]
# Six pictures are pooled and scaled, with an L2 that holds four. Three orders: all are pooled, then all are scaled,
# as separate kernels do it; the same, but scaled from the last picture to the first; and picture by
# picture. **Predict** for each of them how many of the second readings come from L2.

# %%
def walk(order, capacity=4):
    seen, steps = set(), []
    for piece, missed in zip(order, from_memory(order, capacity), strict=True):
        kind = "write" if piece[0] == "y" else "first"
        if piece in seen:
            kind = "late" if missed else "again"
        seen.add(piece)
        steps.append((piece[1], kind))
    return steps

# %%
pools = [("x", n) for n in range(6)]
scales = [[("x", n), ("y", n)] for n in range(6)]  # read again, write
orders = {"all pooled, then all scaled": pools + sum(scales, []),
          "the same, scaled backwards": pools + sum(scales[::-1], []),
          "picture by picture": sum([[("x", n), *scales[n]] for n in range(6)], [])}
plot.cache_walk({name: walk(order) for name, order in orders.items()},
                title="Six pictures, and an L2 cache with room for four")

# %% [markdown]
# The first order is the worst one possible: by the time a picture is wanted again, it has just been driven out. The
# second one costs nothing but a minus sign, and finds the last few pictures still there. The third
# finds all of them. It moves $2N$, as if the pictures had been held in registers, and reads them twice all the same.
#
# (A real cache is not as simple: it has its own ideas about who has to go, and what is written may be
# kept for a while or not. But it does reward who comes back soon.)
#
# How many pictures fit? Here are some of the blocks of EfficientNet-B4, in float32, beside the L2 of your GPU; without
# one, of the chip on which this course was recorded:

# %%
recorded = bench.load_records()
l2_bytes = recorded["device"]["l2_bytes"] if SIMULATED else bench.device_facts()["l2_bytes"]
print(f"L2 has {l2_bytes / 1e6:.0f} MB")
for C, side in ((48, 190), (144, 95), (336, 48), (960, 24), (2688, 12)):
    picture = 4 * C * side**2
    print(f"{C:5} channels of {side:3} × {side:3}: {picture / 1e6:5.1f} MB a picture, "
          f"{32 * picture / 1e6:6.1f} MB for 32, L2 holds {l2_bytes / picture:5.1f} pictures")

# %% [markdown]
# So a batch of 32 of the first size is more than three times as large as L2, and nine pictures of it fit. To come
# back soon, all multiprocessors have to work at the *same* few pictures at a time, and so many blocks must share a
# picture. We are back at the exchange, and it is time to wait for each other.

# %% [markdown]
# ## 5 · Blocks that wait
#
# Up to now blocks never waited for each other. Within a kernel there is no barrier for all blocks, and for a good
# reason: a GPU does not run them all at once. A block gets a place on a multiprocessor and keeps it until it has
# finished; those for whom there is no place stand in a queue. If the running blocks wait for one that stands
# in the queue, they wait for ever, and so does it, for a place. Each waits for the other: a **deadlock**.
#
# So cut the job into **work items**, more of them than blocks. For each picture there are $G$ items
# "pool group g" and $G$ items "scale group g". Put them into one list, and let the blocks work
# it off together, block $b$ of $B$ blocks taking items $b$, $b + B$, $b + 2B$, … one after another. A kernel
# whose blocks stay and take item after item is called **persistent**. Two rules make waiting safe:
#
# 1. **All blocks run.** Launch no more of them than fit on the chip at the same time (lesson 4 computed how many do).
# 2. **Wait only for items that come earlier in the list.** Each picture's pools stand before its scales.
#
# Why does that suffice? Think of the first item in the list that is not finished yet. Everything before it is finished,
# so it does not wait. Its block runs, by the first rule, and has nothing else to do first, since it takes its items in the order
# of the list. So it *will* be finished. Then there is another first one; and so on, to the end of the
# list. At any moment at least one block is getting on. It does not matter how many blocks there are, or how fast.
#
# The argument also says how to work out *when* everything happens: one walk through the list is enough, since
# each item waits for earlier ones only. Items take a little longer or shorter, as chance will have it.

# %%
def schedule(items, n_blocks=2):
    free, pooled, spans = [0.0] * n_blocks, {}, []
    for i, (kind, n, g) in enumerate(items):
        block, cost = i % n_blocks, np.random.default_rng([n, g, 7]).uniform(0.6, 1.6)
        begin = max(free[block], pooled[n] if kind == "scale" else 0)
        if begin > free[block]:
            spans.append((block, free[block], begin, "wait", ""))
        free[block] = begin + cost
        if kind == "pool":
            pooled[n] = max(pooled.get(n, 0), free[block])
        spans.append((block, begin, free[block], kind, f"{n}·{g}"))
    return spans

# %% [markdown]
# Two blocks, four pictures and two groups (2·1 is group 1 of picture 2). Above, the list picture by picture. Below, the pools of the *next* picture
# come before the scales of this one: pool 0, pool 1, scale 0, pool 2, scale 1, …. **Predict** what that is good for.

# %%
def work(kind, n):
    return [(kind, n, g) for g in range(2)]


by_picture = sum([work("pool", n) + work("scale", n) for n in range(4)], [])
ahead = work("pool", 0)
for n in range(4):
    ahead += work("pool", n + 1) * (n < 3) + work("scale", n)
plot.work_items({"picture by picture": schedule(by_picture), "one picture ahead": schedule(ahead)},
                title="What two blocks do, and when they wait")

# %% [markdown]
# A block that waits reads nothing. One picture ahead, something useful lies between a pool and the scale that needs it, and
# by then the other block has announced its part. Rule 2 still holds, and L2 needs room for one picture more.
#
# ### How to wait
#
# Lesson 2 has it all: `done[n]` is a counter in memory, at first 0. **To announce:** first *all* lanes must have written
# their share. A lane does not know how far the others are; only a `syncwarp` makes it true, since nobody gets past it before
# all lanes of the warp have come, and what they wrote before it, each of them can read after it. Then one lane puts a fence, so
# that everyone sees the shares before the announcement, and adds 1
# to the counter, atomically. **To wait:** one lane looks at the counter until it is $G$; the other lanes wait for
# that lane; then a fence again (it is in `scale_group`), so that nothing is read before. It looks
# with an atomic that adds 0, and not with a plain `done[n]`: the compiler may keep that in a register, and
# look at its own copy for ever.
#
# ### Exercise: the whole block in one kernel
#
# Blocks have 32 threads, a warp. `partial` is $(N, G, R)$. The list has picture 0's $G$ pools and then its $G$ scales, then
# the same for picture 1, and so on. **Predict:** which lines of the kernel would still be
# needed if there were only a single block?

# %% exercise="squeeze_excite_fused"
@cuda.jit
def squeeze_excite_fused(x, weight1, bias1, weight2, bias2, done, partial, y):
    N, G, lane = partial.shape[0], partial.shape[1], cuda.threadIdx.x
    for item in range(cuda.blockIdx.x, 2 * N * G, cuda.gridDim.x):
        n, k = divmod(item, TODO)  # 1. picture and place: quotient and remainder, by what?
        if k < G:
            pool_group(x, weight1, partial, n, k)
            TODO  # 2. announce it
        else:
            if lane == 0:
                TODO  # 3. wait until all groups of picture n have announced
            cuda.syncwarp()
            scale_group(x, bias1, weight2, bias2, partial, y, n, k - G)


check("squeeze_excite_fused", squeeze_excite_fused)

# %%
hint("squeeze_excite_fused")

# %%
kernel, (N, C, G) = use("squeeze_excite_fused", squeeze_excite_fused), (3, 10, 4)
rng = np.random.default_rng(2)
few, w1, b1 = (rng.normal(size=s).astype(f) for s in ((N, C, 50), (6, C), 6))
w2, b2 = (rng.normal(size=s).astype(f) for s in ((C, 6), C))
expected = few * sigmoid_of((lambda h: h * sigmoid_of(h))(few.mean(axis=2) @ w1.T + b1) @ w2.T + b2)[..., None]
for n_blocks in (1, 2, 3, 7):
    done, partial, y = np.zeros(N, np.int32), np.zeros((N, G, 6), dtype=f), np.zeros_like(few)
    kernel[n_blocks, 32](few, w1, b1, w2, b2, done, partial, y)
    print(f"{n_blocks} blocks: largest error {abs(y - expected).max():.0e}")

# %% [markdown]
# (With a single block nothing of the announcing and waiting would be needed. Its own pools are done before its
# scales, and each lane reads no shares but those that it has written itself.)
#
# ### Breaking it
#
# Now we break rule 2: each picture's scales stand *before* its pools. Nothing else is changed. **Predict** what
# becomes of three blocks, if each picture has four groups; and of twelve blocks.

# %%
@cuda.jit
def scales_first(x, weight1, bias1, weight2, bias2, done, partial, y):
    N, G, lane = partial.shape[0], partial.shape[1], cuda.threadIdx.x
    for item in range(cuda.blockIdx.x, 2 * N * G, cuda.gridDim.x):
        n, k = item // (2 * G), item % (2 * G)
        if k < G:  # the first G items of a picture
            if lane == 0:
                while cuda.atomic.add(done, n, 0) < G:
                    pass
            cuda.syncwarp()
            scale_group(x, bias1, weight2, bias2, partial, y, n, k)
        else:
            pool_group(x, weight1, partial, n, k - G)
            cuda.syncwarp()
            if lane == 0:
                cuda.threadfence()
                cuda.atomic.add(done, n, 1)

# %%
for n_blocks in (3, 12):
    done, partial, y = np.zeros(N, np.int32), np.zeros((N, G, 6), dtype=f), np.zeros_like(few)
    with simulator.sanitize() as report, simulator.options(max_steps=50_000):
        scales_first[n_blocks, 32](few, w1, b1, w2, b2, done, partial, y)
    print(f"{n_blocks} blocks: {'right' if np.allclose(y, expected, atol=1e-5) else 'not right'}")
    for finding in report.findings:
        print(f"  {finding.kind}, line {finding.line}: {finding.source}")
        print(textwrap.indent(textwrap.fill(finding.message, 88), "  "))

# %% [markdown]
# With three blocks, all of them have taken a scale of picture 0 and wait for its pools, which stand in the
# list behind them, and nobody is left to take them. The simulator names the line in which they go round. With twelve
# blocks there is luck: enough are left over for the pools. Such a kernel works on your large GPU and hangs on your
# colleague's small one. A good order is right for *any* number of blocks.
#
# ### Tickets
#
# Rule 1 is a nuisance: how many blocks fit depends on the chip and on who else uses it. There is a way to do without.
# Let nobody have fixed items. A block that is free **draws a ticket**, the next number from a counter in
# memory, and does that item:

# %%
@cuda.jit
def fused_with_tickets(x, weight1, bias1, weight2, bias2, ticket, done, partial, y):
    N, G, lane, item = partial.shape[0], partial.shape[1], cuda.threadIdx.x, np.int32(0)
    while item < 2 * N * G:
        if lane == 0:
            item = cuda.atomic.add(ticket, 0, 1)
        item = cuda.shfl_sync(0xFFFFFFFF, item, 0)  # lane 0 tells the others
        n, k = item // (2 * G), item % (2 * G)
        if k < G and n < N:
            pool_group(x, weight1, partial, n, k)
            cuda.syncwarp()
            if lane == 0:
                cuda.threadfence()
                cuda.atomic.add(done, n, 1)
        elif n < N:
            if lane == 0:
                while cuda.atomic.add(done, n, 0) < G:
                    pass
            cuda.syncwarp()
            scale_group(x, bias1, weight2, bias2, partial, y, n, k - G)

# %%
for n_blocks in (1, 3, 50):
    done, partial, y = np.zeros(N, np.int32), np.zeros((N, G, 6), dtype=f), np.zeros_like(few)
    ticket = np.zeros(1, np.int32)
    fused_with_tickets[n_blocks, 32](few, w1, b1, w2, b2, ticket, done, partial, y)
    print(f"{n_blocks:2} blocks: largest error {abs(y - expected).max():.0e}, "
          f"{ticket[0]} tickets for {2 * N * G} items")

# %% [markdown]
# The argument is the same, and it no longer needs rule 1: whoever holds a ticket *runs*, since it has drawn it
# itself. A block in the queue holds nothing, and nobody waits for it. (Each block draws one ticket too many, which
# tells it that the list is at its end.) Tickets also spread the work better, since fast blocks draw more of them. Their price is an
# atomic for each item.
#
# The course's rung `fused` is built on tickets too. The other way is to ask the chip for a guarantee. A *cooperative
# launch* starts all blocks at once, or fails; the rung `resident`, which you will meet in section 7, is started so. And the
# blocks of a *cluster* (lesson 4) always run at the same time: up to 8 neighbours, or 16 if the kernel allows it.
#
# Another good place for a break.

# %% [markdown]
# ## 6 · Backwards
#
# Given $dy$, how the loss reacts to each element of $y$, we want $dx$ and the gradients of the two layers. Go
# back in reverse order, a step at a time. (We leave out the index $n$: each picture has its own.)
#
# **1. Scale**, $y_{c,p} = x_{c,p} \cdot g_c$. An element of $x$ counts through its own product. The gate counts through
# *all* pixels of its channel, so its gradient is a sum:
#
# $$ dx_{c,p} \mathrel{+}= dy_{c,p} \cdot g_c \qquad\qquad dg_c = \sum_p dy_{c,p} \cdot x_{c,p} $$
#
# **2. Sigmoid**, $g_c = \sigma(z_c)$, with the derivative $g_c (1 - g_c)$ from lesson 1. ($z$, a number before
# sigmoid or softmax, is called a **logit**.)
#
# $$ dz_c = dg_c \cdot g_c \,(1 - g_c) $$
#
# **3. The second layer**, $z = W_2 a + b_2$ with $a = \text{swish}(h)$. $a_r$ counts in each channel, with the factor
# $W_2[c, r]$. So the *column* $r$ of $W_2$ comes in, where forward it was row $c$:
#
# $$ da_r = \sum_c W_2[c, r] \cdot dz_c \qquad dW_2[c, r] = dz_c \cdot a_r \qquad db_{2,c} = dz_c $$
#
# **4. Swish**, whose derivative is $s\,(1 + h\,(1 - s))$ with $s = \sigma(h)$:
#
# $$ dh_r = da_r \cdot s_r \,\big(1 + h_r (1 - s_r)\big) $$
#
# **5. The first layer**, $h = W_1 m + b_1$ with $m$ for the means, just as in step 3:
#
# $$ dm_c = \sum_r W_1[r, c] \cdot dh_r \qquad dW_1[r, c] = dh_r \cdot m_c \qquad db_{1,r} = dh_r $$
#
# **6. The mean**: each pixel has a share of $1 / P$ in it (lesson 2). Together with step 1:
#
# $$ dx_{c,p} = dy_{c,p} \cdot g_c + \frac{dm_c}{P} $$
#
# It is the forward pass over again: a sum over the pixels of each channel, two small layers, and a pass over all
# pixels. And the same trick works, too: $da$ is a *sum over channels*, so blocks can hand out shares of it. **Predict** what
# the backward pass has to read and write at least, in sizes of $x$. And what does a kernel for each step move?

# %%
separate = [("dg", 2, 0), ("layers", 0, 0), ("dx", 1, 1)]
eager = [("dy · g", 1, 1), ("dy · x", 2, 1), ("sum", 1, 0), ("mean", 0, 1), ("add", 2, 1)]
plot.arrays_moved({"PyTorch eager": eager, "a kernel per step": separate, "at best": [("all", 2, 1)]},
                  title="Backward: dy and x are read, dx is written")

# %% [markdown]
# (Eager PyTorch follows the formula of each operation by itself: a product for $dx$, a product for $dg$ which is written
# and then summed, the mean's share spread out over a whole array, and an addition. That is our count from its
# operations, not a measurement.)
#
# ### Exercise: the gradient
#
# A block for each picture, of whole warps. It writes `dx`, and for each picture its own row of `dbias1`, which
# is $dh$, and of `dbias2`, which is $dz$. (No block sees all pictures; the rows are added up afterwards.) A
# barrier is good for memory, too: what a thread of the block has written to `dbias2` before it, all threads of the *same*
# block can read after it. You have the sum of step 1, by a warp, and the derivative of swish:

# %%
@cuda.jit(device=True)
def product_sum(dy, x, n, c):
    total = ZERO
    for p in range(cuda.threadIdx.x % 32, x.shape[2], 32):
        total += dy[n, c, p] * x[n, c, p]
    return warp_sum(total)  # all 32 lanes get it


@cuda.jit(device=True)
def swish_slope(x):
    s = sigmoid(x)
    return s * (ONE + x * (ONE - s))

# %% exercise="squeeze_excite_backward"
@cuda.jit
def squeeze_excite_backward(dy, x, weight1, weight2, hidden, gate, dx, dbias1, dbias2):
    _, C, P = x.shape
    n, warp, lane = cuda.blockIdx.x, cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
    for c in range(warp, C, cuda.blockDim.x // 32):
        total = product_sum(dy, x, n, c)
        TODO  # 1. dbias2[n, c], written by one lane: step 2
    cuda.syncthreads()
    for r in range(cuda.threadIdx.x, dbias1.shape[1], cuda.blockDim.x):
        total = ZERO
        TODO  # 2. step 3
        dbias1[n, r] = TODO  # 3. step 4
    cuda.syncthreads()
    for c in range(warp, C, cuda.blockDim.x // 32):
        dmean = ZERO
        TODO  # 4. step 5
        for p in range(lane, P, 32):
            dx[n, c, p] = TODO  # 5. step 6


check("squeeze_excite_backward", squeeze_excite_backward)

# %%
hint("squeeze_excite_backward")

# %% [markdown]
# The gradients of the weights are sums over the pictures, of products that we have: $dW_2 = \sum_n dz_n\, a_n^T$ and
# $dW_1 = \sum_n dh_n\, m_n^T$. In NumPy they are two lines. (In the course's library they are a kernel that goes
# through the pictures in a fixed order, so that the sums are reproducible.) Never trust a derivation; we ask autograd:

# %%
def forward_of(x, w1, b1, w2, b2):
    h = x.mean(2) @ w1.T + b1
    s = 1 / (1 + (-h).exp())
    return h, 1 / (1 + (-((h * s) @ w2.T + b2)).exp())


leaves = [torch.tensor(each, requires_grad=True) for each in (few, w1, b1, w2, b2)]
hidden, gate = forward_of(*leaves)
dy = rng.normal(size=few.shape).astype(f)
(leaves[0] * gate[:, :, None]).backward(torch.tensor(dy))
hidden, gate = hidden.detach().numpy(), gate.detach().numpy()

# %%
backward = use("squeeze_excite_backward", squeeze_excite_backward)
dx, dh, dz = (np.zeros(each.shape, dtype=f) for each in (few, hidden, gate))
backward[N, 64](dy, few, w1, w2, hidden, gate, dx, dh, dz)
active = hidden * sigmoid_of(hidden)
mine = (dx, dh.T @ few.mean(axis=2), dh.sum(axis=0), dz.T @ active, dz.sum(axis=0))
for name, own, leaf in zip(("x", "weight1", "bias1", "weight2", "bias2"), mine, leaves, strict=True):
    print(f"d{name:8} largest difference from autograd {abs(own - leaf.grad.numpy()).max():.0e}")

# %% [markdown]
# And by brute force, in float64: one pixel of $x$ a little up and down.

# %%
def loss(pixel):
    moved = torch.tensor(few, dtype=torch.float64)
    moved[1, 4, 7] += pixel
    _, gate = forward_of(moved, *(torch.tensor(each, dtype=torch.float64) for each in (w1, b1, w2, b2)))
    return (moved * gate[:, :, None] * torch.tensor(dy)).sum().item()


print(f"brute force {(loss(1e-5) - loss(-1e-5)) / 2e-5:.7f}, yours {dx[1, 4, 7]:.7f}")
print(f"of this, through the gates of all channels: {dx[1, 4, 7] - dy[1, 4, 7] * gate[1, 4]:.7f}")

# %% [markdown]
# ### What has to be saved
#
# Forward, keep `x`, which the layer before owns anyway, and for each picture the means, the hidden vector and the
# gates (or logits): $2C + R$ numbers. PyTorch's autograd keeps about as little here: of what its operations have to
# keep, only `x` is large, and that is there anyway. This time nothing is to be gained in memory. What counts is the
# number of passes.

# %% [markdown]
# ## 7 · Measured
#
# The rungs of `course_lib/kernels/squeeze_excite`:
#
# - `separate`: the classic kernels, one for each step, for both layouts;
# - `two_pass`: a kernel for the means, and a second one, of which each block finds its own gates and scales;
# - `fused`: one kernel with tickets, as above, and a little more. The block that pools the last piece of a picture
#   finds all of its gates, so that the others need not. And the kernel tells L2 what it may forget: a piece of
#   `x` that is read for the second time, and all of `y`;
# - `resident`: the first of the two ways out of section 2. Many blocks hold a picture together, each a piece in
#   its shared memory, and meet once to exchange what they know of the hidden vector. `x` is read only once. Backward they
#   hold `dy`, and so both `dy` and `x` are read once;
# - `batched`, forward only, for many small pictures of many channels, where the layers' weights weigh as much as a picture:
#   a block takes the same channels of four pictures, and reads their weights once. As much of `x` as fits stays in shared
#   memory, as in `resident`; the rest is read a second time, from L2 with luck.
#
# `variant="auto"`, which is what you get if you ask for nothing else, is no kernel but a choice. It takes `batched` where the
# weights are that heavy, and `resident` where a picture (channels first) is shared by many blocks and still fits into the
# shared memory of all multiprocessors together. Else it takes `fused` for large batches with small layers (backward it
# prefers that), and `two_pass` for all the rest.
#
# All five run here on the two photographs:

# %%
from course_lib.kernels import squeeze_excite as course_block

layers = [cuda.to_device(each) for each in (weight1, bias1, weight2, bias2)]
for variant in course_block.FORWARD:
    found, *_ = course_block.forward(cuda.to_device(x), *layers, variant=variant)
    print(f"{variant:10} largest difference from torchvision "
          f"{abs(found.copy_to_host() - theirs).max():.0e}")

# %% [markdown]
# The measurements come from the course's benchmark `squeeze_excite`. On a GPU, this function runs it; without one, it
# finds what was recorded, or says that nothing was.

# %%
@cache
def measured(name, shape):
    if not SIMULATED:
        from course_lib.benchmarks import squeeze_excite as benchmark

        (found,) = benchmark.run(shapes=[shape], dtypes=["float32"], layouts=["contiguous"],
                                 directions=[name.rpartition(".")[2]])
        return found | {"source": {"device": bench.device_facts()["name"], "date": "just now"}}
    if found := bench.find(recorded, name=name, shape=shape, dtype="float32"):
        source = {"device": recorded["device"]["name"], "date": results_table.when(found[0])}
        return found[0] | {"source": source}
    return print(f"{name} of {shape} has not been measured yet.")


print("recorded on an", recorded["device"]["name"])

# %%
def show(record, title):
    if record is None:
        return None
    times = {row["label"]: row["microseconds"] for row in record["rows"]}
    ratio = times["PyTorch eager"] / times[record["default"]]
    title += f"\nPyTorch eager takes {ratio:.2f} times as long as {record['default']}"
    return plot.ladder(record["rows"], record["copy_gbps"], title=title, **record["source"])

# %% [markdown]
# 32 pictures of 48 channels with 190 × 190 pixels: 222 MB. **Predict** the ratio of PyTorch's time to that
# of a kernel which gets `x` from memory only once, from the bytes; and what torch.compile may reach, which fuses neighbouring
# operations but cannot let blocks wait for each other. (PyTorch calls channels first *contiguous*. A bar says
# *channels-last* if it is the other layout. The short line at the end of a bar spans the middle half of all rounds of the
# measurement; where it cannot be seen, the rounds were that much alike.)

# %%
show(measured("squeeze_excite.forward", (32, 48, 190, 190)), "32 pictures of 48 × 190 × 190, forward")

# %%
show(measured("squeeze_excite.both", (32, 48, 190, 190)),
     "32 pictures of 48 × 190 × 190, forward and backward")

# %% [markdown]
# **Explaining the gap.** `separate` moves no more than PyTorch, $3N$ (the profiler below says so), and takes twice as long: it is not
# memory that it waits for. Its means come from the fast kernel of lesson 2, and 222 MB take no less than 53 µs at the copy's speed; if
# they take about that, most of its 523 µs are spent in the last kernel, which is like yours: a thread for each number. For a single load of 4 bytes
# such a thread divides whole numbers three times, to find its picture and its channel, and works out the gate once more, exponential and division. PyTorch
# has a kernel that finds the gates, once for each channel, before it multiplies, and its multiplication gives several numbers to
# a thread. In `two_pass` a block works out a gate once for each channel that it has, and moves 16 bytes at a time. *A kernel can be far from every limit and still be slow: by the instructions around its loads.*
#
# From bytes alone, forward promises $3N / 2N = 1.5$. `auto`, which is `resident` here, keeps that
# promise; `fused` does not, though it moves only a little more than $2N$, as you will see in a moment. The reason is in what a
# block does beside moving bytes. For each of its small pieces a block of `fused` draws a ticket, waits for the last of its
# loads, adds up across the block, tells the others, or asks them. Each of these steps is a trip to L2 and back, one after the
# other, and meanwhile the block asks for no data. Larger pieces would spread this over more bytes. But then more of `x` lies
# between pooling and scaling than L2 holds: the two wishes pull in opposite directions. What helps is to have more blocks at
# work, which is why the kernel is held to 64 registers a thread: four blocks on a multiprocessor rather than three.
#
# `resident` moves $2N$ and nothing more, but its blocks wait as well: all that share a picture, until the last of them has
# added up its piece. So there are two on each multiprocessor. If both began at once, both would read at the same time, and
# wait at the same time. Therefore the second one begins when the first one's piece has come, and from then on one of them
# reads or writes while the other one waits.
#
# And torch.compile? At this size it is as fast as `fused`, although it reads `x` twice, $3N$. None of its blocks ever
# waits for another one, so it moves more bytes, and faster, at nearly nine tenths of the copy's speed. *Fewer bytes are
# of no use if the waiting for them costs as much.*
#
# Forward and backward together, the counts of sections 2 and 6 promise $13N / 5N = 2.6$ against PyTorch. Again it is less.
#
# With a *single* picture everything fits into L2, bytes hardly count, and launches are everything. **Predict**
# which of the two has the larger ratio, a batch of 32 or of 1.

# %%
for shape in ((1, 48, 190, 190), (1, 960, 24, 24), (32, 960, 24, 24), (32, 2688, 12, 12)):
    record = measured("squeeze_excite.both", shape)
    if record:
        us = {row["label"]: row["microseconds"] for row in record["rows"]}
        print(f"{str(shape):20} {record['default']} {us[record['default']]:8.1f} µs, "
              f"PyTorch eager {us['PyTorch eager']:8.1f} µs on the device, {record['source']['device']} "
              f"({record['source']['date']})")

# %% [markdown]
# The ratio lies between two and somewhat more than two and a half in every line, and for the batch of 32 in the picture above
# as well: neither wins by much. With one picture PyTorch pays for many short kernels, and each of them has to start and to end. With 32 it pays for its passes over `x`.
#
# And forward alone? Guides that write this block in CUDA C++ report 2.45 ms by PyTorch and 0.89 ms by their kernels: 2.75 times
# as fast, and more with larger batches. **Predict** whether the records say the same.

# %%
ratios = {}
for record in bench.find(recorded, name="squeeze_excite.forward", dtype="float32"):
    us = {row["label"]: row["microseconds"] for row in record["rows"]}
    ratios.setdefault(record["shape"][0], []).append(us["PyTorch eager"] / us[record["default"]])
for batch, each in sorted(ratios.items()):
    print(f"forward, batch {batch:2}, {len(each)} shapes: PyTorch eager takes {min(each):.2f} to {max(each):.2f} "
          f"times as long, {np.exp(np.mean(np.log(each))):.2f} in the geometric mean")

# %% [markdown]
# They don't: on this GPU, in the device's time, none of these shapes comes to 2.75. And with larger batches the ratio becomes *smaller*: launches
# that are saved count less, and in the end only bytes do.
#
# ## What the profiler says
#
# Was it really L2? NVIDIA's profiler counts the bytes that the *memory* has sent and
# received. In sizes of `x`, your predictions were 3 for the classic kernels, and 2 at best. (A little of what is written may
# still be in L2 when the kernel ends, and is counted for a later one.)

# %%
profiles = bench.find(recorded, name="squeeze_excite.profile", dtype="float32")
for record in profiles[:4]:
    rows = ", ".join(f"{row['label']} {row['sizes_of_x']:.2f}" for row in record["rows"])
    print(f"{'×'.join(map(str, record['shape'])):17} {rows}")
if profiles:
    print(f"on an {recorded['device']['name']} ({results_table.when(profiles[0])})")
else:
    print("Not measured yet: data/results has no record squeeze_excite.profile.")

# %% [markdown]
# It was. `fused` comes close to 2. The rest are second readings of pieces that L2 no longer held: other pieces had come in
# meanwhile. Even `two_pass` finds a
# little of `x` there. `auto` is `resident` at these sizes, which has no second reading at all.
#
# In lesson 4 you learned to look at *bytes in flight*. Look at them here as well, when a kernel has blocks that wait: a block
# that waits has none. If memory is not busy although the bytes are few, let more blocks run on each multiprocessor, or let each of
# them ask for its next picture before it waits.
#
# ## Where the real libraries go further
#
# - **The module of the next lesson** takes what this lesson had room for only in part: any $R$, both layouts, 16-bit numbers, ReLU for
#   swish, and **hard sigmoid** for the sigmoid, which is $\min(\max(x + 3, 0), 6) / 6$, straight lines that cost no exponential.
#   MobileNetV3 uses it.
# - **Copies without threads**: chips from sm_90 on (so NVIDIA numbers them; the H100 and the H200 are sm_90) have a unit that
#   copies whole tiles between memory and shared memory, and tells a barrier when they have arrived. The threads of our kernel
#   ask for every 16 bytes themselves.
# - **cuDNN and compilers for inference** fold the mean into the convolution *before* the block, which has the numbers
#   in registers anyway, and the scale into the convolution *behind* it. Then the block moves hardly any bytes of its own. That needs
#   a convolution that one can change.
# - **Stream-K** and other kernels for matrices let blocks share work items and wait for partial sums in the same way,
#   with the same rule: wait only for what comes earlier.
#
# ## Three questions
#
# <details><summary>1. Somebody hands out shares of the gates' <em>logits</em> instead of shares of the hidden vector, since the
# second layer is linear as well. What goes wrong?</summary>
#
# Between the two layers is swish, which is not linear. A block that knows only its own share of the hidden vector cannot apply
# it, and so cannot begin the second layer. It would be right if there were no activation in between; but
# then the two layers would be no more than one.
# </details>
#
# <details><summary>2. In the list, all pools of all pictures come first and then all scales. Can that lock up? Is it
# a good order?</summary>
#
# It cannot lock up: each scale still waits only for items that come earlier. But when the first picture is scaled, the last one was
# just pooled, and if the batch is larger than L2, every second reading comes from memory: 3N. Right and slow. The check
# accepts it, since it looks at results.
# </details>
#
# <details><summary>3. With eight blocks the kernel with fixed items (without tickets) is right on your chip, which has room for two hundred. A
# colleague launches it with 100,000 blocks. What may happen?</summary>
#
# Blocks that have no place yet hold items of the list. A running block may wait for one of those, and keeps its place
# while it waits. If all places are taken by blocks that wait, nobody gets on. (Mostly it goes well, since GPUs tend to start blocks in order of
# their numbers. But nobody has promised that.) With tickets it is always right.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# Lesson 7 puts the block into a whole network, EfficientNet-B4, in place of PyTorch's own. First with a profile, to see
# how much of the network it is; then with all of its outputs and gradients compared; and then it learns to tell the diseases of
# leaves.
