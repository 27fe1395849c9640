"""RESULTS.md and what README and docs quote, drawn from records."""

import copy
import json
from pathlib import Path

import pytest

from course_lib import benchmarks, results_table
from course_lib.benchmarks import pictures

DEVICE = {"name": "NVIDIA H200"}
RESULTS = Path(__file__).resolve().parent.parent / "data" / "results"


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
    return plain(results_table.page([{"device": DEVICE, "records": list(records)}]))


def plain(text):
    """`text` as it is read: without the spaces that no line ends in."""
    return text.replace("\N{NO-BREAK SPACE}", " ")


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
    assert "least; measured 2026-11-22" in found


def test_what_moves_and_what_the_network_gains():
    found = part(block(), PROFILE, STEP, STEP | {"name": "efficientnet.inference", "amdahl": None})
    assert "| x | type | fused | PyTorch eager |" in found
    assert "| 32 × 48 × 190 × 190 | float32 | 2.21 | 3.30 |" in found
    assert "32 images of 380 × 380" in found
    assert "| training step | bfloat16 | 100.0 | 86.0 | 1.163 | 18.3 % | 1.171 | 1.221 |" in found
    assert "| inference | bfloat16 | 100.0 | 86.0 | 1.163 |  |  |" in found


def test_first_calls():
    found = part(CALLS)
    assert "| softmax.forward | 1,500 | 2 | 600.0 |" in found
    assert "| torch.compile of it | 9,000 | 3,000 | 3.0 |" in found


def test_what_a_benchmark_sums_up():
    assert results_table.summary([FAST]) == ""
    assert "| softmax.forward | 1,500" in results_table.summary([CALLS])


# --------------------------------------------------------------------- every operation


def record(name, shape, dtype="float32", date="2026-11-21", **microseconds):
    n_bytes = 8
    for size in shape:
        n_bytes *= size
    rows = [
        row(label, time, kind="peer" if label in ("eager", "compiled") else "ours")
        | {"gbps": n_bytes / time / 1e3, "percent_of_copy": 3000 / time}
        for label, time in microseconds.items()
    ]
    return {"name": name, "shape": shape, "dtype": dtype, "date": date, "rows": rows,
            "bytes": n_bytes, "copy_gbps": 4200.0}  # fmt: skip


FAST = record(
    "relu.forward", [4096, 4096], naive=60.0, vectorised=32.04, eager=33.5, compiled=35.0
)
SLOW = record("relu.forward", [128, 200], naive=2.0, vectorised=2.2, eager=2.5, compiled=2.0)
WORSE = record("pool.forward", [1000003], "bfloat16", "2026-11-23", naive=25.2, eager=8.4)


def test_what_runs_by_default_stands_beside_the_fastest_peer():
    fast, slow, worse = results_table.cases([FAST, SLOW, WORSE])
    assert (fast.ours["label"], fast.peer["label"]) == ("vectorised", "eager")
    assert slow.peer["label"] == "compiled" and slow.ratio == pytest.approx(1.1)
    named = copy.deepcopy(FAST) | {"default": "naive"}
    assert results_table.cases([named])[0].ours["label"] == "naive"
    assert results_table.losses([fast, slow, worse]) == [worse, slow]


def test_a_lesson_a_profile_and_what_has_no_peer_are_no_cases():
    alone = record("relu.alone", [4], naive=1.0)
    lesson = record("lesson_04.teams", [4], a=3.0, eager=1.0)
    host = record("launch.host", [128, 200], numba=50.04, eager=6.0)
    assert results_table.cases([alone, lesson, host, PROFILE, CALLS]) == []
    text = part(lesson, host)
    assert "`lesson_04.teams`." in text
    assert "`launch.host`, on the host's clock: numba 50.0 µs, eager 6.0 µs; measured" in text


def test_the_verdict_counts_what_is_lost():
    found = results_table.cases([FAST, SLOW, WORSE])
    assert plain(results_table.verdict(found)) == (
        "Ours takes less time than the fastest peer in 1 of 3 recorded cases and more in 2; in 2 "
        "of these it takes over 3 % more. The worst: `pool.forward` of 1,000,003 bfloat16 takes "
        "3.0 times as long as eager."
    )
    third = [record("sum.forward", [n], a=1.0, eager=2.0) for n in (1, 2, 3, 4)]
    said = results_table.verdict(results_table.cases([FAST, SLOW, WORSE, *third]))
    assert "Of the 7 cases, 6 are of `sum` and `relu`; ours is faster in 0 of the other 1." in said


def step(label, time, kind="peer", **facts):
    return row(label, time, kind=kind) | {"images_per_second": 1e6 / time} | facts


UNET = {
    "name": "unet.training.tf32", "shape": [4, 2, 128, 128], "dtype": "float32",
    "date": "2026-11-26", "precision": "tf32", "depth": 4, "channels": 64, "ratio": 0.5,
    "default": "ours", "rows": [
        step("ours", 2000.0, "ours", peak_bytes=3e9), step("PyTorch eager", 1500.0, peak_bytes=1),
        step("ours, captured", 400.0, "ours"), step("PyTorch captured", 320.0)],
}  # fmt: skip


def test_a_captured_step_stands_beside_a_captured_one():
    (case,) = results_table.cases([UNET])
    assert (case.ours["label"], case.peer["label"]) == ("ours, captured", "PyTorch captured")
    assert case.ratio == 1.25
    slow = [each | {"microseconds": 9000.0} if each["label"] == "PyTorch captured" else each
            for each in UNET["rows"]]  # fmt: skip
    (case,) = results_table.cases([UNET | {"rows": slow}])
    assert (case.ours["label"], case.peer["label"]) == ("ours", "PyTorch eager")


def test_tables_name_the_arithmetic_that_ran():
    text = part(UNET)
    assert "| `unet.training.tf32` | TF32 | 1 of 1 | 1.25 | 4×2×128×128 | 400.0 |" in text
    assert "| TF32 | 4 | 2.0 | 1.5 | 0.4 | – | 0.3 |" in text
    assert "4 × 2 × 128 × 128 TF32 takes" in text and "float32" not in text.partition("| op")[2]
    step32 = STEP | {"dtype": "float32", "tf32": True, "autocast": False}
    assert "| training step | TF32 |" in part(step32) and "| bfloat16 |" in part(STEP)


@pytest.mark.parametrize("how, peak", [({}, "–"), ({"captured_peaks": "while captured"}, "0.05")])
def test_peaks_of_captured_steps_were_taken_while_captured(how, peak):
    rows = [step("PyTorch, naive", 9.0, samples_per_second=1, peak_bytes=2e9),
            step("ours, bfloat16, captured", 3.0, "ours", samples_per_second=1, peak_bytes=5e7)]
    record = {"name": "two_pathways.training", "shape": [8, 3, 224, 224], "dtype": "float32",
              "date": "2026-11-26", "depth": "shallow", "channels": 32, "rows": rows, "ratio": 3.0,
              "fastest": "ours, bfloat16, captured", "left_out": {}} | how  # fmt: skip
    text = part(record)
    assert "| PyTorch, naive | 0.01 | 1 | 1.00 | 2.00 |" in text
    assert ("peaks of captured steps are not recorded" in text) == (peak == "–")
    assert f"| ours, bfloat16, captured | 0.00 | 1 | 3.00 | {peak} |" in text
    assert "| `two_pathways.training` | bfloat16 |" in text


def test_the_page_shows_each_operation_with_its_losses():
    text = part(FAST, SLOW, WORSE)
    assert "| [relu](#relu) | 2 | 1 | 50 % | 1.03 | 0.96 | 1.10 | `relu.forward`, 128×200, " in text
    assert text.index("## relu") < text.index("## pool")  # the better median first
    assert ("| `relu.forward` | float32 | 1 of 2 | 0.96 – 1.10 | 4,096×4,096 | 32.0 | 33.5 | eager "
            "| 4,189 GB/s (94 %) |") in text  # fmt: skip
    assert "times as long. Ours: `vectorised`. Peers: compiled, eager. Measured" in text
    lost = "| `pool.forward` | bfloat16 | 1,000,003 | 25.2 | 8.4 | eager | 3.00 |"
    assert "<summary>Slower cases: 1</summary>" in text and lost in text
    assert text.count("128×200 | 2.2 | 2.0 | compiled | 1.10 |") == 1


def test_kernels_that_changed_are_told():
    changed = {"stale": True}
    assert "Measured 2026-11-21, kernels changed since for 1." in part(FAST | changed, SLOW)
    assert "Measured 2026-11-23, kernels changed since." in part(WORSE | changed)
    assert "first call" in part(CALLS) and "measured 2026-11-22.\n" in part(CALLS)
    assert "2026-11-22, kernels changed since." in part(CALLS | changed)


def test_every_date_says_whether_kernels_changed_since():
    changed = {"stale": True}
    assert "2026-11-22, kernels changed since." in part(FORWARD, TABLE | changed)
    assert "2026-11-22, kernels changed since for 1." in part(FORWARD | changed, BACKWARD)
    text = results_table.promises({"device": DEVICE, "records": [TABLE | changed, block()]})
    assert "**NVIDIA H200**, 2026-11-22, kernels changed since for 1." in text
    recording = {"device": DEVICE, "records": [FAST, SLOW | changed]}
    assert results_table.conditions(recording).endswith("Kernels changed since in 1 of 2 records.")


def test_conditions_name_device_driver_and_versions():
    versions = {"torch": "2.11.0", "cudnn": 91900, "python": "3.12.3"}
    recording = {"device": DEVICE | {"driver": "580.1"}, "records": [
        FAST | {"versions": versions}, WORSE | {"versions": versions | {"torch": "2.12.0"}}]}
    assert results_table.conditions(recording) == (
        "Measured on an **NVIDIA H200**, 2026-11-21 to 2026-11-23: driver 580.1; PyTorch 2.11.0, "
        "2.12.0; cuDNN 9.19.0; Python 3.12.3."
    )


def test_every_recorded_name_is_on_the_page():
    for path in RESULTS.glob("*.json"):
        recording = json.loads(path.read_text(encoding="utf-8"))
        text = results_table.page([recording])
        titles = {
            "softmax.table": "Softmax of 128 rows", "squeeze_excite.profile": "Nsight Compute",
            "kernel_cache.first_call": "## First calls", "fashion_mnist.runs": "Accuracy on",
            "fashion_mnist.command": "`train fashion-mnist` as",
        }  # fmt: skip
        for name in {found["name"] for found in recording["records"]}:
            assert titles.get(name.removesuffix(".tf32"), f"`{name}`") in text, name


def test_nothing_recorded_nothing_shown():
    assert results_table.page([]).count("\n## ") == 0
    assert results_table.promises({"device": DEVICE, "records": [FAST]}) == ""


# ----------------------------------------------------------------------------- softmax


def rung(label, microseconds, kind="ours"):
    rates = {"gbps": 268_000 / microseconds, "percent_of_copy": 6400 / microseconds}
    return row(label, microseconds, kind=kind) | rates


EAGER = rung("PyTorch eager", 105.0, "peer")
FORWARD, BACKWARD = (
    {"name": f"softmax.{way}", "shape": [8192, 4096], "dtype": "float32", "date": "2026-11-22",
     "bytes": 268_435_456, "copy_gbps": 4190.0, "default": "registers", "left_out": {},
     "rows": [*rungs, EAGER]}
    for way, rungs in (
        ("forward", [rung("naive", 2000.0), rung("online", 170.0), rung("registers", 66.0),
                     rung("split", 80.0)]),
        ("backward", [rung("naive", 3000.0), rung("registers", 98.0)]),
    )
)  # fmt: skip
TABLE = {
    "name": "softmax.table", "shape": [128, 200], "dtype": "float32", "date": "2026-11-22",
    "cpu": "A processor, 8 cores", "cpu_threads": 8,
    "rows": [
        {"label": label, "kind": kind, "microseconds": time, "speedup": 20 / time,
         "python_microseconds": seen, "python_speedup": 20.04 / seen}
        for label, kind, time, seen in (
            ("PyTorch, CPU", "peer", 20.0, 20.04), ("PyTorch, GPU", "peer", 2.0, 15.0),
            ("ours, naive", "ours", 40.0, 60.0), ("ours, optimised", "ours", 1.6, 14.0))
    ],
}  # fmt: skip


def test_the_readers_table_shows_both_clocks():
    text = part(FORWARD, TABLE)
    assert "A processor, 8 cores, 8 of its threads used; measured 2026-11-22" in text
    assert "| PyTorch, CPU | 20.0 | 1.0 × | 20.0 | 1.0 × |" in text
    assert "| ours, optimised | 1.6 | 12.5 × | 14.0 | 1.4 × |" in text


def test_the_ladder_shows_both_directions_and_the_default():
    text = part(FORWARD, BACKWARD)
    lines = text[text.index("rung by rung") :].splitlines()[4:9]
    assert "| naive | 134 | 3 | 89 | 2 |" in lines
    assert "| **registers**, the default | 4,061 | 97 | 2,735 | 65 |" in lines
    assert "| split | 3,350 | 80 | – | – |" in lines
    labels = [line.split("|")[1].strip(" *") for line in lines]
    assert labels == ["naive", "online", "registers**, the default", "split", "PyTorch eager"]
    assert "rung by rung" not in part(FORWARD)
    assert "rung by rung" not in part(FORWARD | {"dtype": "bfloat16"}, BACKWARD)


# ---------------------------------------------------------------------------- promises


def test_promises_stand_beside_what_was_recorded():
    text = plain(results_table.promises({"device": DEVICE, "records": [
        TABLE, block(), block(N=32, fused=15.0), STEP | {"amdahl": STEP["amdahl"] | {
            "limit_ratio": 1.22}}]}))  # fmt: skip
    assert "| softmax of 128 × 200: ours, optimised | about 35 µs" in text
    assert "1.6 µs on the device (12.5 times as fast as the CPU), 14.0 µs from Python (1.4" in text
    assert "3.00 at batch 1, 2.00 at batch 32 (geometric means" in text
    assert "1 of 2 sizes reach 2.75, the best is 3.00" in text and "8 threads of a CPU" in text
    assert "| 16 % faster; in a CUDA graph 22 % | the blocks are 18 % of the time; Amdahl's" in text


def test_what_a_block_keeps_is_told_of_all_sizes():
    kept = [block("both", dtype="bfloat16") | {"saved_bytes": {"ours": ours, "PyTorch eager": 1e6}}
            for ours in (1e6, 4e6)]  # fmt: skip
    text = results_table.promises({"device": DEVICE, "records": kept})
    assert "1.00 to 4.00 times PyTorch's bytes in bfloat16, 2.00 in the geometric mean" in text
    assert "; ours at most 4.00 MB |" in text


# ---------------------------------------------------------------------------- pictures


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
