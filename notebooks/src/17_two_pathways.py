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
# **Time:** 100 minutes; there are good places to pause after sections 3 and 5. All cells together
# run in about a minute without a GPU. Nothing of this lesson was measured on a GPU for the course
# yet; where a speed matters, you predict it, and on a GPU you can measure it yourself. The words are
# collected in the [glossary](glossary.md).

# %%
import math

import matplotlib.cbook
import matplotlib.image
import numpy as np
import torch

from course_lib import SIMULATED, cuda, models, plot, simulator
from course_lib.runtime.intrinsics import block_sum
from course_lib.runtime.launch import launch
from course_lib.runtime.launch import recorded as launches_of
from course_lib.teach import TODO, check, hint, progress, use

ZERO, ONE = np.float32(0), np.float32(1)

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
# time: the second and third time it still is in the cache, so memory sends it once, and it only costs requests.
# Pictures with a fourth number are a quarter slower in any case.

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
# (A scalar may be −∞: that pathway is shut.)

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

# %%
progress()
