"""The benchmark of fused softmax kernels: what it checks, what it times, what it refuses."""

import pytest
import torch

from course_lib import SIMULATED, bench
from course_lib.benchmarks import fused_softmax as benchmark
from course_lib.kernels import bn_relu_softmax, softmax_dropout

NAMES = [
    f"{operation}.{direction}"
    for operation in ("softmax_dropout", "bn_relu_softmax")
    for direction in ("forward", "backward", "both")
]


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Let the benchmark run without a GPU, with made-up times."""
    if not SIMULATED:
        pytest.skip("about machines without a GPU")

    def device_times(candidates, *, calls, rounds):
        for candidate in candidates.values():
            for i in range(3):
                candidate(i)
        return {label: bench.Timing(10.0, (9.0, 11.0)) for label in candidates}

    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    monkeypatch.setattr(benchmark, "SAMPLE", 5)
    monkeypatch.setattr(benchmark, "copies", lambda *_: dict.fromkeys(("copy", "negate"), int))
    monkeypatch.setattr(benchmark, "_once", lambda candidate: (candidate(0), 500.0)[1])
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    monkeypatch.setattr(bench, "buffer_sets", lambda n_bytes: 2)
    monkeypatch.setattr(bench, "device_times", device_times)


def test_every_rung_and_peer_is_checked_and_timed(on_the_cpu):
    found = benchmark.run(shapes=[(4, 21)])
    assert [record["name"] for record in found] == NAMES * 2
    hashes = benchmark.kernel_hashes()
    assert list(hashes) == NAMES and len(set(hashes.values())) == 6
    n_arrays = dict(zip(NAMES, (2, 3, 5, 2, 4, 6), strict=True))
    for record in found:
        labels = [row["label"] for row in record["rows"]]
        assert labels == ["naive", "online", "registers", "PyTorch eager", "torch.compile"]
        assert record["kernel_hash"] == hashes[record["name"]] and not record["left_out"]
        size = 4 if record["dtype"] == "float32" else 2
        assert record["bytes"] == n_arrays[record["name"]] * 4 * 21 * size


def spoil(monkeypatch, module, which, change):
    original = getattr(module, which)

    def wrong(*arguments, **options):
        result = original(*arguments, **options)
        change(*(result if isinstance(result, tuple) else (result,)))
        return result

    monkeypatch.setattr(module, which, wrong)


def one_element(value):
    def change(first, *_):
        first[3, 5] += value

    return change


@pytest.mark.parametrize("module", [softmax_dropout, bn_relu_softmax])
@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("value, words", [(1e-3, "is wrong"), (float("nan"), "left elements")])
def test_what_is_wrong_is_not_timed(on_the_cpu, monkeypatch, module, which, value, words):
    spoil(monkeypatch, module, which, one_element(value))
    name = f"{module.__name__.rpartition('.')[2]}.{which}"
    with pytest.raises(AssertionError, match=f"naive {words}.*, so it is not timed"):
        benchmark.run(names=[name], shapes=[(4, 21)], dtypes=["float32"])


@pytest.mark.parametrize("k", [1, 2])
def test_wrong_sums_over_the_rows_are_not_timed(on_the_cpu, monkeypatch, k):
    def change(*results):
        results[k][4] += 0.01

    spoil(monkeypatch, bn_relu_softmax, "backward", change)
    with pytest.raises(AssertionError, match="naive is wrong, so it is not timed"):
        benchmark.run(names=["bn_relu_softmax.backward"], shapes=[(4, 21)], dtypes=["float32"])


def test_a_peer_that_does_not_drop_is_not_timed(on_the_cpu, monkeypatch):
    monkeypatch.setattr(
        benchmark.SoftmaxDropout, "peer_forward", staticmethod(lambda x: (x.softmax(-1), ()))
    )
    with pytest.raises(AssertionError, match="PyTorch eager keeps 100.0%, so it is not timed"):
        benchmark.run(names=["softmax_dropout.forward"], shapes=[(9, 370)], dtypes=["float32"])


def test_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"a shape is \(rows, columns\), both positive; not \(0"):
        benchmark.run(shapes=[(0, 3)])
