"""The benchmark of squeeze and excitation: its sizes, what it checks, what it times and records."""

import math

import numpy as np
import pytest
import torch
import torchvision
from benched import on_the_cpu  # noqa: F401 - a fixture

from course_lib import reference
from course_lib.benchmarks import profile_squeeze_excite as profile
from course_lib.benchmarks import squeeze_excite as benchmark
from course_lib.benchmarks import squeeze_excite_checks as checks
from course_lib.benchmarks.case import Make

SHAPE = (2, 5, 3, 3)


def blocks_of_efficientnet(side):
    """(C, H, W, R) of every block, in order, found by running torchvision's network on no data."""
    found = []

    def note(module, inputs):
        N, C, H, W = inputs[0].shape
        found.append((C, H, W, module.fc1.out_channels))
        assert isinstance(module.activation, torch.nn.SiLU)
        assert isinstance(module.scale_activation, torch.nn.Sigmoid)

    with torch.device("meta"):
        network = torchvision.models.efficientnet_b4().eval()
        for module in network.modules():
            if isinstance(module, torchvision.ops.SqueezeExcitation):
                module.register_forward_pre_hook(note)
        network(torch.empty(1, 3, side, side))
    return found


def test_the_sizes_are_those_of_the_network():
    found = blocks_of_efficientnet(380)
    assert len(found) == 32
    assert list(dict.fromkeys(found)) == [(C, side, side, R) for C, side, R in benchmark.SIZES]
    for C, side, R in benchmark.SIZES:
        assert benchmark.squeeze_channels(C, side) == R
    assert (benchmark.squeeze_channels(5, 7), benchmark.squeeze_channels(72, 9)) == (1, 3)
    shapes = {(N, C, side, side) for N in benchmark.BATCHES for C, side, _ in benchmark.SIZES}
    assert shapes.issuperset(benchmark.CHANNELS_LAST + benchmark.LADDER)


def test_the_truth_is_the_references(monkeypatch):
    monkeypatch.setattr(checks, "CHUNK", 100)  # some images at a time
    block = benchmark.Block((5, 7, 3, 4), "float32", "contiguous", 1, Make("cpu"))
    (one,) = block.sets
    arrays = [t["contiguous"].double().numpy() for t in (one.dy, one.x)]
    weights = [w.flatten(1).numpy() if w.dim() > 1 else w.numpy() for w in block.weights]
    y = reference.squeeze_excite(arrays[1], *weights)
    gradients = reference.squeeze_excite_backward(*arrays, *weights)
    expected = checks.Expected(block, "both")
    right = [torch.tensor(each) for each in (y, *gradients)]
    expected.check("the reference", right, ours=True)
    assert np.allclose([t.abs().max() for t in expected.sums.values()],
                       [np.abs(g).max() for g in gradients[1:]])  # fmt: skip
    for k in range(6):
        wrong = [each.clone() for each in right]
        wrong[k].view(-1)[-1] += 0.01 * wrong[k].abs().max()
        with pytest.raises(AssertionError, match="one is wrong, so it is not timed"):
            expected.check("one", wrong, ours=True)
        wrong[k].view(-1)[0] = math.nan
        with pytest.raises(AssertionError, match="left elements of .* unwritten"):
            expected.check("one", wrong, ours=True)
    with pytest.raises(AssertionError, match="one gave 2 results"):
        expected.check("one", right[:2], ours=True)


# --------------------------------------------------------------------- the profiler's table


def profiled(path, *, units=("ns", "byte", "byte"), segments=None, without=(), numbers="1,000"):
    """Write at `path` what ncu prints: of each call three kernels, then what follows it."""
    names = ["ID", "Kernel Name", *(m for m in profile.METRICS.values() if m not in without)]
    lines = ["==PROF== Connected", names, ["", "", *units]]
    kernels = ["elementwise"]
    n_calls = len(profile.cases(60 << 20)) * len(profile.labels())
    for _ in range(n_calls if segments is None else segments):
        kernels += ["warm", "course_lib::segment_marker_kernel_1", "a", "b", "c",
                    "_ZN6_21segment_marker_kernelB2v3", "next"]  # fmt: skip
    for number, name in enumerate(kernels):
        lines.append([str(number), name, numbers, "20,000,000", "10,000,000"])
    text = [each if isinstance(each, str) else ",".join(f'"{c}"' for c in each) for each in lines]
    path.write_text("\n".join(text))
    return path


def test_what_is_profiled_is_larger_than_the_cache():
    found = profile.cases(62_914_560)
    assert ((32, 48, 190, 190), "float32") in found and ((32, 960, 24, 24), "float32") in found
    assert ((32, 672, 24, 24), "float32") not in found and len(found) == 9
    assert profile.labels() == [*benchmark.EVERY_SIZE["contiguous"], "auto", "PyTorch eager"]


def test_profile_is_read(tmp_path):
    found = profile.read(profiled(tmp_path / "ncu.csv"), 60 << 20)
    assert list(found) == profile.cases(60 << 20)
    for (shape, dtype), rows in found.items():
        assert [row["label"] for row in rows] == profile.labels()
        assert {row["kernels"] for row in rows} == {3}
        assert rows[0]["microseconds"] == 3.0 and rows[0]["dram_read_bytes"] == 60_000_000
        n_bytes = math.prod(shape) * (4 if dtype == "float32" else 2)
        assert rows[0]["sizes_of_x"] == pytest.approx(90e6 / n_bytes, abs=1e-3)
        assert [row["kind"] for row in rows][-2:] == ["ours", "peer"]
    made = profile.records(found)
    assert {record["name"] for record in made} == {"squeeze_excite.profile"}
    assert made[0]["bytes"] == 32 * 48 * 190 * 190 * 4
    assert "32x48x190x190 float32" in profile.table(found)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"segments": 1}, "calls between markers"),
        ({"numbers": "nan"}, "gave no gpu__time"),
        ({"units": ("ns", "byte", "parsec")}, "'parsec'"),
        ({"without": ("dram__bytes_read.sum",)}, "has no dram__bytes_read.sum"),
    ],
)
def test_profile_that_is_not_what_it_should_be(tmp_path, change, says):
    with pytest.raises(ValueError, match=says):
        profile.read(profiled(tmp_path / "ncu.csv", **change), 60 << 20)
    (tmp_path / "none.csv").write_text("==PROF== nothing")
    with pytest.raises(ValueError, match="no table"):
        profile.read(tmp_path / "none.csv", 60 << 20)


def test_the_markers_are_where_they_should_be(on_the_cpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(profile, "cases", lambda l2_bytes: [(SHAPE, "float32")])
    monkeypatch.setattr(profile.device, "properties", lambda: type("P", (), {"l2_bytes": 1}))
    seen = []
    monkeypatch.setattr(profile, "launch", lambda kernel, *_: seen.append("marker"))
    for name in ("rung", "module"):
        original = getattr(benchmark.Block, name)

        def noted(*arguments, original=original):
            candidate = original(*arguments)
            return lambda i: (seen.append("call"), candidate(i))

        monkeypatch.setattr(benchmark.Block, name, noted)
    profile.launch_all("cpu")
    assert seen == ["call", "call", "marker", "call", "marker"] * len(profile.labels())


