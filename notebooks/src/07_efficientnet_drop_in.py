# %% [markdown]
# # 7 · EfficientNet: a drop-in module
#
# **After this lesson** you can say where a network's time goes before you touch it, predict what
# a faster part will do for the whole, make an operator of your kernels that PyTorch's other tools
# can work with, put it into a network that somebody else has written without breaking anything
# that was trained or saved before, and say where compiled kernels are kept and when they are
# compiled again.
#
# **You need** [lesson 4](04_softmax_at_the_limit.ipynb), section 8 (autograd), and [lesson
# 6](06_squeeze_excitation.ipynb) (squeeze-and-excitation). The block is described once more
# below.
#
# **Time:** 150 minutes; there are good places to pause after sections 2 and 5. All cells together
# run in two to four minutes without a GPU, of which a small network takes one or two to learn. On a
# GPU the proof of section 4 is done with the whole network. The words are collected in the
# [glossary](glossary.md).

# %%
import logging
import sys
from functools import cache, partial

import numpy as np
import torch
import torchvision

from course_lib import SIMULATED, bench, cuda, data, models, nn, plot, results_table, train
from course_lib.kernels import squeeze_excite
from course_lib.runtime.intrinsics import warp_sum
from course_lib.teach import TODO, check, hint, progress, solution, use

ZERO, THREE, SIX = np.float32(0), np.float32(3), np.float32(6)
recorded = bench.load_records()

# %% [markdown]
# The measurements of this lesson are whole training steps of a large network, which take a while.
# They were recorded for the course, and this function finds them. (The line after it lets
# messages of the course appear in the notebook, in brackets.)

# %%
@cache
def measured(name, **wanted):
    """The record called `name`; None, and a line that says so, if there is none."""
    if found := bench.find(recorded, name=name, **wanted):
        source = {"device": recorded["device"]["name"], "date": results_table.when(found[0])}
        return found[0] | {"source": source}
    return print(f"{name} has not been measured on a GPU yet.")


logging.basicConfig(stream=sys.stdout, format="(%(message)s)")
print("recorded on an", recorded["device"]["name"])

# %% [markdown]
# ## 1 · Profile first
#
# **EfficientNet-B4** is a network that tells what is in a picture. It was published in 2019, has
# some 18 million parameters, and is still used where a network must be small and good: for leaf
# diseases, say, which is what we will do in the end. In its blocks there is
# **squeeze-and-excitation**, the operation of lesson 6, which we call **SE** for short:
#
# $$ y = x \cdot \sigma\big(W_2 \, \text{act}(W_1 \, \text{mean}(x) + b_1) + b_2\big) $$
#
# *Squeeze*: the mean of each channel over its pixels. *Excite*: two small dense layers make a
# **gate** of the means, a number between 0 and 1 for each channel. *Scale*: each channel is
# multiplied by its gate.
#
# Lesson 6 has made a fast kernel for it. What does it do for the network? One could put it in and
# measure. But first one should *know where the time goes*. That is called **profiling**, and the
# first answer costs nothing: count.
#
# The network is made on the device `meta`. Its tensors have shapes and types, and no numbers, so
# that nothing has to be computed or stored:

# %%
from torch import nn as torch_nn

with torch.device("meta"):
    network = models.create_model("efficientnet_b4", num_classes=5, use_cuda_kernels=False)
SqueezeExcitation = torchvision.ops.SqueezeExcitation
blocks = {n: m for n, m in network.named_modules() if isinstance(m, SqueezeExcitation)}
print(f"{sum(p.numel() for p in network.parameters()) / 1e6:.1f} million parameters, "
      f"{len(blocks)} SE blocks, the first of them at {next(iter(blocks))}")
print(next(iter(blocks.values())))

# %% [markdown]
# A **hook** is a function that PyTorch calls each time a module has run, with the module, its
# inputs and its output. Ours counts two things for every module: the multiplications and
# additions (FLOPs), and the numbers that a kernel for it has to read and write. For SE that is
# three times the array: read for the mean, read again for the scaling, written. (The small arrays
# in between are not counted, and neither are additions of shortcuts, which are no modules.)
#
# First, which modules there are, by kind. Batch norm is lesson 5's batch normalisation, SiLU is
# the swish of lesson 1. A **1×1 convolution** mixes the channels of each pixel, a **depthwise
# convolution** looks at the neighbours of a pixel within one channel. Convolutions are the
# subject of the next lesson. (The one at the network's entrance does both, and is counted with
# the first kind.)

# %%
KINDS = {torch_nn.BatchNorm2d: "batch norm", torch_nn.SiLU: "SiLU",
         SqueezeExcitation: "squeeze-and-excitation"}


def modules_of(network):
    """The modules to count, with the kind of each; without what is inside of an SE block."""
    blocks = [m for m in network.modules() if isinstance(m, SqueezeExcitation)]
    inside = {child for block in blocks for child in list(block.modules())[1:]}
    for module in (m for m in network.modules() if m not in inside):
        if isinstance(module, torch_nn.Conv2d):
            yield module, f"{'1×1' if module.groups == 1 else 'depthwise'} convolution"
        elif type(module) in KINDS:
            yield module, KINDS[type(module)]

# %%
counted, shapes = [], {}


def count(module, inputs, output, kind):
    n_in, n_out = inputs[0].numel(), output.numel()
    if kind == "squeeze-and-excitation":
        shapes[module] = tuple(inputs[0].shape)
    flops = 2 * (n_out * module.weight[0].numel() if "convolution" in kind else n_in)
    counted.append((kind, flops, n_in + n_out + n_in * (module in shapes)))

# %% [markdown]
# **Predict,** before you run the next cells: what percentage of the FLOPs is SE? And of the
# numbers moved? The batch has 32 pictures of 380 × 380 pixels.

# %%
hooks = [module.register_forward_hook(partial(count, kind=kind)) for module, kind in modules_of(network)]
network.eval()(torch.empty(32, 3, 380, 380, device="meta"))
for hook in hooks:
    hook.remove()
print(f"{sum(flops for _, flops, _ in counted) / 1e9:.0f} · 10⁹ FLOPs, "
      f"{sum(moved for _, _, moved in counted) / 1e9:.1f} · 10⁹ numbers moved")

# %%
def by_kind(column, unit=1.0):
    kinds = dict.fromkeys(entry[0] for entry in counted)
    return {kind: unit * sum(e[column] for e in counted if e[0] == kind) for kind in kinds}


plot.shares({"FLOPs": by_kind(1), "numbers moved": by_kind(2)},
            highlight="squeeze-and-excitation", title="What EfficientNet-B4 is made of, forward")

# %% [markdown]
# Two networks! By FLOPs it consists of 1×1 convolutions, and SE is nothing: less than half a
# percent, too thin to be seen. By numbers moved, seven tenths of it are operations that hardly
# compute anything, and SE is a sixth.
#
# Which of the two is right depends on the chip. Lesson 4's roofline tells: each operation takes
# as long as its *slower* half. An H200 moves 4.2 · 10¹² bytes per second, if it copies. Its units
# for products of matrices, which convolutions use, do at most 1,070 · 10¹² FLOPs per second with
# bfloat16 (numbers of 2 bytes), and half as many with **TF32**, which are float32 numbers of which
# only the first 11 binary digits are used: PyTorch allows this for convolutions. With all digits it
# is 67 · 10¹². (Lesson 10 says where these limits come from. No kernel gets past them, and few get
# near.) **Predict:** which of the two bars is nearer to the truth?

# %%
from course_lib.benchmarks.peaks import peaks_of

limits = peaks_of((9, 0), 132, 1_980_000)  # capability, multiprocessors, kHz of an H200


def predicted_ms(bytes_per_number, tflops):
    moved, flops = by_kind(2, bytes_per_number / 4.2e9), by_kind(1, 1 / (tflops * 1e9))
    return {kind: max(moved[kind], flops[kind]) for kind in moved}


chips = {"bfloat16": predicted_ms(2, limits["bfloat16"]),
         "float32, TF32 allowed": predicted_ms(4, limits["tf32"]),
         "float32, all digits": predicted_ms(4, limits["fma"])}
plot.shares(chips, highlight="squeeze-and-excitation", xlabel="share of the predicted time (%)",
            title="If every kernel were at its limit")

# %%
for name, parts in chips.items():
    part, whole = parts["squeeze-and-excitation"], sum(parts.values())
    print(f"{name}: {part:.2f} ms of {whole:.1f} ms are SE, {part / whole:.1%}")

# %% [markdown]
# With those units for matrices, every kind of operation waits for memory longer than for
# arithmetic, so the bar of the numbers moved is the right one. Only with all digits does the
# arithmetic of the 1×1 convolutions take longer than their bytes.
#
# That is what the network *should* need. What it does need, only a clock can say. The simplest
# **profiler** is a clock in two hooks, one before and one after each module. Here it looks at two
# small pictures, 64 × 64. What it prints is different on each machine and not stored here: run
# the cell. (It times the CPU. A GPU works on while Python is already somewhere else, so it needs
# a profiler that looks at the GPU's own clock.)

# %% tags=["varies"]
import time

small = models.create_model("efficientnet_b4", num_classes=5, use_cuda_kernels=False).eval()
begun, spent = {}, dict.fromkeys(KINDS.values(), 0.0)


def stop(module, inputs, output, kind):
    spent[kind] = spent.get(kind, 0.0) + time.perf_counter() - begun[module]


for module, kind in modules_of(small):
    module.register_forward_pre_hook(lambda m, inputs: begun.update({m: time.perf_counter()}))
    module.register_forward_hook(partial(stop, kind=kind))

# %% tags=["varies"]
with torch.no_grad():
    small(torch.randn(2, 3, 64, 64))
for kind, seconds in sorted(spent.items(), key=lambda item: -item[1]):
    print(f"{kind:24} {1e3 * seconds:7.1f} ms  {seconds / sum(spent.values()):6.1%}")

# %% [markdown]
# PyTorch's own profiler does this for each of its operators, and for each kernel on a GPU:
#
# ```python
# with torch.profiler.profile() as watched:
#     model(pictures)
# print(watched.key_averages().table(sort_by="self_device_time_total"))
# ```
#
# Read such a table from the top: what takes most? On a CPU the answer is another one than on a
# GPU. So **profile on the machine that matters**. This was recorded on a GPU, with PyTorch's
# profiler, for a whole training step (forward, backward and the optimiser) of 32 pictures with
# 380 × 380 pixels:

# %%
def parts_of(precision):
    """The profile of a step before the swap: {kind of work: µs}; None if there is no record."""
    step = measured("efficientnet.step", dtype=precision)
    return step and step.get("profile", {}).get("before")


steps = {name: parts for name in ("bfloat16", "float32") if (parts := parts_of(name))}
plot.shares(steps, highlight="squeeze-and-excitation", xlabel="share of the GPU's time (%)",
            title="A training step of EfficientNet-B4 with PyTorch's operators",
            **measured("efficientnet.step", dtype=next(iter(steps)))["source"]) if steps else None

# %% [markdown]
# ## 2 · Predict the gain
#
# Counting the numbers moved, SE takes a sixth of the time. (The profile above says a quarter. We
# stay with the count, which everybody can make before there is a GPU; section 6 says who was
# right.) And say your kernel is three times as fast as PyTorch's operators. **Write down a number
# before you read on:** how many times as fast will the network be?

# %%
my_guess = 1.5  # put your own number here

# %% [markdown]
# Let the whole take 1 second. SE takes 0.167 s of it; then 0.056 s. The other 0.833 s stay.
# Together that is 0.889 s, and 1 / 0.889 is **1.125**. Not 3, and not 1.5. If the kernel took *no
# time at all*, it would be 1 / 0.833 = 1.2, and that is a limit that no kernel can get over.
#
# Gene Amdahl said so in 1967 about computers with many processors, and it is called **Amdahl's
# law**. For a part that has the share $s$ of the time and becomes $k$ times as fast:
#
# $$ \text{speed-up of the whole} = \frac{1}{(1 - s) + s / k} $$

# %%
share, k = np.linspace(0, 0.95, 60), 3
law = {f"{k} times as fast": 1 / (1 - share + share / k), "no time at all": 1 / (1 - share)}
plot.curves(100 * share[:45], {label: values[:45] for label, values in law.items()},
            xlabel="share of the part in the whole's time (%)", ylabel="speed-up of the whole",
            title="Amdahl's law: a small part stays small")

# %% [markdown]
# ### Exercise: Amdahl's law for many parts
#
# B4's blocks are of different sizes, and the kernel helps some more than others. `shares` has the
# share of each kind of block in the whole's time, `speedups` how many times as fast it becomes
# (two arrays of equal length; a number below 1 is slower). Return the speed-up of the whole, and
# its limit: what it would be if all these parts took no time.

# %% exercise="amdahl"
def amdahl(shares, speedups):
    rest = TODO  # the share of all that stays as it is
    whole = TODO
    return whole, TODO


check("amdahl", amdahl)

# %%
hint("amdahl")

# %% [markdown]
# Now the prediction for B4. The share of each shape of block comes from the numbers that it
# moves, as counted above. As for the speed-up: the benchmark of lesson 6 measured it for each of
# these shapes, forward and backward, here with bfloat16. If there is no record yet, we take 3 for
# all of them, and say so.

# %%
measured_blocks = bench.find(recorded, name="squeeze_excite.both", dtype="bfloat16")
ratios = {}
for block in measured_blocks:
    us = {row["label"]: row["microseconds"] for row in block["rows"]}
    if block["shape"][0] == 32 and "PyTorch eager" in us:
        ratios[tuple(block["shape"][:4])] = us["PyTorch eager"] / us[block["default"]]
print(f"{len(ratios)} shapes measured; the others: 3 assumed")

# %%
law = use("amdahl", amdahl)
sizes = list(shapes.values())
kinds = sorted(set(sizes), key=sizes.index)
moved = np.array([3 * sizes.count(kind) * np.prod(kind) for kind in kinds], dtype=np.float64)
speedups = np.array([ratios.get(kind, 3.0) for kind in kinds])
predicted, limit = law(moved / sum(by_kind(2).values()), speedups)
print(f"{len(kinds)} shapes of block, {len(sizes)} blocks: {moved.sum() / sum(by_kind(2).values()):.1%}")
print(f"the network should become {predicted:.3f} times as fast; the limit is {limit:.3f}")
print(f"my guess was {my_guess}")

# %% [markdown]
# Keep that number. Section 6 compares it with what was measured.
#
# (Is it worth it, then? Eleven or twelve percent of all training, for a module that one swaps in
# a line. And the next operation is next in the same picture: batch norm and SiLU together move
# half of the numbers.)

# %% [markdown]
# A good place for a break.

# %% [markdown]
# ## 3 · What PyTorch wants to know
#
# Lesson 4 has put softmax into PyTorch by an `autograd.Function`. For a module that goes into
# other people's networks more is needed, since these networks are compiled, exported, trained
# with 16 bits. A registered **operator** tells PyTorch four things:
#
# 1. its **schema**: the name, and the types of what goes in and comes out;
# 2. a **fake**: what comes out, without any numbers;
# 3. its **gradient**;
# 4. what **autocast** should do with it.
#
# ### The schema
#
# Here is that of the course's operator. It has four results, although a user wants only `y`. The
# other three are what the gradient needs: the `mean` of each channel, `hidden` (the hidden layer
# before its activation) and `logit` (the input of the gate). All are tiny next to `x`.

# %%
for part in str(torch.ops.course_lib.squeeze_excite.default._schema).split(" -> "):
    print(part)

# %% [markdown]
# ### Exercise: the fake
#
# `torch.compile` and `torch.export` run a network without numbers first, to see which shapes
# there will be. So they ask each operator: *given such tensors, what would you return?* You have
# seen the device `meta`; that is how it works there.
#
# `x` has the shape `(N, C, H, W)`, `weight1` `(R, C)`, `weight2` `(C, R)`, and the biases fit.
# (`R` is the number of hidden neurons.) Describe the four results: new tensors, with nothing in
# them. `y` has the type of `x` and *lies in memory as x does*; the other three are float32, of
# the shapes `(N, C)`, `(N, R)` and `(N, C)`, on the device of `x`.
#
# **Predict** what goes wrong if a fake says float16 where the kernel returns float32.

# %% exercise="describe_block"
def describe_block(x, weight1, bias1, weight2, bias2):
    (n_images, n_channels), n_hidden = x.shape[:2], weight1.shape[0]
    y = TODO
    mean = TODO
    hidden = TODO
    return y, mean, hidden, TODO


check("describe_block", describe_block)

# %%
hint("describe_block")

# %% [markdown]
# (Nothing, at first. The fake is believed: the compiled code that follows reads the bytes of the
# result as numbers of another size. A wrong fake is among the nastiest bugs, and
# `torch.library.opcheck` compares each fake with the real thing. You will call it below.)
#
# With a fake, one can ask what a network *would* take. What must the largest block of B4 keep for
# the way back, for 32 pictures?

# %%
describe = use("describe_block", describe_block)
largest = max(sizes, key=np.prod)
x = torch.empty(largest, dtype=torch.bfloat16, device="meta")
weights = [torch.empty(s, device="meta") for s in ((12, 48), (12,), (48, 12), (48,))]
y, *kept = describe(x, *weights)
n_bytes = sum(each.numel() * each.element_size() for each in kept)
print(f"x itself, of shape {tuple(x.shape)}: {x.numel() * 2 / 1e6:,.0f} MB")
print(f"beside it, mean, hidden and logit: {n_bytes / 1e3:.1f} KB")

# %% [markdown]
# ### The gradient
#
# In lesson 4 there was one input and one gradient. Now there are five, and several ways to get
# them wrong. PyTorch calls `forward(ctx, *arguments)`, and then wants from `backward(ctx, dy)`
# **a gradient for each argument, in the same order**; for what is no tensor, such as the name of
# a gate, it wants `None`.
#
# Two things are new:
#
# - **`ctx.save_for_backward` is more than a place to keep things.** If somebody changes `x` *in
#   place* (with `x += 1`, say) between the two passes, the gradient would be wrong. PyTorch
#   counts the changes of each tensor, and for saved tensors it compares. A tensor in `ctx.x` is
#   kept as well, but nobody watches it.
# - **`dy` may lie in memory in any way.** The gradient of `y.sum()` is a single 1 that pretends
#   to be a whole array. A kernel that loads 16 bytes at a time reads nonsense there.
#
# ### Exercise: a block with five gradients
#
# You are given two launchers:
#
# ```python
# compute_forward(x, w1, b1, w2, b2, gate=gate)                      # → y, mean, hidden, logit
# compute_backward(dy, x, w1, w2, mean, hidden, logit, gate=gate)    # → dx, dw1, db1, dw2, db2
# ```
#
# `gate` is a string, `"sigmoid"` or `"hard_sigmoid"`. The function that you return takes `x, w1,
# b1, w2, b2, gate` and gives `y` alone.

# %% exercise="block_function"
def block_function(compute_forward, compute_backward):
    class SqueezeExcite(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w1, b1, w2, b2, gate):
            TODO

        @staticmethod
        def backward(ctx, dy):
            return TODO

    return SqueezeExcite.apply


check("block_function", block_function)

# %%
hint("block_function")

# %% [markdown]
# Now around the course's real launchers, beside torchvision's module, with the same weights. On a
# machine without a GPU the kernels run in the simulator. How can one be sure of that? Count the
# launches:

# %%
from course_lib.runtime.host.launch import recorded as launches_of

device = "cpu" if SIMULATED else "cuda"
my_block = use("block_function", block_function)(squeeze_excite.forward, squeeze_excite.backward)
torch.manual_seed(0)
theirs = SqueezeExcitation(12, 3, torch_nn.SiLU).to(device)
x = torch.randn(2, 12, 7, 7, device=device, requires_grad=True)
weights = [theirs.fc1.weight, theirs.fc1.bias, theirs.fc2.weight, theirs.fc2.bias]

# %%
results = []
for each in (theirs, lambda x: my_block(x, *weights, "sigmoid")):
    with launches_of() as launches:
        y = each(x)
        results.append([y, *torch.autograd.grad((y * y).sum(), [x, *weights])])
print(f"launches of the course's kernels: {len(launches)}")
for name, a, b in zip(("y", "dx", "dW1", "db1", "dW2", "db2"), *results, strict=True):
    print(f"{name:4} relative difference {(a - b).norm() / a.norm():.0e}")

# %% [markdown]
# ### Registered
#
# It works, and it is no operator yet. A Function is Python, and `torch.compile` reads Python: it
# would walk into the launchers, with tensors that have no numbers. An operator is a closed box,
# about which PyTorch knows what it was told. `torch.library` makes one. The annotations are its
# schema, and the fake is yours:

# %%
from torch import Tensor


@torch.library.custom_op("mine::block", mutates_args=())
def my_operator(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor,
                gate: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return squeeze_excite.forward(x, w1, b1, w2, b2, gate=gate)


@my_operator.register_fake
def _(x, w1, b1, w2, b2, gate):
    return describe(x, w1, b1, w2, b2)


print(torch.ops.mine.block.default._schema)

# %% [markdown]
# (`mutates_args=()` promises that no argument is written to.) The gradient runs kernels too, so it
# needs a box of its own: `torch.compile` reads a gradient as it reads everything else.

# %%
@torch.library.custom_op("mine::block_backward", mutates_args=())
def my_backward(dy: Tensor, x: Tensor, w1: Tensor, w2: Tensor, mean: Tensor, hidden: Tensor,
                logit: Tensor, gate: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return squeeze_excite.backward(dy, x, w1, w2, mean, hidden, logit, gate=gate)


@my_backward.register_fake
def _(dy, x, w1, w2, mean, hidden, logit, gate):
    db1, db2 = hidden.new_empty(hidden.shape[1]), logit.new_empty(logit.shape[1])
    return torch.empty_like(x), torch.empty_like(w1), db1, torch.empty_like(w2), db2

# %% [markdown]
# And the two are tied together, just as in your exercise. What was `forward` there is cut in two:
# the operator computes, and `keep` saves.

# %%
def keep(ctx, inputs, output):
    x, w1, _, w2, _, ctx.gate = inputs
    ctx.save_for_backward(x, w1, w2, *output[1:])


def gradients(ctx, dy, *unused):  # unused: the gradients of mean, hidden and logit
    return *my_backward(dy, *ctx.saved_tensors, ctx.gate), None


my_operator.register_autograd(gradients, setup_context=keep)

# %% [markdown]
# Is all of it true? `torch.library.opcheck` runs the operator and compares: the schema with what
# happens to the arguments, the fake with the real results, and what a compiler would make of both
# passes with what they do by themselves.

# %%
tiny = [torch.randn(s, device=device, requires_grad=True)
        for s in ((1, 4, 3, 3), (2, 4), (2,), (4, 2), (4,))]
with launches_of() as launches:
    for test, result in torch.library.opcheck(my_operator, (*tiny, "sigmoid")).items():
        print(f"{test:28} {result}")
print(f"launches of the course's kernels: {len(launches)}")

# %% [markdown]
# A fake that says float16 where the operator returns float32, as in the exercise:

# %%
@torch.library.custom_op("mine::liar", mutates_args=())
def liar(x: Tensor) -> Tensor:
    return 2 * x


liar.register_fake(lambda x: x.new_empty(x.shape, dtype=torch.float16))
try:
    torch.library.opcheck(liar, (torch.ones(3),), test_utils="test_faketensor")
except Exception as error:
    print(str(error).partition(" (scroll")[0])

# %% [markdown]
# Now `torch.compile`. `fullgraph=True` makes it an error if there is anything that it cannot read.
# (`aot_eager` is its way to read forward and backward without its code generator, which would need
# a C++ compiler here.) **Predict** the number of launches, forward and backward.

# %%
@torch.compile(backend="aot_eager", fullgraph=True)
def compiled(x):
    return torch.relu(2 * my_operator(x, *weights, "sigmoid")[0])


with launches_of() as launches:
    y = compiled(x)
    found = torch.autograd.grad(y.sum(), [x, *weights])
expected = torch.autograd.grad(torch.relu(2 * theirs(x)).sum(), [x, *weights])
errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
print(f"launches: {len(launches)}; all five gradients within 1e-5 of PyTorch's: {max(errors) < 1e-5}")

# %% [markdown]
# As many as without it (in the simulator five, two of them forward). The box was carried through as one piece, and
# what stands around it (the doubling, the ReLU) belongs to the compiler.
#
# ### Autocast
#
# **Autocast** lets a network with float32 weights compute with 16 bits where that is safe,
# operator by operator. Around a convolution it converts the weights, each time. So in
# torchvision's block the two dense layers, which are nothing as arithmetic, get four more kernels
# that only convert.
#
# Yours need not be converted. It takes `x` in bfloat16 with weights in float32 and adds in float32
# anyway; and an operator that has told autocast nothing is left alone by it. What it has to promise
# is that `y` has the type that PyTorch's would have:

# %%
half = x.detach().bfloat16()
with torch.no_grad(), launches_of() as launches:
    with torch.autocast(device, dtype=torch.bfloat16):
        y_theirs, y = theirs(half), my_operator(half, *weights, "sigmoid")[0]
    exact = theirs.double()(half.double())
theirs.float()
for name, each in (("torchvision's", y_theirs), ("yours", y)):
    print(f"{name:13} {each.dtype}, relative error {(each - exact).norm() / exact.norm():.4f}")
print(f"launches of the course's kernels: {len(launches)}")

# %% [markdown]
# (bfloat16 keeps 8 binary digits, so 0.002 is what rounding `y` alone costs.)
#
# ## 4 · A module in the place of another
#
# The course's module around such an operator is `nn.SqueezeExcitation`. It takes torchvision's
# weights by `load_state_dict`. That works because
# its parameters have **the same names and shapes**. The dictionary of all parameters by name is a
# network's **state_dict**. It is what one saves and publishes, so whoever changes a name breaks
# everybody's files.

# %%
block = nn.SqueezeExcitation(12, 3, torch_nn.SiLU).to(device)
print(block.load_state_dict(theirs.state_dict()))
for name, tensor in block.state_dict().items():
    print(f"{name:12} {tuple(tensor.shape)}")

# %% [markdown]
# The layers `fc1` and `fc2` are held as the 1×1 convolutions that torchvision made them. Ours
# never *calls* them. It takes their numbers and computes everything in its own kernels. That is
# what **drop-in** means: whoever looks at the module from outside sees no difference but the
# time.
#
# ### Exercise: swap the blocks of a network
#
# Now there is a network, perhaps trained for days, and an optimiser that holds its parameters.
# Replace all blocks of the class `old_type`, wherever they are. `make_new(old)` makes you a new
# block of the right sizes, in training mode, with random weights of its own. Return the list of
# the names, in the order of `model.named_modules()`.
#
# **Predict:** what happens to the training if you *copy* the weights into the new blocks?

# %% exercise="swap_blocks"
def swap_blocks(model, old_type, make_new):
    swapped = []
    for name, old in list(model.named_modules()):
        if isinstance(old, old_type):
            TODO  # 1. a new block that has the old one's weights and its mode
            TODO  # 2. put it where the old one was: who holds it?
            swapped.append(name)
    return swapped


check("swap_blocks", swap_blocks)

# %%
hint("swap_blocks")

# %% [markdown]
# (With copies all looks well, and the outputs are equal. But the optimiser was given the *old*
# parameters. It goes on training these, which nobody uses any more, and SE never learns again.
# Such a bug is found after weeks, if at all.)
#
# On B4:

# %%
def make_new(old):
    activation, gate = type(old.activation), type(old.scale_activation)
    return nn.SqueezeExcitation(old.fc1.in_channels, old.fc1.out_channels, activation, gate)


torch.manual_seed(0)
model = models.create_model("efficientnet_b4", num_classes=5, use_cuda_kernels=False).to(device)
before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
swapped = use("swap_blocks", swap_blocks)(model, SqueezeExcitation, make_new)
after = model.state_dict()
same = list(before) == list(after) and all(before[n].equal(after[n]) for n in before)
print(f"{len(swapped)} blocks swapped, from {swapped[0]} to {swapped[-1]}")
print(f"state_dict of {len(after)} tensors: same names, same order, same bits: {same}")

# %% [markdown]
# ### The course's way
#
# The course has this as a function for everybody, `nn.replace_layers(model)`. It takes a shorter
# way than you did. It leaves the block where it is and changes its *class*. So all that anybody
# holds stays valid, hooks as well as a reference to the block itself. It knows the blocks of other
# families of networks, too, and every other layer that the course has kernels for; `types` says
# which of them you want. What it left alone, it lists with the reason. `restore()` goes back.

# %%
model = models.create_model("efficientnet_b4", num_classes=5, use_cuda_kernels=False).to(device)
swapped = nn.replace_layers(model, types=[SqueezeExcitation])
for name, block, kind in swapped.replaced[:2]:
    print(f"{name}: {block.fc1.in_channels} channels, a {kind.__qualname__} of {kind.__module__}")
print(f"{len(swapped.replaced)} swapped, {len(swapped.left)} left alone")
swapped.restore()
print("torchvision's again:", sum(type(m) is SqueezeExcitation for m in model.modules()))

# %% [markdown]
# ### Proof
#
# Same outputs, same gradients? Your `swap_blocks` now puts *your operator* into the network. On a
# GPU the cell below runs the whole network. Without one, it runs the first four of its nine stages,
# with ten SE blocks, in the simulator, which would take minutes for the rest. And since a proof that
# compares PyTorch with PyTorch looks just like a good one, the launches are counted.

# %%
class MyBlock(SqueezeExcitation):  # torchvision's layers and names, and your operator
    def forward(self, x):
        weights = [p for layer in (self.fc1, self.fc2) for p in (layer.weight, layer.bias)]
        return my_operator(x, *weights, "sigmoid")[0]


def make_mine(old):
    return MyBlock(old.fc1.in_channels, old.fc1.out_channels, type(old.activation)).to(device)

# %%
part = (model.features[:4] if SIMULATED else model).eval()  # no chance in it: no dropout
torch.manual_seed(1)
pictures = torch.randn(2, 3, *((32, 32) if SIMULATED else (128, 128)), device=device)
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def output_and_gradients():
    with launches_of() as launches:
        y = part(pictures)
        found = torch.autograd.grad((y * y).sum(), list(part.parameters()))
    return y.detach(), found, len(launches)

# %%
y_theirs, gradients_theirs, n_theirs = output_and_gradients()
swapped = use("swap_blocks", swap_blocks)(part, SqueezeExcitation, make_mine)
y, gradients_mine, n_mine = output_and_gradients()
errors = [((a - b).norm() / b.norm()).item()
          for a, b in zip(gradients_mine, gradients_theirs, strict=True)]
print(f"{len(swapped)} blocks; launches of the course's kernels: {n_theirs} before, {n_mine} after")
print("output: relative difference below 1e-5:",
      ((y - y_theirs).norm() / y_theirs.norm()).item() < 1e-5)
print(f"{len(errors)} gradients: the largest relative difference is below 1e-4:", max(errors) < 1e-4)

# %% [markdown]
# (They are not equal to the last bit, and cannot be: PyTorch adds in another order.)
#
# A user need not even know. `models.create_model("efficientnet_b4", num_classes=5)` builds the
# network and swaps the blocks. Where there is no GPU, the course's own modules run PyTorch's
# operators, since that is what somebody without a GPU wants of a network. (With
# `COURSE_LIB_SIMULATOR=1`, set before Python starts, they run our kernels in the simulator.) It says
# once which way it took: that is the line in brackets that you have seen above.
#
# ## 5 · Another family, another gate
#
# A drop-in module soon meets networks its author did not think of. **MobileNetV3** is made for
# telephones, and there exponentials are dear. Its gate is the **hard sigmoid**, which is made of
# three straight pieces:
#
# $$ \text{hard sigmoid}(z) = \frac{\min(\max(z + 3, 0), 6)}{6} $$

# %%
z = np.linspace(-6, 6, 97)
plot.curves(z, {"sigmoid": 1 / (1 + np.exp(-z)), "hard sigmoid": np.clip(z + 3, 0, 6) / 6},
            xlabel="logit z", ylabel="gate", title="Two gates")

# %% [markdown]
# In the middle its slope is 1/6, on both sides it is 0. And **at the corners**, at −3 and 3,
# there is no slope. One has to choose, and a drop-in has to choose what PyTorch chose: 0. One
# might think that nobody ever meets exactly 3. But with 16 bits there are few numbers, and 3 is
# one of them.
#
# ### Exercise: backward through the gate
#
# From lesson 6: `y[plane, place] = x[plane, place] * gate(logit[plane])`, where a **plane** is
# one channel of one image. Write the kernel for `dlogit`. A warp for each plane; `dy` and `x` are
# of shape `(n_planes, n_places)`. **Predict:** why is there a sum in it?

# %% exercise="hard_gate_backward"
@cuda.jit
def hard_gate_backward(dy, x, logit, dlogit):
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < logit.size:
        total = ZERO
        TODO  # 1. this lane's part of what the loss has to say about the gate
        total = warp_sum(total)
        if lane == 0:
            dlogit[plane] = TODO  # 2. what it has to say about the logit


check("hard_gate_backward", hard_gate_backward)

# %%
hint("hard_gate_backward")

# %% [markdown]
# (Why a sum? One gate multiplies a whole plane, so every number of the plane has a say in its
# gradient.) Beside PyTorch's:

# %%
kernel = use("hard_gate_backward", hard_gate_backward)
logit = torch.tensor([-5, -3, -2.9, 0, 1, 3, 5], requires_grad=True)
x, dy = torch.randn(2, 7, 50)
(x * torch.nn.functional.hardsigmoid(logit)[:, None]).backward(dy)
dlogit = np.zeros(7, np.float32)
kernel[4, 64](*(each.detach().numpy() for each in (dy, x, logit)), dlogit)
print("PyTorch:", logit.grad.numpy().round(4))
print("yours:  ", dlogit.round(4))

# %% [markdown]
# The course's kernels know both gates, and two activations for the hidden layer. So the same line
# works for a whole shelf of networks:

# %%
for name in ("mobilenet_v3_small", "regnet_y_400mf", "efficientnet_v2_s"):
    other = torchvision.models.get_model(name)
    found = nn.replace_layers(other, types=[SqueezeExcitation]).replaced
    kinds = sorted({str((each.module.activation, each.module.scale_activation)) for each in found})
    print(f"{name:20} {len(found):3} blocks swapped, {' '.join(kinds)}")

# %% [markdown]
# Another good place for a break.

# %% [markdown]
# ## 6 · Before and after
#
# You have written down a guess and computed a prediction. Now the measurement: a training step of
# B4, 32 pictures of 380 × 380, with bfloat16 autocast and with float32 (TF32 allowed). It was
# measured in both memory formats. The first two lines are those of the faster one; where a line
# says *contiguous*, channels come first, else last. Each of ours is compared with PyTorch's in the
# same format. The last line is about the same step without Python, and explained below.

# %%
for precision in ("bfloat16", "float32"):
    if step := measured("efficientnet.step", dtype=precision):
        ms = {row["label"]: row["microseconds"] / 1e3 for row in step["rows"]}
        for label, each in ms.items():
            same_format = ms["PyTorch eager" + label.removeprefix("ours")] if "ours" in label else 0
            ratio = f", {same_format / each:.3f} times as fast" if same_format else ""
            print(f"{precision:9} {label:29} {each:8.2f} ms{ratio}")
        print("{:9} as a CUDA graph: SE {share:.1%} of the step, {block_speedup:.2f} times as fast; by "
              "Amdahl's law {predicted_ratio:.3f}, measured {measured_ratio:.3f}".format("", **step["amdahl"]))
print(f"predicted: {predicted:.3f}; my guess: {my_guess}")

# %%
both = {}
for precision in ("bfloat16", "float32"):
    step = measured("efficientnet.step", dtype=precision)
    for state in ("before", "after"):
        if step and state in step.get("profile", {}):
            times = step["profile"][state].items()
            both[f"{precision}, {state}"] = {kind: us / 1e3 for kind, us in times}
plot.step_times(both, highlight="squeeze-and-excitation", title="Where the time of a step goes, "
                "before the swap and after", **step["source"]) if both else None

# %% [markdown]
# A step of B4 launches thousands of kernels. Where Python is slower at launching them than the GPU
# at running them, the step takes as long as Python does, and no faster kernel can change that, only
# fewer launches. Compare the times of the steps with those of their kernels in the picture: with
# bfloat16 the GPU is idle for about half of the step. (So bfloat16 can even take longer than float32:
# autocast launches more kernels. And our blocks help in another way than we thought: they launch
# fewer.)
#
# To see what the kernels do by themselves, the step was also **captured as a CUDA graph** (lesson
# 4) and replayed: this takes as long as its kernels take, on any host. It is this ratio that our
# prediction was about.
#
# **Explaining the gap.** The network has gained more than predicted. Look at the assumptions. The
# prediction knew bytes only. It took the share of SE in the *forward* pass for the share in the
# whole step. It assumed that all other kernels are at their limit too, and any that is not makes
# SE's share smaller. On the other side, PyTorch's SE is not at *its* limit: with autocast it
# launches more than ten kernels for each block, and on small planes these take as long to start as
# to run. And it is slower still where channels come last. That makes the share larger, and it
# counts for more: a quarter, as the profile said, and not a sixth.
#
# With the share and the speed-up from the profiles, Amdahl's law comes near to what was measured,
# and still a little below. What it leaves out are the gaps *between* kernels, which belong to no
# kernel. Where there are fewer kernels there are fewer gaps, and the course's kernels get ready while
# the one before them still runs (lesson 4, section 9).
#
# And this is the deeper meaning of Amdahl's law: after the swap SE is a smaller part, so the
# *next* improvement of SE brings less. Batch norm and convolution each take at least twice as long
# now. **Profile again** before you write the next kernel.
#
# ## 7 · Training on leaves
#
# Leaves with diseases, five classes. There are real data sets of such pictures. So that you can
# start at once, the course *draws* some: five hundred leaves, with four diseases and healthy
# ones. They are the same on every machine.

# %%
training, validation = (data.leaves(train=part) for part in (True, False))
print(f"{len(training)} pictures to learn from, {len(validation)} to be tested with")
of_class = [(training.labels == label).nonzero().flatten().tolist() for label in range(5)]
chosen = [places[i] for i in (0, 1) for places in of_class]  # two of each
plot.images([training.images[i].permute(1, 2, 0).numpy() for i in chosen],
            [training.classes[training.labels[i]] for i in chosen], columns=5, pixels=False,
            title="Leaves, 64 × 64 pixels")

# %% [markdown]
# **The split.** A network can learn pictures by heart. So some are held back and only used to
# test it: the **validation** set. The split is made *within each class*, a fifth of each, so that
# no class is missing by chance. That is called **stratified**. And it is decided by the name of
# each file and a seed, so that it is the same tomorrow.
#
# **The network.** B4 needs a GPU. The small network here has a convolution, then two blocks with
# SE, and 80,000 parameters. It learns in a minute or two on two cores of a CPU. An **epoch** is one pass over all
# training pictures; each time, they are mirrored, turned and recoloured at random
# (**augmentation**), so that there is more to see than 400 pictures.
#
# **Predict:** someone who guesses is right in 20 % of the cases. Where will the curves end?

# %%
model, history = train.train_leaves(
    "small_se_net", epochs=20, use_cuda_kernels=not SIMULATED,  # the simulator would take hours
)
plot.learning_curves(history, title="Twenty epochs on drawn leaves")

# %%
by_class = train.accuracy_by_class(model, validation)
print(f"validation: {history[-1]['validation_accuracy']:.0%} right")
print(", ".join(f"{name} {share:.0%}" for name, share in by_class.items()))

# %% [markdown]
# (The loss is lesson 5's cross-entropy. Its unit, *nats*, only says that the logarithm is the
# natural one.) Two lines may diverge, and this tells something. If the network is much better on
# training pictures than on others, it is learning by heart (**overfitting**): one wants more
# pictures, or more augmentation. If both are poor, it should learn for longer or be larger. (The
# augmented pictures are harder than the plain ones of the test, so that validation may also be
# *ahead*.) And a class that is much worse than the others is worth a look at its pictures: rust
# has dots of a pixel or two.
#
# Some of the answers. The number is the probability that the network gives to its answer, by the
# softmax of lesson 3:

# %%
sure, answer = train.predict(model, validation.images).softmax(1).max(1)
sure, answer = sure.cpu(), answer.cpu()
wrong = (answer != validation.labels).nonzero().flatten().tolist()
right = (answer == validation.labels).nonzero().flatten().tolist()
shown = right[:: max(1, len(right) // 4)][:4] + wrong[:4]
names = validation.classes
titles = [f"{names[answer[i]]} ({sure[i]:.0%})" + ("" if answer[i] == validation.labels[i]
          else f"\nis {names[validation.labels[i]]}") for i in shown]
plot.images([validation.images[i].permute(1, 2, 0).numpy() for i in shown], titles,
            pixels=False, title="Right answers, and wrong ones")

# %% [markdown]
# ### A run that is killed
#
# Training takes hours, and machines are switched off. So a run keeps a **checkpoint**: a file
# with all that the next steps depend on. That is more than the weights. The optimiser has a
# memory of its own, batch norm has its running means, the size of the steps (the **learning
# rate**) changes during the run, and so the number of the step must be known. And *random
# numbers*: order and augmentation must go on as they would have. The course takes a leaf out of
# lesson 5's book: its random numbers depend on seed and position only, so there is no state to
# keep.
#
# The test of a checkpoint is simple and hard: interrupt a run, resume it, and compare with one
# that was never interrupted. **Every bit must be the same.** Here `report`, which is called after
# each epoch, interrupts the first run:

# %%
import tempfile
from pathlib import Path

options = dict(epochs=2, image_size=24, checkpoint_steps=5, use_cuda_kernels=False)


def pull_the_plug(epoch):
    raise KeyboardInterrupt(f"epoch {epoch['epoch']} has just ended")


with tempfile.TemporaryDirectory() as folder:
    try:
        train.train_leaves("small_se_net", output=folder, report=pull_the_plug, **options)
    except KeyboardInterrupt as reason:
        print(f"interrupted: {reason}; there is {[p.name for p in Path(folder).glob('*.pt')]}")
    resumed, _ = train.train_leaves("small_se_net", output=folder, resume=True, **options)
whole, _ = train.train_leaves("small_se_net", **options)

# %%
pairs = zip(resumed.state_dict().items(), whole.state_dict().values(), strict=True)
print("every bit the same:", all(torch.equal(a, b) for (_, a), b in pairs))

# %% [markdown]
# What if the plug is pulled *while* the checkpoint is being written? The file is first written
# under another name and then renamed. A file system does the renaming as a whole or not at all,
# so there is always one complete checkpoint.
#
# On the command line, with your own pictures (a folder for each class) and the large network:
#
# ```sh
# python -m course_lib train leaves --model efficientnet_b4 --data path/to/pictures
# ```
#
# ## 8 · What was compiled, and where it is kept
#
# A kernel is compiled when it is first launched with certain types: once for float32, once for
# bfloat16, and so on. Each such version is a **specialisation**. Compiling takes long, a second
# or more for a large kernel, and a network has dozens. So the course keeps what was compiled in
# files: the **on-disk cache**. The next process finds it there.
#
# To see it, let us start two processes, one after the other, with a cache of their own that is
# empty at the beginning. Each of them needs kernels of squeeze-and-excitation for an H200. (A
# compiler needs no GPU.)

# %%
import json
import os
import subprocess

cache_folder = tempfile.TemporaryDirectory()
variables = {"COURSE_LIB_CACHE": cache_folder.name, "PYTHONPATH": os.pathsep.join(sys.path)}


def first_call():
    """What a new process needs to get its kernels, and how many files are in the cache then."""
    command = [sys.executable, "-m", "course_lib.benchmarks.kernel_cache",
               "squeeze_excite.forward", "--compile-only"]
    environment = os.environ | variables | {"COURSE_LIB_SIMULATOR": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr.splitlines()[-1]

# %% tags=["varies"]
calls = [first_call() for _ in range(2)]
for name, call in zip(("first process", "second process"), calls, strict=True):
    if isinstance(call, str):  # the compiler, numba-cuda, cannot be installed on macOS
        print(f"{name} failed: {call}")
    else:
        print(f"{name:15} {call['microseconds'] / 1e3:8.1f} ms, then {call['files']} files are there")

# %% [markdown]
# (Not stored, since it is your machine's: the second should be many times faster.) The recorded
# run, on a GPU, with the launch and everything else that belongs to a first call, beside
# `torch.compile`, which has a cache as well:

# %%
first_calls = measured("kernel_cache.first_call")
ms = [row | {"microseconds": row["microseconds"] / 1e3} for row in first_calls["rows"]] if first_calls else []
ms and plot.times(ms, xlabel="time of the first call in a new process (ms)", **first_calls["source"],
                  title="With a full cache, nothing is compiled")

# %% [markdown]
# ### The list
#
# `python -m course_lib kernels` prints all that is in the cache. Here is the gist of it:

# %%
from unittest import mock

from course_lib import kernels_command

with mock.patch.dict(os.environ, variables):  # for a moment, the cache is that of the two processes
    rows = kernels_command.rows()
cache_folder.cleanup()
for row in rows:
    print(f"{row.kernel} of {row.operation}, for {row.chip}: {row.registers} registers, "
          f"{row.shared_bytes} bytes of shared memory, {row.stack_bytes} of stack; {row.source}")

# %% [markdown]
# You know what *registers* and *shared memory* decide (lesson 4, section 5). The *stack* holds
# what found no place in registers, in local memory: it should be small or 0. *As built* says that
# the source is still the one that was compiled. With `--ptx name` it prints the kernel in PTX, the
# assembly language of all NVIDIA GPUs, with `--sass name` in SASS, the instructions of this chip,
# which are made from PTX; with `--clear` it empties the cache.
#
# ### When is a compiled kernel out of date?
#
# When its source has changed. Sounds simple. But a kernel calls device functions, perhaps from
# another file, and these use constants. numba's own cache looks at the date of *one* file, and so
# it missed a changed device function elsewhere: one measures an old kernel and wonders. The
# course's key is a **fingerprint**: a hash of the syntax tree of the kernel and of everything that
# it refers to, with the versions of compiler and Python. Comments and docstrings do not count.
# **Predict:** does a change of `SLOPE` count?

# %%
from course_lib.runtime.compile.fingerprint import fingerprint

SLOPE = 6.0


@cuda.jit(device=True)
def gate_of(z):
    return min(max(z + np.float32(3), np.float32(0)), np.float32(6)) / np.float32(SLOPE)


@cuda.jit
def gates(z, y):
    i = cuda.grid(1)
    if i < z.size:
        y[i] = gate_of(z[i])


first_print = fingerprint(gates)
SLOPE = 5.0
print("after the constant was changed, the same:", fingerprint(gates) == first_print)
SLOPE = 6.0
print("changed back, the same:", fingerprint(gates) == first_print)

# %%
import math


@cuda.jit(device=True)
def gate_of(z):
    return np.float32(1) / (np.float32(1) + math.exp(-z))


print("after the device function was edited, the same:", fingerprint(gates) == first_print)

# %% [markdown]
# (A change back finds the old file again: nothing is compiled twice.)
#
# ## What the profiler says
#
# One picture of the whole network is worth more than many of a kernel. When you have a network of
# your own before a profiler, ask in this order:
#
# 1. **Is the GPU busy at all?** If there are gaps between kernels, the host is the slower one
#    (lesson 4, section 9), and no kernel will help.
# 2. **Which operations are on top, and are they at their limit?** Bytes over time is bandwidth.
#    What is at the limit of the memory can only be fused.
# 3. **What share do they have?** Then Amdahl's law, *before* any work is done.
#
# ## Where the real libraries go further
#
# - `torch.compile` takes the whole network. It fuses batch norm, SiLU and SE's scaling with their
#   neighbours, which no module alone can do. It has a kernel for the mean and one for the
#   scaling, and reads `x` twice. A registered operator with a fake, such as ours, goes through it
#   as one piece.
# - **cuDNN** and **TensorRT** put batch norm into the weights of the convolution before it, for
#   inference.
# - Newer networks have voted on SE in their own way. **EfficientNetV2** by the same authors has
#   it only in the later stages, where planes are small: measured in time and not in FLOPs, it was
#   too dear in the early ones.
#
# ## Three questions
#
# <details><summary>1. A part has a share of 4 % of the time. Your boss wants the whole to be 1.1
# times as fast. How many times as fast must the part become?</summary>
#
# It can't. The limit is 1 / 0.96 = 1.042. Ask for the profile and choose another part.
# </details>
#
# <details><summary>2. After the swap you save the state_dict, and a colleague who has never heard
# of this course loads it into torchvision's network. What does she have to change?</summary>
#
# Nothing. Names, shapes and types are the same. Had you saved the whole <code>model</code> object
# (with pickle), she would need the course for its class, or you would have to
# <code>restore()</code> first.
# </details>
#
# <details><summary>3. Why does the fake of an operator get <code>weight1</code>, although all
# results have the sizes of <code>x</code>?</summary>
#
# Not all: <code>hidden</code> has a number for each hidden neuron, and how many there are only
# the weights know.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# Lesson 8: convolution. In the first picture of this lesson, 97 % of the FLOPs were convolutions
# (90.8 % and 6.6 %, which the picture rounds), and lots of the bytes too. They are the heart of such networks, and the first operation of this
# course for which arithmetic can be the limit.
