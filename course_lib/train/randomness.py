"""Random numbers that depend on where a run is, and on nothing that came before.

Seeding from the run's seed and the step's number makes a resumed run draw what an uninterrupted one
would have drawn, without the state of any generator being kept.
"""

import contextlib
import hashlib
import os

import torch


def seed_of(*place):
    """A seed for torch from any numbers and words, such as (seed, "augment", epoch, row)."""
    return int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:8]) >> 1


def permutation(length, *place):
    """The numbers below `length` in a random order that follows from `place` alone."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed_of(*place)))


@contextlib.contextmanager
def repeatable(device):
    """PyTorch computes the same bits in every run, and the caller's generators stay untouched."""
    # cuBLAS reads it when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn, deterministic = torch.backends.cudnn, torch.utils.deterministic
    before = cudnn.benchmark, cudnn.deterministic, deterministic.fill_uninitialized_memory
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.use_deterministic_algorithms(True)
        # Filling guards those who read memory before they write it, and costs a write of each
        # tensor.
        found = False, True, False
        try:
            cudnn.benchmark, cudnn.deterministic, deterministic.fill_uninitialized_memory = found
            yield
        finally:
            cudnn.benchmark, cudnn.deterministic, deterministic.fill_uninitialized_memory = before
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def random_state(device):
    """{"cpu": …, "cuda": …}: where PyTorch's generators of the CPU and of a GPU `device` stand."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state, device):
    """Let the generators go on where `random_state` found them."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
