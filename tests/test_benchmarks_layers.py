"""The benchmarks of linear layers, pooling, batch normalisation and optimisers, without a GPU."""

import pytest
import torch

from course_lib import SIMULATED, bench, benchmarks
from course_lib.benchmarks import layers, linear, peaks
from course_lib.kernels import linear as linear_kernels
from course_lib.kernels import max_pool2d

POOLED, NORMALISED = (2, 8, 6, 6), (3, 8, 4, 4)
PARAMETERS = [(4, 3), (5,)]


def times(candidates, *, calls, rounds):
    assert calls.keys() == candidates.keys() and min(calls.values()) >= 1
    for candidate in candidates.values():
        candidate(1)
    return {label: bench.Timing(10.0, (9.0, 11.0)) for label in candidates}


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Let the benchmarks run without a GPU, with made-up times."""
    if not SIMULATED:
        pytest.skip("about machines without a GPU")
    nothing = lambda i: None  # noqa: E731
    for benchmark in (linear, layers):
        monkeypatch.setattr(benchmark, "DEVICE", "cpu")
        monkeypatch.setattr(benchmark, "_synchronize", lambda: None)
        monkeypatch.setattr(benchmark, "_once", lambda candidate: 100.0)
    monkeypatch.setattr(linear, "_peaks", lambda: {"fma": 66.9})
    monkeypatch.setattr(linear, "LADDER", [(5, 7, 4)])
    monkeypatch.setattr(layers, "_empty_cache", lambda: None)
    monkeypatch.setattr(layers, "copies", lambda *_: dict.fromkeys(("copy", "negate"), nothing))
    monkeypatch.setattr(layers, "POOLED", [POOLED])
    monkeypatch.setattr(layers, "NORMALISED", [NORMALISED])
    monkeypatch.setattr(layers, "PARAMETERS", [PARAMETERS])
    monkeypatch.setattr(bench, "buffer_sets", lambda n_bytes: 2)
    monkeypatch.setattr(bench, "device_times", times)
    monkeypatch.setattr(bench, "loop_times", times)


# ------------------------------------------------------------------------------- linear


def test_every_product_is_checked_and_its_error_kept(on_the_cpu):
    found = linear.run(shapes=[(5, 7, 4)], dtypes=["float32"], rounds=2)
    assert [record["name"] for record in found] == [
        "linear.forward", "linear.backward", "linear.forward.tf32", "linear.backward.tf32"
    ]  # fmt: skip
    hashes = linear.kernel_hashes()
    for record in found:
        assert record["kernel_hash"] == hashes[record["name"]] and not record["left_out"]
        assert record["flops"] == 2 * 5 * 7 * 4 * (2 if "backward" in record["name"] else 1)
        rows = {row["label"]: row for row in record["rows"]}
        assert rows["cuBLAS"]["kind"] == "peer" and record["default"] in rows
        assert all(0 <= row["error"] < 1e-3 for row in record["rows"])
        assert rows["cuBLAS"]["tflops"] == round(record["flops"] / 10 / 1e6, 2)
    assert list(linear_kernels.VARIANTS) == [row["label"] for row in found[0]["rows"]][:-1]
    assert len(found[2]["rows"]) == 2
    assert "TFLOP/s" in benchmarks.table(found)


def test_a_wrong_product_is_not_timed(on_the_cpu, monkeypatch):
    forward = linear_kernels.forward

    def wrong(*arguments, **options):
        y = forward(*arguments, **options)
        y[2, 3] += 0.01
        return y

    monkeypatch.setattr(linear_kernels, "forward", wrong)
    with pytest.raises(AssertionError, match="is wrong, so it is not timed: errors"):
        linear.run(shapes=[(5, 7, 4)], dtypes=["float32"], directions=["forward"])


def test_slow_rungs_are_left_out(on_the_cpu, monkeypatch):
    monkeypatch.setattr(linear, "_once", lambda candidate: 2 * linear.LONGEST_CALL)
    (record,) = linear.run(shapes=[(2, 3, 4)], dtypes=["bfloat16"], directions=["forward"])
    assert record["left_out"] and [row["label"] for row in record["rows"]] == ["cuBLAS"]


def test_settings_are_put_back(on_the_cpu, monkeypatch):
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    monkeypatch.setattr(linear, "_row", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        linear.run(shapes=[(2, 3, 4)], dtypes=["float32"])
    assert matmul.allow_tf32 is before


def test_the_peak_of_an_h200():
    found = peaks.peaks_of((9, 0), 132, 1_980_000)
    assert found == {"fma": 66.9, "tf32": 535.3, "float16": 1070.5, "bfloat16": 1070.5,
                     "split": 178.4}  # fmt: skip
    assert "split" not in peaks.peaks_of((7, 5), 40, 1_590_000)
    assert peaks.peaks_of((12, 7), 1, 1) == {}


# ------------------------------------------------------------------------------- layers


def test_every_layer_is_checked_and_timed(on_the_cpu):
    found = layers.run(rounds=2, dtypes=["float32"])
    hashes = layers.kernel_hashes()
    assert {record["name"] for record in found} == set(hashes)
    for record in found:
        labels = [row["label"] for row in record["rows"]]
        assert record["kernel_hash"] == hashes[record["name"]] and record["default"] in labels
        n = 4
        for size in record["shape"]:
            n *= size
        operation, direction = record["name"].split(".")[:2]
        if operation == "batch_norm":
            assert record["bytes"] == {"forward": 3, "backward": 5, "inference": 2}[direction] * n
        elif operation == "max_pool2d":  # y is a quarter of x, and an index has one byte
            assert record["bytes"] == n + n // 4 + n // 16 and "PyTorch eager" in labels
        else:
            assert labels == ["ours", "PyTorch foreach", "PyTorch fused"]
            assert record["bytes"] == {"sgd": 5, "adamw": 7}[operation] * 4 * 17
            assert all(row["python_microseconds"] == 10 for row in record["rows"])
    assert "% of copy" in benchmarks.table(found)


def test_bfloat16_is_checked_too(on_the_cpu):
    found = layers.run(rounds=2, dtypes=["bfloat16"])
    assert {record["dtype"] for record in found} == {"bfloat16"}
    assert not any(record["name"].endswith(".step") for record in found)


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_wrong_pooling_is_not_timed(on_the_cpu, monkeypatch, which):
    right = getattr(max_pool2d, which)

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        (found[0] if which == "forward" else found)[0, 3, 1, 1] += 0.5
        return found

    monkeypatch.setattr(max_pool2d, which, wrong)
    with pytest.raises(AssertionError, match="is wrong, so it is not timed"):
        layers.run(names=["max_pool2d"], dtypes=["float32"])


@pytest.mark.parametrize("which", ["forward", "backward", "inference"])
def test_wrong_batch_norm_is_not_timed(on_the_cpu, monkeypatch, which):
    right = getattr(layers.batch_norm, which)

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        (found if which == "inference" else found[0])[0, 0, 1, 1] += 0.5
        return found

    monkeypatch.setattr(layers.batch_norm, which, wrong)
    with pytest.raises(AssertionError, match="is wrong, so it is not timed"):
        layers.run(names=["batch_norm"], dtypes=["float32"])


def test_a_wrong_step_is_not_timed(on_the_cpu, monkeypatch):
    class Wrong(torch.optim.SGD):
        def step(self):
            super().step()
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1e-3)

    monkeypatch.setattr(layers.optim, "SGD", Wrong)
    with pytest.raises(AssertionError, match="ours of sgd.step, beside .* is wrong"):
        layers.run(names=["sgd"])


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_bench_layers_on_a_gpu(monkeypatch):
    monkeypatch.setattr(layers, "POOLED", [(32, 64, 26, 26)])
    monkeypatch.setattr(layers, "NORMALISED", [(32, 64, 26, 26)])
    monkeypatch.setattr(layers, "PARAMETERS", layers.PARAMETERS[1:])
    found = layers.run(rounds=2) + linear.run(shapes=[(32, 3200, 256)], rounds=2)
    assert {record["name"] for record in found} >= set(layers.kernel_hashes())
    assert any("cuDNN" in [row["label"] for row in record["rows"]] for record in found)
