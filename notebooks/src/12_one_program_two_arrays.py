# %% [markdown]
# # 12 · One program, two kinds of array
#
# **After this lesson** you can write a program whose arrays are NumPy's on a CPU and a GPU's on a
# GPU, from the same lines; find the place where float64 creeps in; write your own automatic
# differentiation, and prove it right; put a kernel of yours on its tape; and predict when a copy
# to the GPU costs nothing.
#
# **You need** [lesson 4](04_softmax_at_the_limit.ipynb), sections 7 and 8 (softmax backwards,
# vector-Jacobian products), and [lesson 11](11_fashion_mnist.ipynb) (a training step by hand).
#
# **Time:** 110 minutes; there are good places to pause after sections 2 and 4. All cells together
# run in less than half a minute without a GPU. On a GPU the copies of section 5 are measured on
# your own machine; without one you see what data sheets promise, and the lesson says so. The words
# are collected in the [glossary](glossary.md).

# %%
import inspect
import math

import numpy as np
import torch

from course_lib import SIMULATED, bench, plot, results_table
from course_lib import autograd as ag
from course_lib.autograd import Function, Tensor, tensor
from course_lib.backend import get_array_module, is_cuda_available, set_backend
from course_lib.runtime.host.launch import launch
from course_lib.runtime.host.launch import recorded as launches_of
from course_lib.teach import TODO, check, hint, progress, solution, use

# %% [markdown]
# ## 1 · Two kinds of array
#
# A program that trains a network on a CPU with NumPy is easy to write and to debug. The same
# network on a GPU is many times faster. Many people therefore keep two programs, and soon the two
# compute different things: somebody fixes a bug in one of them only. We want *one* program.
#
# Here is a formula, the spread of some numbers, in NumPy's words:

# %%
def spread(x, xp):
    return xp.sqrt(xp.mean((x - xp.mean(x)) ** 2))


numbers = np.random.default_rng(0).normal(size=6).astype(np.float32)
print("NumPy's:  ", spread(numbers, np))
print("PyTorch's:", spread(torch.from_numpy(numbers), torch))

# %% [markdown]
# The function gets the library as an argument, `xp`, and the formula works for both. (`xp` is what
# such an argument is usually called: it may be `np`, and it may be another one.) On a GPU,
# PyTorch's arrays or CuPy's lie in the GPU's memory. Without one, PyTorch's arrays on the CPU stand
# in for them in this section.
#
# So is it enough to exchange the library? **Predict:** which of these six functions does NumPy
# have, which does PyTorch?

# %%
xp = get_array_module(torch.ones(1))
print(f"{'':17} NumPy   PyTorch   xp")
for name in ("concat", "expand_dims", "permute_dims", "matrix_transpose", "astype", "isdtype"):
    there = ["yes" if hasattr(library, name) else "-" for library in (np, torch, xp)]
    print(f"{name:17} {there[0]:7} {there[1]:9} {there[2]}")

# %% [markdown]
# Two libraries, two vocabularies. The third column is a **namespace** of the **array API
# standard** (2021), a list of some two hundred functions with their names, arguments and meaning.
# `get_array_module(x)` finds the namespace for the library that `x` is of. It comes from a package,
# `array-api-compat`, that renames what a library calls otherwise. What is written with `xp` alone
# runs on NumPy, PyTorch and CuPy.
#
# Names are the least of it. Four things differ:
#
# | | NumPy's arrays | a GPU's arrays |
# |---|---|---|
# | **namespace** | `np` | `torch`, `cupy`; the standard's names for all |
# | **device** | the host's memory | the GPU's memory: both operands must lie there |
# | **dtype** | float64 unless told otherwise | float32 unless told otherwise |
# | **the answer is there** | when the function returns | later: the function only gives the order |
#
# The last line is lesson 1's *asynchronous*: the host gives orders and goes on. **Predict:** in
# this loop, in which line does the host wait for the GPU?
#
# ```python
# for x, target in batches:
#     y = forward(x)
#     loss = xp.mean((y - target) ** 2)
#     backward(loss)
#     print(float(loss))
# ```
#
# <details><summary>Answer</summary>
#
# In `float(loss)`, and nowhere else: a Python number must be there before it can be printed. The
# host then stands still until all that was ordered before has been done, and while the host stands
# still, it gives no orders.
# </details>

# %%
def orders(who, waits):
    """Spans of two steps: each is ordered in 3 units of time and computed in 10."""
    host, gpu, second = f"host, {who}", f"GPU, {who}", 13 if waits else 3
    first = [(host, 0, 3, "orders 1"), (gpu, 3, 13, "step 1")]
    waiting = [(host, 3, 13, "waits in float(loss)")] * waits
    begin = max(13, second + 3)
    last = [(gpu, begin, begin + 10, "step 2"), (host, second, second + 3, "orders 2")]
    return first + waiting + (last if waits else last[::-1])


plot.timeline(orders("nobody asks", False) + orders("loss asked for", True), unit="units of time",
              title="A drawing, nothing measured: asking for a number leaves a gap")

# %% [markdown]
# A program that asks for the loss in every step has such a gap in every step. Keep losses as
# arrays, and ask for all of them once, at the end.
#
# ### Who chooses
#
# A program needs one place in which it says what it computes with: the **backend**. Its users
# write `use_cuda: true`, `false` or `null` into a file of settings. In one program of this kind,
# `true` on a machine without a working GPU meant: print a line, and take the CPU. What takes an hour
# on the GPU then takes two days, and that line stands somewhere above 10,000 others. This is a
# **silent fallback**.
#
# ### Exercise: a choice that is never silent
#
# `missing()` returns `None` where a GPU can be used, and otherwise a sentence: what is missing.
# `start_gpu()` and `start_cpu()` return a backend.
#
# - `use_cuda` is `True`: the GPU. Where there is none, an error whose message has that sentence.
# - `False`: the CPU. The GPU must not be touched, not even asked for: that takes a second, and some
#   of its memory.
# - `None`: the GPU if there is one, else the CPU.
# - Anything else is an error that says what it may be. (From a file comes the text `"false"` easily,
#   or a 0.)
#
# A GPU that is there and does not start is an error in every case: do not hide it.

# %% exercise="choose_backend"
def choose_backend(use_cuda, missing, start_gpu, start_cpu):
    if TODO:  # is it none of the three?
        raise ValueError(f"use_cuda must be True, False or None, not {use_cuda!r}")
    TODO  # what to return, or to raise, for each of them


check("choose_backend", choose_backend)

# %%
hint("choose_backend")

# %% [markdown]
# The course's own is `set_backend` in `course_lib/backend.py`. Here yours chooses between its
# backends. (`library="numpy"` is NumPy without any kernel; `"simulator"`, which we need later, is
# NumPy with the course's kernels in the simulator.)

# %%
choose = use("choose_backend", choose_backend)
backend = choose(None, lambda: None if is_cuda_available() else "no GPU can be used here",
                 lambda: set_backend(True), lambda: set_backend(False, library="numpy"))
print("Device:", backend.description)
try:
    print("Device:", set_backend(True).description)
except RuntimeError as error:
    print("set_backend(True):", error)

# %% [markdown]
# What a backend has: `backend.xp`, the namespace; `backend.to_device(a)` and `backend.to_cpu(a)`,
# **the only two places where data moves**; and `backend.synchronize()`, which waits. Everything
# else that would move an array is an error:

# %%
backend = set_backend(False, library="numpy")
try:
    tensor(torch.ones(3))
except TypeError as error:
    print("TypeError:", error)

# %% [markdown]
# ## 2 · How float64 creeps in
#
# You know from lesson 1 why kernels avoid float64. Outside of kernels nobody compiles your line
# and complains. **Predict:** which of these ten results are float64?

# %%
x = np.ones(3, dtype=np.float32)
whole, bytes_ = np.arange(3), np.arange(3, dtype=np.uint8)
ten = ("x * 2.0", "x * np.float64(2)", "x / math.sqrt(784)", "x / np.sqrt(784)", "x * whole",
       "x + (whole > 1)", "bytes_ / 255", "x.mean()", "whole.mean()", "x + np.zeros(3)")

# %% [markdown]
# (Write down your ten answers first.)

# %%
for text in ten:
    print(f"{text:20} {eval(text).dtype}")

# %% [markdown]
# <details><summary>Why?</summary>
#
# Two dtypes meet, and the result gets one that holds both: that is **promotion**.
#
# - A number of *Python* has no dtype, so it takes the array's: `x * 2.0` and
#   `x / math.sqrt(784)` stay float32. A number of *NumPy* has one: `np.sqrt(784)` is a float64.
# - float32 has 24 binary digits, an int64 has 63. NumPy takes float64 to lose fewer of them. (A
#   bool fits into anything.)
# - Whole numbers have no float dtype of their own, so a quotient or a mean of them is float64.
# - `np.zeros`, `np.ones`, `np.eye`, `np.linspace` and every random generator make float64, unless
#   told otherwise.
# </details>
#
# None of these lines says a word. And from the first float64 on, *everything* that is computed
# with it is float64: the dtype spreads like ink. The other kind of array has other rules:

# %%
t, t_whole, t_bytes = map(torch.from_numpy, (x, whole, bytes_))
print("float32 · int64:  NumPy", (x * whole).dtype, " PyTorch", (t * t_whole).dtype)
print("uint8 / 255:      NumPy", (bytes_ / 255).dtype, " PyTorch", (t_bytes / 255).dtype)

# %% [markdown]
# So a program that is float32 on the GPU may well be float64 on the CPU, and nobody notices,
# since the numbers agree.
#
# ### What it costs
#
# Twice the bytes, always. And the arithmetic? Here are the float32 and float64 rates of three
# chips, from NVIDIA's data sheets (without tensor cores). **Predict** for each how much longer a
# product of two 4,096 × 4,096 matrices takes. It has 2 · 4096³ FLOPs.

# %%
chips = {"H100": (67, 34), "T4 (Colab)": (8.1, 0.25), "RTX 4090": (82.6, 1.29)}  # TFLOP/s
for chip, rates in chips.items():
    ms = [2 * 4096**3 / (tflops * 1e12) * 1e3 for tflops in rates]
    print(f"{chip:11} float32 {ms[0]:5.1f} ms, float64 {ms[1]:5.1f} ms")
plot.times([{"label": chip, "microseconds": single / double}
            for chip, (single, double) in chips.items()],
           xlabel="time with float64 ÷ time with float32",
           title="What float64 costs (a model: the rates of data sheets)")

# %% [markdown]
# A chip for data centres has half as many units for float64 as for float32. Chips for games and
# Colab's T4 have hardly any: 1 to 32, 1 to 64. There, a single forgotten `dtype` can make a program
# thirty times slower.
#
# ### Exercise: find the leaks
#
# A small part of a program: bytes become numbers, numbers become scores, and the error is weighted
# by each class's share of the batch. `images` is (N, pixels), bytes; `labels` (N,), integers;
# `weight` (pixels, classes), float32. What comes out is float64:

# %%
def leaking(images, labels, weight):
    n_pixels, n_classes = weight.shape
    x = images / 255
    is_class = labels[:, None] == np.arange(n_classes)
    share = is_class.mean(axis=0)
    scale = 1 / np.sqrt(n_pixels)
    target = np.eye(n_classes)[labels]
    error = (x @ weight * scale - target) * share
    return {name: getattr(value, "dtype", type(value)) for name, value in locals().items()}

# %%
random = np.random.default_rng(1)
images, labels = random.integers(0, 256, (8, 16)).astype(np.uint8), random.integers(0, 3, 8)
for name, dtype in leaking(images, labels, np.ones((16, 3), np.float32)).items():
    print(f"{name:10} {dtype}")

# %% [markdown]
# Change it so that **no array is ever float64**, not even on the way: casting the result at the end
# would hide the cost and not save it. The check watches every array that your lines make.

# %% exercise="weighted_error"
def weighted_error(images, labels, weight):
    TODO  # fix what makes float64 below, then take this line away
    n_pixels, n_classes = weight.shape
    x = images / 255
    is_class = labels[:, None] == np.arange(n_classes)
    share = is_class.mean(axis=0)
    scale = 1 / np.sqrt(n_pixels)
    target = np.eye(n_classes)[labels]
    return (x @ weight * scale - target) * share


check("weighted_error", weighted_error)

# %%
hint("weighted_error")

# %% [markdown]
# The rule of this course's library: **every array is made with a dtype that is named**, and numbers
# that meet arrays are Python's.
#
# A good place for a break.

# %% [markdown]
# ## 3 · Your own automatic differentiation
#
# In lesson 11 you wrote a backward pass by hand: nine lines, for one network. Another layer, and
# you write them again, and whoever forgets one gets a wrong gradient and no message. PyTorch finds
# gradients by itself. Its machine is small enough to build one.
#
# The idea: a program is made of few *kinds* of function: products, sums, softmax. Each kind knows
# its own derivative. When the program runs, each call leaves a note in its result: *who made me,
# and from what*. These notes are the **tape**. To find gradients, one walks along it backwards.
#
# ### A function knows its own derivative
#
# `Function`, from the course's library, is a pair: `forward` gets arrays and returns one, and keeps
# in `self` what its derivative will need; `backward` gets `dy`, the gradient of its result, and
# returns the gradient of each input.

# %%
class Multiply(Function):
    def forward(self, a, b):
        self.inputs = a, b
        return a * b

    def backward(self, dy):
        a, b = self.inputs
        return dy * b, dy * a

# %% [markdown]
# And this is how it is called, the whole of it:

# %%
print(inspect.getsource(Function.__call__))

# %% [markdown]
# Line by line: arrays come wrapped, as a `Tensor`, whose `data` is the array. The function makes a
# copy of itself, so that each call has a place of its own to keep things in. `forward` computes.
# And if any input needs a gradient, the result gets its note, `made_by` and `made_from`. A tensor
# that no function has made, such as a weight, is a **leaf**. (Within `with no_grad():` nothing is
# written: `_recording` is false.)

# %%
def number(value):
    return Tensor(np.asarray(value, dtype=np.float32), requires_grad=True)


x = number(3.0)
y = Multiply()(x, x)
print("y =", y.data, " made by", type(y.made_by).__name__, " from x twice:", y.made_from == [x, x])
print("asked with dy = 1:", y.made_by.backward(np.float32(1)))

# %% [markdown]
# Two answers, one for each input. Both inputs are `x`, so the gradient of `x` is their sum, 6. And
# $(x^2)' = 2x = 6$ at 3.
#
# ### Exercise: the derivative of a matrix product
#
# $y = a\,b$, with `a` of shape (n, k), `b` (k, m) and `y` (n, m). Given `dy`, return `da` and `db`.
# **Predict** their shapes first: there is only one product of `dy` and one of the two others that
# has the right one. The same line must do for any library's arrays; the check tries another one.

# %% exercise="matmul_backward"
def matmul_backward(dy, a, b):
    return TODO, TODO  # da, db


check("matmul_backward", matmul_backward)

# %%
hint("matmul_backward")

# %% [markdown]
# ### Never trust a derivative
#
# The check of all checks: change an input a little, by $h$, to both sides, and see how the result
# changes. $\frac{f(x + h) - f(x - h)}{2 h}$ is a **finite difference**. You have met it in lesson
# 4, with $h = 10^{-6}$ and no word on why. **Predict:** what is the best $h$ in float64, and in
# float32? The smaller, the better?

# %%
steps = 10.0 ** -np.arange(0.5, 13.1, 0.5)
points = np.linspace(0.5, 2, 50)


def mean_error(dtype, h):
    x, h = points.astype(dtype), dtype(h)
    slope = (np.exp(x + h) - np.exp(x - h)) / (2 * h)  # of e^x, whose slope is e^x
    return np.mean(np.abs(slope - np.exp(points)) / np.exp(points))


errors = {dtype.__name__: [mean_error(dtype, h) for h in steps] for dtype in (np.float32, np.float64)}
plot.curves(steps, errors, log=True, xlabel="step h", ylabel="relative error (mean of 50 points)",
            title="Too large, and the curve bends away; too small, and digits are lost")

# %% [markdown]
# <details><summary>Why a V?</summary>
#
# On the right, the **truncation error**: the curve bends between $x - h$ and $x + h$, and the
# error grows with $h^2$, two decades for each one of $h$. On the left, **rounding**: the two values
# of $f$ are nearly equal, and what is left when one subtracts them is mostly their rounding error
# $\varepsilon$, which is then divided by a tiny $h$: the error grows with $\varepsilon / h$. (In
# float32 below $10^{-7}$, $x + h$ is $x$ itself. The difference is 0, and the error 100 %.) Both
# are equally large where $h \approx \sqrt[3]{\varepsilon}$: about $5 \cdot 10^{-6}$ in float64 and
# $5 \cdot 10^{-3}$ in float32.
# </details>

# %%
def numeric(f, x, h):
    """d f(x) / d x, where f returns one number, by finite differences in each element of x."""
    found = np.zeros(x.shape)
    for place in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[place] = h
        found[place] = (float(f(x + step)) - float(f(x - step))) / (2 * h)
    return found

# %%
random = np.random.default_rng(2)
a, b, dy = (random.normal(size=shape) for shape in ((2, 3), (3, 4), (2, 4)))
da, db = use("matmul_backward", matmul_backward)(dy, a, b)
brute_a = numeric(lambda a: (dy * (a @ b)).sum(), a, 5e-6)
brute_b = numeric(lambda b: (dy * (a @ b)).sum(), b, 5e-6)
print(f"da off by {abs(da - brute_a).max():.0e}, db by {abs(db - brute_b).max():.0e}")

# %% [markdown]
# ### The way back
#
# Now the walk. A first try follows every path from the end to the beginning, and adds up what
# arrives at each tensor. That is the chain rule, word by word:

# %%
class Add(Function):
    def forward(self, a, b):
        return a + b

    def backward(self, dy):
        return dy, dy

# %%
asked = []


def along_every_path(x, dy):
    x.grad = dy if x.grad is None else x.grad + dy
    if x.made_by is not None:
        asked.append(x)
        for y, dx in zip(x.made_from, x.made_by.backward(dy)):
            along_every_path(y, dx)


x = number(3.0)
along_every_path(Multiply()(Multiply()(x, x), x), np.float32(1))
print("d(x³)/dx at 3:", x.grad, " functions asked:", len(asked))

# %% [markdown]
# Right, 27. Next, $x + x$, doubled again, and again: $y \leftarrow y + y$, ten times. That is a tape
# of ten functions. **Predict** how many are asked for their gradients.

# %%
counts = []
for n in range(1, 11):
    y = x = number(1.0)
    for _ in range(n):
        y = Add()(y, y)
    asked.clear()
    along_every_path(y, np.float32(1))
    counts.append(len(asked))
plot.curves(range(1, 11), {"asked, along every path": counts, "functions on the tape": range(1, 11)},
            xlabel="n: how often y ← y + y", ylabel="functions asked",
            title=f"{counts[-1]:,} questions to ten functions")

# %% [markdown]
# From `y` there are two paths to the tensor before it, from there two again: $2^{10}$ paths. A
# network in which each layer's input goes around the layer as well (a *residual* network, most of
# today's) has such a fork at every layer, so with 50 layers there would be $10^{15}$ questions.
#
# So ask each function only once! The second try remembers whom it has asked. Its test is
# $z = y \cdot x + y$ with $y = x^2$. At $x = 3$ the derivative is $3 x^2 + 2 x = 33$.

# %%
def each_once(x, dy, seen):
    x.grad = dy if x.grad is None else x.grad + dy
    if x.made_by is not None and x not in seen:
        seen.add(x)
        for y, dx in zip(x.made_from, x.made_by.backward(dy)):
            each_once(y, dx, seen)


def diamond(x):
    y = Multiply()(x, x)
    return Add()(Multiply()(y, x), y)


x = number(3.0)
each_once(diamond(x), np.float32(1), set())
print("d(x³ + x²)/dx at 3:", x.grad)

# %% [markdown]
# Wrong, and without a word. **Predict** what is missing, from the picture:

# %%
drawn = [("x", "", ()), ("y", "x · x", ("x", "x")), ("u", "y · x", ("y", "x")),
         ("z", "u + y", ("u", "y"))]
plot.tape(drawn, title="The tape of z = y · x + y. From y, two ways lead to z")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The walk comes from `z` to `u`, and from there to `y`, with a gradient of 3. `y`'s function is
# asked with 3, and passes 18 on to `x`. Then the walk comes to `y` a second time, from `z`, with a
# gradient of 1. But `y` has been asked. Its 1, and the $1 \cdot 2x = 6$ that would have come of it,
# are lost: 27 instead of 33.
# </details>
#
# Two ways that part and meet again are called a **diamond**. The first walk is right in a diamond
# and takes for ever in a chain of them; the second is quick and wrong. The cure is the *order*:
# **ask a function only when everything that was made from its result has been asked.** Then all
# parts of its `dy` have arrived, and once is enough. An order with every result before its inputs
# is a **topological order**.
#
# ### Exercise: from the end to the beginning
#
# Return the list of all tensors that `last` was made from, itself included: results before inputs,
# each tensor once, and none whose `requires_grad` is false. (A leaf's `made_from` is empty. For
# such tapes as here, a function that calls itself is all right.)

# %% exercise="from_end_to_beginning"
def from_end_to_beginning(last):
    order, seen = [], set()

    def visit(x):
        TODO  # when may x be appended to order?

    visit(last)
    return TODO


check("from_end_to_beginning", from_end_to_beginning)

# %%
hint("from_end_to_beginning")

# %% [markdown]
# ### Exercise: the walk
#
# `order` is such a list, and `dy` the gradient of its first tensor. Return a dict from `id(x)` (a
# number that names the object) to the gradient of x, for every tensor in `order`. Each function is
# asked once. `result.made_by.backward(dy)` returns a tuple, or the gradient alone where there is one
# input; for inputs that need none there may be `None` in it. **Predict:** `Add` hands the same array
# to both of its inputs. What happens to the one if you write `+=` for the other?

# %% exercise="walk_back"
def walk_back(order, dy):
    found = {id(order[0]): dy}
    for result in order:
        if result.made_by is not None:
            gradients = TODO  # ask the function, once
            gradients = gradients if isinstance(gradients, tuple) else (gradients,)
            for x, dx in zip(result.made_from, gradients, strict=True):
                TODO  # add dx to what was found for x so far
    return found


check("walk_back", walk_back)

# %%
hint("walk_back")

# %% [markdown]
# <details><summary>And <code>+=</code>?</summary>
#
# It changes the array in place, and that array is the other input's gradient, too. So the other input
# gets what was meant for the one. `a + b` makes a new array.
# </details>
#
# Your walk, on the diamond. The numbers in circles are the order in which your function asks:

# %%
ordered, walk = use("from_end_to_beginning", from_end_to_beginning), use("walk_back", walk_back)
x = number(3.0)
order = ordered(diamond(x))
found = walk(order, np.float32(1))
names = dict(zip(map(id, order), ("z", "u", "y", "x")))
plot.tape(drawn, order=[names[id(each)] for each in order],
          gradients={names[key]: f"gradient {value:g}" for key, value in found.items()},
          title=f"Each is asked once, and d(x³ + x²)/dx at 3 is {found[id(x)]:g}")

# %% [markdown]
# It is called **reverse-mode** differentiation, since it goes from the result to the inputs
# (Linnainmaa, 1970). One walk finds the gradient with respect to *every* input, a million weights
# too. **Predict:** how many runs of the program would finite differences need for a million?
#
# <details><summary>Answer</summary>
#
# Two million. The walk costs about as much as two runs of the program: for each product forwards
# there are two backwards.
# </details>
#
# Your two functions make an automatic differentiation. The gradient of a leaf is *added* to what is
# there, as in PyTorch: someone may walk back from several losses.

# %%
def back(loss):
    """Add d loss/d x to x.grad, for every leaf x that requires a gradient."""
    order = ordered(loss)
    found = walk(order, get_array_module(loss.data).ones_like(loss.data))
    for x in order:
        if x.made_by is None:
            x.grad = found[id(x)] if x.grad is None else x.grad + found[id(x)]

# %% [markdown]
# (One thing is left. `visit` calls itself, once for each function on the way. **Predict** what
# becomes of a tape of 2,000 functions:)

# %%
y = number(1.0)
for _ in range(2000):
    y = Multiply()(y, y)
try:
    print(len(ordered(y)), "tensors in order")
except RecursionError:
    print("RecursionError: Python lets functions call themselves some 1,000 times")

# %% [markdown]
# (A function that keeps a list of whom to visit, in place of calling itself, has no such limit. The
# library's does. Compare it with yours when you read `course_lib/autograd/tape.py`; it has some 200
# lines, and you know nearly all of them now.)
#
# ### What was broadcast
#
# A bias of 3 numbers is added to 4 rows of 3. NumPy repeats it for each row: it **broadcasts**.
# **Predict** the shape of its gradient, and then what `Add` says:

# %%
scores, bias = (Tensor(np.ones(shape, np.float32), True) for shape in ((4, 3), (3,)))
try:
    Add()(scores, bias).backward(np.ones((4, 3), np.float32))
except ValueError as error:
    print("ValueError:", error)

# %% [markdown]
# (`Tensor.backward` is the library's walk, and it looks at shapes.) Each number of the bias was used
# in four places and got a gradient in each. What was *repeated* forwards must be *summed* backwards:
# a broadcast and a sum are each other's derivative.
#
# ### Exercise: summed to a shape
#
# `dy` has the shape of the result. Return the gradient of an input of shape `shape` that was
# broadcast to it. NumPy's rule: shapes are laid side by side from the *last* axis; where one has no
# axis, or one of length 1, its numbers are repeated. The shape `()` is a single number. Take
# `get_array_module(dy).sum`, for arrays of any library.

# %% exercise="summed_to"
def summed_to(dy, shape):
    new = len(dy.shape) - len(shape)  # axes that the input did not have
    axes = list(range(new))
    for i, n in enumerate(shape):
        TODO  # which axes were repeated as well?
    return TODO


check("summed_to", summed_to)

# %%
hint("summed_to")

# %%
to_shape = use("summed_to", summed_to)


class AddRows(Add):
    def forward(self, a, b):
        self.shapes = a.shape, b.shape
        return a + b

    def backward(self, dy):
        return tuple(to_shape(dy, shape) for shape in self.shapes)

# %% [markdown]
# The proof: two layers, with your product, your sum and your walk, and the library's ReLU between
# them. In float64, so that a mistake cannot hide behind rounding:

# %%
class Matmul(Function):
    def forward(self, a, b):
        self.inputs = a, b
        return a @ b

    def backward(self, dy):
        return use_matmul(dy, *self.inputs)


use_matmul, random = use("matmul_backward", matmul_backward), np.random.default_rng(3)
x, W, b, V = (random.normal(size=shape) for shape in ((5, 2), (2, 4), (4,), (4, 3)))

# %%
def two_layers(W, b, V):
    h = ag.relu(AddRows()(Matmul()(Tensor(x), W), b))
    return (Matmul()(h, V) ** 2).sum()


def with_only(i):
    """The loss as a function of the i-th leaf's array alone."""
    kept = [Tensor(array) for array in (W, b, V)]
    return lambda array: two_layers(*kept[:i], Tensor(array), *kept[i + 1 :]).item()

# %%
leaves = [Tensor(array, requires_grad=True) for array in (W, b, V)]
back(two_layers(*leaves))
for i, name in enumerate(("W", "b", "V")):
    brute = numeric(with_only(i), leaves[i].data, 5e-6)
    print(f"{name}: relative error {abs(leaves[i].grad - brute).max() / abs(brute).max():.0e}")

# %% [markdown]
# You have written the heart of PyTorch's autograd. The library's `Tensor` also has operators, so
# that `x @ W + b` is what you have just written with `Matmul` and `AddRows`.

# %% [markdown]
# ## 4 · A kernel on the tape
#
# Nothing on the tape asks how `forward` computes. So it may launch a kernel. We take two that you
# know: softmax with a warp for each row (lesson 3), and its gradient (lesson 4). `use` takes yours, if
# they have passed their checks, in whichever lesson that was, else the course's.

# %%
softmax_kernel = use("softmax_warp", None)
softmax_backward_kernel = use("softmax_backward", None)


def launch_forward(x):
    y = get_array_module(x).empty_like(x)
    launch(softmax_kernel, math.ceil(len(x) / 4), 128, x, y)  # four warps in a block
    return y


def launch_backward(dy, y):
    dx = get_array_module(y).empty_like(y)
    launch(softmax_backward_kernel, math.ceil(len(y) / 4), 128, dy, y, dx)
    return dx

# %% [markdown]
# The launchers take whatever `x` is: `empty_like` makes the result in the same library, on the same
# device, with the same dtype. `launch` starts a kernel on a GPU's arrays, or in the simulator on
# NumPy's.
#
# ### Exercise: on the tape
#
# Return a `Function` whose `forward` and `backward` call two such launchers. (`launch_backward`
# wants `y`, the result, and not `x`.) **Predict:** a network calls softmax twice, and then walks
# back. Why would a variable outside of `self` be a bad place for `y`?

# %% exercise="on_the_tape"
def on_the_tape(launch_forward, launch_backward):
    class Own(Function):
        def forward(self, x):
            return TODO

        def backward(self, dy):
            return TODO

    return TODO


check("on_the_tape", on_the_tape)

# %%
hint("on_the_tape")

# %% [markdown]
# <details><summary>Why in <code>self</code>?</summary>
#
# A variable outside holds the `y` of the last call only. On the way back the *last* call comes first,
# and finds its own; the first call finds the last one's `y`. `self` is safe, because `Function.__call__`
# has made a copy of the function for each call.
# </details>
#
# Against finite differences once more. **Predict:** the kernel computes in float32. Which $h$ do you
# take, and how good can the agreement be? And how many launches will the next cell make for 3 rows of
# 5 numbers?

# %%
softmax = use("on_the_tape", on_the_tape)(launch_forward, launch_backward)
random = np.random.default_rng(4)
x, weights = random.normal(size=(2, 3, 5)).astype(np.float32)
place = set_backend(None if is_cuda_available() else False)


def weighted(x):
    return softmax(Tensor(place.to_device(np.float32(x)), True)) * place.to_device(weights)


leaf = Tensor(place.to_device(x), requires_grad=True)
with launches_of() as made:
    back((softmax(leaf) * place.to_device(weights)).sum())
    brute = numeric(lambda x: weighted(x).sum().item(), x, np.float32(5e-3))

# %%
print(f"largest gradient {abs(brute).max():.2f}, "
      f"off by {abs(place.to_cpu(leaf.grad) - brute).max():.0e}; {len(made)} launches")

# %% [markdown]
# <details><summary>Answer</summary>
#
# $h = 5 \cdot 10^{-3}$ from the V, and an agreement of four to five digits: the V's lowest point in
# float32. With $h = 10^{-6}$ it would look like a bug. The launches: one forwards, one backwards,
# and two for each of 15 numbers: 32.
# </details>
#
# A good place for a break.

# %% [markdown]
# ## 5 · Over the bridge
#
# The pictures lie in the host's memory, the kernels read the GPU's. Between the two is **PCIe**, the
# computer's plug for cards, and it is a narrow bridge. A batch of 32 colour pictures of 224 × 224
# float32 numbers has 19 MB. **Predict** how much longer it takes over PCIe 4, with 25 GB/s in
# practice, than within the memory of an H200, which moves 4,200 GB/s.

# %%
n_bytes = 32 * 3 * 224 * 224 * 4
ways = {"PCIe 3 × 16 (T4), pageable": 6, "PCIe 3 × 16 (T4), pinned": 12, "PCIe 4 × 16, pinned": 25,
        "PCIe 5 × 16 (H100), pinned": 55, "T4's own memory": 320, "H200's own memory": 4200}
plot.times([{"label": f"{way}: {gbps:,} GB/s", "microseconds": n_bytes / gbps / 1e6}
            for way, gbps in ways.items()], xlabel="time (ms)",
           title="A batch of 19 MB on its way (a model: usual rates)")

# %% [markdown]
# A factor of 168. So two rules: *move little* (bytes rather than float32: a fourth), and *move
# while computing*. A GPU has engines of its own for copies, so one batch can be copied while a
# kernel computes with the one before. That takes three things:
#
# 1. **Two streams.** A **stream** is a queue of orders that are carried out one after the other.
#    Copies in the same stream as kernels wait for them. Copies in a second stream do not.
# 2. **Pinned memory.** The operating system may move pages of the host's memory about, or put them
#    on the disk. A copy engine cannot know this. So a copy from ordinary, **pageable** memory goes
#    through a small buffer of the driver, piece by piece, and the host helps and waits. *Pinned*
#    pages stay where they are.
# 3. **An event**, which says that the batch has arrived. The kernels' stream waits for it.
#
# ### Exercise: predict the gain
#
# `n_batches` batches (one at least) of `n_bytes` each go over at `gbps` GB/s; the GPU computes
# `compute_ms` with each. Return two times in ms: copying and computing one after the other; and
# overlapped, where the next batch comes over during each computation. (Draw it, for three batches.)

# %% exercise="predict_transfers"
def predict_transfers(n_batches, n_bytes, gbps, compute_ms):
    copy_ms = TODO
    one_by_one = TODO
    overlapped = TODO
    return one_by_one, overlapped


check("predict_transfers", predict_transfers)

# %%
hint("predict_transfers")

# %% [markdown]
# **Predict**, before you run the cell: at 25 GB/s, is the 19 MB batch hidden behind a computation of
# 2 ms? And of 0.4 ms? What do 100 batches gain?

# %%
predict = use("predict_transfers", predict_transfers)
for compute_ms in (2.0, 0.4):
    apart, together = predict(100, n_bytes, 25, compute_ms)
    print(f"copy {n_bytes / 25e6:.2f} ms, compute {compute_ms} ms: "
          f"{apart:.0f} ms one by one, {together:.0f} ms overlapped, {apart / together:.2f} times as fast")

# %%
def schedule(n, copy, compute, streams):
    """Who does what when, in ms."""
    spans, there, done = [], 0.0, 0.0
    for i in range(n):
        begin = there if streams == 2 else max(there, done)
        there = begin + copy
        begin_of_step = max(there, done)
        spans.append((f"copies, {streams} stream{'s' * (streams - 1)}", begin, there, f"{i + 1}"))
        done = begin_of_step + compute
        spans.append((f"kernels, {streams} stream{'s' * (streams - 1)}", begin_of_step, done, f"{i + 1}"))
    return spans

# %%
copy_ms = n_bytes / 25e6
plot.timeline([span for streams in (1, 2) for span in schedule(4, copy_ms, 1.0, streams)], unit="ms",
              title="A model: with two streams only the first copy is seen")

# %% [markdown]
# A copy of 0.77 ms is hidden behind 2 ms, all but the first one. Behind 0.4 ms it is not: now the
# *computing* is hidden, and the bridge is what one waits for.
#
# At best, overlapping makes it twice as fast, when both take equally long. Where computing takes
# much longer, there is little to hide; where copying takes longer, the GPU starves, and the only
# help is to move fewer bytes. For a whole training step of lesson 7, with its recorded time:

# %%
records = bench.load_records()
for step in bench.find(records, name="efficientnet.step", dtype="float32"):
    n, *_ = step["shape"]
    ms = next(row["microseconds"] for row in step["rows"] if row["label"] == "ours") / 1e3
    size = 4 * math.prod(step["shape"])
    apart, together = predict(100, size, 25, ms)
    print(f"EfficientNet-B4, {n} pictures: {size / 1e6:.0f} MB, copied in {size / 25e6:.1f} ms (model); "
          f"a step takes {ms:.1f} ms\n(recorded on an {records['device']['name']}, "
          f"{results_table.when(step)}): overlapping gains {apart / together - 1:.1%}")

# %% [markdown]
# That is `backend.prefetch(batches)` in `course_lib/backend.py`. For PyTorch's arrays a thread copies
# the next batch, while the program computes with this one (`course_lib/runtime/host/crossing.py`):
#
# ```python
# def copied(batch):                        # by a thread of its own
#     with torch.cuda.stream(copies):       # the second stream
#         pinned = [tensor.pin_memory() for tensor in batch]
#         found = [tensor.to("cuda", non_blocking=True) for tensor in pinned]
#     copies.synchronize()                  # this thread waits, and the program does not
#     return found
# ```
#
# Why a thread? To pin a batch, the *processor* copies it. In the program's own thread that takes time in
# which the program orders no kernels. On a GPU, this cell measures the bridge:

# %% tags=["varies"]
def bridge_gbps(pinned, n_bytes=256 << 20):
    """GB/s of a copy from the host to the GPU, the best of five."""
    host, times = torch.ones(n_bytes, dtype=torch.uint8), []
    host = host.pin_memory() if pinned else host
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        host.to("cuda", non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))  # in ms
    return n_bytes / min(times) / 1e6

# %% tags=["varies"]
if SIMULATED:
    print("There is no GPU here: what you have seen is a model.")
else:
    for kind in (False, True):
        print(f"{'pinned  ' if kind else 'pageable'} {bridge_gbps(kind):6.1f} GB/s")

# %% [markdown]
# And what does it gain in a program? One training step of lesson 14's U-Net was timed on a GPU with its
# batches in three ways: they lie there already; they come by `prefetch`; each is copied when it is
# needed. **Predict** the three in pictures a second, from first to last.

# %%
for record in bench.find(records, name="unet.prefetch"):
    for row in record["rows"]:
        print(f"{row['label']:19} {row['images_per_second']:4.0f} pictures a second")
    print(f"kernels ran during {record['copies_hidden']:.0%} of the time of prefetch's copies "
          f"({records['device']['name']}, {results_table.when(record)})")

# %% [markdown]
# `prefetch` gained nothing there; to copy when needed was even a little faster. The model knows copies and
# kernels, and nothing else. It leaves out the *host*, and this program waits for its host (lesson 14,
# section 8): whenever a copy is ordered, the GPU has nothing else to do, so there is no kernel to hide it
# behind. And when this was measured, `prefetch` pinned each batch in the program's own thread.
#
# A copy can be hidden in a program that is limited by its kernels, and by a thread that pins beside it, as
# it does today. A perceptron was timed on batches of three sizes. **Predict** again: for which batches does
# `prefetch` reach the rate without copies?

# %%
for record in bench.find(records, name="prefetch.training"):
    time_of = {row["label"]: row["microseconds"] for row in record["rows"]}
    there, needed, ahead = map(time_of.get, ("on the GPU already", "copied when needed", "by backend.prefetch"))
    n_rows, n_columns = record["shape"]
    print(f"{n_rows * n_columns * 4 / 1e6:3.0f} MB a batch: {needed / ahead:.1f} times as fast as copies when needed, "
          f"{there / ahead:.0%} of the rate without copies")

# %% [markdown]
# In each case it is faster than to copy when needed. With the smallest batches a step computes for so short a
# time that the thread, which first copies a batch to pinned memory, takes longer; and what takes longer can't
# hide. So find out first what limits your program.

# %% [markdown]
# ## 6 · The same lines, twice
#
# Everything comes together: a network of two layers learns to tell three arms of a spiral apart. Its
# arrays come from the backend, its softmax is a kernel on *your* tape, the walk is yours, and batches
# come by `prefetch`. First the points, drawn in NumPy, with a dtype that is named:

# %%
def draw_arms(n, random):
    arm, radius = random.integers(0, 3, n), random.uniform(0.2, 1.2, n)
    angle = 2.1 * arm + 2.2 * radius + random.normal(0, 0.12, n)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return points.astype(np.float32), arm


points, arms = draw_arms(96, np.random.default_rng(0))
targets = np.eye(3, dtype=np.float32)[arms]
batches = [(points[i : i + 32], targets[i : i + 32]) for i in range(0, 96, 32)]

# %% [markdown]
# On NumPy without kernels, softmax is a formula with `xp`. On a backend with kernels it is yours of
# section 4. The tape sees no difference:

# %%
def formula(x):
    xp = get_array_module(x)
    e = xp.exp(x - xp.max(x, axis=1, keepdims=True))
    return e / xp.sum(e, axis=1, keepdims=True)


def formula_backward(dy, y):
    return y * (dy - get_array_module(y).sum(y * dy, axis=1, keepdims=True))


formulas = use("on_the_tape", on_the_tape)(formula, formula_backward)

# %%
def start(backend, hidden=16):
    """The same first weights on every backend: drawn by NumPy, then moved."""
    random = np.random.default_rng(1)
    sizes = (((2, hidden), 1.5), ((hidden,), 0.5), ((hidden, 3), 0.3))
    drawn = [random.normal(0, scale, shape).astype(np.float32) for shape, scale in sizes]
    return [tensor(backend.to_device(array), requires_grad=True) for array in drawn]


def probabilities(backend, x, W, b, V):
    h = ag.ReLU()(x @ W + b)
    return (softmax if backend.kernels else formulas)(h @ V)

# %%
def train(backend, epochs=14):
    weights, losses = start(backend), []
    optimizer = ag.SGD(weights, lr=0.5, momentum=0.9)
    for _ in range(epochs):
        for x, target in backend.prefetch(batches):
            p = probabilities(backend, tensor(x), *weights)
            loss = (p.log() * tensor(target)).sum() * (-1 / len(x))  # cross-entropy
            optimizer.zero_grad()
            back(loss)
            optimizer.step()
            losses.append(loss.data)  # an array: nobody waits for it
    return weights, [float(backend.to_cpu(loss)) for loss in losses]

# %% [markdown]
# No line of it says where it runs. **Predict:** how far apart may the losses of the two backends be
# after 42 steps? And how many launches of *your* kernels does a step make, how many of the course's?

# %%
other = "simulator" if SIMULATED else "torch"
weights, on_numpy = train(set_backend(library="numpy"))
with launches_of() as made:
    _, on_other = train(set_backend(library=other))
mine = sum(kernel in (softmax_kernel, softmax_backward_kernel) for kernel, *_ in made)
apart = max(abs(a - b) for a, b in zip(on_numpy, on_other))
print(f"first loss {on_numpy[0]:.4f}, last {on_numpy[-1]:.4f}; NumPy and {other} differ by {apart:.0e}")
print(f"launches in a step: {mine / 42:.0f} of section 4's, {(len(made) - mine) / 42:.1f} of the course's")

# %%
plot.losses([("NumPy", range(42), on_numpy), (other, range(42), on_other)],
            title="The loss falls, and the two curves are one: that is the point")

# %% [markdown]
# (The course's launches are ReLU's, forwards and backwards, and the optimiser's: one that updates all
# weights, and some tiny ones that write down for it where the weights lie. The matrix products are
# the namespace's own: BLAS on the CPU, cuBLAS on a GPU.)
#
# The two add up in another order, so the last digits differ, and the difference may grow from step
# to step. If it grew to $10^{-2}$, one of the two would have a bug: comparing two backends is among the
# best tests there are.
#
# What the network has learned, on a grid of points it has never seen:

# %%
side = np.linspace(-1.3, 1.3, 60, dtype=np.float32)
grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
backend = set_backend(library="numpy")
with ag.no_grad():
    answers = probabilities(backend, tensor(grid), *weights).data.argmax(axis=1).reshape(60, 60)
shown = np.full((60, 60), 3.0)
column, row = np.rint((points.T + 1.3) / 2.6 * 59).astype(int)
shown[row, column] = arms
plot.images([shown, answers], ["96 points to learn from (white: none)", "the network's answers"],
            vmin=0, vmax=3, title="Three arms, three shades of grey")

# %% [markdown]
# ## What the profiler says
#
# On a CPU a clock in each `Function` will do. Python finds them all through the tape; what it prints
# is different on each machine and not stored. **Predict** who takes longest: the products, softmax, or
# the walk itself?

# %% tags=["varies"]
import time


def microseconds(work, times=200):
    """The mean time of one call of `work`."""
    begin = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - begin) / times * 1e6

# %% tags=["varies"]
backend = set_backend(library="numpy")
weights, data = start(backend), tensor(points)


def run():
    return (probabilities(backend, data, *weights).log() * tensor(targets)).sum()


last, spent = run(), {}
for result in ordered(last):
    if result.made_by is not None:
        name = f"{type(result.made_by).__name__}, backward"
        us = microseconds(lambda result=result: result.made_by.backward(result.data))
        spent[name] = spent.get(name, 0) + us  # there are two products of matrices

# %% tags=["varies"]
for name, us in sorted(spent.items(), key=lambda item: -item[1]):
    print(f"{name:22} {us:6.1f} µs")
whole = microseconds(lambda: walk(ordered(last), np.float32(1)))
print(f"all of them together   {sum(spent.values()):6.1f} µs; the whole way back, with your order and walk, {whole:.1f} µs")

# %% [markdown]
# What the whole way back takes beyond its functions is your walk. And much of what the functions take, on arrays as
# small as these, is Python, too, and NumPy's own start. On a GPU the kernels take
# less and Python takes the same. In a profiler's timeline this shows as *gaps between kernels*. The
# recorded training step of lesson 11 with and without them:

# %%
for step in bench.find(records, name="fashion_mnist.training", shape=(32, 1, 28, 28)):
    us = {row["label"]: row["microseconds"] for row in step["rows"]}
    print(f"a batch of 32, recorded on an {records['device']['name']} ({results_table.when(step)}):")
    print(f"module by module from Python {us['ours, modules']:,.0f} µs; "
          f"the same modules as a captured graph {us['ours, any network captured']:.0f} µs;\n"
          f"lesson 11's own step, with kernels made for this network, as a graph {us['ours, captured']:.0f} µs")

# %% [markdown]
# What to look for in such a timeline, in this order: gaps (who waits for whom? An `.item()`? A copy
# from pageable memory?), then copies that nothing hides, then kernels in float64 (their names have a
# `d` or `double` in them), and only then the longest kernel.
#
# ## Where the real libraries go further
#
# - **CuPy** is NumPy's names on a GPU, with a cache for memory and kernels that are written at run
#   time. `backend.py` can use it: `set_backend(True, library="cupy")`.
# - **The array API standard** is adopted by scikit-learn and SciPy: many of their functions now take a
#   GPU's arrays, by the same trick as yours.
# - **PyTorch's autograd** is this lesson's tape in C++. It walks with several threads, one for each
#   device, notices a saved tensor that was changed in place (yours does not), and its gradients can be
#   differentiated again, because its backward functions are themselves written on the tape.
# - **JAX** writes no tape of arrays. It runs the program once with stand-ins, gets a list of all
#   operations, differentiates *the list*, and compiles it to few fused kernels. What it compiles must
#   not ask for a number on the way.
# - **Checkpointing** keeps only some of what `forward` saved and computes the rest again on the way
#   back: less memory for more time.
#
# ## Three questions
#
# <details><summary>1. Somebody's training takes 10 hours on a laptop's gaming GPU. They change one line, and it takes 25 minutes. The losses are the same to five digits. Which line may it have been?</summary>
#
# One that made float64: `np.eye(n)[labels]` without a dtype, say, or a learning rate that was read with NumPy. On
# such a chip float64 has 1/64 of float32's rate. The losses agree, because float64 is not *wrong*. Print the dtype
# of the loss: it shows whether float64 came in anywhere above it.
# </details>
#
# <details><summary>2. A walk adds gradients with <code>+=</code>, because that saves memory. All tests with chains pass. When does it fail?</summary>
#
# When a function gives one array to two inputs, as a sum does, and one of these inputs has a second use. Adding to
# its gradient changes the other input's as well: it is the same array. It takes a diamond to see it, and the
# first residual network has one.
# </details>
#
# <details><summary>3. A batch is copied in 3 ms and computed in 2 ms. Somebody pins the memory and uses a second stream. How much faster is it, and what should they do next?</summary>
#
# 5 ms become 3 ms per batch: 1.67 times as fast, and the GPU still idles for a third of the time. Only fewer bytes
# help now: send uint8 and make float32 of it on the GPU, and the copy takes 0.75 ms, which is hidden entirely.
# Then a batch takes 2 ms.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# A network that says for *every pixel* what it shows must make its pictures small, to see far, and then
# large again. Lesson 13 is about the layer that makes them large, the transposed convolution, and about
# the **U-Net** that is built of it: on the tape of this lesson, on both kinds of array.
