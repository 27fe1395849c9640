# %% [markdown]
# # 20 · FlashAttention, backwards
#
# **After this lesson** you can derive the five formulas of attention's gradient, say what it would cost to
# keep the matrix of weights and what it costs to compute it again, explain why one number a row stands for
# a whole row of it, write the kernel that makes dk and dv and the one that makes dq, both with tiles that
# are skipped, and say why a single kernel for all three would want atomics.
#
# **You need** [lesson 19](19_flash_attention.ipynb) (tiles of keys, the log-sum-exp, the lower-right
# alignment), [lesson 18](18_attention.ipynb) (the gradient of the softmax's rows) and
# [lesson 9](09_convolution_backward.ipynb) (gather instead of scatter).
#
# **Time:** 120 minutes; there is a good place to pause after section 3. All cells together run in less
# than a minute in the simulator. Speeds were recorded for the course on the GPU that is named beside them, or
# predicted from bytes and FLOPs, or published by others: the lesson says which. The words are collected in
# the [glossary](glossary.md).

# %%
import math

import numpy as np
import torch

from course_lib import bench, cuda, plot, reference, results_table, simulator
from course_lib.compare import compare
from course_lib.teach import TODO, check, hint, progress, solution, use

f, ALL = np.float32, 0xFFFFFFFF
ZERO = f(0)

# %% [markdown]
# ## 1 · What the chain rule asks for
#
# FlashAttention's forward pass has left two things: the result $o$, and one number for each query, the
# log-sum-exp. The matrix of weights was never written. Now a gradient arrives, $do$, as large as $o$: how much
# the loss reacts to each number of the result. Wanted are $dq$, $dk$ and $dv$.
#
# Forward, for query $i$ and key $j$:
#
# $$ x_{ij} = \text{scale} \cdot q_i \cdot k_j \qquad P_{ij} = e^{x_{ij} - \text{lse}_i} \qquad o_i = \sum_j P_{ij} \, v_j $$
#
# Backward we go from the right to the left. For each number, ask as in [lesson 9](09_convolution_backward.ipynb): *which results has it gone
# into, and with which factor?*
#
# **dv.** Value $j$ goes into the result of every query $i$, with the factor $P_{ij}$. So
#
# $$ dv_j = \sum_i P_{ij} \, do_i . $$
#
# **The weights.** $P_{ij}$ goes into each number of $o_i$, with the numbers of $v_j$ as factors. So $dP_{ij} = do_i \cdot v_j$,
# one dot product.
#
# **The scores.** A row of weights is the softmax of a row of scores, and its gradient is that of
# [lesson 4](04_softmax_at_the_limit.ipynb), which you have written for attention in lesson 18:
#
# $$ dS_{ij} = P_{ij} \, (dP_{ij} - \delta_i) \qquad \delta_i = \sum_{j'} P_{ij'} \, dP_{ij'} . $$
#
# **dq and dk.** A score is $\text{scale} \cdot q_i \cdot k_j$. Query $i$ goes into its scores with all keys, and key $j$ into its scores with
# all queries:
#
# $$ dq_i = \text{scale} \sum_j dS_{ij} \, k_j \qquad dk_j = \text{scale} \sum_i dS_{ij} \, q_i . $$
#
# As products of matrices: $dv = P^\mathsf{T} do$, $dP = do\,v^\mathsf{T}$, $dq = dS\,k$, $dk = dS^\mathsf{T} q$. **Predict:** which of these sums go along a row of the matrix, and
# which down a column?

# %%
def forward(q, k, v, scale):
    scores = scale * q @ k.T
    lse = np.log(np.exp(scores).sum(1))
    return np.exp(scores - lse[:, None]) @ v, lse

# %%
def backward(do, q, k, v, scale):
    o, lse = forward(q, k, v, scale)
    P = np.exp(scale * q @ k.T - lse[:, None])  # from q, k and lse: nothing else was kept
    dP = do @ v.T
    delta = (P * dP).sum(1)
    dS = P * (dP - delta[:, None])
    return scale * dS @ k, scale * dS.T @ q, P.T @ do

# %%
rng = np.random.default_rng(0)
small = [rng.normal(size=shape) for shape in ((3, 2), (5, 2), (5, 2))]  # 3 queries, 5 keys
do = rng.normal(size=(3, 2))
gradients = backward(do, *small, 0.7)

# %% [markdown]
# Never trust a derivation that you haven't checked. Move one number by a small step, both ways, and look
# at the loss, $\sum do \cdot o$ (a **finite difference**, lesson 1):

# %%
def slope(which, place, step=1e-5):
    losses = []
    for sign in (1, -1):
        moved = [x.copy() for x in small]
        moved[which][place] += sign * step
        losses.append((do * forward(*moved, 0.7)[0]).sum())
    return (losses[0] - losses[1]) / (2 * step)


for which, name in enumerate(("dq", "dk", "dv")):
    found = np.array([slope(which, place) for place in np.ndindex(small[which].shape)])
    print(f"{name}: largest difference from brute force {abs(found - gradients[which].ravel()).max():.0e}")

# %% [markdown]
# Along a row go $\delta$ and $dq$: they belong to a query. Down a column go $dk$ and $dv$: they belong to a key. That will decide
# how many kernels we need.
#
# ## 2 · Recompute instead of remember
#
# Everything above needs $P$. PyTorch, running the three operators of lesson 18, *remembers* it: the forward pass
# writes it, and it stays in memory until the backward pass reads it. That is T × S numbers for each head
# and each layer, all at the same time, because the backward pass of the first layer comes last.
#
# The other way: **recompute**. A weight is $e^{x_{ij} - \text{lse}_i}$. We have q, k and lse. So a tile of
# weights costs a product of two tiles and an exponential for each element. There is no maximum to look for, nothing to
# rescale, and no sum: lse knows all of that already. **Predict:** which is faster for the GPU, to write a
# number and read it back, or to compute a dot product of 64 numbers?
#
# What follows is a prediction from the figures of an H200's data sheet and the memory speed recorded in lesson 1, nothing was measured:

# %%
GBPS, D = 4200, 64
chips = {"float32, without tensor cores": (4, 67), "16 bits, with tensor cores": (2, 989)}
for name, (size, tflops) in chips.items():
    kept, again = 2 * size / GBPS * 1e3, 2 * D / tflops  # picoseconds of the whole GPU, for one weight
    print(f"{name}: written and read {kept:.2f} ps, computed again {again:.2f} ps")

# %% [markdown]
# In float32 it is a draw. With tensor cores, computing again is several times as fast as remembering. And that is only the
# time. The *room* is what decides:

# %%
T = np.array([1024, 4096, 16384, 65536])
plot.curves(T, {"q, k, v, o and do": 5 * 4 * T * D / 1e6, "lse and delta": 2 * 4 * T / 1e6, "the weights": 4 * T * T / 1e6},
            xlabel="T, queries and keys", ylabel="MB for one head (float32)", log=True,
            title="What must be kept for the way back")

# %% [markdown]
# You have met the idea in [lesson 16](16_any_device.ipynb) as gradient checkpointing: keep what enters, compute the rest again. There it cost
# time. Here it may even save some.
#
# ## 3 · One number for each row
#
# A tile of $P$ can be made again, and a tile of $dP = do\,v^\mathsf{T}$, too. But $\delta_i = \sum_j P_{ij} dP_{ij}$ goes along the *whole* row, over all S keys, and
# it is needed before the first $dS_{ij}$. Must all keys pass by twice? Put in what $dP$ is, and change the order of the
# two sums:
#
# $$ \delta_i = \sum_j P_{ij} \sum_d do_{id} \, v_{jd} = \sum_d do_{id} \sum_j P_{ij} \, v_{jd} = \sum_d do_{id} \, o_{id} . $$
#
# The inner sum is the result of the forward pass, which we have kept. **D products a row instead of S**, and no weight at
# all. (Papers call it $D_i$, or **delta**. If somebody hands you a gradient of lse as well, it is subtracted here, and nothing
# else changes.)

# %%
o, lse = forward(*small, 0.7)
P, dP = np.exp(0.7 * small[0] @ small[1].T - lse[:, None]), do @ small[2].T
print("along the row of weights:", (P * dP).sum(1).round(6))
print("do · o:                  ", (do * o).sum(1).round(6))

# %% [markdown]
# ### Exercise: delta
#
# do and o are (rows, D), delta has a number for each row. A warp takes a row.

# %% exercise="attention_delta"
@cuda.jit
def attention_delta(do, o, delta):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < o.shape[0]:
        TODO  # each lane its part of the products, then a butterfly
        if lane == 0:
            delta[row] = TODO


check("attention_delta", attention_delta)

# %%
hint("attention_delta")

# %% [markdown]
# The arrays of the rest of this lesson: two heads, 24 queries and 32 keys of 32 numbers, causal. The forward pass is
# the reference's; delta is yours.

# %%
q, k, v, do = (rng.normal(size=(2, n, 32)).astype(f) for n in (24, 32, 32, 24))
scale, mask = f(1 / math.sqrt(32)), {"causal": True, "lower_right": True}
four = [x[:, None] for x in (do, q, k, v)]  # the reference has an axis more
o, lse = (x[:, 0].astype(f) for x in reference.attention(*four[1:], scale=scale, **mask))
dq_true, dk_true, dv_true = (
    x[:, 0] for x in reference.attention_backward(*four, scale=scale, **mask)[:3])
delta = np.zeros_like(lse)
use("attention_delta", attention_delta)[12, 128](do.reshape(48, 32), o.reshape(48, 32), delta.reshape(48))
print(f"largest error of delta: {abs(delta - (do.astype(float) * o).sum(2)).max():.0e}")

# %% [markdown]
# A good place for a break. Now the tiles.

# %% [markdown]
# ## 4 · A tile of keys, and all queries pass by
#
# dk and dv of a key are sums over all queries. So a block takes a tile of 8 **keys** and keeps their sums
# in registers; the **queries** pass by, 8 at a time, with their do, lse and delta. It is the forward kernel turned
# round.
#
# | | shape | lives in |
# |---|---|---|
# | `ks`, `vs` | 8 keys × D, 8 values × D | shared memory, fetched once |
# | `qs`, `dos` | 8 queries × D, 8 rows of do × D | shared memory, fetched in each step |
# | `weights`, `dscores` | 8 keys × 8 queries | shared memory, made in each step |
# | `dkeys`, `dvalues` | 8 keys × D | registers: thread (row, col) has columns col, col + 8, … of key `row` |
#
# Look at the third line: a row of `weights` belongs to a *key*, a column to a query. The thread (row, col)
# computes the weight of key `top + row` and query `first + col`. So the matrix lies transposed, as $P^\mathsf{T}$ and $dS^\mathsf{T}$, and each thread finds what
# it adds up in its own row.
#
# **Causal.** Query i sees key j if $j \le i + S - T$. Turned round: key j is seen by the queries from $i = j + T - S$ on. The *earlier*
# queries are skipped now, so the loop has a first tile, and goes to the end. **Predict** which tiles of queries a block needs, and which block has the most
# work:

# %%
def needed(T, S):
    visible = reference.attention_visible(T, S, causal=True, lower_right=True)
    tiles = visible.reshape(T // 8, 8, S // 8, 8).sum((1, 3))
    return np.where(tiles == 64, "all", np.where(tiles == 0, "none", "part")).T, tiles.T / 64


shown = [needed(40, 40), needed(40, 24)]
plot.grids([words for words, _ in shown], ["40 queries, 40 keys", "40 queries, 24 keys"],
           shade=[part for _, part in shown], xlabel="tile of queries", ylabel="tile of keys (a block)",
           title="What passes by each block: a row of this table")

# %% [markdown]
# **Rows that see nothing.** On the right, the first 16 queries see no key. Their lse is −∞. **Predict** what $e^{x - \text{lse}}$ gives, and what a mask
# that comes *afterwards*, as a factor of 0, makes of it:

# %%
with np.errstate(all="ignore"):
    weight = np.exp(f(0.5) - f(-np.inf))
    print("exp(0.5 − (−∞)) =", weight, "   times 0:", weight * f(0))

# %% [markdown]
# So **no weight is computed where nothing is seen**: the question comes first, and then the exponential. Such a query gets a gradient of 0, and
# gives none. The same holds for what lies behind the last query: there, `lse[n, i]` is not even your memory.
#
# It isn't enough to set such a score to 0, either. A query whose scores all lie near −120 has an lse near −120, and $e^{0 - (-120)}$ is infinite. cuDNN
# had this fault in the padded half of its last tile (PyTorch issue 196678): q's gradient was `nan` for rows with an lse below −88.7, because
# $e^{88.7}$ is where float32 ends. Triton's tutorial had another one: its backward pass was causal whether one
# had asked for it or not.
#
# ### Exercise: dk and dv
#
# `fetch_tile` is lesson 19's, and `dot` is new. `blockIdx.x` says which tile of keys, `blockIdx.y` which head. `math.exp(x)` of a float32 is a float32.

# %%
TILE, PADDED, SLOTS = 8, 65, 8  # D is 64 at most


@cuda.jit(device=True)
def fetch_tile(tile, x, n, first):
    """Rows first … first + 7 of x[n] go to shared memory, by 64 threads; 0 past the last row."""
    row, col = cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    for d in range(col, x.shape[2], TILE):
        tile[row, d] = x[n, first + row, d] if first + row < x.shape[1] else ZERO


@cuda.jit(device=True)
def dot(a, i, b, j, D):
    """The dot product of row i of the tile a and row j of the tile b."""
    total = ZERO
    for d in range(D):
        total += a[i, d] * b[j, d]
    return total

# %% exercise="flash_attention_dkdv"
@cuda.jit
def flash_attention_dkdv(do, q, k, v, lse, delta, scale, dk, dv):
    ks = cuda.shared.array((TILE, PADDED), np.float32)
    vs = cuda.shared.array((TILE, PADDED), np.float32)
    qs = cuda.shared.array((TILE, PADDED), np.float32)
    dos = cuda.shared.array((TILE, PADDED), np.float32)
    weights = cuda.shared.array((TILE, TILE), np.float32)
    dscores = cuda.shared.array((TILE, TILE), np.float32)
    dkeys = cuda.local.array(SLOTS, np.float32)
    dvalues = cuda.local.array(SLOTS, np.float32)
    n, row, col = cuda.blockIdx.y, cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    (_, T, D), S, top = q.shape, k.shape[1], TILE * cuda.blockIdx.x
    j = top + row
    fetch_tile(ks, k, n, top)
    fetch_tile(vs, v, n, top)
    for d in range(col, D, TILE):
        dkeys[d // TILE] = dvalues[d // TILE] = ZERO
    for first in range(TODO, T, TILE):  # 1. the first tile of queries that sees any of these keys
        fetch_tile(qs, q, n, first)
        fetch_tile(dos, do, n, first)
        cuda.syncthreads()
        i, weight, dscore = first + col, ZERO, ZERO
        TODO  # 2. weight and dscore, where query i exists and sees key j
        weights[row, col], dscores[row, col] = weight, dscore
        TODO  # 3. this thread's columns of dvalues and dkeys; and where do the barriers belong?
    if j < S:
        for d in range(col, D, TILE):
            dk[n, j, d], dv[n, j, d] = TODO, dvalues[d // TILE]  # 4. the scale, once


check("flash_attention_dkdv", flash_attention_dkdv)

# %%
hint("flash_attention_dkdv")

# %%
dkdv = use("flash_attention_dkdv", flash_attention_dkdv)
dk, dv = np.zeros_like(k), np.zeros_like(v)
with simulator.trace() as dkdv_trace:
    dkdv[(4, 2), 64](do, q, k, v, lse, delta, scale, dk, dv)
print(f"largest error of dk {abs(dk - dk_true).max():.0e}, of dv {abs(dv - dv_true).max():.0e}")

# %% [markdown]
# What the first warp of the first block fetches, of the first tiles (it has half of each):

# %%
reads = next(site for site in dkdv_trace.sites if site.array == "x")
plot.access_map(dkdv_trace, reads, steps=4, title="A warp fetches 8 numbers of 4 rows in each request")

# %% [markdown]
# 8 numbers of a row are a sector, and every byte that is sent is wanted.

# %% [markdown]
# ## 5 · A tile of queries, and all keys pass by
#
# dq of a query is a sum over the *keys*. In the kernel that you have just written, the parts of this sum arise in different blocks: each block of keys has something
# to add to the dq of every query. So a second kernel walks the other way, as the forward pass did: a block has 8
# queries, and the keys pass by. It makes the weights once more, for the third time in all.
#
# **Predict** before you write it: which of the shared arrays is not needed here?
#
# ### Exercise: dq
#
# `blockIdx.x` says which tile of queries. Where the loop ends you know from lesson 19.

# %% exercise="flash_attention_dq"
@cuda.jit
def flash_attention_dq(do, q, k, v, lse, delta, scale, dq):
    qs = cuda.shared.array((TILE, PADDED), np.float32)
    dos = cuda.shared.array((TILE, PADDED), np.float32)
    ks = cuda.shared.array((TILE, PADDED), np.float32)
    vs = cuda.shared.array((TILE, PADDED), np.float32)
    dscores = cuda.shared.array((TILE, TILE), np.float32)
    dqueries = cuda.local.array(SLOTS, np.float32)
    n, row, col = cuda.blockIdx.y, cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    (_, T, D), S, top = q.shape, k.shape[1], TILE * cuda.blockIdx.x
    i = top + row
    fetch_tile(qs, q, n, top)
    fetch_tile(dos, do, n, top)
    for d in range(col, D, TILE):
        dqueries[d // TILE] = ZERO
    for first in range(0, TODO, TILE):  # 1. where do the keys end that this tile may look at?
        fetch_tile(ks, k, n, first)
        fetch_tile(vs, v, n, first)
        cuda.syncthreads()
        j, dscore = first + col, ZERO
        TODO  # 2. the dscore of query i and key j
        dscores[row, col] = dscore
        TODO  # 3. this thread's columns of dqueries, and the barriers
    if i < T:
        for d in range(col, D, TILE):
            dq[n, i, d] = TODO


check("flash_attention_dq", flash_attention_dq)

# %%
hint("flash_attention_dq")

# %% [markdown]
# (It was `weights`: a weight is needed by nobody but its own thread, for the dscore.) All three gradients, against float64 and against PyTorch:

# %%
dq_kernel = use("flash_attention_dq", flash_attention_dq)
dq = np.zeros_like(q)
with simulator.trace() as dq_trace:
    dq_kernel[(3, 2), 64](do, q, k, v, lse, delta, scale, dq)

# %%
tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
visible = torch.tensor(reference.attention_visible(24, 32, **mask))
result = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=visible)
result.backward(torch.tensor(do))
for name, mine, true, x in zip(("dq", "dk", "dv"), (dq, dk, dv), (dq_true, dk_true, dv_true), tensors):
    print(f"{name}: largest error {abs(mine - true).max():.0e}, "
          f"difference from PyTorch {abs(mine - x.grad.numpy()).max():.0e}")

# %% [markdown]
# What the two ask memory for, in sizes of q. **Predict** how often a block's keys are fetched, and how often the queries. (There are 4 tiles of keys and 3 of
# queries, and not every block needs all of the others'.)

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
asked = {"dk and dv": asked_for(dkdv_trace, x="q, k, v, do"), "dq": asked_for(dq_trace, x="q, k, v, do")}
weights = [("weights", op, 2 * 24 * 32 * 4 / q.nbytes) for op in ("store", "load")]
plot.asked(asked | {"weights, if kept": weights}, title="Asked for: 24 queries, 32 keys, 32 numbers in a row",
           unit="sizes of q")

# %% [markdown]
# Most of it are the tiles. lse and delta have one number for each query, and still their bars are seen: each of the 8 threads that stand for a query asks for it, in each step. (The cache
# answers. They could be fetched with the tile, too.) In this small example the weights are only as large as q. At T = 4096 and D = 64 they would be 64 times as large, in each head.
#
# And queries that see nothing: 10 queries and 4 keys, so the first six of them.

# %%
few = [np.ascontiguousarray(x) for x in (do[:1, :10], q[:1, :10], k[:1, :4], v[:1, :4])]
few_o, few_lse = (x[:, 0].astype(f) for x in reference.attention(
    *(x[:, None] for x in few[1:]), scale=scale, **mask))
few_delta = (few[0] * few_o).sum(2)

# %%
few_dq, few_dk, few_dv = (np.zeros_like(x) for x in few[1:])
dq_kernel[(2, 1), 64](*few, few_lse, few_delta, scale, few_dq)
dkdv[(1, 1), 64](*few, few_lse, few_delta, scale, few_dk, few_dv)
print("lse:                 ", few_lse[0].round(2))
print("first numbers of dq: ", few_dq[0, :, 0].round(3))
print("all of dk and dv are finite:", bool(np.isfinite(few_dk).all() and np.isfinite(few_dv).all()))

# %% [markdown]
# Six zeros, for the six queries that see nothing. The seventh is 0 as well, but for rounding: it sees a single key, whose weight is 1 whatever the score is. So it
# does not matter what its q says.
#
# ## 6 · Two walks, or one with atomics
#
# Both kernels make the score and the dweight of each query and each key. Together with dv, dk and dq, these are 4 + 3 products. One walk
# would need 5 in all. Then dq's parts come from all the blocks, and somebody has to add them up in memory: by **atomics**.
#
# ### Exercise: what each costs
#
# B sequences, H heads, T queries and as many keys, D numbers in a row, float32, not causal. Count
#
# - the **bytes** that the weights would take if they were **kept**: written once, read once,
# - the FLOPs of **two walks**, and of **one walk**, a multiplication and an addition being 2. Count products only,
# - the **atomic** additions of single numbers to dq, if a block has ROWS keys (the last one may have fewer) and adds its part for each
#   number of dq once.

# %% exercise="predict_backward"
def predict_backward(B, H, T, D, ROWS):
    heads, product = B * H, 2 * T * T * D  # FLOPs of one product of one head
    kept = TODO
    two_walks = TODO
    one_walk = TODO
    atomics = TODO
    return kept, two_walks, one_walk, atomics


check("predict_backward", predict_backward)

# %%
hint("predict_backward")

# %%
predict = use("predict_backward", predict_backward)
for rows in (8, 32, 128):
    kept, two_walks, one_walk, atomics = predict(1, 1, 4096, 64, rows)
    print(f"{rows:4} keys in a block: {(two_walks - one_walk) / 1e9:.1f} GFLOP saved, "
          f"{atomics / 1e6:6.1f} million atomics, {4 * atomics / 1e6:6.0f} MB of them; "
          f"the weights would be {kept / 1e6:.0f} MB")

# %% [markdown]
# With large tiles the atomics are few beside the products that they save, and that is the way of FlashAttention-2 and 3. (These are counts. Which way is faster on a
# chip has to be measured.) But atomics have the other price, which you know from [lesson 2](02_reductions.ipynb): the order of the additions. Here is the one walk, in its
# shortest form: a thread for each query and key, which adds to dq. **Predict:** five runs with the threads in five orders, how many different results?

# %%
@cuda.jit
def dq_atomic(dscores, k, scale, dq):
    i, j, n = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y
    for d in range(k.shape[2]):
        cuda.atomic.add(dq, (n, i, d), dscores[n, i, j] * k[n, j, d] * scale)


# %%
dscores = reference.attention_backward(*four, scale=scale, **mask)[3][:, 0].astype(f)
found = {"atomics": [], "two walks": []}
for seed in range(5):
    with simulator.options(order="random", seed=seed):
        added, walked = np.zeros_like(q), np.zeros_like(q)
        dq_atomic[(32, 2), 24](dscores, k, scale, added)
        dq_kernel[(3, 2), 64](do, q, k, v, lse, delta, scale, walked)
    found["atomics"].append(added)
    found["two walks"].append(walked)

# %%
for name, results in found.items():
    print(f"{name}, {len(results)} runs: distinct results {len({x.tobytes() for x in results})}, "
          f"largest error {max(abs(x - dq_true).max() for x in results):.0e}")

# %% [markdown]
# All are right, and with atomics no two runs agree in all bits. Each sum of your two kernels has *one* owner, who adds in *one* order; so two runs agree bit for bit, on any
# chip. That is worth something when a training run has to be repeated. The library's own kernels walk twice for this reason. Others keep the single walk and let the blocks
# add in a fixed order, each waiting for its turn, or write their parts into a large array that one more kernel adds up.
#
# ## 7 · What the fast kernels do
#
# What stands between your two kernels and the fast ones is what stood there in lesson 19: larger tiles, tensor cores, copies that run ahead, warps with different jobs. The backward pass has
# one more trouble: there are five products, and dk and dv, two sums of a whole tile, stay in registers all the time. Published, from the FlashAttention-3 paper (its counts of FLOPs are those of five
# products, however many a kernel computes):

# %%
PUBLISHED = {"FlashAttention-2 (mma, no wgmma)": 322, "cuDNN": 516, "FlashAttention-3": 561}
rows = [{"label": label, "kind": "peer", "tflops": value} for label, value in PUBLISHED.items()]
plot.arithmetic(rows, {"tensor cores, 16 bits": 989}, device="H100, as published in arXiv 2407.08608", date="2024",
                title="Backward, 16,384 tokens, 128 numbers in a row, 16 bits, not causal")

# %% [markdown]
# Forward, the same paper has 370, 595 and 648. So the way back is a little less efficient everywhere, and it has five products where the way forward has two.
#
# ## 8 · Measured
#
# The library's rungs beside PyTorch's kernels: 8 sequences of 2,048 tokens, 32 heads of 64 numbers, in bfloat16. TFLOP/s count *five* products for everybody, and ours walks
# twice, which are seven. A way of the rung, `"tensor_core/atomic"`, walks once and adds dq up by atomics. **Predict** what the second walk costs beside it, and beside
# FlashAttention-2, which has atomics as well; and what FlashAttention-2 loses when PyTorch is told to be deterministic.

# %%
recorded, LABELS = bench.load_records(), {
    "tensor_core/mma": "two walks, mma", "tensor_core/warpgroup": "two walks, wgmma",
    "tensor_core/atomic": "one walk and atomics, wgmma", "SDPA flash": "FlashAttention-2",
    "SDPA flash, deterministic": "FlashAttention-2, deterministic", "SDPA cuDNN": "cuDNN"}


def rows_of(shape):
    """The record of a shape, and its rows that are compared here."""
    for record in bench.find(recorded, name="attention.backward", shape=shape, dtype="bfloat16"):
        return record, {row["label"]: row for row in record["rows"]}
    return None, {}


record, rows = rows_of((8, 32, 2048, 64))
chosen = [rows[label] | {"label": name} for label, name in LABELS.items() if label in rows]

# %%
if record:
    print("left out:", record["left_out"])
    picture = plot.arithmetic(
        chosen, {"tensor cores, 16 bits": record["peaks_tflops"]["bfloat16"]}, device=recorded["device"]["name"],
        date=results_table.when(record), title="Backward, 2,048 tokens, 64 numbers in a row, bfloat16, not causal")
picture if record else print("Attention's gradients have not been measured on a GPU yet.")

# %%
for shape in ((32, 32, 512, 64), (8, 32, 2048, 64), (1, 32, 16384, 64)):
    record, rows = rows_of(shape)
    if record:
        ours, times = rows["ours"], {label: row["microseconds"] for label, row in rows.items()}
        print(f"T = {shape[2]:6,}: ours {ours['tflops']:.0f} TFLOP/s, with all seven products {1.4 * ours['tflops']:.0f}; "
              f"beside FlashAttention-2 {times['SDPA flash'] / times['ours']:.2f} times as fast, "
              f"deterministic {times['SDPA flash, deterministic'] / times['ours']:.2f}")
        if "tensor_core/atomic" in times:
            print(f"{'':12}with atomics {times['ours'] / times['tensor_core/atomic']:.2f} times as fast as with two walks, "
                  f"and beside FlashAttention-2 {times['SDPA flash'] / times['tensor_core/atomic']:.2f}")

# %% [markdown]
# The rungs `tiled` and `separate`, without tensor cores, were left out, since a call of them takes so long. **Explaining the gap.** Count the seven products that are computed, and a part of it is closed: two
# walks cost what you predicted. The rest are things of the kind that section 7 names. In return, our gradients are the same in all bits with every run. FlashAttention-2 can be made so,
# too; look what it costs for a long sequence, where many blocks wait for their turn to add.
#
# **On your machine** the library's kernels run as well, on the GPU or in the simulator. `compare` gives them random numbers, and holds the gradients and PyTorch's to float64; the error is in units of what
# rounding makes plausible. (In a terminal: `python -m course_lib compare attention --direction backward --variant tiled`. And `bench attention --names attention.backward --shapes 2x8x1024x64` measures a smaller size on your
# own GPU.)

# %%
for variant in ("tiled", "separate"):
    result = compare("attention", variant=variant, direction="backward")
    print(result.title)
    print(f"    error {result.ours.scaled:.0e}, PyTorch's {result.peer.scaled:.0e}; right: {result.right}")

# %% [markdown]
# ## What the profiler says
#
# What it would show of your two kernels, counted by the tracer:

# %%
print(f"{'kernel':12}{'global loads':>14}{'sectors':>10}{'shared loads':>14}{'bank conflicts':>16}")
for label, trace in (("dk and dv", dkdv_trace), ("dq", dq_trace)):
    loads = [site for site in trace.sites if site.op == "load"]
    memory, shared = ([site for site in loads if site.space == s] for s in ("global", "shared"))
    print(f"{label:12}{sum(s.requests for s in memory):14,}{sum(s.sectors for s in memory):10,}"
          f"{sum(s.requests for s in shared):14,}{sum(s.bank_conflicts for s in shared):16,}")

# %% [markdown]
# Shared memory is what both are busy with, as the forward kernel was. Each product reads two numbers from it for one multiplication. Tiles in registers are the cure, as in
# [lesson 8](08_convolution.ipynb), and the library's kernels have them.
#
# ## Where the real libraries go further
#
# - **Grouped heads.** Several query heads share keys and values; dk and dv are then sums over the heads of a group, too. The block of keys walks through the queries of all of them.
# - **Dropout.** The forward pass has dropped weights at random. The same random numbers are drawn again, from the same seed ([lesson 5](05_fusing_softmax.ipynb)): recomputed, not remembered.
# - **A gradient of the mask.** If a bias was added to the scores, its gradient is $dS$ itself. Whoever wants it has to write a matrix down after all.
#
# ## Three questions
#
# <details><summary>1. A colleague keeps m and the sum of each row instead of lse, and computes exp(x − m) / sum. Is it right, and what does it cost?</summary>
#
# It is right: lse is m + log(sum). It costs two numbers a row instead of one, and a division for each weight instead of nothing.
# </details>
#
# <details><summary>2. Why does the scale not appear in dv?</summary>
#
# The value goes into the result with its weight alone. The scale is <em>in</em> the weight already. A score has the scale as a factor, so what goes through the scores, dq and dk, gets it.
# </details>
#
# <details><summary>3. The sum of all numbers of dS in a row is 0. Why, and what does it say about dq, if all keys are moved by the same vector?</summary>
#
# Σ P (dP − δ) = Σ P dP − δ Σ P = δ − δ = 0. If the same vector is added to all keys, all scores of a query change by the same amount, and a softmax does not see that. So dq stays as it is: dS has not changed, and
# the vector is multiplied by the sum of the row, 0.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# You have now written attention forwards and backwards, with three kernels and with tiles. The library has it as one operator, with all options: `course_lib.kernels.attention`, whose tiled kernels you can
# read now, and whose next rung does the same products on tensor cores.
