"""Arithmetic and control flow: integers, libdevice, random numbers, closures, loops."""

import math
import operator

import numpy as np
from numba import float32, int32, uint32
from numba.cuda import libdevice
from numba.cuda.random import create_xoroshiro128p_states, xoroshiro128p_uniform_float32

from course_lib import cuda
from zoo.plan import Launch, Plan, case


@cuda.jit(device=True)
def escape_time(real, imag, limit):
    z = complex(0.0, 0.0)
    c = complex(real, imag)
    steps = limit
    for i in range(limit):
        z = z * z + c
        if z.real * z.real + z.imag * z.imag > 4.0:
            steps = i
            break
    return steps


@cuda.jit
def mandelbrot_kernel(image, limit):
    row, col = cuda.grid(2)
    height, width = image.shape
    if row < height and col < width:
        image[row, col] = escape_time(-2.0 + 3.0 * col / width, -1.0 + 2.0 * row / height, limit)


@case
def mandelbrot_with_break(rng):
    image = np.full((13, 19), -1, np.int32)
    limit = int(rng.integers(8, 16))
    wanted = np.full(image.shape, limit)
    for row, col in np.ndindex(image.shape):
        c, z = complex(-2.0 + 3.0 * col / 19, -1.0 + 2.0 * row / 13), 0j
        for i in range(limit):
            z = z * z + c
            if abs(z) > 2:
                wanted[row, col] = i
                break
    plan = Plan([Launch(mandelbrot_kernel, (2, 3), (8, 8), (image, limit))])
    return plan.expect(image, wanted)


def make_map_kernel(function, factor, limits):
    """A kernel for one function: it captures a device function, a number and a tuple."""
    low, high = limits

    @cuda.jit
    def map_kernel(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = min(max(function(x[i]) * factor, low), high)

    return map_kernel


@cuda.jit(device=True)
def cube(x):
    return x * x * x


triple_cube_kernel = make_map_kernel(cube, 3, (-20, 20))
half_root_kernel = make_map_kernel(cuda.jit(device=True)(lambda x: math.sqrt(abs(x))), 0.5, (0, 1))


@case
def closures_of_one_factory(rng):
    x = 2 * rng.standard_normal(71)
    cubes, roots = np.full_like(x, np.nan), np.full_like(x, np.nan)
    launches = [(triple_cube_kernel, cubes), (half_root_kernel, roots)]
    plan = Plan([Launch(kernel, 3, 32, (x, y)) for kernel, y in launches])
    plan.expect(cubes, np.clip(3 * x**3, -20, 20), 1e-9)
    return plan.expect(roots, np.clip(0.5 * np.sqrt(np.abs(x)), 0, 1), 1e-9)


def make_reduce_kernel(combine, threads):
    """The block size is a captured constant; it sizes the shared array."""

    @cuda.jit
    def reduce_kernel(x, y):
        shared = cuda.shared.array(threads, int32)
        tid = cuda.threadIdx.x
        shared[tid] = x[cuda.grid(1)]
        cuda.syncthreads()
        half = threads // 2
        while half > 0:
            if tid < half:
                shared[tid] = combine(shared[tid], shared[tid + half])
            cuda.syncthreads()
            half //= 2
        if tid == 0:
            y[cuda.blockIdx.x] = shared[0]

    return reduce_kernel


multiply_kernel = make_reduce_kernel(cuda.jit(device=True)(lambda a, b: a * b), 16)
xor_kernel = make_reduce_kernel(operator.xor, 32)


@case
def closures_with_barriers(rng):
    x = rng.integers(1, 3, 96).astype(np.int32)
    products, xors = np.full(6, -1, np.int32), np.full(3, -1, np.int32)
    launches = [Launch(multiply_kernel, 6, 16, (x, products)), Launch(xor_kernel, 3, 32, (x, xors))]
    plan = Plan(launches).expect(products, x.reshape(6, 16).prod(axis=1))
    return plan.expect(xors, np.bitwise_xor.reduce(x.reshape(3, 32), axis=1))


@cuda.jit
def bit_tricks_kernel(words, wide, counts, reversed_words):
    i = cuda.grid(1)
    if i < words.size:
        word = words[i]
        counts[i, 0] = cuda.popc(word)
        counts[i, 1] = cuda.clz(word)
        counts[i, 2] = cuda.ffs(word)
        counts[i, 3] = cuda.popc(wide[i])
        counts[i, 4] = cuda.clz(wide[i])
        counts[i, 5] = cuda.ffs(wide[i])
        reversed_words[i] = cuda.brev(word)
        wide[i] = (wide[i] << 3) ^ (wide[i] >> 7)


@case
def integer_bit_tricks(rng):
    words = (rng.integers(0, 2**32, 61) >> rng.integers(0, 32, 61)).astype(np.uint32)
    words[0] = 0
    wide = rng.integers(-(2**62), 2**62, 61)
    wide[1] = 0
    counts, reversed_words = np.full((61, 6), -1, np.int32), np.zeros_like(words)
    wanted = []
    for word, long in zip(words.tolist(), wide.tolist(), strict=True):
        long %= 2**64
        row = [word.bit_count(), 32 - word.bit_length(), (word & -word).bit_length()]
        row += [long.bit_count(), 64 - long.bit_length(), (long & -long).bit_length()]
        wanted.append(row)
    mirrored = [int(f"{word:032b}"[::-1], 2) for word in words.tolist()]
    shifted = (wide << 3) ^ (wide >> 7)
    plan = Plan([Launch(bit_tricks_kernel, 2, 32, (words, wide, counts, reversed_words))])
    return plan.expect(counts, wanted).expect(reversed_words, mirrored).expect(wide, shifted)


@cuda.jit
def hash_kernel(x, y):
    """Multiplicative hashing: each product is cut to 32 bits on purpose."""
    i = cuda.grid(1)
    if i < x.size:
        h = x[i]
        h = uint32(h ^ (h >> uint32(16)))
        h = uint32(h * uint32(0x85EBCA6B))
        h = uint32(h ^ (h >> uint32(13)))
        y[i] = h


@case
def uint32_hash(rng):
    x = rng.integers(0, 2**32, 99).astype(np.uint32)
    y = np.zeros_like(x)
    h = x.astype(np.uint64)
    h ^= h >> np.uint64(16)
    h = h * np.uint64(0x85EBCA6B) % np.uint64(2**32)
    h ^= h >> np.uint64(13)
    return Plan([Launch(hash_kernel, 2, 64, (x, y))]).expect(y, h)


@cuda.jit
def division_kernel(a, b, y):
    """Floor division and modulo as in Python, unlike C, for every pair of signs."""
    i = cuda.grid(1)
    if i < a.size:
        y[i, 0] = a[i] // b[i]
        y[i, 1] = a[i] % b[i]
        q, r = divmod(a[i], b[i])
        y[i, 2] = q * b[i] + r
        y[i, 3] = int(a[i] / b[i])
        y[i, 4] = -a[i] >> 2


@case
def division_of_negative_numbers(rng):
    a = rng.integers(-99, 99, 65).astype(np.int32)
    b = np.where(rng.random(65) < 0.5, -1, 1) * rng.integers(1, 9, 65)
    b = b.astype(np.int32)
    y = np.zeros((65, 5), np.int32)
    wanted = np.stack([a // b, a % b, a, np.trunc(a / b).astype(int), -a >> 2], axis=1)
    return Plan([Launch(division_kernel, 3, 32, (a, b, y))]).expect(y, wanted)


@cuda.jit
def collatz_kernel(lengths):
    i = cuda.grid(1)
    if i < lengths.size:
        n = i + 1
        steps = 0
        while n != 1:
            if n % 2 == 0:
                n //= 2
            else:
                n = 3 * n + 1
            steps += 1
            if steps > 500:
                break
        lengths[i] = steps


@case
def collatz_while_loop(rng):
    lengths = np.full(int(rng.integers(60, 99)), -1, np.int32)
    wanted = []
    for start in range(1, lengths.size + 1):
        n, steps = start, 0
        while n != 1:
            n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
        wanted.append(steps)
    return Plan([Launch(collatz_kernel, 4, 32, (lengths,))]).expect(lengths, wanted)


@cuda.jit
def libdevice_kernel(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i, 0] = libdevice.fast_expf(x[i])
        y[i, 1] = libdevice.rsqrtf(abs(x[i]) + float32(1))
        y[i, 2] = libdevice.fmaf(x[i], x[i], float32(1))
        y[i, 3] = libdevice.tanhf(x[i])
        y[i, 4] = libdevice.fmaxf(x[i], float32(0))
        y[i, 5] = libdevice.erff(x[i])


@case
def libdevice_calls(rng):
    x = rng.standard_normal(55).astype(np.float32)
    y = np.full((55, 6), np.nan, np.float32)
    t = x.astype(np.float64)
    erf = np.array([math.erf(value) for value in t])
    wanted = [np.exp(t), 1 / np.sqrt(np.abs(t) + 1), t * t + 1, np.tanh(t), np.maximum(t, 0), erf]
    plan = Plan([Launch(libdevice_kernel, 2, 32, (x, y))])
    return plan.expect(y, np.stack(wanted, axis=1), 1e-4)


@cuda.jit
def math_kernel(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i, 0] = math.sin(x[i]) * math.cos(x[i])
        y[i, 1] = math.atan2(x[i], 2.0) + math.hypot(x[i], 1.0)
        y[i, 2] = math.floor(x[i]) + math.ceil(x[i])
        y[i, 3] = math.log1p(x[i] * x[i]) ** 2
        y[i, 4] = cuda.fma(x[i], x[i], 0.5)
        y[i, 5] = cuda.cbrt(x[i])
        y[i, 6] = cuda.selp(x[i] > 0, x[i], 0.0)
        y[i, 7] = math.lgamma(abs(x[i]) + 1) + math.erfc(x[i])


@case
def math_functions(rng):
    x = 3 * rng.standard_normal(45)
    y = np.full((45, 8), np.nan)
    wanted = [
        np.sin(x) * np.cos(x),
        np.arctan2(x, 2) + np.hypot(x, 1),
        np.floor(x) + np.ceil(x),
        np.log1p(x * x) ** 2,
        x * x + 0.5,
        np.cbrt(x),
        np.maximum(x, 0),
        [math.lgamma(abs(value) + 1) + math.erfc(value) for value in x],
    ]
    plan = Plan([Launch(math_kernel, 2, 32, (x, y))])
    return plan.expect(y, np.stack(wanted, axis=1), 1e-7)


@cuda.jit
def pi_kernel(states, rounds, inside):
    i = cuda.grid(1)
    count = 0
    for _ in range(rounds):
        x = xoroshiro128p_uniform_float32(states, i)
        y = xoroshiro128p_uniform_float32(states, i)
        if x * x + y * y <= float32(1):
            count += 1
    cuda.atomic.add(inside, 0, count)


@case
def random_numbers_give_pi(rng):
    """Within five standard deviations of pi, whatever the seed."""
    threads, rounds = 64, 30
    states = create_xoroshiro128p_states(threads, seed=int(rng.integers(1 << 30)))
    inside = np.zeros(1, np.int64)
    points = threads * rounds
    deviation = math.sqrt(math.pi * (4 - math.pi) / points)

    def near_pi(inside):
        return abs(4 * inside[0] / points - math.pi) < 5 * deviation

    plan = Plan([Launch(pi_kernel, 2, 32, (states, rounds, inside))])
    return plan.expect(inside, True, transform=near_pi)


@cuda.jit
def series_kernel(x, y, terms):
    """Tuple assignment, nested loops, `continue` and a chained comparison."""
    i = cuda.grid(1)
    if not 0 <= i < x.size:
        return
    total, sign = 0.0, 1.0
    for k in range(terms):
        if k % 2 == 0:
            continue
        power = 1.0
        for j in range(1, k + 1):
            power *= x[i] / j
        total, sign = total + sign * power, -sign
    y[i] = total


@case
def sine_series_with_continue(rng):
    x = rng.uniform(-2, 2, 45)
    y = np.full_like(x, np.nan)
    plan = Plan([Launch(series_kernel, 2, 32, (x, y, 25))])
    return plan.expect(y, np.sin(x), 1e-9)
