"""The benchmark of softmax: its table for readers; peers in Triton, attention's too; `--shapes`."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from benched import on_the_cpu  # noqa: F401 - a fixture

from course_lib import SIMULATED, bench, benchmarks, cli
from course_lib.benchmarks import softmax as softmax_benchmark

needs_simulator = pytest.mark.skipif(not SIMULATED, reason="about machines without a GPU")


@needs_simulator
def test_the_readers_table(on_the_cpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
    monkeypatch.setattr(softmax_benchmark.softmax_table, "SHAPE", (3, 20))
    found = on_the_cpu(softmax_benchmark, (2, 30), names=["softmax.table"])
    (record,) = found
    assert [row["kind"] for row in record["rows"]] == ["peer", "peer", "ours", "ours"]
    assert record["rows"][0]["speedup"] == 1.0
    assert record["kernel_hash"] == softmax_benchmark.kernel_hashes()["softmax.table"]
    assert "50.00 from Python" in benchmarks.table(found)


INTERPRETED = """
import torch
from benched import on_the_cpu  # noqa: F401 - a fixture
from course_lib.benchmarks import attention_triton, softmax_triton

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

for T, D, tiles in ((1, 16, (16, 16)), (37, 16, (16, 32)), (64, 32, (32, 16))):
    qkv = torch.randn(3, 2, 2, T, D)
    for causal in (False, True):
        o = attention_triton.run(*qkv, causal=causal, tiles=tiles, num_warps=4, num_stages=2)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *qkv.double(), is_causal=causal)
        assert (o - expected).norm() <= 1e-6 * expected.norm(), (T, D, tiles, causal)
"""


no_triton = importlib.util.find_spec("triton") is None
needs_triton = pytest.mark.skipif(no_triton, reason="Triton is not installed")


@needs_triton
def test_the_kernels_in_triton_are_softmax_and_attention():
    paths = os.pathsep.join([os.path.dirname(__file__), os.environ["PYTHONPATH"]])
    there = {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=os.environ | there,
        cwd=bench.RESULTS_FOLDER.parent.parent, capture_output=True, text=True, timeout=250,
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


@pytest.mark.parametrize("name, wanted, said", [
    ("lesson_01", {"shapes": [(3, 4)]}, "no choice of --shapes"),
    ("launch", {"dtypes": ["float32"]}, "no choice of --dtypes"),
    ("launch", {"names": ["a"]}, "no choice of --names"),
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
