# %% [markdown]
# # 4 · Softmax at the limit
#
# **After this lesson** you can compute how many bytes must be under way for a memory to be busy,
# hold rows in registers and load them 16 bytes at a time, choose how many threads share a row, say
# how many blocks fit on a multiprocessor, run softmax backwards, put your kernels into PyTorch, and
# read a profiler's report line by line.
#
# **You need** [lesson 3](03_softmax_naive_to_online.ipynb): softmax, `online`, bytes asked for.
# A little PyTorch helps in section 8 (tensors, `loss.backward()`). When numba refuses a line:
# [which Python works in a kernel](01_threads_and_memory.ipynb#Which-Python-works-in-a-kernel).
#
# **Time:** 190 minutes, so better not in one go: there are good places to stop after sections 3, 5
# and 7. All cells together run in less than a minute in the simulator. On a GPU the speeds are measured on your own
# machine, otherwise you see recorded ones. The words are collected in the [glossary](glossary.md).

# %%
import math

import numpy as np
import torch

from course_lib import SIMULATED, bench, cuda, plot, reference, results_table, simulator
from course_lib.kernels.softmax import softmax
from course_lib.runtime.intrinsics import load_vector, store_vector, warp_max, warp_sum
from course_lib.teach import TODO, check, hint, progress, solution, use

MINUS_INF = np.float32(-np.inf)
recorded = bench.load_records()

# %% [markdown]
# The measurements of this lesson are found by this function. Some are taken on your machine, if it
# has a GPU. The others were recorded for the course.

# %%
def measured(name, **wanted):
    """The measurement called `name`; None, and a line that says so, if there is none."""
    if not SIMULATED and name.startswith("lesson_04."):
        from course_lib.benchmarks import lesson_04

        taken = getattr(lesson_04, name.removeprefix("lesson_04."))()
        return taken | {"source": {"device": bench.device_facts()["name"], "date": "just now"}}
    found = bench.find(recorded, name=name, **wanted)
    if not found:
        print(f"{name} has not been recorded on a GPU yet.")
        return None
    return found[0] | {"source": {"device": recorded["device"]["name"], "date": results_table.when(found[0])}}


print("recorded on an", recorded["device"]["name"])

# %% [markdown]
# (A line such as `ladder and plot.ladder(…)` draws a picture if there is something to draw.)
#
# ## 1 · A bar that stays low
#
# Lesson 3 ended with `online`, which reads each number twice, in the right order, with few barriers.
# Here it is once more, for 8,192 rows of 4,096 numbers, and beside it what PyTorch makes of them.
#
# **Predict** from bytes alone: `online` moves three sizes of the array, a copy moves two. What
# share of the copy's bandwidth should `online` reach, in useful bytes per second?

# %%
ladder = measured("softmax.forward", shape=[8192, 4096], dtype="float32")
if ladder:
    shown = ("naive", "shared", "warp", "online", "PyTorch eager")
    rows = {row["label"]: row for row in ladder["rows"] if row["label"] in shown}
    share = rows["online"]["gbps"] / ladder["copy_gbps"]
    print(f"online: {2 / 3:.0%} by bytes alone, {share:.0%} measured")

# %%
ladder and plot.ladder(rows.values(), ladder["copy_gbps"], **ladder["source"],
                       title=f"8,192 rows of 4,096 numbers: online stays at {share:.0%} of a copy")

# %% [markdown]
# Bytes do not explain it. And even two thirds was a low guess: the 16 KB of a row were read a moment
# ago, so they mostly come from the cache the second time. So this kernel is not slow because it moves
# too much. For most of the time, the memory has next to *nothing* to do for it. (The profiler's report
# at the end of this lesson says how busy the memory was.) We have to find out why.

# %% [markdown]
# ## 2 · How much must be under way
#
# ### Latency, measured
#
# Lesson 1 said that the answer to a request takes some hundreds of nanoseconds. How does one
# measure that? Not with many loads, since they overlap. It takes loads that *cannot* overlap: each
# address is the answer to the request before.

# %%
@cuda.jit
def chase(chain, place):
    i = place[0]
    for _ in range(5):
        i = chain[i]  # where to look next
    place[0] = i


chain = np.array([3, 0, 5, 4, 2, 1], dtype=np.int32)  # 0 → 3 → 4 → 2 → 5 → 1 → 0
place = np.array([0], dtype=np.int32)
chase[1, 1](chain, place)
print("five steps from 0 lead to", place[0])

# %% [markdown]
# One thread, 20,000 steps, and a chain that leads through memory in no order. If the chain is short,
# the numbers are soon in a cache. There are two: the **L1** cache in each multiprocessor, and the
# **L2** cache, which all of them share. **Predict** how many times longer a step takes if the answer
# has to come from the device's memory, and not from L1.

# %%
latencies = measured("lesson_04.latency")
waits = latencies["rows"] if latencies else []
waits = [row | {"microseconds": row["nanoseconds"]} for row in waits]
waits and plot.times(waits, xlabel="time of one step of the chain (ns)", **latencies["source"],
                    title="From one load to the next that depends on it")

# %% [markdown]
# A step is a load *and* the few instructions around it: the loop, and the next address made from the
# answer. So a hit in L1 is faster than its bar. For the device's memory these instructions hardly
# count, and in the time of the last bar a thread could have done some hundred additions.
#
# ### Little's law
#
# Think of a shop. Every minute 4 customers come in, and each stays for 15 minutes. How many are in
# the shop? 60. It does not matter what they buy or in what order they leave: *arrivals per minute
# times minutes of stay*. John Little proved in 1961 that it holds for every queue, and it is called
# **Little's law**. For memory:
#
# $$ \text{bytes in flight} = \text{bandwidth} \times \text{latency} $$
#
# **In flight** are bytes that were asked for and have not come yet. Read it from right to left as
# well: if your kernel has only half as many bytes in flight as that, it gets half of the bandwidth,
# however fast the memory is.
#
# ### Exercise: bytes in flight
#
# A chip with a memory of `gbps` GB/s and a latency of `latency_ns` nanoseconds has
# `n_multiprocessors` multiprocessors, each of them with `n_threads` threads. How many bytes must
# each multiprocessor have in flight, and how many each thread? (A function for once, and no kernel.)

# %% exercise="bytes_in_flight"
def bytes_in_flight(gbps, latency_ns, n_multiprocessors, n_threads):
    whole_chip = TODO
    per_multiprocessor = TODO
    return per_multiprocessor, TODO  # and per thread


check("bytes_in_flight", bytes_in_flight)

# %%
hint("bytes_in_flight")

# %% [markdown]
# Let us ask it about an H200: 132 multiprocessors, at most 2,048 threads on each, and say 4,200 GB/s
# and 600 ns. (Above, one thread had the whole chip for itself. Where all ask at the same time,
# requests queue, and an answer takes longer. The next picture shows how much.)

# %%
function = use("bytes_in_flight", bytes_in_flight)
per_multiprocessor, per_thread = function(4200, 600, 132, 2048)
print(f"per multiprocessor: {per_multiprocessor / 1024:.1f} KB")
print(f"per thread:         {per_thread:.1f} bytes")

# %% [markdown]
# More than 9 bytes for every thread, at every moment, from 2,048 threads per multiprocessor that
# never pause. A thread that asks for one number has 4 bytes in flight. **It cannot be enough**, even
# if it did nothing else. (Lesson 1 found 4.7 bytes for the same chip. That was a ReLU, half of whose
# bytes are stores, for which no thread waits. Here all 4,200 GB/s are loads.)
#
# To see the law, here are kernels that only read. Each of their threads asks for one number of 4 bytes,
# or for 1, 2 or 4 pieces of 16 bytes, waits for all of them, and asks again. They run with few
# threads and with many. **Predict:** what matters more, the threads or the loads of each?

# %%
reading = measured("lesson_04.in_flight")
reading and waits and plot.in_flight(
    reading["rows"], waits[-1]["nanoseconds"], max(row["gbps"] for row in reading["rows"]),
    reading["multiprocessors"], **reading["source"],
    title="Reading: bandwidth follows what is in flight",
)

# %% [markdown]
# Neither: what matters most is the *product* of the two. Dots that stand above each other have the
# same number of bytes in flight, by few threads or by many, and they are not far apart.
# The red line is nothing but Little's law, drawn with the latency of
# the lone thread from above. Close to the peak the points fall below it: there requests queue. At
# 16 KB the best way reads 3,600 GB/s, and 16 KB · 132 / 3,600 GB/s are about the 600 ns of which we spoke.
# So it takes rather more than the marked 11 KB to get everything: with 32 KB one is there.
#
# But the same product is not quite the same bandwidth. Here are the ways to have 8 or 16 KB in flight:

# %%
for row in reading["rows"] if reading else []:
    if row["in_flight"] in (8 * 1024, 16 * 1024):
        print(f"{row['in_flight'] // 1024:2} KB: {row['label']:28} {row['gbps']:5,.0f} GB/s")
reading and print("on an {device} ({date})".format(**reading["source"]))

# %% [markdown]
# More threads with less each are the better way there. A thread that asks for several pieces waits
# for *all* of them before it asks again, so its early answers lie idle until the last one has come.
#
# ### Where `online` pauses
#
# Now look at the loop of `online` with these eyes:
#
# ```python
# for col in range(t, n_cols, 256):
#     value = x[row, col]              # ask for 4 bytes
#     if value > m: …                  # wait for them, then compute; then ask again
# ```
#
# Each thread has 4 bytes in flight, and none while it computes. A compiler may ask for the next
# number a little earlier, but it cannot do much, as every step needs the `m` of the step before.
# With four loads first, and the computing after them, it would look like this:

# %%
plot.loads_in_time({"one load, wait, compute": 1, "four loads, wait, compute": 4}, 8,
                   latency=600, work=50, title="Eight loads of one thread")

# %% [markdown]
# The loads are no faster. They wait *together*. There are three ways to have more bytes in flight,
# and the next sections take them one after another: **more loads at a time** and **larger
# loads** (section 3), and **more threads** (section 5).

# %% [markdown]
# ## 3 · A row in registers
#
# How many loads can a thread ask for at a time? As many as it has places to put the answers. Such
# places are registers. A multiprocessor has 65,536 of them, with 4 bytes each.
#
# **Predict:** how many KB is that on one multiprocessor, and how many MB on 132?
#
# <details><summary>The answer</summary>
#
# 65,536 · 4 bytes are 262,144 bytes, that is 256 KB (of 1,024 bytes each). On the whole chip it is 132
# times as much: 34.6 million bytes, or 34.6 MB. (Counted in MB of 1,024 · 1,024 bytes, which are
# properly called MiB, it is 33.)
# </details>
#
# It is more than all shared memory together, and the fastest memory there is. A block of 256 threads in which each thread holds 16 numbers holds a row of 4,096.
# And if it holds the row, then
#
# - each thread asks for its 16 numbers at once: **16 times as much in flight**;
# - maximum, sum and division find them in registers: the row is **read once**;
# - the maximum is known before the first exponential is taken: **nothing has to be online**.
#
# In numba, a thread's own array is
#
# ```python
# values = cuda.local.array(16, np.float32)     # size and type must be constants
# ```
#
# Its elements are in registers **if every index is a constant** once the loops are unrolled, which
# means written out, round by round: registers have names, not addresses. So the loops over
# `values` must have constant ends. With `values[i]`, where `i` is known only when the kernel runs, the
# array goes to *local memory*. In spite of its name, that is a piece of the device's memory. It goes
# through the caches L1 and L2, so not each access is a long way. But each is a load or a store, which
# a register does not need, and it takes room in the caches from others.
#
# ### 16 bytes at a time
#
# A lane may ask for 4, 8 or 16 bytes by one instruction. Python has no word for this. The course has
# two:
#
# ```python
# load_vector(values, x, i)      # values[0:4] = x[i:i + 4], one load of 16 bytes
# store_vector(y, i, values)     # y[i:i + 4] = values[0:4], one store
# ```
#
# `x` and `y` are arrays of one dimension. (For float16 it is eight numbers, 16 bytes as well.) Here are
# two copies of 1,024 numbers. **Predict** requests, and sectors per request, of each:

# %%
@cuda.jit
def copy_narrow(x, y):
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        y[i] = x[i]


@cuda.jit
def copy_wide(x, y):
    values = cuda.local.array(4, np.float32)
    for vector in range(cuda.grid(1), x.size // 4, cuda.gridsize(1)):
        load_vector(values, x, 4 * vector)
        store_vector(y, 4 * vector, values)

# %%
x = np.arange(1024, dtype=np.float32)
for kernel in (copy_narrow, copy_wide):
    y = np.zeros_like(x)
    with simulator.trace() as t:
        kernel[1, 64](x, y)
    load = next(site for site in t.sites if site.op == "load" and site.space == "global")
    print(f"{kernel.__name__}: right {np.array_equal(x, y)}, {load.requests} requests to load, "
          f"{load.sectors_per_request:.0f} sectors each")

# %% [markdown]
# The same sectors in a quarter of the requests, each with 512 bytes. It is the rung `vectorised` of
# lesson 1, and now you know what it is good for: four times as much in flight.
#
# There is one condition. The address must be a multiple of 16 bytes. One says that it is
# **aligned**. For numbers of 4 bytes, `i` must be a multiple of 4:

# %%
@cuda.jit
def copy_from_1(x, y):
    values = cuda.local.array(4, np.float32)
    load_vector(values, x, 1)
    store_vector(y, 0, values)


try:
    simulator.run(copy_from_1, 1, 1, x, y)
except ValueError as error:
    print(str(error).split(";")[0])

# %% [markdown]
# (A GPU stops the whole program there.) In a table of `n_cols` columns, row `r` begins at element
# `r * n_cols`. So all rows begin aligned if `n_cols` is a multiple of 4, and otherwise three out of
# four do not. A library must be ready for that, and the course's is: such rows it loads
# number by number.
#
# ### Exercise: softmax in registers
#
# A warp per row, as in `softmax_warp`. Each lane holds `VECTORS` pieces of `WIDTH` numbers; here that
# is 2 · 4, so rows may have up to 256 numbers. `x` and `y` are flat, and `n_cols` is a multiple of 4. In
# which order the lanes take the pieces decides whether requests are coalesced: piece 0 goes to
# lane 0, piece 1 to lane 1, …, piece 32 to lane 0 again.
#
# Fill the pieces that are past the end of the row with $-\infty$. **Predict** what they add to the
# maximum, and to the sum.

# %% exercise="softmax_registers"
WIDTH, VECTORS = 4, 2


@cuda.jit
def softmax_registers(x, y, n_cols):
    values = cuda.local.array((VECTORS, WIDTH), np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    start = row * n_cols
    if start < x.size:
        m, s = MINUS_INF, np.float32(0)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] = MINUS_INF
            col = TODO  # the first column of this lane's piece number v
            TODO  # 1. load the piece into values[v], if it is there
        for v in range(VECTORS):
            for k in range(WIDTH):
                m = max(m, values[v, k])
        m = warp_max(m)
        TODO  # 2. in values, put the exponential in the place of each number; s is their sum
        s = warp_sum(s)
        TODO  # 3. divide, and store the pieces where they came from


check("softmax_registers", softmax_registers)

# %%
hint("softmax_registers")

# %% [markdown]
# (`warp_max` and `warp_sum` are the butterflies of lesson 3, for your convenience.) What does your
# kernel ask of memory? Eight rows of 256 numbers:

# %%
kernel = use("softmax_registers", softmax_registers)
rows = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
y = np.zeros_like(rows)
with simulator.trace() as t:
    kernel[2, 128](rows.ravel(), y.ravel(), 256)
print("right:", np.allclose(y, reference.softmax(rows), atol=1e-6))
plot.passes({"yours": t}, rows.nbytes, title="Read once, written once")

# %%
load = next(site for site in t.sites if site.op == "load" and site.space == "global")
plot.access_map(t, load, steps=2, title="Loads of 16 bytes: 512 bytes for each request")

# %% [markdown]
# This is all that softmax *must* move. (Does your map show 32 sectors per request, half of each unasked
# for? Then each lane takes neighbouring pieces, like chapters. It is right, but asks for each sector
# twice.)
#
# Now for 8,192 rows of 4,096 numbers, with a block of 256 threads for each row. We go from `online` to
# the course's `registers` in steps: first the row is held, but loaded 4 bytes at a time; then 16.
#
# **Predict:** which of the two steps brings more?

# %%
steps = measured("lesson_04.steps")
steps and plot.ladder(steps["rows"], steps["copy_gbps"], **steps["source"],
                      title="To hold the row brings most: {:.1f} times as fast".format(
                          bench.times_as_fast(steps, *(steps["rows"][k]["label"] for k in (1, 0)))))

# %% [markdown]
# **Explaining the gap.** Holding the row puts 16 loads in flight per thread where there was one.
# (It also spares the second reading, and the arithmetic of the online sum.) This is by far the greater
# step. Once 64 bytes per thread are under way, there is
# enough for the memory, and that they come in 4 instructions in place of 16 no longer brings much
# more *in flight*. It saves instructions, and that helps a little.
#
# The course's `registers` (in `course_lib/kernels/softmax/registers.py`) is the same idea, for all
# lengths and types. Its `load_shifted` fills up to eight pieces per thread before anything is used;
# and it takes fewer or more threads for a row, depending on the row's length. That is what comes next.

# %% [markdown]
# A good place for a break.

# %% [markdown]
# ## 4 · Short rows: several for each warp
#
# Many rows are short: 64 classes, say, or the 49 places that a window of pixels looks at. A block of
# 256 threads for 64 numbers leaves 192 with nothing to do. A warp for 64 numbers gives each lane
# two. It plays ten rounds of shuffles (five for the maximum, five for the sum) for the
# sake of two numbers per lane, which are 8 bytes in flight.
#
# So let fewer lanes share a row: a **team** of 8, of which a warp has four. Each lane has 8 numbers
# of the row, and the team needs three rounds of shuffles. The smaller the team, the more each
# lane holds. Here are teams of four lanes and rows of 16 numbers. As always, the threads
# themselves write down who they are:

# %%
@cuda.jit
def who_takes(row_of, rank_of, team):
    row, rank = cuda.grid(1) // team, cuda.grid(1) % team
    for col in range(rank, row_of.shape[1], team):
        row_of[row, col] = row
        rank_of[row, col] = rank


row_of, rank_of = np.full((2, 4, 16), -1, dtype=np.int32)
who_takes[1, 16](row_of, rank_of, 4)
plot.thread_map(row_of, rank_of, group="team", title="Half a warp: four teams of four lanes")

# %% [markdown]
# `shfl_xor_sync` with a step of 1 exchanges lanes 0 and 1, 2 and 3, and so on; with a step of 2 lanes
# 0 and 2, 1 and 3. **Predict:** for teams of four, which step is the first one that leads out
# of the team? So a butterfly that begins with `team // 2` stays inside:

# %%
@cuda.jit(device=True)
def team_max(value, team):
    step = team // 2
    while step > 0:
        value = max(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, step))
        step //= 2
    return value


@cuda.jit(device=True)
def team_sum(value, team):
    step = team // 2
    while step > 0:
        value += cuda.shfl_xor_sync(0xFFFFFFFF, value, step)
        step //= 2
    return value

# %% [markdown]
# ### Exercise: softmax by teams
#
# `team` is 1, 2, 4, 8, 16 or 32, and rows have up to `SLOTS * team` numbers, any length. Mind one thing.
# A warp has several teams, and the last warp may have teams *without a row*. May they leave, with
# `if row < x.shape[0]` around everything, as until now? Think of `0xFFFFFFFF`.

# %% exercise="softmax_teams"
SLOTS = 8


@cuda.jit
def softmax_teams(x, y, team):
    values = cuda.local.array(SLOTS, np.float32)
    row, rank = TODO, TODO
    n_cols = TODO  # of this thread's row; what if there is no such row?
    m, s = MINUS_INF, np.float32(0)
    for k in range(SLOTS):
        col = k * team + rank
        values[k] = TODO
        m = max(m, values[k])
    m = team_max(m, team)
    for k in range(SLOTS):
        values[k] = math.exp(values[k] - m)
        s += values[k]
    s = team_sum(s, team)
    for k in range(SLOTS):
        col = k * team + rank
        if col < n_cols:
            y[row, col] = values[k] / s


check("softmax_teams", softmax_teams)

# %%
hint("softmax_teams")

# %% [markdown]
# (A team without a row computes `exp(−∞ − (−∞))`, which is `nan`. It is nobody's result, and no
# shuffle brings it to another team.)
#
# **Predict** the order for 524,288 rows of 64 numbers: a block for each row, and teams of 32, 16
# and 8 lanes.

# %%
teams = measured("lesson_04.teams")
teams and plot.ladder(teams["rows"], teams["copy_gbps"], **teams["source"],
                      title="524,288 rows of 64: eight lanes are {:.0f} times as fast as a block".format(
                          bench.times_as_fast(teams, *(teams["rows"][k]["label"] for k in (3, 0)))))

# %% [markdown]
# **Explaining the gap.** Half the lanes for a row, and each of them has twice as much in flight, and
# one round less to play for the maximum and for the sum. The last bar adds loads of 16 bytes: a
# single load brings a lane its four numbers, so that 16 lanes do for a row.
#
# **The size of the team should fit the size of the job**, as for the pooling of lesson 2. The
# course's `registers` makes that choice for each length. The table of its choices is in
# `course_lib/kernels/blocks/row_plan.py`. They are *measured*, for there is no law that
# gives them. A few of them:

# %%
from course_lib.kernels.blocks.row_plan import row_plan

for n_cols in (20, 64, 200, 1000, 4096, 28672):
    n_slots, team_bits, n_threads = row_plan(n_cols, 4, 1)
    who = f"a block of {n_threads}" if team_bits is None else f"a team of {1 << team_bits}"
    print(f"rows of {n_cols:6,}: {who:16} {4 * n_slots:3} numbers in registers per thread")

# %% [markdown]
# ## 5 · How many threads fit
#
# More registers per thread, more in flight per thread. But the registers of a multiprocessor are
# shared among the threads that live on it. The share of its 2,048 places for threads that
# are taken is called **occupancy**. It is worth being able to compute it. The rules, for an H200
# (other chips have other numbers):
#
# 1. Threads live in whole warps, so a block of 100 threads counts as 4 warps.
# 2. A multiprocessor takes at most 64 warps, and at most 32 blocks.
# 3. It has four parts with 16,384 registers each, and a warp lives in one part. Registers are
#    handed out in eights per thread: who needs 33 gets 40.
# 4. Blocks come whole.
#
# (Shared memory is a further limit, for kernels that use much of it.)
#
# ### Exercise: blocks per multiprocessor
#
# How many blocks of `n_threads` threads, with `n_registers` registers per thread, can live on a
# multiprocessor at the same time? **Predict** first, for 256 threads and 40 registers.

# %% exercise="blocks_per_multiprocessor"
def blocks_per_multiprocessor(n_threads, n_registers):
    n_warps = TODO  # of a block
    per_thread = TODO  # registers handed out to a thread
    room = TODO  # warps whose registers fit, in all four parts
    return TODO  # the smallest of three numbers


check("blocks_per_multiprocessor", blocks_per_multiprocessor)

# %%
hint("blocks_per_multiprocessor")

# %%
fitting = use("blocks_per_multiprocessor", blocks_per_multiprocessor)
registers = np.arange(16, 256)
resident = {}
for n, label in ((256, "blocks of 256 threads"), (1024, "blocks of 1,024: no launch above 64")):
    threads = np.array([n * fitting(n, int(r)) for r in registers], dtype=float)
    resident[label] = np.where(threads > 0, threads, np.nan)  # not one block fits: a launch fails
plot.curves(registers, resident, xlabel="registers per thread",
            ylabel="threads on a multiprocessor", title="More registers, fewer threads",
            alt="Threads on a multiprocessor over registers per thread: a falling staircase. Blocks "
                "of 256 threads: 2,048 threads up to 32 registers, 256 from 129 on. Blocks of 1,024: "
                "2,048 up to 32, 1,024 up to 64, and above that a launch fails.")

# %% [markdown]
# A staircase, and its steps are high. With blocks of 1,024 threads, one register too many (33
# where it was 32) costs half of the threads. And where that curve ends, above 64 registers, not a
# single block of that size fits: such a launch fails.
#
# Now put the two together. In flight are *threads × loads × bytes per load*. Say a kernel needs 24
# registers for itself, and 4 for each piece of 16 bytes under way. **Predict** which of these has the
# most in flight:

# %%
print("pieces  registers  threads  occupancy  KB in flight")
for pieces in (0.25, 1, 2, 4, 8, 16):
    needed = 24 + math.ceil(4 * pieces)
    threads = 256 * fitting(256, needed)
    print(f"{pieces:6g}{needed:11}{threads:9,}{threads / 2048:11.0%}"
          f"{threads * pieces * 16 / 1024:14,.0f}")

# %% [markdown]
# (A quarter of a piece is a single number.) From the first line to the last, the threads become
# fewer and fewer, and what is in flight does not shrink. Full occupancy with one number each is the
# *worst* line of the table. So occupancy is no aim in itself: **bytes in flight are.** Vasily
# Volkov made this known in 2010, under the title "Better performance at lower occupancy".
#
# But a thread that computes has nothing in flight, and while one block computes, others
# should be loading. So one does not go to the end of the table, either. The course's kernels hold up
# to 32 numbers per thread.

# %% [markdown]
# Another good place for a break.

# %% [markdown]
# ## 6 · Rows too long for a block
#
# A block has at most 1,024 threads. If each of them holds 32 numbers, every chip has registers for a
# block of 896, and that is a row of 28,672. A language model has 50,000 or 130,000 words to choose
# from, which makes rows of as many. What then?
#
# One could read such a row twice, online. That costs three sizes of the array and not two. But there
# is more room on the chip. A block may ask for **shared memory** beyond the usual 48 KB, up to 227 KB
# on an H200, which is room for 58,000 numbers. And there is a way to fill it that has as much in
# flight as Little's law can ask for: an **asynchronous copy** takes 16 bytes from the device's memory straight into
# shared memory, without a stop in a register. The thread only orders it and goes on. So *everything*
# can be in flight at once, and no register is taken meanwhile. In the end one waits for all copies:
#
# ```python
# copy_async(cache, place, x, i)     # 16 bytes from x[i:] to cache[place:], some time
# wait_for_copies()                  # until all that this thread has ordered are there
# ```
#
# If even that is too little: since the H100, blocks may form a **cluster**, up to 8 of them here. They
# start together on neighbouring multiprocessors, have a barrier of their own, and can read *each
# other's shared memory*. So a cluster shares a row. Each block holds a part, and all that they have to
# exchange is a pair of numbers. You know the pair, and you know how to merge it:

# %%
row = np.random.default_rng(1).normal(size=4000).astype(np.float32)
parts = [(part.max(), np.exp(part - part.max()).sum()) for part in row.reshape(4, 1000)]
plot.shared_row(parts, title="One row, a cluster of four blocks")

# %% [markdown]
# This is the rung `split`, in `course_lib/kernels/softmax/split.py`: asynchronous copies, one pass
# over shared memory with lesson 3's online softmax, a merge across the cluster. For rows
# that not even a cluster can hold, and for GPUs without all this, it falls back on reading twice. The
# simulator knows clusters, too:

# %%
x = np.random.default_rng(2).normal(size=(1, 60_000)).astype(np.float32)
y = softmax.forward(cuda.to_device(x), variant="split").copy_to_host()
print(f"largest error: {np.abs(y - reference.softmax(x)).max():.1e}")

# %% [markdown]
# **Predict:** for which of these lengths do the registers of a block not suffice? And does it show in
# the speed?

# %%
found = bench.find(recorded, name="softmax.forward", dtype="float32")
print(f"{'rows':>8}{'columns':>9}   share of a copy, on an {recorded['device']['name']} "
      f"({results_table.when(found[0])})" if found else "softmax.forward has not been recorded on a GPU yet.")
for each in found:
    own = {row["label"]: row["percent_of_copy"] for row in each["rows"]}
    best = each.get("default", "registers")
    print(f"{each['shape'][0]:8,}{each['shape'][1]:9,}   online {own['online']:5.1f} %, "
          f"{best:9} {own[best]:5.1f} %, PyTorch {own['PyTorch eager']:5.1f} %")

# %% [markdown]
# For 50,304 and 131,072, both of which are more than 28,672. Of these the first still fits into the
# shared memory of one block, and it does not show. The second is shared by a cluster of eight, whose
# blocks have to wait for each other, and that costs a part of the speed.
#
# ## 7 · Backwards
#
# To learn, a network must know how the loss reacts to the scores. Given $dy_i = \partial L /
# \partial y_i$, we want $dx_j = \partial L / \partial x_j$.
#
# For ReLU or swish that was easy: each output depended on one input. Here **each output depends on
# all inputs of its row**. If one score goes up, its own probability goes up and all others go down. So
# there are $n \times n$ derivatives for a row of $n$ numbers, a table called the **Jacobian**.
#
# Write $S = \sum_k e^{x_k}$, so that $y_i = e^{x_i} / S$. The derivative of $S$ with respect to $x_j$ is
# $e^{x_j}$. By the quotient rule there are two cases:
#
# $$ \frac{\partial y_i}{\partial x_i} = \frac{e^{x_i} S - e^{x_i} e^{x_i}}{S^2} = y_i (1 - y_i)
# \qquad\text{and for } i \ne j \qquad
# \frac{\partial y_i}{\partial x_j} = \frac{0 - e^{x_i} e^{x_j}}{S^2} = {-y_i} \, y_j . $$
#
# The first is the derivative of the sigmoid; the second is never positive.
#
# Never trust a derivation. Here is the table from these formulas, and once more by brute force:

# %%
x = np.array([2.0, 1.0, -1.0, 1.5, 0.0])
y, h = reference.softmax(x), 1e-6
formula = np.diag(y) - np.outer(y, y)
brute = np.array([reference.softmax(x + h * e) - reference.softmax(x - h * e)
                  for e in np.eye(5)]).T / (2 * h)
print(f"largest difference {np.abs(formula - brute).max():.0e}")
plot.tables([formula, brute], ["by the formulas", "by finite differences"],
            xlabel="j: which x is changed", ylabel="i: which y reacts", title="The Jacobian")

# %% [markdown]
# The diagonal is what each score does for itself. All else is negative, and orange in the picture.
# **Predict:** what is the sum of each column?
#
# <details><summary>The answer</summary>
#
# Zero: the probabilities always sum to 1, so what one gains the others lose.
# </details>
#
# ### Without the table
#
# For a row of 50,000 numbers the Jacobian has 2.5 billion entries. Nobody wants to store it, and
# nobody has to. The chain rule sums over all outputs on which $x_j$ has an influence:
#
# $$ dx_j = \sum_i dy_i \frac{\partial y_i}{\partial x_j}
#   = dy_j \, y_j - \sum_i dy_i \, y_i \, y_j
#   = y_j \Big( dy_j - \sum_i y_i \, dy_i \Big) . $$
#
# (The $i = j$ term $dy_j y_j (1 - y_j)$ was split up: its second part goes into the sum, which then
# runs over *all* $i$.) So one number per row is all that is needed, $\sum_i y_i\, dy_i$. It is the mean
# of $dy$, weighted by the probabilities. What counts for a score is how much better than this
# mean it is. Such a product of a vector with a Jacobian is called a **vector-Jacobian
# product**, and it is what every backward pass computes, without ever making the table.
#
# Note what is *not* needed: `x`, the maximum, the sum. The result `y` of the forward pass is enough.
#
# ### Exercise: the gradient of softmax
#
# A warp per row. **Predict:** how many bytes does it have to move, counted in sizes of the array?

# %% exercise="softmax_backward"
@cuda.jit
def softmax_backward(dy, y, dx):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < y.shape[0]:
        total = np.float32(0)
        TODO  # 1. the weighted mean of dy, known to all lanes
        for col in range(lane, y.shape[1], 32):
            dx[row, col] = TODO


check("softmax_backward", softmax_backward)

# %%
hint("softmax_backward")

# %% [markdown]
# Against brute force, with float64 on one side and your float32 kernel on the other. The loss is the sum
# of all `dy * y`:

# %%
backward = use("softmax_backward", softmax_backward)
rng = np.random.default_rng(5)
x, dy = rng.normal(size=(2, 3, 7))
dy, y = dy.astype(np.float32), reference.softmax(x).astype(np.float32)
dx, h = np.zeros_like(y), 1e-6
backward[1, 96](dy, y, dx)
brute = np.zeros_like(x)
for place in np.ndindex(x.shape):
    step = np.zeros_like(x)
    step[place] = h
    brute[place] = (dy * (reference.softmax(x + step) - reference.softmax(x - step))).sum() / (2 * h)

# %%
exact = reference.softmax_backward(dy, reference.softmax(x))
print(f"kernel − finite differences: {np.abs(dx - brute).max():.0e}")
print(f"kernel − float64 formula:    {np.abs(dx - exact).max():.0e}")
print(f"sum of each row of dx:       {dx.sum(axis=1)}")

# %% [markdown]
# (That the rows of `dx` sum to zero is the shift invariance of lesson 3, seen from behind: to add the
# same number to all scores changes nothing.)
#
# Your kernel reads `y` and `dy` twice and writes once, which makes five sizes of the array; three
# would do. You know the cure: both in registers. **Predict** where the rungs end up. (The
# copy to compare with moves as many bytes, that is three arrays, half of them read, half written.)

# %%
back = measured("softmax.backward", shape=[8192, 4096], dtype="float32")
back and plot.ladder(back["rows"], back["copy_gbps"], **back["source"],
                     title="8,192 rows of 4,096: registers is {:.1f} times as fast as warp".format(
                         bench.times_as_fast(back, "registers", "warp")))

# %% [markdown]
# **Explaining the gap.** What `shared` and `warp` read a second time comes from the cache, but they have
# to ask and to wait for it. Who holds both arrays has nothing to ask for. That `registers` even passes
# the line is no magic: two of its three arrays are only read, and memory reads a little faster than
# it writes.

# %% [markdown]
# A good place for a break. From here on it is about what surrounds a kernel.

# %% [markdown]
# ## 8 · Into PyTorch
#
# PyTorch computes gradients by itself, for its own functions. For ours it has to be told. A function
# with a gradient of its own is a class with two methods:
#
# - `forward(ctx, x)` computes `y`. What the gradient will need goes into `ctx`, the *context* of
#   this one call: `ctx.save_for_backward(tensor)`;
# - `backward(ctx, dy)` gets `dy`, finds what was saved in the tuple `ctx.saved_tensors`, and
#   returns `dx`.
#
# `Softmax.apply(x)` then runs forward, and notes in the result how to come back. That is all of
# **autograd**, PyTorch's automatic differentiation, that we need.
#
# ### Exercise: a softmax with a gradient
#
# You are given two functions that launch kernels, `compute_y(x)` and `compute_dx(dy, y)`. (A
# **launcher** takes care of all that a kernel does not: it checks what it was given, allocates the
# result, and chooses grid and block.) They take and return **tensors**, PyTorch's arrays.
# **Predict:** why would a variable outside of `ctx` be a bad place for `y`?

# %% exercise="softmax_function"
def softmax_function(compute_y, compute_dx):
    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            TODO

        @staticmethod
        def backward(ctx, dy):
            return TODO

    return Softmax.apply


check("softmax_function", softmax_function)

# %%
hint("softmax_function")

# %% [markdown]
# Now with your own two kernels. `launch` starts a kernel on tensors, on a GPU as in the simulator:

# %%
from course_lib.runtime.host.launch import launch


def compute_y(x):
    y = torch.empty_like(x)
    launch(softmax_teams_kernel, math.ceil(x.shape[0] * 32 / 128), 128, x, y, 32)
    return y


def compute_dx(dy, y):
    dx = torch.empty_like(y)
    launch(backward, math.ceil(y.shape[0] * 32 / 128), 128, dy.contiguous(), y, dx)
    return dx

# %%
softmax_teams_kernel = use("softmax_teams", softmax_teams)
my_softmax = use("softmax_function", softmax_function)(compute_y, compute_dx)

torch.manual_seed(0)
x = torch.randn(6, 10, device="cpu" if SIMULATED else "cuda", requires_grad=True)
target = torch.tensor([3, 1, 4, 1, 5, 9], device=x.device)
for function in (lambda x: torch.softmax(x, -1), my_softmax):
    loss = -function(x).log().gather(1, target[:, None]).mean()
    (gradient,) = torch.autograd.grad(loss, x)
    print(f"loss {loss.item():.6f}, gradient of x[0, 3]: {gradient[0, 3].item():.6f}")

# %% [markdown]
# (And the prediction? A network may call softmax several times before the gradients are asked for. A
# variable would hold the last `y` only; each call has a `ctx` of its own.)
#
# (Why `dy.contiguous()`? A gradient need not lie in memory as one would expect. That of `y.sum()` is
# a single 1 that *looks like* a whole table, all of whose elements are at the same address. numba's
# kernels take any strides and would be right; those that load 16 bytes at a time would not.)
#
# ### What a real operator needs besides
#
# This works, as long as nobody but Python looks. `torch.compile`, which translates a whole
# network, cannot look into a launcher of ours; it does not know what comes out. So the course
# *registers* its softmax, in `course_lib/ops`. It tells PyTorch:
#
# - a **schema**: the name, and the types of what goes in and comes out;
# - a **fake** implementation, which computes no numbers, only the shape, type and device of the result.
#   `torch.compile` runs networks with such fake tensors first, to see what there will be;
# - the **gradient**: again an operator with a schema and a fake, so that it can be compiled, too;
# - one implementation each for the GPU and the CPU, and what *autocast* (automatic mixed precision)
#   should do with numbers of 16 bits.

# %%
from course_lib import ops

print(torch.ops.course_lib.softmax.default._schema)

with torch._subclasses.FakeTensorMode():
    print(ops.softmax(torch.empty(49152, 512, dtype=torch.bfloat16)))

# %% [markdown]
# Nothing was computed and no memory was taken for 25 million numbers: that is what a fake is
# for. And this is what `torch.compile` sees of a function that uses it, as one piece
# (`fullgraph=True` makes it an error if it were not):

# %%
def what_it_sees(graph, inputs):
    for node in graph.graph.nodes:
        if node.op == "call_function":
            print("   ", node.target)
    return graph.forward


scaled = torch.compile(lambda x: ops.softmax(x * 2), backend=what_it_sees, fullgraph=True)
print("right:", torch.allclose(scaled(x), torch.softmax(x * 2, -1), atol=1e-6))

# %% [markdown]
# `torch.library.opcheck` tests all of these promises at once, and the course's tests call it.

# %% [markdown]
# ## 9 · Where the microseconds go
#
# Take a small softmax: 128 rows of 200 numbers. It moves 205 KB. **Predict** how long this takes the
# memory, at 4,000 GB/s.
#
# <details><summary>The answer</summary>
#
# 204,800 bytes / 4,000 GB/s is 0.05 µs: a twentieth of a microsecond.
# </details>
#
# No kernel is that fast: to start, to wait for a row once and to end take the GPU a microsecond or two.
# But before that, *Python* has to ask for it, and that happens on the host:

# %%
host = measured("softmax.host")
rows = [row | {"label": row["label"].replace(", recorded", ", with autograd")}
        for row in (host["rows"] if host else []) if "part: " not in row["label"]]
rows.sort(key=lambda row: row["microseconds"])
rows and plot.times(rows, xlabel="time until Python may go on (µs)", **host["source"],
                    title="A call of softmax, 128 × 200 numbers, from quick to slow")

# %% [markdown]
# (Hatched is PyTorch's own. Of ours, `kernels.softmax` is the launcher alone, `ops.softmax` the operator
# around it, `nn.Softmax` the module around that; `numba-cuda` is `kernel[grid, block](...)`, numba's
# own way to launch. *With autograd* means that autograd notes how to come back.)
#
# PyTorch needs less than we do, as all of this is C++ there and Python here. The line
# `nn.Softmax, with autograd` is the sum of these parts:

# %%
rows = [row | {"label": row["label"].removeprefix("part: ")}
        for row in (host["rows"] if host else []) if "part: " in row["label"]]
rows and plot.times(rows, xlabel="time (µs)", **host["source"],
                    title="Where the microseconds of nn.Softmax go")

# %% [markdown]
# - *The driver's launch.* The **driver** is NVIDIA's program that talks to the GPU. Every launch has
#   to go through it.
# - *A tensor for y.* PyTorch keeps memory in stock, so this is quick; but it is a Python object, too.
# - *The prepared launch looked up.* The course's `launch` examines its arguments once for each
#   combination of shapes and types, and from then on only fills in the addresses.
# - *Who wants a say?* Every call of a PyTorch operator goes through the **dispatcher**, which decides who
#   handles it: autograd, autocast, `torch.compile`, the GPU's implementation. For an
#   operator written in Python that takes longer than all the rest (it is the line
#   `torch.ops.course_lib.softmax` above). So `course_lib/ops/registration.py` asks first whether there
#   is anybody who wants a say. Mostly there is nobody, and then it calls the kernel directly.
# - *The module's call*, and *autograd's node*: what PyTorch does around a module, and to remember the way
#   back.
#
# For such a size, *the kernel does not matter any more*. The host is the slower one, and the GPU
# waits for it. Besides doing less for each call, there are two ways out.
#
# **Ask once.** A **CUDA graph** records a series of launches, without running them. The driver gets
# the whole series in one piece and can replay it as often as one likes, with new numbers in the same
# memory:
#
# ```python
# graph = torch.cuda.CUDAGraph()
# with torch.cuda.graph(graph):      # records what is launched here
#     y = model(x)
# graph.replay()                     # one call for all of it
# ```
#
# **Predict** what it does to a hundred small softmaxes, one after the other:

# %%
graphs = measured("lesson_04.graphs")
graphs and plot.times(graphs["rows"], title="A hundred softmaxes of 128 × 200",
                      xlabel="time per softmax, host and device together (µs)", **graphs["source"])

# %% [markdown]
# What is left is mostly the GPU's own. (Why do our hundred calls take longer here than the 8 µs of
# `kernels.softmax` above? They all write into one array, `out=`. The prepared launch is for
# results in new memory only; with `out=` a call goes the whole way through the launcher.)
#
# (All times of kernels in this course are taken from graphs, so
# that the host has no part in them.)
#
# **Start early.** Even in a graph there is a pause between two kernels: the second one starts only
# when the last block of the first has ended and all it wrote can be seen. From the H100 on, there
# is **programmatic dependent launch**. The blocks of a kernel say `allow_next_kernel()`. When *all* of
# them have said it (or have ended), the blocks of the next kernel may already be brought to the
# multiprocessors, and get ready. Before they touch memory they call `wait_for_previous_kernel()`. In the first lines of `registers` you find both. For small kernels
# this hides a good part of what a start costs.

# %% [markdown]
# ## 10 · Under the roof
#
# Is the memory really the limit? Could it not be the arithmetic? One picture answers this for every
# kernel. Count, for each number of softmax: a comparison for the maximum, a subtraction, an
# exponential (count it as one), an addition for the sum, a multiplication. Those are 5
# operations, called **FLOPs** (floating-point operations), and 8 bytes that must be moved. **Arithmetic
# intensity** is FLOPs per byte, here 5 / 8 = 0.6.
#
# An H200 can do 67 · 10¹² FLOPs per second (67 TFLOP/s, with float32) and move 4.2 · 10¹² bytes.
# **Predict:** how many FLOPs would a kernel have to do per byte for both limits to be reached at the
# same time?
#
# <details><summary>The answer</summary>
#
# 67 / 4.2, about 16.
# </details>
#
# Below that intensity memory is the limit, above it arithmetic. Drawn with two logarithmic
# axes these limits look like a roof, hence the name **roofline**, and the place where they meet
# is called the ridge. No kernel can be above the roof. Where each
# rung stands tells what to fix: *further to the right* are kernels that move fewer bytes for their
# work, *further up* are kernels that are faster.

# %%
FLOPS = 5 * 8192 * 4096
profile = measured("softmax.profile")
points = []
if ladder and profile:
    moved = {r["label"]: r["dram_read_bytes"] + r["dram_write_bytes"] for r in profile["rows"]}
    points = [
        {"label": r["label"], "kind": r["kind"], "intensity": FLOPS / moved[r["label"]],
         "tflops": FLOPS / r["microseconds"] / 1e6} for r in ladder["rows"] if r["label"] in moved
    ]
points and plot.roofline(points, ladder["copy_gbps"], 67, zoom=True, **ladder["source"],
                         title="Every rung of softmax under the roof")

# %% [markdown]
# Only the 5 useful FLOPs per number are counted, for all rungs alike, and the bytes are those
# that really left or reached the device's memory, as the profiler counted them. (A part of the result
# was still in the L2 cache when it stopped counting, hence 0.7 and not 0.6.) So a rung whose second
# and third readings come out of the cache stands as far to the right as one that reads once. All
# are far left of the ridge: softmax is **memory-bound**, and its last rung stands at the roof. There is
# nothing left to gain, unless fewer bytes have to be moved. That is the next lesson.

# %% [markdown]
# ## What the profiler says
#
# Now we read a real report. NVIDIA's profiler, Nsight Compute, was asked for some thirty of its
# numbers for each rung (`course_lib/benchmarks/profile_softmax.py` has the command), with
# 8,192 rows of 4,096 numbers:

# %%
LINES = {
    "time (µs)": ("microseconds", ".0f"), "memory busy (%)": ("dram_percent", ".0f"),
    "read (MB)": ("dram_read_bytes", "M"), "written (MB)": ("dram_write_bytes", "M"),
    "hits in L1 (%)": ("l1_hit_percent", ".0f"), "hits in L2 (%)": ("l2_hit_percent", ".0f"),
    "sectors per load": ("load_sectors_per_request", ".1f"),
    "sectors per store": ("store_sectors_per_request", ".1f"),
    "instructions (millions)": ("instructions", "M"), "registers": ("registers", ".0f"),
    "occupancy possible (%)": ("occupancy_possible_percent", ".0f"),
    "occupancy reached (%)": ("occupancy_percent", ".0f"),
    "warps ready to run": ("eligible_warps", ".2f"),
    "waiting for memory": ("stall_long_scoreboard", ".1f"),
    "waiting at barriers": ("stall_barrier", ".1f")}

# %%
def text(value, how):
    return f"{value / 1e6:.0f}" if how == "M" else f"{value:{how}}"


profile = measured("softmax.profile")
if profile:
    print(" " * 24 + "".join(f"{row['label'].split()[0]:>11}" for row in profile["rows"]))
    for name, (field, how) in LINES.items():
        print(f"{name:24}" + "".join(f"{text(row[field], how):>11}" for row in profile["rows"]))
    print("on an {device} ({date})".format(**profile["source"]))

# %% [markdown]
# Line by line:
#
# - **time**: of the kernel alone, run once, with empty caches. So it is not quite that of the ladder.
# - **memory busy**: the share of the memory's peak that was used. This is the line to look at first.
#   Where it is high, the kernel is at the limit. Where it is low, read on. (100 % is not to be had: the
#   peak is 4,800 GB/s, of which a plain copy gets about 4,150.)
# - **read, written**: what the device's memory sent and took. The array has 134 MB. What lies above
#   that was read again; what lies below it was still in the L2 cache when the kernel ended.
# - **hits**: the share of requested sectors that the cache had. A high number is no merit in itself.
#   A kernel that reads everything three times has good hits, and one that reads once has none
#   in L1. (In L2 every store counts as a hit. Half of the sectors of a kernel that reads once and
#   writes once are stores, so it has 50 % of hits there without a single useful one.)
# - **sectors per load, per store**: yours to predict since lesson 1. 4 with loads of 4 bytes, 16 with
#   loads of 16 bytes, 32 for one thread per row. Part of a request may be switched off at a row's end.
# - **instructions**, counted per warp. With 16-byte loads and one pass there are far fewer.
# - **registers**, and the **occupancy** that follows from them: the exercise of section 5. What is
#   *reached* is less than what is *possible*, since at the beginning and the end there are not
#   enough blocks, and since blocks end at different times.
# - **warps ready to run**: how many warps of a quarter of a multiprocessor could execute their
#   next instruction, on average. Each quarter executes at most one per cycle. Far less than 1 means
#   that most of the time *nobody* is ready: all of them wait. Several mean the contrary: warps queue
#   for their turn. So it is in `shared`, in `warp` and in PyTorch's kernel. They leave the memory
#   idle for more than half of the time because they execute four or five times as many instructions
#   as `registers`.
# - **waiting for …**: how many cycles a warp waits between two of its instructions, and for what. The
#   profiler calls waiting for memory *long scoreboard*.
#
# Here are the ten causes that were recorded. (The profiler knows some more, such as waiting for a
# branch or at a fence.) *For a result* means: that of the instruction before, which is not ready yet. *For
# a full unit*: the part that computes, or that takes requests, has enough to do for the moment. *For its
# turn*: the warp could go on, but another one was chosen.

# %%
WHY = {
    "for memory": ["stall_long_scoreboard"], "at a barrier": ["stall_barrier"],
    "for a result": ["stall_wait", "stall_short_scoreboard"],
    "for a full unit": ["stall_math_pipe_throttle", "stall_mio_throttle", "stall_lg_throttle"],
    "for its turn": ["stall_not_selected"], "else": ["stall_drain", "stall_no_instruction"],
}
profile and plot.stalls(profile["rows"], WHY, title="What a warp waits for", **profile["source"])

# %% [markdown]
# Beware of the obvious reading: the *longest* bar is not the slowest kernel. In `registers` a
# warp may wait long for memory at each load. But it has few loads, each of which brings 512 bytes, and
# many are under way. It is *bytes in flight* that decide, and you can tell them from the table by
# Little's law: bandwidth times latency. Your occupancy function knows the rest:

# %%
print("Possible occupancy, yours and the profiler's:")
for row in profile["rows"] if profile else []:
    threads = int(row["block_size"])
    possible = fitting(threads, int(row["registers"])) * threads / 2048
    print(f"{row['label']:14} {threads:5} threads, {row['registers']:3.0f} registers: "
          f"{possible:4.0%} and {row['occupancy_possible_percent']:3.0f} %")

# %% [markdown]
# They agree. (They would not for a kernel that is held back by its shared memory, of which your
# function knows nothing.)
#
# ## Where the real libraries go further
#
# - PyTorch's softmax holds short rows in the registers of a warp, and longer ones in those of a block, as
#   far as nine numbers per thread: 4 bytes at a time, as its column of the report shows. Still longer
#   rows it holds in shared memory, if they fit. Otherwise it reads them again.
# - Triton makes such kernels from a few lines. One says which row, and how many threads; loads,
#   registers and shuffles are its own affair. For the rows of section 1 it was recorded, too, and is as
#   fast as `registers`: 99 % of the copy.
# - Since the H100, a single thread can order the asynchronous copy of a whole rectangle of a
#   matrix. The unit that does it is called *TMA*, tensor memory accelerator. Matrix products live on it.
# - cuDNN fuses softmax with what comes before and after it. The fastest softmax is again the
#   one that is never launched.
#
# ## Three questions
#
# <details><summary>1. A new GPU has twice the bandwidth and the same latency. Your kernel does not get
# any faster on it. What do you do?</summary>
#
# By Little's law it needs twice as many bytes in flight, and yours has as many as before. Let each
# thread ask for more at a time, or let more threads fit. If the new chip has more multiprocessors,
# each of them needs less.
# </details>
#
# <details><summary>2. A colleague writes <code>for k in range(n)</code> over her local array, with
# <code>n</code> an argument of the kernel, and it becomes ten times slower. Why?</summary>
#
# With an unknown end the loop cannot be unrolled, so <code>values[k]</code> has no fixed register. The
# array moves to local memory: each access becomes a load or a store, through the caches and, where
# they are full, to the device's memory. Use a constant end, and a guard inside.
# </details>
#
# <details><summary>3. What is the gradient of log-softmax, <code>y = x − m − log s</code>? Which sum
# over the row does it need?</summary>
#
# The derivative of <code>y_i</code> with respect to <code>x_j</code> is 1 (if i = j) minus
# <code>exp(y_j)</code>, the probability. So <code>dx_j = dy_j − exp(y_j) · Σ dy_i</code>: the plain sum
# of <code>dy</code>.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# [Lesson 5: fusing softmax](05_fusing_softmax.ipynb). The kernel is at the limit, so only one thing is
# left: to move fewer bytes. Softmax together with its loss, with the layer before it, with
# dropout after it.
