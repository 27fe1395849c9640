"""A fixture that lets benchmarks run without a GPU: on CPU tensors, with made-up times."""

import pytest
import torch

from course_lib import SIMULATED, bench
from course_lib.benchmarks import case, peaks, softmax


def times(candidates, *, calls=2, rounds=2):
    return {label: bench.Timing(10.0, (9.0, 11.0)) for label in candidates}


def call_times(candidates, *, rounds=2):
    return dict.fromkeys(candidates, bench.Timing(50.0, (9.0, 99.0)))


@pytest.fixture
def on_the_cpu(monkeypatch):
    """run(benchmark, shape, **more): the records of one shape."""
    if not SIMULATED:
        pytest.skip("about machines without a GPU")
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
