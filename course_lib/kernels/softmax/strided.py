"""The rung `strided`: along an axis that is not the last, without a transposed copy.

A thread takes some neighbouring columns (see `blocks.columns`). Short ones it holds in registers,
so that each number is read once; of longer ones it makes the maximum and the sum in one pass, some
numbers of each column at a time, and reads them again for the result.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.columns import SLOTS, STREAM_SLOTS, access, start_of
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.softmax_formulas import exponential
from course_lib.kernels.blocks.softmax_steps import add_online
from course_lib.runtime.intrinsics import (
    LOWEST,
    allow_next_kernel,
    vector_width,
    wait_for_previous_kernel,
)


def forward_kernels(formulas, n_slots, vectors):
    """(kernel that holds a column, kernel that streams it), with `n_slots` numbers at a time."""
    keep, row_factor, finish = formulas.keep, formulas.row_factor, formulas.finish
    width_of_thread, load_some, store_one = access(vectors)

    @cuda.jit
    def held_kernel(x, y, n_columns, length, step):
        allow_next_kernel()
        wait_for_previous_kernel()
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        width, digits = width_of_thread(x), vector_width(x)
        column = np.int64(cuda.grid(1)) * width
        if column < n_columns:
            start = start_of(column, length, step)
            load_some(values, n_slots, x, start, step, 0, length, LOWEST)
            for k in range(width):
                m, total = LOWEST, ZERO
                for c in range(n_slots):
                    m = max(m, values[c, k])
                for c in range(n_slots):
                    difference = values[c, k] - m
                    e = exponential(difference, digits)
                    total += e
                    values[c, k] = keep(difference, e)
                factor = row_factor(total)
                for c in range(n_slots):
                    values[c, k] = finish(values[c, k], factor)
            for c in range(n_slots):
                if c < length:
                    store_one(y, start + c * step, values[c])

    @cuda.jit
    def streamed_kernel(x, y, n_columns, length, step):
        allow_next_kernel()
        wait_for_previous_kernel()
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        m = cuda.local.array(MAX_WIDTH, np.float32)
        s = cuda.local.array(MAX_WIDTH, np.float32)
        width, digits = width_of_thread(x), vector_width(x)
        column = np.int64(cuda.grid(1)) * width
        if column < n_columns:
            start = start_of(column, length, step)
            for k in range(width):
                m[k], s[k] = LOWEST, ZERO
            for first in range(0, length, n_slots):
                load_some(values, n_slots, x, start, step, first, length, LOWEST)
                for k in range(width):
                    m[k], s[k] = add_online(values, n_slots, k, m[k], s[k], digits)
            for k in range(width):
                s[k] = row_factor(s[k])
            for first in range(0, length, n_slots):
                load_some(values, n_slots, x, start, step, first, length, LOWEST)
                for c in range(n_slots):
                    for k in range(width):
                        difference = values[c, k] - m[k]
                        kept = keep(difference, exponential(difference, digits))
                        values[c, k] = finish(kept, s[k])
                    if first + c < length:
                        store_one(y, start + (first + c) * step, values[c])

    return held_kernel, streamed_kernel


def backward_kernels(formulas, n_slots, vectors):
    """(kernel that holds a column, kernel that streams it) of dx = f'(dy, y)."""
    term, gradient = formulas.term, formulas.gradient
    width_of_thread, load_some, store_one = access(vectors)

    @cuda.jit
    def held_kernel(dy, y, dx, n_columns, length, step):
        allow_next_kernel()
        wait_for_previous_kernel()
        upstream = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        width = width_of_thread(dy)
        column = np.int64(cuda.grid(1)) * width
        if column < n_columns:
            start = start_of(column, length, step)
            load_some(upstream, n_slots, dy, start, step, 0, length, ZERO)
            load_some(values, n_slots, y, start, step, 0, length, ZERO)
            for k in range(width):
                total = ZERO
                for c in range(n_slots):
                    total += term(upstream[c, k], values[c, k])
                for c in range(n_slots):
                    upstream[c, k] = gradient(upstream[c, k], values[c, k], total)
            for c in range(n_slots):
                if c < length:
                    store_one(dx, start + c * step, upstream[c])

    @cuda.jit
    def streamed_kernel(dy, y, dx, n_columns, length, step):
        allow_next_kernel()
        wait_for_previous_kernel()
        upstream = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        values = cuda.local.array((n_slots, MAX_WIDTH), np.float32)
        totals = cuda.local.array(MAX_WIDTH, np.float32)
        width = width_of_thread(dy)
        column = np.int64(cuda.grid(1)) * width
        if column < n_columns:
            start = start_of(column, length, step)
            for k in range(width):
                totals[k] = ZERO
            for first in range(0, length, n_slots):
                load_some(upstream, n_slots, dy, start, step, first, length, ZERO)
                load_some(values, n_slots, y, start, step, first, length, ZERO)
                for k in range(width):
                    added = ZERO
                    for c in range(n_slots):
                        added += term(upstream[c, k], values[c, k])
                    totals[k] += added
            for first in range(0, length, n_slots):
                load_some(upstream, n_slots, dy, start, step, first, length, ZERO)
                load_some(values, n_slots, y, start, step, first, length, ZERO)
                for c in range(n_slots):
                    for k in range(width):
                        upstream[c, k] = gradient(upstream[c, k], values[c, k], totals[k])
                    if first + c < length:
                        store_one(dx, start + (first + c) * step, upstream[c])

    return held_kernel, streamed_kernel


def by_access(kernels_of, formulas):
    """({(whether by vectors, numbers held): kernel that holds}, the same of those that stream)."""
    ways = (True, False)
    return (
        {(v, n): kernels_of(formulas, n, v)[0] for v in ways for n in SLOTS},
        {(v, None): kernels_of(formulas, STREAM_SLOTS, v)[1] for v in ways},
    )
