"""Functions that Python's `math` lacks: inverse error functions, Bessel functions, cospi."""

import functools
import math

import numpy as np

_INF, _NAN = math.inf, math.nan


def erfinv(x):
    """The inverse of math.erf, by Newton's method from a rational first guess."""
    if x != x or abs(x) > 1:
        return _NAN
    if abs(x) == 1:
        return math.copysign(_INF, x)
    if x == 0:
        return x
    if abs(x) > 0.9:
        return math.copysign(erfcinv(1 - abs(x)), x)
    logarithm = math.log1p(-x * x)
    first = 2 / (math.pi * 0.147) + logarithm / 2
    guess = math.copysign(math.sqrt(math.sqrt(first * first - logarithm / 0.147) - first), x)
    for _ in range(4):
        error = math.erf(guess) - x
        slope = 2 / math.sqrt(math.pi) * math.exp(-guess * guess)
        step = error / slope
        guess -= step / (1 + guess * step)
    return guess


def erfcinv(x):
    """The inverse of math.erfc."""
    if x != x or x < 0 or x > 2:
        return _NAN
    if x == 0:
        return _INF
    if x == 2:
        return -_INF
    if x > 1:
        return -erfcinv(2 - x)
    if x > 0.1:
        return erfinv(1 - x)
    guess = math.sqrt(max(-math.log(x * math.sqrt(math.pi) * math.sqrt(-math.log(x))), 0.1))
    for _ in range(8):
        value = math.erfc(guess)
        if value == 0:
            return guess
        # Newton's method on the logarithm: erfc is nearly exp(-x²) out here.
        slope = -2 / math.sqrt(math.pi) * math.exp(-guess * guess) / value
        guess -= math.log(value / x) / slope
    return guess


def erfcx(x):
    """exp(x²) · erfc(x)."""
    if x < 25:
        try:
            return math.exp(x * x) * math.erfc(x)
        except OverflowError:
            return _INF
    if math.isinf(x):
        return 0.0
    term = total = 1.0
    for order in range(1, 8):
        term *= -(2 * order - 1) / (2 * x * x)
        total += term
    return total / (x * math.sqrt(math.pi))


def normcdf(x):
    """The normal distribution function."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def normcdfinv(x):
    """The inverse of the normal distribution function."""
    return -math.sqrt(2) * erfcinv(2 * x)


def _reduced(x):
    """x modulo 2, exactly, in [-1, 1]."""
    return math.remainder(x, 2.0)


def sinpi(x):
    """sin(πx), exact at multiples of a half."""
    if not math.isfinite(x):
        return _NAN
    x = _reduced(x)
    if abs(x) > 0.5:
        x = math.copysign(1 - abs(x), x)
    return math.copysign(1.0, x) if abs(x) == 0.5 else math.sin(math.pi * x)


def cospi(x):
    """cos(πx), exact at multiples of a half."""
    if not math.isfinite(x):
        return _NAN
    return sinpi(0.5 - abs(_reduced(x)))


@functools.cache
def _nodes(count):
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return tuple(zip(nodes.tolist(), weights.tolist(), strict=True))


def _integral(function, upper, count):
    """Gauss-Legendre quadrature on [0, upper]."""
    half = upper / 2
    return half * math.fsum(weight * function(half * (node + 1)) for node, weight in _nodes(count))


def jn(n, x):
    """The Bessel function of the first kind, from its integral."""
    if x != x:
        return _NAN
    if math.isinf(x):
        return 0.0
    # The integrand is periodic, so the trapezoidal rule converges faster than any power.
    count = 64 + 4 * int(abs(x) + abs(n))
    total = 0.0
    for number in range(count):
        angle = math.pi * (number + 0.5) / count
        total += math.cos(n * angle - x * math.sin(angle))
    return total / count


def yn(n, x):
    """The Bessel function of the second kind, from its integrals."""
    if x != x or x < 0:
        return _NAN
    if x == 0:
        return -_INF
    if math.isinf(x):
        return 0.0
    if n < 0:
        return (-1) ** n * yn(-n, x)
    if n > 1:
        # Upward recurrence is stable for this kind.
        before, now = yn(0, x), yn(1, x)
        for order in range(1, n):
            before, now = now, 2 * order / x * now - before
        return now
    oscillating = _integral(lambda angle: math.sin(x * math.sin(angle) - n * angle), math.pi,
                            100 + 2 * int(min(x, 500)))

    def decaying(t):
        return (math.exp(n * t) + (-1) ** n * math.exp(-n * t)) * math.exp(-x * math.sinh(t))

    upper = math.asinh(745 / x) if x > 1e-300 else 700.0
    return (oscillating - _integral(decaying, upper, 300)) / math.pi
