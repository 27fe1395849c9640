# %% [markdown]
# # 3 · Softmax, from naive to online
#
# **After this lesson** you can turn scores into probabilities without ever overflowing, say how
# many bytes each version of a kernel asks for and how many it must, use one block of shared memory
# for two reductions, let a warp share a result, and derive and write the *online* softmax, which
# finds a maximum and a sum that depends on it in a single pass.
#
# **You need** [lesson 2](02_reductions.ipynb): barrier, tree, shuffle, sanitizer, access map. When
# numba refuses a line:
# [which Python works in a kernel](01_threads_and_memory.ipynb#Which-Python-works-in-a-kernel).
#
# **Time:** 130 minutes; there are good places to pause after sections 3 and 5. All cells together
# run in less than half a minute in the simulator. On a GPU the speeds are measured on your own
# machine, otherwise you see recorded ones. The words are collected in the [glossary](glossary.md).

# %%
import math
import textwrap

import numpy as np

from course_lib import SIMULATED, bench, cuda, plot, reference, results_table, simulator
from course_lib.runtime import intrinsics
from course_lib.teach import TODO, check, hint, progress, solution, use

ZERO, ONE = np.float32(0), np.float32(1)
MINUS_INF = np.float32(-np.inf)

# %% [markdown]
# ## 1 · Scores that become nothing
#
# A network has looked at a photograph and gives a **score** to each **class**, each kind of thing
# that it knows: cat 2.0, dog 1.0, lorry −1.0. (Scores are also called *logits*.) They may be any
# numbers. What we want are **probabilities**: none of them negative, and their sum is 1.
#
# Two steps do it. The exponential function makes every score positive, and keeps their order: the
# larger a score, the larger its exponential. Then each is divided by the sum of all. This is
# **softmax**:
#
# $$ y_i = \frac{e^{x_i}}{\sum_j e^{x_j}} $$
#
# (The name: it is a softened maximum. A score that is 10 above all others gets nearly
# everything, and if the two best are equal, they share.)

# %%
scores = np.array([2.0, 1.0, -1.0], dtype=np.float32)
e = np.exp(scores)
print("e^x:          ", e)
print("probabilities:", e / e.sum(), " sum", (e / e.sum()).sum())

# %% [markdown]
# (Their sum is 1 but for the rounding of float32.)
#
# A batch of photographs gives a table: a row for each photograph, a column for each class, and
# softmax is taken along each row. Here it is as a kernel with a thread for each row, in the words
# of the formula. (Nothing is wrong with its guard or its loops.)

# %%
@cuda.jit
def softmax_by_the_book(x, y):
    row = cuda.grid(1)
    if row < x.shape[0]:
        total = np.float32(0)
        for col in range(x.shape[1]):
            total += math.exp(x[row, col])
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col]) / total

# %% [markdown]
# We try it on 25 rows. All of them hold the *same* 16 scores, between −3 and 3, except that a
# number was added to each row: −120 to the first, −110 to the next, and so on up to +120.
#
# Adding the same number $c$ to all scores of a row multiplies each $e^{x_i}$ by $e^c$, above and
# below the line. **Predict:** what will the 25 rows of probabilities look like?

# %%
offsets = np.arange(-120, 121, 10)
x = np.random.default_rng(3).uniform(-3, 3, 16) + offsets[:, np.newaxis]
x = x.astype(np.float32)
y = np.zeros_like(x)
softmax_by_the_book[1, 32](x, y)

with np.errstate(all="ignore"):  # the same formula with numbers of 16 bits
    e = np.exp(x.astype(np.float16))
    half = e / e.sum(axis=1, keepdims=True)

# %%
tables = dict(labels=offsets, xlabel="class", ylabel="number added to the row")
plot.probabilities([y, half], ["float32", "float16"], **tables, vmax=0.5,
                   title="The same scores 25 times, with a number added to each row")

# %% [markdown]
# All rows should have been alike. Instead, rows are `nan`, not a number: at the bottom, where
# the scores are large, and at the top, where they are small. Most of them are so as a whole; in one of
# float32, +90, and one of float16, +10, some places are `nan` and all others 0. With **float16**,
# numbers of 16 bits, only two rows are right. Look also at the row of −20 there. It holds no `nan`, it
# just says that one class has everything. What happened?

# %%
with np.errstate(all="ignore"):
    for power in (88, 89, -103, -104):
        print(f"float32: e^{power:<5} = {np.exp(np.float32(power)):.3g}")
    for power in (11, 12, -16, -18):
        print(f"float16: e^{power:<5} = {np.exp(np.float16(power)):.3g}")

# %% [markdown]
# You know the first half from the sigmoid in lesson 1. $e^{89}$ **overflows** in float32: it is
# infinity, and infinity divided by infinity is `nan`. One such score makes the sum of its row
# infinite. The row's other exponentials may still be finite, and a finite number divided by infinity is
# 0. Hence the row of zeros and `nan`. At the other end, $e^{-104}$ is so small that
# it becomes 0. This is called **underflow**. If all terms of a sum are 0, so is the sum, and 0
# divided by 0 is `nan` as well.
#
# | | ends at | so $e^x$ overflows above | and is 0 below |
# |---|---|---|---|
# | float32 | 3.4 · 10³⁸ | x = 88.72 | x = −103.97 |
# | float16 | 65,504 | x = 11.09 | x = −17.33 |
# | bfloat16 | 3.4 · 10³⁸ | x = 88.72 | x = −92.88 |
#
# (These are the logarithms of the largest number and of half the smallest one, from which on a result
# is rounded up to the smallest number, and not down to 0.)
#
# **bfloat16** has 16 bits, too, but it spends them differently: as far a reach as float32, and only
# two to three correct digits. Networks compute with both to save memory. And with
# float16, a score of 12 is enough, so this is not an accident that happens to others.

# %% [markdown]
# ## 2 · Subtracting the maximum
#
# The cure is in what you have just predicted. If adding a number $c$ to a row changes nothing on
# paper, then *we* may choose it:
#
# $$ \frac{e^{x_i + c}}{\sum_j e^{x_j + c}} = \frac{e^c \, e^{x_i}}{e^c \sum_j e^{x_j}}
# = \frac{e^{x_i}}{\sum_j e^{x_j}} . $$
#
# Softmax is said to be **shift invariant**. Choose $c = -m$, where $m$ is the row's largest score:
#
# - no $x_i - m$ is above 0, so no exponential is above 1: **nothing overflows**;
# - the largest score itself becomes $e^0 = 1$, so the sum is at least 1: **nothing is divided by
#   0**. (Terms that underflow are so small that they would not have shown beside the 1.)
#
# **Predict:** is any other number as good as the maximum, the first one of the row, say, or the mean?
#
# ### Exercise: a softmax that never overflows
#
# One thread per row again. Now it goes over its row three times.

# %% exercise="softmax_naive"
@cuda.jit
def softmax_naive(x, y):
    n_rows, n_cols = x.shape
    row = cuda.grid(1)
    if row < n_rows:
        largest = MINUS_INF
        TODO  # first pass: the largest score of this row
        total = np.float32(0)
        TODO  # second pass: the sum of the exponentials, each shifted
        TODO  # third pass: write y


check("softmax_naive", softmax_naive)

# %%
hint("softmax_naive")

# %%
kernel = use("softmax_naive", softmax_naive)
kernel[1, 32](x, y)
plot.probabilities([y, reference.softmax(x)], ["your kernel", "NumPy, 64 bits"], **tables,
                   title="All rows are alike, as they should be")

# %% [markdown]
# (And the prediction? The first number, or the mean, works for most rows. But one score that is 89
# above it, and the row is lost. The check has rows with such a peak, at many places.)
#
# ### Scores of minus infinity
#
# There is one infinite score that is meant. A program that writes text must not look at words that
# come later, and a sentence may be shorter than its row. Such places are **masked**: their
# score is set to $-\infty$. Since $e^{-\infty} = 0$, they get no probability, and the others share
# all of it. **Predict** the three rows:

# %%
inf = np.inf
masked = np.array([[1, 2, -inf, 3], [-inf, -inf, 0, -inf], [-inf] * 4], dtype=np.float32)
shares = np.zeros_like(masked)
kernel[1, 32](masked, shares)
print(shares.round(3))

# %% [markdown]
# In the last row *everything* is masked. Its maximum is $-\infty$, and $-\infty - (-\infty)$ is not
# a number. That is a question without an answer, and `nan` says so; PyTorch does the same. But
# remember the difference $-\infty - (-\infty)$. It will come back in section 6, in places where
# there *is* an answer.

# %% [markdown]
# ## 3 · Counting bytes
#
# How fast can it be? Softmax computes little, so memory decides again. **Predict**, before
# the next exercise asks for it: how often does your kernel read each number of `x`?
#
# ### Exercise: bytes asked for
#
# Take 4,096 rows of 1,000 float32 numbers. How many bytes do the threads of `softmax_naive` ask
# for, reading and writing together? How many would a kernel ask for that needs two passes instead
# of three, the last of which writes? And how many must it be at the least, however clever
# the kernel?

# %% exercise="count_the_bytes"
def count_the_bytes():
    one_pass = 4096 * 1000 * 4  # every number of the array once, 4 bytes each
    return TODO, TODO, TODO  # with three passes, with two, and at the least


check("count_the_bytes", count_the_bytes)

# %%
hint("count_the_bytes")

# %% [markdown]
# The tracer counts the same in your own kernel, line by line. The picture is in units of the array:

# %%
rows = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
shares_of_rows = np.zeros_like(rows)
with simulator.trace() as naive_trace:
    kernel[2, 32](rows, shares_of_rows)
plot.passes({"naive": naive_trace}, rows.nbytes, title="Three readings and one writing")

# %% [markdown]
# So it asks for twice as much as it must. But that is only what the *threads ask for*. What memory
# has to *send* is another question, as lesson 1 has shown. One thread has one row. **Predict** the
# sectors per request of this kernel:

# %%
writes = next(site for site in naive_trace.sites if site.op == "store")
reads = next(site for site in naive_trace.sites if site.op == "load")
plot.access_map(naive_trace, reads, steps=4, title="One thread per row")

# %%
print(f"reading: {reads.sectors_per_request:.0f} sectors per request")
print(f"writing: {writes.sectors_per_request:.0f} sectors per request")

# %% [markdown]
# (In the picture, the gaps between the sectors stand for what was left out: from one row to the next it is
# 256 numbers, and only the eight of the sector are drawn.) 32 neighbouring threads read 32 different
# rows, so each request touches 32 sectors, and of each sector's eight numbers one is wanted. This kernel has two faults, then: too many passes, and a bad
# order. We fix the order first, since a factor of eight is worth more than a factor of two.

# %% [markdown]
# A good place for a break. Next, a block shares a row.

# %% [markdown]
# ## 4 · A block per row
#
# The recipe is that of `block_sum` in lesson 2: the threads of a block deal the row like cards, and
# a tree in shared memory makes one number of 256. Only that there are *two* reductions now, and the
# second one, the sum, needs the result of the first, the maximum. All threads need it, not
# only thread 0.
#
# Shared memory is small, so one likes to use the same array for both. Look at this kernel, where
# each thread does its reductions alone, for simplicity. **Predict:** there are two barriers. Is that
# enough?

# %%
@cuda.jit
def sum_of_exponentials(x, found):
    s = cuda.shared.array(64, np.float32)
    t = cuda.threadIdx.x
    s[t] = x[t]
    cuda.syncthreads()  # all have written their score
    largest = s[0]
    for k in range(1, 64):
        largest = max(largest, s[k])
    s[t] = math.exp(x[t] - largest)
    cuda.syncthreads()  # all have written their exponential
    total = np.float32(0)
    for k in range(64):
        total += s[k]
    found[t] = total

# %%
falling = np.linspace(-9, -2, 64, dtype=np.float32)
print("the right sum is", np.exp(falling - falling.max()).sum().round(3))
for order in ("forward", "reverse"):
    found = np.zeros(64, dtype=np.float32)
    simulator.run(sum_of_exponentials, 1, 64, falling, found, order=order)
    print(f"{order}: all 64 threads found", sorted({round(float(each), 3) for each in found}))

# %% [markdown]
# All threads agree, and all are wrong. In another order, they agree on another wrong sum. The first
# thread that is done with its maximum puts an exponential where the others are still looking for
# scores. Exponentials are between 0 and 1, these scores are all negative, and so the others take an
# exponential for the largest score. The sanitizer knows the line:

# %%
with simulator.sanitize() as report:
    sum_of_exponentials[1, 64](falling, found)
for finding in report.findings[:1]:
    print(f"{finding.kind}, line {finding.line}: {finding.source}")
    print(textwrap.fill(finding.message, 90))

# %% [markdown]
# It is the blackboard of lesson 2: one barrier after writing, so that nobody reads too early, and
# *one after reading*, so that nobody wipes too early. A memory that serves twice needs both.
#
# ### Exercise: softmax with shared memory
#
# One block of 32, 64, 128 or 256 threads per row. The first tree is there. You write what comes
# between the two trees, and the second tree.

# %% exercise="softmax_shared"
@cuda.jit
def softmax_shared(x, y):
    s = cuda.shared.array(256, np.float32)
    row, t, n_cols = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[1]
    largest = MINUS_INF
    for col in range(t, n_cols, cuda.blockDim.x):
        largest = max(largest, x[row, col])
    s[t] = largest
    cuda.syncthreads()
    step = cuda.blockDim.x // 2
    while step > 0:
        if t < step:
            s[t] = max(s[t], s[t + step])
        cuda.syncthreads()
        step //= 2
    largest = TODO  # 1. what all threads need, and a barrier if it takes one
    total = np.float32(0)
    TODO  # 2. this thread's share of the sum
    TODO  # 3. the tree of block_sum
    for col in range(t, n_cols, cuda.blockDim.x):
        y[row, col] = TODO


check("softmax_shared", softmax_shared)

# %%
hint("softmax_shared")

# %% [markdown]
# The same rows once more, and where your block reads:

# %%
kernel = use("softmax_shared", softmax_shared)
with simulator.trace() as shared_trace:
    kernel[64, 64](rows, shares_of_rows)
print("right:", np.allclose(shares_of_rows, reference.softmax(rows), atol=1e-6))
reads = next(site for site in shared_trace.sites if site.op == "load" and site.space == "global")
plot.access_map(shared_trace, reads, steps=4, title="One block per row: the first reading")

# %% [markdown]
# 4 sectors per request. (The picture shows one of the block's two warps; the gaps are the other
# one's numbers.) **Predict** how many barriers a block of 256 threads passes in all (256
# numbers take 8 rounds). Then count them in the code.
#
# <details><summary>The answer</summary>
#
# There are 19 of them: one before the first tree, 8 in it, one after the maximum was read; one
# before the second tree, 8 in it. 19 times the whole block waits for its slowest thread, and each
# time it asks the memory for nothing.
# </details>

# %% [markdown]
# ## 5 · A warp per row
#
# Shuffles need neither shared memory nor barriers. In lesson 2 you wrote a warp's sum with
# `shfl_down_sync`, and lane 0 had the result in the end. Here that is not enough: **all** lanes need
# the maximum before they can go on, and all need the sum to divide by.
#
# There is a shuffle for this. In `shfl_xor_sync`, two lanes *exchange* what they have:
#
# ```python
# other = cuda.shfl_xor_sync(0xFFFFFFFF, value, 4)   # lane 0 with 4, 1 with 5, 2 with 6, 3 with 7, …
# ```
#
# Lane `i` gets the value of lane `i ^ 4`. (`^` is Python's *exclusive or*: it turns over one bit of
# the lane's number, here the one that counts 4. Turning it over twice leads back, so if 1 asks 5,
# then 5 asks 1.) With 1, 2, 4, 8 and 16, one after the other, five rounds do for 32 lanes.
#
# Here are the first eight lanes, looking for the largest of their numbers in three rounds.
# **Predict** what lane 5 holds after each of them.

# %%
@cuda.jit
def find_largest(values):
    lane = cuda.threadIdx.x
    largest = values[0, lane]
    for k in range(3):
        largest = max(largest, cuda.shfl_xor_sync(0xFFFFFFFF, largest, 1 << k))  # 1, 2, 4
        values[k + 1, lane] = largest

# %%
values = np.zeros((4, 32), dtype=np.float32)
values[0] = np.resize([3, 1, 4, 1, 5, 9, 2, 6], 32)
find_largest[1, 32](values)
plot.butterfly(values[:, :8], title="Three rounds, and all eight lanes know the largest number")

# %% [markdown]
# The crossing lines give it its name, **butterfly**. It takes as many rounds as a tree, but nobody
# has to hand the result back. (And the prediction? Lane 5 has the 9 from the beginning, and keeps
# it in every round.)
#
# ### Exercise: softmax with shuffles
#
# One warp per row, several warps per block, as in `warp_sum`.

# %% exercise="softmax_warp"
@cuda.jit
def softmax_warp(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        largest = MINUS_INF
        for col in range(lane, x.shape[1], 32):
            largest = max(largest, x[row, col])
        TODO  # all lanes need the largest one
        total = np.float32(0)
        for col in range(lane, x.shape[1], 32):
            total += math.exp(x[row, col] - largest)
        TODO  # and all need the sum
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) / total


check("softmax_warp", softmax_warp)

# %%
hint("softmax_warp")

# %%
kernel = use("softmax_warp", softmax_warp)
with simulator.trace() as warp_trace:
    kernel[16, 128](rows, shares_of_rows)
reads = next(site for site in warp_trace.sites if site.op == "load")
plot.access_map(warp_trace, reads, steps=4, title="One warp per row: the first reading")

# %% [markdown]
# ### The ladder so far
#
# The course's library has softmax as a ladder, in `course_lib/kernels/softmax`. Its first
# three rungs are these kernels, with one difference: in `warp`, a whole *block* works on a row.
# Each of its eight warps reduces by shuffles, then the eight results meet in shared memory. This
# takes 4 barriers instead of 19, and it suits long rows better than a single warp.
#
# **Predict**: 16,384 rows of 1,024 numbers, three rungs. How many times faster is `shared` than
# `naive`, and `warp` than `shared`? Write it down.

# %%
recorded = bench.load_records()
SHAPE = (16384, 1024)
found = bench.find(recorded, name="softmax.forward", dtype="float32", shape=SHAPE)
device = recorded["device"]["name"]
if not SIMULATED:
    from course_lib.benchmarks import softmax as measure

    found = measure.run(names=["softmax.forward"], shapes=[SHAPE], dtypes=["float32"])
    device = bench.device_facts()["name"]

# %%
def show_rungs(*labels, fast, slow):
    if not found:
        print("Softmax has not been recorded on a GPU yet.")
        return None
    rows = [row for row in found[0]["rows"] if row["label"] in labels]
    ratio = bench.times_as_fast(found[0], fast, slow)
    title = f"16,384 rows of 1,024 numbers: {fast} is {ratio:.1f} times as fast as {slow}"
    return plot.ladder(rows, found[0]["copy_gbps"], title=title, device=device,
                       date=results_table.when(found[0]))


show_rungs("naive", "shared", "warp", fast="warp", slow="naive")

# %%
for fast, slow in (("shared", "naive"), ("warp", "shared")) if found else ():
    ratio = bench.times_as_fast(found[0], fast, slow)
    print(f"{fast:6} is {ratio:.2f} times as fast as {slow}")

# %% [markdown]
# **Explaining the gap.**
#
# - `naive` has 32 sectors per request, as you have seen. Besides, it starts 16,384 threads, where
#   the GPU has room for 270,336.
# - `shared` reads in the right order. But a thread has only four numbers of its row, and for these
#   it passes 19 barriers.
# - `warp` passes 4 barriers instead of 19, and yet, on the H200, it is hardly faster than `shared`: look
#   at the second number. So it was not mostly the barriers that took the time.
#
# What all three have in common are three readings and one writing. Is that why they are not faster?
# The row was read just a moment ago, 4 KB of it, so the second and the third reading mostly find it in
# the cache. They do not cost what the first one costs, yet they are not free: each is another
# round of asking and waiting. Let us get rid of one.

# %% [markdown]
# Another good place for a break. Next comes the idea of this lesson.

# %% [markdown]
# ## 6 · Maximum and sum in one pass
#
# The sum needs the maximum: $\sum_j e^{x_j - m}$. And the maximum is known only when the last
# number was read. So two passes seem unavoidable. **Predict:** are they?
#
# Imagine that you are reading the row. So far you have seen 1, 3 and 2. The largest was $m = 3$,
# and, with *this* maximum, the sum is
#
# $$ s = e^{1-3} + e^{3-3} + e^{2-3} = 0.135 + 1 + 0.368 = 1.503 . $$
#
# Now comes a 5. It is larger than everything before, so $m$ is 5 from now on, and the sum should
# have been
#
# $$ e^{1-5} + e^{3-5} + e^{2-5} + e^{5-5} . $$
#
# Must you read the first three again? Look at one of them: $e^{1-5} = e^{1-3} \cdot e^{3-5}$. Each
# old term has to be multiplied by $e^{3-5}$, all by the *same* factor. Hence the old sum by that
# factor:
#
# $$ s_{\text{new}} = 1.503 \cdot e^{3-5} + 1 = 1.503 \cdot 0.135 + 1 = 1.203 . $$
#
# The numbers themselves were not needed any more. That is the whole trick:
#
# - is the new number $x$ larger than $m$? Then $s \leftarrow s \cdot e^{m-x} + 1$ and
#   $m \leftarrow x$;
# - if not, then $s \leftarrow s + e^{x-m}$.
#
# It is called **online**, which is said of methods that take their input piece by piece, never
# looking back. Maxim Milakov and Natalia Gimelshein of NVIDIA described this one in 2018. In plain
# Python, and as a picture: above are the numbers, and the largest so far; below is the sum after
# each of them, and over each bar what was done to the sum before.

# %%
def read_online(numbers):
    m, s = -math.inf, 0.0  # nothing was read yet
    for x in numbers:
        if x > m:
            m, s = x, s * math.exp(m - x) + 1
        else:
            s = s + math.exp(x - m)
        yield m, s


row = [1, 3, 2, 5, 4, 5, 6, 2]
m, s = np.array(list(read_online(row))).T
plot.one_pass(row, m, s, title="One pass over eight numbers")

# %%
exact = sum(math.exp(x - max(row)) for x in row)
print(f"in one pass {s[-1]:.6f}, in two passes {exact:.6f}")

# %% [markdown]
# It starts with $m = -\infty$ and $s = 0$. With the first number the old sum is multiplied by
# $e^{-\infty - 1} = 0$, and everything falls into place.
#
# **Predict:** in a row of 1,000 numbers in random order, how often does a new maximum come?
# 500 times?

# %%
counts = [
    len(np.unique(np.maximum.accumulate(np.random.default_rng(seed).random(1000))))
    for seed in range(200)
]
print(f"{np.mean(counts):.1f} times on average; 1 + 1/2 + 1/3 + … + 1/1000 = "
      f"{sum(1 / k for k in range(1, 1001)):.1f}")

# %% [markdown]
# (The second number is the larger of the first two in one case out of two, the third one is the
# largest of three in one case out of three, and so on.)
#
# ### Many readers at once: the merge
#
# One thread can read a whole row online. But 32 lanes share a row, each with its own part, its own
# $m$ and its own $s$. How do two parts become one?
#
# Say one lane has read $1, 3$ and another one $2, 5$:
#
# $$ (m_1, s_1) = (3,\; e^{1-3} + 1) = (3,\; 1.135) \qquad
#    (m_2, s_2) = (5,\; e^{2-5} + 1) = (5,\; 1.050) . $$
#
# The larger maximum is 5. $s_1$ was made with 3, so it has to be brought to 5, by the factor
# $e^{3-5}$, exactly as before. $s_2$ was made with 5 already, and $e^{5-5} = 1$:
#
# $$ m = \max(m_1, m_2) \qquad s = s_1 \, e^{m_1 - m} + s_2 \, e^{m_2 - m}
#    = 1.135 \cdot 0.135 + 1.050 \cdot 1 = 1.203 . $$
#
# The same 1.203 as above. In fact, reading one more number $x$ is only a special case: a merge with
# the part $(x, 1)$.
#
# A tree or a butterfly merges in an order of its own. **Predict:** does it matter who is merged with
# whom first?

# %%
def merge(first, second):
    (m1, s1), (m2, s2) = first, second
    m = max(m1, m2)
    return m, s1 * math.exp(m1 - m) + s2 * math.exp(m2 - m)


a, b, c = (3, 1.135), (5, 1.050), (4, 2.5)
print("(a with b) with c:", merge(merge(a, b), c))
print("a with (b with c):", merge(a, merge(b, c)))
print("c with (b with a):", merge(c, merge(b, a)))

# %% [markdown]
# The same, up to the last digit. This is no luck. Write $s$ as what it stands for,
# $s_1 = \sum e^{x_j - m_1}$, and each merge only says: *these* numbers, seen from the largest of
# *them*. Whichever way the parts are put together, in the end it is all numbers, seen from the
# largest of all. An operation for which $(a \circ b) \circ c = a \circ (b \circ c)$ is called
# **associative**. Addition is, the maximum is, and so is this merge. And whatever is associative can be
# done by a tree.
#
# Only one thing is missing: a part without any number, $(-\infty, 0)$. There are such parts. In a row of
# 20 numbers, 12 lanes have nothing to read; or all numbers of a lane are masked. Merged with
# anything, it should change nothing. **Predict** what the formula makes of two of them:

# %%
nothing = (-math.inf, 0.0)
print("a with nothing:      ", merge(a, nothing))
print("nothing with nothing:", merge(nothing, nothing))

# %% [markdown]
# There it is again, $-\infty - (-\infty)$. This time there is an answer, since nothing and nothing is
# nothing. It has to be said in the code. A single such `nan` would spoil the whole row: every
# sum that it is added to is `nan`.
#
# ### Exercise: the merge
#
# One thread for each pair of parts.

# %% exercise="online_merge"
@cuda.jit
def online_merge(m1, s1, m2, s2, m, s):
    i = cuda.grid(1)
    if i < m1.size:
        largest = max(m1[i], m2[i])
        m[i] = largest
        if TODO:  # has neither part a number yet?
            s[i] = np.float32(0)
        else:
            s[i] = TODO


check("online_merge", online_merge)

# %%
hint("online_merge")

# %% [markdown]
# ### Exercise: the online softmax
#
# Now all of it: a warp per row, each lane reads its share online, a butterfly merges the 32
# parts, and a second pass writes. The merge is there as a function, `intrinsics.online_merge(m1, s1,
# m2, s2)`, which returns the new `m, s`. It is a **device function**: one that kernels call. It is
# written like a kernel, with `@cuda.jit(device=True)` above it, cannot be launched, and may return
# something.
#
# Mind the masked numbers: if the very first number of a lane is $-\infty$, it is not larger than
# `m`, and what would `exp(value - m)` be? And write `ONE` where the Python above has a bare 1, or the
# sum becomes a float64 (lesson 1).

# %% exercise="softmax_online"
@cuda.jit
def softmax_online(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            value = x[row, col]
            TODO  # 1. one more number: is it a new maximum, or not?
        for k in range(5):
            m2 = cuda.shfl_xor_sync(0xFFFFFFFF, m, 1 << k)
            m, s = intrinsics.online_merge(m, s, m2, TODO)  # 2. what else does the merge need?
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


check("softmax_online", softmax_online)

# %%
hint("softmax_online")

# %% [markdown]
# The four kernels side by side, as the tracer has seen them. Yours is the last one:

# %%
kernel = use("softmax_online", softmax_online)
with simulator.trace() as online_trace:
    kernel[16, 128](rows, shares_of_rows)
print("right:", np.allclose(shares_of_rows, reference.softmax(rows), atol=1e-6))
traces = {"naive": naive_trace, "shared": shared_trace, "warp": warp_trace}
plot.passes(traces | {"online": online_trace}, rows.nbytes, title="Bytes that are asked for")

# %% [markdown]
# ## 7 · The ladder
#
# The course's `online` rung is yours for a whole block: each of 256 threads reads online, then the
# parts are merged in warps, then across the eight warps. Here are all four, run by name:

# %%
from course_lib.kernels.softmax import softmax

RUNGS = ("naive", "shared", "warp", "online")
for variant in RUNGS:
    result = softmax.forward(cuda.to_device(rows), variant=variant).copy_to_host()
    print(f"{variant:8} largest error {np.abs(result - reference.softmax(rows)).max():.1e}")

# %% [markdown]
# **Predict** with bytes alone: `warp` asks for four sizes of the array and `online` for three. How
# much faster should `online` be? Then look. The limit is a copy, which reads once and writes once.

# %%
show_rungs(*RUNGS, fast="warp", slow="online")

# %% [markdown]
# **Explaining the gap.** There are two gaps to explain.
#
# *From `warp` to `online`.* By the bytes asked for, `online` should be faster by a factor of 4/3. On
# the H200 it is *slower*, with 32 % of a copy against 40 %! The bytes that were saved would have come from the cache, as we said. And the saving has a price. In
# `warp`, each number costs one comparison in the first pass. In `online`, it costs an exponential, a
# multiplication now and then, and every step has to wait for the one before, since it needs its
# `m`.
#
# *From `online` to the copy.* It reads the row twice, and not once. Above all, each thread asks for
# one number of 4 bytes, then it computes with it, then it asks for the next one. Lesson 1 said: ask
# for much at a time. None of these four rungs does.
#
# Both point the same way. If a row was held *in registers* after it was read, it would have to be
# read only once, with 16 bytes at a time, and nothing would have to be online. That is the next
# lesson. Then what is online softmax good for? For rows that are too long to be
# held anywhere; and for **attention**, the heart of today's language models, where the scores of a
# row are computed piece by piece and never exist all at once. It could not be done without the merge
# that you have just written.
#
# ### Numbers of 16 bits
#
# All rungs also take float16 and bfloat16. Is the maximum all that float16 needs? Take a row of 4,096
# equal scores, so that each gets 1/4096. After the shift all exponentials are 1, so nothing
# can overflow. The sum, 4,096, has a place in float16, too. **Predict** what a kernel finds that adds
# up in float16, one number after the other.

# %%
equal = np.zeros((1, 4096), dtype=np.float16)
ones = np.exp(equal[0] - equal[0].max())  # 4,096 times 1, in float16
total = np.add.accumulate(ones)[-1]  # 1 + 1 + 1 + …, each sum rounded to float16
print("the sum in float16:  ", int(total), "  so y =", 1 / float(total))
result = softmax.forward(cuda.to_device(equal), variant="online").copy_to_host()
print("the course's kernel:         so y =", float(result[0, 0]), "  in", result.dtype)
print("what is right, 1 / 4096:         ", 1 / 4096)

# %% [markdown]
# At 2,048 the sum stands still. float16 has 11 bits for its digits, so from there on its
# neighbours are 2 apart, and 2,048 + 1 is rounded back to 2,048. Nothing is infinite, nothing is `nan`,
# and the result is wrong by a factor of two. (In bfloat16, with 8 bits, it would stand still at
# 256.)
#
# So the kernels **load** 16 bits, **compute** in float32, and round once, when they **store**. What is
# saved is half of the bytes, and that is what counts here. Your own kernels would do the same with
# `np.float32(x[row, col])` in the place of `x[row, col]`.

# %% [markdown]
# ## What the profiler says
#
# The profiler counts, in the chip, what your tracer counted here: sectors and requests. In lesson 2
# they agreed for all kernels that were compared. So for these kernels you can write its report
# yourself:

# %%
print(f"{'kernel':8}{'':14}{'requests':>9}{'sectors':>9}{'per request':>13}")
for label, trace in (traces | {"online": online_trace}).items():
    for op in ("load", "store"):
        sites = [site for site in trace.sites if site.op == op and site.space == "global"]
        requests, sectors = (sum(s.requests for s in sites), sum(s.sectors for s in sites))
        print(f"{label:8}global {op:7}{requests:9,}{sectors:9,}{sectors / requests:13.0f}")

# %% [markdown]
# What it does not show are the *answers* of the cache. A profiler tells how many of these
# sectors came from the large memory and how many from a cache on the way. Lesson 4 reads such a
# report line by line.
#
# ## Where the real libraries go further
#
# - PyTorch has several softmax kernels. For rows of up to a thousand numbers or two, a warp holds
#   one or two whole rows in its registers. A longer row is held by a block: in registers, and from
#   some nine thousand numbers on in shared memory.
# - Triton is a language for kernels within Python. Its fused softmax, the second kernel of its tutorial,
#   holds a row in the registers of one block.
# - FlashAttention, the kernel with which most language models compute attention, and cuDNN never store the scores of attention. They keep $(m, s)$ for each row, and
#   merge.
# - Where only the *loss* is wanted, one needs no probabilities at all but
#   $\log \sum_j e^{x_j} = m + \log s$. It comes out of the same pair. Lesson 5 uses it.
#
# ## Three questions
#
# <details><summary>1. A colleague starts the running maximum at 0 instead of minus infinity. All
# tests with scores around 0 pass. When does it fail?</summary>
#
# When a whole row is far below 0. With scores around −200, 0 stays the maximum, all exponentials
# underflow to 0, and 0 / 0 is <code>nan</code>. The check has rows near −100,000 for this.
# </details>
#
# <details><summary>2. Mean and variance of a row are also computed by a formula that needs the mean
# first. Could they be computed online, too?</summary>
#
# Yes. Keep the count, the mean and the sum of squared distances from this mean; when a number comes,
# the mean moves, and the sum is corrected by a known amount. Two parts can be merged, and the merge is
# associative. (B. P. Welford, 1962; the merge is by T. F. Chan and others, 1979.) Batch
# normalisation will need it.
# </details>
#
# <details><summary>3. In <code>softmax_warp</code> somebody writes
# <code>shfl_down_sync</code> for the maximum instead of <code>shfl_xor_sync</code>. Which lanes
# subtract the right maximum, and why is the result wrong, although any shift is allowed?</summary>
#
# Only lane 0 has it. Other lanes have the maximum of some of the lanes. Any shift is allowed, but it
# has to be the <em>same</em> for the whole row: terms with different shifts must not be added.
# Unless they are merged.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# [Lesson 4: softmax at the limit](04_softmax_at_the_limit.ipynb). The row stays in registers, loads
# get wide, and the bar reaches the line. Then softmax runs backwards.
