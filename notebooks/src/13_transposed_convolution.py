# %% [markdown]
# # 13 · Transposed convolution and the U-Net
#
# **After this lesson** you can make a picture larger by a transposed convolution, write it with
# and without atomics, say why it is the gradient of a convolution, get its gradients from kernels
# that you have, foresee a checkerboard, build a U-Net, and tell where its work and its memory are.
#
# **You need** lessons [8](08_convolution.ipynb) and [9](09_convolution_backward.ipynb), and of
# [lesson 2](02_reductions.ipynb) races and atomics. Section 6 trains a network with the tape of
# lesson 12.
#
# **Time:** 115 minutes; there are good places to pause after sections 3 and 5. All cells together
# run in less than a minute without a GPU. On a GPU one layer is measured on your own machine,
# otherwise you see recorded speeds. The words are collected in the [glossary](glossary.md).

# %%
from functools import cache

import matplotlib.cbook
import matplotlib.image
import numpy as np

from course_lib import SIMULATED, bench, cuda, plot, reference, results_table, simulator
from course_lib.teach import TODO, check, hint, progress, solution, use
from course_lib.teach.exercises.lesson_08 import conv2d_direct
from course_lib.teach.exercises.lesson_09 import conv2d_dweight, conv2d_dx

f, ZERO, BLOCK, SIDE = np.float32, np.float32(0), 64, 32
recorded = bench.load_records()

# %% [markdown]
# ## 1 · The size has to come back
#
# The network of lesson 11 looked at a whole picture and gave *one* answer: a coat. Now each pixel
# should get an answer of its own. Which pixels of this satellite picture are water? This is called
# **segmentation**. The course draws the pictures: lakes, and a river that is one or two pixels
# wide.

# %%
def drawn(n, rng):
    """n pictures (n, 1, 32, 32), and which of their pixels are water."""
    rows, cols = np.mgrid[:SIDE, :SIDE]
    water = np.zeros((n, SIDE, SIDE), dtype=bool)
    for lakes in water:
        for _ in range(2):
            (top, left), (high, wide) = rng.uniform(4, 28, 2), rng.uniform(3, 8, 2)
            lakes |= ((rows - top) / high) ** 2 + ((cols - left) / wide) ** 2 < 1
        slope, start, phase = rng.uniform((-0.8, 4, 0), (0.8, 28, 6))
        lakes |= abs(rows - start - slope * (cols - 16) - 2 * np.sin(cols / 4 + phase)) < 0.9
    images = np.where(water, -0.5, 0.5) + 0.4 * rng.normal(size=water.shape)
    return images[:, None].astype(f), water.astype(np.int64)

# %% [markdown]
# A network that recognises things has to look at large pieces of a picture, so it pools: 32 × 32
# becomes 16 × 16, then 8 × 8, then 4 × 4. Suppose that it knows everything there is to know after
# three poolings, and that the answer is still 4 × 4 numbers. The best it can do is to give each
# block of 8 × 8 pixels one answer, the one that is right for most of them. **Predict:** what is
# lost first, the lakes or the river? And what share of the pixels will be wrong?

# %%
images, labels = drawn(8, np.random.default_rng(4))


def best_answer(water, size):
    """What blocks of size × size pixels say of their pixels, if each is as right as it can be."""
    blocks = water.reshape(SIDE // size, size, SIDE // size, size).mean(axis=(1, 3))
    return np.kron(blocks > 0.5, np.ones((size, size), dtype=int))

# %%
found = {size: best_answer(labels[0], size) for size in (2, 4, 8)}
for size, answer in found.items():
    print(f"{SIDE // size:2} × {SIDE // size:2} numbers: {np.mean(answer != labels[0]):5.1%} of pixels are wrong")
plot.images([images[0, 0], labels[0], found[2], found[8]],
            ["the picture", "water", "one pooling, at best", "three poolings, at best"],
            title="What pooling has lost: the river first, and then every shore",
            alt="A noisy picture with a lake and a thin river; its water; with blocks of 2 × 2 the river is in "
            "pieces; with blocks of 8 × 8 only a rectangle is left of the lake")

# %% [markdown]
# So a network that labels pixels needs two things. It needs a layer that makes pictures *larger*,
# and it needs somebody to tell that layer where the shores were. The first is the transposed
# convolution, sections 2 to 5. The second is the skip connection, section 6.

# %% [markdown]
# ## 2 · Every pixel paints a patch
#
# A convolution lays a window on the large picture, and makes one number of what it sees. Turn the
# arrows round. Each pixel of the *small* picture takes a brush, the filter, and paints a patch of
# the large one: the brush, as dark as the pixel says. The next pixel paints its patch `stride`
# pixels further on. Where patches overlap, the paint adds up. This is a **transposed
# convolution**.
#
# Two pixels are not 0 here, a 1 and a 3. The brush is 3 × 3, the stride is 2. **Predict** the
# number in row 0, column 2 of y, where both have painted.

# %%
tent = np.outer([1, 2, 1], [1, 2, 1])
x = np.array([[1, 3], [0, 0]])
y = reference.conv_transpose2d(x[None, None], tent[None, None], stride=2)[0, 0].astype(int)
marked = [[(0, 0, 1, 1), (0, 1, 1, 1)], [], [(0, 0, 3, 3), (0, 2, 3, 3)]]
plot.grids([x, tent, y], ["x", "the brush", "y"], marked=marked,
           title="Two pixels paint two patches, and share a column")

# %% [markdown]
# <details><summary>The number in row 0, column 2</summary>
#
# It is 1 · 1 + 3 · 1 = 4. The first patch ends there with tap (0, 2), the second begins there with
# tap (0, 0).
# </details>
#
# Painting is easily said as a kernel: a thread for each pixel of x. It reads the patch that is
# there already, adds its paint, and writes the patch back. The brush is a quarter of this tent, so
# that it should give a *smooth* enlargement: a pixel halfway between two others gets half of each.
# (As in lesson 2, `syncwarp` makes the simulator take the 32 lanes side by side, as a GPU does.)

# %%
@cuda.jit
def paint(x, brush, y):
    patch = cuda.local.array(9, np.float32)
    i = cuda.grid(1)
    if i < x.size:
        row, col = i // x.shape[1], i % x.shape[1]
        for tap in range(9):
            patch[tap] = y[2 * row + tap // 3, 2 * col + tap % 3]  # read
        cuda.syncwarp()
        for tap in range(9):
            added = x[row, col] * brush[tap // 3, tap % 3]
            y[2 * row + tap // 3, 2 * col + tap % 3] = patch[tap] + added  # add, and write

# %%
with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
    photo = matplotlib.image.imread(file, format="jpg")[20:532]
photo = (photo.reshape(32, 16, 32, 16, 3).mean(axis=(1, 3, 4)) / 255).astype(f)
brush = (tent / 4).astype(f)
right = reference.conv_transpose2d(photo[None, None], brush[None, None], stride=2)[0, 0]
painted = np.zeros((65, 65), dtype=f)
simulator.run(paint, 32, 32, photo, brush, painted)
off = abs(painted - right) > 1e-5

# %%
print(f"{off.sum():,} of {off.size:,} pixels are wrong")
plot.images([photo, right, painted, off], ["the photograph", "as it should be", "painted", "where it is wrong"],
            vmin=0, vmax=1, title="Painted by 1,024 threads: stripes that nobody has asked for",
            alt="A photograph of 32 × 32 pixels; smoothly enlarged to 65 × 65; as painted, with dark upright "
            "stripes; the wrong pixels are every second column")

# %% [markdown]
# Look at the stripes before you read on. Every second column is too dark. Which columns are they,
# in the picture with the two patches? And what would the sanitizer say?

# %%
with simulator.sanitize() as report:
    simulator.run(paint, 32, 32, photo, brush, np.zeros((65, 65), dtype=f))
for finding in report.findings[:1]:
    print(f"{finding.kind} in `{finding.source}`:\n{finding.message}")

# %% [markdown]
# <details><summary>What has happened?</summary>
#
# A **race**. Columns 2, 4, 6, … belong to two patches. Both threads read the old number, both add
# their paint to it, and the one that writes last wins. The other's paint is lost: it is the lost
# update of lesson 2. Brushes of 2 × 2 with stride 2 would have touched without overlapping, and
# nobody would have noticed.
# </details>
#
# Adding has to be *one* step that nobody can come between: an atomic addition. Now write the real
# thing, with pictures, channels, any stride and padding. As in lesson 9, a pixel has $C$ channels,
# and each of them paints into *all* $K$ channels of y, with a brush of its own for each: the
# weight is $(C, K, R, S)$.
#
# $$ \text{tap } (r, s) \text{ of pixel } (h, w) \text{ paints } \qquad p = h \cdot \text{stride} - \text{padding} + r
# \qquad q = w \cdot \text{stride} - \text{padding} + s $$
#
# **Padding** takes away here: so many rows and columns are cut off on each side of y. What would
# be painted there is lost.
#
# ### Exercise: scatter
#
# y is full of zeros. There are enough threads for all numbers of x.

# %% exercise="conv_transpose2d_scatter"
@cuda.jit
def conv_transpose2d_scatter(x, weight, y, stride, padding):
    C, H, W = x.shape[1:]
    K, R, S = weight.shape[1:]
    P, Q = y.shape[2:]
    i = cuda.grid(1)
    if i < x.size:
        n, c, h, w = i // (C * H * W), i // (H * W) % C, i // W % H, i % W
        for r in range(R):
            for s in range(S):
                p, q = TODO, TODO
                TODO  # if (p, q) is inside of y, paint there, in all K channels


check("conv_transpose2d_scatter", conv_transpose2d_scatter)

# %%
hint("conv_transpose2d_scatter")

# %% [markdown]
# The photograph once more, with your kernel, in six random orders of threads. **Predict:** are the
# stripes gone? Do all six runs give the same bits?

# %%
def six_runs(kernel, n_threads, x, weight, side):
    """y of six runs, each with the threads in another random order."""
    runs = np.zeros((6, 1, 1, side, side), dtype=f)
    for seed, y in enumerate(runs):
        with simulator.options(order="random", seed=seed):
            simulator.run(kernel, -(-n_threads // BLOCK), BLOCK, x, weight, y, 2, 0)
    return runs

# %%
small = np.ascontiguousarray(photo[8:24, 8:24])[None, None]
exact = reference.conv_transpose2d(small, brush[None, None], stride=2)
kernel = use("conv_transpose2d_scatter", conv_transpose2d_scatter)
scattered = six_runs(kernel, small.size, small, brush[None, None], 33)
print(f"largest error {abs(scattered - exact).max():.0e}, "
      f"{len({run.tobytes() for run in scattered})} different results in 6 runs")
print(f"{(np.ptp(scattered, axis=0) > 0).sum()} of {exact.size:,} numbers depend on the order of the threads")

# %% [markdown]
# No paint is lost, and no stripe is left. But float32 rounds after each addition. Where *four*
# patches overlap, another order of additions gives another last bit. (Where only two overlap, a +
# b is b + a.) The course wants the same bits in every run, so we have to ask the other question.

# %% [markdown]
# ## 3 · Who has painted me?
#
# A thread for each pixel of *y*. It collects what belongs to it, and writes once: **gather**. So
# we need the formula from the other side. Row $p$ has been painted by row $h$ with tap $r$ if
# $p = h \cdot \text{stride} - \text{padding} + r$. For a given $p$, which taps can it have been?
#
# Take 3 rows of x, 3 taps, padding 1, and a stride of 1, 2 or 3. For each row of y the tables say
# which row h of x has painted it, by each of the taps. **Predict:** how many taps does a row of y
# meet?

# %%
def painters(stride):
    table = np.full((2 * stride + 1, 3), "   ")
    for h in range(3):
        for r in range(3):
            p = h * stride - 1 + r
            if 0 <= p < len(table):
                table[p, r] = f"h={h}"
    return table


plot.grids([painters(1), painters(2), painters(3)], ["stride 1", "stride 2", "stride 3"], xlabel="tap r",
           ylabel="row p of y", title="Which row of x has painted row p, by which tap: every stride-th tap fits")

# %% [markdown]
# With stride 2 it is one tap, then two, then one. In the formula, $p + \text{padding} - r$ must be
# a multiple of the stride. So $r$ and $p + \text{padding}$ have **the same remainder**, when
# divided by the stride. The first such tap is $(p + \text{padding}) \bmod \text{stride}$, and the
# others follow at a distance of the stride. Nobody has to ask the taps between them. (The kernel
# of lesson 9 did: it tried all nine and divided each time.)
#
# ### Exercise: gather
#
# There are enough threads for all numbers of y. `range(first, end, step)` counts in steps. A pixel
# of y that no patch has reached is 0, and somebody has to write that.

# %% exercise="conv_transpose2d_gather"
@cuda.jit
def conv_transpose2d_gather(x, weight, y, stride, padding):
    C, H, W = x.shape[1:]
    R, S = weight.shape[2:]
    K, P, Q = y.shape[1:]
    i = cuda.grid(1)
    if i < y.size:
        n, k, p, q = i // (K * P * Q), i // (P * Q) % K, i // Q % P, i % Q
        total = ZERO
        for r in range(TODO, R, stride):
            for s in range(TODO, S, stride):
                h, w = TODO, TODO
                TODO  # if there is such a pixel, add up over its channels
        y[n, k, p, q] = total


check("conv_transpose2d_gather", conv_transpose2d_gather)

# %%
hint("conv_transpose2d_gather")

# %%
kernel = use("conv_transpose2d_gather", conv_transpose2d_gather)
gathered = six_runs(kernel, exact.size, small, brush[None, None], 33)
place = np.unravel_index(np.argmax((scattered != gathered).sum(axis=0)), exact.shape)
print(f"gathered: {len({run.tobytes() for run in gathered})} different result in 6 runs")
plot.run_to_run({"scattered": [run[place] for run in scattered], "gathered": [run[place] for run in gathered]},
                exact[place], title=f"One pixel of y, row {place[2]}, column {place[3]}, in six runs")

# %% [markdown]
# ### What each of them asks memory for
#
# A layer for the rest of this section: one picture with 4 channels of 16 × 16, one channel in y, 3
# × 3 taps, stride 2, padding 1. y is 32 × 32: the patches reach 31 rows and columns, and one more
# of each is added (section 4 says why). **Predict,** for each number of y on average: how many
# numbers of x does gather read? How many atomics does scatter do? And how many sectors does a warp
# touch when it writes 32 numbers of y?

# %%
rng = np.random.default_rng(0)
x, weight = rng.normal(size=(1, 4, 16, 16)).astype(f), rng.normal(size=(4, 1, 3, 3)).astype(f)
kernels = {"scatter": use("conv_transpose2d_scatter", conv_transpose2d_scatter),
           "gather": use("conv_transpose2d_gather", conv_transpose2d_gather)}
traces = {}
for (name, kernel), n_threads in zip(kernels.items(), (x.size, 32 * 32)):
    with simulator.trace() as traces[name]:
        kernel[n_threads // BLOCK, BLOCK](x, weight, np.zeros((1, 1, 32, 32), dtype=f), 2, 1)
for name, trace in traces.items():
    asked = {op: sum(s.bytes for s in trace.sites if s.op == op) / 4 / 1024 for op in ("load", "atomic", "store")}
    print(f"{name:8} for each number of y: " + ", ".join(f"{n:5.2f} by {op}s" for op, n in asked.items()))

# %%
sites = {name: next(s for s in trace.sites if s.array == "y") for name, trace in traces.items()}
for name, site in sites.items():
    print(f"{name:8} {site.op}s of y: {site.requests:,} requests, {site.sectors / site.requests:.1f} sectors each")
plot.access_map(traces["scatter"], sites["scatter"], steps=6,
                title="Scatter: a warp adds to every second number of a row")

# %% [markdown]
# <details><summary>The numbers</summary>
#
# Nine taps, of which every fourth fits: 2.25 pixels, with 4 channels each. That is 9 products for
# a number of y, a little less at the rim. Both kernels do the same products. Gather loads two
# numbers for each, 18 in all, and stores once. Scatter adds atomically once for *each product*,
# about 9 times for each number of y.
#
# Scatter's neighbours paint `stride` apart: 16 pixels of x cover 32 numbers of y, of which a
# request touches every second one. A warp has two rows of x, so a request goes to 8 sectors where
# 4 would do, and half of what they hold is not asked for. (In the first three lines of the map one
# row is missing: tap row 0 of the upper row of x falls on the padding.) Gather's neighbours write
# neighbours.
# </details>
#
# And where does gather read? Here is the first warp, with row 0 of y. The first four lines are the
# first round of the loop over `s`, a line for each channel; the other four are the second round.

# %%
reads = next(site for site in traces["gather"].sites if site.array == "x")
lanes = (reads.addresses >= 0).sum(axis=1)
print(", ".join(f"{(lanes == n).sum()} requests of {n} lanes" for n in np.unique(lanes)))
plot.access_map(traces["gather"], reads, steps=8,
                title="Gather: all lanes in the first round, in the second every other one")

# %% [markdown]
# In the first round all lanes have a pixel: lane 0 takes tap 1, lane 1 takes tap 0, and so on, and
# two neighbours share it. (All but the last: its tap 0 lies beyond the rim of x.) In the second
# round only the odd lanes have a tap left, and the even ones wait. The warp is **divergent**
# (lesson 2). All lanes of a warp could do the same if a warp took pixels of *one* remainder: all
# with even $p$ and even $q$, for example. For stride 2 that makes four small convolutions, of 1,
# 2, 2 and 4 taps, and each fills one quarter of y. Good kernels do just that.

# %% [markdown]
# A good place for a break. Next: why you had this kernel already.

# %% [markdown]
# ## 4 · The transpose of a convolution
#
# Where does the name come from? A convolution multiplies and adds, so it is a matrix. Take a row
# of 7 pixels, the taps 1, 2, 3 and stride 2. There are three results, so the matrix, call it $M$,
# has 3 rows and 7 columns. In each row the taps stand where the window does. **Predict:** what
# does the matrix look like that makes 7 numbers out of 3 by *painting* with the same taps?

# %%
taps, size, stride = (1, 2, 3), 7, 2
M = np.zeros((3, size), dtype=int)
for row in range(3):
    M[row, stride * row : stride * row + 3] = taps
paints = np.zeros((size, 3), dtype=int)
for col in range(3):
    paints[stride * col : stride * col + 3, col] = taps
plot.grids([M, paints], ["the convolution: 7 → 3", "painting: 3 → 7"],
           title="Painting is the convolution's matrix with rows and columns swapped")

# %% [markdown]
# It is $M^T$, the **transpose**. That is the whole secret of the name. And it explains more:
#
# - Forward, $y = M x$. The chain rule says $dx = M^T dy$: each pixel collects from all who have
#   read it (lesson 9). So **the gradient of a convolution is a transposed convolution**, and your
#   gather is lesson 9's `conv2d_dx`, with fewer questions asked.
# - The other way round, the gradient of painting, $y = M^T x$, is $dx = M \, dy$: an ordinary
#   **convolution**, with the same weight, stride and padding.
# - $M^T M$ is not 1. The *size* comes back and the numbers do not. (Some call the layer
#   *deconvolution*, which promises too much.)

# %%
row = np.array([5, 1, 4, 1, 5, 9, 2])
print("a row:                        ", row)
print("convolved:                    ", M @ row)
print("and by the transpose back to 7:", M.T @ M @ row)

# %% [markdown]
# ### Exercise: how large does it get?
#
# The size of a convolution's result is rounded down (lesson 8): with 3 taps and stride 2, both 7
# and 8 pixels give 3. So which of the two should 3 go back to? The patches reach as far as 7.
# **`output_padding`** says how many rows and columns to add at the far end. No patch need reach
# them: they are 0, or the bias. Write the formula for one direction.

# %% exercise="transposed_size"
def transposed_size(size, taps, stride, padding, output_padding):
    return TODO


check("transposed_size", transposed_size)

# %%
hint("transposed_size")

# %% [markdown]
# ### Exercise: forward, by an old kernel
#
# You have all you need. `conv2d_dx(dy, weight, dx, stride, padding)` is the kernel of lesson 9,
# one thread for each number of dx. Which of our arrays stands in the place of which? (The lessons'
# kernels here are the course's own copies, which you have seen as solutions.)

# %%
def blocks(n_threads):
    """How many blocks of 64 threads there must be for so many threads; at least one."""
    return max(1, -(-n_threads // BLOCK))

# %% exercise="transposed_by_dx"
def transposed_by_dx(x, weight, stride, padding, output_padding):
    (N, _, H, W), (_, K, R, S) = x.shape, weight.shape
    P, Q = TODO, TODO
    y = np.empty((N, K, P, Q), dtype=np.float32)
    conv2d_dx[blocks(y.size), BLOCK](TODO, TODO, TODO, stride, padding)
    return y


check("transposed_by_dx", transposed_by_dx)

# %%
hint("transposed_by_dx")

# %% [markdown]
# ### Exercise: the gradients
#
# Now backwards. dx is a convolution: lesson 8's
# `conv2d_direct(x, weight, bias, y, stride, padding)`, one thread for each number of its y. (Its
# bias should be 0.) And dweight? Each weight $(c, k, r, s)$ was multiplied by pixels of x, and
# went to places of y. The convolution that we walk backwards had y's size as its input. So lesson
# 9's `conv2d_dweight(dy, x, dweight, stride, padding)`, one *warp* for each weight, will do, if dy
# and x are given the right places. **Predict** them.

# %% exercise="transposed_backward"
def transposed_backward(dy, x, weight, stride, padding):
    dx, dweight = np.empty(x.shape, np.float32), np.empty(weight.shape, np.float32)
    no_bias = np.zeros(x.shape[1], np.float32)
    TODO  # dx: launch conv2d_direct
    TODO  # dweight: launch conv2d_dweight, a warp for each weight
    return dx, dweight


check("transposed_backward", transposed_backward)

# %%
hint("transposed_backward")

# %% [markdown]
# Once more by **finite differences**, which know no derivation. `loss` is $\sum dy \cdot y$, so
# its gradients are those that `transposed_backward` should give for this dy.

# %%
x, weight = rng.normal(size=(2, 3, 4, 3)).astype(f), rng.normal(size=(3, 2, 3, 3)).astype(f)
y = use("transposed_by_dx", transposed_by_dx)(x, weight, 2, 1, 1)
dy = rng.normal(size=y.shape).astype(f)
mine = use("transposed_backward", transposed_backward)(dy, x, weight, 2, 1)


def loss(which, place, step):
    moved = [x.astype(float), weight.astype(float)]
    moved[which][place] += step
    return (dy * reference.conv_transpose2d(*moved, stride=2, padding=1, output_padding=1)).sum()

# %%
for which, place in ((0, (0, 0, 0, 0)), (0, (1, 2, 3, 1)), (1, (0, 1, 0, 2)), (1, (2, 0, 1, 1))):
    slope = (loss(which, place, 1e-4) - loss(which, place, -1e-4)) / 2e-4
    name = ("dx", "dweight")[which] + str(list(place))
    print(f"{name:20} finite difference {slope:+.5f}, yours {mine[which][place]:+.5f}")

# %% [markdown]
# Three passes, and no new kernel: each pass of a transposed convolution *is* a pass of a
# convolution.
#
# | pass of the transposed convolution | the convolution's pass | takes for its x | takes for its dy |
# |---|---|---|---|
# | forward, y from x | dx | | our x |
# | dx from dy | forward | our dy | |
# | dweight from dy and x | dweight | our dy | our x |
#
# The course's `conv_transpose2d` does the same: all of its gradients are `conv2d`'s kernels.

# %% [markdown]
# ## 5 · The checkerboard
#
# Back to forward. How many patches cover each pixel of y? **Predict** it for brushes of 3 × 3, 2 ×
# 2 and 4 × 4, all with stride 2. Which of them treat all pixels alike?

# %%
def covered(taps, stride, n):
    """By how many patches each pixel of y is covered, for n × n pixels of x."""
    counts = np.zeros((n - 1) * stride + taps, dtype=int)
    for h in range(n):
        counts[stride * h : stride * h + taps] += 1
    return np.outer(counts, counts)


counts = [covered(taps, 2, 3) for taps in (3, 2, 4)]
plot.grids(counts, ["3 × 3 taps", "2 × 2 taps", "4 × 4 taps"], shade=[counts[0], None, counts[2]],
           title="Stride 2: by how many patches each pixel is covered")

# %% [markdown]
# With 3 taps, pixels are covered by 1, 2, 2 or 4 patches, by turns. Where the stride divides the
# number of taps, all pixels inside are covered by equally many. So give the layers something
# perfectly *flat*, a grey wall, and see what they make of it. In the first all taps are alike. In
# the others they are random, as in a network that has not learned yet. The last one does without
# painting: it repeats each pixel (**nearest-neighbour upsampling**), and then comes an ordinary
# convolution. **Predict** which of the four walls stay flat.

# %%
wall = np.ones((1, 1, 8, 8))


def brush_of(taps, alike=False):
    brush = np.ones((1, 1, taps, taps)) if alike else rng.uniform(0.2, 1.8, (1, 1, taps, taps))
    return brush / brush.sum()

# %%
enlarged = [4 * reference.conv_transpose2d(wall, brush, stride=2, padding=1)[0, 0]
            for brush in (brush_of(3, alike=True), brush_of(3), brush_of(4))]
repeated = reference.upsample(wall, (18, 18))
enlarged.append(reference.conv2d(repeated, brush_of(3))[0, 0])
plot.images([each[1:15, 1:15] for each in enlarged],
            ["3 × 3, taps alike", "3 × 3, random", "4 × 4, random", "repeated, then 3 × 3"],
            vmin=0, vmax=2, title="A grey wall, enlarged in four ways (away from its rim)",
            alt="Three patterns that repeat every two pixels, and a grey square without any")

# %% [markdown]
# <details><summary>Which stay flat, and why</summary>
#
# Only the last. With 3 taps even equal weights give the **checkerboard**: it is the picture of the
# counts. With 4 taps (or 2) the counts are the same inside, and yet there is a pattern, because
# each of the four sorts of pixel is reached by other taps. A network *can* learn weights that make
# it flat, and with 3 taps, too: the tent of section 2 is flat. But it has to learn it, and its
# gradients have the pattern as well. Upsampling and a convolution treat all pixels alike from the
# start.
# </details>
#
# Why not always upsample, then? It has a price. **Predict:** how many products does each pixel of
# y take, for a channel of x: by 2 × 2 taps with stride 2? And by upsampling and a convolution of 3
# × 3?
#
# <details><summary>The price</summary>
#
# One, against nine. And the convolution reads a picture of four times the size. U-Nets mostly take
# 2 × 2 with stride 2, and leave it to the 3 × 3 convolutions after it to smooth things out.
# Networks that *make* pictures, whose patterns people would see, mostly upsample. The course has
# the kernels of both: `conv_transpose2d` and `upsample`.
# </details>

# %% [markdown]
# A good place for a break. Next, a network.

# %% [markdown]
# ## 6 · The U-Net
#
# The **U-Net** (Ronneberger, Fischer and Brox, 2015) goes down by pooling, where pixels see much,
# and comes up again by transposed convolutions. On each level, it puts the channels that it had
# *on the way down* beside those that come up from below: a **skip connection**. The next
# convolution sees both: what is there (from below), and where exactly (from the side).
#
# "Beside" means concatenated, along the axis of channels. And it must fit: 9 rows are pooled to 4,
# and 4 come back as 8. The missing row is filled with zeros.
#
# ### Concatenation without copying
#
# The obvious way makes $y$ first, and then copies it and the skip into a new, larger array.
# **Predict:** with y and the skip of equal size, how many times is an array of this size read or
# written, from the transposed convolution's store on? What is the least that is possible?
#
# <details><summary>Reads and writes</summary>
#
# Store y, read y, read the skip, write both: 5. The least is 1. Allocate the joined array first.
# Let the layer on the way down store the skip in its half at once, and let the transposed
# convolution store y in the other half. Nothing has to be copied.
# </details>
#
# ### Exercise: into its half
#
# Write the transposed convolution of the U-Net, 2 × 2 taps with stride 2, so that it stores into
# the K channels of `joined` from channel `first` on. `joined` may have one row or column more than
# 2 · H and 2 · W: those get 0. The other channels belong to somebody else. There are enough
# threads for N · K · P · Q numbers.

# %% exercise="upsample_into"
@cuda.jit
def upsample_into(x, weight, joined, first):
    C, H, W = x.shape[1:]
    N, _, P, Q = joined.shape
    K = weight.shape[1]
    i = cuda.grid(1)
    if i < N * K * P * Q:
        n, k, p, q = i // (K * P * Q), i // (P * Q) % K, i // Q % P, i % Q
        total = ZERO
        TODO  # patches of 2 × 2 do not overlap: which pixel, which tap?
        TODO  # store


check("upsample_into", upsample_into)

# %%
hint("upsample_into")

# %%
x, weight = rng.normal(size=(1, 3, 4, 4)).astype(f), rng.normal(size=(3, 2, 2, 2)).astype(f)
skip = rng.normal(size=(1, 2, 9, 9)).astype(f)
joined = np.empty((1, 4, 9, 9), dtype=f)
joined[:, :2] = skip  # in a real network, the layer before has stored it here
with simulator.trace() as into_trace:
    use("upsample_into", upsample_into)[blocks(2 * 81), BLOCK](x, weight, joined, 2)
up = np.pad(reference.conv_transpose2d(x, weight, stride=2), ((0, 0), (0, 0), (0, 1), (0, 1)))
print(f"largest difference from a concatenation {abs(joined - np.concatenate([skip, up], axis=1)).max():.0e}")
stored = {site.op: site.bytes for site in into_trace.sites if site.array == "joined"}
print(f"bytes of joined that were touched: {stored}, of {joined.nbytes:,}")

# %% [markdown]
# The gradient of a concatenation is simple: each part gets its channels of dy, and a kernel that
# takes any strides reads them where they lie. Where zeros were filled in or rows cut off, one has
# to take care. What was cut off had no part in the result, so its gradient is **0**, and somebody
# has to write it. What was filled in belongs to nobody: its gradient is dropped. It is a favourite
# mistake to return the gradient in the size of the crop. Here is the course's `cropped` on the
# tape of lesson 12:

# %%
from course_lib import autograd, backend
from course_lib.autograd.layers import cropped

backend.set_backend(library="numpy")
large = autograd.tensor(np.ones((1, 1, 6, 6), dtype=f), requires_grad=True)
cut = cropped(large, (3, 4))
weights = np.arange(1, 13, dtype=f).reshape(1, 1, 3, 4)
(cut * autograd.tensor(weights)).sum().backward()
gradients = [each[0, 0].astype(int) for each in (weights, large.grad)]
plot.grids(gradients, ["gradient of the crop, 3 × 4", "gradient of x, 6 × 6"],
           title="The gradient of a crop: back into its place, zeros around it")

# %% [markdown]
# ### A U-Net in three classes
#
# The tape of lesson 12 has layers with gradients: `Conv2D`, `BatchNorm2D`, `MaxPool2D`,
# `TransposeConv2D`. A U-Net is a thing inside a thing: a level has a convolution, a pooling,
# *whatever is below*, a transposed convolution back up, and a convolution that merges. Whether the
# skip is used can be switched. Without it, zeros take its place, so that both networks have the
# same size and the same first weights.

# %%
class Block(autograd.Module):
    """A convolution of 3 × 3, batch norm, ReLU."""

    def __init__(self, c_in, c, random):
        self.conv = autograd.Conv2D(c_in, c, 3, padding=1, bias=False, random=random)
        self.norm = autograd.BatchNorm2D(c)

    def forward(self, x):
        return autograd.relu(self.norm(self.conv(x)))

# %%
class Level(autograd.Module):
    def __init__(self, c_in, c, below, skip, random):
        self.down, self.pool, self.below = Block(c_in, c, random), autograd.MaxPool2D(2), below
        self.up = autograd.TransposeConv2D(2 * c, c, random=random)
        self.merge, self.skip = Block(2 * c, c, random), skip

    def forward(self, x):
        here = self.down(x)
        up = self.up(self.below(self.pool(here)))
        return self.merge(autograd.concat([here if self.skip else here * 0.0, up]))

# %%
class Network(autograd.Module):
    """Three levels of 4, 8 and 16 channels, 32 at the bottom; two logits for each pixel."""

    def __init__(self, skip):
        random = np.random.default_rng(0)
        inside = Block(16, 32, random)
        for c_in, c in ((8, 16), (4, 8), (1, 4)):
            inside = Level(c_in, c, inside, skip, random)
        self.inside, self.head = inside, autograd.Conv2D(4, 2, 1, random=random)

    def forward(self, x):
        return self.head(self.inside(x))

# %% [markdown]
# 80 steps for each, with 8 of 64 drawn pictures at a time. **Predict:** will the network without
# skips learn nothing? Or what will it be good at, and what not?

# %%
images, labels = drawn(64, np.random.default_rng(1))


def trained(network, steps=80):
    optimizer, order, losses = autograd.Adam(network.parameters(), lr=0.01), np.random.default_rng(2), []
    for _ in range(steps):
        rows = order.integers(0, len(images), 8)
        loss = autograd.combined_loss(network(autograd.tensor(images[rows])), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.data))
    return losses

# %%
networks = {"with skips": Network(True), "without skips": Network(False)}
losses = {name: trained(network) for name, network in networks.items()}
plot.curves(np.arange(80), losses, xlabel="step", ylabel="loss (cross-entropy and Dice)",
            title="The same network, with and without skip connections")

# %%
test_images, test_labels = drawn(16, np.random.default_rng(3))
answers = {}
for name, network in networks.items():
    network.eval()
    with autograd.no_grad():
        answers[name] = network(autograd.tensor(test_images)).data.argmax(axis=1)
    hit, either = (answers[name] & test_labels).sum(), (answers[name] | test_labels).sum()
    print(f"{name:14} {hit / either:.0%} of the water (IoU), {np.mean(answers[name] == test_labels):.1%} of all pixels")

# %%
shown = [each[i] for i in (5, 9) for each in (test_images[:, 0], test_labels, *answers.values())]
plot.images(shown, ["a new picture", "water", "found with skips", "found without skips"] * 2, columns=4,
            title="With skips the river is found; without, only the lakes, roughly",
            alt="Two new pictures, their water, and the answers of both networks: with skips nearly the same as "
            "the water, without skips rounded lakes and pieces of rivers")

# %% [markdown]
# <details><summary>What the network without skips is good at</summary>
#
# It finds the lakes, roughly: everything it knows about a shore has passed through 4 × 4 places at
# the bottom. 32 channels there say more than one bit each, so it is better than the blocks of
# section 1. But the river comes in pieces, and shores are off by a pixel or two. With skips the
# fine edges need not pass through the bottom, and the network is better after a few dozen steps
# than the other one at the end.
# </details>
#
# (**IoU**, *intersection over union*, divides the pixels that are water in both by those that are
# water in either. Where there is little water it says more than the share of right pixels, which
# an answer of "all land" would make look good.)
#
# Lesson 14 does this with real radar pictures, and with `autograd.UNet`, which has two
# convolutions in each block.

# %% [markdown]
# ### Your functions carry it
#
# A layer of the tape asks by name for the operation that it needs, and `autograd.replacing` puts
# another in its place. So all ways up can go through your `transposed_by_dx`, and back through your
# `transposed_backward`, which launch the kernels of lessons 8 and 9: on a GPU if there is one, else in
# the simulator. (The way back hands them a part of a concatenation's gradient, with gaps between its
# pictures. numba copies only arrays without gaps to a GPU.) One step on a quarter of a picture. **Predict:** will loss and gradients be the same, bit by bit?

# %%
forth = use("transposed_by_dx", transposed_by_dx)
back = use("transposed_backward", transposed_backward)


class YourTransposed:
    def forward(x, weight, bias, *, stride, padding):
        return forth(x, weight, stride, padding, 0) + bias[:, None, None]

    def backward(dy, x, weight, *, stride, padding, with_bias, needs):
        dy = np.ascontiguousarray(dy)
        return *back(dy, x, weight, stride, padding), dy.sum(axis=(0, 2, 3))

# %%
def one_step(network):
    logits = network(autograd.tensor(images[:1, :, :16, :16]))
    loss = autograd.combined_loss(logits, labels[:1, :16, :16])
    loss.backward()
    return float(loss.data), np.concatenate([p.grad.ravel() for p in network.parameters()])


loss, gradients = one_step(Network(True))
with autograd.replacing(conv_transpose2d=YourTransposed):
    your_loss, your_gradients = one_step(Network(True))
print(f"loss {loss:.6f} by NumPy, {your_loss:.6f} by your functions")
print(f"{your_gradients.size:,} gradients, largest difference {abs(your_gradients - gradients).max():.0e}")

# %% [markdown]
# Not bit by bit: the sums are the same, but not their order. Lesson 14 lets your kernels do the
# convolutions, too.

# %% [markdown]
# ## 7 · Where are the work and the memory?
#
# The U-Net of the course: depth 4, two 3 × 3 convolutions in each block, and channels that double
# on each level down: 32, 64, 128, 256, and 512 at the bottom. Pictures are 256 × 256. **Predict,**
# from one level to the next one down, what happens to the parameters, to the FLOPs, and to the
# numbers that are kept for the backward pass. Which level has the most of each?

# %%
DEPTH, CHANNELS, IMAGE = 4, 32, 256
unet = autograd.UNet(in_channels=2, num_classes=2, depth=DEPTH, initial_channels=CHANNELS)
levels = [{"parameters": 0, "FLOPs": 0, "kept": 0} for _ in range(DEPTH + 1)]
for name, parameter in unet.named_parameters():
    part, number = (name.split(".") + ["0"])[:2]
    level = int(number) if part == "down" else 0 if part == "head" else DEPTH - 1 - int(number)
    levels[level]["parameters"] += parameter.data.size
    if parameter.data.ndim == 4:  # a weight: each of its numbers is used once for each place
        places = (IMAGE >> level + (part == "up")) ** 2
        results = parameter.shape[1] * 4 if part == "up" else parameter.shape[0]
        levels[level]["FLOPs"] += 2 * parameter.data.size * places
        levels[level]["kept"] += results * places

# %%
print(f"{'level':>5}{'side':>7}{'channels':>10}{'parameters':>13}{'10⁹ FLOPs':>12}{'kept (MB)':>11}")
for number, level in enumerate(levels):
    print(f"{number:5}{IMAGE >> number:7}{CHANNELS << number:10}{level['parameters']:13,}"
          f"{level['FLOPs'] / 1e9:12.2f}{level['kept'] * 4 / 1e6:11.1f}")
wholes = {what: {f"level {number}": level[what] for number, level in enumerate(levels)}
          for what in ("parameters", "FLOPs", "kept")}
plot.shares(wholes, highlight="level 0", xlabel="share of the whole network (%)",
            title="Parameters lie at the bottom, memory at the top, work everywhere")

# %% [markdown]
# <details><summary>Why</summary>
#
# One level down there are twice the channels on both sides of a convolution, so four times the
# *parameters*, and a quarter of the places. So the *FLOPs* stay about the same. (The bottom has no
# way up, so it has less.) What is *kept* has twice the channels and a quarter of the places: half.
#
# So for a larger picture the top level is what runs out of memory, and adding a level at the
# bottom costs parameters and little else. And a kernel for this network meets all shapes, from 256
# × 256 with 32 channels to 16 × 16 with 512: there is no single shape to be tuned for.
# </details>
#
# (*Kept* counts what the convolutions write, in float32, for one picture. The tape keeps what
# batch norm and ReLU make of it as well. The table says what share the levels have, not how much
# memory you need.)

# %% [markdown]
# ## 8 · Measured
#
# The course's ladder, on a small layer, so that you know the rungs. `scatter` and `gather` are
# what you have written. `conv_gradient` is section 4: the dx of a convolution, by lesson 9's best
# kernel. `upsample2x` is for 2 × 2 taps with stride 2. There a pixel makes a block of 2 × 2 and no
# block overlaps another. So y is *one product of matrices*, pixels × C times C × 4 · K, whose
# results are stored interleaved.

# %%
from course_lib.kernels import conv_transpose2d

x, weight = rng.normal(size=(1, 8, 4, 4)).astype(f), rng.normal(size=(8, 8, 2, 2)).astype(f)
expected = reference.conv_transpose2d(x, weight, stride=2)
for variant in conv_transpose2d.FORWARD:
    y = conv_transpose2d.forward(cuda.to_device(x), cuda.to_device(weight), stride=2, variant=variant)
    print(f"{variant:14} largest error {abs(y.copy_to_host() - expected).max():.0e}")

# %% [markdown]
# Then a level of a U-Net: 8 pictures, 256 → 128 channels, from 64 × 64 to 128 × 128, in float32.
# The three passes do the same number of FLOPs. **Predict** which of them is the fastest for us,
# and which is the worst beside cuDNN. (In section 4 each was a pass of a convolution.)

# %%
LEVEL = (8, 256, 128, 64)


@cache
def measured_here():
    from course_lib.benchmarks import conv_transpose2d as benchmark

    return {"records": benchmark.run(shapes=[LEVEL], dtypes=["float32"])}


@cache
def measured(name):
    """The measurement called `name` of that level; None if there is none."""
    found = bench.find(recorded if SIMULATED else measured_here(), name=name, shape=LEVEL)
    device = recorded["device"]["name"] if SIMULATED else bench.device_facts()["name"]
    return found[0] | {"source": {"device": device, "date": results_table.when(found[0])}} if found else None

# %%
def show(name, title):
    record = measured(name)
    if record is None:
        return print(f"{name} has not been measured on a GPU yet.")
    return plot.times(record["rows"], title=title, **record["source"])


show("conv_transpose2d.forward", "Forward, float32, 8 × 256 → 128 channels, 64 × 64")

# %%
show("conv_transpose2d.dx", "The gradient of x, the same level")

# %%
show("conv_transpose2d.dweight", "The gradient of the weight, the same level")

# %% [markdown]
# And all that is recorded, at every level of a U-Net, in float32, in TF32 and in bfloat16 with
# channels last. A dot is a case: our time, divided by that of the *fastest* peer, whichever memory
# format that one likes best. Right of the line we are slower. **Predict** on which side most dots
# are.

# %%
groups, worst = {}, (0, None, None, None)
for record in bench.find(recorded, name="conv_transpose2d.*"):
    ours = min(row["microseconds"] for row in record["rows"] if row["kind"] == "ours")
    peer = min((row for row in record["rows"] if row["kind"] == "peer"), key=lambda row: row["microseconds"])
    ratio = ours / peer["microseconds"]
    groups.setdefault(record["name"].removeprefix("conv_transpose2d."), []).append(ratio)
    worst = max(worst, (ratio, record["name"], record["shape"], peer["label"]))
if groups:
    print("{:.1f} times as long: {} of {}, beside {}".format(*worst))
plot.ratios(dict(sorted(groups.items())), title="Transposed convolution: every recorded case",
            device=recorded["device"]["name"]) if groups else print("Nothing is recorded yet.")

# %%
for name, ratios in sorted(groups.items()):
    print(f"{name:22} {min(ratios):.2f} to {max(ratios):.2f} times as long as the fastest peer")

# %% [markdown]
# **Explaining the gap.** In float32 we win, forward and for dweight, and lose dx. With channels last,
# in bfloat16, we lose everywhere, and dx takes up to twice as long. In TF32 we lose most. What we
# know of the reasons:
#
# - *Forward, float32*: `upsample2x` reads x once, multiplies on tensor cores with each number in
#   two parts (lesson 8), and stores by 16 bytes. cuDNN's way computes a gradient of a convolution,
#   for any filter and stride.
# - *dx* is a convolution of 2 × 2 taps with stride 2. Its windows do not overlap, so it is
#   *nothing but* a product of matrices. The general implicit GEMM, which served here at first,
#   fetched every number by itself, 4 bytes at a time, from where a table says that the tap meets
#   it. Now a kernel writes dy once more, packed so that what a pixel multiplies lies together, and
#   a matrix kernel takes one picture after another. The record of the worst case notes what was
#   launched, and how fast each way is:

# %%
for record in bench.find(recorded, name=worst[1], shape=worst[2]):
    for launch in record["launches"]["ours"]:
        print(launch["kernel"].rpartition(".")[2], "with", launch["grid"][0], "blocks of", launch["block"][0], "threads")
    for row in record["rows"]:
        print(f"{row['label']:22}{row['microseconds']:8.1f} µs{row['tflops']:8.1f} TFLOP/s, error {row['error']:.0e}")

# %% [markdown]
# - *TF32, at the bottom of the U-Net*: there a picture has few places and many channels, so each
#   of our products is small. A launch for each picture cannot fill the GPU, and the next one
#   starts when it has ended. cuDNN makes one product of all pictures. With channels last the terms
#   of a sum lie side by side, so that it need not pack, and tensor cores take them from shared
#   memory as they are. TF32 makes the arithmetic eight times as fast, and arithmetic was not what
#   we waited for. *The slower the rest, the less a faster unit helps* (Amdahl's law, lesson 7).
# - *The other losses in TF32*: cuDNN's best time is with channels last, everywhere. Ours get pictures
#   as PyTorch makes them.
# - *bfloat16, and dx in float32*: we have not found out why. In bfloat16 both have channels last,
#   and ours use `wgmma` (lesson 8), too. In float32 cuDNN's best dx is not with channels last.
#
# What would fix the worst is known: one launch for all pictures, by `wgmma` as in bfloat16. A
# benchmark that shows such a factor is worth more than one that leaves the case out.

# %% [markdown]
# ## What the profiler says
#
# The kernels of section 3 and what section 4 made of them, all on the layer of section 3: requests
# and sectors of global memory, as the profiler would count them, and how often a warp went two
# ways.

# %%
x, weight = rng.normal(size=(1, 4, 16, 16)).astype(f), rng.normal(size=(4, 1, 3, 3)).astype(f)
with simulator.trace() as traces["lesson 9's dx"]:
    use("transposed_by_dx", transposed_by_dx)(x, weight, 2, 1, 1)
print(f"{'':16}{'loads':>8}{'sectors':>9}{'atomics':>9}{'sectors':>9}{'stores':>8}{'sectors':>9}{'divergent':>11}")
for name, trace in traces.items():
    line = f"{name:16}"
    for op, width in (("load", 8), ("atomic", 9), ("store", 8)):
        sites = [site for site in trace.sites if site.op == op and site.space == "global"]
        line += f"{sum(s.requests for s in sites):{width},}{sum(s.sectors for s in sites):9,}"
    print(line + f"{sum(branch.divergent for branch in trace.branches):11,}")

# %% [markdown]
# Lesson 9's kernel needs half as many loads again as your gather. It does the same products, but
# it tries tap 0, tap 1 and tap 2 one after another, and each of them suits half of the lanes at
# most. Yours is done after two rounds.
#
# In a real report look first for atomics (`red`): a layer that scatters shows thousands of them in
# the L2 cache. Then look at the *active threads per warp*: a stride of 2 that is not sorted by
# remainders leaves lanes waiting.
#
# ## Where the real libraries go further
#
# - **cuDNN** has no transposed convolution of its own. PyTorch calls the convolution's backward,
#   *dgrad*, as you did in section 4. With a stride it is cut into one small convolution for each
#   remainder, so that no tap is asked in vain.
# - **Implicit GEMM** (lesson 8) does each of these: an index calculation says where an element of
#   the matrix comes from, and nothing is spread out. CUTLASS calls its kernels *strided dgrad*.
# - **Fusing**: bias, batch norm and ReLU while the sums are in registers, and the store into a
#   part of the concatenation, as your kernel does it. The course's `forward(..., out=)` takes a
#   slice, too.
# - **Checkpointing** the top levels: throw away what section 7 called *kept*, and compute it again
#   on the way back. It is the top of the U-Net that is worth it.
#
# ## Three questions
#
# <details><summary>1. With 2 × 2 taps and stride 2 patches do not overlap. Does the scatter kernel need its atomics?</summary>
#
# Yes, as long as a thread has one channel of x: the C channels of a pixel paint the same four
# places. If a thread takes all channels of its pixel and adds up in a register, then nobody else
# writes there, and a plain store will do. That is a gather, seen from the pixel of x.
# </details>
#
# <details><summary>2. Somebody puts a transposed convolution with the same weights behind a
# convolution, to get the picture back. What will come out?</summary>
#
# A picture of the right size, and another one: M transposed times M is not 1. After a blur, for
# example, it is blurred twice.
# </details>
#
# <details><summary>3. A U-Net of depth 4 gets pictures of 250 × 250. On which levels do the sizes not fit on the way up?</summary>
#
# 250, 125, 62, 31, 15. On the way up 15 becomes 30, where the skip has 31: a row and a column of
# zeros. 31 becomes 62, which fits. 62 becomes 124, and the skip has 125. 125 becomes 250, which
# fits. Multiples of 16 fit everywhere.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# Lesson 14 finds water on real radar pictures, with the U-Net of this lesson: losses for classes
# that are rare, pixels that nobody knows, and a threshold to beat.
