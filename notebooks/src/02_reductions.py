# %% [markdown]
# # 2 · Reductions
#
# **After this lesson** you can let threads work together: count and add with thousands of them at
# once, say what a race is and find it, use barriers, shared memory, atomics and shuffles, read an
# access map, and write global average pooling, a layer of real networks, with its gradient.
#
# **You need** [lesson 1](01_threads_and_memory.ipynb): guard, grid-stride loop, warp, sector. When
# numba refuses a line, see there
# [which Python works in a kernel](01_threads_and_memory.ipynb#Which-Python-works-in-a-kernel).
#
# **Time:** 180 minutes; there are good places to pause after sections 3, 5 and 6. All cells together
# run in less than half a minute in the simulator. On a GPU the speeds are measured on your own
# machine, otherwise you see recorded ones. The words are collected in the [glossary](glossary.md).

# %%
import math
import textwrap

import matplotlib.cbook
import matplotlib.image
import numpy as np

from course_lib import SIMULATED, bench, cuda, plot, results_table, simulator
from course_lib.teach import TODO, check, hint, progress, solution, use

# %% [markdown]
# ## 1 · A picture that is counted wrong
#
# Until now each thread had results of its own. But how bright is a picture, all in all? What is the
# sum of a row, its largest number? Many numbers go in and few come out. This is called a
# **reduction**, and it is the first job in which threads get in each other's way.
#
# Here is our photograph again, this time in bytes, so that a brightness is a whole number from
# 0 (black) to 255 (white).

# %%
with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
    photo = matplotlib.image.imread(file, format="jpg")[20:532]
picture = photo.reshape(128, 4, 128, 4, 3).mean(axis=(1, 3, 4)).astype(np.uint8)
pixels = picture.ravel()  # as one long row: 16,384 bytes
plot.images([picture], ["128 × 128 pixels, one byte each"], vmin=0, vmax=255)

# %% [markdown]
# How many of its pixels have brightness 0, how many 1, and so on up to 255? These 256 numbers are
# the picture's **histogram**. In words: *for each pixel, look up its brightness `v`, and add 1 to
# `counts[v]`*. With one thread per pixel that is short. (We wrote `counts[v] += 1` in its
# three steps, and the line in the middle will be explained in a minute.)

# %%
@cuda.jit
def count_pixels(x, counts):
    i = cuda.grid(1)
    if i < x.size:
        old = counts[x[i]]  # read
        cuda.syncwarp()
        counts[x[i]] = old + 1  # add, and write


counts = np.zeros(256, dtype=np.int32)
count_pixels[64, 256](pixels, counts)

# %% [markdown]
# **Predict:** 64 blocks of 256 threads are 16,384 threads, one for each pixel. What is the sum of
# `counts`?

# %%
right = np.bincount(pixels, minlength=256)
plot.histograms(
    {"counted one after another, by NumPy": right, "counted by our kernel": counts},
    xlabel="brightness (0 is black, 255 is white)", ylabel="pixels",
)

# %% [markdown]
# Most of the pixels are missing, and nobody complained. The rarer a brightness is, the better it
# fares: on the right, where there are few pixels of each, the counts are nearly correct. Where
# there are many, nearly all are lost.
#
# ### Two threads, step by step
#
# Take two neighbours in the dark uniform, both of brightness 13. Their threads are in the same
# warp, and a warp executes each instruction for all of its threads together: *all* read, then *all*
# add, then *all* write. Say `counts[13]` is 5 at that moment. **Predict** what it is afterwards.
# Then follow the picture from top to bottom.

# %%
A, B = "thread 0", "thread 1"
lost = [
    (A, "read", "reads 5", 5), (B, "read", "reads 5", 5),
    (A, "compute", "5 + 1 = 6", 5), (B, "compute", "5 + 1 = 6", 5),
    (A, "write", "writes 6", 6), (B, "write", "writes 6", 6),
]
plot.interleaving(lost, threads=(A, B), place="counts[13]", start=5,
                  title="Two pixels were counted, and the counter went up by one")

# %% [markdown]
# Thread 1 read *before* thread 0 wrote. It did not know of the other one, and wrote the same 6 over
# it. One pixel is lost. Nothing is wrong with either thread; it is the order of the six steps
# that is wrong. Here is a luckier one:

# %%
lucky = [
    (A, "read", "reads 5", 5), (A, "compute", "5 + 1 = 6", 5), (A, "write", "writes 6", 6),
    (B, "read", "reads 6", 6), (B, "compute", "6 + 1 = 7", 6), (B, "write", "writes 7", 7),
]
plot.interleaving(lucky, threads=(A, B), place="counts[13]", start=5,
                  title="The same six steps in another order: both are counted")

# %% [markdown]
# Two threads touch the same place, at least one of them writes, and nothing decides who comes
# first: this is a **race**. Its result depends on who is faster. It may be wrong every time, or
# once in a thousand runs, or only on your colleague's GPU.
#
# Would it help to write `counts[x[i]] += 1` in a single line? It is shorter for *us*. For the
# machine it is the same three steps. And yet:

# %%
@cuda.jit
def count_in_one_line(x, counts):
    i = cuda.grid(1)
    if i < x.size:
        counts[x[i]] += 1


counts = np.zeros(256, dtype=np.int32)
simulator.run(count_in_one_line, 64, 256, pixels, counts)
print("counted in the simulator:", counts.sum(), "of", pixels.size)

# %% [markdown]
# All are there! Do not rejoice. In the simulator, threads take turns, and each one runs on until it
# has to *wait* for others. Nobody waits in this kernel, so by luck all threads had the lucky order.
# The line `cuda.syncwarp()` above made the lanes of a warp wait for each other between reading and
# writing. That is how a GPU runs a warp as a rule, and there the short form is just as wrong:

# %%
recorded = bench.load_records()
ladder = bench.find(recorded, name="lesson_02.histogram")[0]
device, date = recorded["device"]["name"], results_table.when(ladder)
for row in ladder["rows"]:
    print(f"{row['label']:26} counted {row['counted_percent']:7.3f} % of the pixels")
print(f"on an {device}, with {ladder['shape'][0]:,} pixels ({date})")

# %% [markdown]
# With 67 million pixels, so many threads meet that next to nothing is left. And mark this: **a
# right result is no proof that there is no race.** We will need a better one, and section 3 has
# it.
#
# ### The cure: atomics
#
# What we want is that nobody gets in between reading and writing. The hardware has an instruction
# for just that: an **atomic** operation reads, adds and writes in one, *indivisibly* (which is what
# the Greek word meant). If many threads want the same place, the memory serves them one after
# another.
#
# ```python
# cuda.atomic.add(array, index, value)     # array[index] += value, indivisibly
# ```
#
# There is also `cuda.atomic.max`, `min`, `sub`, `exch` and some more.
#
# ### Exercise: a right histogram

# %% exercise="histogram"
@cuda.jit
def histogram(x, counts):
    i = cuda.grid(1)
    if i < x.size:
        TODO  # add 1 to counts[x[i]], indivisibly


check("histogram", histogram)

# %%
hint("histogram")

# %% [markdown]
# What is a histogram good for? Say that somebody wants to print our picture in four tones, black,
# dark, light and white, and each of them should cover a quarter of the paper. From the histogram a
# program can tell where to cut: it counts up from the darkest pixels until it has a quarter of all,
# then a half, then three quarters. With wrong counts it cuts in the wrong places:

# %%
kernel = use("histogram", histogram)
wrong, counts = np.zeros((2, 256), dtype=np.int32)
count_pixels[64, 256](pixels, wrong)
kernel[64, 256](pixels, counts)
print("right:", np.array_equal(counts, right))
prints, titles = [picture / 255], ["as taken"]
for name, numbers in (("wrong", wrong), ("right", counts)):
    share = np.cumsum(numbers) / numbers.sum()  # of the pixels that are not brighter
    tone = np.minimum(4 * share, 3).astype(int)[picture]  # 0, 1, 2 or 3 for each pixel
    prints.append(tone / 3)
    titles.append(f"cut by {name} counts: {np.mean(tone == 0):.0%} black")
plot.images(prints, titles, vmin=0, vmax=1)

# %% [markdown]
# The wrong counts do not look like a crash or like noise. They look like a result, and somebody may
# even like it better. Only, it is not what was asked for: too much of the paper is black. That is why
# races are feared.

# %% [markdown]
# ## 2 · Shared memory and barriers
#
# Atomics are right, but they queue. **Predict:** how many of our 16,384 threads want the most
# popular of the 256 counters?

# %%
popular = int(right.argmax())
print(f"brightness {popular}: {right[popular]} threads queue at one counter")

# %% [markdown]
# And the queue is a slow one, far away in the device's memory. It would be better if each block
# counted for itself first, close by, and only the 256 *results* of each block were added up at the
# end.
#
# For this there is **shared memory**: a small memory inside each multiprocessor that answers ten
# times sooner than the device's memory, or more. Each block gets a piece of its own, 48 KB at most
# if it does not ask for more, which all its threads can see and no other block can. It does not
# live longer than the block, and at first there is *anything* in it, not zeros.
#
# ```python
# mine = cuda.shared.array(256, np.int32)     # size and type must be constants
# ```
#
# ### Handing things over
#
# Shared memory is for handing things over from thread to thread, so *when* matters. Let us try it
# with something easier than a histogram: the edges of the picture. A pixel is on an edge where it
# differs from its neighbour to the left. A block handles a row: each thread puts its pixel into
# shared memory, then looks at what its neighbour has put there.

# %%
@cuda.jit
def edges_hasty(x, y):
    s = cuda.shared.array(128, np.float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    s[t] = x[row, t]
    left = s[max(t - 1, 0)]  # the leftmost pixel has no neighbour: it takes itself
    y[row, t] = abs(s[t] - left)

# %% [markdown]
# We let the simulator run it twice: once each block's threads from the first to the last, once from
# the last to the first. A GPU promises no order at all.
#
# **Predict:** which of the two pictures will be wrong, and why?

# %%
grey = (picture / 255).astype(np.float32)


def in_two_orders(kernel, n_blocks):
    found = []
    for order in ("forward", "reverse"):
        y = np.zeros_like(grey)
        simulator.run(kernel, n_blocks, 128, grey, y, order=order)
        found.append(np.nan_to_num(y, nan=1.0))
    return plot.images(found, ["first thread first", "last thread first"], vmin=0, vmax=0.3)


in_two_orders(edges_hasty, 128)

# %% [markdown]
# From the first to the last, every neighbour has been there before, and all goes well. From the
# last to the first, everyone looks before the neighbour has written, and finds whatever was in the
# memory. (In the simulator that is "not a number", so that one sees it. It is drawn white.)
#
# What is missing is a meeting point. A **barrier**, `cuda.syncthreads()`, lets each thread of a
# block wait until *all* of them have come there, and only then do they all go on. What was written
# before the barrier can be read after it.

# %%
@cuda.jit
def edges(x, y):
    s = cuda.shared.array(128, np.float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    s[t] = x[row, t]
    cuda.syncthreads()  # now all have written
    left = s[max(t - 1, 0)]
    y[row, t] = abs(s[t] - left)


in_two_orders(edges, 128)

# %% [markdown]
# ### The second barrier
#
# 128 blocks for 128 rows is fine. But let us save blocks: 16 of them, each of which does eight rows
# one after another. So we put a loop around, with the barrier in it.
#
# **Predict:** is that still right in both orders?

# %%
@cuda.jit
def edges_of_many_rows(x, y):
    s = cuda.shared.array(128, np.float32)
    t = cuda.threadIdx.x
    for row in range(cuda.blockIdx.x, x.shape[0], cuda.gridDim.x):  # gridDim.x: 16 blocks
        s[t] = x[row, t]
        cuda.syncthreads()  # now all have written
        left = s[max(t - 1, 0)]
        y[row, t] = abs(x[row, t] - left)


in_two_orders(edges_of_many_rows, 16)

# %% [markdown]
# This time it is the *first* picture that is wrong, the one that was right before. A thread that is
# done with its row runs ahead and puts its pixel of the *next* row into `s[t]`, where its neighbour
# to the right has not looked yet. So nobody may write again before all have **read**. That takes a
# second barrier, at the end of the loop. It is the one that everybody forgets.
#
# Remember it like this. Shared memory is a blackboard. One barrier after *writing*, so that nobody
# reads too early; one barrier after *reading*, so that nobody wipes too early.
#
# **A barrier is for all.** If only some threads of a block come to it, the others are waited for in
# vain. So never put one inside an `if` that not all threads of the block take in the same way. On a
# GPU that hangs, or goes on with rubbish.
#
# ### Exercise: a histogram for each block
#
# Now your blocks count for themselves. Each block has `mine`, 256 counters in shared memory, one for
# each `level` of brightness; there may be fewer threads than that, or more, hence the loops. How
# many barriers do you need, and where?

# %% exercise="histogram_shared"
@cuda.jit
def histogram_shared(x, counts):
    mine = cuda.shared.array(256, np.int32)
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        mine[level] = 0
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        level = x[i]
        TODO  # add 1 to mine[level]; and mind the barriers, before and after this loop
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        cuda.atomic.add(counts, level, mine[level])


check("histogram_shared", histogram_shared)

# %%
hint("histogram_shared")

# %% [markdown]
# Was it worth it? **Predict** how many times faster it has become, before you look at the times for
# 67 million pixels. (Each mark on the axis is ten times the one before.)

# %%
if not SIMULATED:
    from course_lib.benchmarks import lesson_02

    ladder = lesson_02.histograms()
    device, date = bench.device_facts()["name"], "just now"
factor = bench.times_as_fast(ladder, "atomics in shared memory", "atomics")
plot.durations(ladder["rows"], device=device, date=date,
               title=f"67 million pixels: atomics in shared memory are {factor:.0f} times as fast")

# %% [markdown]
# More than a hundred times. With atomics in the device's memory, 67 million additions queue at
# 256 counters, and at the popular ones the queues are long. (The wrong kernel is slow as well. Its
# threads do not wait for each other, but they all read and write the same few sectors.) In shared
# memory, a thousand blocks have queues of their own, and only 256 additions per block are left for
# the device's memory.
#
# **Explaining the gap.** A copy of as many bytes would need a fifth of the best time. What is left?
# One pixel is one byte, so a request of a warp is only one sector (the first question of lesson 1),
# and pixels of equal brightness, which tend to be neighbours, still queue in shared memory.

# %% [markdown]
# ## 3 · The sanitizer
#
# Looking at wrong pictures under several orders is a beginning. But one can find a race even where
# the result happens to be right. The course's **sanitizer** remembers, for each access to memory,
# which thread it was and which barriers that thread had passed. If two threads touch the same
# place, one of them writes, and no barrier (nor anything else) lies between the two, then nothing
# decided who came first, and it reports a race.
#
# Here is the loop with one barrier again, in the order in which it gave the *right* picture:

# %%
def tell(findings):
    for finding in findings:
        print(f"{finding.kind}, line {finding.line}: {finding.source}")
        print(textwrap.fill(finding.message, 90))


with simulator.sanitize() as report, simulator.options(order="reverse"):
    edges_of_many_rows[16, 128](grey, np.zeros_like(grey))
tell(report.findings)

# %% [markdown]
# It names the line, the threads and the cure. (`check` lets your kernel run under the sanitizer,
# too. The causes that `check` names are what the sanitizer has found.)
#
# Next, the histogram in one line, which had counted everything correctly in the simulator:

# %%
with simulator.sanitize() as report:
    count_in_one_line[64, 256](pixels, np.zeros(256, dtype=np.int32))
print(len(report.findings), "findings, of which the first is")
tell(report.findings[:1])

# %% [markdown]
# And a kernel that reverses a row, with the guard of lesson 1. **Predict** what is wrong with it:

# %%
@cuda.jit
def mirror(x, y):
    s = cuda.shared.array(64, np.float32)
    t = cuda.threadIdx.x
    if t < x.size:
        s[t] = x[t]
        cuda.syncthreads()
        y[t] = s[x.size - 1 - t]


x = np.arange(40, dtype=np.float32)
with simulator.sanitize() as report:
    mirror[1, 64](x, np.zeros_like(x))
tell(report.findings)

# %% [markdown]
# ### What it cannot see
#
# The sanitizer watches a run. What did not happen in that run, it cannot know. **Predict:** what
# does it say about `count_in_one_line` for these four pixels?

# %%
four_pixels = np.array([10, 20, 30, 40], dtype=np.uint8)
with simulator.sanitize() as report:
    count_in_one_line[1, 4](four_pixels, np.zeros(256, dtype=np.int32))
print("found something:", bool(report))

# %% [markdown]
# Four pixels, four different counters: nobody met, so there *was* no race. The kernel is as wrong
# as before. So choose inputs in which threads do meet, and sizes that do not fill the last block.
#
# There is a second limit. In the simulator, whatever one thread writes is at once seen by all
# others, in the order in which it was written. On a GPU, threads of *different blocks* may see two
# writes in another order, unless there is a **fence** between them, `cuda.threadfence()`. The
# sanitizer knows that rule and asks for the fence, but no wrong picture will ever show it here.
#
# NVIDIA has a tool of the same kind for real GPUs, `compute-sanitizer`, with the same first limit.

# %% [markdown]
# A good place for a break. Next: adding up, and what it costs.

# %% [markdown]
# ## 4 · The sum of a row
#
# `y[row]` should become the sum of `x[row, :]`. Lesson 1 had column sums with one thread per column,
# which went well. For rows, one thread per row is right, and simple, and slow: its 32 neighbours
# read 32 different rows at the same time, so every request touches 32 sectors. Also, a row of 1,000
# numbers then takes 1,000 steps, while most of the GPU may have nothing to do.
#
# So let a whole block work on one row. First each thread adds up its share, like cards: thread `t`
# takes elements `t`, `t + 256`, `t + 512`, … . Then there are 256 **partial sums**, one in each
# thread, and they must become one.
#
# ### A tree
#
# Adding up 256 numbers one after another takes 255 steps. But look at how a knock-out tournament
# does it: in each round the players pair off, and all matches of a round take place at the same
# time. **Predict:** how many rounds do 16 players need? And 256, and 1,024?
#
# Here is such a **tree** for 16 numbers. In round one, neighbours pair off; in the next, the
# winners, which are two places apart; then four, then eight. To draw it, the threads write down who
# added what.

# %%
@cuda.jit
def tree_of_neighbours(values, adder, source):
    s = cuda.shared.array(16, np.float32)
    t = cuda.threadIdx.x
    s[t] = values[0, t]
    cuda.syncthreads()
    step, k = 1, 0
    while step < 16:
        i = 2 * step * t  # this thread's place in this round
        if i < 16:
            s[i] += s[i + step]
            adder[k, i] = t  # only for the picture
            source[k, i] = i + step
        cuda.syncthreads()  # the round is over
        step, k = 2 * step, k + 1
        values[k, t] = s[t]  # only for the picture
        cuda.syncthreads()

# %%
values = np.zeros((5, 16), dtype=np.float32)
values[0] = np.arange(1, 17)
adder, source = np.full((2, 4, 16), -1)
tree_of_neighbours[1, 16](values, adder, source)
plot.tree(values, adder, source, title="Neighbours first: 16 numbers, 4 rounds")

# %% [markdown]
# Two arrows meet where a number is added to another one. A coloured box was written in that round,
# by the thread named beside it, which has the same colour all the way down; a grey one was left as
# it is. 16 numbers take 4 rounds, 256 take 8, and 1,024 take 10: each doubling costs one round more.
# Note the barrier after each round: what one thread has just written, another one reads in the next.
#
# ### Banks
#
# The tree is right. Still, there is something about it that a GPU does not like, and it has to do
# with how shared memory is built. It consists of 32 **banks** that work side by side. Its places,
# called *words*, have 4 bytes and are dealt to the banks like cards: a float32 number `s[i]` lies
# in bank `i % 32`. In one turn, each bank can serve *one* word. If the 32 lanes of a warp want
# words of 32 different banks, all are served at once. If two lanes want different words of the same
# bank, the request takes two turns: a **bank conflict**, a *two-way* one. (All lanes may read the
# *same* word; that takes one turn.)
#
# In the first round of the tree, lane `t` adds `s[2 t + 1]` to `s[2 t]`. **Predict:** how many
# different banks do the 32 lanes read `s[2 t]` from, and how many turns does that take? What about
# the second round, `s[4 t]`?
#
# Instead of calculating, let us watch. The course's **tracer** notes, for every line that touches
# memory, which lanes asked for which addresses:

# %%
@cuda.jit
def sum_neighbours(x, y):
    s = cuda.shared.array(256, np.float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    total = np.float32(0)
    for col in range(t, x.shape[1], 256):
        total += x[row, col]
    s[t] = total
    cuda.syncthreads()
    step = 1
    while step < 256:
        i = 2 * step * t
        if i < 256:
            s[i] += s[i + step]
        cuda.syncthreads()
        step *= 2
    if t == 0:
        y[row] = s[0]

# %%
rows = np.random.default_rng(0).normal(size=(4, 512)).astype(np.float32)
row_sums = np.zeros(4, dtype=np.float32)
with simulator.trace() as t:
    sum_neighbours[4, 256](rows, row_sums)
print("right:", np.allclose(row_sums, rows.sum(axis=1), atol=1e-4))
loads = next(site for site in t.sites if site.source == "s[i + step]")
plot.bank_map(t, loads, title="The worst request of the tree")

# %% [markdown]
# The picture shows the worst request. Each column is a bank, the number in a box is the lane that
# wants something there, and lanes that stand above each other have to queue. Eight lanes at each of
# four banks, and 28 banks stand idle. Here are all eight rounds, as the first warp of the
# first block goes through them:

# %%
turns = []
for request in loads.addresses[:8]:  # in bytes; -1 is a lane that has nothing to do
    words = np.unique(request[request >= 0]) // 4
    turns.append(int(np.bincount(words % 32).max()))
print("turns needed in rounds 1 to 8:", *turns)

# %% [markdown]
# In the first round 32 lanes share 16 banks, two at each; in the second 8 banks, four at each.
# Later it gets better only because there are fewer lanes left.
#
# The cure costs nothing: pair off differently. Let thread `t` add the element *half an array*
# further on. 256 numbers become 128, which lie side by side in the first half; then 64, 32, and so
# on. This is called *sequential addressing*.

# %% [markdown]
# ### Exercise: a tree of halves
#
# The block has `cuda.blockDim.x` threads: 32, 64, 128 or 256, always a power of two.

# %% exercise="block_sum"
@cuda.jit
def block_sum(x, y):
    partial = cuda.shared.array(256, np.float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    total = np.float32(0)
    for col in range(t, x.shape[1], cuda.blockDim.x):
        total += x[row, col]
    partial[t] = total
    cuda.syncthreads()
    step = cuda.blockDim.x // 2
    while step > 0:
        TODO  # in this round, threads below `step` add what lies `step` further on
        step //= 2
    if t == 0:
        y[row] = partial[0]


check("block_sum", block_sum)

# %%
hint("block_sum")

# %% [markdown]
# And the banks of your kernel:

# %%
kernel = use("block_sum", block_sum)
with simulator.trace() as t:
    kernel[4, 256](rows, row_sums)
plot.bank_map(t)

# %% [markdown]
# One turn per request, in every round. As a bonus, whole warps fall idle early (in the second
# round, threads 64 to 255 have nothing to do), where before a few lanes of *every* warp were kept
# busy.
#
# ### Without shared memory: shuffles
#
# The last five rounds take place inside one warp. Its 32 lanes have a direct way to each other: a
# **shuffle** hands a number from lane to lane, from register to register (a **register** is where a
# thread keeps its own variables). No shared memory, no bank, no barrier: the shuffle itself waits
# until all its lanes have come. (Lanes need not stay together by themselves. On GPUs since 2017 some
# may run ahead, and a program that relies on the contrary has a race.)
#
# ```python
# other = cuda.shfl_down_sync(0xFFFFFFFF, total, 16)   # the `total` of the lane 16 further on
# ```
#
# The first argument says which lanes take part, one bit for each; `0xFFFFFFFF` (hexadecimal: each
# F is four ones) is 32 ones, all of them. **All of them must come**, as to a barrier. Lanes at the end, which have nobody 16 further
# on, get their own number back; they add rubbish, but nobody looks at it.
#
# Let us see it with a warp whose lane `k` has the number `k`. Each line of the output shows what the
# first six lanes have after a step. **Predict** the first line, and which lane has the sum in the end.

# %%
@cuda.jit
def shuffle_down(y):
    lane = cuda.threadIdx.x
    total = np.float32(lane)
    for k in range(5):
        total += cuda.shfl_down_sync(0xFFFFFFFF, total, 16 >> k)  # 16, 8, 4, 2, 1
        y[k, lane] = total


steps = np.zeros((5, 32), dtype=np.float32)
shuffle_down[1, 32](steps)
for k in range(5):
    print(f"a step of {16 >> k:2}:", *steps[k, :6].astype(int), "…")
print("0 + 1 + … + 31 =", sum(range(32)))

# %% [markdown]
# ### Exercise: one warp per row
#
# A block has several warps, and each warp has a row of its own. They need not wait for each other.

# %% exercise="warp_sum"
@cuda.jit
def warp_sum(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        total = np.float32(0)
        for col in range(lane, x.shape[1], 32):
            total += x[row, col]
        TODO  # five shuffles: 16, 8, 4, 2, 1
        if lane == 0:
            y[row] = total


check("warp_sum", warp_sum)

# %%
hint("warp_sum")

# %% [markdown]
# (Why may the shuffle stand inside `if row < x.shape[0]`? Because all 32 lanes of a warp have the
# same row, so either all of them come or none.)
#
# Four ways to sum a row. **Predict** their order, the slowest first, for 131,072 rows of 512
# numbers. And what do you expect from getting rid of the bank conflicts?

# %%
ladder = bench.find(recorded, name="lesson_02.row_sum")[0]
if not SIMULATED:
    ladder = lesson_02.row_sums()
factor = bench.times_as_fast(ladder, "one warp per row", "tree, halves")
plot.ladder(ladder["rows"], ladder["copy_gbps"], device=device, date=results_table.when(ladder),
            title=f"131,072 rows of 512 numbers: a warp is {factor:.1f} times as fast as a tree")

# %% [markdown]
# **Explaining the gap.** One warp per row wins by far. One thread per row loses, as expected, but not
# by much: if all of its sectors, eight times as many as needed, came from the large memory, it could
# not reach more than an eighth of the line. The cache saves it. Of a sector that is sent for one
# number it keeps the seven others, which the same thread wants next.
#
# But the bank conflicts, all of them gone, have made a difference of two percent! They were real,
# only they were not what the kernel was waiting for. So what was it? Both trees give two numbers to
# each thread, and then they play eight rounds with a barrier after each. A multiprocessor holds
# eight such blocks at a time, and 132 multiprocessors need 124 shifts of them for 131,072 blocks.
# That took 250 µs, so each block lives for 2 µs, and for most of that time it asks the memory for
# nothing. A warp of the last kernel asks for 16 numbers per lane, and then it needs just five
# shuffles and no barrier.
#
# Lesson 1 said: ask for much at a time. This one adds: **measure before you fix.** Where shared
# memory is what a kernel is busy with, as it will be for matrices, conflicts cost what the map
# says.

# %% [markdown]
# ## 5 · The same numbers, another sum
#
# Could we have done without trees, and simply let every thread do `cuda.atomic.add(total, 0,
# x[i])`? For the histogram, whole numbers, atomics gave the exact result. Let us try it with
# float32. The simulator's threads now run in a random order, another one each time. Ten runs, the
# same 10,000 numbers.
#
# **Predict:** how many different sums will there be?

# %%
@cuda.jit
def sum_atomic(x, total):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(total, 0, x[i])


x = (2 * np.random.default_rng(0).random(10_000)).astype(np.float32)
exact = x.astype(np.float64).sum()
sums = []
for seed in range(10):
    total = np.zeros(1, dtype=np.float32)
    with simulator.options(order="random", seed=seed):
        simulator.run(sum_atomic, 40, 256, x, total)
    sums.append(float(total[0]))

# %%
print(f"{len(set(sums))} different sums in {len(sums)} runs, for example {sums[0]!r}, {sums[1]!r}")
plot.run_to_run({"atomics, random order": sums}, exact, title="10,000 numbers, added ten times")

# %% [markdown]
# No number is lost, and yet the sums differ. This time it is not a race; it is arithmetic. float32
# has about seven digits. When a small number is added to a large sum, the digits at its end are
# rounded off, and *which* ones depends on how large the sum already was. In the extreme:

# %%
big, one = np.float32(2**24), np.float32(1)
print("(big + 1) - big =", (big + one) - big)
print("(big - big) + 1 =", (big - big) + one)

# %% [markdown]
# For whole numbers, the order of additions makes no difference. For float32, it does. With atomics,
# the order is that in which threads happen to arrive, and on a GPU it is another one in every run.
# Here is what was recorded, a million numbers, twelve runs of each:

# %%
float_sums = bench.find(recorded, name="lesson_02.float_sums")[0]
if not SIMULATED:
    float_sums = lesson_02.float_sums()
plot.run_to_run(
    {row["label"]: row["sums"] for row in float_sums["rows"]}, float_sums["exact"],
    title="A million numbers, added twelve times", device=device, date=results_table.when(float_sums),
)

# %% [markdown]
# The atomics gave another sum in nearly every run, some near the exact one and some far from it:
# one cannot know. The sums in a fixed order are all the same, and off by 0.2 in a
# million. (They were also several times faster, although a single block did all the work. A million
# atomics at *one* address are the longest queue of all.)
#
# Two things follow.
#
# - **Reproducible** results (the same bits in every run) need a fixed order. A tree has one,
#   whoever is faster. That is why the kernels of this course avoid float atomics, and why PyTorch
#   has a switch for it, `torch.use_deterministic_algorithms`.
# - A tree is also more **exact** than one long sum. There each number takes part in only a few
#   additions, and of numbers of similar size: 8 rounds instead of thousands of roundings.

# %% [markdown]
# Another good place for a break. Next, you are the detective.

# %% [markdown]
# ## 6 · Three suspects
#
# `first`, `second` and `third` are kernels that sum rows, one warp per row, and all give the same
# result. One of them is by far the slowest. Do **not** look into their code. You have a better
# witness.

# %%
from course_lib.teach.exercises import suspects

x = np.random.default_rng(1).normal(size=(8, 1024)).astype(np.float32)
for kernel in (suspects.first, suspects.second, suspects.third):
    y = np.zeros(8, dtype=np.float32)
    kernel[1, 256](x, y)
    print("right:", np.allclose(y, x.sum(axis=1), atol=1e-4))

# %% [markdown]
# An **access map** shows what the lanes of a warp touched: each line is one request, each box with
# a red frame a sector that was touched. A number and a shade say which lane it was. From the loads of
# `x` it shows the first two requests of a single warp (its first two *steps*); to `y` each warp
# stores only once, so there it shows a line for each of two warps. Change `suspect` and run the next
# cell for all three of them. Look at what *one* request touches, and count its sectors.

# %%
suspect = suspects.first
with simulator.trace() as t:
    suspect[1, 256](x, y)
plot.access_map(t, steps=2, verdicts=False)  # without the verdict: that is yours

# %% [markdown]
# The numbers behind the map are in a table. Its upper half has a line for each access to memory: how
# many requests there were, how many lanes took part in each, the sectors of each, the bytes that were
# asked for, and the bytes that were moved. (*Bank ways* are the turns that a request to shared memory
# takes; there is none here. The bytes *moved* of a store are those of all sectors that it touches.
# Memory takes fewer: the L2 cache, which all multiprocessors share, first collects what several stores
# write into the same sector, as the eight warps do here.) The lower half has the conditions and loops:
# how often a warp came to them, and how often it was **divergent** there, with some lanes going one way
# and some another. Then the warp has to do both, one after the other.

# %%
print(t.table())

# %% [markdown]
# ### Exercise: which one is it?
#
# Return the slow one's name, such as `"first"`, and the number of sectors per request of its loads.

# %% exercise="find_the_slow_one"
def find_the_slow_one():
    return TODO, TODO  # the name, and the sectors per request of its loads


check("find_the_slow_one", find_the_slow_one)

# %%
hint("find_the_slow_one")

# %% tags=["solution-only"]
with simulator.trace() as t:
    suspects.second[1, 256](x, y)
plot.access_map(t, t.sites[0], steps=2, title="The second suspect's loads")

# %% tags=["solution-only"]
with simulator.trace() as t:
    suspects.third[1, 256](x, y)
plot.access_map(t, t.sites[0], steps=2, title="The third suspect's loads")

# %% [markdown]
# Now the clock may speak:

# %%
ladder = bench.find(recorded, name="lesson_02.suspects")[0]
if not SIMULATED:
    ladder = lesson_02.suspects([suspects.first, suspects.second, suspects.third])
factor = bench.times_as_fast(ladder, "first", "second")
plot.ladder(ladder["rows"], ladder["copy_gbps"], device=device, date=results_table.when(ladder),
            title=f"65,536 × 1,024 numbers: the slow one takes {factor:.1f} times as long as the first")

# %% [markdown]
# <details><summary>The case, solved</summary>
#
# The first reads each row's pieces from right to left, the third in a wild jumble. But in each of
# their requests the 32 lanes together touch 32 neighbours: 4 sectors, in whatever order. The second
# one looks tidiest, since each thread reads one number after the other. But each thread reads its
# own chapter: 32 lanes, 32 places far apart, 32 sectors. (Why is the third not as fast as the
# first? Its map is as good, but it has to <em>calculate</em> each wild address, with a remainder in
# every step. A map shows what the memory has to do, and not all that a kernel does. The code is in
# <code>course_lib/teach/exercises/suspects.py</code>, should you wish to read it now.)
# </details>

# %% [markdown]
# A last good place for a break. What remains is a whole layer, forward and backward.

# %% [markdown]
# ## 7 · Global average pooling
#
# Now for a layer of a real network. At the end of EfficientNet-B4, a network that recognises what
# is in a picture, the picture has become 1,792 channels of 12 × 12 numbers each. Channel 7, say,
# may tell *where* in the picture there is something like fur. To decide whether it is a cat, it
# does not matter where. So one takes the mean of each channel's plane: **global average pooling**.
#
# $$ y_{n,c} = \frac{1}{H W} \sum_{h=1}^{H} \sum_{w=1}^{W} x_{n,c,h,w} $$
#
# The shape goes from N, C, H, W to N, C. The same network also takes such means on its way, of
# planes of up to 190 × 190. In memory, a plane is `H * W` numbers side by side. So this is the sum
# of a row, with N · C rows, and a division.
#
# ### Exercise: the forward pass
#
# One block per plane, 32 to 256 threads. Block `b` has plane `c = b % C` of picture `n = b // C`.

# %% exercise="global_avg_pool"
@cuda.jit
def global_avg_pool(x, y):
    N, C, H, W = x.shape
    partial = cuda.shared.array(256, np.float32)
    n, c, t = cuda.blockIdx.x // C, cuda.blockIdx.x % C, cuda.threadIdx.x
    total = np.float32(0)
    TODO  # 1. add up this thread's share of x[n, c]; element i is in row i // W, column i % W
    TODO  # 2. a tree of halves in `partial`, as in block_sum
    if t == 0:
        y[n, c] = TODO  # 3. the mean


check("global_avg_pool", global_avg_pool)

# %%
hint("global_avg_pool")

# %% [markdown]
# ### Backwards
#
# Given $dy_{n,c}$, how the loss reacts to each mean, how does it react to each pixel? A pixel
# $x_{n,c,h,w}$ takes part in one mean only, that of its own plane, and there it has the
# factor $1 / (HW)$. So
#
# $$ \frac{\partial y_{n,c}}{\partial x_{n,c,h,w}} = \frac{1}{H W}
# \qquad\text{and by the chain rule}\qquad dx_{n,c,h,w} = \frac{dy_{n,c}}{H W} . $$
#
# All pixels of a plane get the same. Forward, many numbers become one; backward, one number becomes
# many. Spreading one number to many places is called a **broadcast**. It is the same with every
# sum: the gradient of a sum is a broadcast, and the gradient of a broadcast is a sum.
#
# ### Exercise: the gradient
#
# **Predict** first: which of the two passes needs barriers?

# %% exercise="global_avg_pool_backward"
@cuda.jit
def global_avg_pool_backward(dy, dx):
    N, C, H, W = dx.shape
    n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
    for i in range(cuda.threadIdx.x, H * W, cuda.blockDim.x):
        dx[n, c, i // W, i % W] = TODO


check("global_avg_pool_backward", global_avg_pool_backward)

# %%
hint("global_avg_pool_backward")

# %% [markdown]
# Both of them against brute force, as lesson 1 did for swish: change one pixel a little and see by
# how much a loss changes. Our loss here is the sum of all means, each with a weight `dy`.

# %%
forward = use("global_avg_pool", global_avg_pool)
backward = use("global_avg_pool_backward", global_avg_pool_backward)
planes = np.random.default_rng(2).normal(size=(2, 3, 4, 5)).astype(np.float32)
dy = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.float32)
means, changed, dx = np.zeros_like(dy), np.zeros_like(dy), np.zeros_like(planes)
forward[6, 32](planes, means)
backward[6, 32](dy, dx)
planes[1, 2, 3, 4] += 0.5
forward[6, 32](planes, changed)
print(f"brute force {(dy * (changed - means)).sum() / 0.5:.4f}, gradient {dx[1, 2, 3, 4]:.4f}")

# %% [markdown]
# (A step of 0.5 is huge, but the mean is a straight line, so any step is right.)
#
# ### The ladder
#
# The course's library has global average pooling in four rungs, in
# `course_lib/kernels/global_avg_pool`:
#
# - `naive`: one thread sums a whole plane.
# - `shared`: a block per plane and a tree in shared memory: your exercise.
# - `warp`: a block per plane; each warp uses shuffles, and then one warp adds up the warps' sums.
# - `vectorised`: loads of 16 bytes, several at a time; and the size of the team fits the plane,
#   from 8 lanes of a warp for a small plane to several blocks for a large one.

# %%
from course_lib import reference
from course_lib.kernels import global_avg_pool as pool

for variant in pool.FORWARD:
    result = pool.forward(cuda.to_device(planes), variant=variant).copy_to_host()
    print(f"{variant:12} right: {np.allclose(result, reference.global_avg_pool(planes), atol=1e-6)}")

# %% [markdown]
# **Predict** the time for the shape below. Pooling reads nearly everything and writes nearly
# nothing, so the fair limit here is a kernel that only *reads* as many bytes.

# %%
pools = bench.find(recorded, name="global_avg_pool.forward", dtype="float32")
ladder = max(pools, key=lambda record: record["bytes"])
n_planes, (H, W) = math.prod(ladder["shape"][:2]), ladder["shape"][2:]
print(f"{n_planes:,} planes of {H} × {W} numbers: {ladder['bytes'] / 1e6:,.0f} MB.")
print(f"Reading alone reaches {ladder['copy_gbps']:,.0f} GB/s.")
print(f"So it takes {ladder['bytes'] / ladder['copy_gbps'] / 1e3:,.0f} µs at best.")

# %%
if not SIMULATED:
    from course_lib.benchmarks import global_avg_pool as measure

    ladder = measure.run(shapes=[ladder["shape"]], dtypes=["float32"],
                         layouts=["contiguous"], directions=["forward"])[0]
factor = bench.times_as_fast(ladder, "vectorised", "shared")
plot.ladder(ladder["rows"], ladder["copy_gbps"], limit="reading alone",
            title=f"{n_planes:,} planes of {H} × {W}: vectorised is {factor:.1f} times as fast as shared",
            device=device, date=results_table.when(ladder))

# %% [markdown]
# **Explaining the gap.**
#
# - `naive` has two troubles at once: 32 sectors per request, and only 12,288 threads, where the GPU
#   has room for 270,336 (2,048 on each of its 132 multiprocessors).
# - `shared` and `warp` are nearly alike. A plane has 9,025 numbers, so each thread adds up 35 of
#   them before the tree begins. Whether the tree then takes eight barriers or two hardly matters.
# - `vectorised` asks for more at a time, as lesson 1 recommends, and reads as fast as the chip can.
#
# **Predict** what changes when planes are small, say 24 × 24, which is 576 numbers for 256 threads.

# %%
pools = bench.find(recorded, name="global_avg_pool.forward", dtype="float32")
small = [record for record in pools if record["shape"] == [8, 960, 24, 24]]
factor = bench.times_as_fast(small[0], "vectorised", "shared")
plot.ladder(small[0]["rows"], small[0]["copy_gbps"], limit="reading alone",
            title=f"7,680 planes of 24 × 24: vectorised is {factor:.1f} times as fast as shared",
            device=recorded["device"]["name"], date=results_table.when(small[0]))

# %% [markdown]
# That is section 4 again: two or three numbers per thread, then a tree. A block is too large a team
# for so little work. `vectorised` gives such a plane to half a warp, so that each lane has several
# loads under way, and nobody has to wait at a barrier. **The size of the team should fit the size
# of the job.** (The line is lower here than before: these 18 MB are read in 6 µs, and a good part of
# that goes into starting and ending, whatever the kernel.)

# %% [markdown]
# And backward, where one number is read and a whole plane is written; the limit is a kernel that
# only writes:

# %%
pools = bench.find(recorded, name="global_avg_pool.backward", dtype="float32")
back = max(pools, key=lambda record: record["bytes"])
factor = bench.times_as_fast(back, "vectorised", "naive")
plot.ladder(back["rows"], back["copy_gbps"], limit="writing alone",
            title=f"The gradient: vectorised is {factor:.1f} times as fast as naive",
            device=recorded["device"]["name"], date=results_table.when(back))

# %% [markdown]
# No barriers here, since no thread needs another one's result. What differs is how a thread finds
# its `dy`. In `naive`, one thread per pixel, each divides its number by `H * W` to learn which
# plane it is in, and divisions of whole numbers are slow on a GPU. With a block per plane
# (`per_plane`) the block's number *is* the plane, and `vectorised` also stores 16 bytes at a time.

# %% [markdown]
# ## What the profiler says
#
# You have trusted a tracer that runs on a CPU. Does it count what a chip would count? NVIDIA's
# profiler, Nsight Compute, counts sectors and bank conflicts in the chip itself. So some twenty small
# kernels were run both ways, on an H200 and under the tracer. (They are in `course_lib/benchmarks/tracer_patterns.py`.) Here are a
# few of them. `coalesced` reads neighbours, `stride_2` every second number and `by_column` a matrix
# down its columns; `shared_stride_2` reads every second word of shared memory. `tile_by_column` has a
# **tile**, a square piece of a matrix, in shared memory and reads its 32 × 32 numbers column by
# column; `padded_tile_by_column` does the same with 33 columns, of which the last one is not used.
# Every turn beyond a request's first counts as one conflict. **Predict** how the unused column
# changes the conflicts.

# %%
compared = {
    "coalesced": "global load sectors", "stride_2": "global load sectors",
    "by_column": "global load sectors", "shared_stride_2": "shared load conflicts",
    "tile_by_column": "shared load conflicts", "padded_tile_by_column": "shared load conflicts",
}
print(f"{'kernel':24}{'what was counted':24}{'tracer':>8}{'profiler':>10}")
for name, what in compared.items():
    counts = {row["label"]: row for row in bench.find(recorded, name=f"tracer.{name}")[0]["rows"]}
    count = counts.get(what, {"predicted": 0, "measured": 0})  # no line: both counted none
    print(f"{name:24}{what:24}{count['predicted']:8,}{count['measured']:10,}")

# %% [markdown]
# The first three are what lesson 1 taught you to count with a pencil. In the tile, a column of 32
# numbers lies in a single bank, and each request takes 32 turns. With one more number per row, the
# next row starts one bank further on, and a column lies in 32 different banks. One unused column
# has removed 63,488 conflicts. This is called **padding**.
#
# And all of the kernels:

# %%
compared = bench.find(recorded, name="tracer.*")
unequal = [
    record["name"].removeprefix("tracer.")
    for record in compared
    if any(row["predicted"] != row["measured"] for row in record["rows"])
]
print(f"{len(compared) - len(unequal)} of {len(compared)} kernels have equal counts throughout")
print("not equal:", ", ".join(unequal) or "none")

# %% [markdown]
# (One of them, `atomic_one_address`, lets all lanes of a warp add to the same place. That is 32
# sectors per request, although it is one place: the lanes queue, and each turn asks for the sector
# again.)
#
# ## Where the real libraries go further
#
# - **CUB**, NVIDIA's C++ library of reductions, picks the number of threads, the width of the loads
#   and the tree for each GPU and each type of number.
# - PyTorch's `sum` takes any of an array's dimensions. If a row is long, several blocks share it,
#   all in one launch: the last block to finish, which knows it by an atomic counter, adds up what
#   the others have left for it, behind a fence.
# - **Cooperative groups** give warps, halves of warps and whole blocks one common interface,
#   with a ready `reduce`. Newer GPUs reduce whole numbers over a warp by a single instruction.
# - **Segmented reductions** sum rows of *different* lengths, such as sentences, without letting the
#   threads of the short ones wait for the long ones.
# - And, once more, the fastest reduction is the one that needs no launch: libraries **fuse** it
#   with the kernel before, which has the numbers still at hand.
#
# ## Three questions
#
# <details><summary>1. A colleague removes the barrier inside the loop of the tree for the last
# <em>five</em> rounds, since only one warp is left then. Is that right?</summary>
#
# No longer. It was a common trick once. But since 2017 the lanes of a warp need not stay together,
# so there is a race, which shows on some days only. <code>cuda.syncwarp()</code> between reading
# and writing makes it right again, and shuffles make it right and faster.
# </details>
#
# <details><summary>2. You need the <em>largest</em> element of each row. What has to change in
# <code>block_sum</code>, and what about section 5?</summary>
#
# <code>max</code> instead of <code>+</code>, and minus infinity instead of 0 to start with (a row
# may be all negative). The result no longer depends on the order: the maximum rounds nothing.
# </details>
#
# <details><summary>3. A picture is all black. What happens to the three histograms of
# section 2?</summary>
#
# All threads want the same counter. Plain counting loses nearly everything. Atomics stay right, but
# they all queue at one place. In shared memory each block has a queue of its own, many short ones
# instead of a long one. Better still: let the lanes of a warp first find out how many of them have
# the same brightness, so that only one of them has to add.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# Two reductions in one kernel, and a trap with numbers: **softmax**, which turns a row of numbers
# into probabilities. It needs the largest element and a sum of each row, and it comes in every
# network that has to choose.
