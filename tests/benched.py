"""What lets benchmarks run without a GPU: on CPU tensors, with made-up times."""

import pytest
import torch

from course_lib import SIMULATED, bench
from course_lib.benchmarks import case, gpu, peaks, softmax


def times(candidates, *, calls=2, rounds=2):
    return {label: bench.Timing(10.0, (9.0, 11.0)) for label in candidates}


def each_once(candidates, *, calls, rounds):
    """As `times`, but every candidate is called."""
    for candidate in candidates.values():
        candidate(0)
    return times(candidates)


def call_times(candidates, *, rounds=2):
    return dict.fromkeys(candidates, bench.Timing(50.0, (9.0, 99.0)))


def set_all(monkeypatch, module, **values):
    for name, value in values.items():
        monkeypatch.setattr(module, name, value)


def without_a_gpu(monkeypatch):
    """Skip a test where there is a GPU; elsewhere, what is asked of one has an answer."""
    if not SIMULATED:
        pytest.skip("about machines without a GPU")
    nothing = dict.fromkeys(("synchronize", "collect", "reset_peak"), lambda: None)
    set_all(monkeypatch, gpu, **nothing, allocated=lambda: 0, peak=lambda: 1000)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """run(benchmark, shape, **more): the records of one shape."""
    without_a_gpu(monkeypatch)
    monkeypatch.setattr(bench, "buffer_sets", lambda n_bytes, most=24: 2)
    monkeypatch.setattr(bench, "device_times", times)
    monkeypatch.setattr(bench, "loop_times", times)
    monkeypatch.setattr(bench, "call_times", call_times)
    monkeypatch.setattr(case, "_once", lambda call, device: 100.0)
    monkeypatch.setattr(softmax, "_triton", lambda log, sets: {})
    monkeypatch.setattr(peaks, "peaks", lambda: {"fma": 66.9})
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)

    def run(benchmark, *shapes, **more):
        return benchmark.run(shapes=shapes or None, rounds=2, device="cpu", **more)

    return run
