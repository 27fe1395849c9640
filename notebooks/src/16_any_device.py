# %% [markdown]
# # 16 · Any device
#
# **After this lesson** you can let one program train on a Mac, on an NVIDIA GPU and on a CPU, choose how many
# bits it computes with, halve or quarter its memory, keep a step free of the host, and say of each of these
# levers beforehand what it will bring.
#
# **You need** [lesson 15](15_tiny_imagenet.ipynb) (the network and its pictures),
# [lesson 11](11_fashion_mnist.ipynb) (captured graphs) and of [lesson 10](10_the_other_layers.ipynb) what TF32 is.
#
# **Time:** 130 minutes; there are good places to pause after sections 3 and 5. All cells together run in about
# a minute without a GPU. What needs a device that you lack is shown from the course's records, and where
# nothing was recorded the lesson says so. The words are collected in the [glossary](glossary.md).

# %%
import math
import time

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from course_lib import bench, cuda, data, models, plot, results_table, train

# %%
from course_lib.runtime.intrinsics import block_sum
from course_lib.teach import TODO, check, hint, progress, solution, use
from course_lib.train.average import Average
from course_lib.train.step import why_not_captured

ZERO, ONE, INF, TINY = np.float32(0), np.float32(1), np.float32(np.inf), np.float32(1e-6)
NEW, EXPONENT = np.float32(10), 0x7F800000

# %%
records = bench.load_records()


def measured(name, **wanted):
    """The records called `name`, each with its device and date; a line that says so if none is."""
    found = bench.find(records, name=name, **wanted)
    if not found:
        print(f"{name} has not been measured on a GPU yet.")
    device = records["device"]["name"]
    return [r | {"source": {"device": device, "date": results_table.when(r)}} for r in found]


print("records are of an", records["device"]["name"])

# %% [markdown]
# ## 1 · What is here?
#
# PyTorch computes on many devices. Three of them you will meet everywhere: **MPS** (Metal Performance Shaders,
# the GPU of Apple's chips), **CUDA** (NVIDIA's GPUs), and the CPU. A program that trains should run on each
# without being changed, and take the best one that is there. That is the easy half. The other half is what it does when
# somebody *names* one:
#
# - "auto", or nothing: the first of MPS, CUDA and CPU that is here;
# - a device by name: that one, and **no other**. A run that was sent to the GPU and quietly takes the CPU instead is still not done in the
#   morning, and nobody knows why;
# - the CPU by name: nobody looks for a GPU. Even to look takes time, and some memory on it.
#
# With the device comes a precision of 16 bits, for those who want to compute in one. CUDA has **bfloat16** from compute
# capability 8.0 on (Ampere); older chips, and MPS, have **float16** only. On a CPU take bfloat16.
#
# ### Exercise: pick a device
#
# `wanted` is None, "auto", "mps", "cuda" or "cpu". Refuse anything else with a ValueError whose text names what was wanted.
# A device that was named and is not here is refused in the same way, by a ValueError that names it. `find_mps()` tells
# whether there is one, `find_cuda()` returns a capability such as (9, 0), or None. Return the device and the 16-bit
# precision. (The check comes with machines that are made up: you need not own a Mac.)

# %% exercise="pick_device"
def pick_device(wanted, find_mps, find_cuda):
    TODO  # 1. what is refused? 2. who looks for what? 3. who named something that is not here?


check("pick_device", pick_device)

# %%
hint("pick_device")

# %%
pick = use("pick_device", pick_device)
machines = {"a Mac": (True, None), "an H200": (False, (9, 0)), "a Turing card": (False, (7, 5)),
            "a laptop": (False, None)}
for name, (mps, capability) in machines.items():
    print(f"{name:14}", *pick("auto", lambda mps=mps: mps, lambda capability=capability: capability))

# %% tags=["varies"]
place = train.device.choose("auto")
print("here:", place, "with", train.device.half_of(place))

# %% [markdown]
# That was the course's own function, `train.device.choose`, the one that `train images --device` calls. What it says of MPS
# follows PyTorch's documentation, and is tested with made-up machines as yours is: no Apple hardware has run this
# course. Where a device can do less, the choice has to know: MPS has no float64, for example, so sums there are float32.

# %% [markdown]
# ## 2 · Fewer bits
#
# A float32 has a sign, 8 bits of exponent and 23 of **mantissa**, the digits behind the leading 1. A tensor core does not want
# as many:
#
# | format | exponent | mantissa | largest | smallest above 0 |
# |---|--:|--:|--:|--:|
# | float32 | 8 | 23 | 3 · 10³⁸ | 10⁻⁴⁵ |
# | TF32 | 8 | 10 | 3 · 10³⁸ | 10⁻⁴¹ |
# | bfloat16 | 8 | 7 | 3 · 10³⁸ | 10⁻⁴⁰ |
# | float16 | 5 | 10 | 65,504 | 6 · 10⁻⁸ |
#
# TF32 is no format that is ever stored: products take float32 numbers, and look at 10 bits of their mantissa. **Predict** from the table: by
# how much may rounding to TF32 change a number at most, relative to it? To bfloat16? And which of the four will be in
# trouble with small gradients?
#
# <details><summary>The first two</summary>
#
# Half of the last bit that is kept: 2⁻¹¹, or 0.05 %, and 2⁻⁸, or 0.4 %. (float16 has TF32's 2⁻¹¹, as long as the number is in its range.)
# </details>
#
# ### Exercise: round to fewer bits
#
# You get the *bits* of float32 numbers, as uint32 (`x.view(np.uint32)`), and keep the upper `kept` bits of the mantissa. Round to the nearest; of
# two equally near ones, take the one whose last kept bit is 0. That is **ties to even**, IEEE 754's rule: half of all ties go up,
# half down, so that sums of many rounded numbers do not drift. The others become 0 in the lower bits.
# Infinities and NaN (all exponent bits are 1) stay as they are.
#
# The bits of a positive float32, read as a whole number, grow with the number. **Predict** what happens to the exponent if rounding up
# carries out of the mantissa. Is it right?

# %% exercise="round_bits"
@cuda.jit
def round_bits(x, kept, y):
    drop = 23 - kept
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        bits = np.int64(x[i])
        TODO  # if it is a finite number: round it
        y[i] = bits


check("round_bits", round_bits)

# %%
hint("round_bits")

# %%
shorten, rng = use("round_bits", round_bits), np.random.default_rng(0)


def rounded(x, kept):
    """float32 numbers with fewer bits, as float32."""
    bits, y = np.ascontiguousarray(x).view(np.uint32).ravel(), np.zeros(x.size, dtype=np.uint32)
    shorten[8, 256](bits, kept, y)
    return y.view(np.float32).reshape(x.shape)


x = rng.normal(0, 1, 4096).astype(np.float32)
same = (rounded(x, 7) == torch.tensor(x).bfloat16().float().numpy()).all()
print("bfloat16 as PyTorch rounds it:", "the same bits" if same else "other bits")
for name, kept in (("TF32", 10), ("bfloat16", 7)):
    print(f"{name:9} largest change {abs(rounded(x, kept) / x - 1).max():.5f}, "
          f"2^-{kept + 1} is {2.0 ** -(kept + 1):.5f}")

# %% [markdown]
# A carry raises the exponent by one and leaves a mantissa of 0: that is the next power of two, as it should be. Past the largest number
# it becomes infinity, by itself.
#
# What do such roundings do to a sum of products? The errors of many terms have random signs. **Predict** the relative error of
# a product of matrices with 1,024 terms, for both.

# %%
a, b = (rng.normal(0, 1, shape).astype(np.float32) for shape in ((16, 1024), (1024, 16)))
exact = a.astype(np.float64) @ b
products = {"float32": a @ b}  # nothing is shortened, and the sums are float32
for name, kept in (("TF32", 10), ("bfloat16", 7)):
    products[name] = rounded(a, kept).astype(np.float64) @ rounded(b, kept)
for name, product in products.items():
    print(f"{name:9} mean error {abs(product - exact).mean() / abs(exact).mean():.0e}")

# %% [markdown]
# For TF32 and bfloat16 no larger than for a single product! Errors and terms both grow with $\sqrt{1024}$. This is why networks bear with 8 bits of mantissa:
# what they compute are long sums of products, *if the sums themselves are float32*. Tensor cores see to that.
#
# And what is it worth? A product of 4,096 × 4,096 matrices, and a whole U-Net in training:

# %%
rates = {}
for name, dtype, label in (("linear.forward", "float32", "float32"), ("linear.forward.tf32", "float32", "TF32"),
                           ("linear.forward", "bfloat16", "bfloat16")):
    for record in measured(name, shape=(4096, 4096, 4096), dtype=dtype):
        best = max(record["rows"], key=lambda row: row["tflops"])
        rates[label] = best["tflops"]
        print(f"{label:9} {best['tflops']:6.1f} TFLOP/s, {best['tflops'] / rates['float32']:4.1f} × float32 "
              f"({best['label']}; {record['source']['device']}, {record['source']['date']})")

# %%
pictures = {}
for name, dtype, label in (("unet.training", "float32", "float32"), ("unet.training.tf32", "float32", "TF32"),
                           ("unet.training", "bfloat16", "bfloat16")):
    for record in measured(name, shape=(16, 2, 128, 128), dtype=dtype):
        best = max(record["rows"], key=lambda row: row["images_per_second"])
        pictures[label] = best["images_per_second"]
        print(f"{label:9} {best['images_per_second']:6,.0f} pictures a second, "
              f"{best['images_per_second'] / pictures['float32']:3.1f} × float32 ({best['label']})")

# %% [markdown]
# The network gains much less than the product: Amdahl again. Batch norm, ReLU and pooling do not use tensor cores; they move bytes. From
# TF32 they gain nothing, from bfloat16 half of their time, since they move half as much. (And whose kernel is the fastest? In float32 ours in both; with fewer bits PyTorch's cuBLAS and cuDNN.) In PyTorch these are two switches. TF32 is one for products of float32, and so may be turned on
# for a whole program. **Autocast** makes convolutions and products take 16-bit copies of their inputs, while weights, sums and the
# loss stay float32: **mixed precision**.

# %% [markdown]
# ## 3 · Gradients that vanish
#
# float16 has 5 bits of exponent, so nothing below 6 · 10⁻⁸. Gradients are small numbers: each is divided by the size of the
# batch, and by that of many layers. Here are those of a real network, in the middle of its training. **Predict:** what
# share of them becomes exactly 0 in float16?

# %%
training, held = data.images(image_size=32)
prepare = train.augmenting.Normalise("cpu")


def network(**options):
    torch.manual_seed(0)
    return models.TinyImageNetCNN(5, widths=(16, 32, 64), hidden=128, image_size=32, layers=nn, **options)


def step(model, optimizer, rows):
    loss = cross_entropy(model(prepare(training.images[rows])), training.labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()

# %%
model, gradients = network(), []
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(4):
    for rows in torch.randperm(400).split(50):
        step(model, optimizer, rows)
for layer in (model.features[4], model.features[8]):  # of what the second and third convolution made
    layer.register_full_backward_hook(lambda layer, dx, dy: gradients.append(dy[0].flatten()))
step(model, optimizer, rows)
g = torch.cat(gradients).abs()
g = g[g > 0]
print(f"{len(g):,} gradients that are not 0, half of them below {g.median():.0e}; "
      f"in float16 {(g.half() == 0).float().mean():.1%} are 0")

# %% [markdown]
# Few, here. They are gone all the same, and what is behind them in the network learns nothing from them; deeper networks lose more. (Others are *nearly* gone: near the end of the range a float16 has
# one or two bits.) The cure is simple. Multiply the **loss** by a large number, the **scale**. The chain rule multiplies every gradient by it. Before
# the update, divide by it again, in float32. **Predict** which scales will do: too small, and gradients vanish; too large, and …

# %%
exponents = np.arange(0, 37, 2)
scaled = [(g * 2.0**int(k)).half() for k in exponents]
plot.curves(exponents, {"vanish": [100 * (s == 0).float().mean() for s in scaled],
                        "overflow to infinity": [100 * s.isinf().float().mean() for s in scaled]},
            xlabel="scale: 2 to the power of", ylabel="share of the gradients (%)", log="y",
            title="float16 needs a scale from the middle")

# %% [markdown]
# There is a window. But it is another one for each network, and moves while the network learns. So nobody computes it: the scale *finds itself*. Begin with
# a large one, 65,536. If any gradient is infinite or NaN after a backward pass, the scale was too large: skip this step, and halve it. After 2,000 good
# steps in a row, try twice as much. Now and then a step is lost; nothing else is.
#
# (bfloat16 has float32's exponent, and needs none of this. That is why it has replaced float16 for training wherever it is there.)
#
# ### Exercise: bring them back, and look
#
# `y = g / scale`, and `found[0]` becomes 1 if any number of `y` is not finite; it is 0 before. A number that is not finite becomes 0 in `y`. (0 · NaN
# is NaN: who wants to leave out an update by multiplying it with 0 needs this.) `scale` has one element. **Predict:** why is it not simply a number?

# %% exercise="unscale"
@cuda.jit
def unscale(g, scale, y, found):
    for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
        y[i] = TODO
        TODO  # is it finite?


check("unscale", unscale)

# %%
hint("unscale")

# %% [markdown]
# Because the host must not have to know it. If the scale were a number among the launch's arguments, it would be noted in a captured graph for ever; and to find out
# whether to halve it, the host would have to wait for `found`, in every step. So both stay in the device's memory, and a kernel of *one thread*
# decides. It is a strange kernel, and it is worth it.
#
# ### Exercise: the next scale
#
# After a bad step (`found` is not 0): scale · backoff, and `good`, the number of good steps in a row, becomes 0. If a good step makes the row `interval` long:
# scale · growth, unless that is infinite, and `good` becomes 0. After any other good step, `good` is one more. One thread of the grid writes.

# %% exercise="next_scale"
@cuda.jit
def next_scale(found, scale, good, growth, backoff, interval, new_scale, new_good):
    if cuda.grid(1) == 0:
        TODO  # three outcomes, two numbers each


check("next_scale", next_scale)

# %%
hint("next_scale")

# %% [markdown]
# Both at work: the gradients of above, which grow for a while and then shrink again, as they do in a run. The interval is 5, so that there is something to see.

# %%
divide, decide = use("unscale", unscale), use("next_scale", next_scale)
scale, good = np.array([2.0**16], dtype=np.float32), np.zeros(1, dtype=np.int32)
some, trace, skipped = g[:: len(g) // 200].numpy(), [], 0
for number in range(60):
    growing = 4.0 ** (6 * math.sin(number / 60 * math.pi))
    loud = (torch.tensor(some) * growing * scale[0]).half().float().numpy()  # as float16 leaves them
    y, found = np.zeros_like(loud), np.zeros(1, dtype=np.int32)
    divide[1, 256](loud, scale, y, found)
    trace.append(scale[0])
    skipped += found[0]
    decide[1, 32](found, scale.copy(), good.copy(), np.float32(2), np.float32(0.5), 5, scale, good)

# %%
plot.curves(range(60), {"scale": trace}, xlabel="step", ylabel="scale", log="y",
            title=f"It climbs until it falls: {skipped} of 60 steps are left out")

# %% [markdown]
# With an interval of 2,000, about one step in 2,000 is left out. `torch.amp.GradScaler` does what your two kernels do, and by default it asks the host to look at
# `found`; with a fused optimiser it doesn't.
#
# A good place for a break.

# %% [markdown]
# ## 4 · Less memory
#
# What fills a GPU in training? Weights, their gradients, two running means for Adam: 16 bytes for each parameter. And the **activations**: whatever layers
# have put aside for their way back. **Predict** for lesson 15's network with a batch of 128, of 64 × 64 pixels: which of the two is larger?

# %%
def kept_bytes(model, x):
    """Bytes of what the forward pass keeps for the backward pass, without the parameters."""
    own, seen = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def note(t):
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss = model(x).square().mean()
    loss.backward()
    return sum(n for address, n in seen.items() if address not in own)

# %%
whole = models.TinyImageNetCNN(layers=nn)
weights = 16 * sum(p.numel() for p in whole.parameters())
activations = kept_bytes(whole, torch.zeros(8, 3, 64, 64)) / 8
print(f"parameters, gradients, Adam: {weights / 1e6:.0f} MB; activations {activations / 1e6:.1f} MB for each picture, "
      f"{128 * activations / 1e6:,.0f} MB for 128")

# %% [markdown]
# The activations, by far, and they grow with the batch. There are two levers against them.
#
# **Gradient checkpointing** (recomputation) puts aside only what *enters* each block, and computes the block once more when its gradient is wanted. **Predict** for a
# network of four blocks of four layers each: what share of the memory is left, and how much longer does a step take? (Going back is about twice as much work as going there.)
#
# <details><summary>An answer</summary>
#
# The inputs of the blocks are a quarter of all; while one block is computed again, its own activations are there as well: about a half in all. One more forward pass makes 4 thirds of the work.
# </details>
#
# Here it is on a network of the course that has two pathways of residual blocks (the command's `--model continuous_integration`):

# %%
two = models.ContinuousIntegrationModel(5, "medium", 8, enable_mixed_precision=False, dropout=0.0, layers=nn)
pictures, found = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0)), {}
for recompute in (False, True):
    two.memory_efficient = recompute
    two.zero_grad()
    n_bytes = kept_bytes(two, pictures)
    found[recompute] = [p.grad.clone() for p in two.parameters() if p.grad is not None]
    print(f"computed again: {str(recompute):5} {n_bytes / 1e6:5.1f} MB are kept")
same = all(torch.equal(one, other) for one, other in zip(found[False], found[True]))
print("the gradients are", "the same, bit by bit" if same else "not the same")

# %% tags=["varies"]
def seconds(function, times=3):
    function()
    begin = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - begin) / times


for recompute in (False, True):
    two.memory_efficient = recompute
    took = seconds(lambda: two(pictures).square().mean().backward())
    print(f"computed again: {str(recompute):5} {took * 1e3:.0f} ms")

# %% [markdown]
# It takes longer by what a forward pass takes: about a third, where a CPU is not busy with something else. (The count is of what lies there when the forward pass has ended; on the way back one block at a time comes on top.) The gradients are the same bits, since the same is computed
# twice. Dropout has to draw the same mask again, and a running mean of batch norm must not move twice: a library has to see to that.
#
# **Gradient accumulation** computes a batch in parts, one after the other, and adds the gradients up. Only one part's activations are there at a time. The mean of the
# batch is not the mean of the parts' means, if they differ in size: each part counts by its *share*. **Predict** for a batch of 20 in parts of 8, 8 and 4: is the sum the same gradient as that of
# the whole batch, with dropout turned off? Here it is, for the network with batch norm in training, and with batch norm held still:

# %%
def gradient(model, parts):
    """All gradients of twenty pictures, in parts."""
    model.zero_grad()
    for rows in torch.arange(20).split(parts):
        loss = cross_entropy(model(prepare(training.images[rows * 19])), training.labels[rows * 19])
        (loss * len(rows) / 20).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])

# %%
for batch_norm in ("on its own batch", "held still"):
    model = network(dropout=0.0)
    model.train(batch_norm != "held still")
    at_once, in_parts = gradient(model, 20), gradient(model, 8)
    share = (in_parts - at_once).norm() / at_once.norm()
    print(f"batch norm {batch_norm:16}: they differ by {share:.0e} of their length")

# %% [markdown]
# Held still, the same but for rounding. On its own batch, not at all: batch norm takes mean and variance of the part that it sees. Accumulation gives you the gradient of a large batch and the statistics of a small one. (In layer norm and group norm
# each picture has its own statistics, and nothing changes.)
#
# ## 5 · Steadier
#
# Two more levers concern neither time nor memory, but how a network learns.
#
# **Clipping.** Now and then a batch has a gradient ten times as long as usual, and a single step with it undoes an hour. So one takes the norm of *all* gradients of all layers
# together, and if it is above a limit, makes all of them shorter by one and the same factor. Their direction stays.
#
# For a kernel that is two steps. First each block adds up the squares of its numbers, as you know (lesson 2). Then a second kernel needs the sum of these few parts, and multiplies.
#
# ### Exercise: clip
#
# `squares` has the parts' sums of squares, `g` some of the gradients. The factor is max_norm / (norm + TINY), but never above 1.
# Blocks are whole warps, such as 256 threads.

# %% exercise="clip"
@cuda.jit
def clip(g, squares, max_norm, y):
    TODO  # the factor
    for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
        y[i] = TODO


check("clip", clip)

# %%
hint("clip")

# %%
@cuda.jit
def squared(g, squares):
    scratch, total = cuda.shared.array(32, np.float32), ZERO
    for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
        total += g[i] * g[i]
    total = block_sum(total, scratch)
    if cuda.threadIdx.x == 0:
        squares[cuda.blockIdx.x] = total


long = (10 * rng.normal(0, 1, 3000)).astype(np.float32)
squares, short = np.zeros(4, dtype=np.float32), np.zeros_like(long)
squared[4, 256](long, squares)
use("clip", clip)[4, 256](long, squares, np.float32(1), short)
theirs = nn.Parameter(torch.zeros(3000))
theirs.grad = torch.tensor(long)
norm = nn.utils.clip_grad_norm_([theirs], 1.0)
print(f"norm {norm:.1f}, then {np.linalg.norm(short):.6f}; "
      f"from PyTorch's {abs(short - theirs.grad.numpy()).max():.0e}")

# %% [markdown]
# With float16, in which order? The limit means the *true* gradients: first unscale, then clip, then look at `found`, and step. Whoever clips first, clips gradients that are 65,536 times too long, and makes
# a training with a step of fixed length of it. It even learns, after a fashion.
#
# **Averaging.** The last steps of a training jump around the best weights. The mean of the weights over many steps lies nearer to it than any of them. One keeps an **exponential moving average** (EMA): a second set of weights, of
# which a share of 0.999 is kept in each step, and the rest comes from the weights. It costs one pass over the parameters. The first weights are random, and should be forgotten soon, so in step $n$ the share is the smaller one of
# `decay` and $(1 + n)/(10 + n)$.
#
# ### Exercise: the average
#
# `steps[0]` is $n$, in the device's memory (why?), `average` the old average, `y` the new one.

# %% exercise="ema"
@cuda.jit
def ema(weight, average, steps, decay, y):
    kept = TODO  # the share of the average that is kept
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        y[i] = TODO


check("ema", ema)

# %%
hint("ema")

# %% [markdown]
# What is it good for? The learning rate of this network does not fall, so its weights jump to the end. After each epoch both are tested, the weights and
# their average. **Predict:** which is better after two epochs, and which in the end?

# %%
@torch.no_grad()
def known(model):
    return 100 * (model.eval()(prepare(held.images)).argmax(1) == held.labels).float().mean().item()


model, curve = network(), {"weights": [], "their average": []}
optimizer, average = torch.optim.Adam(model.parameters(), lr=2e-3), Average(model, 0.98)
for epoch in range(16):
    model.train()
    for rows in torch.randperm(400).split(20):
        step(model, optimizer, rows)
        average.update()
    for name, each in (("weights", model), ("their average", average.module)):
        curve[name].append(known(each))

# %%
mixing, weight = use("ema", ema), torch.cat([p.detach().flatten()[:50] for p in model.parameters()]).numpy()
old = torch.cat([p.flatten()[:50] for p in average.module.parameters()]).numpy()
mine, n = np.zeros_like(old), average.steps
mixing[2, 256](weight, old, np.array([n]), np.float32(0.98), mine)
average.update()
new = torch.cat([p.flatten()[:50] for p in average.module.parameters()]).numpy()
print(f"one more step, by your kernel and by the course's: they differ by {abs(mine - new).max():.0e}")
plot.curves(range(1, 17), curve, xlabel="epoch", ylabel="unseen pictures that are known (%)",
            title="In the end the average is steadier")

# %%
for name, shares in curve.items():
    print(f"{name:13} the last five epochs: {', '.join(f'{share:.0f}' for share in shares[-5:])} %")

# %% [markdown]
# At first they are alike: the share that is kept is small, and the average forgets. Later the weights win or lose ten points from one epoch to the next, and
# the average hardly any. Over the last five epochs it knows more, too. What sets the two apart after the last one alone, a picture or two of a hundred, is chance. (A learning rate that falls to 0 does much of the same work. Many use both.)
#
# A good place for a break.

# %% [markdown]
# ## 6 · Without the host
#
# A GPU that waits for Python is as slow as Python. Three levers are about that.
#
# **The pictures.** Decoding a JPEG, drawing a crop and normalising take a CPU longer than the GPU takes to train on the picture. So the course decodes *once*, keeps bytes, and augments on the device (lesson 15). **Predict:** 128
# pictures of 64 × 64, over a bus of 25 GB/s (lesson 12): how long do they take as bytes, and as float32? And if they lie on the device already?

# %%
for name, size in (("bytes", 1), ("float32", 4)):
    print(f"{name:8} {128 * 3 * 64 * 64 * size / 25e9 * 1e6:5.0f} µs for a batch")
print("an index into what lies there: nothing but the kernel's own reading")

# %% tags=["varies"]
import io

from PIL import Image

pixels, file = training.images[0].permute(1, 2, 0).numpy(), io.BytesIO()
Image.fromarray(pixels).resize((64, 64)).save(file, "JPEG")
decode = seconds(lambda: np.asarray(Image.open(io.BytesIO(file.getvalue()))), times=200)
print(f"to decode one picture takes a core of this machine {decode * 1e6:.0f} µs, "
      f"{128 * decode * 1e3:.0f} ms for a batch")

# %% [markdown]
# **torch.compile** fuses operators and removes Python. It needs a compiler for the device, and not every machine and every operator has one. So it is *probed*: the course compiles a network for one batch, forward and backward, and throws the
# result away. Where that fails, the run says so and goes on without. (To forbid it on MPS, as some programs do, would be wrong tomorrow; to trust it, wrong today.) Here are two stand-ins for a compiler: one that fails, and one that does nothing.

# %%
def broken(graph, inputs):
    raise RuntimeError("this machine has no compiler")


model, example = network(), torch.zeros(4, 3, 32, 32)
for compiler in (broken, "eager"):
    result = train.device.compiled(model, example, say=print, backend=compiler)
    print("the model itself" if result is model else "a compiled one")

# %% [markdown]
# **Capture.** All launches of a step are noted in one CUDA graph, and started by one call (lesson 11). `train.GraphTrainer` does that for any network and optimiser. What may *not* be in a graph? Everything that asks the
# host. **Predict** which of these lines spoil it:
#
# | | line in the step |
# |---|---|
# | a | `loss = criterion(model(x), y)` |
# | b | `print(loss.item())` |
# | c | `if found.any(): return` |
# | d | `x = x[mask]` |
# | e | `scale = scale * 0.5 if overflow else scale` |
# | f | `optimizer.step()` with `lr` as a Python number that falls |
# | g | `dropout(x)` |
#
# <details><summary>The answer</summary>
#
# b, c and e read a number that the GPU has yet to compute: the host would wait, so capturing raises an error. d makes an array whose size the host must know. f raises nothing, and is the worst: the rate of the moment is noted, and stays for ever. a and g are fine: PyTorch's generator keeps its
# count in the device's memory, and so draws anew in each replay. All of your kernels of this lesson are made for it: `scale`, `found`, `good` and `steps` are *in memory*.
# </details>
#
# PyTorch's optimisers differ. Ask the course why one of them cannot be captured:

# %%
parameters = [nn.Parameter(torch.zeros(2))]
for optimizer in (torch.optim.SGD(parameters, lr=0.1), torch.optim.Adam(parameters), torch.optim.Adagrad(parameters)):
    for what, scaled, scheduled in (("plain", 0, 0), ("with a scaler", 1, 0), ("with a schedule", 0, 1)):
        told = why_not_captured(optimizer, scaled, scheduled) or "can be captured"
        print(f"{type(optimizer).__name__:8} {what:16}", told.split(": ")[0].split(".")[-1])

# %% [markdown]
# What does it bring? Lesson 11's network, by pictures a second, modules against one graph:

# %%
captured = measured("fashion_mnist.training")
rate = {who: [max(r["images_per_second"] for r in record["rows"] if r["label"].startswith(who)) for record in captured]
        for who in ("ours, any network captured", "ours, modules", "PyTorch captured", "PyTorch eager")}
for record, ours, modules, theirs, eager in zip(captured, *rate.values()):
    print(f"batch {record['shape'][0]:5}: captured, our modules make {ours / modules:4.1f} times as many pictures, "
          f"PyTorch's {theirs / eager:4.1f} times")
plot.curves([record["shape"][0] for record in captured], rate, xlabel="batch", ylabel="pictures a second", log=True,
            title=f"Recorded on an {captured[0]['source']['device']}, {captured[0]['source']['date']}")

# %% [markdown]
# Most for small batches, where the host was in the way. With 1,024 pictures it brings PyTorch next to nothing, since the chip has enough to do. Ours still gain:
# they ask more of the host (lesson 11), and are done sooner on the chip, so that the host is in the way for longer.
#
# ## 7 · All levers together
#
# Each has an option of `python -m course_lib train images`, and each has a test that it *does* something. (In many a program of this kind, switches are read and never passed on: the scaler is made and not used, the compiled network is thrown
# away. A switch without a test that it has an effect is decoration.) **Predict** the signs before you open the table.
#
# <details><summary>Time, memory and accuracy of each</summary>
#
# | option | time of a step | memory | what is learned |
# |---|---|---|---|
# | `--precision tf32` | less, where products are large | the same | the same but for noise |
# | `--precision bfloat16` | less | a third to a half less of the activations | the same but for noise |
# | `--precision float16` | like bfloat16 | like bfloat16 | the same, with a scaler |
# | `--channels-last` | less with tensor cores; else either way | the same | the same |
# | `--enable-gradient-checkpointing` | a third more or beyond | much less | the same bits |
# | `--grad-accum-steps 4` | a little more | a quarter of the activations | the same, but for batch norm |
# | `--compile` | less, after a minute, where it works | either way | the same but for rounding |
# | `--capture` | less, if the host was in the way | a little more | the same |
# | `--clip-grad`, `--model-ema` | a little more | EMA: 4 bytes for each parameter | steadier |
# </details>
#
# And on your machine? The same network and batch, a lever at a time; what is kept for the backward pass is *counted*, the time is *this* device's.

# %% tags=["varies"]
def one_step(precision="float32", parts=1, channels_last=False):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = models.TinyImageNetCNN(layers=nn).to(place, memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = train.GraphTrainer(
        model, optimizer, cross_entropy, precision=precision, accumulate=parts, capture=False)
    x = torch.randn(32, 3, 64, 64, device=place).contiguous(memory_format=layout)
    y = torch.randint(200, (32,), device=place)
    return seconds(lambda: float(trainer(x, y)), times=1)


for name, options in {"float32": {}, "channels-last": {"channels_last": True}, "bfloat16": {"precision": "bfloat16"},
                      "in 4 parts": {"parts": 4}}.items():
    print(f"{name:14} {32 / one_step(**options):7,.0f} pictures a second on {place}")

# %%
for name in ("float32", "bfloat16"):
    with train.step.autocast(torch.device("cpu"), name):
        n_bytes = kept_bytes(whole, torch.zeros(32, 3, 64, 64)) / 32
    print(f"{name:9} {n_bytes / 1e6:.2f} MB are kept for each picture of a batch of 32")

# %% [markdown]
# Not half. With 16 bits there are copies of the weights to keep as well, and max pooling's places (int64!) do not shrink.
#
# And time: a CPU may well be *slower* in bfloat16. Not every one has instructions for it, and copies cost time. A lever is no law.
#
# On a GPU the levers were pulled one at a time, and then together: with section 4's network of two pathways, on pictures of 224 × 224 pixels. "In parallel" has its two pathways run side by side
# ([lesson 17](17_two_pathways.ipynb)). **Predict:** which lever alone brings most in training? Which ones make it *slower*? And who wins in the end, PyTorch's kernels or ours?

# %%
def show_levers(found, what):
    for record in found:
        naive, times = record["rows"][0], {row["label"]: row["microseconds"] for row in record["rows"]}
        print(f"{record['fastest']}: {record['ratio']:.1f} times as fast as {naive['label']}")
        print(f"{record['default']}, our best: {times[naive['label']] / times[record['default']]:.1f} times")
        for label, why in record["left_out"].items():
            print(f"{label} failed: {why}")
        rows = [row for row in record["rows"] if row["kind"] != "two GPUs"]  # lesson 17 has those
        return plot.times(rows, xlabel=f"time of {what} with {record['shape'][0]} pictures (µs)",
                          title="Each lever alone, then together", **record["source"])


training_levers = measured("two_pathways.training")
show_levers(training_levers, "a step of training")

# %%
show_levers(measured("two_pathways.forward"), "a forward pass")

# %%
for record in training_levers:
    for row in record["rows"]:
        if "captured" not in row["label"] and row["kind"] != "two GPUs":
            print(f"{row['label']:44} {row['peak_bytes'] / 1e9:5.2f} GB at the peak of a step")

# %% [markdown]
# (A captured step is missing there on purpose: its arrays lie in a pool of the graph's own, which PyTorch's counter of the peak does not see.)
#
# Levers multiply where they pull at different things. Capture alone brought next to nothing, for in float32 the chip had enough to do. With bfloat16 and channels-last it brings ours most,
# since now the host is in the way. Channels-last alone made training faster, and the forward pass *slower*. Checkpointing saved memory as you predicted in section 4, and took more time than the third that its second forward pass adds by the count of operations. And `torch.compile`, which section 6 probes for good reason,
# failed for the step of training in float32, and not in bfloat16 with channels-last, nor for the forward pass. We have not found out why.
#
# Our captured step of training is faster than PyTorch's, in float32 by far, in bfloat16 by a little. Our forward pass is not: in bfloat16 PyTorch's wins, and clearly. 16 bits do not
# help ours at all as long as Python starts the kernels one by one: they were slower than in float32. Who wants the last factor takes cuDNN; who wants to know where it comes from compares the profiles of both.

# %% [markdown]
# ## What the profiler says
#
# For each lever there is a place where you would see it:
#
# - **precision**: names. A kernel of tensor cores has `tf32`, `bf16` or `s16816` in its name; one called `sgemm` or `simt` has not taken the lever. In ncu, "Tensor pipe" is above 0.
# - **capture**: nsys shows one `cudaGraphLaunch` for each step instead of hundreds of `cudaLaunchKernel`, and no gaps between kernels.
# - **the pictures**: a row of copies (`memcpy HtoD`) that do not overlap with kernels, or gaps at the beginning of each step.
# - **checkpointing**: the names of the forward kernels stand in the backward pass, too.
# - **the host**: `cudaStreamSynchronize` in every step. Somebody asks for a number. Look for `.item()`.
#
# ## Where the real libraries go further
#
# - **Hugging Face Accelerate** and **PyTorch Lightning** have all these levers as options, and several GPUs.
# - **NVIDIA Transformer Engine** trains in 8 bits (FP8 has 4 or 5 bits of exponent): each tensor has a scale of its own, which finds itself much as yours does.
# - **DeepSpeed** and **FSDP** spread the 16 bytes of each parameter over GPUs, or move them to the host.
# - **torch.utils.checkpoint** recomputes what you wrap in it; with a *policy* it keeps what is expensive and recomputes what is cheap.
#
# ## Three questions
#
# <details><summary>1. Somebody trains in float16 with a scaler, and the scale falls and falls, until it is below 1. What is wrong?</summary>
#
# Not the scale. Gradients are infinite or NaN whatever it is: in the forward pass something overflows 65,504 (a sum of squares, an exponential), or there is a 0/0. The scaler skips every step, and the loss stands still without an error.
# Look for the first layer whose *output* is not finite, and let it compute in float32.
# </details>
#
# <details><summary>2. Gradient accumulation in 4 parts, and clipping. A program clips after each part's backward pass. Is that the same?</summary>
#
# No. It makes the sum so far shorter each time, and the later parts count more. Clip once, after the last part, before the step. The same holds for unscaling: dividing after each part divides the first ones several times.
# </details>
#
# <details><summary>3. On the GPU, bfloat16 makes a network no faster. Name three reasons.</summary>
#
# The host is the limit (then capture helps, and bits don't). Its products are small, so that launches and copies to 16 bits take as long as they save. Its time goes into what tensor cores do not do, and that does not run in 16 bits: autocast keeps batch norm's statistics, softmax and losses in float32.
# A profile tells which.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# Lesson 17 builds the network of two pathways that section 4 borrowed. Before that, take a run of lesson 15 and pull the levers one at a time, each with a prediction. `docs/commands.md` has all options. Write the prediction down *before*: it is the only way to be surprised.
