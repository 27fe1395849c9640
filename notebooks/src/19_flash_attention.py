# %% [markdown]
# # 19 · FlashAttention
#
# **After this lesson** you can compute attention without ever writing down its matrix of scores, say
# how many bytes that saves, derive how a running sum and a running output are rescaled with each new
# maximum, write the kernel a key at a time and in tiles of keys, skip the tiles that a causal mask
# hides, handle queries that see nothing, and merge results of parts of the keys.
#
# **You need** [lesson 3](03_softmax_naive_to_online.ipynb) (online softmax, its merge),
# [lesson 18](18_attention.ipynb) (attention as three kernels, causal masks) and the tiles and barriers of
# [lesson 8](08_convolution.ipynb).
#
# **Time:** 150 minutes; there are good places to pause after sections 3 and 5. All cells together
# run in less than a minute in the simulator. Speeds were recorded for the course on the GPU that is
# named beside them, or predicted from bytes, or published by others: the lesson says which. The words
# are collected in the [glossary](glossary.md).

# %%
import math

import numpy as np
import torch

from course_lib import bench, cuda, plot, reference, results_table, simulator
from course_lib.compare import compare
from course_lib.teach import TODO, check, hint, progress, solution, use

f, ALL = np.float32, 0xFFFFFFFF
ZERO, ONE = f(0), f(1)
MINUS_INF, LOWEST = f(-np.inf), np.finfo(np.float32).min

# %% [markdown]
# ## 1 · The matrix in the way
#
# Attention, once more, for one head: each of T queries is compared with each of S keys, the scores of a
# query go through a softmax, and the result is the mean of the values, weighted with it.
#
# $$ o_i = \sum_j \frac{e^{x_{ij}}}{\sum_{j'} e^{x_{ij'}}} \, v_j \qquad x_{ij} = \text{scale} \cdot q_i \cdot k_j $$
#
# In lesson 18 these were three kernels: one writes the **matrix** of all scores, T × S numbers, the
# second makes weights of it, and the third multiplies them with the values. What goes in and
# what comes out has only T × D numbers, and D is 64 or 128. **Predict:** with D = 64, how large is the
# matrix beside q, at T = 1,000? And at T = 64,000?

# %%
T = np.array([256, 1024, 4096, 16384, 65536])
plot.curves(T, {"q, k, v and o together": 4 * 4 * T * 64 / 1e6, "the matrix of scores": 4 * T * T / 1e6},
            xlabel="T, queries and keys", ylabel="MB for one head (float32)", log=True,
            title="What grows with T, and what with its square")

# %% [markdown]
# At 64 thousand tokens the matrix of *one head* has 17 GB, and q, k, v and o have 67 MB. A model has
# dozens of heads in each layer, and the memory of an H200 (141 GB) is full with eight of
# them. The three kernels don't only need room for it, they also carry it back and forth: the
# first writes it, the second reads and writes, the third reads.
#
# So far, whenever a big array stood between two kernels, we **fused** them (lesson 5), and the array
# was gone. Here this seems impossible. The softmax of a row needs *all* scores of the row before it can
# give the first weight. A row of 64 thousand scores is 256 KB, and doesn't fit into the
# registers or the shared memory of a block.
#
# Lesson 3 ended with the remark that online softmax is good for rows that never exist all at once. This
# is that place. Assume for a moment that it can be done: a block holds **ROWS** queries, and all keys and
# values of the head pass by, a tile at a time. What would it move?
#
# ### Exercise: bytes, with the matrix and without
#
# B sequences, H heads, T queries and as many keys, D numbers in a row, float32. Count
#
# - the bytes that the **three kernels** move, if each of them reads each of its arrays once and writes
#   its result once. (You know this one from lesson 18. The softmax reads the matrix and writes
#   another one of the same size.)
# - the bytes that the **tiled** kernel moves: a block has ROWS queries of a head (the last one may have
#   fewer), reads them once and writes their results once; it reads *all* keys and values of its head.
# - the FLOPs for each byte of the tiled kernel. Count both products, a multiplication and an
#   addition being 2 FLOPs; leave the softmax out.

# %% exercise="predict_flash"
def predict_flash(B, H, T, D, ROWS):
    heads, array, matrix = B * H, 4 * T * D, 4 * T * T  # bytes of q, k, v or o; of the scores
    three_kernels = TODO
    tiled = TODO  # each block reads k and v: how many blocks has a head?
    flops = TODO
    return three_kernels, tiled, flops / tiled


check("predict_flash", predict_flash)

# %%
hint("predict_flash")

# %% [markdown]
# **Predict** before you run the next cell: from how many queries per block on does the tiled kernel
# move less than the three kernels? Take T = 4096 and D = 64.

# %%
predict = use("predict_flash", predict_flash)
flops = 4 * 4096 * 4096 * 64
for rows in (1, 8, 32, 64, 128):
    three, tiled, intensity = predict(1, 1, 4096, 64, rows)
    print(f"{rows:4} queries: tiled {tiled / 1e6:7.0f} MB, {intensity:5.1f} FLOPs per byte; "
          f"three kernels {three / 1e6:.0f} MB, {flops / three:.1f}")

# %% [markdown]
# From 32 on, half of D. With fewer queries, keys and values are fetched so often
# that even the matrix would be cheaper. So the size of the tile decides, as it did for
# convolution (lesson 8).
#
# But the two numbers aren't equally sure. The three kernels *must* move the matrix: it is
# larger than any cache. What the tiled kernel fetches again and again are the keys and values of a head,
# 2 MB here, and these stay in the L2 cache (50 MB on an H200). What must come from memory
# is then each array once. In the roofline of lesson 4, where each of them could be at best:

# %%
matrix, tiles = flops / predict(1, 1, 4096, 64, 64)[0], predict(1, 1, 4096, 64, 64)[2]
once = flops / (4 * 4 * 4096 * 64)
points = [{"label": text, "kind": "ours", "intensity": each, "tflops": min(67, 4.2 * each)} for text, each in
          [("three kernels", matrix), ("64 queries a block", tiles), ("the same, k and v in L2", once)]]
plot.roofline(points, 4200, 67, title="T = 4096, D = 64, float32 on an H200: a prediction, nothing is measured")

# %% [markdown]
# In float32 the three kernels are *just* at the edge: the two roofs meet at 16 FLOPs per byte. With
# tensor cores, which multiply many times as fast, the edge moves far to the right, and the
# matrix would be the limit by far. That is why nobody writes it any more. And there is the memory: with
# the matrix, 64 thousand tokens don't even fit.

# %% [markdown]
# ## 2 · Maximum, sum and output, all at once
#
# The kernel sees the keys in pieces. After some of them it should know everything that it needs, in a
# few numbers. Lesson 3 had two: the largest score so far, $m$, and the sum of the exponentials seen from
# it, $s = \sum_j e^{x_j - m}$. (Papers call it $\ell$; our kernels say `total`.) Attention needs one
# more: the weighted sum of the values, **not yet divided**,
#
# $$ o = \sum_j e^{x_j - m} \, v_j . $$
#
# Take the row of lesson 3: the scores 1 and 3 come first, then 2 and 5. The values are single numbers,
# 10, 20, 30, 40. After the first two:
#
# $$ m = 3 \qquad s = e^{1-3} + e^{3-3} = 1.135 \qquad o = e^{1-3} \cdot 10 + e^{3-3} \cdot 20 = 21.353 $$
#
# Now 2 and 5 arrive. The new maximum is $m' = 5$. Each old term was seen from 3 and has to be seen from
# 5: $e^{x-5} = e^{x-3} \cdot e^{3-5}$. The factor $e^{m - m'} = e^{-2} = 0.135$ is the same for all old
# terms, those of $s$ *and those of* $o$, for they have the same weights. **Predict** $s'$ and $o'$ with
# pencil and paper:
#
# $$ s' = s \cdot e^{m-m'} + e^{2-5} + e^{5-5} \qquad o' = o \cdot e^{m-m'} + e^{2-5} \cdot 30 + e^{5-5} \cdot 40 $$

# %%
def add_keys(m, s, o, scores, values):
    """One more piece of the keys: what m, s and o become."""
    new = max(m, scores.max())
    factor, weights = np.exp(m - new), np.exp(scores - new)
    return new, s * factor + weights.sum(), o * factor + weights @ values


scores, values = np.array([1.0, 3, 2, 5]), np.array([10.0, 20, 30, 40])
state = -np.inf, 0.0, 0.0  # nothing was seen yet
for piece in (slice(0, 2), slice(2, 4)):
    state = add_keys(*state, scores[piece], values[piece])
    print("m = {:.0f}, s = {:.3f}, o = {:.3f}, so far o / s = {:.3f}".format(*state, state[2] / state[1]))
weights = np.exp(scores) / np.exp(scores).sum()
print(f"all at once: {weights @ values:.3f}")

# %% [markdown]
# Forgetting the factor in one of the two is the commonest mistake in this kernel, and it doesn't show
# when the largest score happens to come first. **Predict** from which key on each of these goes wrong:

# %%
def run_through(scores, values, *, sum_too=True, output_too=True):
    m, s, o, found = -np.inf, 0.0, 0.0, []
    for x, v in zip(scores, values):
        new = max(m, x)
        factor, weight, m = np.exp(m - new), np.exp(x - new), new
        s = (s * factor if sum_too else s) + weight
        o = (o * factor if output_too else o) + weight * v
        found.append(o / s)
    return found

# %%
row, its_values = [3, 1, 2, 5, 4, 6, 2, 1], np.array([20.0, 10, 30, 40, 35, 15, 25, 10])
means = {"both rescaled": run_through(row, its_values),
         "only the sum": run_through(row, its_values, output_too=False),
         "only the output": run_through(row, its_values, sum_too=False)}
plot.curves(np.arange(1, 9), means, xlabel="keys seen (scores 3, 1, 2, 5, 4, 6, 2, 1)",
            ylabel="o / s", title="The mean so far, with a factor forgotten")

# %% [markdown]
# All three agree as long as 3 is the largest. The 5, the fourth key, is a new maximum, and there they part.
#
# **Why divide only at the end?** One could keep the mean, $o / s$, and it would be right at any moment. But
# each new piece would have to undo the old division and make a new one, D of them for each tile. And a
# sum has a lovely property that a mean lacks: two sums with the same maximum can simply be added. Which
# leads to the second half of lesson 3's idea.
#
# **Merging two parts.** Somebody else has seen other keys, and has his own $(m_2, s_2, o_2)$. Bring both to the larger
# maximum, then add: $m = \max(m_1, m_2)$ and
#
# $$ s = s_1 e^{m_1 - m} + s_2 e^{m_2 - m} \qquad o = o_1 e^{m_1 - m} + o_2 e^{m_2 - m} . $$
#
# It is the merge of lesson 3, with a third line like the second. So it is associative, too: keys may be
# seen in any order, and in any pieces.
#
# What remains of a query in the end are its result $o / s$, and one number more that the kernel writes
# beside it, the **log-sum-exp** of the scores (lesson 5):
#
# $$ \text{lse} = \log \sum_j e^{x_j} = m + \log s . $$
#
# With it, each weight can be made again from its score, $e^{x_j - \text{lse}}$. Section 6 needs that, and
# so does the way back, lesson 20.

# %% [markdown]
# ## 3 · A key at a time
#
# First the shortest kernel that does this. A warp has a query. Its 32 lanes share the D numbers of a row,
# D up to 128: lane 5 has numbers 5, 37, 69 and 101, of q, of k, of v, and of the output, which it keeps in
# `acc`. That is an array of its own, a **local array**: `cuda.local.array` takes a constant size, like
# shared memory, but each thread has one for itself; the compiler puts short ones into registers.
#
# For each key: the lanes multiply their parts, a butterfly adds up, and now all of them know the score.
# Then each rescales, and adds its columns of the value.
#
# **Predict:** which memory does this kernel need beside its arguments, if there are 64 thousand keys?
#
# ### Exercise: attention, streaming
#
# q, k, v and o have three axes from here on: N heads (all heads of all sequences, one behind another in
# memory), then T or S, then D. T and S may differ. `lse` is (N, T). And S may be 0: a query without any
# key has o = 0 and lse = −∞. (`math.log` of 0 is −∞ in a kernel, so the last line needs no case of its own.)

# %% exercise="attention_streaming"
LANE_SLOTS = 4  # numbers of a row that a lane has, at most


@cuda.jit
def attention_streaming(q, k, v, scale, o, lse):
    acc = cuda.local.array(LANE_SLOTS, np.float32)
    N, T, D = q.shape
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < N * T:
        n, i = row // T, row % T
        m, total = MINUS_INF, ZERO
        for d in range(lane, D, 32):
            acc[d // 32] = ZERO
        for j in range(k.shape[1]):
            score = ZERO
            for d in range(lane, D, 32):
                score += q[n, i, d] * k[n, j, d]
            TODO  # 1. all lanes need the whole product
            TODO  # 2. the new maximum, the factor, the weight of this key; m, total and acc
        for d in range(lane, D, 32):
            o[n, i, d] = TODO  # 3. what if there was no key?
        if lane == 0:
            lse[n, i] = m + math.log(total)


check("attention_streaming", attention_streaming)

# %%
hint("attention_streaming")

# %% [markdown]
# Yours and PyTorch's, on two heads with 24 queries and 32 keys of 32 numbers. These arrays stay with us for
# the rest of the lesson.

# %%
rng, scale = np.random.default_rng(0), f(1 / math.sqrt(32))
q, k, v = (rng.normal(size=(2, n, 32)).astype(f) for n in (24, 32, 32))


def run(kernel, grid, block, *inputs):
    o, lse = np.zeros_like(inputs[0]), np.zeros(inputs[0].shape[:2], dtype=f)
    with simulator.trace() as trace:
        kernel[grid, block](*inputs, scale, o, lse)
    return o, lse, trace


# %%
streaming = use("attention_streaming", attention_streaming)
o, lse, streaming_trace = run(streaming, 12, 128, q, k, v)
theirs = torch.nn.functional.scaled_dot_product_attention(*map(torch.tensor, (q, k, v)))
print(f"largest difference from PyTorch {abs(o - theirs.numpy()).max():.0e}")
expected, expected_lse = (each[:, 0] for each in reference.attention(q[:, None], k[:, None], v[:, None]))
print(f"largest error of o {abs(o - expected).max():.0e}, of lse {abs(lse - expected_lse).max():.0e}")

# %% [markdown]
# Where does it read?

# %%
reads = next(site for site in streaming_trace.sites if site.array == "k")
plot.access_map(streaming_trace, reads, steps=5, title="Each key is one row, and a warp reads it whole")

# %% [markdown]
# Perfectly in order: 4 sectors per request, key after key. Nothing grows with the number of keys: the
# kernel keeps 4 numbers for each lane, m and the sum. (The check has looked at that, too, with 72 keys and
# with 144.) But *how often* does it read? Each warp reads all keys and values of its head, for a single
# query. In `predict_flash` that is ROWS = 1, half a FLOP per byte. And one thing is worse than it
# looks: between two keys stand five shuffles, each waiting for the one before, and two exponentials, of
# which every lane computes the same.
#
# Both have the same cure: more than one query for each key that was fetched, and more than one key for
# each maximum.

# %% [markdown]
# A good place for a break. Next come tiles.

# %% [markdown]
# ## 4 · Tiles: FlashAttention
#
# A block has 8 queries, and takes 8 keys in each step. That makes a little matrix of 8 × 8 scores, one for
# each of its 64 threads. It lives for one step, in shared memory.
#
# | | shape | lives in |
# |---|---|---|
# | `qs` | 8 queries × D | shared memory, fetched once |
# | `ks`, `vs` | 8 keys × D, 8 values × D | shared memory, fetched in each step |
# | `weights` | 8 queries × 8 keys | shared memory, made in each step |
# | `m`, `total` | one of each for each query | registers; all 8 threads of a row have the same |
# | `acc` | 8 queries × D | registers: thread (row, col) has columns col, col + 8, col + 16, … |
#
# A step goes like this:
#
# 1. All fetch the tiles of k and v. **Barrier.**
# 2. Thread (row, col) multiplies row `row` of `qs` with row `col` of `ks`: its score.
# 3. The 8 threads of a row find the largest of their scores, by a butterfly of three rounds. With it, and
#    the old m: the new m, the factor, and the weight of *its* score. A second butterfly adds the weights up.
# 4. Each thread puts its weight into `weights`. **Barrier.** Now each can read all 8 weights of its row, and
#    adds the values to its columns, after rescaling them.
# 5. **Barrier**, before anybody overwrites `ks` and `vs`.
#
# This is **FlashAttention** (Tri Dao and others, 2022, arXiv 2205.14135), in its shortest form. Three helpers
# are given, as device functions.

# %%
TILE, PADDED, SLOTS = 8, 65, 8  # D is 64 at most, so a thread has 8 columns of the output at most


@cuda.jit(device=True)
def fetch_tile(tile, x, n, first):
    """Rows first … first + 7 of x[n] go to shared memory, by 64 threads; 0 past the last row."""
    row, col = cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    for d in range(col, x.shape[2], TILE):
        tile[row, d] = x[n, first + row, d] if first + row < x.shape[1] else ZERO


@cuda.jit(device=True)
def row_max(value):
    """The largest `value` of the 8 threads that have a row of the tile, in each of them."""
    for step in range(3):
        value = max(value, cuda.shfl_xor_sync(ALL, value, 1 << step))
    return value


@cuda.jit(device=True)
def row_sum(value):
    """The sum of `value` over the 8 threads that have a row of the tile, in each of them."""
    for step in range(3):
        value += cuda.shfl_xor_sync(ALL, value, 1 << step)
    return value

# %% [markdown]
# Two things can go wrong at the edge. In the last tile there may be fewer than 8 keys, and `fetch_tile` fills
# up with zeros. **Predict:** what is the score of a key of zeros, and what weight does it get? And the last
# block may have fewer than 8 queries. Those threads must not read or write outside; may they return at once?
#
# (A score of 0 gets a weight of $e^{0-m}$, like any other. It isn't "no key": it is a key with the value 0, which
# draws the mean towards 0. A missing key has the score −∞. cuDNN once had this fault in its backward pass:
# PyTorch issue 196678. And no, they may not return: the others wait for them at the barrier, and they fetch parts of the
# tiles.)
#
# The running maximum starts at `LOWEST` here, the lowest finite number, and not at −∞. You will see why in the next
# section.
#
# ### Exercise: FlashAttention
#
# `blockIdx.x` says which tile of queries, `blockIdx.y` which head. The first two parts are there.

# %% exercise="flash_attention"
@cuda.jit
def flash_attention(q, k, v, scale, o, lse):
    qs = cuda.shared.array((TILE, PADDED), np.float32)
    ks = cuda.shared.array((TILE, PADDED), np.float32)
    vs = cuda.shared.array((TILE, PADDED), np.float32)
    weights = cuda.shared.array((TILE, TILE), np.float32)
    acc = cuda.local.array(SLOTS, np.float32)
    n, row, col = cuda.blockIdx.y, cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    (_, T, D), S, i = q.shape, k.shape[1], TILE * cuda.blockIdx.x + row
    m, total = LOWEST, ZERO
    for d in range(col, D, TILE):
        qs[row, d], acc[d // TILE] = q[n, i, d] if i < T else ZERO, ZERO
    for first in range(0, S, TILE):
        fetch_tile(ks, k, n, first)
        fetch_tile(vs, v, n, first)
        cuda.syncthreads()
        score = ZERO
        for d in range(D):
            score += qs[row, d] * ks[col, d]
        score = TODO  # 1. the scale; and what if key first + col does not exist?
        TODO  # 2. the new maximum, the factor, the weight; m, total and weights[row, col]
        TODO  # 3. the columns of the output; and where do the barriers belong?
    if i < T:
        for d in range(col, D, TILE):
            o[n, i, d] = acc[d // TILE] / total if total > ZERO else ZERO
        if col == 0:
            lse[n, i] = m + math.log(total)


check("flash_attention", flash_attention)

# %%
hint("flash_attention")

# %%
flash = use("flash_attention", flash_attention)
o, lse, flash_trace = run(flash, (3, 2), 64, q, k, v)
print(f"largest error of o {abs(o - expected).max():.0e}, of lse {abs(lse - expected_lse).max():.0e}")

# %% [markdown]
# If you take the last barrier out and check once more, the sanitizer tells you of a race: two warps share the tile,
# and nothing keeps the one that is done from fetching the next keys while the other still multiplies with these. In
# the simulator it may even give the right result, and on a GPU for years.
#
# What the first warp of the first block fetches for the first tile of keys (it has half of the tile):

# %%
reads = next(site for site in flash_trace.sites if site.array == "x")
plot.access_map(flash_trace, reads, steps=4, title="A warp fetches 8 numbers of 4 keys in each request")

# %% [markdown]
# 8 numbers of a row are a sector, and 4 rows are 4 sectors: every byte that is sent is wanted. And now the bytes that
# are asked for, in sizes of q. Beside your two kernels stands what three kernels with tiles of 8 × 8 ask for, as
# in lesson 18, counted on paper. **Predict** the three totals.

# %%
def asked_for(trace, **names):
    """What a kernel asks memory for, in sizes of q: (array, "load" or "store", amount)."""
    amounts = {}
    for site in trace.sites:
        if site.space == "global":
            name = names.get(site.array, site.array), site.op
            amounts[name] = amounts.get(name, 0) + site.bytes / q.nbytes
    return [(*name, amount) for name, amount in amounts.items() if amount > 0.05]

# %%
matrix, again, keys = 2 * 24 * 32 * 4 / q.nbytes, 24 / 8, k.nbytes / q.nbytes  # again: tiles of queries
separate = [("q", "load", 32 / 8), ("k and v", "load", 2 * again * keys), ("matrix", "load", (2 + 32 / 8) * matrix),
            ("matrix", "store", 2 * matrix), ("o", "store", 1)]
both = {"k": "k and v", "v": "k and v", "x": "k and v"}
asked = {"three kernels": separate, "streaming": asked_for(streaming_trace, **both),
         "tiled": asked_for(flash_trace, **both)}
plot.asked(asked, unit="sizes of q", title="Asked for: 24 queries, 32 keys, 32 numbers in a row")

# %% [markdown]
# The streaming kernel has no matrix and asks for the most of all: no tile, no reuse. (q is its worst: each warp reads its
# query again with each key. The cache answers, but a request is a request.) The tiled kernel asks for the least, and has no matrix
# either.
#
# And this is a small example, which any cache holds. At T = 4096 and D = 64 the matrix is 64 times as large as q. Here is what the *memory* would
# have to move then, if the three kernels had perfect caches, against a tiled kernel with 64 queries in a block: once without any cache, and once with k and v
# in L2. (From the formulas, not measured.)

# %%
chains = {"three kernels": [("scores", 2, 64), ("softmax", 64, 64), ("output", 64 + 1, 1)],
          "64 queries a block": [("no cache", 1 + 2 * 4096 / 64, 1)], "the same, k and v in L2": [("L2", 3, 1)]}
plot.arrays_moved(chains, title="In sizes of q, at T = 4096 and D = 64: what the matrix costs")

# %% [markdown]
# ### The padded column
#
# `ks` has 65 columns for at most 64 numbers. Step 2 reads `ks[col, d]`: 8 lanes read the same column of 8 rows. With 64 numbers
# from row to row, all 8 are in the same bank. Here is this one access, alone, once with 64 and once with 65:

# %%
@cuda.jit
def read_rows(found):
    narrow = cuda.shared.array((TILE, 64), np.float32)
    padded = cuda.shared.array((TILE, PADDED), np.float32)
    row, col = cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    for d in range(col, 64, TILE):
        narrow[row, d], padded[row, d] = ONE, ONE
    cuda.syncthreads()
    found[cuda.threadIdx.x] = narrow[col, 5] + padded[col, 5]


with simulator.trace() as rows_trace:
    read_rows[1, 64](np.zeros(64, dtype=f))
narrow, padded = (site for site in rows_trace.sites if site.space == "shared" and site.op == "load")
plot.bank_map(rows_trace, narrow, title="Rows of 64: one bank for all")

# %%
plot.bank_map(rows_trace, padded, title="Rows of 65: eight banks")

# %% [markdown]
# Eight turns become one. (All four rows of the tile that a warp has want the same 8 words, so 8 words it is.) And in your
# own kernel:

# %%
print(f"{'access':22}{'requests':>9}{'turns':>7}{'conflicts':>11}")
for site in flash_trace.sites:
    if site.space == "shared":
        print(f"{site.source:22}{site.requests:9,}{site.bank_ways:7.0f}{site.bank_conflicts:11,}")

# %% [markdown]
# The loads, which are most, have none left. What remains are the *stores* of the tiles: a warp stores four rows of 8
# numbers, and with 65 from row to row these overlap in the banks. They are a few of many. There is a width with which
# neither takes more than two turns; can you find it?
#
# <details><summary>Answer</summary>
#
# 68, for example. Eight rows begin 4 banks apart then, so that loads have no conflict, and no bank gets more than two numbers of a store.
# </details>

# %% [markdown]
# ## 5 · Causal: tiles that are never fetched
#
# A model that writes text must not look ahead (lesson 18): query i sees the keys up to its own place. If there are more keys than
# queries (a conversation goes on, and the keys of what was said before are still there), the *last*
# query sees all of them, so the rule counts from the end:
#
# $$ \text{query } i \text{ sees key } j \quad\text{if}\quad j \le i + S - T . $$
#
# This is called the **lower-right alignment**. Here are the tiles of 8 × 8 for two cases. **Predict** what part of them needs any work,
# and in which of them a mask is needed. And what about the first queries on the right?

# %%
def tiles_of(T, S):
    visible = reference.attention_visible(T, S, causal=True, lower_right=True)
    found = np.full((T // 8, S // 8), "none")
    for a, b in np.ndindex(found.shape):
        seen = visible[8 * a : 8 * a + 8, 8 * b : 8 * b + 8].sum()
        found[a, b] = "all" if seen == 64 else "none" if seen == 0 else "part"
    return found


kinds = [tiles_of(40, 40), tiles_of(40, 24)]
plot.grids(kinds, ["40 queries, 40 keys", "40 queries, 24 keys"],
           shade=[(each == "all") + 0.4 * (each == "part") for each in kinds], xlabel="tile of keys", ylabel="tile of queries",
           title="Which keys of a tile are seen: all, a part, or none")

# %% [markdown]
# Of n × n tiles, n on the diagonal are seen in part, and all above it not at all: (n + 1) / 2n of the work is left, a bit
# more than half. A tile that nobody sees must not be masked: it must not be *fetched*. So the loop ends earlier, and for each
# tile of queries elsewhere. Only in the tiles on the diagonal each score has to be asked whether it counts.
#
# And on the right, with more queries than keys, the first 16 queries see **nothing**. Some of them
# have a tile to themselves, where the loop has no round at all. In other sizes they share a tile with queries that see
# something; there, all scores of such a row are −∞. **Predict** what the kernel makes of it:

# %%
with np.errstate(all="ignore"):
    for start in (-np.inf, LOWEST):
        new = np.maximum(f(start), f(-np.inf))
        print(f"m starts at {start:.3g}: factor {np.exp(f(start) - new):.0f}, weight {np.exp(f(-np.inf) - new):.0f}")

# %% [markdown]
# −∞ − (−∞) again, the old acquaintance of lesson 3. If m starts at the lowest *finite* number, then the factor is 1 and the weights are 0:
# nothing was added to nothing. The sum stays 0, o gets the 0 of the guard, and the lse is `LOWEST` + log 0, which is
# −∞. That is what we want. (PyTorch has given `nan` here. The way back needs a 0, since a `nan`, even with a weight of 0, spoils
# every sum that it enters.)
#
# ### Exercise: causal FlashAttention
#
# It is your kernel with two lines changed: the end of the loop, and the mask. All threads of a block must make the same number of rounds,
# because of the barriers.

# %% exercise="flash_attention_causal"
@cuda.jit
def flash_attention_causal(q, k, v, scale, o, lse):
    qs = cuda.shared.array((TILE, PADDED), np.float32)
    ks = cuda.shared.array((TILE, PADDED), np.float32)
    vs = cuda.shared.array((TILE, PADDED), np.float32)
    weights = cuda.shared.array((TILE, TILE), np.float32)
    acc = cuda.local.array(SLOTS, np.float32)
    n, row, col = cuda.blockIdx.y, cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    (_, T, D), S, i = q.shape, k.shape[1], TILE * cuda.blockIdx.x + row
    m, total = LOWEST, ZERO
    for d in range(col, D, TILE):
        qs[row, d], acc[d // TILE] = q[n, i, d] if i < T else ZERO, ZERO
    for first in range(0, TODO, TILE):  # 1. where do the keys end that this tile may look at?
        fetch_tile(ks, k, n, first)
        fetch_tile(vs, v, n, first)
        cuda.syncthreads()
        score = ZERO
        for d in range(D):
            score += qs[row, d] * ks[col, d]
        score = TODO  # 2. the scale, and the mask
        TODO  # 3. the rest of the step, as in flash_attention
    if i < T:
        for d in range(col, D, TILE):
            o[n, i, d] = acc[d // TILE] / total if total > ZERO else ZERO
        if col == 0:
            lse[n, i] = m + math.log(total)


check("flash_attention_causal", flash_attention_causal)

# %%
hint("flash_attention_causal")

# %% [markdown]
# With 64 queries and 64 keys: **predict** the share of the keys that the causal kernel fetches.

# %%
causal, x = use("flash_attention_causal", flash_attention_causal), rng.normal(size=(3, 1, 64, 8)).astype(f)
fetched = {}
for name, kernel in (("all keys", flash), ("causal", causal)):
    *_, trace = run(kernel, (8, 1), 64, *x)
    fetched[name] = [(array, op, amount * q.nbytes / x[0].nbytes) for array, op, amount in asked_for(trace, **both)]
plot.asked(fetched, unit="sizes of q", title="8 tiles of queries: 36 tiles of keys instead of 64")

# %%
few, _, _ = run(causal, (2, 1), 64, x[0][:, :10], x[1][:, :4], x[2][:, :4])
print("10 queries, 4 keys; the first numbers of each o:", few[0, :, 0].round(2))

# %% [markdown]
# Six zeros, for the six queries that see nothing, then numbers.
#
# The blocks have different amounts of work now. The last one has 8 rounds and the first one 1. If the long ones start last, the GPU
# waits for them at the end, almost empty. Starting with the *longest* has brought 9 to 13 percent in fast kernels, for
# a change of one line: count the blocks from behind.

# %% [markdown]
# Another good place for a break. One idea is left.

# %% [markdown]
# ## 6 · One query, and merging
#
# When a model answers, it writes one word at a time. Then T is 1: one new query, and S keys, perhaps 64 thousand, of everything
# that was said before. **Predict:** how many blocks does your kernel launch for 32 heads? An H200 has 132
# multiprocessors. What do they do?
#
# 32 blocks: 100 multiprocessors have nothing to do, and each of the others walks through 64 thousand keys alone. The queries are
# too few to share. So one shares the **keys**: a block takes a part of them, as if there were no others, and writes its o and its lse. A
# second small kernel merges the parts. This is **split-KV**, or *FlashDecoding*.
#
# The merge needs no m and no s. $s_1 e^{m_1}$ is the sum of all exponentials of part 1, and its logarithm is the lse. So part 1's
# *share* of the whole is $w_1 = e^{\text{lse}_1} / (e^{\text{lse}_1} + e^{\text{lse}_2})$, and
#
# $$ o = w_1 o_1 + w_2 o_2 \qquad \text{lse} = \log\left(e^{\text{lse}_1} + e^{\text{lse}_2}\right) . $$
#
# Neither $e^{\text{lse}}$ may be computed as it stands: an lse of 100 overflows. You know what to subtract. And a part may have seen
# nothing (lse = −∞), or both.
#
# ### Exercise: the merge
#
# o1, o2 and o are (rows, D), lse1, lse2 and lse have a number for each row. A thread for each element of o.

# %% exercise="merge_attention"
@cuda.jit
def merge_attention(o1, lse1, o2, lse2, o, lse):
    D = o.shape[1]
    i = cuda.grid(1)
    if i < o.size:
        row, d = i // D, i % D
        largest = TODO  # what is subtracted from both; a finite number
        w1, w2 = TODO, TODO
        total = w1 + w2
        o[row, d] = TODO
        if d == 0:
            lse[row] = TODO


check("merge_attention", merge_attention)

# %%
hint("merge_attention")

# %% [markdown]
# The keys of our example in two parts, 20 and 12. Your kernel runs on each of them, then the parts are merged:

# %%
merge = use("merge_attention", merge_attention)
parts = []
for keys in (slice(0, 20), slice(20, 32)):
    o1, lse1, _ = run(flash, (3, 2), 64, q, *(np.ascontiguousarray(x[:, keys]) for x in (k, v)))
    parts += [o1.reshape(48, 32), lse1.reshape(48)]
merged, merged_lse = np.zeros((48, 32), dtype=f), np.zeros(48, dtype=f)
merge[12, 128](*parts, merged, merged_lse)
print(f"largest error of o {abs(merged.reshape(q.shape) - expected).max():.0e}, "
      f"of lse {abs(merged_lse.reshape(2, 24) - expected_lse).max():.0e}")
share = np.exp(parts[1] - merged_lse)
print(f"the first 20 keys have {share.min():.0%} to {share.max():.0%} of the weight")

# %% [markdown]
# The price are two small arrays more, o and lse of each part. For one query with 128 numbers and parts of a thousand keys that is nothing:
# each part has read a thousand times as much.
#
# The same merge puts together what lies on *different GPUs*: each has a part of a sequence that is too long for one, keys and
# values go round in a ring, and what comes in is merged (*ring attention*, arXiv 2310.01889).

# %% [markdown]
# ## 7 · What the fast kernels do
#
# Your kernel computes in float32, without tensor cores, with tiles of 8. What stands between it and the kernels that language models
# run on? All of it is published, most of it by the same people.
#
# - **Larger tiles.** FlashAttention-3 has 128 queries and 176 keys in a tile, for D = 128. By `predict_flash`, 128 queries are
#   64 FLOPs for each byte of float32, and twice that with 16 bits.
# - **Tensor cores.** Both products, $q k^T$ and weights times v, are products of matrices. On an A100 the instruction is `mma`, for a warp
#   (lesson 8); on an H100 it is `wgmma`, for four warps, with its factors in shared memory. There is a catch between the two products:
#   the first leaves its result in the registers of many threads, and the second needs it as a factor. FlashAttention-2
#   (arXiv 2307.08691) gives each warp queries of its own, instead of keys of its own, so that weights need not go from warp to warp.
# - **Copies that run ahead.** While one tile is multiplied, the next is on its way into a second pair of tiles (`cp.async` on an
#   A100, the copying unit TMA on an H100).
# - **Warps with different jobs.** In FlashAttention-3 (arXiv 2407.08608) one warp only orders copies, and two groups of four warps
#   multiply. Tensor cores don't compute exponentials, so the groups take turns: while one is busy with its softmax, the other
#   has the tensor cores.
#
# These are the figures of the FlashAttention-3 paper, for its own GPU, an H100. (Peaks of tensor cores are in 16 bits.)

# %%
PUBLISHED = {"FlashAttention-2 (mma, no wgmma)": 370, "Triton": 395, "cuDNN": 595, "FlashAttention-3": 648}
rows = [{"label": label, "kind": "peer", "tflops": value} for label, value in PUBLISHED.items()]
plot.arithmetic(rows, {"tensor cores, 16 bits": 989}, device="H100, as published in arXiv 2407.08608", date="2024",
                title="Forward, 16,384 tokens, 128 numbers in a row, 16 bits, not causal")

# %% [markdown]
# What the parts are worth, from the same paper: 661 TFLOP/s in a run with all of it, about 570 without special warps, 582 without the overlap of softmax and
# products. All of these kernels have your loop inside: fetch, multiply, maximum, rescale, add.
#
# Where would *yours* be? We can only predict. It has no tensor cores, so 67 TFLOP/s is a roof. In the inner loop it reads two numbers
# from shared memory for each product, which lesson 8 has shown to allow an eighth of that at most. Tiles in registers, as in lesson 8, would be the
# next step.

# %% [markdown]
# ## 8 · Measured
#
# The library has made these steps, one after another: `tiled` is your loop with larger tiles, in float32. `tensor_core` multiplies by `mma` or, on an H100 and
# H200, by `wgmma`, and keeps the weights in registers. `separate` is lesson 18's way. The example has 8 sequences of 2,048 tokens, 32 heads of 64 numbers, in
# bfloat16. **Predict** how far `tiled` gets on the float32 units, and what tensor cores are worth.

# %%
recorded, SHAPE = bench.load_records(), (8, 32, 2048, 64)
found, found_causal = (bench.find(recorded, name=name, shape=SHAPE, dtype="bfloat16")
                       for name in ("attention.forward", "attention.forward.causal"))
LABELS = {"separate": "separate", "tiled": "tiled", "tensor_core/mma": "tensor cores, mma",
          "tensor_core/warpgroup": "tensor cores, wgmma", "SDPA flash": "PyTorch, FlashAttention-2",
          "SDPA cuDNN": "PyTorch, cuDNN"}


def show(record, title, limits):
    rows = [row | {"label": LABELS[row["label"]]} for row in record["rows"] if row["label"] in LABELS]
    return plot.arithmetic(rows, limits, title=title, device=recorded["device"]["name"],
                           date=results_table.when(record))

# %%
if found:
    peaks = found[0]["peaks_tflops"]
    picture = show(found[0], "Forward, 2,048 tokens, 64 numbers in a row, bfloat16, not causal",
                   {"float32 units": peaks["fma"], "tensor cores, 16 bits": peaks["bfloat16"]})
    print("left out:", found[0]["left_out"])
picture if found else print("Attention has not been measured on a GPU yet.")

# %% [markdown]
# `streaming` was left out, since it takes so long. And `tiled`, without a matrix, is no faster than `separate`, with it. So bytes are not what either waits for in
# float32. What tiles have won is *memory*, and the way to tensor cores: with these, arithmetic is cheap enough that a matrix would be the limit. (`cuDNN` and FlashAttention-2
# are backends of PyTorch's `scaled_dot_product_attention`.)
#
# **Predict** from section 5 what part of the time the causal kernels need, with 32 tiles of 64 queries.

# %%
times = [{row["label"]: row["microseconds"] for row in each[0]["rows"]} for each in (found, found_causal) if each]
for label in LABELS if len(times) == 2 else ():
    print(f"{LABELS[label]:26} causal takes {times[1][label] / times[0][label]:.2f} of the time")
print(f"tiles that are seen        {(32 + 1) / 64:.2f} of all")

# %% [markdown]
# The longer a rung takes for a tile, the closer it gets to the count of tiles. `separate` and its matrix save nothing. The fast kernels have the tiles
# on the diagonal, which need a mask, and blocks with little and with much to do.
#
# And the memory beside q, k and v: the same number of tokens, in ever fewer and longer sequences. `math` is PyTorch's way with the matrix.

# %%
for shape in ((32, 32, 512, 64), SHAPE, (1, 32, 16384, 64)):
    for record in bench.find(recorded, name="attention.forward", shape=shape, dtype="bfloat16"):
        memory = {label: record["peak_bytes"].get(label) for label in ("ours", "SDPA flash", "SDPA math")}
        print(f"T = {shape[2]:6,}: ", ", ".join(
            f"{label} {n / 1e6:,.0f} MB" if n else f"{label} not tried" for label, n in memory.items()))

# %% [markdown]
# Linear: what grows with the tokens, and not with the square of a sequence. (o, and lse. The longest was not tried with a matrix, which would have 34 GB.)
#
# **On your machine** the same kernels run on the GPU, or in the simulator. `compare` gives each rung random numbers, and holds its result and PyTorch's
# to float64; the error is in units of what rounding makes plausible. (In a terminal: `python -m course_lib compare attention --variant tiled`. And `bench attention --names
# attention.forward --shapes 2x8x1024x64` measures a smaller size on your own GPU.)

# %%
for variant in ("streaming", "tiled"):
    result = compare("attention", variant=variant)
    print(result.title)
    print(f"    error {result.ours.scaled:.0e}, PyTorch's {result.peer.scaled:.0e}; right: {result.right}")

# %% [markdown]
# ## What the profiler says
#
# What it would show of your three kernels, counted by the tracer: requests and sectors of the large memory, and requests to shared memory,
# with their conflicts.

# %%
*_, causal_trace = run(causal, (3, 2), 64, q, k, v)
print(f"{'kernel':12}{'global loads':>14}{'sectors':>10}{'shared loads':>14}{'bank conflicts':>16}")
for label, trace in (("streaming", streaming_trace), ("tiled", flash_trace), ("causal", causal_trace)):
    loads = [site for site in trace.sites if site.op == "load"]
    memory, shared = ([site for site in loads if site.space == s] for s in ("global", "shared"))
    print(f"{label:12}{sum(s.requests for s in memory):14,}{sum(s.sectors for s in memory):10,}"
          f"{sum(s.requests for s in shared):14,}{sum(s.bank_conflicts for s in shared):16,}")

# %% [markdown]
# As with convolution, the trouble has moved from the column of sectors to that of the shared loads. (With 24 queries and 32 keys the causal kernel
# skips three tiles of twelve: the mask is aligned below.)
#
# ## Where the real libraries go further
#
# - The course's own library has your kernels as the rungs `streaming` and `tiled` of `course_lib.kernels.attention`, and the same walk on tensor cores
#   as `tensor_core`. They take everything that is named below but paged keys.
# - **Grouped heads.** Several query heads share the keys and values of one. A block then takes the queries of all of them, and k and v are fetched
#   once.
# - **Paged keys.** The keys of a conversation lie in pages all over memory, and a list says where: one more index in `fetch_tile`.
# - **Masks as functions.** PyTorch's FlexAttention compiles what you write for one score into a kernel such as yours, and skips
#   tiles that your mask hides.
# - **Dropout, a bias, a window, a soft cap** all act on a score while it is in a register. Nothing is written for any of them.
#
# ## Three questions
#
# <details><summary>1. A colleague rescales only when the maximum has grown by more than 8, and keeps the old one otherwise. Is the result
# still right?</summary>
#
# Yes. m need not be the maximum, it only has to be the <em>same</em> number in the sum and in the output, and close enough that nothing overflows: the weights
# may be up to e<sup>8</sup> then. It saves most of the multiplications by the factor. The lse is m + log s with whatever m was used.
# </details>
#
# <details><summary>2. In <code>flash_attention</code> somebody writes <code>if i >= T: return</code> before the loop. Which two things go wrong?</summary>
#
# The threads that leave don't come to the barriers, for which the others wait. And they were to fetch rows of keys and values: these are missing in the tile.
# </details>
#
# <details><summary>3. The keys are split into 16 parts, and 16 results are merged, two at a time, in whatever order the blocks finish. Is the result the same each
# time?</summary>
#
# On paper, yes, since the merge is associative and does not care who comes first. In float32 the last bits depend on the order. A kernel that promises the same bits each
# time merges in a fixed order.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# [Lesson 20](20_flash_attention_backward.ipynb) runs FlashAttention backwards. The gradients need the weights, and the matrix of weights was never written down. So it is not
# remembered but **computed again**, tile by tile, from q, k and the lse that you have stored.
