# %% [markdown]
# # 22 · The same kernel elsewhere
#
# **After this lesson** you can read one kernel in five languages: numba.cuda, its successor
# numba-cuda-mlir, CUDA C++, Triton and cuTile, say what each of them shows and what it hides, write the
# step of an online softmax for a whole tile, tell from a compiler's output what you did not have to
# write, and say which faults each language can have and who would find them.
#
# **You need** [lesson 3](03_softmax_naive_to_online.ipynb) (the online softmax and its merge). No GPU is needed, and nothing else has
# to be installed: what is missing to run a language here is said in a sentence.
#
# **Time:** 60 minutes. All cells together run in half a minute in the simulator. The words are
# collected in the [glossary](glossary.md); versions, sources and what was run are in
# `docs/elsewhere.md` of the project.

# %%
import difflib
import re

import numpy as np

from course_lib import cuda, reference, simulator
from course_lib.teach import TODO, check, elsewhere, hint, progress, solution, use

# %% [markdown]
# ## 1 · One kernel, five times
#
# The kernel is `softmax_online` of lesson 3. It is a good one to compare languages with, because it has
# all that they differ in: a loop with a **tail** (a row of 1,000 numbers is no multiple of 32), threads that
# exchange what they have found, two passes over the same memory, and a number, $-\infty$, that spoils a whole
# row if it is subtracted from itself.
#
# Each language gets the same six rows, and each result is compared with float64:

# %%
x = np.random.default_rng(22).normal(size=(6, 1000)).astype(np.float32)
x[1] += 1e4  # all scores far above 0
x[2, :600] = -np.inf  # the first 600 are masked
x[3, 3:] = -np.inf  # only three are not
x[4] *= 50  # far apart
expected = reference.softmax(x)

# %%
def compare(name):
    if reason := elsewhere.missing(name):
        print(reason)
    else:
        error = abs(elsewhere.softmax(name, x) - expected).max()
        print(f"{name}: largest error {error:.0e}")


print(elsewhere.source("numba.cuda"))

# %%
compare("numba.cuda")

# %% [markdown]
# **Predict**, before you go on: which of these lines will be gone in a language without threads?
#
# ## 2 · numba-cuda-mlir
#
# NVIDIA has put numba-cuda into maintenance: only critical faults are mended. Its successor compiles the
# same kernels by way of MLIR, another compiler framework. **Predict** how many lines of the kernel change.

# %%
old, new = (elsewhere.source(name).splitlines() for name in ("numba.cuda", "numba-cuda-mlir"))
for line in difflib.ndiff(old, new):
    if line[0] in "+-" and line[2:]:
        print(line)
compare("numba-cuda-mlir")

# %% [markdown]
# (The line that goes is this course's import, which chooses between the GPU and the simulator. In your own
# programs it is `from numba import cuda`.)
#
# One line, for this kernel. What changes around it:
#
# - **There is no simulator.** It was taken out (pull request 99). To look for a race without a GPU, keep the import of
#   numba.cuda in one place, and run the kernel in this course's simulator.
# - **`cuda.to_device`, `device_array`, streams and events** are there for old programs only. New ones are
#   told to pass PyTorch's or CuPy's arrays.
# - **Extensions** that generate code, such as this course's instructions in `runtime/intrinsics`, have to be
#   written again: they made LLVM's code, and now it has to be MLIR's.
#
# ## 3 · CUDA C++

# %%
print(elsewhere.source("CUDA C++"))

# %%
compare("CUDA C++")

# %% [markdown]
# Nearly line by line the same. So all that you know of warps, shared memory and barriers is of use there. The differences
# are these:
#
# - An array is a **pointer**. It knows neither its shape nor its strides, so they are arguments, and the
#   address of a row is computed by hand, in 64 bits.
# - **Types are written.** `1.0` is a double, `1.0f` a float: the trap of numba's `1.0` in other clothes.
# - `return` for a row that is not there, in place of a block under `if`. Either is right only because a whole warp
#   takes the same way, and nobody waits at a barrier below.
# - It is compiled ahead of time by `nvcc`, or at run time by **NVRTC**, as here. There is no step in Python to
#   hold on to: no debugger sees a thread without a GPU.
#
# ## 4 · Without threads: tiles
#
# Triton and cuTile have no thread to write for. A *program* (Triton) or *block* (cuTile) works on a **tile**, a small array
# whose sides are powers of two, with operations on the whole tile: load, maximum, exponential, sum, store. Which thread holds which number is the
# compiler's business.
#
# So the question is not any more what happens when one number comes, but when a tile comes. Let `m` and `s` be what was found
# in the tiles before. 1,000 numbers in tiles of 512: **predict** how many tiles there are, and how many places of the
# last one are past the end of the row. They are filled with $-\infty$. What do they add to the sum?
#
# ### Exercise: a step for a whole tile
#
# In NumPy, for all rows at once: `m` and `s` are (rows,), `tile` is (rows, columns), all float32. A row that has seen
# nothing has m = −∞ and s = 0, and its first tile may well be masked from end to end.

# %% exercise="tile_step"
def tile_step(m, s, tile):
    largest = TODO  # 1. of all numbers so far, a number for each row
    s_new = TODO  # 2. the old sum, corrected, and the tile's numbers
    return largest, s_new


check("tile_step", tile_step)

# %%
hint("tile_step")

# %% [markdown]
# With it, the softmax of our six rows:

# %%
step = use("tile_step", tile_step)
m, s = np.full(6, -np.inf, np.float32), np.zeros(6, np.float32)
for start in range(0, 1000, 512):
    part = x[:, start : start + 512]
    tile = np.full((6, 512), -np.inf, np.float32)
    tile[:, : part.shape[1]] = part
    m, s = step(m, s, tile)
print(f"in {-(-1000 // 512)} tiles, the last with {512 - part.shape[1]} places past the end")
print(f"largest error {abs(np.exp(x - m[:, None]) / s[:, None] - expected).max():.0e}")

# %% [markdown]
# The third row has 600 masked numbers at its beginning, and the first tile has 512. If your step had subtracted
# $-\infty$ from itself there, the `nan` would have stayed to the end.
#
# ### Triton
#
# Look for your two lines:

# %%
print(elsewhere.source("Triton"))

# %%
compare("Triton")

# %% [markdown]
# - No `lane`, no shuffle, no merge: `tl.max(tile, 0)` and `tl.sum(tile, 0)` reduce a tile, and the scalar is known to the whole program.
# - The tail is a **mask**, by hand, at every load and store. `other` says what a masked place holds. The second load has no
#   `other`: what is there is not stored.
# - x and y are still pointers. The address of each element is written down, as in CUDA C++.
# - `TILE` is a compile-time constant: another value is another kernel.
# - Without a GPU (`TRITON_INTERPRET=1`) Triton runs it by NumPy, one program after the other, tile by tile. That is what you see
#   here if there is no GPU. It is good for wrong numbers. It has no threads, so it cannot know what they would do to each other.
#
# ### cuTile

# %%
print(elsewhere.source("cuTile"))

# %%
compare("cuTile")

# %% [markdown]
# - x and y are **arrays** again, with shapes. `(row, j)` counts in tiles, not in elements, so no address is computed.
# - The tail is gone from the code: a load pads past the end with what `padding_mode` says, a store leaves out what is past it. **Predict**
#   what the first load would do without `padding_mode`. (Its documentation says: what is there is *undetermined*. The sum
#   would be wrong on some days.)
# - Threads cannot be named, and nothing within a block may be synchronised by hand.
#
# ## 5 · What you did not have to write
#
# It has to be somewhere, though. A compiler's **PTX** (the assembly language of NVIDIA's GPUs) shows it, and no GPU is needed to compile. Those
# of the five that hand out PTX without a GPU and are installed here compile the kernel for a chip of compute capability 9.0. (Triton comes twice: it looks at its
# arguments, and when the number of columns is a multiple of 16, it compiles a second kernel.) **Predict** for Triton: are there barriers? Shared memory?

# %%
words = {"shuffles": r"\bshfl\.", "barriers": r"\bbar(?:rier)?\.", "to shared": r"\bst\.shared",
         "loads": r"\bld\.global", "of 16 bytes": r"\bld\.global\S*\.v4", "float64": r"\.f64"}
print(f"{'':26}" + "".join(f"{word:>13}" for word in words))
for name, text in (compiled := elsewhere.ptx((9, 0))).items():
    print(f"{name:26}" + "".join(f"{len(re.findall(each, text)):13}" for each in words.values()))
for name in ("numba.cuda", "CUDA C++", "Triton"):
    if name not in compiled:
        print(f"{name} is not installed here, or its compiler is not.")

# %% [markdown]
# (These are instructions in the code, not what is executed: loops are unrolled, so a line may stand there several times.)
#
# numba.cuda and CUDA C++ have the ten shuffles that you wrote, five rounds of two, and no barrier. They come out of the same
# compiler in the end, and the counts agree. Triton has given the program four warps, so each of its two reductions takes shuffles
# within the warps, then shared memory and **barriers** between them. You wrote none. And with a number of columns that is a multiple of 16 it loads 16 bytes
# at a time, what lesson 4 did by hand.
#
# ## 6 · Who finds the fault?
#
# A language that hides a thing also hides the faults that one can make with it. **Predict**, for each of three
# faults, in which of the five languages you can make it, and who would tell you:
#
# 1. a barrier is missing between writing and reading shared memory;
# 2. the tail is forgotten: a row is read past its end;
# 3. $-\infty$ is subtracted from itself.
#
# The second one, in numba.cuda. Each lane takes 32 numbers, whether they are there or not:

# %%
@cuda.jit
def largest_of_row(x, found):
    row, lane = cuda.blockIdx.x, cuda.threadIdx.x
    largest = np.float32(-np.inf)
    for k in range(32):
        largest = max(largest, x[row, lane + 32 * k])
    for k in range(5):
        largest = max(largest, cuda.shfl_xor_sync(0xFFFFFFFF, largest, 1 << k))
    if lane == 0:
        found[row] = largest

# %%
rows, found = x[:2].copy(), np.zeros(2, np.float32)
with simulator.sanitize() as report:
    largest_of_row[2, 32](rows, found)
finding = report.findings[0]
print(f"{finding.kind}, line {finding.line}: {finding.source}")
print(finding.message)

# %% [markdown]
# And with a pointer? The memory behind the first row is the second row, and its numbers lie 10,000 higher:

# %%
flat = rows.ravel()
print("the largest of row 0:                     ", rows[0].max().round(2))
print("of 1,024 numbers from its address onwards:", flat[:1024].max().round(2))

# %% [markdown]
# That is no access out of bounds: all of it is memory of the same array. So a tool that watches addresses, such as `compute-sanitizer`,
# has nothing to report for row 0, and Triton's interpreter neither. Only who knows the *shape* can tell.
#
# | fault | numba.cuda | numba-cuda-mlir | CUDA C++ | Triton | cuTile |
# |---|---|---|---|---|---|
# | missing barrier | simulator: both lines, no GPU | on a GPU: `racecheck` | on a GPU: `racecheck` | can't be written | can't be written |
# | read past a row, within the array | simulator: the line, no GPU | nobody | nobody | nobody in Triton itself | can't be written: loads pad |
# | −∞ − (−∞) | the numbers | the numbers | the numbers | the numbers | the numbers |
#
# The last row is the same everywhere: it is your algorithm, and no language hides it. That is why this course checks results
# with masked rows, peaks and offsets before it looks at anything else.
#
# ## 7 · Which one to take
#
# | | shows | hides | without a GPU |
# |---|---|---|---|
# | numba.cuda | threads, warps, shared memory, barriers | pointers and types | runs in the simulator; compiles |
# | numba-cuda-mlir | the same | the same | neither, in 0.6.0: it asks the driver |
# | CUDA C++ | all, types and addresses too | nothing but registers and scheduling | compiles |
# | Triton | tiles, addresses, masks | threads, shared memory, barriers, width of loads | runs in its interpreter; compiles |
# | cuTile | tiles | the same, and addresses and masks | compiles, for 8.0 and newer |
#
# Take tiles where the work *is* tiles: softmax, normalisation, matrix products, attention. There the compiler chooses widths and
# layouts for the next chip as well. Take threads where neighbours talk in ways of their own: histograms, scans, graphs,
# work queues, clusters; and to learn what a GPU does, since a tile's cost is still bytes, sectors and barriers.
#
# ## What the profiler says
#
# Nsight Compute profiles all five, and its lines mean the same for each: read, written, registers, sectors per request. What it cannot do is
# name the line that a tile compiler has made a barrier from. When a Triton kernel is slow, begin with the widths of its loads, as above, and then count its
# registers and spills.
#
# ## Where the real libraries go further
#
# - `torch.compile` writes Triton kernels for you: `TORCH_LOGS=output_code` prints them, and now you can read them.
# - Triton's **Gluon** and cuTile's sister **cuda.lang** (both experimental) give back what tiles hide: layouts, shared memory, barriers.
# - **CUTLASS** and its Python form CuTe are how FlashAttention 3 and 4 are written: threads, with an algebra for who holds what.
# - **Triton-viz** draws and checks Triton kernels without a GPU, as the simulator does for threads.
#
# ## Three questions
#
# <details><summary>1. In Triton, a colleague leaves <code>other</code> out of the first load, too, and multiplies by the mask afterwards. What is
# wrong?</summary>
#
# What a masked place holds is then undefined. The maximum sees it, and a product with 0 does not help where it is <code>nan</code> or infinite. The neutral element of a
# maximum is −∞, that of a sum is 0; after the exponential the first has become the second.
# </details>
#
# <details><summary>2. The kernel of section 1 gives a row to a warp, Triton's to four warps. For rows of 50 numbers, which is better?</summary>
#
# A warp. Tiles of 512 would have 462 places without a number, and two reductions with barriers for 50 numbers. In Triton one would take a smaller tile
# and <code>num_warps=1</code>, or a tile of several rows.
# </details>
#
# <details><summary>3. A program for rows of any length must be right on the first day and fast on next year's chip. Nobody in the team has
# ever seen a warp. Which language?</summary>
#
# One of tiles, and the tests of this course: masked rows, tails, offsets, a comparison with float64. But let one of the team take lessons 1 to 4,
# who can tell why a kernel is slow.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# This was the last lesson. You began with one thread that adds two numbers, and you can now write, check, measure and read kernels in any of
# five languages. What comes next is a kernel of your own: count its bytes before you write it.
