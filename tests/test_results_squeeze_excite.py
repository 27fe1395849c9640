"""The README's part on squeeze and excitation, drawn from records."""

import pytest
from test_cli import RECORDING

from course_lib import benchmarks, cli, results_table
from course_lib.benchmarks import pictures

DEVICE = {"name": "NVIDIA H200"}


def row(label, microseconds, python=None, kind="peer"):
    seen = {} if python is None else {"python_microseconds": python}
    return {"label": label, "kind": kind, "microseconds": microseconds} | seen


def block(direction="forward", N=1, dtype="float32", layout="", fused=10.0, compiled=None):
    rows = [
        row("separate", 20.0, kind="ours"), row("fused", fused, 2 * fused, "ours"),
        row("PyTorch eager", 40.0, 80.0), row("PyTorch eager, channels-last", 30.0, 100.0),
    ]  # fmt: skip
    rows += [row("torch.compile", compiled, compiled)] if compiled else []
    return {"name": f"squeeze_excite.{direction}{layout}", "shape": [N, 48, 190, 190],
            "dtype": dtype, "date": "2026-11-22", "default": "fused", "rows": rows}  # fmt: skip


PROFILE = {
    "name": "squeeze_excite.profile", "shape": [32, 48, 190, 190], "dtype": "float32",
    "date": "2026-11-22",
    "rows": [row("fused", 90.0) | {"sizes_of_x": 2.214}, row("PyTorch eager", 1.0) | {
        "sizes_of_x": 3.3}],
}  # fmt: skip
STEP = {
    "name": "efficientnet.step", "shape": [32, 3, 380, 380], "dtype": "bfloat16",
    "date": "2026-11-22", "ratio": 1.1628,
    "rows": [row("PyTorch eager", 100_000.0), row("ours", 86_000.0, kind="ours")],
    "amdahl": {"share": 0.183, "predicted_ratio": 1.1712, "measured_ratio": 1.2207},
}  # fmt: skip
CALLS = {
    "name": "kernel_cache.first_call", "shape": [8, 144, 95, 95], "dtype": "float32",
    "date": "2026-11-22",
    "rows": [row("softmax.forward, cold", 1.5e6, kind="ours") | {"speedup": 1.0},
             row("softmax.forward, warm", 2.5e3, kind="ours") | {"speedup": 600.0},
             row("torch.compile of it, cold", 9e6) | {"speedup": 1.0},
             row("torch.compile of it, warm", 3e6) | {"speedup": 3.0}],
}  # fmt: skip


def part(*records):
    return results_table.squeeze_excite([{"device": DEVICE, "records": list(records)}])


def test_the_faster_memory_format_of_the_peer_counts():
    assert results_table.block_speedups([block()], "PyTorch eager") == [3.0]
    assert results_table.block_speedups([block()], "PyTorch eager", "python_") == [4.0]
    assert results_table.block_speedups([block(), block(compiled=15.0)], "torch.compile") == [1.5]


def test_means_are_geometric_and_the_least_is_shown():
    found = part(block(), block(fused=40.0), block(N=8, compiled=15.0), block("both"),
                 block(layout=".channels-last", fused=1.0))  # fmt: skip
    assert "| forward | 1 | float32 | 2 | 1.50 (0.75) | 2.00 (1.00) | – | – |" in found
    assert "| forward | 8 | float32 | 1 | 3.00 (3.00) | 4.00 (4.00) | 1.50 (1.50) | 0.75" in found
    assert "| forward | all | all | 3 | 1.89 (0.75) |" in found
    assert "| forward + backward | all | all | 1 |" in found
    assert "**NVIDIA H200**, measured 2026-11-22" in found


def test_what_moves_and_what_the_network_gains():
    found = part(PROFILE, STEP, STEP | {"name": "efficientnet.inference", "amdahl": None})
    assert "| x | type | fused | PyTorch eager |" in found
    assert "| 32 × 48 × 190 × 190 | float32 | 2.21 | 3.30 |" in found
    assert "32 images of 380 × 380" in found
    assert "| training step | bfloat16 | 100.0 | 86.0 | 1.163 | 18.3% | 1.171 | 1.221 |" in found
    assert "| inference | bfloat16 | 100.0 | 86.0 | 1.163 |  |  |" in found


def test_first_calls():
    found = part(CALLS)
    assert "| softmax.forward | 1,500 | 2 | 600.0 |" in found
    assert "| torch.compile of it | 9,000 | 3,000 | 3.0 |" in found


def test_nothing_recorded_nothing_shown():
    assert results_table.squeeze_excite([]) == results_table.squeeze_excite([RECORDING]) == ""
    text = "<!-- squeeze-excite:begin -->old<!-- squeeze-excite:end -->"
    assert "\nNot measured yet.\n" in cli.with_results(text, [RECORDING])
    assert "| softmax.forward | 1,500" in cli.with_results(
        text, [{"device": DEVICE, "records": [CALLS]}])  # fmt: skip


@pytest.mark.parametrize("record", [PROFILE, STEP, CALLS])
def test_the_large_table_leaves_them_alone(record):
    assert results_table.render([{"device": DEVICE, "records": [record]}]) == ""


def test_records_become_pictures():
    figure = pictures.block_speedups([block(), block(N=8, fused=15.0)], "NVIDIA H200")
    assert "batch 1: 3.00 at 48 190²; batch 8: 2.00 at 48 190²" in figure.alt
    assert pictures.block_speedups([block(N=N) for N in range(1, 6)], "NVIDIA H200") is None
    profile = {"before": {"convolution": 5e4, "squeeze-and-excitation": 2e4},
               "after": {"convolution": 5e4, "squeeze-and-excitation": 6e3}}  # fmt: skip
    figure = pictures.step_times([STEP | {"profile": profile}], "NVIDIA H200")
    assert "bfloat16, before: 70 ms, of which convolution 50, squeeze-and-excitation 20" in (
        figure.alt)  # fmt: skip
    moved = [
        {"label": "fused", "kind": "ours", "dram_read_bytes": 120, "dram_write_bytes": 100},
        {"label": "PyTorch eager", "kind": "peer", "dram_read_bytes": 200,
         "dram_write_bytes": 110},
    ]  # fmt: skip
    figure = pictures.bytes_moved(PROFILE | {"bytes": 100, "rows": moved}, "NVIDIA H200")
    assert figure.alt.endswith("eager 2.00 + 1.10 = 3.10; fused 1.20 + 1.00 = 2.20")


def test_plots_are_saved(tmp_path):
    profile = {"before": {"other": 5.0, "squeeze-and-excitation": 2.0}}
    made = block() | {"copy_gbps": 4000.0, "rows": [
        each | {"gbps": 1000.0} for each in block()["rows"]]}  # fmt: skip
    benchmarks.save_plots(
        [made, STEP | {"profile": profile}, CALLS], DEVICE | {"l2_bytes": 1}, tmp_path
    )
    assert {path.name for path in tmp_path.iterdir()} == {
        "squeeze_excite.forward-1x48x190x190-float32.png", "squeeze_excite.forward-float32.png",
        "efficientnet.step.png",
    }  # fmt: skip
