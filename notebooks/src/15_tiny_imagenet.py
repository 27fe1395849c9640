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
# **Time:** 140 minutes; there are good places to pause after sections 3 and 5. All cells together run
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
from course_lib.teach import TODO, check, hint, progress, solution, use

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
# smallest set on which people take a network for photographs seriously, and it is a hard one: guides
# report 35 to 45 % of the test photographs for plain networks like ours, and about 60 % for a ResNet-18.
# What this course's own runs reached stands in section 5. One recipe of such a guide is among them. It stays far below what the guide
# reports, with PyTorch's layers as with ours.
#
# The photographs are not part of this course. Whoever has them, in a folder `tiny-imagenet-200` within the
# folder that the environment variable `COURSE_DATA` names, sees ten of their classes below. Everybody
# else gets leaves that the course *draws*: 500 in colour, healthy or with one of four diseases, the same on
# every machine. Every cell is the same for both, but with photographs all of them take some minutes.

# %%
folder = Path(os.environ.get("COURSE_DATA", "")) / "tiny-imagenet-200"
REAL = "COURSE_DATA" in os.environ and (folder / "train").is_dir()
SIDE = 32  # half of their size, so that a CPU trains in seconds
training, held = data.images(folder, subset=10, image_size=SIDE) if REAL else (
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
# A network that is not better than this has learnt colours, and not shapes. It is worth ten minutes every time.
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
# Nineteen in twenty parameters are in one linear layer. A convolution's weights are few, and used thousands of times.

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
# <details><summary>The answer</summary>
#
# One kernel reads 12 KB and writes 48. Five move 12 + 48 + 4 · 96, more than seven times as much.
# </details>
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
plot.images(list(back), [f"{d:+}, {r:+}{', mirrored' if m else ''}" for d, r, m in draws - [4, 4, 0]],
            title="One picture, eight times: where the crop begins (down, right)")

# %% [markdown]
# ### Look inside
#
# Each thread writes a float beside its neighbour's, 4 bytes apart. It *reads* bytes that are 3 apart.
# **Predict** how many sectors of 32 bytes a warp asks for in each case, and how many times each byte is read.

# %%
with simulator.trace() as trace:
    simulator.run(ready, 4, 256, one[:1], draws[:1], 4, factor, shift, np.zeros_like(x[:1]))
for site in trace.sites:
    if site.array in ("images", "x"):
        print(f"{site.op:5} of {site.array:6} {site.requests} requests, "
              f"{site.sectors / site.requests:.1f} sectors each")

# %% [markdown]
# Where neighbours write beside each other, a warp's 32 floats are four whole sectors. (If yours go through the channels first, they are six, and one is read.) Its 32 bytes lie in 96, so three sectors, of which it uses a third. The
# other two channels ask for the same sectors again, and find them in the cache. Memory gives each byte once: of a picture of 64 × 64 pixels, 60 KB
# go through it, 48 of which are written. To read better would save next to nothing.

# %% [markdown]
# ## 3 · A loss that cannot fall
#
# The network ends in 200 numbers, and you want probabilities. So you put a softmax at its end. The loss is PyTorch's
# `cross_entropy`. It all runs; gradients are computed; no error, no NaN. To see what happens we train two
# networks with 200 outputs, of which the drawn leaves use five. They have the same first weights, the same
# batches and the same optimiser. One has the softmax. **Predict** both curves.

# %%
prepare = train.augmenting.Normalise("cpu")


def small(outputs, dropout=0.5):
    """A small network of PyTorch's layers, with the same first weights each time."""
    torch.manual_seed(0)
    return models.TinyImageNetCNN(
        outputs, widths=(16, 32, 64), hidden=128, image_size=SIDE, dropout=dropout, layers=nn)

# %%
def trained(softmax_first, outputs=200, epochs=6, batch=20):
    """The losses of all steps, the size of the first gradient, the share of the unseen pictures that it knows."""
    model, losses = small(outputs), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for rows in torch.cat([torch.randperm(len(training)) for _ in range(epochs)]).split(batch):
        logits = model(prepare(training.images[rows]))
        loss = cross_entropy(logits.softmax(1) if softmax_first else logits, training.labels[rows])
        losses.append(step_of(optimizer, loss))
    right = model.eval()(prepare(held.images)).argmax(1) == held.labels
    return np.array([loss for loss, _ in losses]), losses[0][1], right.float().mean().item()

# %%
def step_of(optimizer, loss):
    """One step; the loss, and the norm of all gradients together."""
    optimizer.zero_grad()
    loss.backward()
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    optimizer.step()
    return loss.item(), sum(g.square().sum() for g in gradients).sqrt().item()


right_way, right_gradient, right_share = trained(False)
twice, twice_gradient, twice_share = trained(True)
plot.curves(range(len(twice)), {"cross-entropy of logits": right_way, "softmax before it": twice}, xlabel="step",
            ylabel="cross-entropy as it was computed", title="200 outputs: one of the two hardly learns")

# %%
print(f"unseen pictures that are known: {right_share:.0%} with logits, {twice_share:.0%} with a softmax before; "
      f"a guess: {1 / len(names):.0%}")

# %% [markdown]
# One falls; the other stays near the $\ln 200 = 5.3$ of a guess. Nothing is broken: the loss is
# what it was asked to be. `cross_entropy` has a softmax in it (lesson 5), so here are two of them, one after
# the other, and the second is given numbers from 0 to 1. **Predict:** how small can this loss become, if the
# network is *sure* of the right class, and gives it probability 1 and all others 0?

# %%
def floor(classes):
    """The cross-entropy of probabilities of 1 for the right class and 0 for the others."""
    return math.log(1 + (classes - 1) / math.e)


for classes in (2, 5, 10, 200, 1000):
    print(f"{classes:5} classes: a guess has {math.log(classes):.2f}, and no network less than {floor(classes):.2f}")
print(f"the first gradient: {right_gradient:.2f} with logits, {twice_gradient:.3f} with a softmax before: "
      f"1/{right_gradient / twice_gradient:.0f} of it")

# %% [markdown]
# $e^1$ and $e^0$ are all that it gets to see: no class can stand out. With 200 classes only a fifth of the way to 0 is
# open. And the gradient is more than a hundred times as small. Cross-entropy's own softmax is not the reason: both networks have
# it. The one that was put before it is: on the way back it multiplies by its probabilities, about 1/200 each. What is worse: where
# it is sure of a class, be it a wrong one, its derivative is nearly 0, and that picture teaches nothing any more. With two classes
# hardly anything is to be seen, and this is why the fault lives long: it is small where people test, and ruins what they then train.
#
# A rule: **a network ends in logits.** Who wants probabilities takes a softmax *of them*, outside of training.

# %% [markdown]
# ### Not too sure
#
# To be *too* sure is a fault all the same, and it has a gentle cure. Plain cross-entropy is never content: a picture with $p = 0.999$ still
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
# `online_add` and `warp_online` are lesson 5's. Some rows have logits of −3 · 10³⁸, as masked classes do.

# %% exercise="smooth_cross_entropy"
@cuda.jit
def smooth_cross_entropy(logits, target, smoothing, loss, dlogits):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    N, C = logits.shape
    if row < N:
        largest, total, below = MINUS_INF, ZERO, ZERO
        TODO  # 1. maximum and sum of the row
        TODO  # 2. once more through the row: what is wanted, the gradient, this lane's part of the loss
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

# %% [markdown]
# <details><summary>The smallest loss</summary>
#
# It is that of $p = q$: the entropy of $q$. With $\varepsilon = 0.1$ and 200 classes $q$ is 0.9005 for the true class and 0.0005 for
# each other, and $-\sum q \log q$ is 0.85. So losses with and without smoothing must not be compared. (Accuracies may.)
# </details>
#
# A good place for a break.

# %% [markdown]
# ## 4 · By heart
#
# Now we train. What trains is what the command `python -m course_lib train images` starts: an `ImageClassifier`, which keeps the
# bytes on the device, draws for each epoch who is moved and mirrored, and makes the pictures ready there.
#
# To see what augmentation is for, take few pictures: twenty of each class, without dropout, thirty times each. One network sees them as
# they are, another one moved by up to four pixels, and mirrored. **Predict** for both: what share of the pictures they
# have learned from do they know in the end, and of those they have never seen?

# %%
from dataclasses import replace

few = torch.cat([(training.labels == c).nonzero()[:20, 0] for c in range(len(names))])
part = replace(training, images=training.images[few], labels=training.labels[few],
               names=tuple(training.names[k] for k in few))


def learned(images, epochs, dropout, **options):
    """(task, history) of a small network."""
    task = train.image_classifier.ImageClassifier(
        small(len(names), dropout), images, held, epochs=epochs, batch_size=20, learning_rate=2e-3, seed=0, weight_decay=0.0,
        optimizer=lambda groups, lr: torch.optim.Adam(groups, lr=lr), **options)
    return task, train.fit(task, {})

# %%
_, as_they_are = learned(part, epochs=30, dropout=0.0, padding=None)
_, augmented = learned(part, epochs=30, dropout=0.0, padding=4)
plot.curves(range(1, 31), {f"{who}, {which}": [100 * entry[key] for entry in history]
                           for who, history in (("as they are", as_they_are), ("augmented", augmented))
                           for which, key in (("learned from", "accuracy"), ("unseen", "validation_accuracy"))},
            xlabel="epoch", ylabel="pictures that it knows (%)", title=f"{len(few)} pictures, thirty times each")

# %% [markdown]
# Without augmentation the network soon knows every picture it has learned from, and long before the end it stops getting better at unseen ones: it has learned *by
# heart* (**overfitting**). With it, no picture comes twice, and there is nothing to learn by heart. The gap between the two
# curves of a network is the thing to look at: where there is none, neither augmentation nor smoothing has anything to cure,
# and both only slow the learning down.
#
# (Ten classes of real photographs are harder: from two hundred pictures little can be learned either way, and thirty rounds of moved ones are too few.)
#
# With all training pictures, and dropout, the gap is small. And how fast is it? **Throughput** counts *pictures*: those of all steps of
# an epoch, divided by its seconds. (Programs that print the batches of a second as "FPS" look worse the larger their
# batches are.)

# %%
task, history = learned(training, epochs=12, dropout=0.5, padding=None)
print(f"learned from: {history[-1]['accuracy']:.0%}; unseen: {history[-1]['validation_accuracy']:.0%}; "
      f"the mean colour: {to_beat:.0%}")

# %% tags=["varies"]
print(f"{task.speed:,.0f} pictures a second on this machine")

# %% [markdown]
# And on a GPU, with pictures of 64 × 64 pixels and the whole network? The command was timed there with our layers and with PyTorch's, step by step: what it
# does to the pictures is part of the step. **Predict** where the host shows: in steps whose kernels are started one by one, or in those captured in a graph (lesson 11)?

# %%
def show_training(found):
    for record in found:
        print(f"{record['precision']}: a step of ours ({record['default']}) makes {record['ratio']:.2f} times as many "
              "pictures a second as the best captured step of PyTorch's layers")
        for row in record["rows"]:
            print(f"  {row['label']:32} {row['images_per_second']:8,.0f} pictures a second")
        return plot.times(record["rows"], xlabel="time of a step (µs)", **record["source"],
                          title=f"A step of training with {record['shape'][0]} pictures")


show_training(measured("tiny_imagenet.training"))

# %% [markdown]
# Captured, our layers win. Started one by one, they *lose*, since each launch of ours costs the host more than one of PyTorch's does
# (lesson 11): the GPU waits for Python, and no kernel matters. The record tells how much, and not why; a profile would (the end of this lesson).

# %% [markdown]
# ## 5 · How good is it?
#
# With 200 classes there are pictures with two right answers: a lake with a boat on it, a dog of either of two breeds. So people
# report two numbers. **Top-1** is accuracy. **Top-5** counts a picture as known if its class is among the five
# largest logits. For that nobody sorts. **Predict:** what is the least you have to know of a row?
#
# ### Exercise: among the k largest
#
# A warp for each row. `right[c]` gets the number of pictures of class c that count as known, so one kernel gives the accuracy of each
# class, and their sum that of all. Of equal logits, the one with the smaller number comes first.
#
# And there is a trap. A network whose weights have become NaN answers NaN for everything, and a comparison with NaN is always false. In a careless
# kernel nothing is larger than the label's logit then, and the network gets 100 %. So NaN counts as standing *before* the label,
# and a label whose own logit is NaN has all C − 1 others before it: its picture is known at k = C, where every picture is, and at no smaller k.

# %% exercise="top_k"
@cuda.jit
def top_k(logits, labels, k, right):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < logits.shape[0]:
        label, before = labels[row], 0
        TODO  # how many stand before the label?
        if lane == 0 and TODO:
            cuda.atomic.add(right, label, 1)


check("top_k", top_k)

# %%
hint("top_k")

# %%
answers, truth = task.predict(held.images).numpy(), held.labels.numpy()
ranked = use("top_k", top_k)


def known(k, logits=answers):
    """How many pictures of each class are known, if k answers are allowed."""
    right = np.zeros(len(names), dtype=np.int32)
    ranked[-(-len(truth) // 4), 128](logits, truth, k, right)
    return right


for k in (1, 2, 5):
    print(f"top-{k}: {known(k).sum() / len(truth):.0%}")
print(f"a network that answers NaN: {known(1, np.full_like(answers, np.nan)).sum() / len(truth):.0%}")

# %% [markdown]
# (Of five classes, five answers are always right. A top-5 means something only beside the number of classes.)
#
# And the real set, with all 200 classes? Each line is a run of the command: its layers, how many epochs, and what share of the pictures it
# knew in the end, of those that it has learned from and of the 10,000 others. **Predict** from section 4 in which of the runs the first number is
# far above the second, and in which it is *below*. (`continuous_integration` is the network of [lesson 17](17_two_pathways.ipynb). `mixed` is MixUp, section 7, with CutMix, which puts a rectangle of one picture into another.)

# %%
runs = measured("tiny_imagenet.runs")
for record in runs:
    print(f"recorded on an {record['source']['device']}, {record['source']['date']}")
    for row in record["rows"]:
        last, whose = row["history"][-1], "ours" if row["kind"] == "ours" else "PyTorch's"
        print(f"{row['label']:26} {whose:9} {len(row['history']):3} epochs: learned from "
              f"{last['accuracy']:4.0%}, unseen {row['accuracy']:.1%}")
    for who, mean in record["guide"].items():
        print(f"a guide's recipe, {who}: {mean['accuracy']:.1%} ± {mean['standard_error']:.1%}")
    for name, why in record["stopped"].items():
        print(f"{name} was stopped {why}")

# %%
def show_learning(found, label):
    for record in found:
        history = next(row["history"] for row in record["rows"] if row["label"] == label)
        return plot.learning_curves(
            history, title=f"{label}, on an {record['source']['device']}, {record['source']['date']}")


show_learning(runs, "tiny_cnn")

# %% [markdown]
# **The guide's recipe underfits.** In all of its runs the first number is *below* the second one, without any mixing. So it has learned nothing by
# heart. (Part of that gap is how the two are measured: pictures that are learned from are moved and mirrored, and half of the 512 numbers are dropped; the unseen
# are as they are, and nothing is dropped.) `tiny_cnn, AdamW` has such a gap, too, a smaller one. The line `tiny_cnn` is the same network, and knows twice as many. The two recipes differ in the optimiser, its rate and how that
# falls, in weight decay, smoothing, precision, the size of a batch, the number of epochs, and in what is tested.
#
# **Two causes: dead ReLUs, and dropout.** We ran the guide's recipe for 8 epochs with PyTorch's own layers, each time with one thing changed (one run each; NVIDIA H200,
# PyTorch 2.11, 2026-11-27). Then we counted those of the 512 ReLUs behind the first linear layer that gave 0 for each of 2,000 unseen pictures. Such a ReLU passes no gradient back
# either, so it stays as it is: it is *dead*. The accuracies are of pictures as they are, without dropout.
#
# | changed | dead, of 512 | known of those learned from | known of the unseen |
# |---|--:|--:|--:|
# | nothing | 495 | 12 % | 12 % |
# | padding of 4 pixels, not 8 | 493 | 13 % | 12 % |
# | not moved, not mirrored | 504 | 10 % | 9 % |
# | no dropout | 489 | 29 % | 27 % |
# | no dropout, not moved, not mirrored | 483 | 39 % | 27 % |
# | Adam's rate 3e-4 | 479 | 18 % | 17 % |
# | Adam's rate 1e-4 | 416 | 23 % | 21 % |
# | batch norm before these ReLUs | 0 | 43 % | 36 % |
#
# In the recipe as it is, 495 of the 512 ReLUs are dead. Batch norm in front of them leaves none dead, and three times as many of the unseen are known. A lower rate
# kills fewer. Without dropout nearly as many are dead, and yet twice as many of the unseen are known: dropout takes half of the 17 numbers that are left. Padding is not a
# cause. Why the ReLUs die was not measured. An explanation that fits: each adds up 8,192 inputs, none of them negative, and Adam moves each weight by about its rate in each
# of the first steps, however small the gradient is. When all weights of a sum move the same way, the sum moves far, and a sum below 0 for every picture never comes back.
#
# The ResNet-18 knows its own pictures by heart, and has the best eyes all the same: a large gap is no proof of a bad network. Where pictures were mixed, those
# learned from are *harder* than the unseen. And for our small network mixing was no gain: it had little by heart that could be cured. But this is one run of each, and
# a few tenths of a point are chance. (The rate of learning falls to 0 along half a cosine, and what is tested are averaged weights: lesson 16.)
#
# ### The worst classes
#
# A mean hides much. **Predict:** if all are known in 80 % of the cases, how far down may a single class be? The command prints such a table after
# each run: the classes that the network knows least, and what it takes them for.

# %%
per_class = known(1) / np.bincount(truth)
best_answer = answers.argmax(axis=1)
for c in np.argsort(per_class, kind="stable")[:5]:
    wrong = np.bincount(best_answer[(truth == c) & (best_answer != c)], minlength=len(names))
    taken = f", {wrong.max()} taken for {names[wrong.argmax()]}" if wrong.max() else ""
    print(f"{names[c]:12} {per_class[c]:5.0%}{taken}")

# %% [markdown]
# A good place for a break.

# %% [markdown]
# ## 6 · Where the time goes
#
# This course spent three lessons on softmax. How much would this network gain by a faster one? Measure first, and before you measure:
# **predict**. Take the whole network and a batch of 128. A kernel takes at least its FLOPs divided by the arithmetic's
# rate, at least its bytes divided by the bandwidth, and never less than two microseconds or so, until it is there and gone again.

# %%
RATE, BANDWIDTH, FLOOR, BATCH = 40e12, 4.0e12, 2.0, 128  # of an H200, about: FLOP/s in float32 (lesson 8), bytes/s (lesson 4), µs


def least(flops, floats):
    """The microseconds that a kernel needs at least."""
    return max(flops / RATE * 1e6, 4 * floats / BANDWIDTH * 1e6, FLOOR)

# %%
def inference():
    """µs of each kind of layer, forward alone: each layer is a kernel of its own."""
    found, c_in = dict.fromkeys(("convolution", "batch norm", "ReLU", "pooling"), 0.0), 3
    for c, side in ((32, 64), (64, 32), (128, 16)):
        places = BATCH * side**2
        found["convolution"] += least(2 * 9 * c_in * c * places, (c_in + c) * places)
        found["batch norm"] += least(0, 2 * c * places)
        found["ReLU"] += least(0, 2 * c * places)
        found["pooling"] += least(0, 1.25 * c * places)
        c_in = c
    found["linear"] = sum(least(2 * BATCH * n * m, n * m) for n, m in ((8192, 512), (512, 200)))
    return found | {"softmax": least(0, 2 * BATCH * 200)}

# %%
parts = inference()
step = {name: 3 * t for name, t in parts.items() if name != "softmax"}  # there, dx and dweight
step |= {"Adam": least(0, 7 * 4_390_888), "softmax": 2 * FLOOR}  # in the loss, and its gradient
print(f"forward {sum(parts.values()):.0f} µs, a step {sum(step.values()):.0f} µs")
plot.shares({"forward": parts, "a step": step}, highlight="softmax", xlabel="share of the time (%)",
            title="Predicted, for a batch of 128 on an H200")

# %% [markdown]
# Softmax is two microseconds of some hundreds. Even a softmax that took *no time at all* would gain no more than its share: Amdahl's
# law (lesson 7) says $1 / (1 - s)$. And what do the records of this course say of softmax at exactly this size, 128 × 200?

# %%
(softmax,) = measured("softmax.forward", shape=(128, 200), dtype="float32")
rest = sum(parts.values()) - parts["softmax"]
for row in softmax["rows"]:
    if row["label"] in ("naive", "registers", "PyTorch eager"):
        share = row["microseconds"] / (rest + row["microseconds"])
        print(f"{row['label']:14} {row['microseconds']:5.1f} µs, {share:5.1%} of the forward pass: "
              f"without any, {1 / (1 - share):.3f} times as fast")
print(f"recorded on an {softmax['source']['device']}, {softmax['source']['date']}; the rest of the pass is predicted")

# %% [markdown]
# There is the whole lesson of optimising in three lines. From the naive kernel to a sensible one the pass gains something that can be seen. (Guides to this set speak
# of 1 to 5 % for softmax: between the two.) From PyTorch's to the best one it gains nothing that a clock would show, although the best
# is clearly faster. It was *right* to write it for rows of 50,000 (lesson 4), and it would be
# *wrong* to spend a day on it here. When not to optimise:
#
# - if the part's share, and so $1/(1-s)$, is below what you would notice;
# - if the part is at its limit already (lesson 4's roofline);
# - if a library has it and yours would be as good;
# - before you have measured.
#
# What the picture says instead: batch norm, ReLU and pooling take a third of the time, with no arithmetic to speak of. They move
# the same arrays over and over, and where tensor cores do the convolutions, these three take most of the time. Who wants speed fuses *them*.
# How good was the prediction of a whole step? And of softmax's share, as PyTorch's profiler saw it on a GPU?

# %%
def show_share(found):
    for record in found:
        wholes = {row["label"]: {"softmax": row["microseconds"], "all else": row["whole_microseconds"] - row["microseconds"]}
                  for row in record["rows"]}
        return plot.shares(wholes, highlight="softmax", xlabel="share of the GPU's time (%)", title="Recorded", **record["source"])


for record in measured("tiny_imagenet.training"):
    quickest = min(record["rows"], key=lambda row: row["microseconds"])
    predicted = f"predicted {sum(step.values()):.0f} µs; " if record["precision"] == "float32" else ""
    print(f"{record['precision']}: {predicted}recorded {quickest['microseconds']:,.0f} µs at best ({quickest['label']})")
show_share(measured("tiny_imagenet.softmax"))

# %% [markdown]
# In float32, for which the prediction was made, it is close, and some of that is luck: real convolutions stay below the arithmetic's rate, kernels that do two things at once move less than the sum says, and choosing and moving
# the pictures is not in it. One that is off by a factor of two would have been worth having, too: it says where to look, and that softmax is not the place.

# %% [markdown]
# ### A profiler's "self"
#
# On this machine PyTorch's own profiler can tell. It writes down when each call begins and when it ends. Calls lie within calls: `aten::linear` calls
# `aten::addmm`. If you add up the time of all calls, you count the inner ones twice and more. So profilers have two columns: **total**,
# with all that was called, and **self**, without. **Predict:** `aten::conv2d` runs from 0 to 100 µs. In it, `aten::convolution` runs from 5 to 95 µs, and in
# that the real work from 20 to 90. What is the self time of each?
#
# <details><summary>The answer</summary>
#
# 10, 20 and 70 µs. Self times add up to the whole, total times don't.
# </details>
#
# ### Exercise: whose time is it?
#
# The calls of one thread, in the order in which they begin (a caller before those whom it calls). Call i is of kind `kind[i]`, a number
# from 0 to `n_kinds − 1`. A call lies wholly in another one, or wholly beside it. Return the self time of each kind.

# %% exercise="self_times"
def self_times(begin, end, kind, n_kinds):
    times, running = np.zeros(n_kinds), []
    for i in range(len(begin)):
        TODO  # who is still running, and whose call is this?
    return times


check("self_times", self_times)

# %%
hint("self_times")

# %% tags=["varies"]
from torch.profiler import ProfilerActivity, profile

whole.train()
batch = torch.randn(8, 3, 64, 64)
for _ in range(2):  # the first time, memory is allocated
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        cross_entropy(whole(batch), torch.arange(8)).backward()
calls = sorted(seen.events(), key=lambda e: (e.thread, e.time_range.start, -e.time_range.end))
print(f"{len(calls)} calls of {len({e.name for e in calls})} kinds")

# %% tags=["varies"]
found, separate = {}, use("self_times", self_times)
for thread in {e.thread for e in calls}:
    own = [e for e in calls if e.thread == thread]
    kinds = sorted({e.name for e in own})
    begin, end = (np.array([getattr(e.time_range, side) for e in own]) for side in ("start", "end"))
    for name, t in zip(kinds, separate(begin, end, [kinds.index(e.name) for e in own], len(kinds))):
        found[name] = found.get(name, 0) + t
for name, t in sorted(found.items(), key=lambda item: -item[1])[:8]:
    print(f"{name[:40]:40} {t / 1e3:6.2f} ms {t / sum(found.values()):6.1%}")
print(f"softmax and its gradient: {sum(t for n, t in found.items() if 'softmax' in n) / sum(found.values()):.2%}")

# %% [markdown]
# Is `aten::mm` among the first? That is the linear layer: its four million weights are read, and their gradient is written, once in a step, be it of 8 pictures or of
# 128. With 128, convolutions would take most of the time. Softmax's share is even smaller than the one recorded on the GPU. There the smallest kernel takes a microsecond or two, while the rest of the step is quick. Here
# 8 · 200 numbers take a few microseconds as well, and the rest takes tens of milliseconds. (What is printed in red is PyTorch's profiler looking for a GPU.) `--profile` makes the command keep such a table, and a trace that can be looked through in a browser (Perfetto).

# %% [markdown]
# ## 7 · Two pictures in one
#
# The strongest cure for learning by heart is a strange one. **MixUp** (Zhang and others, 2017) lays two pictures over each other, with a share $\lambda$ of the one and $1 - \lambda$
# of the other, and wants an answer with the same shares. On Tiny-ImageNet it is worth three or four points to a ResNet-18, in long runs.
#
# ### Exercise: mix pictures and labels
#
# `x` and `y` are (N, P), a picture in each row; row n is mixed with row `partner[n]`. `share` is (N,), a number for each picture: row n of `y` has
# `share[n]` of picture n, and the rest of its partner. `target` is (N, C). Any number of threads.
# **Predict** what `target` is if both pictures are of the same class.

# %% exercise="mixup"
@cuda.jit
def mixup(x, labels, partner, share, y, target):
    P, C = y.shape[1], target.shape[1]
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        TODO  # a number of the mixed picture
    TODO  # and those of the labels


check("mixup", mixup)

# %%
hint("mixup")

# %%
mix, rows = use("mixup", mixup), shown[::2][:4]
bytes_of = photos[rows].reshape(4, -1).astype(np.float32) / 255
classes, partner = training.labels[rows].numpy(), np.array([1, 2, 3, 0])
share = np.array([0.9, 0.7, 0.5, 0.3], dtype=np.float32)
mixed, target = np.zeros_like(bytes_of), np.zeros((4, len(names)), dtype=np.float32)
mix[8, 256](bytes_of, classes, partner, share, mixed, target)
titles = [" + ".join(f"{t:.0%} {name}" for t, name in zip(row, names) if t) for row in target]
plot.images(list(mixed.reshape(4, SIDE, SIDE, 3)), titles, title="What a network is asked for")

# %% [markdown]
# The loss of such a target needs no new kernel. Cross-entropy is linear in the wanted probabilities, so it is $\lambda$ times the loss of the one
# label and $1 - \lambda$ times that of the other. (That is what the course's `ImageClassifier` does.)
#
# **Predict:** which of the two cures does more for the network of section 4?

# %%
_, with_mixup = learned(part, epochs=30, dropout=0.0, padding=None, mixup=0.4)
for name, history in (("as they are", as_they_are), ("MixUp", with_mixup), ("moved and mirrored", augmented)):
    print(f"{name:20} learned from {history[-1]['accuracy']:5.0%}, unseen {history[-1]['validation_accuracy']:5.0%}, "
          f"loss of the unseen {history[-1]['validation_loss']:.2f}")

# %% [markdown]
# MixUp does what it promises: nothing is learned by heart any more (and what the network knows of mixed pictures means little, since many are mostly
# another's). The unseen gain a little, with a smaller loss. But that a leaf may lie elsewhere and the other way round is *true*, and MixUp does
# not know it. What helps most is knowledge of the pictures; with 100 unseen ones, a few points are chance.
#
# ## What the profiler says
#
# On a GPU there are two questions, and a tool for each. **Which kernels, and what is between them?** Nsight Systems:
#
# ```text
# nsys profile -o step --trace=cuda,nvtx python -m course_lib train images --epochs 1 --output run
# nsys stats --report cuda_gpu_kern_sum,cuda_gpu_mem_time_sum step.nsys-rep
# ```
#
# Read the table from above. `Time (%)` is the share of all *kernels'* time, so not of the step's: compare the sum of `Total Time` with
# the clock first. If kernels ran for 5 s of 20, then the GPU waited, and no kernel is worth a look: the host is
# slow (launches, Python), or the pictures come too late. `Instances` divided by steps says how often a kernel runs in a step; a small `Avg`
# with many instances is what fusing and graphs are for. In the picture of the timeline, look for *gaps* in the GPU's row.
#
# **Why does this kernel take as long as it does?** Nsight Compute, for one kernel, since it replays it dozens of times:
#
# ```text
# ncu --set full --kernel-name regex:conv --launch-skip 20 --launch-count 1 -o conv python …
# ```
#
# `--launch-skip` gets you past the first launches, which find cold caches. First read "Speed of Light": memory at 90 % and compute at 20 %
# is a kernel that is done, unless it could move less. Both below 60 % is one that waits: go on to
# "Warp State", which says what for (lesson 4 has the list), and to "Occupancy". ncu's durations are not those of your run: it sets the clock to a base
# rate, and empties caches.

# ## Where the real libraries go further
#
# - **NVIDIA DALI** decodes JPEGs on the GPU and augments there. Where a set does not fit into memory, decoding is what limits small networks.
# - **timm**'s recipes add RandAugment, CutMix, random erasing and stochastic depth; with them a ResNet-18 learns for 300 epochs without
#   learning by heart. **torchvision**'s `transforms.v2` has most of these, for tensors on any device.
# - **Liger** and **cut cross-entropy** make the fused loss for language models: with 100,000 classes, the logits themselves are what does not
#   fit, so the last linear layer goes into the kernel, too.
# - **torch.compile** fuses batch norm's application, ReLU and what follows by itself.
#
# ## Three questions
#
# <details><summary>1. A network with a softmax at its end is trained with cross-entropy on two classes, and reaches 95 %. So is it no fault?</summary>
#
# It is one, of which two classes show little: the loss can fall from 0.69 to 0.31, and gradients are a few times smaller. The order of the probabilities is right in the
# end, so accuracy looks well. The probabilities are not: the network has to be absurdly sure before its loss is small. With 200 outputs little is learned (section 3).
# </details>
#
# <details><summary>2. Somebody makes the softmax of this network ten times as fast and reports "the network is 1.5 times as fast". What has happened?</summary>
#
# By Amdahl's law softmax would have had to take more than a third of the time. Either the clock was stopped before the GPU had finished, or something else has changed with it (a
# synchronisation that went away, a cache that was warm), or the old softmax was a very bad one. Ask for a timeline of both.
# </details>
#
# <details><summary>3. Training accuracy is 99 %, accuracy on unseen pictures 45 %. With label smoothing, MixUp and crops, training accuracy falls to 60 %. Is that bad?</summary>
#
# Look at the other number. What counts is whether the unseen rise; training accuracy is then measured on moved and mixed pictures, and with smoothing even the best
# loss is not 0. If the unseen fall as well, the cure is too strong, or the training too short for it.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# Train the whole set: `python -m course_lib train images --data tiny-imagenet-200 --epochs 50 --label-smoothing 0.1` takes minutes on a GPU; `--model resnet18_small --mixup 0.2
# --epochs 200` is the longer way. On which device, in which precision, with how much memory? That is
# [lesson 16](16_any_device.ipynb).
