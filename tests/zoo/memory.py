"""Memory spaces and element types: constant, local, records, half precision, vectors."""

import numpy as np
from numba import float32, float64, int32
from numba.types import float16

from course_lib import cuda
from zoo.plan import Launch, Plan, blocks_for, case

WEIGHTS = np.array([[0.25, -1.5, 2.0], [3.0, 0.5, -0.75]], dtype=np.float32)
RECORD = np.dtype(
    [("position", np.float32, 3), ("mass", np.float64), ("kind", np.int16)], align=True
)


@cuda.jit
def constant_kernel(x, y):
    weights = cuda.const.array_like(WEIGHTS)
    i = cuda.grid(1)
    if i < x.shape[0]:
        for row in range(2):
            total = float32(0)
            for col in range(3):
                total += weights[row, col] * x[i, col]
            y[i, row] = total


@case
def constant_memory(rng):
    x = rng.standard_normal((51, 3)).astype(np.float32)
    y = np.full((51, 2), np.nan, np.float32)
    plan = Plan([Launch(constant_kernel, 2, 32, (x, y))])
    return plan.expect(y, x.astype(np.float64) @ WEIGHTS.T, 1e-5)


@cuda.jit
def local_sort_kernel(x):
    """Each thread sorts its row in a local array, by insertion."""
    row = cuda.grid(1)
    if row >= x.shape[0]:
        return
    keys = cuda.local.array(9, int32)
    for i in range(9):
        keys[i] = x[row, i]
    for i in range(1, 9):
        key = keys[i]
        j = i - 1
        while j >= 0 and keys[j] > key:
            keys[j + 1] = keys[j]
            j -= 1
        keys[j + 1] = key
    for i in range(9):
        x[row, i] = keys[i]


@case
def local_arrays(rng):
    x = rng.integers(-99, 99, (43, 9)).astype(np.int32)
    plan = Plan([Launch(local_sort_kernel, 2, 32, (x,))])
    return plan.expect(x, np.sort(x, axis=1))


@cuda.jit
def local_matrix_kernel(x, y):
    """Cholesky factors of 3 x 3 matrices, one per thread."""
    n = cuda.grid(1)
    if n < x.shape[0]:
        factor = cuda.local.array((3, 3), float64)
        for i in range(3):
            for j in range(i + 1):
                total = x[n, i, j]
                for k in range(j):
                    total -= factor[i, k] * factor[j, k]
                if i == j:
                    factor[i, j] = total**0.5
                else:
                    factor[i, j] = total / factor[j, j]
        for i in range(3):
            for j in range(3):
                y[n, i, j] = factor[i, j] if j <= i else 0.0


@case
def local_matrices(rng):
    half = rng.standard_normal((21, 3, 3))
    x = half @ half.transpose(0, 2, 1) + 0.1 * np.eye(3)
    y = np.full_like(x, np.nan)
    plan = Plan([Launch(local_matrix_kernel, 1, 32, (x, y))])
    return plan.expect(y, np.linalg.cholesky(x), 1e-7)


@cuda.jit
def records_kernel(bodies, energies):
    i = cuda.grid(1)
    if i < bodies.size:
        body = bodies[i]
        total = 0.0
        for axis in range(3):
            total += body.position[axis] * body.position[axis]
        energies[i] = 0.5 * body.mass * total
        bodies[i].mass = body.mass + 1
        bodies[i]["kind"] = body["kind"] * 2


@case
def record_arrays(rng):
    bodies = np.zeros(45, RECORD)
    bodies["position"] = rng.standard_normal((45, 3))
    bodies["mass"] = rng.random(45)
    bodies["kind"] = rng.integers(0, 9, 45)
    energies = np.full(45, np.nan)
    squares = (bodies["position"].astype(np.float64) ** 2).sum(axis=1)
    plan = Plan([Launch(records_kernel, 2, 32, (bodies, energies))])
    plan.expect(energies, 0.5 * bodies["mass"] * squares, 1e-5)
    plan.expect(bodies, bodies["mass"] + 1, transform=lambda b: b["mass"])
    return plan.expect(bodies, bodies["kind"] * 2, transform=lambda b: b["kind"])


@cuda.jit
def half_kernel(x, y, z, extremes):
    i = cuda.grid(1)
    if i < x.size:
        a, b = x[i], y[i]
        z[i, 0] = a + b
        z[i, 1] = a * b
        z[i, 2] = cuda.fp16.hfma(a, b, a)
        z[i, 3] = cuda.fp16.hsub(a, b)
        z[i, 4] = -abs(a)
        z[i, 5] = float16(float32(a) * float32(0.1))
        extremes[i] = cuda.fp16.hmax(a, b) if a > b else cuda.fp16.hmin(a, b)


@case
def half_precision(rng):
    x, y = rng.standard_normal((2, 75)).astype(np.float16)
    z, extremes = np.full((75, 6), np.nan, np.float16), np.full(75, np.nan, np.float16)
    fused = (x.astype(np.float64) * y + x).astype(np.float16)
    scaled = (x.astype(np.float32) * np.float32(0.1)).astype(np.float16)
    wanted = np.stack([x + y, x * y, fused, x - y, -np.abs(x), scaled], axis=1)
    plan = Plan([Launch(half_kernel, 2, 64, (x, y, z, extremes))])
    return plan.expect(z, wanted).expect(extremes, x)


@cuda.jit
def vector_kernel(x, y):
    i = cuda.grid(1)
    if i < x.shape[0]:
        v = cuda.float32x4(x[i, 0], x[i, 1], x[i, 2], x[i, 3])
        pair = cuda.float32x2(v.w, v.z)
        w = cuda.float4(pair, v.y, v.x)
        three = cuda.int32x3(1, 2, 3)
        y[i, 0] = w.x + three.x
        y[i, 1] = w.y * three.y
        y[i, 2] = w.z - three.z
        y[i, 3] = w.w


@case
def vector_types(rng):
    x = rng.standard_normal((35, 4)).astype(np.float32)
    y = np.full_like(x, np.nan)
    wanted = np.stack([x[:, 3] + 1, x[:, 2] * 2, x[:, 1] - 3, x[:, 0]], axis=1)
    return Plan([Launch(vector_kernel, 2, 32, (x, y))]).expect(y, wanted, 1e-6)


@cuda.jit
def complex_kernel(z, w, y, magnitude):
    i = cuda.grid(1)
    if i < z.size:
        product = z[i] * w[i].conjugate()
        y[i] = product + complex(w[i].real, 2.0) / (z[i] - 1j)
        magnitude[i] = abs(z[i])


@case
def complex_numbers(rng):
    z = (rng.standard_normal(63) + 1j * rng.standard_normal(63)).astype(np.complex64)
    w = (rng.standard_normal(63) + 1j * rng.standard_normal(63)).astype(np.complex64)
    z.imag[np.abs(z - 1j) < 0.1] += 2
    y, magnitude = np.full_like(z, np.nan), np.full(63, np.nan, np.float32)
    wide = z.astype(np.complex128)
    wanted = wide * w.astype(np.complex128).conj() + (w.real + 2j) / (wide - 1j)
    plan = Plan([Launch(complex_kernel, 1, 64, (z, w, y, magnitude))])
    return plan.expect(y, wanted, 1e-4).expect(magnitude, np.abs(wide), 1e-5)


@cuda.jit
def boolean_kernel(x, flags, count):
    i = cuda.grid(1)
    if i < x.size:
        flags[i] = not (x[i] > 0.5 and flags[i])
        if flags[i]:
            cuda.atomic.add(count, 0, 1)


@case
def boolean_arrays(rng):
    x, flags = rng.random(71), rng.random(71) > 0.3
    count = np.zeros(1, np.int32)
    wanted = ~((x > 0.5) & flags)
    plan = Plan([Launch(boolean_kernel, blocks_for(71, 32), 32, (x, flags, count))])
    return plan.expect(flags, wanted).expect(count, [wanted.sum()])
