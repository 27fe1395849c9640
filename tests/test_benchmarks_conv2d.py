"""The benchmarks of convolutions, without a GPU."""

import pytest
import torch

from course_lib import SIMULATED, bench, benchmarks, cli
from course_lib.benchmarks import conv2d, lesson_09
from course_lib.kernels import conv2d as kernels

SHAPE = (1, 2, 3, 4)


def times(candidates, *, calls, rounds):
    for candidate in candidates.values():
        candidate(1)
    return {label: bench.Timing(10.0, (9.0, 11.0)) for label in candidates}


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Let the benchmarks run without a GPU, with made-up times."""
    if not SIMULATED:
        pytest.skip("about machines without a GPU")
    for benchmark in (conv2d, lesson_09):
        monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    monkeypatch.setattr(conv2d, "_synchronize", lambda: None)
    monkeypatch.setattr(conv2d, "_once", lambda candidate: 100.0)
    monkeypatch.setattr(conv2d, "_peaks", lambda: {"fma": 66.9})
    monkeypatch.setattr(bench, "buffer_sets", lambda n_bytes: 2)
    monkeypatch.setattr(bench, "device_times", times)


def compute_by_torch(monkeypatch):
    """Let PyTorch compute what the launchers give: they have tests, and are slow when simulated."""

    def forward(x, weight, *, padding, precision, variant):
        return conv2d.theirs(x, weight, None, "forward")

    def backward(dy, x, weight, *, padding, precision, variant, with_bias, needs):
        directions = zip(("dx", "dweight"), needs, strict=False)
        return [conv2d.theirs(x, weight, dy, each) if need else None for each, need in directions]

    monkeypatch.setattr(kernels, "forward", forward)
    monkeypatch.setattr(kernels, "backward", backward)


def test_every_convolution_is_checked_and_its_error_kept(on_the_cpu, monkeypatch):
    compute_by_torch(monkeypatch)
    monkeypatch.setattr(conv2d, "LADDER", [SHAPE])
    found = conv2d.run(shapes=[SHAPE], rounds=2)
    assert [record["name"] for record in found] == [
        f"conv2d.{way}{suffix}"
        for suffix in ("", ".tf32", ".channels-last")
        for way in ("forward", "dx", "dweight")
    ]
    rungs = [rung for rung in kernels.VARIANTS if rung not in ("depthwise", "few_channels")]
    hashes = conv2d.kernel_hashes()
    for record in found:
        assert record["kernel_hash"] == hashes[record["name"]] and not record["left_out"]
        assert record["flops"] == 2 * 3 * 4 * 4 * 2 * 9 and record["default"] == "ours"
        size = 2 if record["dtype"] == "bfloat16" else 4
        assert record["bytes"] == (2 * 16 + 3 * 2 * 9 + 3 * 16) * size
        assert record["limit"] in ("fma", "tf32", "bfloat16")
        exact = record["precision"] == "float32" and record["dtype"] == "float32"
        other = "contiguous" if record["dtype"] == "bfloat16" else "channels-last"
        labels = [*(rungs if exact else []), "ours", "cuDNN", f"cuDNN, {other}"]
        assert [row["label"] for row in record["rows"]] == labels
        for row in record["rows"]:
            assert 0 <= row["error"] < (1e-5 if exact else 6e-3)
            assert row["kind"] == ("peer" if row["label"].startswith("cuDNN") else "ours")
    assert "TFLOP/s" in benchmarks.table(found)
    assert {"conv2d", "lesson_09"} <= set(cli.BENCHMARKS)


def test_our_launchers_are_what_is_called(on_the_cpu):
    found = conv2d.run(shapes=[SHAPE], dtypes=["float32"], directions=["dweight"], rounds=2)
    assert [row["label"] for row in found[0]["rows"]][0] == "ours"


def test_a_wrong_convolution_is_not_timed(on_the_cpu, monkeypatch):
    compute_by_torch(monkeypatch)
    forward = kernels.forward

    def wrong(*arguments, **options):
        y = forward(*arguments, **options)
        y[0, 1, 2, 3] += 0.01
        return y

    monkeypatch.setattr(kernels, "forward", wrong)
    with pytest.raises(AssertionError, match="ours is wrong, so it is not timed: error"):
        conv2d.run(shapes=[SHAPE], dtypes=["float32"], directions=["forward"])
    monkeypatch.setattr(
        kernels, "forward", lambda x, *_, **__: torch.full_like(x, torch.nan)[:, :1]
    )
    with pytest.raises(AssertionError, match="nan"):
        conv2d.run(shapes=[SHAPE], dtypes=["float32"], directions=["forward"])


def test_rungs_that_refuse_or_take_too_long_are_left_out(on_the_cpu, monkeypatch):
    compute_by_torch(monkeypatch)

    def refuse(*_, **__):
        raise ValueError("variant 'x' takes nothing")

    monkeypatch.setattr(kernels, "forward", refuse)
    (record,) = conv2d.run(shapes=[SHAPE], dtypes=["bfloat16"], directions=["forward"])
    assert record["left_out"] == {"ours": "variant 'x' takes nothing"}
    assert "without ours: variant 'x'" in benchmarks.table([record])
    monkeypatch.setattr(conv2d, "_once", lambda candidate: 2 * conv2d.LONGEST_CALL)
    (record,) = conv2d.run(shapes=[SHAPE], dtypes=["bfloat16"], directions=["dx"])
    assert record["left_out"] and [row["kind"] for row in record["rows"]] == ["peer", "peer"]


def test_settings_are_put_back(on_the_cpu, monkeypatch):
    compute_by_torch(monkeypatch)
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark
    monkeypatch.setattr(conv2d, "_row", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        conv2d.run(shapes=[SHAPE], dtypes=["float32"])
    assert (cudnn.allow_tf32, cudnn.benchmark) == before


def test_scattered_and_gathered(on_the_cpu):
    (record,) = lesson_09.run(shapes=[SHAPE], rounds=2)
    assert record["kernel_hash"] == lesson_09.kernel_hashes()[record["name"]]
    assert [row["label"] for row in record["rows"]] == ["scattered with atomics", "gathered"]
    assert record["rows"][1]["differing"] == 0


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_bench_conv2d_on_a_gpu():
    for record in conv2d.run(shapes=[(2, 8, 16, 12), *conv2d.LADDER], rounds=3):
        assert not record["left_out"]
        for row in record["rows"]:
            assert 0 < row["microseconds"] < 1e5
    (record,) = lesson_09.run(rounds=3)
    assert record["rows"][1]["differing"] == 0
