# %% [markdown]
# # 17 · Two pathways
#
# **After this lesson** you can say why a network may look at brightness apart from colour, write
# one kernel for every layout of a picture, weigh several maps by weights that are learned and prove
# their gradients, watch these weights learn, and compute once what only weights decide. You can
# also predict what two streams save and what checkpointing keeps, and find parameters that learn
# nothing.
#
# **You need** lessons 1 to 3 (sectors, barriers, softmax), of
# [lesson 9](09_convolution_backward.ipynb) how a sum goes backwards, and of
# [lesson 10](10_the_other_layers.ipynb) batch normalisation. [Lesson 12](12_one_program_two_arrays.ipynb)
# has introduced streams.
#
# **Time:** 180 minutes; there are good places to pause after sections 3 and 5. All cells together
# run in about a minute without a GPU. Where a speed matters, you predict it, and see what was recorded
# on a GPU; with a GPU of your own you can measure it yourself. The words are collected in the
# [glossary](glossary.md).

# %%
import math

import matplotlib.cbook
import matplotlib.image
import numpy as np
import torch

from course_lib import SIMULATED, bench, cuda, models, plot, results_table, simulator
from course_lib.models.pathways import recomputed
from course_lib.runtime.host.launch import launch
from course_lib.runtime.host.launch import recorded as launches_of
from course_lib.runtime.intrinsics import block_sum
from course_lib.teach import TODO, check, hint, progress, solution, use

# %%
ZERO, DEVICE = np.float32(0), "cpu" if SIMULATED else "cuda"
records = bench.load_records()


def measured(name):
    """What was recorded under this name, by label, and where and when; or None, and a line."""
    if found := bench.find(records, name=name):
        rows = {row["label"]: row for row in found[0]["rows"]}
        source = {"device": records["device"]["name"], "date": results_table.when(found[0])}
        return found[0] | {"rows": rows, "source": source}
    return print(f"{name} has not been measured on a GPU yet.")


print("records are of an", records["device"]["name"])

# %% [markdown]
# ## 1 · Brightness and colour
#
# Here is the photograph of lesson 0 again, this time in colour. It is taken apart: into its
# **brightness**, one number for each pixel, and into what is left if every pixel is made equally
# bright, its colour. **Predict:** in which of the two will you recognise the face?

# %%
with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
    photo = matplotlib.image.imread(file, format="jpg")

LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # of red, green and blue
picture = (photo[20:532].reshape(128, 4, 128, 4, 3).mean(axis=(1, 3)) / 255).astype(np.float32)
bright = picture @ LUMA
plain = np.clip(picture + (0.5 - bright)[..., None], 0, 1)  # the differences, on an even grey
plot.images([picture, bright, plain], ["as it is", "brightness", "colour"],
            title="A photograph, and what it is made of",
            alt="A portrait in colour; in grey, where everything is to be seen; and of even brightness, "
                "where face, hands and flag are blots of colour without any edge")

# %% [markdown]
# The edges are in the brightness. Eyes know that: of the light that reaches your retina, one set of
# nerve cells reports brightness, finely and fast, and another one reports differences of colour,
# coarsely. They run to the brain on two *pathways* that stay apart for a long way.
#
# Engineers have copied this twice. Colour television (1953) sent the old black-and-white picture,
# and colour beside it with a fraction of its detail. JPEG does the same. **Predict:** in one copy of
# the photograph, colour is averaged over 8 × 8 pixels, and in another one brightness. Which will
# you mind?

# %%
def coarse(a, n=8):
    """`a`, averaged over windows of n × n pixels."""
    means = a.reshape(128 // n, n, 128 // n, n, -1).mean(axis=(1, 3))
    return means.repeat(n, axis=0).repeat(n, axis=1).reshape(a.shape)


colours = picture - bright[..., None]
mixed = coarse(colours) + bright[..., None], colours + coarse(bright)[..., None]
plot.images([picture, *(np.clip(each, 0, 1) for each in mixed)],
            ["as it is", "colour 8 × 8 coarser", "brightness 8 × 8 coarser"],
            title="One copy has lost 98 % of its colour; hardly anybody sees it",
            alt="The portrait; nearly the same with coarse colours; and in large squares where brightness is coarse")

# %% [markdown]
# A network is no eye. But it has the same two kinds of evidence, and one of them may be bad: at night
# a camera's colours are noise; a shadow halves the brightness and leaves the colour as it was. A
# network with a pathway for each can learn which to trust. That is the network of this lesson.
#
# ### How bright is a colour?
#
# Not the mean of red, green and blue: of three lamps of the same power, you see the green one as
# the brightest and the blue one as the darkest. So brightness is a weighted sum, and the weights
# are in standards:
#
# | standard | red | green | blue | made for |
# |---|--:|--:|--:|---|
# | Rec. 601 (1982) | 0.299 | 0.587 | 0.114 | television with tubes; JPEG, and most software |
# | Rec. 709 (1990) | 0.2126 | 0.7152 | 0.0722 | flat screens |
#
# (Strictly, the first is called **luma**, since it weighs the numbers of a file, which are about the
# square roots of the light. **Luminance** is the second sum of the light itself.) **Predict:** a blue
# sky (0.3, 0.5, 1.0) and a brown roof (0.7, 0.45, 0.2). Which of the two is brighter, by the mean and by
# Rec. 601?

# %%
for name, colour in {"sky": (0.3, 0.5, 1.0), "roof": (0.7, 0.45, 0.2)}.items():
    print(f"{name:5} mean {np.mean(colour):.2f}   Rec. 601 {LUMA @ colour:.3f}   "
          f"Rec. 709 {np.dot((0.2126, 0.7152, 0.0722), colour):.3f}")

# %% [markdown]
# By the mean, the sky is brighter by a third. By both standards they are nearly alike. A kernel should get
# its weights as an argument.
#
# ### Exercise: one kernel for every layout
#
# PyTorch's pictures have their **channels first**: all reds of a picture, then all greens, then all blues.
# Files and cameras have **channels last**: red, green and blue of the first pixel, then of the next one.
# Others have a fourth number beside each pixel, or empty places at the end of a plane. In lesson 6 you
# wrote an `if` for two layouts. Now one formula for all of them.
#
# `x` is flat. Three numbers tell the layout, its **steps** (also called *strides*): `step_n` elements
# further lies the same pixel of the next picture, `step_c` further the next channel, `step_p` further the
# next pixel. `weight` has three numbers, and `y` is (pictures, pixels).

# %% exercise="brightness"
@cuda.jit
def brightness(x, step_n, step_c, step_p, weight, y):
    P = y.shape[1]
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        n, p = i // P, i % P
        first = TODO  # where this pixel's red lies
        total = ZERO
        TODO  # red, green and blue
        y[n, p] = total


check("brightness", brightness)

# %%
hint("brightness")

# %% [markdown]
# **Look inside.** Four pictures of 32 × 32 pixels, in both layouts. **Predict:** how many sectors of 32 bytes
# does a warp's request for 32 reds take, channels first and channels last? And how many times is each
# sector asked for?

# %%
bright_kernel, P = use("brightness", brightness), 1024
traces = {}
for name, steps in {"channels first": (3 * P, P, 1), "channels last": (3 * P, 1, 3)}.items():
    with simulator.trace() as traces[name]:
        simulator.run(bright_kernel, 32, 128, np.zeros(12 * P, np.float32), *steps, LUMA,
                      np.zeros((4, P), np.float32))
    loads = [site for site in traces[name].sites if "x[" in site.source and site.op == "load"]
    requests, sectors = sum(s.requests for s in loads), sum(s.sectors for s in loads)
    print(f"{name}: {requests} requests, {sectors / requests:.0f} sectors each; x has {12 * P * 4 // 32} sectors")

# %%
plot.access_map(traces["channels last"], loads[0], steps=3,
                title="Channels last: red, green and blue ask for the same sectors")

# %% [markdown]
# 4 and 12. Channels first, each sector is asked for once. Channels last, three times, for a third of it each
# time. The second and third time it still is in the cache: memory sends it once, and the rest costs the cache's time.
# With a fourth number beside each pixel, a third more bytes are moved, in any case.

# %% [markdown]
# ## 2 · Where they meet
#
# The network of this lesson has two towers of convolutions, one for the colours (3 channels) and one for the
# brightness (1 channel). What they find has the same shape, and it is *integrated* on several floors:
#
# $$ y = w_1 \cdot \text{colour} + w_2 \cdot \text{brightness} + w_3 \cdot \text{integrated} $$
#
# where *integrated* is the result of the floor before. How much of each? Nobody knows before training, so it is
# learned. The weights should be positive and add up to 1. That is a softmax (lesson 3), this time of **three
# learned scalars**: $w = \text{softmax}(s)$. They begin with $s = (0.5, 0.5, 0)$. **Predict** the three weights.

# %%
scalars = np.array([0.5, 0.5, 0], dtype=np.float32)
print("weights", np.round(np.exp(scalars) / np.exp(scalars).sum(), 3))

# %% [markdown]
# ### Exercise: weigh and add
#
# All maps are flat, and any number of threads may come. The softmax is the same for all of them, so *one*
# thread of each block computes it, and leaves the weights in shared memory. A block reads the scalars once, each of the three.
# (The check counts the readings of all blocks of a launch together: with two blocks each scalar is read twice, once by each.
# A scalar may be −∞: that pathway is shut.)

# %% exercise="integrate"
@cuda.jit
def integrate(scalars, colour, brightness, integrated, y):
    weight = cuda.shared.array(3, np.float32)
    if cuda.threadIdx.x == 0:
        TODO  # softmax of the three scalars, into `weight`
    TODO  # who may read it, and when?
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        y[i] = TODO


check("integrate", integrate)

# %%
hint("integrate")

# %% [markdown]
# **Predict:** how many bytes does the kernel move for each number of `y`? And PyTorch, if you write
# `w[0] * colour + w[1] * brightness + w[2] * integrated`, in which each operation is a kernel of its own?

# %%
weigh, n = use("integrate", integrate), 4096
maps = np.random.default_rng(0).normal(size=(3, n)).astype(np.float32)
with simulator.trace() as trace:
    simulator.run(weigh, 4, 256, scalars, *maps, np.zeros(n, np.float32))
kernel_bytes = sum(32 * s.sectors for s in trace.sites if s.space == "global") / n
products, sums = 3 * (4 + 4), 2 * (4 + 4 + 4)
print(f"one kernel: {kernel_bytes:.1f} bytes for each number; five kernels: {products + sums}")

# %% [markdown]
# A third of the bytes. (16.1 instead of 16: each block has fetched the scalars.) Fused, three maps cost little
# more than one copy.
#
# What is it for, to read the scalars once for each block? Not for the bytes: 32 lanes that ask for the same
# address cost one sector, from the cache. But three exponentials and a quotient in *each* thread are more
# arithmetic than the three products that the thread is there for.

# %% [markdown]
# ## 3 · Backwards
#
# Somebody hands us `dy`, the gradient of every number of $y = \sum_k w_k m_k$ (the $m_k$ are the three maps).
# Wanted are the gradients of the maps, and those of three scalars. For the maps it is easy, $dm_k = w_k \cdot dy$.
# For a weight, all numbers of $y$ count, since it took part in each:
#
# $$ g_k = \frac{\partial\, \text{loss}}{\partial w_k} = \sum_i dy_i \cdot m_{k,i} $$
#
# Three sums over the whole map. Then through softmax, as in lesson 4, but only of three numbers:
#
# $$ ds_k = w_k \, \Big( g_k - \sum_j w_j \, g_j \Big) $$
#
# Read the bracket. The sum is the mean of the three $g$, by weight. A step of training goes *against* the
# gradient; so a pathway gains weight if more of it would lower the loss by more than the mean of all does.
# **Predict:** what is the sum of the three $ds_k$? And how large is $ds_k$ of a pathway whose weight is nearly 0?
#
# ### Exercise: back to three maps, and to three weights
#
# One pass over all numbers writes the gradients of the maps and, on the way, adds up. The numbers are dealt
# by a grid-stride loop. Each block leaves its three sums in its own row of `partial`. Blocks are whole warps, and
# `block_sum(value, scratch)` gives all threads of the block the sum (lesson 2).
#
# Atomics would be shorter. But the sum of float32 numbers depends on their order, and atomics come in any
# order: the same training run would give other weights each time. So this check lets the threads come in several orders, and wants the same *bits* of each.

# %% exercise="integrate_backward"
@cuda.jit
def integrate_backward(
    dy, weight, colour, brightness, integrated, dcolour, dbrightness, dintegrated, partial
):
    scratch = cuda.shared.array(32, np.float32)
    a, b, c = ZERO, ZERO, ZERO
    for i in range(cuda.grid(1), dy.size, cuda.gridsize(1)):
        g = dy[i]
        TODO  # three gradients are written, three sums grow
    TODO  # the sums of all threads of the block; one thread writes the row


check("integrate_backward", integrate_backward)

# %%
hint("integrate_backward")

# %% [markdown]
# What is left is small: to add up the rows, in their order, and the formula of three numbers. PyTorch may do that.
# Both kernels become a `Function`, so that autograd calls them (lesson 7).

# %%
backward_kernel = use("integrate_backward", integrate_backward)


def weighed(scalars, *maps):
    y, flat = torch.empty_like(maps[0]), [m.reshape(-1) for m in maps]
    launch(weigh, -(-y.numel() // 128), 128, scalars, *flat, y.view(-1))
    return y


def weighed_backward(dy, weight, *maps):
    blocks, dmaps = -(-dy.numel() // 128), [torch.empty_like(m) for m in maps]
    partial, flat = dy.new_empty(blocks, 3), [each.reshape(-1) for each in (*maps, *dmaps)]
    launch(backward_kernel, blocks, 128, dy.reshape(-1), weight, *flat, partial)
    return partial.sum(0), *dmaps

# %%
class Weigh(torch.autograd.Function):
    """softmax(scalars) · (colour, brightness, integrated), by your two kernels."""

    @staticmethod
    def forward(ctx, scalars, *maps):
        ctx.save_for_backward(scalars.softmax(0), *maps)
        return weighed(scalars, *maps)

    @staticmethod
    def backward(ctx, dy):
        g, *dmaps = weighed_backward(dy, *ctx.saved_tensors)
        weight = ctx.saved_tensors[0]
        return weight * (g - weight @ g), *dmaps

# %%
def gradients(function):
    """Of the three scalars and the three maps, where the loss is a product with `towards`."""
    inputs = [t.clone().requires_grad_() for t in (start, *three)]
    (function(*inputs) * towards).sum().backward()
    return [t.grad.cpu() for t in inputs]


torch.manual_seed(0)
start, towards = torch.tensor([0.5, 0.5, 0.0], device=DEVICE), torch.randn(24, 16, device=DEVICE)
three = [torch.randn(24, 16, device=DEVICE) for _ in range(3)]
mine = gradients(Weigh.apply)
theirs = gradients(lambda s, *maps: sum(w * m for w, m in zip(s.softmax(0), maps)))
print(f"largest difference from autograd {max((a - b).abs().max() for a, b in zip(mine, theirs)):.0e}; "
      f"the scalars' gradients {[round(x, 2) for x in mine[0].tolist()]}, their sum {abs(mine[0].sum()):.0e}")

# %% [markdown]
# Their sum is 0: what one pathway gains, the others lose. And a weight near 0 is a factor of its own gradient, so
# that a pathway which was shut once hardly ever opens again. (That is why all of them begin with a fair share.)
#
# **Predict:** how many bytes does your kernel move for each number, and PyTorch's operators, if each product
# and each sum is a kernel?

# %%
n = 4096
x = np.random.default_rng(0).normal(size=(7, n)).astype(np.float32)
with simulator.trace() as trace:
    simulator.run(backward_kernel, 4, 256, x[0], np.ones(3, np.float32), *x[1:], np.zeros((4, 3), np.float32))
kernel_bytes = sum(32 * s.sectors for s in trace.sites if s.space == "global") / n
separate = 3 * (4 + 4) + 3 * (4 + 4 + 4) + 3 * 4  # dm; products; their sums
print(f"one kernel: {kernel_bytes:.1f} bytes for each number; nine kernels: {separate}")

# %% [markdown]
# The kernel asks for dy and three maps, and writes three: 28 bytes, if each number is loaded once. (What is above 28
# are the three weights, which the loop of each thread reads again and again: from the cache. You could keep them in
# registers.) A good place for a break.

# %% [markdown]
# ## 4 · Watch them learn
#
# Which pathway is better depends on the world. So here are two, and in each of them one kind of evidence is bad.
# Both show a disc, a square or a diamond, in red, green or blue.
#
# - **Night.** Wanted is the *shape*. The colours are noise, and the brightness has none: what the noise of a pixel
#   would change in its brightness is taken off again. (A camera's noise at night is in the brightness, too, only smaller.)
# - **Shade.** Wanted is the *colour*, such as a fruit's. Leaves cast shadows all over it, which change the brightness
#   of each pixel, and not its colour. All three colours are equally bright.

# %%
SIDE = 24
TINTS = np.array([[1.35, 0.80, 0.80], [0.85, 1.12, 0.80], [0.85, 0.90, 2.10]])
TINTS /= (TINTS @ LUMA)[:, None]  # all of the same brightness
col, row = np.meshgrid(*[np.arange(SIDE) / SIDE * 2 - 1] * 2)


def shape(rng, kind):
    """True where the thing is: a disc, a square or a diamond."""
    u, v = (abs(a - rng.uniform(-0.35, 0.35)) for a in (col, row))
    r = rng.uniform(0.35, 0.55)
    return (np.hypot(u, v) < r, np.maximum(u, v) < 0.85 * r, u + v < 1.25 * r)[kind][..., None]

# %%
def night(rng, label):
    thing = rng.uniform(0.25, 0.7) * TINTS[rng.integers(3)]
    noise = rng.normal(0, 0.35, (SIDE, SIDE, 3))
    return np.where(shape(rng, label), thing, 0.12) + noise - (noise @ LUMA)[..., None]


def shade(rng, label):
    thing, background = rng.uniform(0.25, 0.7) * TINTS[label], rng.uniform(0.2, 0.75)
    shadows = rng.uniform(0.6, 1.3, (SIDE, SIDE, 1))
    return np.where(shape(rng, rng.integers(3)), thing, background) * shadows

# %%
def scenes(world, n, seed):
    """n images (n, 24, 24, 3), as a camera gives them, and their labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, n)
    return np.stack([world(rng, label) for label in labels]).astype(np.float32), labels


worlds = {"night": night, "shade": shade}
shown = {name: scenes(world, 2, 9)[0] for name, world in worlds.items()}
pictures = [p for two in shown.values() for each in two for p in (np.clip(each, 0, 1), each @ LUMA)]
plot.images(pictures, [f"{name}, {kind}" for name in worlds for _ in "12" for kind in ("seen", "brightness")],
            vmin=0, vmax=1, title="By night the brightness tells, in the shade the colour",
            alt="By night: shapes drowned in coloured dots, and plain in the brightness. In the shade: coloured "
                "shapes, which are hardly to be seen in the brightness")

# %% [markdown]
# Your kernel makes the brightness of all images, as they come, channels last. The network is small: two convolutions
# on each pathway, then means over the planes, then your `Weigh`. (For *integrated* it gets the mean of the two: there
# is no floor before.)

# %%
def with_brightness(images):
    """(N, 3, H, W) and (N, 1, H, W) of images (N, H, W, 3)."""
    x, P = torch.tensor(images, device=DEVICE), images.shape[1] * images.shape[2]
    y = torch.empty(len(x), P, device=DEVICE)
    launch(bright_kernel, 64, 256, x.view(-1), 3 * P, 1, 3, torch.tensor(LUMA, device=DEVICE), y)
    return x.permute(0, 3, 1, 2), y.view(-1, 1, *images.shape[1:3])


def drawn(world, n, seed):
    images, labels = scenes(world, n, seed)
    return with_brightness(images), torch.tensor(labels, device=DEVICE)

# %%
from torch.nn import AdaptiveAvgPool2d, BatchNorm2d, Conv2d, Flatten, Linear, ReLU, Sequential


def pathway(c_in):
    """Two convolutions that halve the image, each with its norm and ReLU; then a mean of each plane."""
    first = Conv2d(c_in, 8, 3, 2, 1, bias=False), BatchNorm2d(8), ReLU()
    second = Conv2d(8, 16, 3, 2, 1, bias=False), BatchNorm2d(16), ReLU()
    return Sequential(*first, *second, AdaptiveAvgPool2d(1), Flatten())

# %%
class TwoPathways(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.colour, self.brightness, self.head = pathway(3), pathway(1), Linear(16, 3)
        self.scalars = torch.nn.Parameter(torch.tensor([0.5, 0.5, 0.0]))

    def forward(self, images, bright):
        a, b = self.colour(images), self.brightness(bright)
        return self.head(Weigh.apply(self.scalars, a, b, (a + b) / 2))

# %%
def right(network, inputs, labels):
    """The share of answers that are right."""
    network.eval()
    with torch.no_grad():
        return (network(*inputs).argmax(1) == labels).float().mean().item()


def epoch_of(network, optimizer, inputs, labels):
    network.train()
    for batch in torch.randperm(len(labels)).split(24):
        loss = torch.nn.functional.cross_entropy(network(*(x[batch] for x in inputs)), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# %% [markdown]
# Scalars learn slowly beside hundreds of weights, so they get ten times the learning rate. **Predict** the weights
# after 15 epochs in each world. Where will *integrated* go, which is half of each?

# %%
def trained(world, epochs=15):
    """The network, and the weights of each epoch."""
    training = drawn(world, 240, 1)
    torch.manual_seed(0)
    network, weights = TwoPathways().to(DEVICE), []
    others = [p for p in network.parameters() if p is not network.scalars]
    optimizer = torch.optim.Adam([{"params": others}, {"params": [network.scalars], "lr": 0.03}], lr=0.003)
    for _ in range(epochs):
        weights.append(network.scalars.softmax(0).tolist())
        epoch_of(network, optimizer, *training)
    return network, [*weights, network.scalars.softmax(0).tolist()]

# %%
with launches_of() as made:
    found = {name: trained(world) for name, world in worlds.items()}
unseen = {name: drawn(world, 120, 2) for name, world in worlds.items()}
for name, (network, weights) in found.items():
    print(f"{name}: {right(network, *unseen[name]):.0%} of new images are right; weights "
          f"colour {weights[-1][0]:.2f}, brightness {weights[-1][1]:.2f}, integrated {weights[-1][2]:.2f}")
print(f"{len(made)} launches of brightness, integrate and integrate_backward")

# %%
names = "colour", "brightness", "integrated"
history = [{"epoch": epoch, "integration_weights": {
    world: dict(zip(names, weights[epoch])) for world, (_, weights) in found.items()
}} for epoch in range(16)]
plot.integration_weights(history, title="The same network learns to trust another pathway in each world")

# %% [markdown]
# Nobody has told it. For each batch, your three sums said which pathway would have lowered the loss more. (*Integrated*
# is half of the bad pathway, so it goes too.)
#
# ### What a weight says, and what it does not
#
# One should be careful: a weight is a factor of a map, and maps have a size. If the colour pathway's numbers were ten
# times as large, a tenth of the weight would do the same. What counts is what happens *without* a pathway. Shut one:
# its scalar becomes −∞. **Predict** the share of right answers in each world, with colour shut, and with brightness shut.

# %%
def shut(network, which):
    """Let some scalars be −∞; what they were comes back."""
    before = network.scalars.detach().clone()
    network.scalars.data[list(which)] = -math.inf
    return before

# %%
for world, (network, _) in found.items():
    line = f"{world}: whole {right(network, *unseen[world]):.0%}"
    for k, name in enumerate(names[:2]):
        before = shut(network, (k, 2))  # integrated has seen both: shut as well
        line += f", without {name} {right(network, *unseen[world]):.0%}"
        network.scalars.data.copy_(before)
    print(line)

# %% [markdown]
# Guessing gives 33 %. So here the weights do say what matters. Check it in any network of your own before you believe it.
#
# The course's network has the same thing at every floor. `get_pathway_contributions()` multiplies the shares from
# floor to floor: what was *integrated* counts as what it was made of. With the weights that it begins with, **predict**
# the share of colour in the end.

# %%
torch.manual_seed(0)
network = models.ContinuousIntegrationModel(3, "medium", base_channels=8, layers=torch.nn)
for floor, weights in network.get_integration_weights().items():
    print(floor, {name: round(w, 3) for name, w in weights.items()})
print({name: round(share, 3) for name, share in network.get_pathway_contributions().items()})

# %% [markdown]
# Half: everything is alike on both sides. In the first world above, colour's share would be that of its weight, and half of
# *integrated*'s.
#
# ### On real pictures
#
# For the course, this network (*medium*, four floors) was trained on Tiny-ImageNet: 100,000 photographs of 200 kinds of things, by day, sharp, in
# good colours. **Predict** for the first floor, `stage1`, and for the last, `pooled`: which of the three gains weight? And what is colour's share in
# the end?

# %%
runs = measured("tiny_imagenet.runs")
run = runs["rows"]["continuous_integration"] if runs else None


def as_recorded():
    if run is None:
        return None
    when = runs["stopped"].get(run["label"], f"after {len(run['history'])} epochs")
    title = f"Tiny-ImageNet {when}: {run['accuracy']:.1%} of new pictures are right"
    return plot.integration_weights(run["history"], title=title, **runs["source"])


as_recorded()

# %%
if run:
    colour = 0.5  # the first floor is given the mean of both
    for weights in run["history"][-1]["integration_weights"].values():
        colour = weights["colour"] + weights["integrated"] * colour
    print(f"colour's share in the end: {colour:.2f}")

# %% [markdown]
# The first floor has hardly moved; the second leans on what was integrated before, the third on brightness. On the last nearly all weight is on *integrated*, so that
# both pathways come in by way of the floors before. In such pictures no evidence is bad, and no pathway is shut. (And this is one run. What a weight does not say, you have seen
# above.)

# %% [markdown]
# ## 5 · What weights alone decide
#
# When training is over, weights are constants. The softmax of three scalars is the same for each image; and yet it is
# computed again for each batch. Three numbers cost nothing, but a *launch* does: a few microseconds (lesson 4), which
# is more than a small layer takes. There is more of this kind.
#
# After a 1 × 1 convolution $z = W x + b$ comes a batch norm. In evaluation it uses the running statistics, which are
# constants as well:
#
# $$ y = \gamma \, \frac{z - \mu}{\sqrt{\sigma^2 + \varepsilon}} + \beta $$
#
# Put the convolution in place of $z$, and it is a convolution again, with other weights and another bias. The batch norm
# has gone: it was **folded** into the layer before. **Predict** both, for output channel $k$.
#
# ### Exercise: fold a batch norm
#
# A block for each output channel. `weight` is (channels after, channels before), the others have a number for each
# channel after; `eps` is a number.

# %% exercise="fold_batch_norm"
@cuda.jit
def fold_batch_norm(weight, bias, gamma, beta, mean, var, eps, folded, shift):
    k = cuda.blockIdx.x
    scale = TODO
    TODO  # all weights of channel k, dealt to the threads of the block
    if cuda.threadIdx.x == 0:
        shift[k] = TODO


check("fold_batch_norm", fold_batch_norm)

# %%
hint("fold_batch_norm")

# %%
fold, conv, norm = use("fold_batch_norm", fold_batch_norm), torch.nn.Conv2d(12, 8, 1), torch.nn.BatchNorm2d(8)
images = torch.randn(64, 12, 6, 6) * 3 + 1
with torch.no_grad():
    for _ in range(30):
        norm(conv(images))  # which moves the running statistics
    norm.weight.normal_()
    norm.eval()
    given = conv.weight[:, :, 0, 0], conv.bias, norm.weight, norm.bias, norm.running_mean, norm.running_var
    given = [each.numpy().copy() for each in given]
    folded, shift = np.zeros((8, 12), np.float32), np.zeros(8, np.float32)
    fold[8, 32](*given, np.float32(norm.eps), folded, shift)

# %%
with torch.no_grad():
    two_layers = norm(conv(images))
    weight = torch.from_numpy(folded)[:, :, None, None]
    one_layer = torch.nn.functional.conv2d(images, weight, torch.from_numpy(shift))
print(f"largest difference {(two_layers - one_layer).abs().max():.0e}, the largest number is {two_layers.abs().max():.1f}")

# %% [markdown]
# Not the same bits, since other numbers are rounded. And one pass over the maps instead of two.
#
# ### A cache that knows when it is wrong
#
# The course's network does this by itself, in evaluation and without gradients: the first call computes softmax and folded
# weights and keeps them. Every such **cache** has one hard question: when is it *stale*? We count PyTorch's operators in a
# call. **Predict** the order of these four: the first call, the second, one after a weight was changed, and the next.

# %%
from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """Counts the operators that are called."""
    n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += 1
        return function(*args, **(kwargs or {}))

# %%
def call(what):
    with torch.no_grad(), Counted() as counted:
        logits = network(batch)
    print(f"{what:24} {counted.n} operators, first logit {logits[0, 0].item():+.5f}")


torch.manual_seed(1)
network, batch = network.eval(), torch.rand(2, 3, 32, 32)
call("first call")
call("second call")
with torch.no_grad():
    network.integrations["pooled"].scalars += torch.tensor([0.0, 2.0, 0.0])
call("a scalar has changed")
call("once more")

# %% [markdown]
# The constants are found again where one has changed, and only there. How does it notice? PyTorch counts the changes of each tensor
# (`tensor._version`), and the network compares. One thing escapes that count: to write through `.data`. **Predict** what
# the next cell prints.

# %%
network.integrations["pooled"].scalars.data += torch.tensor([0.0, 0.0, 4.0])
call("changed through .data")
network.eval()
call("after eval()")

# %% [markdown]
# The old logit! Only `eval()` or `train()` throw the constants away in that case. A cache that is never stale is one that is never
# used. So know what yours looks at, and write it down. (Ours does, in its docstring.)
#
# A good place for a break.

# %% [markdown]
# ## 6 · Every parameter learns
#
# A parameter that has no effect on the loss does no harm, one might think. Here is a network with two such mistakes. **Predict** which
# of its parameters get a gradient of 0, and which get none at all.

# %%
class Careless(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = Conv2d(3, 8, 3), BatchNorm2d(8), Linear(8, 3)
        self.extra = Linear(8, 8)  # which somebody meant to use

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))

# %%
def learns(network, *inputs):
    """The largest number of each parameter's gradient; None where there is no gradient."""
    labels = torch.arange(len(inputs[0])) % 3
    torch.nn.functional.cross_entropy(network(*inputs), labels).backward()
    return {name: None if p.grad is None else p.grad.abs().max().item()
            for name, p in network.named_parameters()}

# %%
torch.manual_seed(0)
for name, largest in learns(Careless(), torch.rand(16, 3, 16, 16)).items():
    print(f"{name:12} {'no gradient' if largest is None else f'{largest:.0e}'}")

# %% [markdown]
# `extra` has none: nobody called it. That stops training on several GPUs. There, each GPU has a part of the batch, and the gradients are
# averaged while the backward pass still runs (PyTorch's *DistributedDataParallel*, **DDP**). DDP waits for the gradient of *every*
# parameter, and for this one it would wait for ever; so it stops with an error in the next step.
#
# `conv.bias` is worse, since nothing stops. Whatever it adds to a channel, the batch norm behind it takes away again with the mean.
# Its true gradient is 0, and what you see is rounding. Adam divides each gradient by its usual size (lesson 10): so it makes
# *full-sized steps out of this rounding*, and the bias wanders about for nothing. Hence: `bias=False` before a batch norm.
#
# Somewhere in a large network the same hides in longer chains. The test is three lines. For the course's network:

# %%
network.train()
largest = learns(network, torch.rand(16, 3, 32, 32))
dead = [name for name, each in largest.items() if each is None or each < 1e-6]
print(f"{len(largest)} parameters, of which {len(dead)} learn nothing")

# %% [markdown]
# ## 7 · Two streams
#
# The two pathways know nothing of each other, until they meet. Why should one wait for the other? A GPU carries out the orders of one **stream**
# one after the other; orders of two streams may run at the same time (lesson 12). Whether they do depends on two
# things. There must be room: a kernel that fills all multiprocessors leaves none. And the orders must be there in time.
#
# **Events** connect streams. `event.record(stream)` puts a mark into a queue; `stream.wait_event(event)` lets another queue wait there
# until the mark has been passed. The host does not wait: these are orders too.
#
# ### Exercise: when does each task end?
#
# The host gives the orders one after the other, and each costs it `launch_ms`: order $i$ (from 0) is there after $(i + 1)$ times that. A task
# begins when its order is there, its stream (0 or 1) has done all tasks before it, and the task `waits_for[i]` has ended, if that is not −1. (It always is an
# earlier one.) There is room for both. Return the time at which each task ends, as an array.

# %% exercise="two_streams"
def two_streams(stream, ms, waits_for, launch_ms):
    end, free = np.zeros(len(ms)), [0.0, 0.0]
    for i in range(len(ms)):
        TODO  # when can it begin? when does it end, and its stream with it?
    return end


check("two_streams", two_streams)

# %%
hint("two_streams")

# %% [markdown]
# Three kernels of the colour pathway (stream 0) and three of brightness (stream 1), which are shorter; then one that adds both, and so waits
# for the last kernel of the other stream:

# %%
ends = use("two_streams", two_streams)
stream, ms = np.array([0, 1, 0, 1, 0, 1, 0]), np.array([30, 20, 30, 20, 30, 20, 15]) / 1000
waits_for = np.array([-1] * 6 + [5])
end = ends(stream, ms, waits_for, 0.004) * 1000
spans = [(f"stream {s}", e - 1000 * m, e, name) for s, m, e, name in
         zip(stream, ms, end, ["colour 1", "bright 1", "colour 2", "bright 2", "colour 3", "bright 3", "add"])]
alone = ends(np.zeros(7, dtype=int), ms, waits_for, 0.004)[-1] * 1000
plot.timeline(spans, title=f"Two streams: {end[-1]:.0f} µs instead of {alone:.0f}")

# %% [markdown]
# Now the course's network, with twelve kernels on each pathway. **Predict:** an order costs the host 5 µs. How much do two streams bring if a
# kernel takes 2 µs? If it takes 50? And if all orders were given beforehand, as a CUDA graph does (lesson 4)?

# %%
def gain(kernel_us, launch_us, n=12):
    """How many times as fast two streams are: n kernels on each pathway, and one that adds."""
    stream = np.array([1] * n + [0] * (n + 1))  # the host orders the one pathway, then the other
    ms, waits_for = np.full(2 * n + 1, kernel_us / 1000), np.array([-1] * 2 * n + [n - 1])
    one = ends(np.zeros(2 * n + 1, dtype=int), ms, waits_for, launch_us / 1000)
    return one[-1] / ends(stream, ms, waits_for, launch_us / 1000)[-1]


lengths = np.array([1, 2, 3, 5, 7, 10, 15, 20, 30, 50])
plot.curves(lengths, {"5 µs for an order": [gain(n, 5) for n in lengths],
                      "a CUDA graph (0.5 µs)": [gain(n, 0.5) for n in lengths]},
            xlabel="a kernel's time (µs)", ylabel="times as fast as one stream", title="Short kernels gain nothing: the host is the limit")

# %% [markdown]
# Up to 5 µs, the GPU has done each kernel before the next order comes: there is nothing to overlap. It takes long kernels, or a graph, and
# kernels that do not fill the chip. On a GPU you can ask the network itself:

# %%
def replays(graph, n=50):
    """Milliseconds of n replays."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(n):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)

# %%
def measured_gain(batch_size):
    network = models.ContinuousIntegrationModel(10, "medium").cuda().eval()
    images, ms = torch.rand(batch_size, 3, 32, 32, device="cuda"), []
    for network.parallel_pathways in (False, True):
        network(images)  # which compiles what is new
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            network(images)
        replays(graph)
        ms.append(replays(graph))
    return ms[0] / ms[1]

# %% tags=["varies"]
if SIMULATED:
    print("No GPU here, so there is nothing to measure.")
else:
    with torch.no_grad():
        for n in (1, 16, 256):
            print(f"batch {n}: two streams are {measured_gain(n):.2f} times as fast as one")

# %% [markdown]
# ### What a race between streams looks like
#
# Forget the wait, and the kernel that adds may begin too early. It reads a map that is being written: what is there already is of this batch, and what
# is not yet is whatever lay in that memory before, most often *the same map of the last batch*. Such a picture is a plausible one, in which nothing is NaN.
# This is drawn by hand, as it would look:

# %%
rng = np.random.default_rng(3)
before, now = (night(rng, kind) @ LUMA for kind in (0, 2))
torn = np.where(np.arange(SIDE)[:, None] < 11, now, before)  # rows that were written in time
plot.images([before, now, torn], ["the last batch", "this batch", "read too early"], vmin=0, vmax=0.7,
            title="A race between streams: rows of two batches in one map",
            alt="A disc; a diamond; and a map whose upper part is of the diamond, its lower one of the disc")

# %% [markdown]
# It comes and goes with the load of the machine. With a profiler attached or a `print` in between, it is gone. And the simulator? It has streams,
# so that programs run unchanged. But it carries out each launch when it is made:

# %%
@cuda.jit
def count_up(x):
    x[cuda.grid(1)] += 1


one, two, x = cuda.stream(), cuda.stream(), cuda.to_device(np.zeros(4, np.float32))
count_up[1, 4, one](x)
one.synchronize()  # on a GPU, without this line: a race
count_up[1, 4, two](x)
print(x.copy_to_host())

# %% [markdown]
# With or without the wait, the simulator gives 2: *no result of the simulator says that streams are used rightly*, and its sanitizer looks inside of launches, not
# between them. What helps is to put the rules into one place, and to test that on a GPU. In the course's network it is the function `both`:
#
# ```python
# beside.wait_stream(here)      # 1. the inputs are written before the other stream reads them
# y.record_stream(beside)       # 2. their memory is not given away before it has read them
# with torch.cuda.stream(beside):
#     there = second(y)
# result = first(x)
# here.wait_stream(beside)      # 3. results are written before anybody reads them
# there.record_stream(here)     # 4. and their memory is not given away while this stream reads
# ```
#
# 1 and 3 are what everybody thinks of. 2 and 4 are forgotten: PyTorch gives memory away again as soon as Python has let go of a tensor, and it takes for granted that only
# the stream that made it still uses it. **Predict** which of the four a test finds that only looks at results.
#
# <details><summary>Answer</summary>
#
# Without 1 or 3 it may find wrong numbers, if it is lucky with the times. Without 2 or 4 it finds nothing, unless somebody asks for memory of that very size at the
# wrong moment. So tests look at what was *ordered*: a profiler's time line shows what overlaps and what waits.
# </details>

# %% [markdown]
# ## 8 · Memory: keep, or compute again
#
# The backward pass needs what the forward pass has computed: each convolution its input, each ReLU its output. Of a deep network with large images, these maps are most of the memory, not the
# weights. **Gradient checkpointing** keeps only what enters each *stage* (some layers together) and computes the inside again when the backward pass comes by. (The word is unlucky: it has nothing to do with
# a checkpoint file.) The price is a second forward pass: of three parts, one forward and two backward, there are four, a third more.
#
# ### Exercise: what is kept
#
# `entering[k]` are the bytes of the map that enters stage $k$, `inside[k]` the bytes that its layers keep beside that. Return two numbers: the bytes that are kept without checkpointing, and the *peak* with it. Walk
# backwards: at stage $k$ all that is inside of it has just been computed again; the stages behind it are done, and have let go of everything; of those before it there is what enters them.
# With no stage at all, both numbers are 0.

# %% exercise="checkpoint_memory"
def checkpoint_memory(entering, inside):
    whole = TODO
    peak = TODO
    return whole, peak


check("checkpoint_memory", checkpoint_memory)

# %%
hint("checkpoint_memory")

# %% [markdown]
# Now a real tower, the colour pathway of the deepest network, stage by stage. PyTorch tells each tensor that it keeps, if one asks:

# %%
def kept_by(stage, x):
    """(what `stage` makes of x, the bytes that it keeps beside x and its weights)."""
    known = {t.untyped_storage().data_ptr() for t in (*stage.parameters(), *stage.buffers(), x)}
    kept = {}

    def seen(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        y = stage(x)
    return y, sum(n for place, n in kept.items() if place not in known)

# %%
network = models.ContinuousIntegrationModel(3, "deep", base_channels=4, layers=torch.nn)
images, entering, inside = torch.rand(16, 3, 64, 64), [], []
x = images
for k, stage in enumerate(network.colour):
    entering.append(x.nbytes)
    y, n = kept_by(stage, x)
    is_last = k == len(network.colour) - 1  # what it makes enters no other stage
    inside.append(n if is_last else n - y.nbytes)
    x = y.detach().requires_grad_()
    print(f"stage {k}: {entering[-1] / 1e6:4.1f} MB enter, {inside[-1] / 1e6:4.1f} MB inside, {tuple(y.shape)}")

# %%
whole, peak = use("checkpoint_memory", checkpoint_memory)(np.array(entering), np.array(inside))
print(f"predicted: {whole / 1e6:.1f} MB kept; with checkpointing at most {peak / 1e6:.1f} MB at a time")

# %% [markdown]
# Is it true? The next class notes each tensor that an operator makes, and when it goes. On a GPU, `torch.cuda.max_memory_allocated()` does this for you. **Predict:** will the measured peak
# lie above or below the predicted one?

# %%
import weakref

from torch.utils._pytree import tree_leaves


def note(storage, alive):
    """Enter a storage (what a tensor lies in) into `alive`; when it goes, it is taken out."""
    if storage._cdata not in alive:
        alive[storage._cdata] = storage.nbytes()
        weakref.finalize(storage, alive.pop, storage._cdata)

# %%
class Alive(TorchDispatchMode):
    """The bytes of each storage that operators have made and that is still there, and their peak."""
    def __init__(self):
        super().__init__()
        self.bytes, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            note(tensor.untyped_storage(), self.bytes)
        self.peak = max(self.peak, sum(self.bytes.values()))
        return result

# %%
def step(way):
    """(bytes between forward and backward, the peak) of a step through the tower."""
    x = images
    with Alive() as alive:
        for stage in network.colour:
            x = way(stage, x)
        between = sum(alive.bytes.values())
        x.sum().backward()
    return between + images.nbytes, alive.peak + images.nbytes

# %%
for name, way in {"all kept": lambda stage, x: stage(x), "checkpointing": recomputed}.items():
    between, most = step(way)
    print(f"{name:14} {between / 1e6:5.1f} MB between forward and backward, peak {most / 1e6:5.1f} MB")

# %% [markdown]
# What is kept agrees to the byte. The peak lies above: while a stage goes backwards, there are *gradients* of its maps as well, and the weights' gradients. A prediction that leaves something out should
# say so. Still, the peak has nearly halved, and most of what is left is the one stage with the most inside. (Cut that stage in two, and
# the peak falls nearly to that of the next largest.)
#
# One trap: batch norm moves its running statistics in each forward pass. Computed again, it would move them *twice*. The course's `recomputed` lets them rest in the second pass; `torch.utils.checkpoint` alone does not.

# %% [markdown]
# ## 9 · Each switch alone, and the fastest together
#
# The network has more switches than these: TF32 or bfloat16 instead of float32 (lesson 10), channels last, a captured CUDA graph (lesson 4),
# `torch.compile`, and our kernels in place of PyTorch's. For the course, each was measured alone and some of them together, for one step of training. **Predict**
# before you look: which switch alone brings most? Which makes the step *slower*? How much do parallel pathways bring, and what is the
# price of checkpointing, which by the count above is a third? Are our kernels or PyTorch's the faster ones?

# %%
training, forward = measured("two_pathways.training"), measured("two_pathways.forward")


def switches(record, what):
    """Each way's time as a bar, the naive program's first; and what could not be measured."""
    if record is None:
        return None
    for label, reason in record["left_out"].items():
        print(f"not measured: {label} ({reason})")
    rows = [row | {"microseconds": row["microseconds"] / 1000} for row in record["rows"].values() if row["kind"] != "two GPUs"]
    n, _, *size = record["shape"]
    return plot.times(rows, xlabel=f"time of {n} images of {size[0]} × {size[1]} (ms)",
                      title=f"{what}: {record['ratio']:.2f} times as fast at best", **record["source"])


switches(training, "Training")

# %%
switches(forward, "Forward")

# %% [markdown]
# A switch alone may bring little, or even cost time, and be a part of the fastest way all the same: half-precision products like channels last, and short kernels
# need a graph. And ours? In training they are ahead, in float32 by far where the step is captured, in bfloat16 by little. In the forward pass in bfloat16 PyTorch,
# with cuDNN's convolutions, is well ahead. That is a loss, and it is drawn like one. Now the switches that you predicted, and two GPUs with a pathway on each:

# %%
def beside(record, one, other):
    """What the second way takes of the first one's time, and of its memory."""
    (t, m), (t2, m2) = ((row["microseconds"], row["peak_bytes"]) for row in map(record["rows"].get, (one, other)))
    return f"{t2 / t:.2f} of the time, {m2 / m:.2f} of the memory ({m / 1e6:,.0f} → {m2 / 1e6:,.0f} MB)"


naive, best = "PyTorch, naive", "bfloat16, channels-last, captured"
pairs = {"PyTorch, in parallel": (naive, "PyTorch, pathways in parallel"),
         "the same, captured": (f"PyTorch, {best}", f"PyTorch, {best}, in parallel"),
         "ours, captured": (f"ours, {best}", f"ours, {best}, in parallel"),
         "checkpointing": (naive, "PyTorch, checkpointing"),
         "PyTorch, two GPUs": (naive, "PyTorch, two GPUs"), "the same in TF32": ("PyTorch, TF32", "PyTorch, TF32, two GPUs"),
         "ours, two GPUs": ("ours", "ours, two GPUs")}

# %%
for name, record in {"training": training, "forward": forward}.items():
    for what, pair in pairs.items() if record else ():
        if record["rows"].keys() >= set(pair):
            print(f"{name:9} {what:21} {beside(record, *pair)}")

# %% [markdown]
# Parallel pathways bring something each time, so eight images leave room on this chip; but a graph has taken a part of the gain already, and with our kernels little is left. Checkpointing saves much of the
# memory that training takes, and costs more time than the third that you counted: the count leaves out the host, which has to order the forward pass twice. In a forward pass without gradients nothing is kept for a backward pass, so that it changes nothing. (What a graph uses while it runs belongs to the graph, and
# is not in these numbers: compare memory only where both or neither are captured. Of two GPUs it is the first one's.)
#
# Two GPUs pay in the forward pass in float32 alone. In TF32 there is less to compute, and the same maps cross over. A step of training by our layers waits for the host
# (captured it takes two thirds of the time), which has to order what crosses as well.

# %% [markdown]
# ## What the profiler says
#
# For `integrate`, the report of Nsight Compute would show what lesson 4 calls the limit: memory at its top speed, a few percent of the arithmetic. What you look at here is another tool, *Nsight Systems*
# (or `torch.profiler`): it draws time lines like the one above, a row for each stream. Three things to look for: rows that take turns instead of overlapping (no room, or late orders); gaps in all rows (the host); and
# a row that waits for an event whose kernel could have been ordered earlier.
#
# ## Where the real libraries go further
#
# - **SlowFast** (Feichtenhofer and others, 2019) has two pathways for films, one with many pictures and few channels, one with few pictures and many channels, joined on every floor. **Two-stream networks** (Simonyan and
#   Zisserman, 2014) look at pictures and at movement.
# - Weights by a softmax of scalars are in **ELMo** (Peters and others, 2018), for the layers of a language model, and in **BiFPN** of EfficientDet (Tan and others, 2020), which drops the exponential for speed.
# - **TensorRT** and `torch.compile` (with freezing) fold all constants of a network, not only those that somebody has thought of.
# - PyTorch can choose by itself what to compute again (`torch.utils.checkpoint` with a *policy* for each operator): cheap layers such as ReLU always, products never.
# - A **CUDA graph** that captures two streams knows the events as edges, and needs no host to keep both busy.
#
# ## Three questions
#
# <details><summary>1. A network's weights for colour and brightness are 0.02 and 0.98. A colleague removes the colour pathway, and accuracy falls by a third. How can that be?</summary>
#
# A weight is a factor. If the colour pathway's numbers are fifty times as large as the others, both have the same say. Only shutting a pathway, or a test of that kind, tells what it is worth.
# </details>
#
# <details><summary>2. Two streams, and the network is not faster at all. Which three measurements do you make?</summary>
#
# The time of a kernel against that of an order (is the host the limit? then a CUDA graph). How many blocks a kernel has, and how many fit onto the chip (is there room?). And a time line: does an event, or a call that synchronises, such as `.item()`, make
# one stream wait for the other?
# </details>
#
# <details><summary>3. Checkpointing with stages of one layer each keeps everything that enters each layer. With one stage for the whole network it keeps the image alone. Which is better?</summary>
#
# Neither. In the first case what enters adds up to nearly everything. In the second the inside of the only stage is everything, when it is computed again. With n equal layers and stages of s layers there are n / s maps that enter and
# s inside: the sum is smallest at s = √n, where it is 2 √n instead of n.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# `python -m course_lib train images --model continuous_integration` trains the whole network on pictures of your own, and draws how its weights learn. Look at the curves of the floors: which of them trusts which pathway? And shut one before you believe it.
#
# The layers so far look at neighbours, or at one row at a time. [Lesson 18: attention](18_attention.ipynb) is about one in which everything may look at
# everything else.
