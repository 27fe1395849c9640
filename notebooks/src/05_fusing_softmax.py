# %% [markdown]
# # 5 · Fusing softmax
#
# **After this lesson** you can say what fusing kernels will bring before you write any, fold batch
# normalisation and ReLU into a softmax, compute cross-entropy without ever storing a probability,
# derive its famous gradient, draw the same random mask twice instead of keeping it, and tell
# where fusing does not pay.
#
# **You need** [lesson 4](04_softmax_at_the_limit.ipynb): a row in registers, the gradient of softmax,
# the roofline. When numba refuses a line:
# [which Python works in a kernel](01_threads_and_memory.ipynb#Which-Python-works-in-a-kernel).
#
# **Time:** 130 minutes; there are good places to pause after sections 2 and 4. All cells together
# run in less than half a minute in the simulator. On a GPU the speeds are measured on your own
# machine, otherwise you see recorded ones. The words are collected in the [glossary](glossary.md).

# %%
import math
from functools import cache

import numpy as np
import torch

from course_lib import SIMULATED, bench, cuda, ops, plot, reference, results_table, simulator
from course_lib.runtime.intrinsics import online_add, warp_max, warp_online, warp_sum
from course_lib.runtime.intrinsics.philox import philox_one
from course_lib.teach import TODO, check, hint, progress, solution, use

ZERO, ONE, MINUS_INF = np.float32(0), np.float32(1), np.float32(-np.inf)
recorded = bench.load_records()

# %% [markdown]
# The measurements of this lesson come from two benchmarks of the course, `cross_entropy` and
# `fused_softmax`. On a GPU, this function runs them; without one, it finds what was recorded.

# %%
@cache
def measured(name, shape):
    """The measurement called `name`; None, and a line that says so, if there is none."""
    if not SIMULATED:
        from course_lib.benchmarks import cross_entropy, fused_softmax

        module = cross_entropy if name.startswith("cross_entropy") else fused_softmax
        (found,) = module.run(names=[name], shapes=[shape], dtypes=["float32"])
        return found | {"source": {"device": bench.device_facts()["name"], "date": "just now"}}
    if found := bench.find(recorded, name=name, shape=shape, dtype="float32"):
        source = {"device": recorded["device"]["name"], "date": results_table.when(found[0])}
        return found[0] | {"source": source}
    return print(f"{name} of {shape[0]:,} × {shape[1]:,} has not been recorded on a GPU yet.")


print("recorded on an", recorded["device"]["name"])

# %%
def show(record, title):
    """A ladder of the record; its title tells how much longer PyTorch's chain of kernels takes."""
    if record is None:
        return None
    times = {row["label"]: row["microseconds"] for row in record["rows"]}
    ratio = times["PyTorch eager"] / times[record["default"]]
    title += f"\nPyTorch eager takes {ratio:.2f} times as long as {record['default']}"
    return plot.ladder(record["rows"], record["copy_gbps"], title=title, **record["source"])

# %% [markdown]
# ## 1 · Bytes that go nowhere
#
# Many networks end like this: a layer's outputs are brought to one scale (*batch normalisation*;
# section 2 says how), negative ones are cut off (ReLU), and softmax makes probabilities of them.
# In PyTorch these are three calls, and so, in eager mode, three kernels, one after the other. Each
# of them may be at the limit of the memory, as softmax was in lesson 4. **Predict:** is the chain of
# the three at the limit, too?

# %%
chain = [("batch norm", 1, 1), ("ReLU", 1, 1), ("softmax", 1, 1)]
plot.arrays_moved({"three kernels": chain, "one kernel": [("all three", 1, 1)]},
                  title="The same result, from the same input")

# %% [markdown]
# Each kernel reads what the one before has just written. Four of these six arrays go to memory only
# to be fetched again, and nobody ever looks at them. They lead from one kernel to the next,
# because that is all that kernels have in common: registers and shared memory are lost when a
# kernel ends.
#
# So every kernel of a chain can be perfect and the chain is still three times as slow as it could be.
# To **fuse** kernels is to do the work of several in one, so that what lies between them stays in
# registers.
#
# Why is it *bytes* that one counts? Lesson 4's roofline told: an H200 has time for 16 operations while
# one byte comes from memory. Softmax needs fewer than 1 per byte, batch normalisation and ReLU
# still fewer. All three are memory-bound, so **bytes are time**, and arithmetic that is added to
# such a kernel is free, as long as the kernel stays left of the roof's ridge.
#
# ### Exercise: predict the gain
#
# A chain of `n_operations` kernels works on `n` float32 numbers. Each kernel reads the array and writes
# one; it does `flops` operations for each number; and to start and end it needs `launch_us`
# microseconds, whatever its size. Memory moves `gbps` GB/s, and the multiprocessors do `tflops` ·
# 10¹² operations per second. A kernel does both at the same time, so the slower one counts.
#
# How many microseconds does the chain take, and how many a single kernel in its place?

# %% exercise="predict_fusion"
def predict_fusion(n, n_operations, flops, gbps, tflops, launch_us):
    memory_us = TODO  # of one kernel
    arithmetic_us = TODO  # of one kernel of the chain
    chain = TODO
    return chain, TODO  # and the fused one


check("predict_fusion", predict_fusion)

# %%
hint("predict_fusion")

# %% [markdown]
# Let us ask it: 16,384 rows of 8,192 numbers, about 5 operations for each number in each kernel, on a
# chip like the H200. **Predict** the ratio first.

# %%
predict = use("predict_fusion", predict_fusion)
H200 = dict(gbps=4200, tflops=67, launch_us=2)
times = predict(16384 * 8192, n_operations=3, flops=5, **H200)
print(f"three kernels {times[0]:,.0f} µs, one kernel {times[1]:,.0f} µs: "
      f"{times[0] / times[1]:.1f} times faster")

# %% [markdown]
# ## 2 · Batch normalisation, ReLU and softmax
#
# **Batch normalisation** looks at each column of a table `x` with `N` rows (the examples) and `C`
# columns (the **features**, which are what a layer has computed of each example). One feature may lie
# between 0 and 0.01 and another one around 5,000, and networks learn badly from such numbers. So
# from each number its feature's mean is subtracted, and the rest is divided by the feature's
# standard deviation, which says how far numbers usually are from the mean. Then a learned `weight`
# and a learned `bias` give each feature the scale that suits the network:
#
# $$ z_{n,c} = \frac{x_{n,c} - \text{mean}_c}{\sqrt{\text{var}_c + \varepsilon}} \cdot
# \text{weight}_c + \text{bias}_c $$
#
# (The *variance* is the square of the standard deviation. $\varepsilon$ is tiny, 0.00001, and is
# there so that nothing is divided by 0.) While a network learns, mean and variance are those of the
# batch. When it is used, which is called **inference**, they are fixed numbers that were collected
# while it learned. This section is about inference; section 5 says why.
#
# With fixed numbers it is less than it looks. Multiply it out:
#
# $$ z_{n,c} = x_{n,c} \cdot \text{scale}_c + \text{shift}_c \qquad
# \text{scale}_c = \frac{\text{weight}_c}{\sqrt{\text{var}_c + \varepsilon}} \qquad
# \text{shift}_c = \text{bias}_c - \text{mean}_c \cdot \text{scale}_c $$
#
# One multiplication and one addition per number: all of batch normalisation is a **scale and a shift
# for each feature**. Beware, though. **Predict** which of the two formulas is better in float32 if a
# feature's mean is 10,000 and its standard deviation is 1:

# %%
f = np.float32
x = np.random.default_rng(0).normal(10_000, 1, 1000).astype(f)
mean, scale, bias = f(10_000), f(1.7), f(0.3)
exact = (x.astype(np.float64) - 10_000) * float(scale) + float(bias)
shift = bias - mean * scale
print(f"scale and shift:      largest error {np.abs(x * scale + shift - exact).max():.1e}")
print(f"mean subtracted first: largest error {np.abs((x - mean) * scale + bias - exact).max():.1e}")

# %% [markdown]
# `x * scale` is near 17,000, where float32 numbers are 0.002 apart, and only *then* is nearly the same
# number subtracted. On paper both are equal. In the machine, **subtract near numbers first**, while
# they still have all their digits. (It happens with the product above as with `m + log s` in
# the next section.) The course's kernel takes three numbers per feature for this reason: mean, scale
# and bias.
#
# What do they cost? `C` features have `4 C` parameters, and `x` has `N · C` numbers. With a thousand rows
# the parameters are less than half a percent. Every row needs them again. But they were used a
# moment ago, so they come from a cache, and the device's memory sends them once.
#
# ### Exercise: three layers in one kernel
#
# A warp per row, whose numbers are held in registers, up to `32 * SLOTS` of them. It is the
# kernel of lesson 4, with some arithmetic between the load and the maximum. **Predict** where
# a mistake is likely: places past the end of the row hold $-\infty$. What does ReLU make of it?

# %% exercise="bn_relu_softmax"
SLOTS, EPS = 4, np.float32(1e-5)


@cuda.jit
def bn_relu_softmax(x, mean, var, weight, bias, y):
    values = cuda.local.array(SLOTS, np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for k in range(SLOTS):
            col = 32 * k + lane
            values[k] = MINUS_INF
            TODO  # 1. if there is such a column: normalise, scale, shift, ReLU
            m = max(m, values[k])
        m = warp_max(m)
        for k in range(SLOTS):
            values[k] = math.exp(values[k] - m)
            s += values[k]
        s = warp_sum(s)
        for k in range(SLOTS):
            col = 32 * k + lane
            TODO  # 2. write y


check("bn_relu_softmax", bn_relu_softmax)

# %%
hint("bn_relu_softmax")

# %% [markdown]
# What does your kernel ask of memory, and what would a chain? For the chain, here are the first two
# of its kernels; its third is softmax.

# %%
@cuda.jit
def batch_norm(x, mean, var, weight, bias, z):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    for col in range(lane, x.shape[1], 32):
        scale = weight[col] / math.sqrt(var[col] + EPS)
        z[row, col] = (x[row, col] - mean[col]) * scale + bias[col]


@cuda.jit
def relu(z, h):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    for col in range(lane, z.shape[1], 32):
        h[row, col] = max(z[row, col], ZERO)

# %%
from course_lib.kernels.softmax import softmax

rng = np.random.default_rng(1)
x, z, h, y = rng.normal(2, 3, size=(4, 64, 128)).astype(f)
mean, var, weight, bias = rng.uniform(0.5, 2, size=(4, 128)).astype(f)
with simulator.trace() as chain_trace:
    batch_norm[16, 128](x, mean, var, weight, bias, z)
    relu[16, 128](z, h)
chained = softmax.forward(cuda.to_device(h)).copy_to_host()
kernel = use("bn_relu_softmax", bn_relu_softmax)
with simulator.trace() as fused_trace:
    kernel[16, 128](x, mean, var, weight, bias, y)
print(f"largest difference between chain and kernel: {np.abs(y - chained).max():.0e}")

# %%
plot.passes({"batch norm, ReLU": chain_trace, "yours": fused_trace}, x.nbytes,
            title="Asked for by the first two kernels of the chain, and by your one")

# %% [markdown]
# The picture shows two things. The intermediate results `z` and `h` are gone. And the four
# parameters take as much room as four arrays! That is what the *threads ask for*: in each row, each
# lane asks for the parameters of its columns. Memory does not send them 64 times; the L1 cache
# does most of it. But asking costs instructions, too. The course's kernel therefore lets each block stay
# for many rows, computes `scale` once per block, and keeps the features' numbers in
# shared memory.
#
# Here are the rungs of `course_lib/kernels/bn_relu_softmax`: `naive` with a thread per row, `online` with
# a block per row and a second reading, `registers` as you did it, for all lengths and 16 bytes at a
# time.

# %%
from course_lib.kernels import bn_relu_softmax as fused

for variant in fused.FORWARD:
    arrays = (cuda.to_device(each) for each in (x, mean, var, weight, bias))
    found = fused.forward(*arrays, variant=variant).copy_to_host()
    error = np.abs(found - reference.bn_relu_softmax(x, mean, var, weight, bias)).max()
    print(f"{variant:10} largest error {error:.0e}")

# %% [markdown]
# **Predict** how many times as long PyTorch's three kernels take, for 16,384 rows of 8,192 numbers.
# `torch.compile` fuses by itself. What do you expect of it?

# %%
show(measured("bn_relu_softmax.forward", (16384, 8192)),
     "Batch norm, ReLU and softmax, 16,384 rows of 8,192 numbers")

# %% [markdown]
# **Explaining the gap.** The bar of PyTorch eager counts only the *useful* bytes, two arrays in the time
# that it takes to move six. Where its ratio is above 3, one of the kernels of the chain is not at its own
# limit; where it is below, part of an array was still in the L2 cache when the next kernel came.
#
# On the H200 it is 4. How much of that does PyTorch's softmax explain, which reached 61 % of a copy in
# lesson 4? At a copy's speed, its two arrays take as long as 2 / 0.61 = 3.3. With four arrays for the
# other two kernels the chain takes 7.3, ours, at 91 % of a copy, 2 / 0.91 = 2.2, and the ratio would be
# 3.3. So the other kernels are not at the limit, either, or softmax is further from it in rows of this
# length.
#
# The compiler can find this fusion, too, since it is shown all three operations. Whether its kernel also reads a long row only once
# is another question, and its bar gives the answer: two thirds of a copy are what three arrays look like
# where two would do.
#
# ### Backwards
#
# The gradient goes back through softmax (lesson 4), through ReLU (0 where `z` was not positive), and
# through scale and shift: $dx = dz \cdot \text{scale}$. Fused, that is three arrays read (`dy`, `y`, `x`)
# and one written; PyTorch's chain moves eleven (three for softmax, three for ReLU, and five for batch
# normalisation, which reads `dz` and `x` once more for the gradients of its parameters). These gradients, of
# `weight` and `bias`, are sums over all *rows*, for each feature. No block sees all rows. So each block
# adds up those it sees, writes one line of partial sums, and a second, small kernel adds the lines.

# %% [markdown]
# A good place for a break. Next comes the fusion that every classifier and every language model
# uses.

# %% [markdown]
# ## 3 · Cross-entropy: a loss without probabilities
#
# A classifier gives probabilities $y_i$, and there is a right class $t$, called the **target**. The
# **cross-entropy** loss says how surprised the network is by the truth:
#
# $$ L = -\log y_t $$
#
# It is 0 if the network was sure of the right class, 0.69 if it gave it one half, and it grows without
# end as $y_t$ comes closer to 0. In the words of the formula: softmax, take one of the numbers, logarithm.
# We try it on rows of three scores, two of them 0 and one `gap` larger. The target is one of the
# zeros. **Predict** the loss for a gap of 50, and for 120.

# %%
gaps = np.arange(0, 141)
scores = np.stack([gaps, 0 * gaps, 0 * gaps], axis=1)
by_the_book = {}
with np.errstate(divide="ignore"):
    for kind in (np.float16, np.float32):
        shifted = (scores - gaps[:, None]).astype(kind)
        y = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
        loss = -np.log(y[:, 1])
        ends = gaps[np.isinf(loss)][0]
        by_the_book[f"−log(softmax), {kind.__name__}: infinite from {ends} on"] = loss
right = reference.cross_entropy(scores, np.ones(len(gaps), int), reduction="none")

# %%
plot.curves(gaps, {"right": right} | by_the_book, xlabel="how far the target's score is below the largest",
            ylabel="loss (no unit)", title="Two of three curves end where the loss becomes infinite")

# %% [markdown]
# Where a curve ends, the loss is infinite: the probability underflowed to 0, and
# $-\log 0 = \infty$. With float16 it happens before a gap of 20, with float32 a little above 100, and
# nothing is wrong with the scores. The remedy is to never compute $y_t$ at all. Put softmax into the
# logarithm:
#
# $$ L = -\log \frac{e^{x_t - m}}{s} = m - x_t + \log s
# \qquad\text{with}\qquad m = \max_i x_i, \quad s = \sum_i e^{x_i - m} . $$
#
# $e$ and $\log$ cancel. Nothing underflows, since $s$ is at least 1. And the loss needs of the whole
# row only the pair $(m, s)$ that the online softmax finds **in a single pass**, and one score. The number
# $m + \log s = \log \sum_i e^{x_i}$ is known as **log-sum-exp**, or `lse`.
#
# Count. PyTorch has two kernels for it. The first, log-softmax, writes the logarithms of *all*
# probabilities, and the second picks one of each row. For a language model with 50,000 words that is
# 50,000 numbers written for the sake of one. The fused kernel reads the scores once, and *writes next to
# nothing*.
#
# ### Exercise: the forward pass
#
# A warp per row. It writes the loss, and $m$ and $s$ for the way back. `target` holds a class
# for each row; in a row with the target −100 there is nothing to learn (a gap in a text, say), and its loss
# is 0. You have `online_add(m, s, x)`, which takes one more number, and `warp_online(m, s)`, the
# butterfly of merges. Both return the new pair.
#
# **Predict:** for scores around 10,000, is `(m + log(s)) − x` as good as `(m − x) + log(s)`?

# %% exercise="cross_entropy"
IGNORED = -100


@cuda.jit
def cross_entropy(logits, target, loss, m, s):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        largest, total = MINUS_INF, ZERO
        TODO  # 1. the pair of the whole row, known to all lanes
        if lane == 0:
            m[row], s[row] = largest, total
            TODO  # 2. the loss


check("cross_entropy", cross_entropy)

# %%
hint("cross_entropy")

# %%
kernel = use("cross_entropy", cross_entropy)
logits = np.random.default_rng(3).normal(0, 3, (64, 200)).astype(f)
target = np.random.default_rng(4).integers(0, 200, 64)
loss, m, s = np.zeros((3, 64), dtype=f)
with simulator.trace() as forward_trace:
    kernel[16, 128](logits, target, loss, m, s)
expected = torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(target))
print(f"mean loss {loss.mean():.6f}, PyTorch {expected.item():.6f}")

# %% [markdown]
# ### The famous gradient
#
# How does the loss react to each score? Through softmax there is the Jacobian of lesson 4, through the
# logarithm $-1/y_t$. But it is shorter to start from the form without probabilities,
# $L = \log \sum_j e^{x_j} - x_t$, and go step by step:
#
# 1. $\dfrac{\partial}{\partial x_i} \sum_j e^{x_j} = e^{x_i}$, since only one term has $x_i$ in it;
# 2. $\dfrac{\partial}{\partial x_i} \log \sum_j e^{x_j} = \dfrac{e^{x_i}}{\sum_j e^{x_j}} = y_i$, by the
#    chain rule. The gradient of log-sum-exp *is* softmax;
# 3. $\dfrac{\partial}{\partial x_i} (-x_t) = -1$ if $i = t$, and 0 otherwise.
#
# Together:
#
# $$ dx_i = y_i - [i = t] $$
#
# where $[i = t]$ is 1 for the target and 0 for all others. A row with a single 1 in it is called
# **one-hot**, and so the gradient of cross-entropy is said to be **softmax minus one-hot**. It says:
# take away from every class what it was given, and give the right class what it lacks. Three rows:

# %%
rows = np.array([[2, 1, 0, -1, 0], [0, 0, 0, 0, 0], [-1, 3, 0, 1, -2]], dtype=np.float64)
y, one_hot = reference.softmax(rows), np.eye(5)[[0, 2, 3]]
plot.tables([y, one_hot, y - one_hot], ["softmax", "one-hot", "the gradient"], xlabel="class",
            title="Softmax minus one-hot; each row of the gradient sums to 0")

# %% [markdown]
# In the third row the network was sure of class 1, the truth is class 3, and these two get nearly all
# of the gradient. If the network was right and sure, the gradient is nearly 0: nothing is left to learn.
#
# ### What has to be saved
#
# Look at what the gradient needs: the scores, the target, and for each row $m$ and $s$, with which
# $y_i = e^{x_i - m} / s$. The scores exist anyway. So the forward pass has to save two
# numbers *per row*, where PyTorch saves a number per element. **Predict** the arrays that each way
# moves, forward and backward together. (PyTorch first makes the gradient of the log-probabilities:
# an array full of zeros, with one number per row.)

# %%
eager = [("log-softmax", 1, 1), ("pick", 0, 0), ("fill", 0, 1), ("log-softmax backward", 2, 1)]
plot.arrays_moved({"PyTorch eager": eager, "fused": [("forward", 1, 0), ("backward", 1, 1)]},
                  title="Cross-entropy, forward and backward")

# %% [markdown]
# Three arrays: the scores are read twice, since between the two passes they are too many to be held
# anywhere, and the gradient is written once.
#
# Many texts save `lse` alone, one number per row, and compute $y_i = e^{x_i - \text{lse}}$. On paper
# that is enough. But you have seen what rounding does to $m + \log s$ where the scores are
# large. The course keeps the two numbers apart, and the check of the next exercise has such scores.
#
# ### Exercise: the gradient
#
# `dloss` says how the network's loss reacts to the loss of each row, so it multiplies the row's gradient.
# **Predict:** does this kernel need any shuffles?

# %% exercise="cross_entropy_backward"
@cuda.jit
def cross_entropy_backward(dloss, logits, target, m, s, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        label, largest, total, scale = target[row], m[row], s[row], dloss[row]
        for col in range(lane, logits.shape[1], 32):
            dx = ZERO
            TODO  # softmax minus one-hot, unless the row is ignored
            dlogits[row, col] = dx * scale


check("cross_entropy_backward", cross_entropy_backward)

# %%
hint("cross_entropy_backward")

# %% [markdown]
# Never trust a derivation. We change one score of float64 numbers a little, up and down, and see what
# becomes of the loss; and we ask PyTorch's autograd.

# %%
backward = use("cross_entropy_backward", cross_entropy_backward)
dloss, dlogits = np.full(64, 1 / 64, dtype=f), np.zeros_like(logits)
with simulator.trace() as backward_trace:
    backward[16, 128](dloss, logits, target, m, s, dlogits)
leaf = torch.tensor(logits, requires_grad=True)
torch.nn.functional.cross_entropy(leaf, torch.tensor(target)).backward()
step, place = np.zeros(logits.shape), (5, target[5])
step[place] = 1e-4
up, down = (reference.cross_entropy(logits + sign * step, target) for sign in (1, -1))
print(f"brute force {(up - down) / 2e-4:.9f}, yours {dlogits[place]:.9f}")
print(f"largest difference from autograd {np.abs(dlogits - leaf.grad.numpy()).max():.0e}")

# %%
plot.passes({"forward": forward_trace, "backward": backward_trace}, logits.nbytes,
            least={"forward": 1, "backward": 2}, title="What your two kernels ask for")

# %% [markdown]
# (What is more than the red lines: forward, the target, its score once more, and three results for each row; backward,
# four numbers of the row, for which all 32 lanes ask. With rows as short as these it looks like much. But
# it is the same address for all lanes: one request, one sector.)
#
# ### Small additions
#
# PyTorch's cross-entropy has options. All of them change only *what the truth is*. Let $q_i$ be the
# share of class $i$ in the truth; up to now it was one-hot. Then
#
# $$ L = \sum_i q_i \,(\text{lse} - x_i) \qquad\qquad dx_i = y_i \sum_j q_j - q_i $$
#
# - **label smoothing** gives the right class a little less than 1, and the rest to all alike:
#   $q_i = (1 - \varepsilon)\,[i = t] + \varepsilon / n$. A network need not become surer and surer;
# - **class weights** let rare classes count more: $q_i$ is multiplied by the weight of class $i$;
# - **ignore_index**: all $q_i$ are 0;
# - **probabilities as targets**: $q$ is given, a number for each class. It is one more array to read.
#
# Each is a line or two in a kernel, and nothing that has to be stored. The mean over the rows is a last,
# small reduction (and where rows have weights, it is divided by their sum). All of it is in
# `course_lib/kernels/cross_entropy`, and beside PyTorch:

# %%
device = "cpu" if SIMULATED else "cuda"
x = torch.tensor(logits, device=device, requires_grad=True)
labels = torch.tensor(np.where(target % 7 == 0, -100, target), device=device)
options = dict(weight=torch.linspace(0.5, 2, 200, device=device), label_smoothing=0.1)
for function in (ops.cross_entropy, torch.nn.functional.cross_entropy):
    loss = function(x, labels, **options)
    (gradient,) = torch.autograd.grad(loss, x)
    print(f"loss {loss.item():.6f}, gradient of x[5, 7] {gradient[5, 7].item():.4e}")

# %% [markdown]
# ### Measured
#
# 8,192 rows of 32,000 classes, as in training a small language model, forward and backward.
# **Predict** the ratio to PyTorch eager from the picture above.

# %%
both = measured("cross_entropy.both", (8192, 32000))
show(both, "Cross-entropy forward and backward, 8,192 rows of 32,000 classes")

# %% [markdown]
# **Explaining the gap.** Six arrays against three should be a factor of 2. What is above comes from
# PyTorch's kernels, which are not at the limit of the memory themselves for such long rows; you know
# from lesson 4 what to look for. (The copy to compare with moves three arrays here.) `torch.compile` finds
# this fusion by itself, and on the H200 it is as fast as our kernel, but for a percent or two.
#
# And the memory? An array of 8,192 × 32,000 float32 numbers has 1.05 GB. **Predict** what each way
# takes beside the scores, at the moment when it takes most:
#
# - PyTorch keeps the log-probabilities, and backward it makes their gradient and that of the scores. 3
#   arrays;
# - the fused way has the gradient only. 1 array.

# %%
array_bytes = 8192 * 32000 * 4
found = (both or {}).get("peak_extra_bytes", {})
for label, predicted in (("ours", 1), ("PyTorch eager", 3)):
    text = f"{found[label] / array_bytes:.2f} measured" if label in found else "not recorded yet"
    print(f"{label:14} arrays predicted: {predicted}, {text}")
both and print("on an {device} ({date})".format(**both["source"]))

# %% [markdown]
# For language models this often matters more than the time. The scores, with a number for each word of the
# vocabulary, are among the largest arrays of the whole network, and whoever needs three more of them
# instead of one has to train with smaller batches.

# %% [markdown]
# Another good place for a break.

# %% [markdown]
# ## 4 · Dropout, and a mask that is drawn twice
#
# **Dropout** sets each number to 0 with probability $p$, at random, while a network learns, so that
# it cannot rely on any single one. The others are multiplied by $1 / (1 - p)$, which keeps the mean as it
# was. In attention it follows a softmax:
#
# $$ y = \text{softmax}(x) \qquad z_i = y_i \cdot \frac{\text{mask}_i}{1 - p} \qquad
# \text{mask}_i = 0 \text{ with probability } p, \text{ else } 1 . $$
#
# Fusing looks easy: draw a random number for each element and write 0 if it says so. The trouble comes
# on the way back. The gradient must know *the same* mask: elements that were dropped have had no
# influence. PyTorch stores the mask, a byte for each element. **Predict** the arrays:

# %%
eager = [("softmax", 1, 1), ("dropout", 1, 1.25), ("dropout backward", 1.25, 1),
         ("softmax backward", 2, 1)]
plot.arrays_moved({"PyTorch eager": eager, "fused": [("forward", 1, 1), ("backward", 2, 1)]},
                  title="Softmax and dropout, forward and backward")

# %% [markdown]
# How can it be done *without* a stored mask?
#
# ### Random numbers by their position
#
# A usual generator is a chain. It has a state, and each call computes the next state from the last.
# The millionth number is known only after the 999,999 before it. That does not suit a GPU: a million
# threads would need a million states, kept in memory, and read and written with each draw.
#
# A **counter-based generator** has no state. It is a plain function:
#
# $$ \text{random number} = f(\text{position}, \text{key}) $$
#
# The *key* (the seed) says which sequence, the *position* which number of it. Thread 7 asks for number 7
# at once, in any order, on any day, and gets the same. So backward, the mask can simply be
# **computed again**.
#
# The function has to be such that neighbouring positions give numbers that have nothing to do with each
# other. **Philox** does it by multiplication. The product of two 32-bit numbers has 64 bits. Its upper
# half depends on all bits of both, in a way that is hard to see through. It is mixed with the
# key by *exclusive or*, the two halves change places, and all this is done ten times. Here is all of it, for
# an array of positions:

# %%
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(position, key, rounds):
    c0, c1, c2, c3 = position, *np.zeros((3, position.size), dtype=np.uint64)
    k0, k1 = np.uint64(key), np.uint64(0)
    for _ in range(rounds):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (right >> HALF) ^ c1 ^ k0, right & LOW
        c2, c3 = (left >> HALF) ^ c3 ^ k1, left & LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & LOW, (k1 + np.uint64(0xBB67AE85)) & LOW
    return np.stack([c0, c1, c2, c3], axis=1)

# %%
positions = np.arange(4096, dtype=np.uint64)
steps = (2, 3, 4, 10)
drawn = [philox(positions, 7, rounds)[:, 0].reshape(64, 64) / 2**32 for rounds in steps]
plot.images(drawn, [f"{rounds} rounds" for rounds in steps], vmin=0, vmax=1,
            title="The numbers of positions 0 to 4,095, row by row")

# %% [markdown]
# After one round the first number would not depend on the position at all: that had no turn yet. After
# two it does, but only in its last digits, too little to be seen: the picture is a single grey. After
# three, one still sees in which order the positions were counted. Ten rounds pass the hardest tests of
# randomness that its authors could find. (John Salmon and others described it in 2011. The two factors
# were searched for, and the key grows by a fixed odd number each round. PyTorch's generator on the GPU
# is the same.)
#
# Four numbers come at a time. The course's `philox_one(i, key0, key1)` gives number `i`: it is word
# `i % 4` of position `i // 4`. Let us draw the same numbers with the threads in different orders:

# %%
@cuda.jit
def draw(numbers, key0, key1):
    i = cuda.grid(1)
    if i < numbers.size:
        numbers[i] = philox_one(i, key0, key1)


found = []
for order in ("forward", "reverse", "random"):
    numbers = np.zeros(400, dtype=np.uint32)
    simulator.run(draw, 4, 128, numbers, np.uint32(7), np.uint32(0), order=order)
    found.append(numbers)
expected = philox(np.arange(100, dtype=np.uint64), 7, 10).ravel()
print([bool((each == expected).all()) for each in found], found[0][:4])

# %% [markdown]
# An element needs no more than half of such a number: with 16 random bits, the probability $p$ is met to
# within 1 in 130,000, and one call serves eight elements instead of four. So element `i` takes half of number
# `i // 2`, the lower or the upper 16 bits, and is dropped if it lies below $p \cdot 2^{16}$. These are
# whole numbers, so every chip and the simulator agree to the last bit. `kept` tells whether element `i` stays:

# %%
TWO_16, ROUND = np.float32(2**16), np.float32(0.5)


@cuda.jit(device=True)
def kept(i, seed, p):
    number = philox_one(i // 2, np.uint32(seed), np.uint32(0))
    half = number >> np.uint32(16 * (i % 2)) & np.uint32(0xFFFF)
    return half >= np.uint32(p * TWO_16 + ROUND)


@cuda.jit
def softmax_dropout(x, p, seed, z, m, s):
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        largest, total = MINUS_INF, ZERO
        for col in range(lane, n_cols, 32):
            largest, total = online_add(largest, total, x[row, col])
        largest, total = warp_online(largest, total)
        if lane == 0:
            m[row], s[row] = largest, total
        for col in range(lane, n_cols, 32):
            y = math.exp(x[row, col] - largest) / total
            keep = kept(row * n_cols + col, seed, p)
            z[row, col] = y / (ONE - p) if keep else ZERO

# %%
x = np.random.default_rng(6).normal(0, 0.6, (6, 10)).astype(f)
z, (m, s), p, seed = np.zeros_like(x), np.zeros((2, 6), dtype=f), f(0.3), 11
softmax_dropout[2, 128](x, p, seed, z, m, s)
print(f"dropped {np.mean(z == 0):.1%}; the rows sum to {z.sum(axis=1).mean():.3f} on average")
plot.tables([reference.softmax(x), z], ["softmax", "after dropout"],
            title="Six rows of ten probabilities, about 30 % of them dropped")

# %% [markdown]
# (What is left has become larger by a factor of 1 / 0.7. With numbers as few as these, 30 % is not met
# exactly, and the rows do not sum to 1. On average over many masks they do.)
#
# ### Exercise: backward, with the mask drawn again
#
# Go back in reverse order. First through dropout: $dy_i = dz_i \cdot \text{mask}_i / (1 - p)$. Then through
# softmax, as in lesson 4: $dx_i = y_i\,(dy_i - \sum_j y_j\,dy_j)$. Neither `y` nor the mask was
# stored; you have `x`, `m`, `s` and `seed`.
#
# **Predict:** is the gradient of a *dropped* element 0?

# %% exercise="softmax_dropout_backward"
@cuda.jit
def softmax_dropout_backward(dz, x, m, s, p, seed, dx):
    row, lane, n_cols = cuda.grid(1) // 32, cuda.threadIdx.x % 32, x.shape[1]
    if row < x.shape[0]:
        factor, total = ONE / (ONE - p), ZERO
        for col in range(lane, n_cols, 32):
            i = row * n_cols + col  # the element's number
            TODO  # 1. this lane's share of the sum of y · dy
        total = warp_sum(total)
        for col in range(lane, n_cols, 32):
            y = math.exp(x[row, col] - m[row]) / s[row]
            dy = TODO  # 2. what comes back through the dropout: 0 if the element was dropped
            dx[row, col] = y * (dy - total)


check("softmax_dropout_backward", softmax_dropout_backward)

# %%
hint("softmax_dropout_backward")

# %% [markdown]
# Against brute force. It only works because *both* forward passes draw the same mask as your backward
# pass:

# %%
backward = use("softmax_dropout_backward", softmax_dropout_backward)
dz, dx = np.random.default_rng(8).normal(size=x.shape).astype(f), np.zeros_like(x)
backward[2, 128](dz, x, m, s, p, seed, dx)
mask, step = (z > 0) / (1 - p), np.zeros(x.shape)
for place in ((0, 1), tuple(np.argwhere(z == 0)[0])):
    step[:] = 0
    step[place] = 1e-5
    up, down = (dz * mask * reference.softmax(x + sign * step) for sign in (1, -1))
    print(f"dx{[int(i) for i in place]}: brute force {(up - down).sum() / 2e-5:+.8f}, "
          f"yours {dx[place]:+.8f}, z {z[place]:.4f}")

# %% [markdown]
# The second element was dropped, and its gradient is not 0: its score still has a part in the sum
# below the line of all its neighbours.
#
# Which arrays does your kernel read? There is no mask among them. And the course's kernel, in
# `course_lib/kernels/softmax_dropout`, has the same seed and so drops the same elements, whichever rung
# runs:

# %%
from course_lib.kernels import softmax_dropout as course_dropout

with simulator.trace() as t:
    backward[2, 128](dz, x, m, s, p, seed, dx)
loads = [site for site in t.sites if site.space == "global" and site.op == "load"]
print("your kernel reads", ", ".join(sorted({site.array for site in loads})))
for variant in course_dropout.FORWARD:
    other, _ = course_dropout.forward(cuda.to_device(x), 0.3, seed, 0, variant=variant)
    print(f"{variant:10} drops the same: {np.array_equal(other.copy_to_host() == 0, z == 0)}")

# %% [markdown]
# ### Measured
#
# The arithmetic of Philox is not little: about 20 multiplications of 32-bit numbers, with wide results,
# for each call. **Predict:** is that still free? (The course's rung `registers` uses up to eight halves of
# each call. `naive` and `online` use one of them and throw away seven.)

# %%
show(measured("softmax_dropout.forward", (16384, 8192)),
     "Softmax and dropout, 16,384 rows of 8,192 numbers")

# %%
show(measured("softmax_dropout.backward", (16384, 8192)),
     "Its gradient: read dz and x, write dx")

# %% [markdown]
# **Explaining the gap.** Forward, 4.25 arrays against 2 predict a ratio of 2.1; backward, 5.25 against 3
# predict 1.75. What is above that comes from PyTorch's kernels, which are not at their own limit. Our
# bars are about as near to the copy as that of softmax alone in lesson 4. So Philox is free, as long as
# numbers have 32 bits. With 16 bits there are half as many bytes to move, and as many numbers to draw.
# **Predict** what this does to the share of the copy:

# %%
where = "softmax_dropout has not been recorded on a GPU yet"
for name in ("softmax_dropout.forward", "softmax_dropout.backward"):
    for each in bench.find(recorded, name=name, shape=(16384, 8192)):
        us = {row["label"]: row["microseconds"] for row in each["rows"]}
        own = us[each["default"]]
        print(f"{name:25}{each['dtype']:9}{each['copy_microseconds'] / own:5.0%} of the copy; "
              f"eager takes {us['PyTorch eager'] / own:.2f} times as long, "
              f"torch.compile {us['torch.compile'] / own:.2f} times")
        where = f"on an {recorded['device']['name']} ({results_table.when(each)})"
print(where)

# %% [markdown]
# Now it has a price: our kernel stays well below the copy, since it is busy drawing. Backward, the gain over
# eager is no more than the arrays predict (5.5 against 3, as the mask's byte is half of a 16-bit number), and
# `torch.compile` takes less time than we do. To compute again what one could have stored is a good bargain as
# long as memory is the limit. FlashAttention does it with the whole matrix of scores.

# %% [markdown]
# ## 5 · Where it does not pay
#
# **1. Where arithmetic is the limit.** Fusing saves bytes. If a kernel computes so much that memory waits
# for it, saved bytes save no time. Your own prediction, for chains of three kernels with more and more
# work for each number; **predict** where the gain begins to fall:

# %%
work = np.unique(np.geomspace(1, 2000, 60).astype(int))
gains = []
for flops in work:
    chain_us, fused_us = predict(100_000_000, n_operations=3, flops=int(flops), **H200)
    gains.append(chain_us / fused_us)
plot.curves(work, {"three kernels": np.array(gains)}, log="x",
            xlabel="operations per number in each kernel",
            ylabel="times as fast when fused", title="Fusing helps where memory is the limit")

# %% [markdown]
# It falls before a single kernel of the chain gets to the ridge, since the fused one has the work of all
# three. Matrix products are at the right end, with thousands of operations per number. What is
# fused to one of them saves its own bytes and no more. (That can be worth it: attention does so, since
# its scores would not fit anywhere.)
#
# **2. Where all rows are needed before the first result.** In training, batch normalisation needs mean
# and variance of the *batch*: of a whole column. No element can be normalised before the last row
# was read. Between the two there must be a barrier for the whole grid, and by then the first rows have
# long left the registers. They are read again, fused or not. That is why section 2 was about
# inference. Softmax is kinder: its reduction stays within a row, which one team can hold.
#
# **3. Where others want the result in between.** If `z` is read by a second layer as well (or is needed for
# its gradient), it has to be written anyway, and fusing saves one reading in place of a reading
# and a writing. Or it is computed again, as the mask was. That is a matter of counting, case
# by case.
#
# **4. Where registers run out.** Everything fused wants registers at the same time. Say a kernel needs 24
# for itself, and holds 16 numbers of each array that it works on. How many threads fit, by the
# function of lesson 4?

# %%
blocks = use("blocks_per_multiprocessor")
print("arrays held  registers  threads  KB held on each multiprocessor")
for arrays in range(1, 9):
    registers = 24 + 16 * arrays
    threads = 256 * blocks(256, registers)
    print(f"{arrays:11}{registers:11}{threads:9,}{threads * arrays * 16 * 4 / 1024:12,.0f}")

# %% [markdown]
# The KB in the last column are what can be in flight, and that stays enough for a while. But with few
# threads there is nobody left who loads while others compute; and beyond 255 registers a thread's
# variables *spill* into local memory. Each use of such a variable is a load or a store, through the
# caches and, when they are full, to the device's memory. Then the fused kernel may move more bytes than
# the chain.
#
# **5. Where arrays are small, on the device alone.** There, bytes do not matter at all. What counts is
# how *many* kernels there are. **Predict** both times for 128 rows of 200 numbers, in a chain of three.

# %%
for n in (128 * 200, 1024 * 1000, 16384 * 8192):
    chain_us, fused_us = predict(n, n_operations=3, flops=5, **H200)
    launches = 100 * H200["launch_us"] * 3 / chain_us
    print(f"{n:11,} numbers: {chain_us:7.1f} µs, fused {fused_us:6.1f} µs; "
          f"{launches:3.0f} % of the chain is starting and ending")

# %% [markdown]
# By this prediction the ratio is about 3 everywhere, for two different reasons: few bytes at one end,
# few launches at the other. **Predict** what is measured for cross-entropy, small and large:

# %%
for shape in ((128, 200), (16384, 1000), (8192, 32000)):
    record = measured("cross_entropy.both", shape)
    times = {row["label"]: row["microseconds"] for row in record["rows"]} if record else {}
    for label in [each for each in times if each not in ("naive", "online")]:
        print(f"{shape[0]:6,} × {shape[1]:6,}: {label:14} {times[label]:9,.1f} µs on the device, "
              f"{times[label] / times['vectorised']:.2f} times ours")
record and print("on an {device} ({date})".format(**record["source"]))

# %% [markdown]
# On the device, fusing gains *least* for the smallest, against the prediction. To start, to wait for a
# row and to reduce it takes some microseconds, forward and backward, and of these a fused kernel saves
# only a part: our 2 µs for each kernel, and the same for the fused one, were too simple. And
# `torch.compile` is faster than our kernels in the two smaller sizes; in the large one the two are equal.
#
# What small arrays do save is not in this table, as all times of this course are without the *host*. In
# eager mode each kernel of a chain costs Python some microseconds (lesson 4), more than such a kernel
# runs. Whoever replays a CUDA graph has saved these already.
#
# ### Predicted and measured
#
# All fusions of this lesson in one table: the ratio that the arrays predict, and the one that was
# measured against PyTorch eager.

# %%
ratios = {("bn_relu_softmax.forward", (16384, 8192)): 6 / 2,
          ("bn_relu_softmax.backward", (16384, 8192)): 11 / 4,
          ("softmax_dropout.forward", (16384, 8192)): 4.25 / 2,
          ("softmax_dropout.backward", (16384, 8192)): 5.25 / 3,
          ("cross_entropy.both", (8192, 32000)): 6 / 3}
records = [measured(name, shape) for name, shape in ratios]
print(f"{'':26}predicted  measured")
for ((name, _), ratio), record in zip(ratios.items(), records, strict=True):
    us = {row["label"]: row["microseconds"] for row in record["rows"]} if record else {}
    found = f"{us['PyTorch eager'] / us[record['default']]:.2f}" if us else "not yet"
    print(f"{name:26}{ratio:9.2f}{found:>10}")
record and print("on an {device} ({date})".format(**record["source"]))

# %% [markdown]
# (On the H200 all measured ratios are above the predicted ones. The prediction takes each kernel of a chain
# to be at the limit of the memory, and PyTorch's are not all there.)

# %% [markdown]
# ## What the profiler says
#
# What a profiler would count of your kernels, your tracer has counted. Here are sectors, in sizes of the
# array, beside what you predicted. (Sectors of the arrays only, without what is small.)

# %%
print(f"{'kernel':24}{'loaded':>8}{'stored':>8}   predicted")
kernels = {"bn_relu_softmax": (fused_trace, 64 * 128, "1 and 1"),
           "cross_entropy": (forward_trace, 64 * 200, "1 and 0"),
           "cross_entropy_backward": (backward_trace, 64 * 200, "1 and 1")}
for name, (trace, n, predicted) in kernels.items():
    moved = {"load": 0.0, "store": 0.0}
    for site in trace.sites:
        if site.space == "global" and site.array in ("x", "y", "logits", "dlogits"):
            moved[site.op] += 32 * site.sectors / (4 * n)
    print(f"{name:24}{moved['load']:8.2f}{moved['store']:8.2f}   {predicted}")

# %% [markdown]
# (The forward pass of cross-entropy has loaded a little more than 1, for the target's score: one sector
# in each row, which was read a moment ago.)
#
# When you have a fused kernel of your own before a real profiler, look at three lines. *Read* and *written*
# should be what you have counted; if they are more, something was read twice or has spilled. *Memory busy*
# should be as high as for a copy; if it is not, arithmetic has become the limit, or too few
# threads fit. And *registers* tells which of the two.
#
# ## Where the real libraries go further
#
# - `torch.compile` fuses what it is shown: operations on single elements with each other, and with the
#   reductions next to them. It also weighs what to store for the way back and what to compute again,
#   dropout's mask included. It is the first thing to try. Write a kernel where its bar stays
#   low, or where you know of a way to compute that nobody has told it.
# - **Liger-Kernel** and others go one step further in cross-entropy. The scores themselves are the
#   product of two matrices. They are computed for a few rows at a time, turned into loss *and* gradient
#   at once, and thrown away. The largest array of a language model never exists.
# - **FlashAttention** fuses two matrix products with the softmax and the dropout between them: online
#   softmax, Philox, and backward everything computed again from `lse`.
# - **cuDNN** takes a graph of operations and builds the fused kernel for it, and compilers for
#   inference (TensorRT) fold batch normalisation right into the weights of the layer before.
#
# ## Three questions
#
# <details><summary>1. In softmax with dropout, could the backward pass use the stored output
# <code>z</code> instead of <code>x</code>, since <code>y = z · (1 − p)</code>?</summary>
#
# Only for elements that were kept. Where <code>z</code> is 0 the probability <code>y</code> is lost,
# and the gradient of a dropped element needs it. PyTorch stores <code>y</code> for that reason; the
# fused kernel computes it from <code>x</code>.
# </details>
#
# <details><summary>2. Could the forward pass of cross-entropy write the gradient straight away, so
# that the scores are read only once?</summary>
#
# Nearly. The gradient needs <code>m</code> and <code>s</code> of the whole row, so the row has to be held
# (in registers, in shared memory) until both are known; then two arrays are moved instead of three. It
# also needs <code>dloss</code>, which is not known yet. But that is only a factor, and may be multiplied
# in later. Liger-Kernel does so, and even writes the gradient over the scores.
# </details>
#
# <details><summary>3. Two GPUs train the same network with the same seed for dropout. Is that
# good?</summary>
#
# No. Both would drop the same places, so there is less chance in it than it seems. Each should have a key
# or a range of positions of its own. The same is true of two layers, and of two training steps: the
# course's operators advance the position after each use.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# You have taken one operation from a thread per row to the limit of the chip, and past it. The same
# questions (which bytes must move, which are in flight, what need not be stored) wait in every other
# layer of a network: in normalisations, convolutions, and in attention.
