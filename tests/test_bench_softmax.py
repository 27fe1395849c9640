"""The benchmark of softmax: what it checks, times, leaves out; its peer in Triton; `--shapes`."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from course_lib import SIMULATED, bench, benchmarks, cli
from course_lib.benchmarks import softmax as softmax_benchmark
from course_lib.kernels import softmax


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Let the benchmark run without a GPU: on the CPU, with made-up times. Gives the calls."""
    seen = {}

    def device_times(candidates, *, calls, rounds):
        for label, candidate in candidates.items():
            for i in range(3):
                candidate(i)
            seen[label] = calls[label] if isinstance(calls, dict) else calls
        return {label: bench.Timing(10.0 + k, (9.0, 99.0)) for k, label in enumerate(candidates)}

    def call_times(candidates):
        return {label: (call(), bench.Timing(50.0, (9.0, 99.0)))[1]
                for label, call in candidates.items()}

    def triton(log, inputs, outputs):
        peer = torch.log_softmax if log else torch.softmax
        return {"Triton": lambda i: outputs[i % 3].copy_(peer(*inputs[i % 3], -1))}

    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device=None: randn(*shape))
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    monkeypatch.setattr(bench, "buffer_sets", lambda n_bytes: 3)
    monkeypatch.setattr(bench, "device_times", device_times)
    monkeypatch.setattr(bench, "call_times", call_times)
    monkeypatch.setattr(softmax_benchmark, "_once", lambda candidate: (candidate(0), 500.0)[1])
    monkeypatch.setattr(softmax_benchmark, "LOG_SHAPES", [(5, 40)])
    monkeypatch.setattr(softmax_benchmark, "SHORTEST_SPLIT", 300)
    monkeypatch.setattr(softmax_benchmark.softmax_table, "SHAPE", (3, 20))
    monkeypatch.setattr(softmax_benchmark, "_triton", triton)
    return seen


needs_simulator = pytest.mark.skipif(not SIMULATED, reason="about machines without a GPU")


@needs_simulator
def test_bench_softmax_checks_and_times_every_rung_and_peer(on_the_cpu):
    found = softmax_benchmark.run(shapes=[(5, 40), (2, 300)], dtypes=["float32"])
    by_name = {(record["name"], *record["shape"]): record for record in found}
    assert len(found) == 7
    forward = by_name["softmax.forward", 2, 300]
    labels = [row["label"] for row in forward["rows"]]
    assert labels == [*softmax.softmax.VARIANTS, "PyTorch eager", "torch.compile", "Triton"]
    assert forward["default"] == "registers" and forward["left_out"] == {}
    assert forward["bytes"] == 2 * 4 * 600
    assert on_the_cpu["registers"] == 10  # as many calls as fit a replay of 5 ms
    backward = by_name["log_softmax.backward", 5, 40]
    assert [row["label"] for row in backward["rows"]][-1] == "PyTorch eager"
    assert backward["bytes"] == 3 * 4 * 200
    assert list(backward["left_out"]) == ["split"]
    table = by_name["softmax.table", 3, 20]
    assert [row["kind"] for row in table["rows"]] == ["peer", "peer", "ours", "ours"]
    assert table["rows"][0]["speedup"] == 1.0
    hashes = softmax_benchmark.kernel_hashes()
    assert all(record["kernel_hash"] == hashes[record["name"]] for record in found)
    text = benchmarks.table(found)
    assert "    without split: it is for rows of 300 elements and more" in text
    assert "50.00 from Python" in text


@needs_simulator
def test_bench_softmax_leaves_out_what_takes_too_long_and_says_so(on_the_cpu, monkeypatch):
    monkeypatch.setattr(softmax_benchmark, "_once", lambda candidate: 60_000.0)
    (found,) = softmax_benchmark.run(names=["softmax.backward"], shapes=[(3, 40)],
                                     dtypes=["float32"])  # fmt: skip
    assert [row["label"] for row in found["rows"]] == ["PyTorch eager"]
    assert found["left_out"]["naive"] == "a call takes 60 ms"


@needs_simulator
@pytest.mark.parametrize("wrong", [
    lambda y: y.mul_(1.00002),
    lambda y: y[-1, -1].fill_(0.0),
    lambda y: y[1].fill_(torch.nan),
], ids=["a little", "the last element", "a row left out"])
def test_bench_softmax_times_nothing_wrong(on_the_cpu, monkeypatch, wrong):
    right = softmax.softmax.forward

    def forward(x, *, variant=softmax.DEFAULT, out=None):
        y = right(x, variant=variant, out=out)
        if variant == "warp":
            wrong(y)
        return y

    monkeypatch.setattr(softmax.softmax, "forward", forward)
    with pytest.raises(AssertionError, match="warp .*, so it is not timed"):
        softmax_benchmark.run(names=["softmax.forward"], shapes=[(3, 40)], dtypes=["float32"])
    assert not on_the_cpu


INTERPRETED = """
import torch
from course_lib.benchmarks import softmax_triton

for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3)):
    for n_rows, n_cols in ((5, 200), (3, 1)):
        x = (3 * torch.randn(n_rows, n_cols)).to(dtype)
        for log, peer in ((False, torch.softmax), (True, torch.log_softmax)):
            for found in softmax_triton.settings(n_rows, n_cols, 4, 1):
                y = torch.full_like(x, torch.nan)
                softmax_triton.run(x, y, **found, log=log)
                expected = peer(x.double(), -1)
                assert (y - expected).abs().max() <= tolerance * expected.abs().max(), found
few = {"n_programs": 2, "num_warps": 1, "stages": 2}  # each takes several rows
softmax_triton.run(x, y.fill_(torch.nan), **few, log=False)
assert torch.equal(y, torch.ones_like(y))
"""


no_triton = importlib.util.find_spec("triton") is None
needs_triton = pytest.mark.skipif(no_triton, reason="Triton is not installed")


@needs_triton
def test_the_kernel_in_triton_is_softmax():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=bench.RESULTS_FOLDER.parent.parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@needs_triton
def test_triton_is_given_settings_that_fit():
    from course_lib.benchmarks.softmax_triton import MOST_STAGE_BYTES, settings

    for n_rows, n_cols in softmax_benchmark.SHAPES:
        for itemsize in (2, 4):
            found = list(settings(n_rows, n_cols, itemsize, 132))
            assert found and found[0]["stages"] == 1 and found[0]["n_programs"] == n_rows
            block = 1 << (n_cols - 1).bit_length()
            for one in found[1:]:
                assert one["num_warps"] <= 32 and one["n_programs"] <= n_rows
                assert one["stages"] == 1 or (
                    one["stages"] * block * itemsize <= MOST_STAGE_BYTES)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_bench_softmax_on_a_gpu():
    found = softmax_benchmark.run(shapes=[(256, 1000)], dtypes=["bfloat16"], rounds=3)
    forward, backward, table = found
    labels = {row["label"] for row in forward["rows"]}
    assert labels >= {"naive", "registers", "PyTorch eager", "torch.compile", "Triton"}
    assert backward["name"] == "softmax.backward" and table["name"] == "softmax.table"
    for row in table["rows"]:
        assert 0 < row["microseconds"] <= row["python_microseconds"] * 1.5


def test_bench_softmax_refuses_other_shapes():
    with pytest.raises(ValueError, match="rows, columns"):
        softmax_benchmark.run(shapes=[(2, 3, 4)])


@pytest.mark.parametrize("name, wanted, said", [
    ("lesson_01", {"shapes": [(3, 4)]}, "no choice of --shapes"),
    ("launch", {"dtypes": ["float32"]}, "no choice of --dtypes"),
    ("softmax", {"shapes": [(3, 4, 5)]}, "a shape has 2 positive sizes here; not 3x4x5"),
    ("softmax", {"shapes": [(0, 4)]}, "not 0x4"),
    ("activation", {"dtypes": ["int8"]}, "float32, float16, bfloat16; not int8"),
    ("activation", {"shapes": [(3, 4, 5), (7,)], "dtypes": ["float16"], "rounds": 3}, None),
    ("softmax", {"shapes": [(3, 4)]}, None),
    ("softmax", {"rounds": 1}, "two rounds at least; not 1"),
    ("global_avg_pool", {"shapes": [(3, 4)]}, "4 positive sizes"),
])
def test_what_a_benchmark_does_not_take(name, wanted, said):
    benchmark = importlib.import_module(f"course_lib.benchmarks.{name}")
    refused = benchmarks.refused(benchmark, wanted)
    assert refused is None if said is None else said in refused


@needs_simulator
def test_without_a_gpu_bench_says_so(capsys):
    assert cli.main(["bench", "softmax", "--shapes", "128x200,1024x10000"]) == 1
    assert "Speed is measured on a GPU" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "softmax", "--shapes", "128x200,"])
    assert stopped.value.code == 2
