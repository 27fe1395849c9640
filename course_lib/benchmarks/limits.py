"""What a kernel's speed is held against: a copy of as many bytes."""

import torch


def copies(n_bytes, sets):
    """Candidates that move `n_bytes`, half read and half written, on `sets` sets of buffers.

    A memory copy, and a kernel that negates: which of the two a device does better depends on the
    size, so both are timed.
    """
    n = n_bytes // 8
    source = [torch.randn(n, device="cuda") for _ in range(sets)]
    target = [torch.empty_like(source[0]) for _ in range(sets)]
    return {
        "copy": lambda i: target[i % sets].copy_(source[i % sets]),
        "negate": lambda i: torch.neg(source[i % sets], out=target[i % sets]),
    }


def fastest_copy(timings):
    """The shorter `bench.Timing` of the two; both are taken out of `timings`."""
    return min((timings.pop(label) for label in ("copy", "negate")), key=lambda t: t.microseconds)
