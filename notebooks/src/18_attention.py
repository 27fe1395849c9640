# %% [markdown]
# # 18 · Attention
#
# **After this lesson** you can compute attention by hand for one short sentence, say why its scores
# are divided by √D, write it as three kernels, fuse scale, mask and softmax into one of them, keep
# queries that see nothing from turning into `nan`, and predict from a few sizes what attention
# costs, and why long texts cost so much.
#
# **You need** [lesson 5](05_fusing_softmax.ipynb): online softmax in a fused kernel, log-sum-exp; of
# [lesson 8](08_convolution.ipynb) and [lesson 10](10_the_other_layers.ipynb) the matrix product by
# tiles; of [lesson 4](04_softmax_at_the_limit.ipynb) the gradient of softmax.
#
# **Time:** 130 minutes; there are good places to pause after sections 3 and 5. All cells together
# run in less than a minute without a GPU. Speeds were recorded for the course, on the GPU that is
# named beside them; what is predicted from bytes says so. The words are collected in the
# [glossary](glossary.md).

# %%
import math

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import bench, cuda, plot, reference, results_table, simulator
from course_lib.compare import compare
from course_lib.runtime.intrinsics import online_add, warp_max, warp_online, warp_sum
from course_lib.teach import TODO, check, hint, progress, solution, use

f, ZERO, MINUS_INF = np.float32, np.float32(0), np.float32(-np.inf)

# %% [markdown]
# ## 1 · Who looks at whom
#
# *The cat slept because it was tired.* Who was tired? To understand "it", one has to look at another
# word of the sentence, and to know which. A network that reads text has a list of numbers for each
# word, a **vector**. **Attention** is the layer in which each word collects something from the
# others. For that, three vectors are made of each word:
#
# - the **query** `q`: what is this word looking for?
# - the **key** `k`: what does this word offer to those who look?
# - the **value** `v`: what does a word get that has looked here?
#
# A trained network finds them itself: each is the word's vector times a matrix of weights, and the
# weights are learned. Here they are made by hand, with `D` = 4 numbers each. The four numbers
# of queries and keys stand for *thing*, *action*, *state* and *small word*. So "it" looks for a
# thing, and "cat" is one.

# %%
words = ["The", "cat", "slept", "because", "it", "was", "tired"]
kinds = ["thing", "action", "state", "small"]
k = np.array([[0, 0, 0, 3], [4, 0, 0, 0], [0, 4, 0, 0], [0, 0, 0, 2],
              [1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 4, 0]], dtype=f)
q = np.array([[2, 0, 0, 0], [0, 1, 1, 0], [2, 0, 0, 0], [0, 1, 2, 0],
              [2, 0, 0, 0], [0, 0, 2, 0], [1.5, 0, 0, 0]], dtype=f)
v = np.array([[0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1],
              [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 1, 0]], dtype=f)
plot.tables([q, k], ["queries: what is looked for", "keys: what is offered"], rows=words,
            columns=kinds, ylabel="", xlabel="")

# %% [markdown]
# How well does a key fit a query? The **dot product** tells: multiply them number by number, and add
# up. For "it" and "cat" it is 2 · 4 = 8, for "it" and "slept" 0. This is the **score**. All
# scores together are a matrix, with a row for each query and a column for each key:
#
# $$ \text{scores} = q\,k^\mathsf{T} \qquad
# \text{weights} = \text{softmax}\Big(\frac{\text{scores}}{\sqrt{D}}\Big) \qquad
# o = \text{weights} \cdot v $$
#
# Softmax makes **weights** of each *row*: they are positive, and those of a query sum to 1. (The
# division by √D is a matter of section 2. Here √D is 2.) Last, each word gets the mean of all values,
# weighted by its row. This is called **scaled dot-product attention**.
#
# **Predict:** in the row of "it", which weight is the largest, and about how large is it?

# %%
scores = q @ k.T
weights = reference.softmax(scores / math.sqrt(4))
plot.tables([weights], ["weights: each row is a query, each column a key"], rows=words, columns=words,
            ylabel="who looks", xlabel="who is looked at")

# %% [markdown]
# "it" gives 0.88 of its attention to "cat". "slept" looks for who did it, and "was" looks for a
# state and finds "tired". Nobody wrote these weights down. They came out of seven queries and
# seven keys, and in another sentence the same "it" would look elsewhere. That is the difference
# from a convolution, whose weights are fixed when the network runs.
#
# And what do the words get? The values say *animal*, *sleep*, *tiredness*, or *nothing in
# particular*:

# %%
o = weights @ v
plot.tables([v, o], ["values", "o: what each word has collected"], rows=words,
            columns=["animal", "sleep", "tired", "nothing"], ylabel="", xlabel="")

# %% [markdown]
# "it" has become an animal for the most part. This is the whole operation: two matrix products, and
# a softmax between them.

# %% [markdown]
# ## 2 · Why √D
#
# Real queries and keys have 64 or 128 numbers. Take them at random, with mean 0 and standard
# deviation 1, much as they are when a network begins to learn. A score is a sum of `D` products.
# **Predict** how large scores are, typically, for `D` = 4, 64 and 1,024.

# %%
rng = np.random.default_rng(0)
sizes = 2 ** np.arange(0, 11)
spread, sharpest = {}, {}
for D in sizes:
    random_q, random_k = rng.normal(size=(400, D)), rng.normal(size=(64, D))
    products = random_q @ random_k.T
    for name, x in (("q · k", products), ("q · k / √D", products / math.sqrt(D))):
        spread.setdefault(name, []).append(x.std())
        sharpest.setdefault(name, []).append(reference.softmax(x).max(axis=1).mean())

# %%
plot.curves(sizes, {name: np.array(each) for name, each in spread.items()}, log=True,
            xlabel="D, numbers in a query", ylabel="standard deviation of a score (no unit)",
            title="A sum of D products grows like √D")

# %% [markdown]
# The product of two independent numbers with mean 0 and variance 1 has mean 0 and variance 1 again.
# Variances of independent numbers add up, so that the sum of `D` products has variance `D`. Its
# standard deviation is √D. Divided by √D it is 1, whatever `D`.
#
# Why does it matter? Because of what softmax makes of large scores. Here is the largest of 64 weights,
# on average over 400 queries. **Predict** both curves at `D` = 1,024.

# %%
plot.curves(sizes, {name: np.array(each) for name, each in sharpest.items()}, log="x",
            xlabel="D, numbers in a query", ylabel="largest of 64 weights (no unit)",
            title="Without the scale, one key gets everything")

# %% [markdown]
# Without the scale, a query of a network that has learned nothing looks at a single key, chosen by
# chance. And it cannot learn better: the gradient of softmax is $y_i\,(dy_i - \sum_j y_j\,dy_j)$,
# and where one $y$ is 1 and the others are 0, it is 0 for all of them.

# %% [markdown]
# ## 3 · Heads, and what all this costs
#
# One row of weights can say one thing at a time. But "it" might have to look for a thing *and* for an
# action. So networks compute attention several times side by side, with shorter queries of their own.
# Each of these is a **head**. All arrays get two more axes:
#
# | array | shape | |
# |---|---|---|
# | q, o | (B, H, T, D) | B examples, H heads, T queries, D numbers each |
# | k, v | (B, H, S, D) | S keys; in one sentence that looks at itself, S = T |
# | scores, weights | (B, H, T, S) | a matrix for each head of each example |
#
# The layer before makes one long vector of H · D numbers for each word. To cut it into heads, nothing
# has to be copied. **Predict** the strides, in elements, of (B, H, T, D):

# %%
made = torch.zeros(2, 7, 3 * 4)  # B, T, and H · D numbers for each word
heads = made.view(2, 7, 3, 4).transpose(1, 2)
print("shape", tuple(heads.shape), "strides", heads.stride())

# %% [markdown]
# From one word to the next it is 12 numbers, from one head to the next only 4. A kernel that indexes
# `q[b, h, i, d]` need not know. (Heads and the √D are as in *Attention is all you need*, by Ashish
# Vaswani and others, 2017.)
#
# ### Exercise: predict the cost
#
# As kernels: the first reads `q` and `k` and writes the scores. The second reads the scores and writes
# the weights (scale and softmax in one). The third reads the weights and `v` and writes `o`. All are
# float32, S = T, and each array is read or written once by each kernel.
#
# 1. How many bytes has the matrix, of all heads and examples?
# 2. How many bytes do the three kernels move?
# 3. How many FLOPs are in the two products? (A multiplication and an addition are 2. Softmax is
#    little beside them.)
# 4. At which T does the matrix have just as many bytes as `q`, `k`, `v` and `o` together?

# %% exercise="predict_attention"
def predict_attention(B, H, T, D):
    matrix = TODO  # bytes
    moved = TODO  # bytes
    flops = TODO
    return matrix, moved, flops, TODO  # and the T at which the matrix is as large as the rest


check("predict_attention", predict_attention)

# %%
hint("predict_attention")

# %% [markdown]
# Let us feel it: one example, 16 heads of 64 numbers, and texts that get longer. **Predict** the
# matrix at T = 65,536. (An H200 has 141 GB of memory.)

# %%
predict = use("predict_attention", predict_attention)
lengths = 2 ** np.arange(6, 17)
print(f"{'T':>7}{'q, k, v, o (GB)':>17}{'matrix (GB)':>13}{'moved (GB)':>12}{'TFLOP':>8}")
for T in lengths:
    matrix, moved, flops, crossover = predict(1, 16, int(T), 64)
    inputs = 4 * 4 * 16 * T * 64
    print(f"{T:7,}{inputs / 1e9:17.4f}{matrix / 1e9:13.4f}{moved / 1e9:12.3f}{flops / 1e12:8.3f}")
print(f"the matrix outweighs the rest beyond T = {crossover:,.0f}")

# %%
matrices = np.array([predict(1, 16, int(T), 64)[0] for T in lengths]) / 1e9
plot.curves(lengths, {"the T × T matrix": matrices, "q, k, v and o": 16 * 16 * lengths * 64 / 1e9},
            log=True, xlabel="T, words in the text", ylabel="memory (GB)",
            title="One layer of attention, 16 heads of 64 numbers, float32")

# %% [markdown]
# Twice as long a text has twice as many queries, and a matrix **four times** as large. Beyond T = 256
# the matrix is more than all the rest, and at 65,536 it does not fit onto the largest GPU of this
# course, although the input and the result need about a gigabyte together. And it exists *twice*,
# as scores and as weights. This matrix is what the lesson is about, and the next one gets rid of it.

# %% [markdown]
# A good place for a break. Next come the kernels.

# %% [markdown]
# ## 4 · The first product
#
# $\text{score}_{ij} = \sum_d q_{id}\,k_{jd}$ is the product of lesson 10: rows of one matrix with *rows* of
# another, $q\,k^\mathsf{T}$, and k is never transposed in memory. What is new is that there are B · H
# of them. They do not touch each other, so that they get an axis of the grid: `blockIdx.z` counts
# all heads of the first example, then those of the second.
#
# A block has 8 × 8 threads and makes a tile of 8 × 8 scores. It fetches 8 queries and 8 keys, 8 numbers
# of each at a time, into shared memory. Thread (`tx`, `ty`) fetches number `tx` of query `ty` *and of
# key* `ty`, so that neighbouring threads read neighbouring numbers of both. But its own score is that
# of query `ty` with key `tx`. (The keys' tile has a ninth column that nobody uses, since it is
# read by columns: without it two lanes would want the same bank, as in lesson 2.)
#
# ### Exercise: each query meets each key
#
# T, S and D are anything, so that tiles hang over on every side. **Predict** what must be in the
# places that do not exist.

# %% exercise="attention_scores"
TILE, PADDED = 8, 9


@cuda.jit
def attention_scores(q, k, scores):
    sq = cuda.shared.array((TILE, TILE), np.float32)
    sk = cuda.shared.array((TILE, PADDED), np.float32)
    (H, T, D), S = q.shape[1:], k.shape[2]
    b, h = TODO  # 1. which example and which head does cuda.blockIdx.z stand for?
    tx, ty, total = cuda.threadIdx.x, cuda.threadIdx.y, ZERO
    i, j = TILE * cuda.blockIdx.y + ty, TILE * cuda.blockIdx.x + tx  # this thread's score
    key = TILE * cuda.blockIdx.x + ty  # the key of which it fetches a number
    for first in range(0, D, TILE):
        d = first + tx
        TODO  # 2. fetch, wait, add TILE products, wait
    if i < T and j < S:
        scores[b, h, i, j] = total


check("attention_scores", attention_scores)

# %%
hint("attention_scores")

# %%
def grid(n_cols, n_rows, n_heads):
    """Blocks of 8 × 8 threads for so many matrices."""
    return -(-n_cols // TILE), -(-n_rows // TILE), n_heads


# %%
rng = np.random.default_rng(1)
B, H, T, D = 2, 2, 40, 16
q4, k4, v4 = (rng.normal(size=(B, H, T, D)).astype(f) for _ in range(3))
kernel, raw = use("attention_scores", attention_scores), np.zeros((B, H, T, T), f)
with simulator.trace() as scores_trace:
    kernel[grid(T, T, B * H), (TILE, TILE)](q4, k4, raw)
print(f"largest difference from NumPy {np.abs(raw - q4 @ k4.swapaxes(2, 3)).max():.0e}")
found = np.zeros((1, 1, 7, 7), f)
kernel[grid(7, 7, 1), (TILE, TILE)](q[None, None], k[None, None], found)
print("the sentence's scores are right:", np.array_equal(found[0, 0], scores))

# %% [markdown]
# How do your threads read the keys? A warp has 32 threads, which are four lines of the block.
# **Predict** the sectors per request.

# %%
reads = next(site for site in scores_trace.sites if site.array == "k" and site.op == "load")
print(f"{reads.sectors_per_request:.0f} sectors per request")
plot.access_map(scores_trace, reads, steps=2, title="Eight numbers of each of four keys")

# %% [markdown]
# Four sectors, and all 32 bytes of each are wanted. If each of the 32 lanes read a key of its own, a
# request would touch 32 sectors and want 4 bytes of each.

# %% [markdown]
# ## 5 · Scale, mask and softmax
#
# Not every word may be looked at. A program that *writes* a text knows only the words before the next
# one. While it learns, it is given whole texts, and query `i` must not look at keys behind it:
# `j <= i`. This is called **causal**. And where sentences of different lengths share a batch, the
# short ones are filled up with **padding**, at which nobody may look. A **mask** says so: True where
# query `i` may look at key `j`.
#
# In PyTorch, written down step by step, each line is a kernel or more. `Moved` notes which operators
# run, and the bytes that each reads and writes. **Predict:** how often is the matrix read, and how
# often written?

# %%
class Moved(TorchDispatchMode):
    """Notes each operator that makes a new array, with the bytes that it reads and writes."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [each for each in args if torch.is_tensor(each)]
        if all(each.data_ptr() != result.data_ptr() for each in tensors):  # no other view
            read = sum(each.untyped_storage().nbytes() for each in tensors)
            kernels.append((str(function).split(".")[1].strip("_"), read, result.nbytes))
        return result


kernels = []

# %%
def step_by_step(q, k, v, hidden):
    scores = q @ k.transpose(2, 3)
    scores = scores * (1 / math.sqrt(q.shape[3]))
    scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, dim=-1) @ v


large, hidden = torch.zeros(3, 1, 2, 512, 64), torch.ones(512, 512, dtype=torch.bool).triu(1)
q_large, k_large, v_large = (each.clone() for each in large)
with Moved():
    step_by_step(q_large, k_large, v_large, hidden)
one = 2 * 512 * 512 * 4  # bytes of the matrix
eager = [(name, read / one, written / one) for name, read, written in kernels]
fused = [("scores", 0.25, 1), ("scale, mask, softmax", 1.125, 1), ("output", 1.125, 0.125)]

# %%
plot.arrays_moved({"PyTorch, step by step": eager, "three kernels": fused},
                  title="Attention of 512 words, 2 heads of 64 numbers")

# %% [markdown]
# Here "the array" is the T × T matrix. Five operators, and the matrix is written four times and read
# four times. (The mask has a byte for each element and is the same for both heads, hence the
# eighth. A GPU may even copy the scores before it fills them.) Scale and mask are nothing but
# arithmetic, and lesson 5 has shown what to do with them.
#
# ### Minus infinity, again
#
# Lesson 3 says how to mask: a score of $-\infty$ gets the weight $e^{-\infty} = 0$. Here is such a
# kernel. It scales, it masks, and then it takes a softmax with a warp per row. We try it on a batch of two
# sentences, of 8 words and of 5. The short one is filled up *in front*, as programs that write do it, so that
# the last word is the newest. All is causal. **Predict** the weights of the second sentence.

# %%
@cuda.jit
def softmax_by_the_book(scores, mask, scale, y):
    (H, T, S), warp, lane = scores.shape[1:], cuda.grid(1) // 32, cuda.threadIdx.x % 32
    b, h, i = warp // (H * T), warp // T % H, warp % T
    m, s = MINUS_INF, ZERO
    if b < scores.shape[0]:
        for j in range(lane, S, 32):
            seen = mask[b, 0, 0, j] and j <= i
            y[b, h, i, j] = scale * scores[b, h, i, j] if seen else MINUS_INF
            m = max(m, y[b, h, i, j])
        m = warp_max(m)
        for j in range(lane, S, 32):
            s += math.exp(y[b, h, i, j] - m)
        s = warp_sum(s)
        for j in range(lane, S, 32):
            y[b, h, i, j] = math.exp(y[b, h, i, j] - m) / s

# %%
sentences = rng.normal(size=(2, 1, 8, 8)).astype(f)
padding = np.ones((2, 1, 1, 8), dtype=bool)
padding[1, :, :, :3] = False  # the second sentence begins at key 3
book = np.zeros_like(sentences)
softmax_by_the_book[4, 128](sentences, padding, f(0.5), book)
titles = ["8 words", "5 words, 3 of padding"]
text = dict(labels=range(8), xlabel="key", ylabel="query", vmax=1)
plot.probabilities([book[0, 0], book[1, 0]], titles, **text, title="By the book")

# %% [markdown]
# Three rows are `nan`. Those queries are padding themselves, and so nobody needs what they
# collect. But `nan` does not stay where it is: the next layers compute with it, and in training a
# single one makes the loss `nan`, and with it every gradient.
#
# What happened is what lesson 3 has warned of. Query 0 may look at key 0 alone, and key 0 is
# padding. **All** scores of the row are $-\infty$, so is their maximum, and $-\infty - (-\infty)$ is not a
# number. PyTorch's softmax does the same:

# %%
print(torch.softmax(torch.full((4,), -math.inf), dim=0))
o_of_padding = torch.from_numpy(book[1, 0]) @ torch.ones(8, 2)
print("collected by queries 0 to 4:", o_of_padding[:5, 0].numpy().round(3))

# %% [markdown]
# Here there *is* an answer. The weights are shares of what may be seen. If nothing may be seen, there are
# no shares: all weights are 0, and o is 0. The log-sum-exp of no scores is $\log 0 = -\infty$. The
# kernel gets there without a special case if it never touches what may not be looked at: not in the
# sum, and not in the quotient.
#
# Two short cuts do *not* get there. **Predict** what is wrong with each:

# %%
x = 0.5 * sentences[0, 0]
seen = np.tri(8, dtype=bool)
afterwards = reference.softmax(x) * seen  # first softmax, then the mask
zeros = reference.softmax(np.where(seen, x, 0))  # a score of 0 for what may not be seen
for name, y in {"mask after the softmax": afterwards, "masked scores are 0": zeros}.items():
    print(f"{name:23} row 0 sums to {y[0].sum():.2f}, of which {y[0][seen[0]].sum():.2f} "
          "lies where it may look")

# %% [markdown]
# Masked afterwards, the weights no longer sum to 1, since the hidden scores had their part in the
# sum. And a score of 0 is a score like any other: $e^0 = 1$.
#
# A third trap is the maximum. It must be that of the scores that may be seen. If a hidden one lies far
# above, all that may be seen underflows to 0, and 0 divided by 0 is `nan` once more.
#
# ### A mask that takes no room
#
# A mask for padding has a row for each *example*, the same for all its heads and queries. To write it out
# as (B, H, T, S) would be another T × T matrix. NumPy and PyTorch repeat an axis without copying it: its
# **stride** is 0, so that each step along it leads to the same place. It **broadcasts**.

# %%
mask = torch.ones(2, 1, 1, 8, dtype=torch.bool)
print("mask    ", tuple(mask.shape), "strides", mask.stride(), "bytes", mask.untyped_storage().nbytes())
wide = mask.expand(2, 3, 8, 8)
print("expanded", tuple(wide.shape), "strides", wide.stride(), "bytes", wide.untyped_storage().nbytes())

# %% [markdown]
# Your kernel gets the small array. Each axis has the length of that of the scores, or 1. With the
# remainder, `b % mask.shape[0]` is `b` in the first case and 0 in the second: a stride of 0, written as
# arithmetic.
#
# ### Exercise: all in one kernel
#
# A warp per row (b, h, i), of any length. If `causal`, query i may look at key j only where `j <= i`. The
# weights go to `y`, and m + log s to `lse`. You have `online_add(m, s, x)` and `warp_online(m, s)` of
# lesson 5, which return the new pair. (`math.log(0)` is $-\infty$ in a kernel, and no error.)

# %% exercise="scaled_softmax"
@cuda.jit
def scaled_softmax(scores, mask, scale, causal, y, lse):
    B, H, T, S = scores.shape
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < B * H * T:
        b, h, i = row // (H * T), row // T % H, row % T
        mb, mh, mi = b % mask.shape[0], h % mask.shape[1], i % mask.shape[2]
        m, s = MINUS_INF, ZERO
        TODO  # 1. the pair of all scores that this query may look at, known to all lanes
        for j in range(lane, S, 32):
            value = ZERO
            TODO  # 2. the weight of key j, if the query may look at it
            y[b, h, i, j] = value
        if lane == 0:
            lse[b, h, i] = TODO  # 3.


check("scaled_softmax", scaled_softmax)

# %%
hint("scaled_softmax")

# %%
softmax = use("scaled_softmax", scaled_softmax)
y, lse = np.zeros_like(sentences), np.zeros((2, 1, 8), f)
softmax[4, 128](sentences, padding, f(0.5), True, y, lse)
print("lse of the second sentence:", lse[1, 0].round(2))
plot.probabilities([y[0, 0], y[1, 0]], titles, **text, title="Where nothing may be seen, all weights are 0")

# %% [markdown]
# What do its threads ask for? **Predict** it in sizes of the matrix, for the scores of section 4.

# %%
weights4, lse4 = np.zeros_like(raw), np.zeros((B, H, T), f)
everything = np.ones((1, 1, 1, 1), bool)
with simulator.trace() as softmax_trace:
    softmax[B * H * T // 4, 128](raw, everything, f(1 / math.sqrt(D)), False, weights4, lse4)
plot.passes({"yours": softmax_trace}, raw.nbytes, title="Scale, mask and softmax in one kernel")

# %% [markdown]
# The scores are read twice, as in lesson 3: once for m and s, once for the weights. The second time
# they come from a cache, since the row was read a moment ago. So memory sends the matrix once and
# takes it once. (The bars of the mask are a byte for each reading. Here it is always the same byte, so that
# memory sends next to nothing.)

# %% [markdown]
# Another good place for a break.

# %% [markdown]
# ## 6 · The second product, and the three together
#
# $o_{id} = \sum_j \text{weight}_{ij}\,v_{jd}$. It is a matrix product again, with one difference. In the first, the
# sum went over the *last* axis of both, so that rows met rows. Now it goes over the keys, which are the
# last axis of the weights, but the *second last* of v: rows meet columns.
#
# ### Exercise: the mean of the values
#
# **Predict** before you write: does the tile of v need a ninth column?

# %% exercise="attention_output"
@cuda.jit
def attention_output(weights, v, o):
    sw = cuda.shared.array((TILE, TILE), np.float32)
    sv = cuda.shared.array((TILE, TILE), np.float32)
    (H, S, D), T = v.shape[1:], o.shape[2]
    b, h = cuda.blockIdx.z // H, cuda.blockIdx.z % H
    tx, ty, total = cuda.threadIdx.x, cuda.threadIdx.y, ZERO
    i, d = TILE * cuda.blockIdx.y + ty, TILE * cuda.blockIdx.x + tx  # this thread's result
    TODO  # all keys, TILE at a time
    if i < T and d < D:
        o[b, h, i, d] = total


check("attention_output", attention_output)

# %%
hint("attention_output")

# %% [markdown]
# (It does not: `sv[n, tx]` is read along a line, and so the lanes want neighbouring banks.)
#
# ### Exercise: one launcher
#
# Now the whole: three launches, with room for what lies between them. It returns `o` and `lse`. The
# kernels are yours if they have passed. `grid` of section 4 counts blocks for the products: columns
# first, then rows, then matrices. **Predict:** which array decides how large each grid is?

# %%
attention_scores = use("attention_scores", attention_scores)
scaled_softmax = use("scaled_softmax", scaled_softmax)
attention_output = use("attention_output", attention_output)
BLOCK = 128  # threads of a block of scaled_softmax

# %% exercise="attention"
def attention(q, k, v, mask, causal):
    (B, H, T, D), S = q.shape, k.shape[2]
    scores, weights = np.empty((2, B, H, T, S), np.float32)
    lse, o = np.empty((B, H, T), np.float32), np.empty((B, H, T, D), np.float32)
    TODO  # three launches
    return o, lse


check("attention", attention)

# %%
hint("attention")

# %% [markdown]
# PyTorch has it as one function, `scaled_dot_product_attention`. And the sentence of section 1, once
# more, as a program would read it that writes: no word sees what comes behind it.

# %%
attend = use("attention", attention)
o4, lse4 = attend(q4, k4, v4, everything, True)
expected = torch.nn.functional.scaled_dot_product_attention(
    *map(torch.from_numpy, (q4, k4, v4)), is_causal=True)
truth, lse_truth = reference.attention(q4, k4, v4, causal=True)
print(f"largest difference from PyTorch {np.abs(o4 - expected.numpy()).max():.0e}, "
      f"from float64 {np.abs(o4 - truth).max():.0e}, of lse {np.abs(lse4 - lse_truth).max():.0e}")
collected, _ = attend(*(each[None, None] for each in (q, k, v)), everything, True)
plot.tables([o, collected[0, 0]], ["looking everywhere", "causal"], rows=words, ylabel="", xlabel="",
            columns=["animal", "sleep", "tired", "nothing"])

# %% [markdown]
# "The" sees itself alone, and "cat" can't know yet that it will sleep. "it" still finds its cat.

# %% [markdown]
# ## 7 · One step back
#
# In training all this runs backwards, too. Lesson 20 does it as a whole. Here is the step
# that is new, the one through your fused kernel. With $y = \text{softmax}(\text{scale} \cdot
# \text{scores})$, the chain rule gives
#
# $$ d\text{score}_{ij} = \text{scale} \cdot y_{ij}\,\Big(dy_{ij} - \sum_n y_{in}\,dy_{in}\Big) . $$
#
# The bracket is lesson 4's, and a factor on the way there is a factor on the way back. **Predict:** what must
# this kernel know about the mask?
#
# ### Exercise: the gradient of the fused kernel

# %% exercise="scaled_softmax_backward"
@cuda.jit
def scaled_softmax_backward(dy, y, scale, dscores):
    B, H, T, S = y.shape
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < B * H * T:
        b, h, i = row // (H * T), row // T % H, row % T
        total = ZERO
        TODO  # 1. the sum of y · dy over the row, known to all lanes
        for j in range(lane, S, 32):
            dscores[b, h, i, j] = TODO  # 2.


check("scaled_softmax_backward", scaled_softmax_backward)

# %%
hint("scaled_softmax_backward")

# %% [markdown]
# Nothing! Where the mask is False, `y` is 0, and so is the gradient. In a row that saw nothing all of it
# is 0, and no `nan` can come back. Never trust a derivation: we change one score a little, up and
# down. One that may be looked at, one that is hidden, and one of a query that sees nothing:

# %%
backward = use("scaled_softmax_backward", scaled_softmax_backward)
dy, dscores = rng.normal(size=y.shape).astype(f), np.zeros_like(y)
backward[4, 128](dy, y, f(0.5), dscores)
seen, step = padding & np.tri(8, dtype=bool), np.zeros(y.shape)
seen = np.where(seen.any(-1, keepdims=True), seen, True)  # a row of nothing has no softmax …
for place in ((0, 0, 5, 2), (0, 0, 5, 7), (1, 0, 2, 1)):
    step[:] = 0
    step[place] = 1e-4
    up, down = (reference.softmax(np.where(seen, 0.5 * (sentences + sign * step), -np.inf))
                for sign in (1, -1))
    changed = ((up - down) * dy * (y.sum(-1, keepdims=True) > 0)).sum() / 2e-4  # … and weights of 0
    print(f"dscores{list(place)}: brute force {changed:+.7f}, yours {dscores[place] + 0:+.7f}")

# %% [markdown]
# The other gradients are products of matrices, as forward. $dy = do\,v^\mathsf{T}$ goes into your kernel,
# and from what it gives comes $dq = d\text{scores} \cdot k$. Against float64:

# %%
do = rng.normal(size=o4.shape).astype(f)
scale = f(1 / math.sqrt(D))
softmax[B * H * T // 4, 128](raw, everything, scale, True, weights4, lse4)
dweights, dscores4 = do @ v4.swapaxes(2, 3), np.zeros_like(raw)
backward[B * H * T // 4, 128](dweights, weights4, scale, dscores4)
dq, *_ = reference.attention_backward(do, q4, k4, v4, causal=True)
print(f"largest error of dq: {np.abs(dscores4 @ k4 - dq).max():.0e}")

# %% [markdown]
# ## 8 · The falling bar
#
# Back to the bytes. A text of 4,096 words and heads of 64 numbers: what does the chain of section 5 move,
# what do your three kernels, and what would be the least? **Predict** the last bar.

# %%
T, D = 4096, 64
thin = D / T  # the size of q, k, v or o beside the matrix
eager = [("scores", 2 * thin, 1), ("scale", 1, 1), ("mask", 1, 1), ("softmax", 1, 1),
         ("output", 1 + thin, thin)]
fused = [("scores", 2 * thin, 1), ("scale, mask, softmax", 1, 1), ("output", 1 + thin, thin)]
plot.arrays_moved({"five kernels": eager, "three kernels": fused,
                   "no matrix": [("", 3 * thin, thin)]}, title="Attention, in sizes of the T × T matrix")

# %% [markdown]
# (The mask's own bytes are left out.) From eight sizes of the matrix to four, and what is left is all
# matrix: written as scores, read, written as weights, read. The least is `q`, `k`, `v` read once and
# `o` written once, and here that is a sixteenth of **one** size.
#
# What does it mean in time? The following is a **prediction** from bytes and FLOPs alone, for a chip
# like the H200: 4,200 GB/s and 67 TFLOP/s in float32. One layer, 16 heads:

# %%
GBPS, TFLOPS = 4200, 67
matrix, moved, flops, _ = predict(1, 16, T, D)
ways = {"five kernels": moved + 4 * matrix, "three kernels": moved, "no matrix": 16 * 16 * T * D}
for name, n_bytes in ways.items():
    print(f"{name:14} {n_bytes / 1e9:6.2f} GB: predicted {n_bytes / (GBPS * 1e3):6.0f} µs for the bytes, "
          f"{flops / (TFLOPS * 1e6):4.0f} µs for the products, {flops / n_bytes:5.0f} FLOPs per byte")
print(f"the ridge is at {TFLOPS * 1e3 / GBPS:.0f} FLOPs per byte")

# %% [markdown]
# With three kernels and float32, bytes and products would take about equally long. But products can go
# to the tensor cores (lesson 10), which are many times as fast, and bytes cannot. Then attention is
# bound by memory, as long as there is a matrix. And without it? Hundreds of FLOPs for each byte:
# right of the ridge. *The products are not the trouble. The matrix between them is.*
#
# ## 9 · Measured
#
# The library has this lesson's way as the rung `separate` of `course_lib.kernels.attention`. Its products
# keep tiles in registers (lesson 8), and its weights overwrite the scores. PyTorch's
# `scaled_dot_product_attention` (SDPA) makes the matrix, too, if it is told to fall back to plain
# operators: `SDPA math`. `ours` and `SDPA flash`, the subject of the next lesson, never write it. Here are 8 texts of 2,048 words, 32 heads of 64 numbers, in bfloat16; scores are float32. **Predict** how much
# memory each takes beside its input, and the time of `separate` from `GBPS` and `TFLOPS`.

# %%
recorded, SHAPE = bench.load_records(), (8, 32, 2048, 64)
found = bench.find(recorded, name="attention.forward", shape=SHAPE, dtype="bfloat16")
for row in found[0]["rows"] if found else []:
    if row["label"] in ("separate", "SDPA math", "ours", "SDPA flash"):
        memory = found[0]["peak_bytes"][row["label"]]
        print(f"{row['label']:10}{row['microseconds'] / 1e3:7.2f} ms {memory / 1e9:7.2f} GB of memory")
print(f"on an {recorded['device']['name']} ({results_table.when(found[0])})" if found else "Not measured yet.")

# %%
matrix, moved, flops, _ = predict(*SHAPE)
print(f"predicted for separate: {moved / (GBPS * 1e6):.1f} ms for the bytes, "
      f"{flops / (TFLOPS * 1e9):.1f} ms for the products; the matrix has {matrix / 1e9:.2f} GB")

# %% [markdown]
# The memory is as predicted: one matrix, and more than one for PyTorch. **Explaining the gap** in time:
# `separate` takes far longer than bytes and products together. The record does not say where, a profiler would.
# What we know: its threads make 4 × 4 results each and fetch 8 numbers from shared memory for 16 products,
# while the roof is that of threads that only multiply; and it has no tensor cores, which the other three use.
# The next lesson gets rid of the matrix first, and then looks at tensor cores.
#
# **On your machine** the library's kernels run as well, on the GPU or in the simulator. `compare` gives them
# random numbers, and holds the result and PyTorch's to float64. The error is in units of what rounding makes
# plausible. (In a terminal: `python -m course_lib compare attention --variant separate`. And `bench attention
# --names attention.forward --shapes 2x8x1024x64` measures a smaller size on your own GPU.)

# %%
for direction in ("forward", "backward"):
    result = compare("attention", variant="separate", direction=direction)
    print(result.title)
    print(f"    error {result.ours.scaled:.0e}, PyTorch's {result.peer.scaled:.0e}; right: {result.right}")

# %% [markdown]
# ## What the profiler says
#
# Sectors loaded and stored by your three kernels, in sizes of the matrix, beside what was predicted. The
# matrix here is 40 × 40, with heads of 16 numbers, so that `q` is nearly half as large as the matrix.

# %%
with simulator.trace() as output_trace:
    attention_output[grid(16, 40, B * H), (TILE, TILE)](weights4, v4, o4)
traces = {"attention_scores": (scores_trace, "0.80 and 1.00"),
          "scaled_softmax": (softmax_trace, "1.00 and 1.00"),
          "attention_output": (output_trace, "1.40 and 0.40")}
print(f"{'kernel':18}{'loaded':>8}{'stored':>8}   predicted")
for name, (trace, predicted) in traces.items():
    moved = {"load": 0.0, "store": 0.0}
    for site in trace.sites:
        if site.space == "global" and site.array not in ("mask", "lse"):
            moved[site.op] += 32 * site.sectors / raw.nbytes
    print(f"{name:18}{moved['load']:8.2f}{moved['store']:8.2f}   {predicted}")

# %% [markdown]
# What is stored is as predicted. The loads are more, since they are what threads *ask for*: a tile of 8
# queries is fetched again for every 8 keys, and the softmax reads its row twice. A cache answers most
# of that, and larger tiles ask for less. A real profiler also shows what came from the device's memory
# itself. For large matrices, that is the line to compare with the prediction.
#
# ## Where the real libraries go further
#
# - The course's own library has this lesson's way as the rung `separate` of
#   `course_lib.kernels.attention`, forwards and backwards, with every mask that is named below.
# - cuBLAS does both products on the **tensor cores**, for all heads in one call, and it takes the scale
#   along for nothing.
# - **Megatron-LM** and **Apex** have this lesson's middle kernel for language models, with a row in
#   registers, and one version that is causal and never loads the upper half.
# - **PyTorch's** `scaled_dot_product_attention` chooses between several kernels. Only the one that it
#   falls back to makes the matrix.
# - Masks have become many: a **window** of the last few thousand keys; **ALiBi**, which subtracts a
#   little for each word of distance; sentences of different lengths packed without padding. Where
#   queries continue an earlier text, "causal" starts at the lower right: key j may be seen up to i + S − T.
# - **Grouped-query attention** lets several heads share keys and values. The matrix stays as
#   large, and `k` and `v` shrink, which matters most to programs that write.
#
# ## Three questions
#
# <details><summary>1. A colleague masks with a score of −10,000 instead of minus infinity, and says that
# there is no <code>nan</code> that way. What is wrong?</summary>
#
# In most rows nothing: e to the −10,000 is 0. But where a query may look nowhere, all scores are
# −10,000 (or near it), and softmax makes equal shares of them: the query gets the mean of what it must not
# see. It is wrong without a sign of it. And scores of −10,000 may be real ones, if scales go astray.
# </details>
#
# <details><summary>2. A kernel takes the softmax over the queries instead of the keys. Which sums are 1,
# and in which mask does it show at once?</summary>
#
# The columns then sum to 1, and rows do not. A query collects more or less than one value in all. With a
# causal mask the first query sees key 0 alone, so that its weight must be 1; in the wrong one
# it shares key 0 with all other queries. If T and S differ, it may also read outside the matrix.
# </details>
#
# <details><summary>3. The text gets twice as long. What happens to bytes, FLOPs, and FLOPs per byte of
# the three kernels? And what if the heads get twice as long?</summary>
#
# For long texts both are four times as many, and their ratio stays: about 4 B·H·T²·D FLOPs for 16 B·H·T²
# bytes are D / 4 FLOPs per byte. Longer texts do not get out of the memory's limit. With heads twice as long
# there are twice as many FLOPs for the same matrix, so the ratio doubles.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# The matrix is written, read, written and read. But a row of it is needed only once, for one query. In
# [lesson 5](05_fusing_softmax.ipynb) the online softmax took a row piece by piece.
# [Lesson 19](19_flash_attention.ipynb), FlashAttention, does the same with all three kernels at once: a
# tile of scores lives in shared memory, is used, and is forgotten. The T × T matrix is never written.
