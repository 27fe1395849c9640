# %% [markdown]
# # 1 · Threads and memory
#
# **After this lesson** you can write kernels for data of any size and any number of dimensions, see
# which thread touches which piece of memory, predict from that how fast a kernel can be at best,
# avoid three classical traps, and write the activation functions of a neural network with their
# gradients.
#
# **You need** [lesson 0](00_start_here.ipynb): kernel, thread, block, grid, launch.
#
# **Time:** 115 minutes; there are good places to pause after sections 4 and 5. All cells together
# run in less than half a minute in the simulator. On a GPU the speeds are measured on your own
# machine, otherwise you see recorded ones. The words are collected in the
# [glossary](glossary.md).

# %%
import math

import numpy as np

from course_lib import SIMULATED, cuda, plot, reference, simulator
from course_lib.teach import TODO, check, hint, progress, solution, use

# %% [markdown]
# ## 1 · One thread, one element
#
# The pieces of a neural network that make it more than a long sum are its **activation functions**.
# The simplest is **ReLU** (rectified linear unit): it leaves positive numbers alone and
# turns negative ones into zero, `y = max(x, 0)`. One number in, one number out, no neighbour needed:
# a job for one thread per element.
#
# In lesson 0 a thread asked for its place in a picture by `cuda.grid(2)`. For a plain row of numbers
# it is `cuda.grid(1)`, and the launch has plain numbers as well: `[3, 8]` is 3 blocks of 8 threads.
# What `cuda.grid(1)` computes is no secret:

# %%
@cuda.jit
def who_kernel(block, thread):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x  # the same as cuda.grid(1)
    block[i] = cuda.blockIdx.x
    thread[i] = cuda.threadIdx.x


block, thread = np.full((2, 24), -1, dtype=np.int32)
who_kernel[3, 8](block, thread)
plot.thread_map(block, thread, title="3 blocks of 8 threads, 24 elements")

# %% [markdown]
# `blockIdx.x` is the number of the thread's block, `blockDim.x` how many threads a block has
# (here 8), and `threadIdx.x` the thread's number within its block. All of them
# count from 0.
#
# **One more thing about memory.** A GPU has its own memory and cannot see NumPy arrays, which lie in
# the memory of the CPU. People call the CPU's side the **host** and the GPU the **device**. If you
# pass a NumPy array to a kernel, numba copies it to the device before the launch and back
# afterwards, every time. That is convenient, and slow. When you care, you say it yourself:

# %%
x = np.array([-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, -4.0, 5.0], dtype=np.float32)


@cuda.jit
def relu_eight(x, y):
    i = cuda.grid(1)
    y[i] = max(x[i], np.float32(0))


x_on_device = cuda.to_device(x)  # host → device
y_on_device = cuda.device_array_like(x_on_device)  # new memory on the device, not filled
relu_eight[1, 8](x_on_device, y_on_device)  # nothing is copied here
print(y_on_device.copy_to_host())  # device → host

# %% [markdown]
# (Why `np.float32(0)` and not simply `0`? Section 7 has the answer.)

# %% [markdown]
# ## 2 · When threads and elements do not match
#
# With 20 elements and blocks of 8, two blocks are too few and three are too many: blocks come whole.
# We round up, since every element needs a thread. In Python, `math.ceil(20 / 8)`.
#
# **Predict:** 3 blocks of 8 are 24 threads. What do the last four do?

# %%
@cuda.jit
def relu_unguarded(x, y):
    i = cuda.grid(1)
    y[i] = max(x[i], np.float32(0))


x = np.linspace(-1, 1, 20, dtype=np.float32)
try:
    simulator.run(relu_unguarded, 3, 8, x, np.zeros_like(x))
except simulator.OutOfBounds as error:
    print(error)

# %% [markdown]
# `simulator.run(kernel, grid, block, ...)` always runs in the simulator, also where there is a GPU.
# It stopped at the first thread that left the array, and says which one it was.
#
# **A real GPU would have said nothing.** It does not know where an array ends. It computes
# an address and writes there, whoever owns that memory. (Only an address that belongs to nobody at
# all makes the launch fail, and then you have to restart Python.) Let us watch this without harm, by
# giving the kernel a piece of memory that holds two things: 20 elements for `y`, and right behind
# them four numbers that belong to somebody else.

# %%
memory = np.zeros(24, dtype=np.float32)
y, someone_elses = memory[:20], memory[20:]
someone_elses[:] = [7, 7, 7, 7]
print("before:", someone_elses)

relu_unguarded[3, 8](np.linspace(-1, 1.4, 24, dtype=np.float32), memory)
print("after: ", someone_elses)
print("the end of y:", y[-4:])

# %% [markdown]
# The sevens are gone, and no error was raised. In a real program they might have been the weights of
# the next layer. The result of *this* kernel, `y`, is perfectly right; something else goes wrong, somewhere
# else, an hour later. This is the mistake that kernels make most often. Here are
# the four threads that must keep still:

# %%
block, thread = np.full((2, 24), -1, dtype=np.int32)
who_kernel[3, 8](block, thread)
plot.thread_map(block, thread, length=20, title="24 threads for 20 elements")

# %% [markdown]
# The cure is one line, and nearly every kernel in the world has it: the thread asks whether its
# element exists. This line is called the **guard**.
#
# ### Exercise: ReLU with a guard
#
# `x.size` is the number of elements. The kernel must be right for *every* size and launch that
# has enough threads, also for an empty array.

# %% exercise="relu"
@cuda.jit
def relu(x, y):
    i = cuda.grid(1)
    if TODO:  # is there an element for this thread?
        y[i] = max(x[i], np.float32(0))


check("relu", relu)

# %%
hint("relu")

# %% [markdown]
# ## 3 · Fewer threads than elements
#
# For 100 million elements and 256 threads per block you would launch 390,625 blocks. That works.
# But each thread starts, finds out who it is, handles *one* element, and ends. Could fewer
# threads do more each? Then a launch would not depend on the size of the data, either.
#
# So let each thread handle several elements. There are two natural ways to deal 40 elements to
# 16 threads. One: thread 0 takes the first three, thread 1 the next three, and so on, like pages of
# a book handed out in chapters. Two: everybody takes one, then everybody takes one more, like cards.

# %%
@cuda.jit
def deal_chapters(block, thread):
    n_threads = cuda.gridsize(1)  # all threads of the launch
    share = (block.size + n_threads - 1) // n_threads  # elements per thread, rounded up
    first = cuda.grid(1) * share
    for i in range(first, min(first + share, block.size)):
        block[i] = cuda.blockIdx.x
        thread[i] = cuda.threadIdx.x


@cuda.jit
def deal_cards(block, thread):
    for i in range(cuda.grid(1), block.size, cuda.gridsize(1)):
        block[i] = cuda.blockIdx.x
        thread[i] = cuda.threadIdx.x

# %%
block, thread = np.full((2, 40), -1, dtype=np.int32)
deal_chapters[2, 8](block, thread)
plot.thread_map(block, thread, title="Like chapters: each thread takes a run of elements")

# %%
block, thread = np.full((2, 40), -1, dtype=np.int32)
deal_cards[2, 8](block, thread)
plot.thread_map(block, thread, title="Like cards: each thread takes every 16th element")

# %% [markdown]
# Both are right. On a CPU you would choose chapters, since a CPU likes to read on where it has just
# read. **Predict**, and write your guess down: which one does a GPU like better? Section 5 will tell.
#
# Dealing cards has a name, **grid-stride loop**: the step from one element to the next, the
# *stride*, is the number of threads in the whole grid. Its `range` also does the guard's work:
# a thread that starts past the end gets an empty range.
#
# ### Exercise: a grid-stride ReLU
#
# It must be right for any number of threads, more than elements or fewer.

# %% exercise="relu_grid_stride"
@cuda.jit
def relu_grid_stride(x, y):
    for i in range(cuda.grid(1), x.size, TODO):
        y[i] = max(x[i], np.float32(0))


check("relu_grid_stride", relu_grid_stride)

# %%
hint("relu_grid_stride")

# %% [markdown]
# ## 4 · From one number to four indices
#
# Pictures for a neural network come as arrays with four indices, `x[n, c, h, w]`: picture `n` of a
# **batch** (some pictures that are handled together), its **channel** `c` (red, green, blue to begin with), row `h` and column `w`. The shape is
# written **N, C, H, W**. Memory, however, is one long row of numbers. Here is where each element of
# a small array goes:

# %%
plot.tensor_layout((2, 3, 2, 4), title="Shape (N=2, C=3, H=2, W=4): each element's place in memory")

# %% [markdown]
# The last index runs fastest, as on an odometer: `w` counts 0, 1, 2, 3, then starts again while `h`
# goes up by one, and so on. In a formula, the place of `x[n, c, h, w]` is
#
# $$ i = ((n \cdot C + c) \cdot H + h) \cdot W + w . $$
#
# A kernel with one thread per element needs the way back, from `i` to `n, c, h, w`. It goes as with
# the digits of a number: `i % W` (the remainder) is the last digit `w`, and `i // W`
# (the quotient, rounded down) is the number that is left when it is struck off.
#
# **Predict** with pencil and paper: which `n, c, h, w` belongs to place 42? Then look it up in
# the picture.
#
# ### Exercise: a bias for each channel
#
# A layer adds one number, the **bias**, to all elements of a channel:
# `y[n, c, h, w] = x[n, c, h, w] + bias[c]`. One thread per element, numbered by `cuda.grid(1)`.

# %% exercise="nchw_index"
@cuda.jit
def nchw_index(x, bias, y):
    N, C, H, W = x.shape
    i = cuda.grid(1)
    if i < N * C * H * W:
        w = i % W
        h = i // W % H
        c = TODO
        n = TODO
        y[n, c, h, w] = x[n, c, h, w] + bias[c]


check("nchw_index", nchw_index)

# %%
hint("nchw_index")

# %% [markdown]
# Try it on a real picture: more red, less blue, and it looks like evening. We read the photograph of
# lesson 0 in colour, and turn it from rows × columns × colours into N, C, H, W.

# %%
import matplotlib.cbook
import matplotlib.image

with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
    photo = matplotlib.image.imread(file, format="jpg")[20:532]
small = photo.reshape(64, 8, 64, 8, 3).mean(axis=(1, 3)).astype(np.float32) / 255
x = np.ascontiguousarray(small.transpose(2, 0, 1)[np.newaxis])  # (1, 3, 64, 64)

y = np.zeros_like(x)
bias = np.array([0.15, 0.0, -0.2], dtype=np.float32)
kernel = use("nchw_index", nchw_index)
kernel[math.ceil(x.size / 256), 256](x, bias, y)
plot.images([small, y[0].transpose(1, 2, 0).clip(0, 1)], ["as taken", "bias (0.15, 0, -0.2)"])

# %% [markdown]
# A good place for a break. Next comes the idea that decides more than any other whether a kernel
# is fast.

# %% [markdown]
# ## 5 · The same work in another order
#
# Copying a picture is the simplest kernel there is. Here it is twice. Find the difference:

# %%
@cuda.jit
def copy_by_rows(x, y):
    col, row = cuda.grid(2)
    if row < x.shape[0] and col < x.shape[1]:
        y[row, col] = x[row, col]


@cuda.jit
def copy_by_columns(x, y):
    row, col = cuda.grid(2)
    if row < x.shape[0] and col < x.shape[1]:
        y[row, col] = x[row, col]

# %% [markdown]
# Only `col` and `row` have changed places in one line. Each pixel is still copied exactly once.
# We launch blocks of 128 threads along x, first only 40 of them to see how far they
# get, then all 128:

# %%
picture = photo.reshape(128, 4, 128, 4, 3).mean(axis=(1, 3, 4)).astype(np.float32) / 255
begun = []
for kernel in (copy_by_rows, copy_by_columns):
    part, whole = np.zeros((2, 128, 128), dtype=np.float32)
    kernel[(1, 40), (128, 1)](picture, part)
    kernel[(1, 128), (128, 1)](picture, whole)
    print("all 128 blocks make the same picture:", np.array_equal(whole, picture))
    begun.append(part)
plot.images(begun, ["by rows, 40 of 128 blocks", "by columns, 40 of 128 blocks"], vmin=0, vmax=1)

# %% [markdown]
# In the first one, the 128 threads of a block copy a row; in the second one, a column.
# Same number of threads, same bytes, the same result in the end. **Predict:** does one of them take
# longer on a GPU? How many times as long?

# %% [markdown]
# ### What memory sends: sectors
#
# Three facts about the chip are needed to find out.
#
# 1. Threads do not run one by one. 32 threads of a block with consecutive numbers (x counts first)
#    form a **warp**, and as a rule a warp executes one instruction for all of its 32 threads
#    together. (A single one of them is called a **lane**.)
# 2. So when the code says `x[row, col]`, 32 addresses are asked for at once. This is one
#    **request**.
# 3. Memory does not send single numbers. What reaches a multiprocessor comes in **sectors** of 32
#    bytes, which is eight float32 numbers that lie side by side. Who wants one of them gets all
#    eight.
#
# (Strictly speaking it is a cache on the way, a memory on the chip of which more below, that hands
# out sectors. The large memory behind it sends a sector at least, and on many chips more at a time.)
#
# What a request costs is, above all, the number of different sectors in it. A request that touches
# as few as possible is called **coalesced** (grown together).
#
# **Predict** for a picture of 128 × 128 float32 numbers: how many sectors does one request of one
# warp touch, by rows, and by columns? Write down two numbers.
#
# To check them, let the threads themselves store which address they would touch, counted in
# bytes from the start of the picture. A single warp walks over the picture in the same order, 32
# pixels in each step:

# %%
@cuda.jit
def addresses_by_rows(address, n_rows, n_cols):
    for step in range(address.shape[0]):
        i = step * 32 + cuda.threadIdx.x
        row, col = i // n_cols, i % n_cols
        address[step, cuda.threadIdx.x] = 4 * (row * n_cols + col)  # 4 bytes a number


@cuda.jit
def addresses_by_columns(address, n_rows, n_cols):
    for step in range(address.shape[0]):
        i = step * 32 + cuda.threadIdx.x
        row, col = i % n_rows, i // n_rows
        address[step, cuda.threadIdx.x] = 4 * (row * n_cols + col)

# %%
by_rows, by_columns = np.zeros((2, 512, 32), dtype=np.int64)  # 512 steps of 32 pixels
addresses_by_rows[1, 32](by_rows, 128, 128)
addresses_by_columns[1, 32](by_columns, 128, 128)


def sectors(address):
    """How many different sectors of 32 bytes each request touches."""
    return np.array([len(np.unique(request // 32)) for request in address])


print("by rows:   ", sectors(by_rows)[:4], "… mean", sectors(by_rows).mean())
print("by columns:", sectors(by_columns)[:4], "… mean", sectors(by_columns).mean())

# %% [markdown]
# By rows, 32 neighbours of 4 bytes are 128 bytes, that is **4** sectors with nothing wasted. By
# columns, the next pixel lies a whole row further on, so each lane needs a sector of its own: **32**,
# of which seven eighths are sent for nothing. Here they are, in the corner of the picture
# where the warp begins:

# %%
plot.access_order(
    {"by rows": by_rows[:1], "by columns": by_columns[:1]},
    row_bytes=128 * 4, shown_rows=34, title="What one warp asks for in its first request",
)

# %% [markdown]
# Eight times as many sectors for the same 128 bytes. It is not quite hopeless: the pale pixels on the
# right are what the *next* columns will want. A smaller, faster memory on the chip, the **cache**,
# keeps what was sent for a while, so the large memory need not send each of them again.
# But every request still has to collect 32 sectors, from wherever they are, and its warp waits
# for the last of them.
#
# ### Three more patterns
#
# **Predict** the sectors per request when each of the 32 lanes `k` reads the float32 number
#
# - `k + 1`: neighbours again, but starting one number further on;
# - `2 * k`: every second number;
# - `8 * k`: the first of a chapter of eight, as each thread would when it deals itself chapters.

# %%
k = np.arange(32)
patterns = {"k + 1": 4 * (k + 1), "2 k": 4 * (2 * k), "8 k": 4 * (8 * k)}
plot.access_order(patterns, row_bytes=32 * 4, title="One request, 32 float32 numbers per row")

# %% [markdown]
# 5, 8 and 32. Being off by one costs one sector more, a step of two doubles the traffic, and
# chapters of eight or more are as bad as columns. That answers the question of section 3: with
# chapters the 32 lanes read 32 places far apart, and with cards they read 32 neighbours. What counts
# on a GPU is not where *one* thread reads next, but what its 31 neighbours read **at the same time**.
#
# ### Exercise: one thread per column
#
# Now use it. `y[col]` should become the sum of column `col` of `x`. Each thread owns one column and
# walks down its rows.
#
# **Predict:** each thread jumps a whole row further with every step of its loop. How many
# sectors does a request touch?

# %% exercise="column_sum"
@cuda.jit
def column_sum(x, y):
    n_rows, n_cols = x.shape
    col = cuda.grid(1)
    if col < n_cols:
        total = np.float32(0)
        TODO  # add up the elements of this column, row by row
        y[col] = total


check("column_sum", column_sum)

# %%
hint("column_sum")

# %% [markdown]
# <details><summary>The answer to the prediction</summary>
#
# Four, as few as possible. In each step all 32 lanes are in the same row and in neighbouring
# columns. It would be the sum of each <em>row</em>, with one thread per row, that touches 32 sectors
# per request. Fast row sums need threads that work together; they have a lesson of their own.
# </details>

# %% [markdown]
# Another good place for a break. What remains: measuring without fooling yourself, a trap with
# numbers, and the activation functions with their gradients.

# %% [markdown]
# ## 6 · Two traps in measuring time
#
# You would like to know how long ReLU takes on 67 million numbers (2²⁶). So you look at the clock before
# and after the launch, as you would for any Python function. Let us do that three times.
#
# **Predict:** will the three times be alike?

# %%
import time

from course_lib import bench, results_table


@cuda.jit
def fresh_relu(x, y):  # a new kernel: nobody has launched it before
    i = cuda.grid(1)
    if i < x.size:
        y[i] = max(x[i], np.float32(0))


def clocked(label, n_elements, wait):
    start = time.perf_counter()
    fresh_relu[math.ceil(n_elements / 256), 256](x_on_device, y_on_device)
    if wait:
        cuda.synchronize()  # wait until the device has done all it was asked to do
    return {"label": label, "microseconds": (time.perf_counter() - start) * 1e6}

# %%
recorded = bench.load_records()  # what was measured for the course, and on which GPU
traps = bench.find(recorded, name="lesson_01.timing_traps")[0]
rows, device, date = traps["rows"], recorded["device"]["name"], results_table.when(traps)

# %% [markdown]
# Where there is a GPU, the next cell replaces the recorded times with your own. In the simulator it
# does nothing: a time measured there would say nothing about a GPU.

# %%
if not SIMULATED:
    n = 2**26
    x_on_device = cuda.to_device(np.ones(n, dtype=np.float32))
    y_on_device = cuda.device_array_like(x_on_device)
    rows = [clocked("1st: launch and wait", n, wait=True)]
    rows += [clocked("2nd: launch only", n, wait=False)]
    cuda.synchronize()
    rows += [clocked("3rd: launch and wait", n, wait=True)]
    device, date = bench.device_facts()["name"], "just now"
plot.durations(rows, title="The same kernel, three times", device=device, date=date)

# %% [markdown]
# Three times the same work, and three quite different times. The first two are traps:
#
# 1. **The first launch compiles.** numba translates your Python for this GPU and for these types
#    when they are needed for the first time. That takes some hundredths of a second or more, once.
#    Always launch once before you measure. (This is called *warming up*.)
# 2. **A launch does not wait.** It puts the kernel into the device's queue and returns at once, long
#    before the work is done. We call that **asynchronous**. The clock was stopped too early. A
#    kernel's *errors* come late for the same reason: in a later line that has nothing
#    to do with them.
#
# The third one is right, or nearly so. Roughly, this is what happened:

# %%
launch = rows[1]["microseconds"]
wait = max(launch, rows[2]["microseconds"])
plot.timeline(
    [
        ("host (Python)", 0, launch, "launch"),
        ("host (Python)", launch, wait, "cuda.synchronize(): waiting"),
        ("device (GPU)", launch, wait, "the kernel runs"),
    ],
    title="What the clock sees", device=device, date=date,
)

# %% [markdown]
# The launch itself is in the third time, too. For a kernel of a few microseconds that would be most
# of it. So one asks the device's own clock: an **event** is a mark in the device's queue
# that notes the time when the device passes it.
#
# ```python
# start, end = cuda.event(), cuda.event()
# start.record()
# kernel[blocks, threads](x_on_device, y_on_device)
# end.record()
# end.synchronize()
# milliseconds = cuda.event_elapsed_time(start, end)
# ```
#
# `course_lib.bench` does this, many times over, and takes the **median** (half of
# the measurements were faster, half slower). All speeds in this course are taken that way.
#
# Now for the question of section 5, by rows against by columns. A longer bar is better: it shows how
# many bytes were copied per second. The red line is a ready-made copy of the same bytes; section 9 says
# more about it. (In such pictures, a thin black line at the end of a bar reaches over the middle half
# of all measurements: a quarter of them were slower, a quarter faster. Mostly they agree so well that
# it is too short to be seen.)

# %%
order, device = bench.find(recorded, name="lesson_01.copy_order")[0], recorded["device"]["name"]
if not SIMULATED:
    from course_lib.benchmarks import lesson_01

    order = lesson_01.copy_order(copy_by_rows, copy_by_columns, side=4096)
    device = bench.device_facts()["name"]
us = {row["label"]: row["microseconds"] for row in order["rows"]}
plot.ladder(
    order["rows"], order["copy_gbps"], device=device, date=results_table.when(order),
    title=f"By columns, the same copy takes {us['by columns'] / us['by rows']:.1f} times as long",
)

# %% [markdown]
# One line swapped, and the same work takes several times as long. The factor is not exactly the
# eight that you counted in sectors, since the cache spares the large memory a part of the
# traffic. But you need no stopwatch to see from the code which one is slower.
#
# By rows does not reach the line, either. Section 9 finds out why.

# %% [markdown]
# ## 7 · A trap with numbers: float64
#
# GPUs compute with 32-bit numbers (**float32**) by preference. With 64 bits (**float64**) an
# H200 does half as many operations per second, and smaller GPUs only 1/32 or 1/64. You will never ask
# for float64 on purpose. But look at what a bare `2.0` does:

# %%
import numba


def kind_of(function):
    """What `function` of a float32 returns: in NumPy, and once numba has compiled it."""
    compiled = numba.njit(function)
    in_numpy = np.asarray(compiled.py_func(np.float32(3))).dtype
    compiled(np.float32(3))
    return f"NumPy {in_numpy},  numba {compiled.nopython_signatures[0].return_type}"


TWO = np.float32(2.0)
print("x * 2.0           ", kind_of(lambda x: x * 2.0))
print("x + 1             ", kind_of(lambda x: x + 1))
print("x * TWO           ", kind_of(lambda x: x * TWO))
print("x * np.float32(2) ", kind_of(lambda x: x * np.float32(2)))

# %% [markdown]
# In NumPy, a plain Python number takes the type of its partner. In numba, `2.0` *is* a float64, and
# float32 times float64 is float64; an integer as the partner of a float32 has the same effect. The
# whole rest of a formula is then computed with 64 bits, slowly. It is rounded to 32 bits when it is
# stored, so the result does not betray it. Now you know why this course writes `np.float32(0)`, or
# names its constants at the top of a file: `ONE = np.float32(1)`.
#
# (A *comparison* such as `x[i] > 0` is harmless. What comes out of it is true or false, so nothing
# after it gets wider. And 0 is the same number with 32 bits, so the compiler compares with 32.)
#
# (Here `numba.njit` compiled for the CPU, which works on every machine. The rule for types is
# the same on the GPU. The simulator computes with NumPy's rule, so the very last digits may differ.)

# %% [markdown]
# ### Which Python works in a kernel
#
# A kernel looks like Python, but numba has to translate it for a chip that has none. So a part of
# Python works there, and the rest does not. Open the list when numba refuses a line of yours.
#
# <details><summary>What works, and what does not</summary>
#
# In all of these `i` is a whole number, and `v = x[i]` a float32.
#
# | works | |
# |---|---|
# | `math.exp(v)` | and the rest of `math`; `abs`, `min`, `max` of numbers, too |
# | `for k in range(4)` | and `while`, `break`, `continue`, `if`, `and`, `or`, `not` |
# | `pair = (v, i)` | tuples, also taken apart: `a, b = pair` |
# | `values = cuda.local.array(4, np.float32)` | a few places for one thread; lesson 4 |
# | `v * TWO` | a number, a tuple or a NumPy array from outside the kernel. Its value is **frozen** when the kernel is compiled. If you change it later, a GPU keeps the old value, and the simulator warns you |
# | `scale(v)` | a function of yours with `@cuda.jit(device=True)` above it: a *device function* (lesson 3) |
# | `print("element", i, v)` | texts and numbers. The simulator prints at once, as Python does: `element 1 2.0`. A GPU prints floats with six decimals, `element 1 2.000000`, the threads in any order, and only when somebody waits for the device |
# | `return` | ends the thread; a kernel returns no value |
# | `assert v > 0` | compiles, and `raise` does, too. The simulator stops there. On a GPU nobody is told |
#
# | does not work | instead |
# |---|---|
# | `np.exp(v)` | `math.exp(v)` |
# | `x.max()` | a loop, or the threads together (lesson 2) |
# | `f"{v}"` | `print` with several arguments |
# | `[v, v]` | a tuple, or `cuda.local.array` |
# | `{"a": v}` | several variables |
# | `try` and `except` | a guard: ask first |
# | `np.zeros(4)` | `cuda.local.array`, and a loop that fills it |
# | `y[:] = x` | one element at a time |
# | `helper(v)` | plain Python needs `@cuda.jit(device=True)` above it |
#
# The simulator runs your kernel *as Python*, and refuses what the second table lists. `check` compiles
# your kernel for a GPU as well, where numba-cuda is installed (which it cannot be on macOS), and tells
# what else a compiler refuses.
# </details>

# %% [markdown]
# ## 8 · Activation functions and their gradients
#
# Besides ReLU, two more are everywhere: the **sigmoid**, which squeezes any number into the range
# from 0 to 1, and **swish** (also called SiLU), a ReLU with its corner smoothed.
#
# $$ \mathrm{relu}(x) = \max(x, 0) \qquad \sigma(x) = \frac{1}{1 + e^{-x}} \qquad
# \mathrm{swish}(x) = x \cdot \sigma(x) $$

# %%
x = np.linspace(-6, 6, 121)
plot.curves(
    x,
    {"relu": reference.relu(x), "sigmoid": reference.sigmoid(x), "swish": reference.swish(x)},
    xlabel="x (no unit)", ylabel="y (no unit)", title="Three activation functions",
)

# %% [markdown]
# ### A formula that is right on paper
#
# Multiply the sigmoid's fraction by $e^x$ above and below, and you have $e^x / (1 + e^x)$: the same
# function. **Predict** its value for `x` = 100, then see what float32 makes of it.

# %%
x = np.array([-100, -1, 0, 1, 100], dtype=np.float32)
with np.errstate(over="ignore", invalid="ignore"):
    print("e^x / (1 + e^x):", np.exp(x) / (1 + np.exp(x)))
    print("e^x itself:     ", np.exp(x))

# %% [markdown]
# float32 ends at 3.4 · 10³⁸, and $e^{89}$ is more than that. It **overflows** to infinity, and infinity
# divided by infinity is not a number: `nan`. The other formula, $1 / (1 + e^{-x})$, is luckier:
# it overflows at the other end, where 1 divided by infinity gives the correct 0.
# It is safer not to overflow at all: only ever take `exp` of a number that is not positive.
#
# ### Exercise: a sigmoid that never overflows
#
# Mind section 7: constants are float32, too. `math.exp` of a float32 is a float32.

# %% exercise="sigmoid"
@cuda.jit
def sigmoid(x, y):
    i = cuda.grid(1)
    if i < x.size:
        e = math.exp(-abs(x[i]))  # between 0 and 1
        one = np.float32(1)
        y[i] = TODO


check("sigmoid", sigmoid)

# %%
hint("sigmoid")

# %% [markdown]
# ### Backwards
#
# Learning means: change the weights a little so that the network's error, the **loss** $L$, shrinks.
# For that we need to know how the loss reacts to each number on the way. This is its **gradient**.
# It is computed from the end of the network to its beginning, layer by layer. A layer is given
# $dy = \partial L / \partial y$, how the loss reacts to its *output*, and must
# return $dx = \partial L / \partial x$, how it reacts to its *input*. For one number in, one number
# out, this is the chain rule:
#
# $$ dx = dy \cdot f'(x) . $$
#
# (In code, `dy` and `dx` are just arrays of the shape of `y` and `x`.) The three derivatives:
#
# **ReLU.** The slope is 1 right of zero and 0 left of it. At the corner we take 0, as PyTorch does.
#
# **Sigmoid.** By the chain rule,
#
# $$ \sigma'(x) = \frac{e^{-x}}{(1 + e^{-x})^2}
# = \frac{1}{1 + e^{-x}} \cdot \frac{e^{-x}}{1 + e^{-x}} = \sigma(x) \cdot (1 - \sigma(x)) , $$
#
# so the *result* of the forward pass is all that is needed to go back.
#
# **Swish.** By the product rule, and with $\sigma'$ from above,
#
# $$ (x \cdot \sigma(x))' = \sigma(x) + x \cdot \sigma(x) \cdot (1 - \sigma(x)) . $$
#
# Here is the first of them as a kernel:

# %%
@cuda.jit
def relu_backward(dy, y, dx):
    i = cuda.grid(1)
    if i < dy.size:
        dx[i] = dy[i] if y[i] > 0 else np.float32(0)


x = np.array([-2, -1, 0, 1, 2], dtype=np.float32)
dx = np.zeros_like(x)
relu_backward[1, 32](np.full_like(x, 10), np.maximum(x, 0), dx)
print("x :", x, "\ndx:", dx)

# %% [markdown]
# ### Never trust a derivation: finite differences
#
# A slip in a derivation gives a network that learns a little worse, and no error message. So compare
# with the slope you get by brute force: go a small step $h$ to the right and to the left, and
# divide the difference by $2h$. This is a **finite difference**.
#
# **Predict:** is a smaller $h$ always better?

# %%
h = 10.0 ** np.arange(-12, 0.5, 0.5)
slope = (reference.sigmoid(1 + h) - reference.sigmoid(1 - h)) / (2 * h)
exact = reference.sigmoid(1) * (1 - reference.sigmoid(1))
plot.curves(
    h, {"|finite difference − derivative|": np.abs(slope - exact)}, log=True,
    xlabel="step h (no unit)", ylabel="error (no unit)", title="The sigmoid's slope at x = 1",
)

# %% [markdown]
# There are two errors. From the right, the curve is not straight between the two points: that error
# shrinks as $h^2$. From the left, the two numbers are so similar that their difference
# has few correct digits left. In between, near $h = 10^{-5}$, ten digits agree. (This is
# float64. In float32 one could hope for four digits or so, which is why references are computed in
# float64.)
#
# ### Exercise: the gradient of swish

# %% exercise="swish_backward"
@cuda.jit
def swish_backward(dy, x, dx):
    i = cuda.grid(1)
    if i < x.size:
        e = math.exp(-abs(x[i]))
        one = np.float32(1)
        s = one / (one + e) if x[i] >= 0 else e / (one + e)  # the sigmoid
        dx[i] = TODO


check("swish_backward", swish_backward)

# %%
hint("swish_backward")

# %% [markdown]
# And here is your own kernel against brute force:

# %%
kernel = use("swish_backward", swish_backward)
x = np.linspace(-8, 8, 81, dtype=np.float32)
dx = np.zeros_like(x)
kernel[1, 96](np.ones_like(x), x, dx)
wide, h = x.astype(np.float64), 1e-5
slope = (reference.swish(wide + h) - reference.swish(wide - h)) / (2 * h)
print(f"largest difference to the finite difference: {np.abs(dx - slope).max():.1e}")
plot.curves(x, {"swish": reference.swish(x), "your gradient": dx}, xlabel="x (no unit)",
            ylabel="value, slope (no unit)", title="Swish and its slope")

# %% [markdown]
# The slope of swish does not simply climb from 0 to 1. It is slightly negative on the left, and
# slightly above 1 on the right. One might take that for a mistake; the finite difference confirms it.

# %% [markdown]
# ## 9 · The first ladder
#
# You have now met two ways to write ReLU, one element per thread and grid-stride. The course's library
# holds both, and a third. All kernels of this course come as such a **ladder**: from the
# simplest rung to the one that reaches the limit of the chip.
#
# - `naive`: one element per thread, as in section 2.
# - `grid_stride`: as in section 3.
# - `vectorised`: as before, but a thread loads and stores **four** neighbouring numbers by a single
#   instruction of 16 bytes. The sectors are the same, with a quarter of the requests.
#
# They are in `course_lib/kernels/activation.py`, with sigmoid, swish and all gradients. `relu.FORWARD` is
# the ladder, and `variant` names the rung to run. With `variant="auto"`, or without `variant`, the course
# chooses. Run all three here:

# %%
from course_lib.kernels import activation

x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
for variant in activation.relu.FORWARD:
    y = activation.relu.forward(cuda.to_device(x), variant=variant).copy_to_host()
    print(f"{variant:12} right: {np.array_equal(y, reference.relu(x))}")

# %% [markdown]
# What is the limit? ReLU computes next to nothing, but each element has to come from memory and go
# back: 4 bytes in, 4 bytes out. No kernel can be faster than the memory, and the fair
# measure of that is a plain **copy** of the same size on the same chip. The number of bytes moved
# per second is called **bandwidth**, in GB/s (1 GB is 10⁹ bytes).
#
# We take the recorded copy and ladder, or measure both here where there is a GPU (a minute at most).
# **Predict** the time, from nothing but bytes and bandwidth:

# %%
ladder = bench.find(recorded, name="relu.forward", dtype="float32")[-1]  # the largest
device = recorded["device"]["name"]
if not SIMULATED:
    from course_lib.benchmarks import activation as measure

    ladder = measure.run(names=["relu.forward"], shapes=[(4096, 8192)], dtypes=["float32"])[0]
    device = bench.device_facts()["name"]

# %%
n_elements = math.prod(ladder["shape"])
n_bytes = n_elements * (4 + 4)
print(f"{n_elements:,} elements move {n_bytes / 1e6:,.0f} MB.")
print(f"A copy on this device reaches {ladder['copy_gbps']:,.0f} GB/s.")
print(f"So a ReLU takes {n_bytes / ladder['copy_gbps'] / 1e3:,.0f} µs at best.")

# %%
reached = {row["label"]: row["gbps"] / ladder["copy_gbps"] for row in ladder["rows"]}
plot.ladder(
    ladder["rows"], ladder["copy_gbps"], device=device, date=results_table.when(ladder),
    title=f"ReLU, {n_elements:,} numbers: from {reached['naive']:.0%} of a copy "
          f"to {reached['vectorised']:.0%} in three rungs",
)

# %% [markdown]
# Only the useful bytes count here, those which the operation must move. A kernel that also moves
# useless ones (by columns!) shows fewer. (A bar may pass the line by a hair: a copy is only a
# kernel, too, and need not be perfect.) The hatched bars are PyTorch's own ReLU, for comparison: as it
# runs when it is called (**eager**), and as `torch.compile` has rewritten it.
#
# **Explaining the gap.** All rungs touch the same sectors, so why are they not equally fast? Memory is
# far away: the answer to a request takes some hundreds of nanoseconds. This delay is its
# **latency**. It does no harm as long as enough other requests are under way meanwhile. How many?
#
# Half of the 4,200 GB/s are loads. (The other half are stores, for which no thread waits.) If an
# answer takes about 600 ns, then at every moment 2,100 GB/s · 600 ns ≈ 1.3 MB must have been asked
# for and be on the way. An H200 holds 270,336 threads at a time, so that is 4.7 bytes for each of
# them. One number has 4 bytes, a little less than needed, even if nobody ever pauses. With 16 bytes
# each, more than three times as much is on the way as has to be, and the memory never runs out of
# things to do. The lesson of the ladder: **ask for much at a time.**

# %% [markdown]
# ## What the profiler says
#
# NVIDIA's profiler, *Nsight Compute*, counts requests and sectors in the chip itself. For the two
# copies of section 5, with 1024 × 1024 float32 numbers on an H200, it reports for the loads:
#
# | | requests | sectors | sectors per request |
# |---|---|---|---|
# | by rows | 32,768 | 131,072 | 4 |
# | by columns | 32,768 | 1,048,576 | 32 |
#
# They are the numbers that you predicted with a pencil: 1024 · 1024 / 32 = 32,768 requests of
# 4 or 32 sectors each.
#
# ## Where the real libraries go further
#
# - PyTorch's own ReLU takes arrays whose elements do not lie side by side, broadcasts, and handles a
#   dozen types of numbers with one kernel, chosen and vectorised when it is called.
# - Finding `n, c, h, w` by `//` and `%` costs dozens of instructions, far more than adding the bias.
#   Libraries turn such divisions into multiplications, or let the grid's directions do the
#   work, as the copies of section 5 did.
# - The fastest ReLU is the one that is never launched. `torch.compile` **fuses** it with its
#   neighbours, and cuDNN, NVIDIA's library for neural networks, applies it while the result of the
#   layer before is still on the chip. Then the 8 bytes per element are not moved at all.
#
# ## Three questions
#
# <details><summary>1. A kernel reads a picture of bytes (uint8, 1 byte per pixel) by rows, one pixel
# per thread. How many sectors does a request touch, and what does that suggest?</summary>
#
# 32 lanes × 1 byte = 32 bytes: one sector. Nothing is wasted, but a request carries only a quarter of
# what it could. It suggests that each thread should load several neighbouring bytes at once: the idea
# of <code>vectorised</code>.
# </details>
#
# <details><summary>2. Your guard says <code>if i &lt;= x.size</code>. What happens, and who
# notices?</summary>
#
# One thread too many passes, if there is one: it writes right behind the end of the array. On a GPU
# mostly nobody notices. <code>check</code> does, since it puts fences around every array and tries
# sizes that leave threads over.
# </details>
#
# <details><summary>3. A colleague measures 5 µs for a ReLU on 64 million float32 numbers, on the H200
# of this lesson. What do you say?</summary>
#
# 64 million numbers move 512 MB. In 5 µs that would be over 100,000 GB/s, more than twenty times
# what the memory can do. The clock was stopped after the launch, without waiting for the kernel.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# Here each thread worked alone. In the next lesson the threads of a block work
# together, and the first results appear that no thread could compute by itself.
