# %% [markdown]
# # 15 · Tiny-ImageNet
#
# **After this lesson** you can make photographs ready for a network with one kernel, see why a softmax
# before the cross-entropy is a fault, write a loss and its gradient in one kernel, find where the time
# of a step goes, and say what is not worth optimising.
#
# **You need** [lesson 5](05_fusing_softmax.ipynb) (cross-entropy) and
# [lesson 11](11_fashion_mnist.ipynb) (a training step); Amdahl's law is of
# [lesson 7](07_efficientnet_drop_in.ipynb).
#
# **Time:** 100 minutes; there are good places to pause after sections 3 and 5. All cells together run
# in about a minute without a GPU. What was measured on a GPU for the course is shown from its record, and
# where nothing was recorded the lesson says so. The words are collected in the [glossary](glossary.md).

# %%
import math
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from course_lib import bench, cuda, data, models, plot, results_table, simulator, train

# %%
from course_lib.runtime.intrinsics import online_add, warp_online, warp_sum
from course_lib.teach import TODO, check, hint, progress, use

ZERO, ONE, MINUS_INF = np.float32(0), np.float32(1), np.float32(-np.inf)
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
# ## 1 · Photographs
#
# The clothes of lesson 11 were grey, centred and 28 pixels wide. Photographs are not. **Tiny-ImageNet**
# (of Stanford's course cs231n) is a small part of ImageNet: 200 classes, from goldfish to altar, with 500
# photographs each to learn from and 10,000 more to be tested with, in colour, 64 × 64 pixels. It is the
# smallest set on which people take a network for photographs seriously, and it is a hard one: plain
# networks like ours know 35 to 45 % of the test photographs, a ResNet-18 about 60 %.
#
# The photographs are not part of this course. Whoever has them, in a folder `tiny-imagenet-200` within the
# folder that the environment variable `COURSE_DATA` names, sees ten of their classes below. Everybody
# else gets leaves that the course *draws*: 500 in colour, healthy or with one of four diseases, the same on
# every machine. Every cell is the same for both.

# %%
folder = Path(os.environ.get("COURSE_DATA", "")) / "tiny-imagenet-200"
REAL = "COURSE_DATA" in os.environ and folder.exists()
SIDE = 32  # half of their size, so that a CPU trains in seconds
training, held = data.images(folder if REAL else None, load_subset=10, image_size=SIDE) if REAL else (
    data.images(image_size=SIDE))
names = training.classes
photos = training.images.permute(0, 2, 3, 1).numpy()  # (N, H, W, C), as a camera has them
print(f"{len(training):,} images to learn from, {len(held):,} to be tested with, {len(names)} classes")
shown = [int((training.labels == c).nonzero()[n]) for c in range(5) for n in (0, 1)]
plot.images([photos[k] for k in shown], [names[training.labels[k]] for k in shown], columns=5,
            title="Two of each of five classes")

# %% [markdown]
# ### Something to beat
#
# Before any network, the simplest thing that could work: the mean colour of a picture. For each class take the
# mean of these three numbers over all training pictures, and answer with the class whose mean is nearest.
# **Predict:** how often is it right? A guess is right once in `len(names)`.

# %%
colour = training.images.float().mean(dim=(2, 3))
centres = torch.stack([colour[training.labels == c].mean(dim=0) for c in range(len(names))])
nearest = torch.cdist(held.images.float().mean(dim=(2, 3)), centres).argmin(dim=1)
to_beat = (nearest == held.labels).float().mean().item()
print(f"a guess is right in {1 / len(names):.0%} of the cases, the mean colour in {to_beat:.0%}")

# %% [markdown]
# A network that is not better than this has learnt colours, and not shapes. (It is worth ten minutes every time.
# Some published networks do not beat their baseline; nobody had looked.)
#
# ### The network
#
# Three convolutions and two linear layers, the plain network of many a guide to this set:
#
# | layer | what it makes of 64 × 64 pixels |
# |---|---|
# | convolution 3 × 3, batch norm, ReLU, pooling | 32 channels of 32 × 32 |
# | the same | 64 channels of 16 × 16 |
# | the same | 128 channels of 8 × 8, flattened: 8,192 numbers |
# | linear, ReLU, dropout of a half | 512 numbers |
# | linear | 200 logits |
#
# **Predict** which layer has the most parameters, and which the most work. (Lesson 11 had a network of this kind.)

# %%
whole = models.TinyImageNetCNN(layers=nn)
places, work = {32: 64**2, 64: 32**2, 128: 16**2}, {}  # how often each weight of a convolution is used
for name, layer in whole.named_modules():
    if isinstance(layer, (nn.Conv2d, nn.Linear)):
        used = places[layer.out_channels] if isinstance(layer, nn.Conv2d) else 1
        work[name] = 2 * layer.weight.numel() * used
        print(f"{name:13} {layer.weight.numel():9,} weights, {work[name] / 1e6:5.1f} · 10⁶ FLOPs a picture")
print(f"in all {sum(p.numel() for p in whole.parameters()):,} parameters")

# %% [markdown]
# 96 % of the parameters are in one linear layer. A convolution's weights are few, and used thousands of times.

# %% [markdown]
# ## 2 · Made ready on the GPU
#
# 100,000 photographs are 1.2 GB as bytes. They fit on any GPU, so they are decoded *once*, and lie there. But
# 500 pictures of a class are few for four million weights. So each picture is changed a little, each time anew:
#
# - **mirrored**, with a chance of one half. A goldfish that swims to the left is a goldfish;
# - **cropped**: put 8 black pixels around it, and cut out 64 × 64 again, anywhere. It moves by up to 8 pixels;
# - **normalised**: from each channel its mean is subtracted, and the result divided by its deviation, so that
#   all numbers are about 1 in size;
# - and **laid out anew**: a decoder gives bytes as (N, H, W, C), the channels of a pixel side by side, and
#   convolutions here take float32 as (N, C, H, W).
#
# In PyTorch's words these are five operators. **Predict:** a picture of 64 × 64 × 3 bytes becomes float32. How many
# bytes do five kernels move, each of which reads and writes all of it, four of them in float32? And one?
#
# One kernel reads 12 KB and writes 48. Five move 12 + 48 + 4 · 96, more than seven times as much.
#
# ### Exercise: move, mirror, scale
#
# `draws` is (N, 3): how far down the crop begins, how far to the right (both from 0 to 2 · padding), and 1 for
# pictures that are mirrored. Each is cut out first, and then mirrored. A byte becomes
# `byte * factor[c] + shift[c]`, one of the black pixels around too. Any number of threads.

# %% exercise="augment"
@cuda.jit
def augment(images, draws, padding, factor, shift, x):
    H, W, C = images.shape[1:]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        n, c, h, w = TODO  # which number of x is this?
        value = ZERO
        TODO  # from which row and column does it come, and are they in the picture?
        x[n, c, h, w] = value * factor[c] + shift[c]


check("augment", augment)

# %%
hint("augment")

# %%
MEAN, STD = np.array(train.augmenting.MEAN), np.array(train.augmenting.STD)
factor, shift = (1 / (255 * STD)).astype(np.float32), (-MEAN / STD).astype(np.float32)
ready, one = use("augment", augment), np.ascontiguousarray(photos[[shown[4]] * 8])
draws = np.random.default_rng(0).integers(0, 9, (8, 3))  # 4 black pixels around, here
draws[:, 2] = np.arange(8) % 2
draws[0] = 4, 4, 0
x = np.zeros((8, 3, SIDE, SIDE), dtype=np.float32)
ready[16, 256](one, draws, 4, factor, shift, x)
back = (np.moveaxis(x, 1, 3) * STD + MEAN).clip(0, 1)
plot.images(list(back), [f"down {d}, right {r}{', mirrored' if m else ''}" for d, r, m in draws - [4, 4, 0]],
            title="One picture, eight times: the first as it is")

# %% [markdown]
# ### Look inside
#
# Each thread writes a float beside its neighbour's, 4 bytes apart. It *reads* bytes that are 3 apart.
# **Predict** how many sectors of 32 bytes a warp asks for in each case, and how many times each byte is read.

# %%
with simulator.trace() as trace:
    simulator.run(ready, 4, 256, one[:1], draws[:1], 4, factor, shift, np.zeros_like(x[:1]))
for site in trace.sites:
    if site.space == "global" and site.requests >= 32:
        print(f"line {site.line - min(s.line for s in trace.sites):2}: {site.op:5} of {site.array:7}"
              f"{site.requests:4} requests, {site.sectors / site.requests:4.1f} sectors each")

# %% [markdown]
# ## 3 · A loss that cannot fall
#
# The network ends in 200 numbers, and you want probabilities. So you put a softmax at its end. The loss is PyTorch's
# `cross_entropy`. It all runs; gradients are computed; no error, no NaN. To see what happens we train two
# networks with 200 outputs (and the drawn leaves use five of them). They have the same first weights, the same
# batches and the same optimiser. One has the softmax. **Predict** both curves.

# %%
prepare = train.augmenting.Normalise("cpu")


def trained(softmax_first, outputs=200, epochs=6, batch=20):
    """The losses of all steps, and the size of the first gradient."""
    torch.manual_seed(0)
    model, losses = models.TinyImageNetCNN(outputs, widths=(16, 32, 64), hidden=128, image_size=SIDE, layers=nn), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for rows in torch.cat([torch.randperm(len(training)) for _ in range(epochs)]).split(batch):
        logits = model(prepare(training.images[rows]))
        loss = cross_entropy(logits.softmax(1) if softmax_first else logits, training.labels[rows])
        losses.append(step_of(optimizer, loss))
    return np.array([loss for loss, _ in losses]), losses[0][1]

# %%
def step_of(optimizer, loss):
    """One step; the loss, and the norm of all gradients together."""
    optimizer.zero_grad()
    loss.backward()
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    optimizer.step()
    return loss.item(), sum(g.square().sum() for g in gradients).sqrt().item()


right_way, right_gradient = trained(False)
twice, twice_gradient = trained(True)
plot.curves(range(len(twice)), {"cross-entropy of logits": right_way, "softmax before it": twice},
            xlabel="step", ylabel="cross-entropy as it was computed", title="200 outputs: one of the two does not learn")

# %% [markdown]
# One falls; the other is stuck at once, near the $\ln 200 = 5.3$ of a guess. Nothing is broken: the loss is
# what it was asked to be. `cross_entropy` has a softmax in it (lesson 5), so here are two of them, one after
# the other, and the second is given numbers from 0 to 1. **Predict:** how small can this loss become, if the
# network is *sure* of the right class, and gives it probability 1 and all others 0?

# %%
def floor(classes):
    """The cross-entropy of probabilities of 1 for the right class and 0 for the others."""
    return math.log(1 + (classes - 1) / math.e)


for classes in (2, 5, 10, 200, 1000):
    print(f"{classes:5} classes: a guess has {math.log(classes):.2f}, and no network less than {floor(classes):.2f}")
print(f"the first gradient: {right_gradient:.2f} with logits, {twice_gradient:.3f} with a softmax before")

# %% [markdown]
# $e^1$ and $e^0$ are all that it gets to see: no class can stand out. With 200 classes only a fifth of the way to 0 is
# open. And the gradient is a hundred times as small: it has to pass through both softmaxes, and each of them
# multiplies by probabilities of about 1/200. What is worse: once the first softmax is sure of one class (of
# any), its gradient is 0 in float32. That is where the curve lies still. With two classes hardly anything is to
# be seen, and this is why the fault lives long: it is small where people test, and ruins what they then train.
#
# A rule: **a network ends in logits.** Who wants probabilities takes a softmax *of them*, outside of training.

# %% [markdown]
# ### Not too sure
#
# There is a weaker cure for being sure. Plain cross-entropy is never content: a picture with $p = 0.999$ still
# pulls its logit up. **Label smoothing** (Szegedy and others, 2015) asks for a little less: of the 1 that the true
# class should have, a share $\varepsilon$ is spread over all $C$ classes, the true one too:
#
# $$ q_c = \frac{\varepsilon}{C} + (1 - \varepsilon) \cdot 1_{c = t} \qquad \text{loss} = -\sum_c q_c \log p_c
# \qquad \frac{\partial\,\text{loss}}{\partial x_c} = p_c - q_c $$
#
# **Predict** the smallest loss with $\varepsilon = 0.1$ and 200 classes. Is it 0?
#
# There is something new in the kernel, too. In lesson 5, forward and backward were two kernels, and the second read the logits
# again. But the loss of a training step is the *last* thing of the way there and the first of the way back: its `dloss` is 1/N
# for each row, known in advance. So one kernel can do both while the row is in the cache.
#
# ### Exercise: the smoothed loss and its gradient
#
# A warp for each row. `loss[row]` is the row's own loss; `dlogits` is the gradient of the *mean* over the N rows. With $m$ the
# row's maximum and $s = \sum e^{x_c - m}$, the loss is $\log s + \sum_c q_c (m - x_c)$, in which nothing cancels.
# `online_add` and `warp_online` are lesson 3's. Some rows have logits of −3 · 10³⁸, as masked classes do.

# %% exercise="smooth_cross_entropy"
@cuda.jit
def smooth_cross_entropy(logits, target, smoothing, loss, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    N, C = logits.shape
    if row < N:
        largest, total, below = MINUS_INF, ZERO, ZERO
        TODO  # 1. maximum and sum of the row
        TODO  # 2. once more through the row: what is wanted of a class? The gradient; this lane's part of the loss
        if lane == 0:
            loss[row] = TODO


check("smooth_cross_entropy", smooth_cross_entropy)

# %%
hint("smooth_cross_entropy")

# %%
rng, smooth = np.random.default_rng(0), use("smooth_cross_entropy", smooth_cross_entropy)
logits, labels = rng.normal(0, 3, (8, 200)).astype(np.float32), rng.integers(0, 200, 8)
loss, dlogits = np.zeros(8, dtype=np.float32), np.zeros((8, 200), dtype=np.float32)
smooth[8, 32](logits, labels, np.float32(0.1), loss, dlogits)
theirs = torch.tensor(logits, requires_grad=True)
value = cross_entropy(theirs, torch.tensor(labels), label_smoothing=0.1)
value.backward()
print(f"largest difference from PyTorch: loss {abs(loss.mean() - value.item()):.0e}, "
      f"gradient {abs(dlogits - theirs.grad.numpy()).max():.0e}")

# %%
progress()
