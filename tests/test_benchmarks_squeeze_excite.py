"""The benchmark of squeeze and excitation: its sizes, what it checks, what it times and records."""

import importlib
import math

import numpy as np
import pytest
import torch
import torchvision

from course_lib import SIMULATED, bench, benchmarks, reference, results_table
from course_lib.benchmarks import profile_squeeze_excite as profile
from course_lib.benchmarks import squeeze_excite as benchmark
from course_lib.benchmarks import squeeze_excite_checks as checks
from course_lib.kernels import squeeze_excite as kernels

operator = importlib.import_module("course_lib.ops.squeeze_excite")
SHAPE = (2, 5, 3, 3)


def compute_by_torch(monkeypatch):
    """Let PyTorch compute what the launchers give: they have tests, and are slow when simulated."""

    def forward(*inputs, activation, gate, variant=None, out=None):
        y, *saved = operator._by_torch(*inputs, activation, gate)
        return (y if out is None else out.copy_(y)), *saved

    def backward(*inputs, activation, gate, variant=None, out=None):
        dx, *gradients = operator._backward_by_torch(*inputs, activation, gate)
        return (dx if out is None else out.copy_(dx)), *gradients

    monkeypatch.setattr(kernels, "forward", forward)
    monkeypatch.setattr(kernels, "backward", backward)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Let the benchmark run without a GPU, with made-up times."""
    if not SIMULATED:
        pytest.skip("about machines without a GPU")
    compute_by_torch(monkeypatch)

    def times(candidates, *, calls, rounds):
        assert calls.keys() == candidates.keys() and min(calls.values()) >= 1
        for candidate in candidates.values():
            for i in range(3):
                candidate(i)
        return {label: bench.Timing(10.0, (9.0, 11.0)) for label in candidates}

    allocated = iter(range(0, 10**9, 10**4))
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    monkeypatch.setattr(benchmark, "_synchronize", lambda: None)
    monkeypatch.setattr(benchmark, "_allocated", lambda: next(allocated))
    monkeypatch.setattr(benchmark, "COMPILED", {(SHAPE[0], "float32")})
    nothing = lambda i: None  # noqa: E731
    monkeypatch.setattr(benchmark, "copies", lambda *_: dict.fromkeys(("copy", "negate"), nothing))
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    monkeypatch.setattr(bench, "buffer_sets", lambda n_bytes, most: 2)
    monkeypatch.setattr(bench, "device_times", times)
    monkeypatch.setattr(bench, "loop_times", times)


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


@pytest.mark.parametrize("ladder", [True, False])
def test_every_rung_module_and_peer_is_checked_and_timed(on_the_cpu, monkeypatch, ladder):
    monkeypatch.setattr(benchmark, "LADDER", [SHAPE] if ladder else [])
    rungs = [*(kernels.VARIANTS if ladder else ()), kernels.DEFAULT]
    found = benchmark.run(shapes=[SHAPE], dtypes=benchmark.DTYPES if ladder else ["bfloat16"])
    names = [
        f"squeeze_excite.{direction}{layout}"
        for _ in range(2 if ladder else 1)
        for layout in ("", ".channels-last")
        for direction in ("forward", "both")
    ]
    assert [record["name"] for record in found] == names
    hashes = benchmark.kernel_hashes()
    assert hashes.keys() == {*names, "squeeze_excite.profile"} and len(set(hashes.values())) == 3
    for record in found:
        rows = {row["label"]: row for row in record["rows"]}
        forward, last = ".forward" in record["name"], record["name"].endswith("last")
        compiled = record["dtype"] == "float32" and not last
        other = "contiguous" if last else "channels-last"
        assert list(rows) == [
            *rungs, "PyTorch eager", f"PyTorch eager, {other}",
            *["torch.compile"] * compiled,
        ]  # fmt: skip
        seen = {label for label, row in rows.items() if "python_microseconds" in row}
        assert seen == rows.keys() - set(rungs) | {kernels.DEFAULT}
        assert record["kernel_hash"] == hashes[record["name"]]
        size = 4 if record["dtype"] == "float32" else 2
        assert record["bytes"] == (2 if forward else 5) * math.prod(SHAPE) * size
        assert record["default"] == kernels.DEFAULT and record["squeeze_channels"] == 1
        assert ("saved_bytes" in record) is not forward
        assert (record["compile_seconds"] is not None) is compiled
        if not forward:
            saved = 10**4 - math.prod(SHAPE) * size
            assert record["saved_bytes"] == {"ours": saved, "PyTorch eager": saved}
    text = benchmarks.table(found)
    assert "squeeze_excite.both 2x5x3x3 bfloat16: copy" in text and "(10.00 from Python)" in text


def test_the_truth_is_the_references(on_the_cpu, monkeypatch):
    monkeypatch.setattr(checks, "CHUNK", 100)  # some images at a time
    block = benchmark.Block((5, 7, 3, 4), "float32", "contiguous", 1)
    arrays = [t.double().numpy() for t in (block.dy["contiguous"][0], block.x["contiguous"][0])]
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


def test_the_launchers_are_called_as_they_want_to_be(monkeypatch):
    if not SIMULATED:
        pytest.skip("about machines without a GPU")
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    block = benchmark.Block((1, 3, 2, 2), "float32", "contiguous", 1)
    expected = checks.Expected(block, "both")
    block.poison()
    expected.check("separate", block.rung("separate", "both")(0), ours=True)


@pytest.mark.parametrize(
    "which, k",
    [
        ("forward", 0),
        ("backward", 0),
        ("backward", 1),
        ("backward", 4),
    ],
)
@pytest.mark.parametrize("change, said", [(1.1, "is wrong"), (math.nan, "left elements")])
def test_what_is_wrong_is_not_timed(on_the_cpu, monkeypatch, which, k, change, said):
    original = getattr(kernels, which)

    def wrong(*arguments, **options):
        results = original(*arguments, **options)
        results[k].view(-1)[-1] *= change
        return results

    monkeypatch.setattr(kernels, which, wrong)
    first = kernels.DEFAULT
    with pytest.raises(AssertionError, match=f"{first} {said}.*, so it is not timed"):
        benchmark.run(
            shapes=[SHAPE], dtypes=["float32"], directions=["both"], layouts=["contiguous"]
        )


def test_a_launcher_that_writes_nothing_is_seen(on_the_cpu, monkeypatch):
    def lazy(x, *weights, out, **options):
        return out, None, None, None

    monkeypatch.setattr(kernels, "forward", lazy)
    with pytest.raises(AssertionError, match="left elements of y unwritten"):
        benchmark.run(shapes=[SHAPE], dtypes=["float32"], directions=["forward"])


def test_a_wrong_peer_is_not_timed(on_the_cpu, monkeypatch):
    monkeypatch.setattr(torchvision.ops.SqueezeExcitation, "forward", lambda self, x: x.clone())
    with pytest.raises(AssertionError, match="PyTorch eager is wrong, so it is not timed: y"):
        benchmark.run(shapes=[SHAPE], dtypes=["bfloat16"], directions=["forward"])


def test_settings_are_put_back(on_the_cpu, monkeypatch):
    before = torch.backends.cudnn.benchmark
    monkeypatch.setattr(benchmark, "_measure", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        benchmark.run(shapes=[SHAPE])
    assert torch.backends.cudnn.benchmark is before


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
    assert profile.labels() == [*kernels.VARIANTS, kernels.DEFAULT, "PyTorch eager"]


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


def test_profile_in_other_units(tmp_path):
    units = ("us", "Kbyte", "Mbyte")
    rows = profile.read(profiled(tmp_path / "ncu.csv", units=units), 60 << 20)
    first = next(iter(rows.values()))[0]
    assert (first["microseconds"], first["dram_read_bytes"]) == (3000, 6e10)


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


def test_the_markers_are_where_they_should_be(on_the_cpu, monkeypatch):
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
    profile.launch_all()
    assert seen == ["call", "call", "marker", "call", "marker"] * len(profile.labels())


def test_without_a_gpu_the_profile_says_so(capsys):
    assert profile.main(["--metrics"]) == 0
    assert capsys.readouterr().out.count("dram__bytes") == 2
    if SIMULATED:
        assert profile.main(["--launch"]) == 1
        assert "need one" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_bench_squeeze_excite_on_a_gpu(monkeypatch):
    monkeypatch.setattr(benchmark, "COMPILED", {(2, "float32")})
    found = benchmark.run(shapes=[(2, 24, 19, 19)], rounds=3)
    assert len(found) == 8
    for record in found:
        for row in record["rows"]:
            assert 0 < row["microseconds"] < 1e4
        if record["name"] == "squeeze_excite.both":
            assert 0 <= record["saved_bytes"]["ours"] <= record["saved_bytes"]["PyTorch eager"]


# ------------------------------------------------------------------- what is promised


#: (direction, peer, clock) -> the least geometric mean of speed-ups, and the least of all. What was
#: reached so far, a little below what was measured; the aim is 2.75 and 1.5 against PyTorch eager,
#: 1.5 against torch.compile. What Python sees varies with the host.
REACHED = {
    ("forward", "PyTorch eager", "on the device"): (2.0, 1.5),
    ("forward", "PyTorch eager", "as seen from Python"): (2.5, 1.5),
    ("both", "PyTorch eager", "on the device"): (2.4, 1.8),
    ("both", "PyTorch eager", "as seen from Python"): (1.5, 1.1),
    ("forward", "torch.compile", "on the device"): (1.2, 1.0),
    ("forward", "torch.compile", "as seen from Python"): (3.2, 1.3),
    ("both", "torch.compile", "on the device"): (1.4, 1.0),
    ("both", "torch.compile", "as seen from Python"): (2.2, 1.6),
}
CLOCKS = {"on the device": "", "as seen from Python": "python_"}


def broken_promises(records):
    """What the records of squeeze and excitation do not keep together, as sentences."""
    for (direction, peer, clock), (least_mean, least) in REACHED.items():
        found = bench.find({"records": records}, name=f"squeeze_excite.{direction}")
        ratios = results_table.block_speedups(found, peer, CLOCKS[clock])
        mean = math.exp(np.mean(np.log(ratios))) if ratios else math.inf
        if not mean >= least_mean:
            yield f"{direction}, {peer}, {clock}: {mean:.2f} in the mean"
        if not min(ratios, default=math.inf) >= least:
            yield f"{direction}, {peer}, {clock}: {min(ratios):.2f} at least"
    for direction in ("forward", "both"):
        for record in bench.find({"records": records}, name=f"squeeze_excite.{direction}"):
            # 16 bits: we save float32 sums all the same, PyTorch 16-bit numbers.
            saved = record.get("saved_bytes")
            if saved and record["dtype"] == "float32":
                if not saved["ours"] <= saved["PyTorch eager"]:
                    yield f"{record['shape']} {record['dtype']} saves more than PyTorch"
    for record in bench.find({"records": records}, name=profile.NAME):
        for ours in [row for row in record["rows"] if row["label"] in ("fused", "auto")]:
            if not ours["sizes_of_x"] <= 2.4:
                yield f"{record['shape']} {record['dtype']} moves {ours['sizes_of_x']} sizes of x"


def test_recorded_squeeze_excite_keeps_what_the_course_promises():
    records = bench.load_records("NVIDIA H200")["records"]
    assert list(broken_promises(records)) == []
    # All or nothing: where some are recorded, none of those that are promised is missing.
    measured = {
        (record["name"], *record["shape"], record["dtype"])
        for record in records
        if record["name"] in ("squeeze_excite.forward", "squeeze_excite.both")
    }
    promised = {
        (f"squeeze_excite.{direction}", N, C, side, side, dtype)
        for direction in benchmark.DIRECTIONS
        for N in benchmark.BATCHES
        for C, side, _ in benchmark.SIZES
        for dtype in benchmark.DTYPES
    }
    assert not measured or promised <= measured


def made_up(eager=30.0, compiled=15.0, saved=10):
    def row(label, device, python):
        return {"label": label, "microseconds": device, "python_microseconds": python,
                "kind": "ours" if label == "fused" else "peer"}  # fmt: skip

    return {
        "name": "squeeze_excite.both", "shape": [1, 2, 3, 3], "dtype": "float32",
        "default": "fused", "saved_bytes": {"ours": saved, "PyTorch eager": 10},
        "rows": [row("fused", 10.0, 10.0), row("PyTorch eager", 30.0, eager),
                 row("torch.compile", compiled, 25.0)],
    }  # fmt: skip


def test_a_broken_promise_is_seen():
    moved = {"name": profile.NAME, "shape": [32, 2], "dtype": "float32", "default": "fused",
             "rows": [{"label": "fused", "sizes_of_x": 2.4}]}  # fmt: skip
    assert list(broken_promises([made_up(), moved])) == []
    assert list(broken_promises([made_up(eager=13.0)])) == [
        "both, PyTorch eager, as seen from Python: 1.30 in the mean"]  # fmt: skip
    assert list(broken_promises([made_up(eager=1000.0), made_up(eager=8.0)])) == [
        "both, PyTorch eager, as seen from Python: 0.80 at least"]  # fmt: skip
    assert list(broken_promises([made_up(compiled=10.0)])) == [
        "both, torch.compile, on the device: 1.00 in the mean"]  # fmt: skip
    assert list(broken_promises([made_up(saved=11)])) == [
        "[1, 2, 3, 3] float32 saves more than PyTorch"]  # fmt: skip
    moved["rows"][0]["sizes_of_x"] = 2.5
    assert list(broken_promises([moved])) == ["[32, 2] float32 moves 2.5 sizes of x"]
