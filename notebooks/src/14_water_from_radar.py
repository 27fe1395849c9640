# %% [markdown]
# # 14 · Water from radar
#
# **After this lesson** you can read a radar picture: say what speckle is, why its numbers are given
# in decibels, and what averaging costs. You can keep pixels that nobody knows out of every sum;
# score an answer honestly; derive the Dice loss backwards and write it as kernels; train a U-Net
# that beats every threshold; and predict what a GPU makes of it before you look.
#
# **You need** lesson 12 (backends and the tape) and lesson 13 (the U-Net);
# [lesson 5](05_fusing_softmax.ipynb) (cross-entropy), and of
# [lesson 4](04_softmax_at_the_limit.ipynb) how softmax goes backwards. Section 6 launches the
# kernels of lessons [8](08_convolution.ipynb) and [9](09_convolution_backward.ipynb).
#
# **Time:** 135 minutes; there are good places to pause after sections 3 and 5. All cells together
# run in less than two minutes without a GPU. On a GPU the same network trains there; what was measured on
# one for the course is shown from its record, and where nothing was recorded the lesson says so.
# The words are collected in the [glossary](glossary.md).

# %%
import math
import os
from pathlib import Path

import numpy as np

from course_lib import SIMULATED, bench, cuda, data, plot, results_table, simulator
from course_lib import autograd as ag
from course_lib.autograd import Function, tensor
from course_lib.backend import get_array_module, set_backend
from course_lib.runtime.host.launch import launch
from course_lib.runtime.host.launch import recorded as launches_of

# %%
from course_lib.runtime.intrinsics import block_sum
from course_lib.teach import TODO, check, hint, progress, solution, use
from course_lib.train.segmentation import Segmentation

# %%
NO_DATA = -1
ZERO, ONE, TWO, TEN = np.float32(0), np.float32(1), np.float32(2), np.float32(10)
INF, LAND, WATER, VV, VH = np.float32(np.inf), 0, 1, 0, 1
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
# ## 1 · A picture that needs no light
#
# When a river floods a valley, the sky above it is full of clouds, and a camera in orbit sees them
# from above. A **radar** satellite brings its own light. It sends pulses of microwaves and listens
# to what comes back, by day, by night and through clouds. Sentinel-1 does this for the whole Earth
# every few days (with waves of 5.6 cm), and its pictures are free.
#
# What comes back is power, and it depends on how rough the ground is, compared with the wave. The
# satellite looks at an angle. A field throws some of the wave back. A calm lake is a mirror: the
# wave is reflected *away*, and nearly nothing returns. So water is dark. Each pixel has two numbers
# here: the wave is sent standing upright (vertical), and what returns upright is **VV**, what
# returns lying (horizontal) is **VH**. These are two **polarisations**.
#
# The course draws scenes of this kind, the same on every machine: rivers, lakes, fields and hills,
# in both polarisations. **Predict:** you show the received power as a grey picture, from 0 to the
# largest number. What will you see?

# %%
scenes = data.sar.load(n_scenes=64, image_size=64, normalize=False)
db, labels = scenes.images, scenes.labels
power = np.float32(10) ** (db / 10)
power[np.broadcast_to((labels == NO_DATA)[:, None], power.shape)] = np.nan
SHOWN = [17, 6, 20, 33]
plot.images([power[k, VV] for k in SHOWN], [f"scene {k}" for k in SHOWN], vmin=0,
            vmax=np.nanmax(power[SHOWN]), title="The power that comes back, as it is",
            alt="Four pictures, nearly black but for a few bright lines and dots: slopes that face the radar")
scale = power[SHOWN, VV] / np.nanmax(power[SHOWN])
for name, c in (("water", WATER), ("land", LAND)):
    print(f"{name}: half of the pixels lie below {np.median(scale[labels[SHOWN] == c]):.1%} of the scale")

# %% [markdown]
# Black, with a few bright slopes. The brightest pixels send back about a hundred times as much as
# water does, and ten times as much as land does. So half of all land lies in the lowest tenth of the
# scale, and half of the water in the lowest hundredth. Radar people therefore use a logarithm, the
# **decibel**:
#
# $$ \text{dB} = 10 \cdot \log_{10}(\text{power}) $$
#
# Ten times the power is 10 dB more, twice the power is 3 dB more, and half of it 3 dB less. A power
# of 1 is 0 dB. **Predict:** water sends back 1/100 of what was sent (of the norm that stands for
# 1), a field 1/10. How many decibels are they, and how many apart?

# %%
grey = (db[:, VV] + 14) / 12  # −26 dB is black, −2 dB white; of labels −1 is, and 1
plot.images([grey[k] for k in SHOWN] + [labels[k] for k in SHOWN],
            [f"scene {k}, VV" for k in SHOWN] + [f"scene {k}, label" for k in SHOWN], vmin=-1, vmax=1,
            title="The same in decibels; below: water white, land grey, no data black",
            alt="The same four scenes with rivers, lakes, fields and hills, all with a grainy noise, and their labels")

# %% [markdown]
# −20 and −10 dB, 10 apart. Now there is something to see, and most of it is a trap. Some fields are
# as dark as water (smooth ones). So are the shadows of hills, where the radar cannot look. And
# where wind makes waves on a lake, the lake is bright. (You will meet the places without data
# in section 3.)
#
# Whoever has the course's real tiles (Sen1Floods11, Bonafilia and others, 2020) in a folder that
# the environment variable `COURSE_DATA` names sees Sentinel-1's own pictures here:

# %%
tiles = Path(os.environ.get("COURSE_DATA", "")) / "sen1floods11" / "tiles128.npz"
there = "COURSE_DATA" in os.environ and tiles.exists()
real = data.sar.load(tiles, image_size=128, normalize=False) if there else None

# %%
def show_real():
    if real is None:
        return print("There are no real tiles here; everything below is about the drawn scenes.")
    far = abs((real.labels == WATER).mean(axis=(1, 2)) - 0.3)
    best = {real.scenes[k]: k for k in np.argsort(-far, kind="stable")}  # of each chip, the last
    chosen = sorted(best.values(), key=lambda k: far[k])[:4]
    grey = (real.images[:, VV] + 14) / 12
    return plot.images([grey[k] for k in chosen] + [real.labels[k] for k in chosen],
                       [real.scenes[k] for k in chosen] * 2, vmin=-1, vmax=1, title="Sentinel-1: VV, and labels")


show_real()

# %% [markdown]
# ## 2 · Speckle
#
# Everything above is covered with grain, as if the instrument were bad. It isn't. The grain is
# called **speckle**, and it comes with every picture that is made with waves of one length.
#
# A pixel is 10 metres wide. In it are thousands of leaves and stones, and each sends back a small
# wave. At the satellite these add up. But each has come a slightly different way, so each arrives
# with another phase, and some of them cancel out. We can do that in NumPy: 40 waves of the same
# strength with random phases, for 20,000 pixels of *exactly the same field*. **Predict:** by how
# much does the power differ from pixel to pixel? (The standard deviation, as a share of the mean.)

# %%
rng = np.random.default_rng(0)
phases = rng.uniform(0, 2 * np.pi, (20_000, 40))
one_look = abs(np.exp(1j * phases).sum(axis=1)) ** 2 / 40
print(f"mean {one_look.mean():.2f}, standard deviation {one_look.std():.2f}")

# %% [markdown]
# By 100 %! The commonest power is *zero*. (It is an exponential distribution.) Nothing is wrong
# with any of these pixels; but a single one of them says nearly nothing about the field.
#
# The cure is as old as radar. Look several times, at neighbouring places or in several parts of the
# spectrum, and average the power: each is a **look**. The mean of $L$ independent looks has a
# standard deviation of $1/\sqrt{L}$ of the mean. (Its distribution is called *gamma*.) **Predict:**
# how many looks bring the grain down to 10 %?

# %%
looks = {L: one_look[: 20_000 // L * L].reshape(-1, L).mean(axis=1) for L in (1, 4, 16)}
edges = np.linspace(0, 3, 31)
shares = {f"{L} look{'s' * (L > 1)}: ±{p.std() / p.mean():.0%}": np.histogram(p, edges)[0] / len(p) * 100
          for L, p in looks.items()}
plot.curves((edges[:-1] + edges[1:]) / 2, shares, xlabel="power (1: the field's mean)",
            ylabel="share of the pixels (%)", title="One field, looked at once, 4 times and 16 times")

# %% [markdown]
# 100 looks. Sentinel-1's pictures come with 4 to 5, and so do the drawn ones.
#
# Speckle *multiplies*. A bright field has ten times the power of water, and ten times its noise.
# For a network that is awkward: what is a small difference here is a large one there.
# **Predict** what becomes of that in decibels.

# %%
print("mean power   ± in power   ± in decibels")
for mean in (0.01, 0.1, 1.0):
    seen = mean * looks[4]
    print(f"{mean:10.2f}{seen.std():13.4f}{(10 * np.log10(seen)).std():13.2f} dB")

# %% [markdown]
# A logarithm turns products into sums. In decibels the noise is the same everywhere, 2.3 dB for
# four looks. This, and not only the dark picture, is why a network gets decibels.
#
# ### Averaging has a right place and a wrong one
#
# More looks can be had from any picture: average windows of $n \times n$ pixels. This is called
# **multilooking**. Somebody does it with the decibels, since that is what the file holds.
# **Predict:** is the result too bright, too dark, or right?

# %%
for L, p in looks.items():
    off = (10 * np.log10(p)).mean() - 10 * np.log10(p.mean())
    print(f"{L:2} looks: the mean of the decibels is {off:+.2f} dB from the decibels of the mean")

# %% [markdown]
# Too dark, by 2.5 dB with one look: nearly half of the power is gone. Power adds up, decibels don't.
#
# ### Exercise: multilook
#
# `power` is (H, W), `y` is (H // n, W // n). Each result is the mean of the pixels of its window
# *that have data*: those above 0. (NaN is not above 0; no comparison with NaN is true.) A window
# without any gets 0. The number of threads may be any, so use a grid-stride loop.

# %% exercise="multilook"
@cuda.jit
def multilook(power, n, y):
    OW = y.shape[1]
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        first_row, first_col = TODO, TODO  # of the window of result i
        total, count = ZERO, ZERO
        TODO  # add up what has data, and count it
        y[i // OW, i % OW] = TODO


check("multilook", multilook)

# %%
hint("multilook")

# %%
average, K = use("multilook", multilook), 35


def looked(n):
    y = np.zeros((64 // n, 64 // n), dtype=np.float32)
    average[4, 256](power[K, VV], n, y)
    return y


coarse = {n: looked(n) for n in (1, 2, 4)}
plot.images([10 * np.log10(np.maximum(p, 1e-4)) for p in coarse.values()],
            [f"{n} × {n}" for n in coarse], vmin=-25, vmax=0, title=f"Scene {K}, VV in dB, multilooked",
            alt="The same scene three times: with less grain each time, and with coarser and coarser shores")

# %%
still = (slice(0, 16), slice(40, 64))  # a patch without shores
for n, p in coarse.items():
    row, col = (slice(s.start // n, s.stop // n) for s in still)
    print(f"{n} × {n}: grain ±{p[row, col].std() / p[row, col].mean():.0%}, pixels {p.size:,}")

# %% [markdown]
# The grain goes, and the shores go with it. It does not fall by $n$, as $\sqrt{n^2}$ would have it:
# the fields themselves are not all alike, and no averaging removes that.
#
# Look at it with lesson 8's eyes. Multilooking is a convolution with a filter of equal weights and a
# stride of $n$. A network may *learn* its filters: long ones beside a shore, wide ones in a lake. So
# we do not average at all, and give the network all the grain there is.

# %% [markdown]
# ## 3 · What is missing
#
# Satellites fly in a **swath**, and beyond its edge there is nothing. Single pixels fail. In a file
# such places hold NaN, or 0, or a number that somebody once chose. And 0 has no logarithm.
# **Predict:** one pixel of one picture is NaN. It goes through a 3 × 3 convolution and batch norm, in
# a batch of eight. What share of the results is NaN?

# %%
backend = set_backend(library="numpy")
x = np.array(db[:8])
x[0, VV, 30, 30] = np.nan
after = ag.Conv2D(2, 4, 3, padding=1).forward(x)
print(f"after the convolution {np.isnan(after).mean():.2%} are NaN, "
      f"after batch norm {np.isnan(ag.BatchNorm2D(4).forward(after)).mean():.0%}")

# %% [markdown]
# All of them. Batch norm subtracts a mean, and the mean is NaN. One bad pixel, and the training run
# is over.
#
# So missing pixels get a harmless number in the *picture* (0 after scaling, which is the mean), and
# in the *label* a class of their own, `NO_DATA`, −1. It is no class that the network could answer. It
# says: *this pixel counts in no loss and no score.* One tempting line of NumPy, `labels.clip(0)`,
# makes land of all that nobody knows.
#
# ### Exercise: decibels, and what is missing
#
# `power` is (bands, n): a column for each pixel. A pixel is **lost** if any of its bands is not
# above 0, or is not finite. It gets 0 in every band of `x`, and NO_DATA in `y`. The others keep their
# `label` (which may be NO_DATA already), and their decibels are cut off at `low` and `high` and then
# scaled: `(decibels - mean) / spread`.
#
# And each block counts its lost pixels into `missing`, of one number for each block. There is a
# barrier that counts: `cuda.syncthreads_count(p)` waits for *all* threads of the block, as
# `syncthreads` does, and tells each of them for how many `p` was not 0. **Predict** what happens if
# it stands inside of the guard.

# %% exercise="prepare"
@cuda.jit
def prepare(power, label, low, high, mean, spread, x, y, missing):
    i, lost = cuda.grid(1), 0
    if i < label.size:
        TODO  # 1. is it lost? 2. its label, 3. each band
    count = TODO
    if cuda.threadIdx.x == 0:
        missing[cuda.blockIdx.x] = count


check("prepare", prepare)

# %%
hint("prepare")

# %%
K = 38
x, y = np.zeros((2, 4096), dtype=np.float32), np.zeros(4096, dtype=np.int64)
missing = np.zeros(16, dtype=np.int32)
numbers = [np.float32(each) for each in (-35, 5, -15, 7)]
use("prepare", prepare)[16, 256](power[K].reshape(2, -1), labels[K].ravel(), *numbers, x, y, missing)
prepared = data.sar.load(n_scenes=64, image_size=64)
print(f"{missing.sum()} of {y.size:,} pixels are lost; the course's reader says {(labels[K] == NO_DATA).sum()}")
print(f"largest difference from its picture {abs(x - prepared.images[K].reshape(2, -1)).max():.0e}")

# %%
plot.images([x[VV].reshape(64, 64), x[VH].reshape(64, 64), y.reshape(64, 64)],
            ["VV, scaled", "VH, scaled", "label"], title=f"Scene {K} as a network gets it: no data is 0, and −1",
            alt="A scene in both polarisations; the upper left corner has no data: it is of an even grey, and black in the label")

# %% [markdown]
# Why these numbers? Land and water of all of Sentinel-1's pictures have a mean of about −15 dB and a
# spread of about 7, so most of `x` lies between −1.5 and 1.5. They are *fixed*. Scale each picture
# by its own mean instead, and a picture that is all water looks like one that is all land.
#
# A good place for a break.

# %% [markdown]
# ## 4 · A score, and something to beat
#
# The oldest way to find water is a threshold: whatever is darker than some number of decibels.
# **Predict** from the next picture where to put it, and how many pixels will be wrong.

# %%
edges = np.arange(-30, 1, 1.0)
of_class = {name: np.histogram(db[:, VV][labels == c], edges)[0] / 1000 for c, name in enumerate(scenes.classes)}
plot.curves((edges[:-1] + edges[1:]) / 2, of_class, xlabel="VV (dB)", ylabel="pixels (thousands)",
            title="Water is darker than land, mostly")

# %%
counted = labels != NO_DATA
sure = {"all land": np.zeros_like(labels), "VV < −18 dB": (db[:, VV] < -18).astype(np.int64),
        "VV < −16 dB": (db[:, VV] < -16).astype(np.int64)}
for name, answer in sure.items():
    print(f"{name:12} {(answer == labels)[counted].mean():.1%} of the known pixels are right")

# %% [markdown]
# Five in six pixels are land, so "all land" is right for 83 % of them and finds no water at all. In
# real floods water is a tenth or less, and the useless answer gets 90 %. The share of right pixels
# is no score for a class that is rare. What people use:
#
# $$ \text{IoU} = \frac{|\text{found} \cap \text{true}|}{|\text{found} \cup \text{true}|} \qquad\qquad
# \text{Dice} = \frac{2 \cdot |\text{found} \cap \text{true}|}{|\text{found}| + |\text{true}|} $$
#
# **IoU** is *intersection over union*: of all pixels that are water in the answer or in truth, the
# share that is water in both. Land that is rightly called land appears nowhere. The **Dice
# coefficient** says the same on another scale (Dice = 2 · IoU / (1 + IoU)). We shall need it because
# it has no union in it.
#
# ### Exercise: IoU
#
# A block for each class, of any number of threads: one is possible, too. `prediction` and `target` are
# (n,); pixels whose target is NO_DATA do not count. A prediction of NO_DATA, where the target is a class, is a wrong answer like any other. A class that is nowhere, neither found nor true, gets `absent`: 0/0 has no value, and whoever
# asks must say what to put there.

# %% exercise="iou"
@cuda.jit
def iou(prediction, target, absent, score):
    counts = cuda.shared.array(2, np.int32)
    c, t = cuda.blockIdx.x, cuda.threadIdx.x
    TODO  # 1. zero the two counters
    both, either = 0, 0
    for i in range(t, target.size, cuda.blockDim.x):
        TODO  # 2. this thread's pixels
    TODO  # 3. all threads together
    if t == 0:
        score[c] = TODO


check("iou", iou)

# %%
hint("iou")

# %%
score_of, four = use("iou", iou), slice(16, 20)
print(f"{'':12}   land  water   IoU of four scenes")
for name, answer in sure.items():
    score = np.zeros(2, dtype=np.float32)
    score_of[2, 256](answer[four].ravel(), labels[four].ravel(), np.float32(np.nan), score)
    print(f"{name:12} {score[LAND]:6.3f} {score[WATER]:6.3f}")

# %% [markdown]
# Now "all land" has its 0. Counts come first and the ratio last, over all pixels together. A mean of
# each scene's ratio would let a scene with ten pixels of water say as much as one with a thousand.
#
# ### A score that lies
#
# Which pixels may be used for scoring? Here is a classifier that *never looks at the radar*. Four
# fifths of all pixels, drawn at random, are its training set. Of any other pixel it asks the left
# neighbour, if that is in the training set, else the right one, and repeats its label; if neither is,
# it says land. **Predict** its IoU.

# %%
is_train = np.random.default_rng(0).random(labels.shape) < 0.8
left, right = np.roll(labels, 1, axis=2), np.roll(labels, -1, axis=2)
copied = np.where(np.roll(is_train, -1, axis=2), right, LAND)
copied = np.where(np.roll(is_train, 1, axis=2), left, copied)
test = ~is_train & counted
found, true = copied[test] == WATER, labels[test] == WATER
print(f"IoU {(found & true).sum() / (found | true).sum():.2f}, "
      f"{(copied == labels)[test].mean():.1%} of the test pixels are right")

# %% [markdown]
# It beats everything that you will train today, and knows nothing. Water comes in pieces; who knows a
# pixel's neighbours knows the pixel. This is **leakage**: what is asked in the test was in the
# training set. Papers that split the pixels of one scene at random report 96 to 99 %. So does this.
#
# So we **split by scene**. No scene is on both sides, and everything is chosen with the training
# scenes alone, the threshold too:

# %%
train_set, held = data.sar.split(prepared, train_ratio=0.8, seed=0)
threshold, train_iou = data.sar.best_threshold(train_set)
to_beat = data.sar.threshold_iou(held, threshold)
print(f"{len(train_set)} scenes to train with, {len(held)} to be tested with; to beat, below "
      f"{data.sar.decibels(threshold):.1f} dB is water: IoU {train_iou:.3f} on the first, {to_beat:.3f} on the others")

# %% [markdown]
# `best_threshold` has tried *every* threshold, so no other one does better on these scenes. It takes
# shadows and smooth fields for water, and leaves out the windy lakes.

# %%
def of_real():
    if real is None:
        return print("(No real tiles here. The best threshold has an IoU of 0.40 on the 176 that it was chosen on.)")
    limit, found = data.sar.best_threshold(real)
    return print(f"real tiles: below {limit:.1f} dB is water; IoU {found:.3f} on the tiles it was chosen on")


of_real()

# %% [markdown]
# ## 5 · A loss for what is rare
#
# A network needs something that has a gradient. Neither IoU nor Dice have one: they count. We begin
# with what we know, cross-entropy, and the smallest network there is: a 1 × 1 convolution, six
# numbers. It sees nothing but the two polarisations of a pixel, so it is a threshold on a mixture of
# both. To make water rare, we take the twelve scenes that have the least of it.

# %%
wet = (prepared.labels == WATER).mean(axis=(1, 2))
few = prepared.take(np.argsort(wet, kind="stable")[:12])
weight = ag.calculate_class_weights(few.labels, 2)
print(f"water {few.class_counts()[WATER] / few.class_counts().sum():.1%} of the pixels; "
      f"weights: land {weight[LAND]:.2f}, water {weight[WATER]:.2f}")
loss_of = {
    "cross-entropy": lambda y: ag.weighted_cross_entropy(y, few.labels),
    "weighted": lambda y: ag.weighted_cross_entropy(y, few.labels, weight),
    "focal": lambda y: ag.focal_loss(y, few.labels),
    "Dice": lambda y: ag.dice_loss(y, few.labels),
}

# %%
def fitted(loss):
    layer = ag.Conv2D(2, 2, 1)
    optimizer = ag.Adam(layer.parameters(), lr=0.1)
    for _ in range(80):
        optimizer.zero_grad()
        loss(layer(tensor(few.images))).backward()
        optimizer.step()
    return layer.forward(few.images).argmax(axis=1)

# %% [markdown]
# Four losses, the same start. *Weighted* is cross-entropy in which each class has the same say (a
# pixel of water counts 13 times as much as one of land). *Focal* lets a pixel count the less the surer
# the network is of it. *Dice* comes below. **Predict** which of them finds the most water, and which
# has the best IoU.

# %%
print(f"{'':15}right pixels   of the water found   of what was found water     IoU")
for name, loss in loss_of.items():
    matrix = ag.confusion_matrix(fitted(loss), few.labels, 2)
    hit = matrix[WATER, WATER]
    print(f"{name:15}{np.trace(matrix) / matrix.sum():12.1%}{hit / matrix[WATER].sum():21.0%}"
          f"{hit / max(1, matrix[:, WATER].sum()):25.0%}{ag.iou_score(matrix)[WATER]:12.3f}")

# %% [markdown]
# Cross-entropy is right most often, and overlooks most of the water: it is paid for right pixels. With
# weights it finds nearly all, and calls a lot of land water: now a pixel of land costs next to nothing.
# Dice stands between the two, where IoU is largest. (The share of the water that was found is called
# **recall**, the share of what was found that is water **precision**. You can always have one of them
# for the other.)
#
# Who has the say? Let the network answer the same $p$ for the water of every pixel. The gradient of a
# loss pulls at each pixel; here is how much of the pull comes from water, when the network knows nothing
# ($p = 0.5$), and when it has found out that land is likely ($p = 0.05$). **Predict** the first line.

# %%
def pull_of_water(loss, p):
    logits = np.zeros((12, 2, 64, 64), dtype=np.float32)
    logits[:, WATER] = np.log(p / (1 - p))
    logits = tensor(logits, requires_grad=True)
    loss(logits).backward()
    pull = abs(logits.grad[:, WATER])
    return pull[few.labels == WATER].sum() / pull.sum()


for name, loss in loss_of.items():
    print(f"{name:15} water's share of the pull: {pull_of_water(loss, 0.5):.0%} at p = 0.5, "
          f"{pull_of_water(loss, 0.05):.0%} at p = 0.05")

# %% [markdown]
# For cross-entropy it is 7 %, the share of water, until the network calls everything land. Then the
# pulls of both nearly balance, and it has little reason to move on. Weights give water half of the
# say from the start, and nearly all of it as long as it is not found. Focal begins like
# cross-entropy, and then hears only those pixels that it has wrong.
#
# Dice begins louder for water than cross-entropy, and less loud than the weights. Once land is likely,
# it is no louder than cross-entropy. Its strength is another one: it has no fixed price for a pixel. What a pixel is worth depends on how much has been found
# already, rightly and wrongly, since the loss is a *ratio*, and nearly the one that we score by.
#
# ### The three, in formulas
#
# With $p_c$ the softmax over the classes of a pixel, $t$ its true class and $w_t$ that class's weight:
#
# - *weighted cross-entropy*: $\sum w_t \cdot (-\log p_t) \,/\, \sum w_t$, sums over all known pixels.
#   Its gradient with respect to the logit of class $c$ is lesson 5's, times the pixel's share:
#   $w_t / \sum w \cdot (p_c - 1_{c = t})$.
# - *focal loss* (Lin and others, 2017): $(1 - p_t)^\gamma \cdot (-\log p_t)$, with $\gamma = 2$. A pixel with
#   $p_t = 0.9$ counts a hundredth. For the gradient, take the derivative with respect to $p_t$, and then
#   $\partial p_t / \partial x_c = p_t \, (1_{c = t} - p_c)$.
# - *Dice loss* (Milletari, Navab and Ahmadi, 2016): the Dice coefficient with probabilities in place of yes
#   and no. Where it counted pixels that are water in both, it now adds up the probability of water in those that are:
#
# $$ D_c = \frac{2 \sum p_c t_c + s}{\sum p_c + \sum t_c + s} \qquad\qquad \text{loss} = 1 - \frac{1}{C} \sum_c D_c $$
#
# ($t_c$ is 1 in pixels of class $c$ and else 0.) With the number $s$, called *smooth*, a class that is nowhere
# has a value: near 1 if it is not predicted either. **Predict** what 0/0 would do to the whole network.
#
# Unlike the other two, Dice is *no mean of something for each pixel*. What a pixel is worth depends on three
# sums over all pixels. For a kernel: a reduction first.
#
# ### Exercise: the sums, softly counted
#
# A block for each class $c$. `logits` is (N, C, P), P being the pixels of a picture; `target` is (N, P), and
# pixels of NO_DATA count nothing. `sums[c]` gets $\sum p t$, $\sum p$ and $\sum t$. The probability
# is given; it subtracts the maximum, as you know from lesson 3. `block_sum(value, scratch)` (lesson 2) gives all threads
# the sum over the block, which consists of whole warps.

# %%
@cuda.jit(device=True)
def probability(logits, n, c, j):
    """Softmax over the classes: that of class c, for pixel j of picture n."""
    top, total = logits[n, 0, j], ZERO
    for k in range(1, logits.shape[1]):
        top = max(top, logits[n, k, j])
    for k in range(logits.shape[1]):
        total += math.exp(logits[n, k, j] - top)
    return math.exp(logits[n, c, j] - top) / total

# %% exercise="dice_sums"
@cuda.jit
def dice_sums(logits, target, sums):
    scratch = cuda.shared.array(32, np.float32)
    N, P = target.shape
    c, t = cuda.blockIdx.x, cuda.threadIdx.x
    both, found, true = ZERO, ZERO, ZERO
    for i in range(t, N * P, cuda.blockDim.x):
        n, j = i // P, i % P
        TODO  # what this pixel adds to each of the three
    TODO  # the sums over the block; one thread writes them


check("dice_sums", dice_sums)

# %%
hint("dice_sums")

# %% [markdown]
# ### Backwards
#
# Two steps. First from the loss to the probabilities. Call the upper part of the fraction $U_c$ and the lower
# one $V_c$. In $U_c$ a pixel's $p_c$ stands with the factor $2 t_c$, in $V_c$ with the factor 1. The rule
# for quotients:
#
# $$ g_c = \frac{\partial\, \text{loss}}{\partial p_c} = -\frac{1}{C} \cdot \frac{2 t_c V_c - U_c}{V_c^2}
# = \frac{1}{C \, V_c} \left( \frac{U_c}{V_c} - 2 t_c \right) $$
#
# So a pixel has only two possible values of $g_c$, one if it is of class $c$ and one if it isn't. **Predict** their
# signs. (Should more probability in the right place make the loss larger or smaller?)
#
# <details><summary>The signs</summary>
#
# $U_c$ is never larger than $V_c$. So $g_c$ is negative in pixels of class $c$, where the loss falls with $p_c$, and
# positive in all others.
# </details>
#
# Then through softmax. It couples all classes of a pixel: what one gets, the others lose. From lesson 4:
#
# $$ dx_c = p_c \, \Big( g_c - \sum_k p_k \, g_k \Big) $$
#
# and all of it times `dloss`, the gradient of whatever comes after the loss.
#
# ### Exercise: the gradient
#
# A thread for each pixel. `sums` is what your last kernel has found. An ignored pixel gets 0 in all classes.

# %% exercise="dice_gradient"
@cuda.jit
def dice_gradient(dloss, logits, target, sums, smooth, dlogits):
    N, C, P = logits.shape
    i = cuda.grid(1)
    if i < N * P:
        n, j = i // P, i % P
        label, inner = target[n, j], ZERO
        for c in range(C):
            TODO  # g of class c, and its part of the inner sum
        for c in range(C):
            dlogits[n, c, j] = TODO


check("dice_gradient", dice_gradient)

# %%
hint("dice_gradient")

# %% [markdown]
# Both become a `Function` of lesson 12, so that the tape can call them. Three sums for each class are left
# to the namespace `xp`; they are few. (`dloss` lies on the device. To pass it as a number, the host would have
# to wait for it. So the kernel gets 1, and the product is taken on the device.)

# %%
sums_kernel, gradient_kernel = use("dice_sums", dice_sums), use("dice_gradient", dice_gradient)


def dice_forward(logits, target):
    """The loss of logits (N, C, P), and the sums that it was made of."""
    xp, C = get_array_module(logits), logits.shape[1]
    sums = xp.zeros((C, 3), dtype=logits.dtype, device=logits.device)
    launch(sums_kernel, C, 256, logits, target, sums)
    both, found, true = (sums[:, i] for i in range(3))
    return 1 - xp.mean((2 * both + 1) / (found + true + 1)), sums

# %%
def dice_backward(logits, target, sums):
    dlogits = get_array_module(logits).empty_like(logits)
    blocks = -(-math.prod(target.shape) // 256)
    launch(gradient_kernel, blocks, 256, ONE, logits, target, sums, ONE, dlogits)
    return dlogits

# %%
class YourDice(Function):
    def forward(self, logits, target):
        xp, (N, C, H, W) = get_array_module(logits), logits.shape
        flat = xp.reshape(logits, (N, C, H * W)), xp.reshape(target, (N, H * W))
        loss, sums = dice_forward(*flat)
        self.kept = *flat, sums, logits.shape
        return loss

    def backward(self, dloss):
        *kept, shape = self.kept
        return get_array_module(dloss).reshape(dice_backward(*kept), shape) * dloss, None

# %%
backend = set_backend(library="simulator" if SIMULATED else "torch")
drawn = np.random.default_rng(0).normal(size=(2, 2, 16, 16)).astype(np.float32)
target = backend.to_device(np.ascontiguousarray(prepared.labels[16:18, :16, :16]))
results = []
for loss in (lambda y: YourDice()(y, target), lambda y: ag.dice_loss(y, target)):
    logits = tensor(backend.to_device(drawn), requires_grad=True)
    value = loss(logits)
    value.backward()
    results.append((float(value.data), backend.to_cpu(logits.grad)))
(mine, dmine), (theirs, dtheirs) = results
print(f"Dice loss {mine:.6f}, the course's {theirs:.6f}; gradients differ by {abs(dmine - dtheirs).max():.0e}, "
      f"the largest is {abs(dmine).max():.0e}")

# %% [markdown]
# A good place for a break.

# %% [markdown]
# ## 6 · A U-Net of your kernels
#
# Lesson 13's network, on the tape of lesson 12, and in it nothing but what you have written: the
# convolution of lesson 8, its two gradients of lesson 9, and the Dice loss. A layer of
# `course_lib.autograd` asks by name for the operation it needs, and `ag.replacing(conv2d=…)` puts
# another in its place.
#
# (The next lines say whose convolutions run: yours, where `use` knows that they passed their checks,
# in whichever lesson that was, else the course's.)

# %%
direct = use("conv2d_direct", None)
dx_kernel, dweight_kernel = use("conv2d_dx", None), use("conv2d_dweight", None)


def blocks_for(array, threads_each=1):
    return -(-math.prod(array.shape) * threads_each // 128)

# %%
def conv_forward(x, weight, bias=None, *, stride=1, padding=0):
    xp, (N, _, H, W), (K, _, R, S) = get_array_module(x), x.shape, weight.shape
    P, Q = ((n + 2 * padding - r) // stride + 1 for n, r in ((H, R), (W, S)))
    here = {"dtype": x.dtype, "device": x.device}
    bias = xp.zeros(K, **here) if bias is None else bias
    y = xp.empty((N, K, P, Q), **here)
    launch(direct, blocks_for(y), 128, x, weight, bias, y, stride, padding)
    return y

# %%
def conv_backward(dy, x, weight, *, stride=1, padding=0, with_bias=True, needs=(True, True, True)):
    xp = get_array_module(x)
    dx, dweight = xp.empty_like(x), xp.empty_like(weight)
    if needs[0]:  # nobody needs the gradient of the picture
        launch(dx_kernel, blocks_for(dx), 128, dy, weight, dx, stride, padding)
    launch(dweight_kernel, blocks_for(dweight, 32), 128, dy, x, dweight, stride, padding)
    return dx, dweight, xp.sum(dy, axis=(0, 2, 3), dtype=dy.dtype) if with_bias else None


class YourConvolution:
    forward, backward = staticmethod(conv_forward), staticmethod(conv_backward)

# %% [markdown]
# A small U-Net, depth 2 and 2 channels, takes two steps on two pieces of 16 × 16 pixels: by your kernels, and
# by NumPy alone. The first weights are the same. **Predict** how far apart the losses may be, and how many
# of a step's launches are yours. (It has eleven convolutions, and two transposed ones
# besides.)

# %%
piece = prepared.images[16:18, :, :16, :16], prepared.labels[16:18, :16, :16]


def two_steps(backend, dice):
    x, target = (backend.to_device(np.ascontiguousarray(each)) for each in piece)
    network, losses = ag.UNet(2, 2, depth=2, initial_channels=2), []
    optimizer = ag.SGD(network.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = dice(network(tensor(x)), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

# %%
with ag.replacing(conv2d=YourConvolution), launches_of() as made:
    by_yours = two_steps(set_backend(library="simulator" if SIMULATED else "torch"),
                         lambda y, target: YourDice()(y, target))
by_numpy = two_steps(set_backend(library="numpy"), ag.dice_loss)
own = (direct, dx_kernel, dweight_kernel, sums_kernel, gradient_kernel)
mine = sum(kernel in own for kernel, *_ in made)
for step, (one, other) in enumerate(zip(by_yours, by_numpy)):
    print(f"step {step}: your kernels {one:.6f}, NumPy {other:.6f}, difference {abs(one - other):.0e}")
print(f"launches in a step: {len(made) / 2:.0f}, of which {mine / 2:.0f} are yours")

# %% [markdown]
# The same losses, by two programs that have no line of arithmetic in common. That is worth more than any single
# test. Yours are 11 launches forward, 10 for dx (nobody needs the gradient of the picture), 11 for dweight, and
# the two of Dice. (The others are batch norm, ReLU, pooling, the transposed convolutions, and the optimiser with
# its table of addresses.)
#
# So now nothing depends on *who* computes. We train on NumPy, which is quick on a CPU, and on a GPU, if
# there is one, with the course's kernels.

# %% [markdown]
# ## 7 · Training
#
# `Segmentation` does what you did by hand in lesson 11: batches in random order, pictures turned and mirrored at
# random, the step, a learning rate that falls along a cosine. The loss is the mean of weighted cross-entropy and
# Dice (*combined*). The network has depth 2 and 8 channels, and is trained with the 51 training scenes.
# **Predict:** the threshold has an IoU of 0.565. What will the network reach after 14 epochs? And after the first?

# %%
set_backend(library="numpy" if SIMULATED else "torch")
EPOCHS = 14
network = ag.UNet(2, 2, depth=2, initial_channels=8)
task = Segmentation(network, train_set.images, train_set.labels, (held.images, held.labels), epochs=EPOCHS,
                    batch_size=4, learning_rate=4e-3, seed=0, loss_function="combined",
                    augment=data.sar.augmented)
history = [task.train_epoch(epoch) for epoch in range(EPOCHS)]
print(f"{sum(math.prod(p.shape) for p in network.parameters()):,} parameters; "
      f"IoU of water after 1 epoch {history[0]['iou_1']:.3f}, after {EPOCHS} {history[-1]['iou_1']:.3f}")

# %%
plot.curves(range(1, EPOCHS + 1), {
    "IoU of water, held-out scenes": [each["iou_1"] for each in history],
    "IoU of the best threshold": [to_beat] * EPOCHS,
    "loss, training scenes": [each["loss"] for each in history],
}, xlabel="epoch", ylabel="IoU; loss (no unit)", title="The network passes the threshold")

# %%
answers = task.predict(held.images)
some = [1, 4, 8, 11]
plot.segmentation(held.images[some, VV], held.labels[some], answers[some], held.classes,
                  titles=[held.scenes[i] for i in some], title="Scenes that it has never seen")

# %% [markdown]
# It does what no threshold can: it leaves most shadows out, which lie beside a bright slope, and fills lakes with wind on them.
# Both need *neighbours*, which is what convolutions and pooling give it. It does not do so everywhere. In the third scene
# a shadow at the left edge is called water, and so is most of a smooth field, straight borders and all. The curve jumps in the first epochs, when the steps are long; choose the best epoch by these
# scenes, and they are held out no more.
#
# **Where does it still err?** Count the wrong pixels by their distance from the nearest shore. **Predict** what share
# of them lies right beside one.

# %%
def beside_shore(labels):
    """Pixels one of whose four neighbours is of the other class."""
    shore = np.zeros(labels.shape, dtype=bool)
    for axis in (1, 2):
        a, b = (np.take(labels, range(i, 64 - 1 + i), axis) for i in (0, 1))
        differ = (a != b) & (a != NO_DATA) & (b != NO_DATA)
        for first in (0, 1):
            part = [slice(None)] * 3
            part[axis] = slice(first, 63 + first)
            shore[tuple(part)] |= differ
    return shore

# %%
shore, known = beside_shore(held.labels), held.labels != NO_DATA
print(f"{(shore & known).sum() / known.sum():.0%} of the known pixels lie beside a shore")
both = {"network": answers, "threshold": (held.images[:, VV] < threshold).astype(np.int64)}
for name, found in both.items():
    wrong = (found != held.labels) & known
    land_as_water = (wrong & (found == WATER)).sum() / wrong.sum()
    print(f"{name:10} {wrong.sum():6,} pixels are wrong: {(wrong & shore).sum() / wrong.sum():.0%} of them beside a "
          f"shore, {land_as_water:.0%} of them land that was called water")

# %% [markdown]
# A third of the network's errors are on the few pixels beside a shore, where grain decides. And of *all* its errors, nearly all
# are land that was called water: half of the loss is *weighted* cross-entropy, for which land is cheap (section 5).
# Whoever minds false alarms takes the weights out, or asks for more than $p = 0.5$.
#
# ### Real radar
#
# Everything so far was about drawn scenes, which are easier than the world. The course's benchmark `sar_folds` trains the
# same network on Sentinel-1's tiles, on a GPU. There are 11 chips (large scenes of one flood each), cut into tiles. Four times
# some chips are left out, the network is trained with the others, and what it finds in the chips it never saw is added
# up. A **fold** is such a set of chips. Beside it stands a twin of PyTorch's layers from the same first weights. **Predict:**
# is the IoU on real floods above or below the one on drawn scenes? And do the two networks agree to three digits?

# %%
for record in measured("unet.folds"):
    for who, mean in record["iou"].items():
        each = ", ".join(f"{row['iou']:.3f}" for row in record["rows"] if row["label"] == who)
        print(f"{who:18} IoU of water {mean:.3f} (by seed: {each})")
    by_fold = np.mean([row["iou_by_fold"] for row in record["rows"] if row["kind"] == "ours"], axis=0)
    print(f"ours, fold by fold: {', '.join(f'{iou:.2f}' for iou in by_fold)}")
    print(f"threshold          IoU {record['threshold']:.3f}; recorded on an {record['source']['device']}, {record['source']['date']}")
    published = ", ".join(f"{name} {value:.2f}" for name, value in record["published"].items())
    print(f"published for other chips of this set: {published}")

# %% [markdown]
# Published are 0.35 for a threshold, and 0.59 to 0.67 for networks, from Sentinel-1 alone (the 0.80 that one often reads is
# for optical pictures). Ours find less, and so does PyTorch's twin: the layers are not the reason. Two things differ, and we have not found out how much
# each of them does. The published networks learned from hundreds of chips, ours from eight or nine at a time. And other chips are asked: these eleven are harder
# for a threshold, too (here it was chosen on other chips; that of section 4 on the tiles that it was scored on), and from fold to fold the IoU differs by far more than the distance to the published ones.
#
# Two trainings from the same weights drift apart: after some hundred steps rounding has
# grown into another network. So one compares means over several seeds, and never a single run.

# %% [markdown]
# ## 8 · CPU against GPU
#
# The tape, the network and the loss are the same lines on both. How much faster is a GPU? Not by hope: **predict**.
# A step's time cannot be less than its FLOPs divided by what the chip can do, nor less than what the host needs to give its
# orders. First the FLOPs. Each weight is used once at each place, and there are three passes: forward, dx and dweight.

# %%
def step_flops(depth, batch, channels=64, side=128):
    total = 2 * channels * side**2  # the last convolution, 1 × 1
    for level in range(depth + 1):
        c, places = channels << level, (side >> level) ** 2
        before = c // 2 if level else 2
        total += 9 * (before * c + c * c) * places
        if level < depth:  # on the way up: 2 × 2 taps from 2c to c; 3 × 3 from 2c and from c to c
            total += (2 * c * c + 9 * (2 * c * c + c * c)) * places
    return 3 * 2 * batch * total


def step_launches(depth):
    """A U-Net of depth 2 has 5 double convolutions; each further level has two more."""
    return round(len(made) / 2 * (2 * depth + 1) / 5)  # two steps were made

# %% [markdown]
# Now the chips. How fast is *this* CPU at a product of matrices, which is what a convolution becomes in NumPy?

# %% tags=["varies"]
import time

a = np.ones((1024, 1024), dtype=np.float32)
a @ a
begin = time.perf_counter()
a @ a
cpu = 2 * 1024**3 / (time.perf_counter() - begin)
print(f"this CPU: {cpu / 1e9:.0f} GFLOP/s; a step of depth 4, batch 4 takes at least {step_flops(4, 4) / cpu:.1f} s")

# %% [markdown]
# For a server's CPU with 16 cores take 1 TFLOP/s. A convolution written as im2col does not reach it, as each window is
# copied first; let it be half of that. For the GPU take 40 TFLOP/s in float32 (lesson 8 saw more at the best sizes), and
# 30 µs of the host's time for each launch, all of the tape's Python around it included. These are guesses, and that is the
# point: a record shows which one was wrong. **Predict** with a pencil: which of the three cases below is limited by the
# orders? And where is the speed-up largest?

# %%
CPU_RATE, GPU_RATE, LAUNCH = 0.5e12, 40e12, 30e-6
CASES = (2, 2), (4, 4), (5, 8)  # depth, pictures in a batch; 128 × 128 pixels, 64 channels
guess = {}
for depth, batch in CASES:
    flops = step_flops(depth, batch)
    on_cpu, arithmetic, orders = flops / CPU_RATE, flops / GPU_RATE, step_launches(depth) * LAUNCH
    guess[depth, batch] = on_cpu, max(arithmetic, orders)
    print(f"depth {depth}, batch {batch}: {flops / 1e9:6,.0f} · 10⁹ FLOPs; CPU {on_cpu:5.2f} s; GPU {arithmetic * 1e3:4.1f} ms of "
          f"arithmetic, {orders * 1e3:.1f} ms of orders: {on_cpu / max(arithmetic, orders):.0f} times as fast")

# %% [markdown]
# If the guesses are right, the small case is limited by Python: the GPU has done its work before the host has given the next order. The larger ones
# are limited by arithmetic, and there the speed-up is the ratio of the two chips. Users of such programs report 5 to 10
# times for the first, 20 to 40 and 50 to 100 for the others. And now the record:

# %%
taped = measured("unet.tape")
for record in taped:
    gpu, cpu = (row["microseconds"] for row in record["rows"])
    depth, batch = record["depth"], record["shape"][0]
    on_cpu, on_gpu = guess.get((depth, batch), (math.nan, math.nan))
    print(f"depth {depth}, batch {batch}: GPU {gpu / 1e3:.1f} ms, predicted {on_gpu * 1e3:.1f}; NumPy {cpu / 1e6:.2f} s "
          f"({record['cpu_threads']} threads), predicted {on_cpu:.2f}: {record['speedup']:.0f} times as fast, predicted {on_cpu / on_gpu:.0f}")
    print(f"    {gpu / step_launches(depth):.0f} µs of a step for each of its launches")

# %%
def show_tape():
    if not taped:
        return print("So there is nothing to hold the prediction against yet.")
    names = [f"depth {r['depth']}, batch {r['shape'][0]}" for r in taped]
    rows = [{"label": name, "microseconds": r["speedup"]} for name, r in zip(names, taped)]
    return plot.times(rows, xlabel="NumPy's time ÷ the GPU's", title="The same lines on a GPU", **taped[0]["source"])


show_tape()

# %% [markdown]
# Both times were guessed too small, the CPU's and the GPU's. Where the speed-up comes out near the prediction all the same, that is luck. NumPy takes
# five to seven times as long. (One reason may be im2col, whose copies fit into no cache.) And the GPU? From the second case
# to the third its FLOPs grow by a factor of 2.5, and its time does not grow. So in the first two cases it waits for the *host*, not for arithmetic:
# an order takes the host, with all the Python of the tape around it, not 30 µs but more than 100. The third case has 2.5 times the
# work for the same time, and so the best speed-up.
#
# The pictures have to come to the GPU, too. `backend.prefetch` (lesson 12) copies the next batch while this one is
# computed with. **Predict:** what does it gain in a program that waits for its host?

# %%
for record in measured("unet.prefetch"):
    rates = ", ".join(f"{row['label']} {row['images_per_second']:,.0f}" for row in record["rows"])
    print(f"pictures per second: {rates}; prefetch has {record['ratio']:.0%} of the rate without copies\n"
          f"({record['source']['device']}, {record['source']['date']}); "
          f"kernels ran during {record['copies_hidden']:.0%} of the time of its copies")

# %% [markdown]
# Nothing. It was even a little slower than to copy each batch when it is needed, and nothing of its copies lay under a kernel. A copy can hide behind kernels
# only while kernels run. The `prefetch` that was measured ordered the next copy before the host had ordered the step that should hide it, and the GPU, which had
# done all that it was given before, copied at once. And it pinned each batch in the program's own thread, which has no time to spare. How much of the loss is due to which, nobody
# has measured. Today a thread of its own pins and copies; this program has not been measured with it.

# %% [markdown]
# ## 9 · Where the time goes
#
# Depth 4, 64 channels, a batch of 8. Count for each kind of layer the FLOPs and the *bytes*: how often an array is read or written, forward and
# backward together. A 3 × 3 convolution moves its input and its output three times each (at best). Batch norm reads twice and
# writes once forward, and reads four times and writes once backward: 8. ReLU 2 and 3. **Predict:** convolutions have 99 % of the FLOPs. What
# share of the bytes?

# %%
def moved(depth=4, batch=8, channels=64, side=128):
    """Bytes that a step moves, by kind of layer, if each kernel moves what it must."""
    found = dict.fromkeys(("convolution", "batch norm", "ReLU", "the others"), 0)
    for level in range(depth + 1):
        c, plane = channels << level, 4 * batch * (side >> level) ** 2
        inputs = [c // 2 if level else 2, c] + [2 * c, c] * (level < depth)
        found["convolution"] += 3 * sum(n + c for n in inputs) * plane
        found["batch norm"] += 8 * len(inputs) * c * plane
        found["ReLU"] += 5 * len(inputs) * c * plane
        if level < depth:  # pooling 2.5; the transposed convolution 4.5; concatenation 8
            found["the others"] += 15 * c * plane
    return found

# %%
n_bytes, bandwidth = moved(), 4.0e12
flops = {name: step_flops(4, 8) if name == "convolution" else 0 for name in n_bytes}
least = {name: max(flops[name] / GPU_RATE, n / bandwidth) for name, n in n_bytes.items()}
print(f"{sum(n_bytes.values()) / 1e9:.1f} GB and {step_flops(4, 8) / 1e12:.1f} · 10¹² FLOPs; "
      f"at least {sum(least.values()) * 1e3:.1f} ms at 40 TFLOP/s and 4 TB/s")
plot.shares({"FLOPs": flops, "bytes": n_bytes, "time, predicted": least}, highlight="convolution",
            xlabel="share of a step (%)", title="Convolutions: all of the FLOPs, a quarter of the bytes")

# %% [markdown]
# So convolutions decide, *if* they run at 40 TFLOP/s. In bfloat16, on tensor cores, let it be 400, and let all arrays have half
# the bytes: 1.4 ms for convolutions, and 0.5 ms for the rest, which no tensor core helps. Its share has grown from a
# fourteenth to a quarter. (Amdahl's law, lesson 7.) That is why real libraries
# fuse batch norm and ReLU into one kernel. The record of the tape's step on a GPU, taken apart, each part from before its first kernel to after its last:

# %%
def show_shares(found):
    if not found:
        return print("So there is no picture yet; the one above is all there is.")
    parts = {row["label"]: max(row["microseconds"], 0) for row in found[0]["rows"]}
    total = found[0]["step_microseconds"] / 1e3
    return plot.shares({"time, recorded": parts}, highlight="convolution", xlabel="share of a step (%)",
                       title=f"Where {total:.1f} ms of a step go", **found[0]["source"])


show_shares(measured("unet.shares"))

# %% [markdown]
# Convolutions have far less of it than predicted. But what is between two kernels counts here, too: the GPU waiting for the next order. The loss and Adam show it best,
# which have next to nothing to compute. PyTorch's profiler has counted the *kernels alone*, in a step of the same layers on PyTorch's autograd, with twice the pictures:

# %%
for record in measured("unet.kernels", dtype="float32"):
    kernels = {row["family"]: row["microseconds"] for row in record["rows"] if row["kind"] == "ours"}
    total = record["step_microseconds"]["ours"]
    print(f"{record['shape'][0]} pictures, {total / 1e3:.1f} ms of kernels: "
          + ", ".join(f"{name} {t / total:.1%}" for name, t in kernels.items()))

# %% [markdown]
# That is close to the prediction. The benchmark lets the GPU sleep until the host should have given all orders of a step, and yet the tape's step has such gaps. We have not found out why.
#
# And the same network as a PyTorch module, with our layers (`models.UNet`) and with PyTorch's:

# %%
def show_training(found):
    for record in found:
        best = {r["label"]: r["images_per_second"] for r in record["rows"]}
        rates = ", ".join(f"{label} {rate:,.0f}" for label, rate in best.items())
        print(f"{record['precision']}, batch {record['shape'][0]}, pictures per second: {rates}; {record['ratio']:.2f} × eager PyTorch, "
              f"{record['memory_ratio']:.2f} × its memory")


show_training([*measured("unet.training"), *measured("unet.training.tf32")])

# %% [markdown]
# Started one by one, our layers lose everywhere but in float32 with 16 pictures. Captured in a graph (lesson 11), where Python orders nothing, they
# win in float32 and lose in tf32 and bfloat16: there our kernels are the slower ones.
#
# Here, on a CPU, a clock around each function of the tape will do. (What it prints differs from machine to machine and is not
# stored.) **Predict** the order of the first three.

# %% tags=["varies"]
def clocked(function, spent):
    """`function`, but the time of each call is added to `spent` under its class's name."""
    def call(self, *args):
        begin = time.perf_counter()
        result = function(self, *args)
        name = type(self).__name__
        spent[name] = spent.get(name, 0) + time.perf_counter() - begin
        return result
    return call

# %% tags=["varies"]
from unittest.mock import patch

backend, spent = set_backend(library="numpy"), {}
network, kinds = ag.UNet(2, 2, depth=2, initial_channels=8), (ag.Conv2D, ag.BatchNorm2D, ag.ReLU, ag.MaxPool2D)
patches = [patch.object(kind, way, clocked(getattr(kind, way), spent)) for kind in kinds for way in ("forward", "backward")]
for each in patches:
    each.start()
ag.dice_loss(network(tensor(train_set.images[:8])), train_set.labels[:8]).backward()
for each in patches:
    each.stop()
for name, seconds in sorted(spent.items(), key=lambda item: -item[1]):
    print(f"{name:14} {seconds * 1e3:6.1f} ms")

# %% [markdown]
# ## What the profiler says
#
# Your two Dice kernels, as the profiler would see them, on one picture of 64 × 64 pixels. The logits are 32 KB, the target (of 8 bytes
# a pixel) as many. **Predict** how many times 32 KB `dice_sums` reads.

# %%
logits = np.zeros((1, 2, 4096), dtype=np.float32)
target = np.ascontiguousarray(held.labels[:1].reshape(1, -1))
sums = np.zeros((2, 3), dtype=np.float32)
with simulator.trace() as forward_trace:
    simulator.run(sums_kernel, 2, 256, logits, target, sums)
with simulator.trace() as backward_trace:
    simulator.run(gradient_kernel, 16, 256, ONE, logits, target, sums, ONE, np.zeros_like(logits))
for name, trace in (("dice_sums", forward_trace), ("dice_gradient", backward_trace)):
    loads = [site for site in trace.sites if site.op == "load" and site.space == "global"]
    requests, sectors = sum(s.requests for s in loads), sum(s.sectors for s in loads)
    print(f"{name:14} {requests:5,} requests, {sectors / requests:.1f} sectors each, "
          f"{sum(s.bytes for s in loads) / logits.nbytes:.1f} times the logits' bytes")

# %% [markdown]
# Neighbouring lanes have neighbouring pixels, so requests are coalesced, although the classes are *not* the last axis. But each class's block reads all classes, and each thread
# asks for the maximum, the sum and the probability anew. Most of these loads are served by the cache. What is worse: there are `C` blocks. With two
# classes, 2 of 132 multiprocessors work. In a report you would see a kernel that uses 2 % of the chip.
#
# The course's `kernels/dice` reads each pixel's logits once into registers, has all three sums of all classes from one pass, and thousands of blocks, whose sums a
# last block adds in a fixed order. Cross-entropy is in the same pass. **Predict** how it compares with PyTorch's operators, and with what `torch.compile` makes of them:

# %%
def show_loss(found):
    if not found:
        return None
    return plot.times(found[0]["rows"], title="Dice and cross-entropy, forward and backward, 8 × 2 × 512 × 512, float32",
                      **found[0]["source"])


show_loss(measured("segmentation_loss.dice.both", shape=(8, 2, 512, 512), dtype="float32"))

# %% [markdown]
# ## Where the real libraries go further
#
# - **MONAI** and **segmentation_models_pytorch** have these losses and dozens more, made of PyTorch's operators: ten passes over the logits where the course's kernel has two.
# - **nnU-Net** (Isensee and others, 2021) trains a plain U-Net with Dice + cross-entropy, and wins contests with it. What it adds is no layer: it chooses sizes, scaling and batches
#   by rules from the data.
# - **Despeckling** is a field of its own. Filters that keep shores (Lee, 1980) came first, networks that learn from noisy pictures alone after them (*Noise2Noise*).
# - A radar has the **phase**, too. From two passes it shows movements of the ground by millimetres (*InSAR*), and a flood as a place that no longer looks like itself (*coherence*).
# - **Prithvi** and other large networks are trained with years of pictures without labels first, and then with a few hundred labelled ones.
#
# ## Three questions
#
# <details><summary>1. Somebody's network has an IoU of 0.93 on radar scenes. The published ones have 0.65. What do you ask first?</summary>
#
# How the pixels were split. If tiles of one scene are on both sides, or single pixels, it has learned the scenes by heart. Then: IoU of which class? A mean over land and water is higher than
# water's own. And: on radar, or on optical pictures?
# </details>
#
# <details><summary>2. A batch happens to have no water at all. What do weighted cross-entropy, Dice with smooth = 1 and Dice with smooth = 0 do?</summary>
#
# Weighted cross-entropy is a mean over land alone, and pulls everything towards land a little. Dice with smooth: water's share is 1/(Σp + 1), so the loss still pulls its probability down, gently. Without
# smooth it is 0/(Σp) = 0 whatever the network says: gradient 0 for that class, and 0/0 = NaN if Σp underflows. So smooth is more than a cure for NaN.
# </details>
#
# <details><summary>3. You average the loss of two GPUs, each of which has half of the batch. With cross-entropy the gradient is that of the whole batch. With Dice?</summary>
#
# It is not. Dice is a ratio of sums over all pixels, and a mean of two ratios is no ratio of sums. The three sums of each class would have to be added over the GPUs first (they are only 3 · C numbers). Weighted
# cross-entropy has the same catch, a smaller one: the sum of the weights below the line.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# The whole of it is a command: `python -m course_lib train sar --config sar.yaml`, on drawn scenes, on Sen1Floods11, or on pictures of your own with labels in colours; `docs` has its keys. Take it to a
# place that you know. Radar pictures of any place and week are free. Then ask of your answer what you would ask of a kernel: what it was checked against, and what it would look like if it were wrong.
