"""The benchmarks of transposed convolution and of segmentation's losses, without a GPU."""

import math

import pytest
import torch

from course_lib import SIMULATED, bench, benchmarks, cli
from course_lib.benchmarks import conv_transpose2d, segmentation_loss
from course_lib.kernels import conv_transpose2d as kernels
from course_lib.kernels import dice

SHAPE = (1, 4, 4, 4)


def times(candidates, *, calls, rounds):
    for candidate in candidates.values():
        candidate(1)
    return {label: bench.Timing(10.0, (9.0, 11.0)) for label in candidates}


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Let the benchmarks run without a GPU, with made-up times and without compiling."""
    if not SIMULATED:
        pytest.skip("about machines without a GPU")
    stand_ins = dict.fromkeys(("copy", "negate"), lambda i: None)
    for benchmark in (conv_transpose2d, segmentation_loss):
        monkeypatch.setattr(benchmark, "DEVICE", "cpu")
        monkeypatch.setattr(benchmark, "copies", lambda n_bytes, sets: stand_ins)
        monkeypatch.setattr(benchmark, "kernel_hashes", lambda: Hashes())
    monkeypatch.setattr(segmentation_loss, "peak_memory", lambda *case: {"ours": 1})
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(bench, "buffer_sets", lambda n_bytes: 2)
    monkeypatch.setattr(bench, "device_times", times)


class Hashes(dict):
    def __missing__(self, name):
        return "hash"


def test_every_transposed_convolution_is_checked_and_its_error_kept(on_the_cpu, monkeypatch):
    monkeypatch.setattr(conv_transpose2d, "LADDER", [SHAPE])
    found = conv_transpose2d.run(shapes=[SHAPE], dtypes=["float32"], directions=["forward"],
                                 rounds=2)  # fmt: skip
    exact, tf32 = found
    assert exact["name"] == "conv_transpose2d.forward" and tf32["name"].endswith(".tf32")
    peers = ["cuDNN", "cuDNN, channels-last", "torch.compile"]
    assert [row["label"] for row in exact["rows"]] == [*kernels.VARIANTS, "ours", *peers]
    assert exact["flops"] == 2 * 16 * 4 * 16 and not exact["left_out"]
    assert exact["bytes"] == 4 * (64 + 64 + 256)
    for row in exact["rows"]:
        assert 0 <= row["error"] < 1e-5 and row["percent_of_copy"] > 0
        assert row["kind"] == ("peer" if row["label"] in peers else "ours")
    assert "TFLOP/s" in benchmarks.table(found)
    assert {"conv_transpose2d", "segmentation_loss"} <= set(cli.BENCHMARKS)
    for way in ("dx", "dweight"):
        (record,) = conv_transpose2d.run(shapes=[SHAPE], dtypes=["bfloat16"], directions=[way],
                                         rounds=2)  # fmt: skip
        assert record["layout"] == "channels-last" and record["rows"][0]["error"] < 6e-3


def test_every_loss_is_checked(on_the_cpu):
    found = segmentation_loss.run(shapes=[(1, 3, 4, 8)], rounds=2)
    assert [(record["name"], record["dtype"]) for record in found] == [
        (f"segmentation_loss.{loss}.{way}", dtype)
        for dtype in ("float32", "bfloat16")
        for loss in ("cross_entropy", "dice")
        for way in ("forward", "both")
    ]
    for record in found:
        labels = ["ours", "PyTorch eager", "torch.compile"]
        assert [row["label"] for row in record["rows"]] == labels
    assert found[0]["bytes"] == 96 * 4 + 32 * 8 and found[1]["bytes"] == 3 * 96 * 4 + 2 * 32 * 8


def test_what_is_wrong_is_not_timed(on_the_cpu, monkeypatch):
    forward = kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *a, **o: forward(*a, **o) * 1.01)
    with pytest.raises(AssertionError, match="ours is wrong, so it is not timed"):
        conv_transpose2d.run(shapes=[SHAPE], dtypes=["float32"], directions=["forward"], rounds=2)
    backward = dice.backward
    monkeypatch.setattr(dice, "backward", lambda *a, **o: backward(*a, **o) * math.nan)
    with pytest.raises(AssertionError, match="ours is wrong, so it is not timed"):
        segmentation_loss.run(shapes=[(1, 3, 4, 8)], dtypes=["float32"], rounds=2)
