"""Closures with barriers, libdevice, random numbers."""

import math
import operator

import numpy as np
from numba import float32, int32
from numba.cuda import libdevice
from numba.cuda.random import create_xoroshiro128p_states, xoroshiro128p_uniform_float32

from course_lib import cuda
from zoo.plan import Launch, Plan, case


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
