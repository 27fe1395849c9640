# %% [markdown]
# # 21 · More than one GPU
#
# **After this lesson** you can say what devices must exchange that train one network together, and prove that
# their weights are those of one device, write the ring all-reduce with its flags and fences, count what each way
# of exchanging costs, hide the exchange behind the backward pass, choose the learning rate for a larger
# batch, and say how far a model of all this can be trusted.
#
# **You need** [lesson 11](11_fashion_mnist.ipynb) (a training step), [lesson 6](06_squeeze_excitation.ipynb)
# (blocks that wait for each other, fences) and [lesson 7](07_efficientnet_drop_in.ipynb) (Amdahl's law).
#
# **Time:** 120 minutes; there is a good place to pause after section 4. All cells together run in about a
# minute on a CPU, and you need no second GPU: blocks of the simulator stand for devices, and two processes train on
# your CPU. The words are collected in the [glossary](glossary.md).

# %%
import inspect
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

# %%
from course_lib import SIMULATED, bench, cuda, models, plot, results_table, simulator
from course_lib.kernels.all_reduce import all_reduce
from course_lib.teach import TODO, check, hint, progress, solution, use

f, ZERO = np.float32, np.float32(0)

# %% [markdown]
# ## 1 · One network, two devices
#
# Training takes too long, and there is a second GPU. The simplest plan is called **data parallelism**: each device has a copy of
# the whole network. A batch is cut into as many parts as there are devices. Each device runs the forward and the backward pass for its own part.
# Then all must take *the same* step. Otherwise the copies drift apart, and there are two networks.
#
# A device, or the process that drives it, is called a **rank**. Ranks have numbers, from 0 on.
#
# What must they exchange? The loss of a batch is a mean over its examples, and the derivative of a sum is the sum of the
# derivatives. **Predict:** 12 examples, a line with a slope and an intercept. Device 0 has 6 of the examples and device 1 the
# other 6. How do you compute the gradient of all 12 from the two gradients?

# %%
rng = np.random.default_rng(0)
x = rng.uniform(-1, 2, 12)
y = 3 * x - 1 + rng.normal(size=12)


def gradient(rows, slope=0.5, intercept=0.0):
    error = slope * x[rows] + intercept - y[rows]  # the loss is the mean of error²
    return np.array([(2 * error * x[rows]).mean(), (2 * error).mean()])

# %%
halves = gradient(slice(0, 6)), gradient(slice(6, 12))
print("device 0:             ", halves[0].round(4))
print("device 1:             ", halves[1].round(4))
print("mean of both:         ", np.mean(halves, axis=0).round(4))
print("all 12 in one batch:  ", gradient(slice(0, 12)).round(4))
uneven = gradient(slice(0, 9)), gradient(slice(9, 12))
print("9 and 3, plain mean:  ", np.mean(uneven, axis=0).round(4), " wrong")

# %% [markdown]
# The mean of the gradients is the gradient of the joint batch, if the parts are equally large. Otherwise each must count with its share. (The last
# batch of an epoch is the one that is uneven, and a program that forgets it trains a little wrongly without a word.)
#
# So after each backward pass the devices exchange their **gradients**, as many numbers as the network has weights. The optimiser's state need not be
# exchanged: whoever starts with the same weights and takes the same steps has the same state.
#
# **Batch normalisation** is different. It computes the mean and variance of each channel *of the batch*, in the forward pass. Each device
# sees only its own part, so each normalises by other numbers. Nothing that is done with gradients afterwards makes up for that.
# **Predict:** is the variance of the joint batch the mean of the two variances?

# %%
low, high = rng.normal(0, 1, 1000), rng.normal(4, 1, 1000)
print(f"variances {low.var():.2f} and {high.var():.2f}, joint {np.concatenate([low, high]).var():.2f}")

# %% [markdown]
# ### Exercise: the joint batch
#
# Each row belongs to a device. `gradients` is (devices, weights): the gradients of each device's mean loss. `means` and `variances` are (devices, channels): the
# variances as `np.var` gives them, divided by n and not by n − 1. `counts` is (devices,): how many examples each device had. Return the gradient, the means and
# the variances of the joint batch.

# %% exercise="joint_batch"
def joint_batch(gradients, means, variances, counts):
    share = TODO  # the weight of each device
    gradient, mean = TODO, TODO
    variance = TODO
    return gradient, mean, variance


check("joint_batch", joint_batch)

# %%
hint("joint_batch")

# %% [markdown]
# **SyncBatchNorm** does this in the forward pass: it exchanges two numbers for each channel, and waits, in each such layer. Most people let each
# device normalise by its own statistics, which works well as long as each has enough examples (32 in the paper of section 7). In the course's library it
# is an option, `--sync-batch-norm`.

# %% [markdown]
# ## 2 · Two processes on your CPU
#
# Here is a training loop that does not know how many devices there are. `rows` says which examples are its own, `exchange` is called with each gradient.

# %%
def train(rows, exchange, norm):
    torch.manual_seed(0)  # the same first weights everywhere
    x, y = torch.randn(32, 6).double(), torch.randn(32, 1).double()
    model = nn.Sequential(nn.Linear(6, 8), norm(8), nn.ReLU(), nn.Linear(8, 1)).double()
    for _ in range(5):
        model.zero_grad()
        (model(x[rows]) - y[rows]).square().mean().backward()
        for weight in model.parameters():
            exchange(weight.grad)
            weight.data -= 0.1 * weight.grad
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])

# %% [markdown]
# The script of a rank is that function and the lines below. `torchrun`, which comes with PyTorch, starts it twice and tells each process its rank. **gloo** is
# the library that exchanges between CPUs; between GPUs it is **NCCL**. An exchange after which all have the sum of all is called an **all-reduce**.

# %%
RANK = """
distributed.init_process_group("gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()

def exchange(gradient):
    distributed.all_reduce(gradient)  # in place: the sum over all ranks
    gradient /= ranks

for norm in (nn.Identity, nn.BatchNorm1d):
    found = train(slice(rank, None, ranks), exchange, norm)  # of two ranks, every second example
    torch.save(found, f"{sys.argv[1]}/{norm.__name__}-{rank}.pt")
distributed.destroy_process_group()
"""

# %% [markdown]
# We run it twice, without and with a batch normalisation, and compare with one process that has all 32 examples. **Predict** for both: do the two ranks agree with each
# other? Do they agree with the one process? (To start three Pythons with PyTorch takes 15 to 40 seconds on two cores.)

# %%
folder = Path(tempfile.mkdtemp())
script = folder / "rank.py"
imports = "import sys\nimport torch\nfrom torch import distributed, nn\n\n"
script.write_text(imports + inspect.getsource(train) + RANK, encoding="utf-8")
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
done = subprocess.run([*torchrun, script, folder], capture_output=True, text=True)
print("both ranks are done" if done.returncode == 0 else done.stderr)

# %%
for norm in (nn.Identity, nn.BatchNorm1d):
    one = train(slice(None), lambda gradient: None, norm)
    ranks = [torch.load(folder / f"{norm.__name__}-{rank}.pt") for rank in range(2)]
    apart, off = (ranks[0] - ranks[1]).abs().max(), (ranks[0] - one).abs().max()
    print(f"{norm.__name__:12} the ranks differ by {apart:.0e}, from one process by "
          f"{'less than 1e-12' if off < 1e-12 else f'{off:.3f}'}")

# %% [markdown]
# Two ranks are one device with the joint batch, but for the rounding of a sum whose order is another one. With batch normalisation they still agree with each other, and train a
# slightly different network.
#
# Who writes such a program by hand must think of **four more things**: all ranks shuffle the examples in the same way (`set_epoch` of PyTorch's sampler); the running
# statistics of one rank are kept; rank 0 alone writes the checkpoint; and the last batch is uneven. `python -m course_lib train` handles all four under `torchrun`;
# `docs/commands.md` tells how.
#
# ## 3 · An all-reduce of your own
#
# What is inside `all_reduce`? We look at it where nothing is hidden: in the simulator, with **a block for each device**. Row r of an array is the memory of device r. A store to another row
# goes over the link to that device. For our purpose two blocks of a launch are like two GPUs: they run at the same time, in no promised order, and
# no barrier holds them together.
#
# The first way, **gather**: each device writes its gradient into everybody's inbox, and adds up what it finds in its own. The problem first. **Predict** the result of this kernel:

# %%
@cuda.jit
def hasty(x, inbox, y):
    rank, ranks, t = cuda.blockIdx.x, x.shape[0], cuda.threadIdx.x
    for other in range(ranks):
        for i in range(t, x.shape[1], cuda.blockDim.x):
            inbox[other, rank, i] = x[rank, i]
    cuda.syncthreads()
    for i in range(t, x.shape[1], cuda.blockDim.x):
        total = ZERO
        for other in range(ranks):
            total += inbox[rank, other, i]
        y[rank, i] = total

# %%
gradients = rng.normal(size=(4, 96)).astype(f)  # of four devices
for order in ("forward", "reverse"):
    inbox, y = np.zeros((4, 4, 96), f), np.zeros_like(gradients)
    with simulator.options(order=order), simulator.sanitize() as report:
        hasty[4, 32](gradients, inbox, y)
    right = np.isclose(y, gradients.sum(0), atol=1e-5).all(1)
    print(f"{order}: right on devices {[int(rank) for rank in np.flatnonzero(right)]}")
print(report.findings[0].message)

# %% [markdown]
# Only the block that runs last has a full inbox. The barrier waits for the threads of one block, and says nothing of the others. The usual cure, two launches, does not help between devices: *my* launch
# has ended, is yours? Somebody has to tell.
#
# **A flag for each device** counts what has arrived there. From [lesson 6](06_squeeze_excitation.ipynb) you know the four parts of it, and each is there for a reason:
#
# 1. `cuda.syncthreads()`: *all* threads of the block have written,
# 2. `cuda.threadfence()`: what they wrote is seen before what comes next,
# 3. `cuda.atomic.add(arrived, …, 1)`: the flag, at the device that waits for it,
# 4. and there one thread looks at the flag until it is large enough, puts a fence, and a barrier lets the others go on.
#
# The fourth is the same everywhere, so here it is as a function:

# %%
@cuda.jit(device=True)
def wait_for(arrived, rank, number):
    """All threads of the block wait until `number` pieces have arrived at device `rank`."""
    if cuda.threadIdx.x == 0:
        while cuda.atomic.add(arrived, rank, 0) < number:
            pass
        cuda.threadfence()  # what is read below is no older than the flag
    cuda.syncthreads()

# %%
@cuda.jit
def all_reduce_gather(x, inbox, arrived, y):
    rank, ranks, t = cuda.blockIdx.x, x.shape[0], cuda.threadIdx.x
    for step in range(1, ranks):
        other = (rank + step) % ranks
        for i in range(t, x.shape[1], cuda.blockDim.x):
            inbox[other, rank, i] = x[rank, i]
        cuda.syncthreads()
        if t == 0:
            cuda.threadfence()
            cuda.atomic.add(arrived, other, 1)
    wait_for(arrived, rank, ranks - 1)
    for i in range(t, x.shape[1], cuda.blockDim.x):
        total = ZERO
        for other in range(ranks):  # in the same order on all devices
            total += x[rank, i] if other == rank else inbox[rank, other, i]
        y[rank, i] = total

# %%
inbox, y = np.zeros((4, 4, 96), f), np.zeros_like(gradients)
with simulator.sanitize() as report:
    all_reduce_gather[4, 32](gradients, inbox, np.zeros(4, np.int32), y)
print(f"largest error {abs(y - gradients.sum(0)).max():.0e}, findings {len(report.findings)}")
print("all devices have the same bits:", len({row.tobytes() for row in y}) == 1)

# %% [markdown]
# The last line matters. Floats added in another order give another sum (lesson 2). If each device began with its own number, the devices would have slightly different gradients, hence slightly different
# weights, and would drift apart without anybody noticing. So all add in the same order.
#
# **Count:** each of $R$ devices sends all its $n$ numbers to each of the $R - 1$ others. With 4 devices that is three times the gradient, with 8 seven times. Each device does the whole
# addition, too. Can it be less?
#
# ## 4 · The ring
#
# Cut the gradient into $R$ **pieces**. If $R$ does not divide $n$, the last pieces are shorter; in the exercises all are equally long. Each device is made responsible for one of them. In the first half, **reduce-scatter**, the sums go round: each device sends a piece to its right
# neighbour, which adds its own numbers to it and passes the sum on. After $R - 1$ steps device r has the whole sum of piece r. In the second half, **all-gather**,
# the finished pieces go round in the same way. Here is how many devices' numbers are in each piece, for four devices:

# %%
def reduce_scatter_steps(ranks):
    terms = np.ones((ranks, ranks), int)  # [device, piece]
    yield terms.copy()
    for step in range(ranks - 1):
        before = terms.copy()
        for rank in range(ranks):
            right, piece = (rank + 1) % ranks, (rank - 1 - step) % ranks
            terms[right, piece] = before[rank, piece] + 1
        yield terms.copy()

# %%
plot.tables(list(reduce_scatter_steps(4)), ["at first", "after step 0", "after step 1", "after step 2"],
            xlabel="piece", ylabel="device", title="Reduce-scatter: how many devices' numbers are in the sum")

# %% [markdown]
# Follow piece 0. It starts at device 1, goes to 2 and 3, and ends at device 0 with four terms. In each step each device sends one piece and gets one: all links are busy, and none is crowded.
#
# **Predict:** how many numbers does a device send in both halves together, if the gradient has $n$ numbers? What becomes of that with 1,000 devices?
#
# ### Exercise: reduce-scatter
#
# Row r of every array is the memory of device r. **A device may read its own row alone, and write to its own row and to its right neighbour's.** In the simulator a block could reach all rows, so the
# check looks at who reads and writes which row. (A ring that goes to the left throughout is as good.)
#
# `x` is (devices, pieces, n), with as many pieces as devices. `inbox` is (devices, ranks − 1, n): what arrives in a step has a place of its own, so that nothing is overwritten. `arrived` is
# (devices,), and starts at 0. `y` is (devices, n). Step `ranks - 1` sends nothing; there the device's own piece is complete, and goes to `y`.
#
# Which piece is handled in which step, when must you wait, and for how many arrivals? Who is told, and what must come before? If a part is missing, the check names the two lines that nothing
# orders, or the line in which a device waits for ever.

# %% exercise="ring_reduce_scatter"
@cuda.jit
def ring_reduce_scatter(x, inbox, arrived, y):
    rank, ranks, t = cuda.blockIdx.x, x.shape[0], cuda.threadIdx.x
    right = (rank + 1) % ranks
    for step in range(ranks):
        piece = TODO  # 1. in the last step, the device's own
        TODO  # 2. wait for what this step needs
        for i in range(t, x.shape[2], cuda.blockDim.x):
            total = x[rank, piece, i]
            if step > 0:
                total += inbox[rank, step - 1, i]
            if step < ranks - 1:
                inbox[right, step, i] = total
            else:
                y[rank, i] = total
        TODO  # 3. tell the right neighbour, if it was sent something


check("ring_reduce_scatter", ring_reduce_scatter)

# %%
hint("ring_reduce_scatter")

# %% [markdown]
# ### Exercise: all-gather
#
# `part` is (devices, n), the piece that each device has. `y` is (devices, pieces, n): in the end each device has all pieces. `arrived` is (devices,), and starts at 0. What arrives is final, so it is
# written to its place in the neighbour's `y` at once, and passed on from there. Again a device may read its own row alone, and write to its own and to its right neighbour's.

# %% exercise="ring_all_gather"
@cuda.jit
def ring_all_gather(part, arrived, y):
    rank, ranks, t = cuda.blockIdx.x, part.shape[0], cuda.threadIdx.x
    right = (rank + 1) % ranks
    for i in range(t, part.shape[1], cuda.blockDim.x):
        y[rank, rank, i] = part[rank, i]
    for step in range(ranks - 1):
        piece = TODO
        TODO  # wait
        TODO  # pass the piece on
        TODO  # tell


check("ring_all_gather", ring_all_gather)

# %%
hint("ring_all_gather")

# %%
scatter, gather = use("ring_reduce_scatter", ring_reduce_scatter), use("ring_all_gather", ring_all_gather)
inbox, part, total = np.zeros((4, 3, 24), f), np.zeros((4, 24), f), np.zeros((4, 4, 24), f)
with simulator.trace() as ring_trace:
    scatter[4, 32](gradients.reshape(4, 4, 24), inbox, np.zeros(4, np.int32), part)
    gather[4, 32](part, np.zeros(4, np.int32), total)
total = total.reshape(4, 96)
print(f"largest error {abs(total - gradients.sum(0)).max():.0e}")
print("all devices have the same bits:", len({row.tobytes() for row in total}) == 1)

# %% [markdown]
# That all have the same bits needs no care here: each piece is added up *once*, by one path through the ring, and then copied.
#
# Both ways by the tracer: what each device sends, in sizes of its gradient. It counts the stores of both kernels; what a device keeps for itself is left out.

# %%
def sent(trace, kept):
    """Bytes that a device sends, on average, in sizes of the gradient; `kept` stay at home."""
    stored = sum(site.bytes for site in trace.sites
                 if site.op == "store" and site.space == "global")
    return (stored - kept) / 4 / gradients[0].nbytes


row = gradients[0].nbytes
with simulator.trace() as gather_trace:
    all_reduce_gather[4, 32](gradients, np.zeros((4, 4, 96), f), np.zeros(4, np.int32), y)
print(f"gather: counted {sent(gather_trace, 4 * row):.2f}, predicted R − 1 = {4 - 1}")
print(f"ring:   counted {sent(ring_trace, 2 * row):.2f}, predicted 2 (R − 1) / R = {2 * 3 / 4:.2f}")

# %% [markdown]
# $2 (R - 1) / R$: less than two sizes of the gradient, **however many devices there are**. No all-reduce in which devices exchange messages moves less (Patarasuk and Yuan, 2009). The price is the number
# of steps: $2(R - 1)$, one after another, and each message takes some time however small it is.
#
# The library has both ways as the rungs of `course_lib.kernels.all_reduce`. They work in place, and on GPUs that can reach each other's memory. On one device and in the simulator, groups of blocks stand for the ranks, as here:

# %%
device = "cpu" if SIMULATED else "cuda"
for variant in ("gather", "ring"):
    buffers = torch.tensor(gradients, device=device)
    all_reduce(buffers, variant=variant)
    found = buffers.cpu().numpy()
    print(f"{variant:8} largest error {abs(found - gradients.sum(0)).max():.0e}, "
          f"the same bits on all ranks: {len({row.tobytes() for row in found}) == 1}")

# %% [markdown]
# Read `ring.py` there: you know every part of it. It moves 16 bytes at a time, gives a rank many blocks (each with a part of the piece, and a flag of its own), and lets the rank end with piece r + 1 instead of r. And it has
# three things that your kernels leave out. Between two GPUs the fence is `cuda.threadfence_system()`, since `threadfence` reaches one GPU only. Between GPUs
# each kernel must wait for its last piece before it ends. Here all ranks are one launch, which ends only when all have ended. And nobody clears flags and inboxes for each call: flags count on from call to call, in **epochs**. A good place for a break.
#
# ## 5 · What it costs
#
# A simple model: a message of b bytes takes a **latency**, and then b divided by the bandwidth of the link. A link carries both directions at once. Three ways, between R devices (2 or more):
#
# - **gather**: all R − 1 messages set out together, and so the latency counts once, but they all have to come in through the link of the device,
# - **tree**: in each round half of the devices that are left hand on all they have to the other half, until one has the sum. Then the same rounds backwards. If R is no power of two, the number of rounds is rounded up,
# - **ring**: 2 (R − 1) steps one after another, with an R-th of the bytes in each.
#
# ### Exercise: the model
#
# `latency` is in µs, `gbps` in GB/s. Return the µs of each.

# %% exercise="all_reduce_cost"
def all_reduce_cost(n_bytes, ranks, latency, gbps):
    per_us = 1000 * gbps  # bytes in a microsecond
    gather = TODO
    tree = TODO
    ring = TODO
    return gather, tree, ring


check("all_reduce_cost", all_reduce_cost)

# %%
hint("all_reduce_cost")

# %% [markdown]
# 8 devices, with a latency of 5 µs and 100 GB/s. These two numbers are **assumptions**, round ones for devices inside one machine; nothing was measured. **Predict** which way is best for 1 kB, and which for 100 MB.

# %%
cost, LATENCY, GBPS = use("all_reduce_cost", all_reduce_cost), 5, 100
sizes = np.logspace(3, 9, 25)
times = np.array([cost(int(size), 8, LATENCY, GBPS) for size in sizes]).T
plot.curves(sizes, dict(zip(("gather", "tree", "ring"), times, strict=True)), log=True,
            xlabel="size of the gradient (bytes)", ylabel="time (µs)",
            title="A model: all-reduce between 8 devices")

# %% [markdown]
# For small messages the number of steps decides, for large ones the bytes. So libraries have all of them and choose by size.
#
# **One exchange, or one for each layer?** A network has many small gradients. Here are those of lesson 15's ResNet-18:

# %%
with torch.device("meta"):  # shapes alone, no numbers
    weights = list(models.resnet18_small(layers=nn).parameters())
layers = [4 * weight.numel() for weight in weights]
flat, each = cost(sum(layers), 8, LATENCY, GBPS)[2], [cost(n, 8, LATENCY, GBPS)[2] for n in layers]
print(f"{len(layers)} gradients, {sum(layers) / 1e6:.0f} MB; half of them are below {np.median(layers) / 1e3:.0f} kB")
print(f"by the model: all in one ring {flat:,.0f} µs, each in its own {sum(each):,.0f} µs, "
      f"of which latency {len(layers) * 2 * 7 * LATENCY:,} µs")

# %% [markdown]
# Many small exchanges are mostly latency. So the gradients are copied into one **flat** array and exchanged together. In the library `course_lib.train.ranks.summed` does that in a few lines: `torch.cat`, one `all_reduce`, and back.
#
# ## 6 · Hidden behind the backward pass
#
# But a flat exchange can start only when the *last* gradient is there. The backward pass begins with the last layer, and that layer's gradient is ready long before the first one's. While the GPU computes on,
# the link could be busy. So both extremes are wrong, and PyTorch's DistributedDataParallel goes between: gradients are collected in **buckets** of about 25 MB, in the order in which they get ready, and a bucket is sent as soon as it
# is full (arXiv 2006.15704).
#
# A model of one step: 12 layers of 4 MB, each with a backward pass of 600 µs (assumed), and a link that takes one exchange at a time.

# %%
def step_spans(per_bucket, n_layers=12, backward=600, n_bytes=4e6):
    spans, link = [], 0
    for first in range(0, n_layers, per_bucket):
        layers = min(per_bucket, n_layers - first)
        ready = (first + layers) * backward
        name = f"{n_layers - first - layers}–{n_layers - first - 1}" if layers > 1 else f"{n_layers - 1 - first}"
        begin = max(ready, link)
        link = begin + cost(layers * n_bytes, 8, 40, 20)[2]  # a slower link: 40 µs, 20 GB/s
        spans += [("backward", first * backward, ready, name), ("exchange", begin, link, name)]
    return spans

# %%
named = {"all in one": 12, "a bucket of 3": 3, "each layer": 1}
spans = [(f"{actor}, {name}", start, end, label) for name, size in named.items()
         for actor, start, end, label in sorted(step_spans(size))]
plot.timeline(spans, by_actor=True, title="A model: layers computed, and layers exchanged")

# %%
for name, size in named.items():
    print(f"{name:14} the step waits {step_spans(size)[-1][2] - 12 * 600:,.0f} µs for the exchange")

# %% [markdown]
# What remains visible is the last bucket, that of the *first* layers, and whatever the link is behind. An exchange that is hidden is not free, by the way: its kernels take multiprocessors and bandwidth from the backward pass.
#
# In the last row the exchange of a layer takes 910 µs, and its backward pass 600 µs. But 560 µs of the exchange are latency, and a larger bucket saves most of that.
#
# **Predict** what the picture looks like if a layer's *bytes alone* take longer on the link than its backward pass (with 5 GB/s 1,400 µs). Then no bucket size hides the rest. Change `20` in the code to `5` to see it.
#
# ## 7 · The larger batch
#
# Eight devices with 32 examples each make a batch of 256, and an epoch has an eighth of the steps. If the learning rate stays as it is, the weights move an eighth of the way. **The linear scaling rule** (Goyal et al. 2017,
# arXiv 1706.02677): *if the batch is k times as large, make the learning rate k times as large.* The reason: as long as the weights hardly change meanwhile, k small steps with gradients $g_1 \ldots g_k$ and one step with k times the rate and their mean
# go to nearly the same place:
#
# $$ w - \eta \, (g_1 + g_2 + \ldots + g_k) \;\approx\; w - k \eta \cdot \frac{g_1 + g_2 + \ldots + g_k}{k} . $$
#
# Least squares with 20 weights, four epochs of 4,096 examples. **Predict** the order of the three curves for the batches of 16 and 256. The rule alone does not tell where the fourth lies, that of one batch of
# 4,096 with 256 times the rate. For that you need the length of a step: the inputs have variance 1, so a step on a large batch multiplies the distance from the best weights by about 1 − 2 · rate. What is that
# for a rate of 0.896?

# %%
inputs = rng.normal(size=(4096, 20))
targets = inputs @ rng.normal(size=20) + rng.normal(size=4096)


def losses_of(batch, rate, epochs=4):
    weight, losses = np.zeros(20), []
    for step in range(epochs * 4096 // batch):
        rows = np.arange(step * batch, (step + 1) * batch) % 4096
        error = inputs[rows] @ weight - targets[rows]
        weight -= rate * 2 * inputs[rows].T @ error / batch
        losses.append(((inputs @ weight - targets) ** 2).mean())
    return losses

# %%
runs = {"batch 16, rate 0.0035": (16, 0.0035), "batch 256, the same rate": (256, 0.0035),
        "batch 256, 16 times the rate": (256, 0.056), "batch 4096, 256 times the rate": (4096, 0.896)}
found = {name: losses_of(*run) for name, run in runs.items()}
plot.losses([(name, batch * np.arange(1, len(found[name]) + 1) / 4096, found[name])
             for name, (batch, _) in runs.items()], xlabel="epoch",
            title="The same examples, in batches of another size")

# %% [markdown]
# With 16 times the batch and 16 times the rate the curve lies on that of the small batch. With 256 times it no longer does: a step multiplies the distance by about −0.8. It is so long that it goes past the minimum, and the next one comes
# back past it (the loss falls all the same, because each step ends a little nearer). For each problem there is a batch beyond which the rule
# ends. Goyal et al. trained ResNet-50 on ImageNet with batches of up to 8,192 pictures on 256 GPUs, and lost no accuracy against a batch of 256. At the beginning the weights change quickly and the rule holds least, so they
# let the rate rise to its full size over the first five epochs: the **warm-up**. `python -m course_lib train images` has it as `--warm-up-epochs`.
#
# Look at the formula again: $k$ small steps with the same sum. A program that *adds* the gradients of its devices where it should have averaged them has multiplied its rate by k without noticing. It works with two devices, and diverges with
# sixteen.
#
# ## 8 · Amdahl again
#
# How many times as fast are R devices? What does not become shorter with R is the exchange. Two questions, which are often mixed up:
#
# - **strong scaling**: the batch stays as it is, each device has an R-th of it. The computing becomes shorter, and the exchange does not,
# - **weak scaling**: each device keeps its batch, and the joint one grows. The computing stays the same, and so do, nearly, the bytes of a ring.
#
# The model, up to 1,024 GPUs: a network with 100 MB of gradients, 100 ms of computing for a step of 256 examples on one device, of which two thirds are the backward pass, behind which the exchange hides. A latency of 10 µs and
# 50 GB/s for each device. **All of these are assumptions**, and the curves are no measurement.

# %%
GPUS = 2 ** np.arange(1, 11)


def step_time(ranks, way, compute, hidden):
    exchange = cost(100e6, int(ranks), 10, 50)[way]  # µs
    return compute + max(0, exchange - hidden * compute * 2 / 3)


def efficiency(way, hidden, strong):
    """Examples in a second, as a share (%) of R times those of one GPU; NaN without an example each."""
    computing = [(100e3 / n if n <= 256 else np.nan) if strong else 100e3 for n in GPUS]
    return [100 * own / step_time(n, way, own, hidden) for n, own in zip(GPUS, computing, strict=True)]

# %%
plot.curves(GPUS, {"growing batch, ring, hidden": efficiency(2, 1, False),
                   "growing batch, ring, not hidden": efficiency(2, 0, False),
                   "growing batch, gather, hidden": efficiency(0, 1, False),
                   "fixed batch, ring, hidden": efficiency(2, 1, True)},
            log="x", xlabel="GPUs", ylabel="efficiency (%)",
            title="A MODEL, not a measurement: data parallelism up to 1,024 GPUs")

# %% [markdown]
# An efficiency of 100 % means that 1,024 GPUs train on 1,024 times as many examples in a second. With a fixed batch it breaks down where the exchange is as long as what is left to compute: Amdahl's law, with the exchange as the part that does not
# become faster. With a growing batch and a ring it stays high. The ring's *bytes* hardly grow. Its latency does, but hides behind the backward pass: at 1,024 GPUs the exchange takes 24.5 ms, of which 20.5 ms
# are latency, and the backward pass takes 67 ms. With the gather the efficiency falls: its bytes grow with R. The fixed batch ends at 256 GPUs, where each has a single example.

# %%
for n in (8, 64, 1024):
    gather_us, tree_us, ring_us = cost(100e6, n, 10, 50)
    print(f"{n:5} GPUs, 100 MB: gather {gather_us / 1e3:8.1f} ms, tree {tree_us / 1e3:5.1f} ms, ring {ring_us / 1e3:5.1f} ms "
          f"(of which latency {2 * (n - 1) * 10 / 1e3:.1f} ms)")

# %% [markdown]
# At 1,024 GPUs most of the ring's time is latency. Real libraries mend that with trees whose messages are cut into pieces, so that all levels work at the same time, and with a ring inside each machine and something else between machines.
#
# What the model leaves out: the last bucket, which nothing hides (section 6), so that the first curve is exactly 100 %; links that several GPUs share, devices that are not equally fast (each step waits for the slowest), the time in which data are read, and that the batch of weak scaling becomes too large to
# learn from (section 7). Published for comparison: Goyal et al. report about 90 % efficiency from 8 to 256 GPUs.
#
# ## 9 · Measured
#
# What the course has recorded of the exchange between GPUs:

# %%
records = bench.load_records()
found = bench.find(records, name="all_reduce*")
for record in found:
    print(record["name"], record["shape"], records["device"]["name"], results_table.when(record))
    for row in record["rows"]:
        print(f"    {row['label']:24} {row['microseconds']:10.1f} µs")
if not found:
    print("An all-reduce between GPUs has not been recorded yet.")

# %% [markdown]
# `[2, 256]` means two ranks with 256 float32 numbers each; a rank is a GPU here. For few numbers NCCL is faster: 25 µs against 113 and 117 µs for 256 numbers. All three take nearly as long for 65,536 numbers, so
# the bytes are not what takes this time. From 4,194,304 numbers on the ring is level with NCCL (78 µs against 75 µs) or faster.
#
# Between two ranks, gather and ring send the same bytes by the model of section 5. Yet for 67,108,864 numbers the gather takes 3.4 times as long. The model does not explain this. `gather.py` and `ring.py` differ in
# two things that the model leaves out. The gather fetches the other rank's numbers, 4 bytes at a time; the ring sends its own, 16 bytes at a time. And the gather writes its sums to a second array, and copies them from
# there. The records do not tell how much each of the two costs.
#
# And whole steps of training, on one GPU and on two, with the same batch on each. A step that is *captured* (lesson 11) is replayed as one CUDA
# graph, exchange included. **Predict** how many times as many images a second two GPUs train.

# %%
link = found[-1]["link_gbps"] if found else None
for record in bench.find(records, name="data_parallel*"):
    world, rows = record["shape"][0], {row["label"]: row for row in record["rows"]}
    print(record["name"], record["dtype"], results_table.when(record))
    for label in [label for label in rows if label.endswith(", 1 GPU")]:
        one, several = (rows[label.replace("1 GPU", gpus)]["images_per_second"] for gpus in ("1 GPU", f"{world} GPUs"))
        print(f"    {label.removesuffix(', 1 GPU'):18} {one:9,.0f} images/s, on {world} GPUs {several:9,.0f}: {several / one:.2f} times")
    if link:
        latency = found[0]["rows"][-1]["microseconds"] / 2  # of two steps, for next to no bytes
        model, alone = cost(record["gradient_bytes"], world, latency, link)[2], rows["NCCL's all-reduce alone"]["microseconds"]
        print(f"    the exchange of {record['gradient_bytes'] / 1e6:.0f} MB: by the model of section 5 {model:.0f} µs, by NCCL alone {alone:.0f} µs")

# %% [markdown]
# In float32, and where a step is captured, two GPUs train nearly twice as many images a second. In bfloat16 it is less than in float32: a step takes less time, and the exchange does not,
# because weights and gradients stay float32 under autocast. That is Amdahl's law once more. A step in bfloat16 that is not captured waits for the host, which starts kernel after
# kernel. Its time follows what else the host does, and tells little of the exchange: one network gains least of all here, and another seems to gain more than twice. The model of section 5, with the latency and the bandwidth that were measured above, says
# about four fifths of the time that NCCL takes.
#
# ## What the profiler says
#
# nsys shows NCCL's kernels by their names, `ncclDevKernel_AllReduce_…`, in a row of their own. Look for two things: do they lie *beside* kernels of the backward pass, or after them? And how long is the last one, beside which nothing runs? In
# PyTorch's own profiler it is `nccl:all_reduce`. If a rank waits in its first exchange for long, another rank is late: look there.
#
# ## Where the real libraries go further
#
# - **NCCL** chooses between rings, trees and the switch's own adders (NVLink SHARP) by size and topology, and splits each message over many channels, so that several blocks of each GPU take part.
# - **FSDP and ZeRO** don't keep a copy of everything: each device keeps a part of weights, gradients and Adam's state. Their exchanges are your two halves by themselves: a reduce-scatter of gradients, and an all-gather of weights.
# - **Tensor and pipeline parallelism** cut the network instead of the batch, where it does not fit on one device.
# - **Gradients in 16 bits** halve the bytes, and gradients accumulated over several batches divide the number of exchanges.
#
# ## Three questions
#
# <details><summary>1. Your reduce-scatter has an inbox with a place for each step, as large as the gradient in all. Real rings have two small places that are used in turn. What more must they wait for?</summary>
#
# A place may be overwritten only when the neighbour has read it. So there is a second flag, in the other direction: the right neighbour tells the left one that a place is free again.
# </details>
#
# <details><summary>2. Two ranks train with dropout, and seed their random numbers alike. Is that right?</summary>
#
# The first weights must be equal, and so they need one seed, or rank 0 sends its weights to all. But with one seed for dropout, both ranks drop the same places of their examples. It is no error that anyone would see, and the examples of a batch depend
# on each other where they shouldn't. The course's loop seeds by rank after the start.
# </details>
#
# <details><summary>3. A rank finds a NaN in its gradients and skips its step. What happens?</summary>
#
# If it decides before the exchange, the others wait for it: a deadlock. If it skips the step after the exchange, all have to: the sum has the NaN on every rank, so all find it, if they look at the sum. Whatever changes what a rank does must be decided from what all
# of them know.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# If you have two GPUs: `torchrun --standalone --nproc-per-node 2 -m course_lib train images --data photos --output runs`, once with one GPU and once with two, and a prediction before: how many pictures a second, by your model?
