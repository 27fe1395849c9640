# %% [markdown]
# # 0 · Start here
#
# **After this lesson** you can say what a GPU is and which work it is made for, find out what your
# own machine can do, write a first program for a GPU and run it, and let the course check it.
#
# **You need** Python (functions, loops) and a little NumPy (arrays, `a[row, column]`). You do not
# need a GPU, nor any C, nor to have seen a GPU program before.
#
# **Time:** 30 minutes. All cells together run in a few seconds, with a GPU or without.
#
# Every new word is explained where it first appears in **bold**, and again in the
# [glossary](glossary.md).

# %% [markdown]
# ## How to read a lesson
#
# A lesson is a page of text with **cells** of Python in between. Click into a cell and press
# <kbd>Shift</kbd>+<kbd>Enter</kbd>: it runs, its result appears underneath, and the next cell is
# selected. Run the cells from top to bottom, since later ones use what earlier ones made.
# You cannot break anything: change what you like, and run it again. When nothing makes sense any
# more, choose *Kernel → Restart Kernel…* in the menu and start from the top.
#
# The first cell asks the course's **doctor** what it finds on this machine.

# %% tags=["varies"]
from course_lib import cli, cuda, plot

healthy = cli.main(["doctor"]) == 0

# %% [markdown]
# The line *Kernels* matters most. It says where the programs that you write are going to run:
#
# - **on the GPU**, if this machine has one from NVIDIA;
# - **in the simulator** otherwise. That is a part of this course: a Python program that behaves like
#   a GPU, step by step. It is far slower than a GPU, but it sees mistakes about which a GPU keeps
#   silent. You write exactly the same code for both.
#
# A line *PROBLEM* would name what is wrong, and what to do about it. (In the solved notebook the
# doctor's answer is left out: it would be about somebody else's machine.)

# %% [markdown]
# ## A picture, and a loop that takes its time
#
# Here is a photograph of Grace Hopper, who in 1952 wrote one of the first compilers, programs that
# turn what people write into what machines run. It comes with Matplotlib, so it is on your machine
# already. (NVIDIA named a whole generation of GPUs after her. The speeds recorded for
# this course come from one of them, an H200.)

# %%
import matplotlib.cbook
import matplotlib.image
import numpy as np

with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
    photo = matplotlib.image.imread(file, format="jpg")

# The mean of the three colours, and of 4 × 4 pixels: grey, and small enough to look into.
picture = photo[20:532].reshape(128, 4, 128, 4, 3).mean(axis=(1, 3, 4)) / 255
picture = picture.astype(np.float32)
plot.images([picture], ["A picture is an array of numbers: 0 is black, 1 is white"])

# %% [markdown]
# `picture` has 128 rows and 128 columns: 16,384 **pixels**. It is rather dark, and the uniform hides
# its buttons. Taking the square root of a brightness between 0 and 1 helps: black stays 0, white
# stays 1, and everything in between becomes brighter, the dark most of all.
#
# In plain Python, that is a loop over the rows, and in it a loop over the columns:

# %% tags=["varies"]
import math
import time

bright = np.zeros_like(picture)
start = time.perf_counter()
for row in range(128):
    for col in range(128):
        bright[row, col] = math.sqrt(picture[row, col])
print(f"{picture.size:,} pixels, one after another: {(time.perf_counter() - start) * 1e3:.0f} ms")
plot.images([picture, bright], ["before", "after"], vmin=0, vmax=1)

# %% [markdown]
# A phone takes photographs with a thousand times as many pixels, and for one of them this loop would
# need a thousand times as long. Where does the time go? Not into difficult work, but into *queueing*:
# each pixel waits until the one before it is done.

# %% [markdown]
# ## Does the order matter?
#
# Let us put what is done for one pixel into a function of its own, and call it in a loop. And then
# call it in a quite different order.
#
# **Predict:** if all 16,384 pixels are visited in a shuffled order, what changes in the result?

# %%
def brighten_pixel(row, col, x, y):
    y[row, col] = math.sqrt(x[row, col])


shuffled = np.zeros_like(picture)
for number in np.random.default_rng(0).permutation(picture.size):
    row, col = divmod(int(number), 128)
    brighten_pixel(row, col, picture, shuffled)
print("the same picture:", np.array_equal(shuffled, bright))

# %% [markdown]
# Nothing changes. No pixel needs the result of another one, and each result has a place of its own.
# So nobody has to wait: 16,384 workers could do one pixel each, **all at the same time**.
#
# A **GPU** (graphics processing unit) is a chip built for just this: very many simple workers doing
# the same thing to different data. It was invented to colour the pixels of games, and it turned
# out that neural networks, too, are mostly the same small sum done millions of times.
#
# | | an ordinary processor (CPU) | a GPU (NVIDIA H200) |
# |---|---|---|
# | works on at the same time | some 10 to 100 things | up to 270,336 things |
# | one worker alone is | very fast | slow, and often waiting for memory |
# | good at | long chains of decisions | one small job, repeated a million times |

# %% [markdown]
# ## Your first kernel
#
# A function that runs on a GPU is called a **kernel**. (Jupyter calls the Python process behind a
# notebook a kernel, too. The two have nothing to do with each other.) Each worker is called a
# **thread**, and every thread runs the whole kernel, once, for its own piece of the data.
#
# Compare this with `brighten_pixel`. The last line, the actual work, is the same:

# %%
@cuda.jit
def brighten_kernel(x, y):
    col, row = cuda.grid(2)
    y[row, col] = math.sqrt(x[row, col])

# %% [markdown]
# Two things are new.
#
# - `@cuda.jit` turns a Python function into a kernel. **CUDA** is NVIDIA's name for everything that
#   has to do with programming its GPUs. *jit* is for *just in time*: the function is translated for
#   the GPU when it is needed for the first time.
# - Nobody passes `row` and `col` any more, since there is no loop that could. Each thread asks
#   instead: *which one am I?* `cuda.grid(2)` gives the answer as two numbers. The first counts
#   along the columns, the second along the rows, because GPU people say *x, y* where NumPy
#   says *row, column*. Hence `col, row`, in this order.
#
# To start a kernel, you say how many threads you want. This is a **launch**:

# %%
bright_kernel = np.zeros_like(picture)
brighten_kernel[(8, 8), (16, 16)](picture, bright_kernel)

print("largest difference:", np.abs(bright_kernel - bright).max())
plot.images([picture, bright_kernel], ["before", "after the kernel"], vmin=0, vmax=1)

# %% [markdown]
# The same picture, without any loop in sight. The square brackets hold what is new to a Python
# programmer. Threads come in teams, called **blocks**, and all blocks of a launch together are its
# **grid**:
#
# - `(16, 16)` are the threads of one block: 16 along the columns times 16 along the rows, so 256;
# - `(8, 8)` are the blocks of the grid: 8 × 8, so 64.
#
# In each direction 8 × 16 = 128 threads, one per pixel.
#
# (A GPU may round the last digit of a square root differently, so a tiny difference is no mistake.
# Also, numba may warn there that so small a grid leaves most of the GPU idle, and that it has
# to copy a NumPy array. Both are true, and neither matters yet.)

# %% [markdown]
# ## Who did what?
#
# Rather than believe it, let us look. This kernel writes down *who was here*: each thread stores its
# block's number and its own number within the block into the element that it handles. The picture
# is now a tiny one, of 12 rows and 16 columns.
#
# **Predict:** the blocks are 4 × 4 threads. How many blocks are needed? Which block gets the pixel
# in row 5, column 9, and which thread of that block?

# %%
@cuda.jit
def who_kernel(block, thread):
    col, row = cuda.grid(2)
    block[row, col, 0] = cuda.blockIdx.x
    block[row, col, 1] = cuda.blockIdx.y
    thread[row, col, 0] = cuda.threadIdx.x
    thread[row, col, 1] = cuda.threadIdx.y

# %%
block, thread = np.full((2, 12, 16, 2), -1, dtype=np.int32)
who_kernel[(4, 3), (4, 4)](block, thread)
plot.thread_map(
    block, thread, title="Each framed square is a block, each number a thread (x,y) in its block"
)

# %% [markdown]
# This picture is drawn from what the threads stored, not from what a book says. Every pixel was
# handled by exactly one thread. The thread numbers start again at `0,0` in each block; it is the
# block's number that tells the blocks apart. `cuda.grid(2)` puts both together:
#
# ```
# col = blockIdx.x * 4 + threadIdx.x        row = blockIdx.y * 4 + threadIdx.y
# ```
#
# where 4 is the width, and the height, of these blocks. For row 5, column 9: column 9 = **2** · 4 +
# **1** and row 5 = **1** · 4 + **1**, so it is block 2, 1 and in it thread 1,1. Find it in the
# picture. There are 4 × 3 = 12 blocks.
#
# Why teams at all, and not simply threads 0 to 191? A GPU is itself made of many small processors
# (**multiprocessors**; an H200 has 132). Each takes one block after another until none is left, so
# the same launch fits a small GPU and a large one. Threads of one block can also
# help each other, which later lessons make much use of.

# %% [markdown]
# ## Your turn: check, hint, progress
#
# Every lesson has exercises. You fill in a kernel, and the course **checks** it: it runs
# your own code on many inputs, in the simulator first, where nothing bad can happen. A check that
# fails is no disgrace. It is the usual way of finding out, and its message is meant to be read.
#
# So let us fail once, on purpose. Wanted is the *negative* of a picture, as on old film: black
# becomes white and white black, so a brightness `x` becomes `1 - x`. Somebody has got it the wrong
# way round:

# %%
from course_lib.teach import TODO, CheckFailed, check, hint, progress, solution, use


@cuda.jit
def wrong_way_round(x, y):
    col, row = cuda.grid(2)
    y[row, col] = x[row, col] - 1


try:
    check("negative", wrong_way_round)
except CheckFailed as failed:
    print(failed)

# %% [markdown]
# Read it line by line. `launch` is the launch with the smallest input that goes wrong; then come the
# first wrong element, what was `expected` there, and what your kernel wrote instead, `got`. Where it
# is known, `cause` says why, and `fix` what helps. `result` says whether the numbers were right in
# spite of a fault, and the line at `again` repeats the check with the very same inputs. (We caught the error
# with `try` so that the notebook could go on. You need not: an uncaught one shows the same text.)
#
# ### Exercise: the negative
#
# Now write it the right way round, in the place of `TODO`. Run the cell; the check is in its
# last line. As long as `TODO` is there, the check only says that the exercise is not solved yet.

# %% exercise="negative"
@cuda.jit
def negative(x, y):
    col, row = cuda.grid(2)
    y[row, col] = TODO  # the brightness of this pixel's negative


check("negative", negative)

# %% [markdown]
# Stuck? Each call of `hint` tells a little more: first a nudge, then the idea, at last nearly the
# code. `solution("negative")` shows finished code; try yourself first. (It writes `np.float32(1)`
# where a plain `1` would do. Lesson 1 says why.)

# %%
hint("negative")

# %% [markdown]
# Now use it. `use` takes your kernel if it has passed its check and the course's own if
# it has not, so that everything below an exercise works either way.

# %%
kernel = use("negative", negative)
film = np.zeros_like(picture)
kernel[(8, 8), (16, 16)](picture, film)
plot.images([picture, film], ["picture", "negative"], vmin=0, vmax=1)

# %% [markdown]
# What you have solved is remembered, also when you close the notebook:

# %%
progress()

# %% [markdown]
# ## What a profiler would say
#
# A **profiler** is a program that watches another one run and counts what happens. From
# the next lesson on, each lesson ends with what NVIDIA's profiler counts for its kernels.
# For today's it would say one thing above all: 64 blocks are too few to keep
# the 132 processors of an H200 busy. GPUs want *large* problems.
#
# ## Where the real libraries go further
#
# In PyTorch, `x.sqrt()` starts a kernel much like yours. The differences, which the next
# lesson explores: theirs works for any shape, handles several elements per thread, and loads
# them in larger pieces.

# %% [markdown]
# ## Three questions
#
# <details><summary>1. A picture has 1,080 rows and 1,920 columns, and blocks are 16 × 16 threads.
# How many blocks along the columns, and how many along the rows?</summary>
#
# 1,920 / 16 = 120 along the columns. 1,080 / 16 = 67.5 along the rows, so 67 are too few and
# you need 68. But then the last row of blocks sticks out of the picture by 8 rows. What its
# threads should do there is where the next lesson starts.
# </details>
#
# <details><summary>2. Each pixel is to become the mean of itself and the <em>already changed</em>
# pixel to its left. Is that a job for one thread per pixel?</summary>
#
# Not like this. Each pixel needs its left neighbour's <em>result</em>, so the order matters, and
# the threads of a launch run in no particular order. (If it needs the neighbour's <em>old</em>
# value, it is: read from one array and write into another one.)
# </details>
#
# <details><summary>3. What goes wrong if a kernel says <code>row, col = cuda.grid(2)</code>?</summary>
#
# Rows and columns change places: the thread handles the pixel mirrored at the diagonal. For
# a square picture the result is still right, since every pixel still has its thread. For one
# of 12 rows and 16 columns some threads would look for rows 12 to 15, which do not exist. And
# even for a square one it is slower, as you will see in the next lesson, by a factor you can count.
# </details>
#
# ## What comes next
#
# [Lesson 1: threads and memory](01_threads_and_memory.ipynb). What happens when threads and elements
# do not match, why the order in which threads touch memory decides about the speed, and the
# first kernels for a neural network.
