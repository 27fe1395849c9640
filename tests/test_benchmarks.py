"""The benchmarks of operations, without a GPU: what they check, time, leave out and record."""

import copy
import importlib
import math
import signal

import pytest
import torch
from benched import on_the_cpu  # noqa: F401 - a fixture

import course_lib
from course_lib import bench, benchmarks, cli, device
from course_lib.benchmarks import (
    activation,
    attention,
    case,
    conv2d,
    conv_transpose2d,
    cross_entropy,
    fused_softmax,
    global_avg_pool,
    launches,
    layer_norm,
    layers,
    lesson_09,
    linear,
    peaks,
    pending,
    scaled_softmax,
    segmentation_loss,
    softmax,
    squeeze_excite,
)
from course_lib.kernels.operation import Ladder

EAGER, COMPILED = "PyTorch eager", "torch.compile"
H200 = {
    "name": "NVIDIA H200", "compute_capability": [9, 0], "multiprocessors": 132,
    "shared_bytes": 227 << 10,
}  # fmt: skip
#: Benchmark: (a small shape, what is run of it, a module of kernels, a function of it, which of its
#: results is spoilt in the test of wrong results).
OPERATIONS = {
    activation: ((3, 40), ["relu", "gelu"], "activation.relu", "forward", None),
    softmax: ((3, 40), ["softmax"], "softmax.softmax", "backward", None),
    cross_entropy: ((9, 37), None, "cross_entropy", "forward", 0),
    fused_softmax: ((4, 21), None, "bn_relu_softmax", "backward", 2),
    segmentation_loss: ((1, 3, 4, 8), None, "dice", "forward", 0),
    global_avg_pool: ((2, 3, 4, 5), None, "global_avg_pool", "forward", None),
    squeeze_excite: ((2, 5, 3, 3), None, "squeeze_excite", "backward", 4),
    layers: ((2, 8, 6, 6), None, "batch_norm", "forward", 0),
    layer_norm: ((5, 24), None, "layer_norm", "backward", 2),
    linear: ((5, 7, 4), None, "linear", "backward", 1),
    conv2d: ((1, 2, 3, 4), None, "conv2d", "forward", None),
    conv_transpose2d: ((1, 4, 2, 2), None, "conv_transpose2d", "forward", None),
    attention: ((1, 2, 5, 8), None, "attention", "backward", 1),
    scaled_softmax: ((1, 2, 5, 8), None, "scaled_softmax", "forward", None),
}
#: Of which dtypes, where they are not float32 alone; the simulator takes thrice as long for
#: attention's products of float32.
OF_DTYPES = {attention: ["float16"], **dict.fromkeys((activation, conv2d), ["float32", "bfloat16"])}
#: The shape where every rung is run, each several times: one head of two.
OF_RUNGS = {attention: (1, 1, 5, 8)}
every = pytest.mark.parametrize("module", OPERATIONS, ids=lambda module: module.__name__)


def small(monkeypatch, module, shapes=()):
    """(shape, names) of a benchmark, with every rung where it has a ladder."""
    shape, names, *_ = OPERATIONS[module]
    shape = dict(shapes).get(module, shape)
    if hasattr(module, "LADDER"):
        monkeypatch.setattr(module, "LADDER", [shape])
    if module is squeeze_excite:
        monkeypatch.setattr(module, "WITH_COMPILER", {(shape[0], "float32")})
        monkeypatch.setattr(module, "_allocated", lambda: 0)
    return shape, names


@every
def test_every_rung_and_peer_is_checked_and_timed(on_the_cpu, monkeypatch, module):  # noqa: F811
    shape, names = small(monkeypatch, module, OF_RUNGS)
    dtypes = OF_DTYPES.get(module, ["float32"])
    found = on_the_cpu(module, shape, names=names, dtypes=dtypes)
    wanted = {c.name for c in case.chosen(module.cases(shapes=[shape], dtypes=dtypes), names)}
    assert {record["name"] for record in found} == wanted
    for record in found:
        rows = {row["label"]: row for row in record["rows"]}
        assert {row["kind"] for row in record["rows"]} == {"ours", "peer"}
        assert record.get("default", next(iter(rows))) in rows and record["bytes"] > 0
        assert all(row["latency_microseconds"] == 50 for row in rows.values())
        assert COMPILED in rows or "channels-last" in record["name"]
        assert ("copy_gbps" in record) != (module in (attention, conv2d, linear))
        if "flops" in record:
            assert all(0 <= row["error"] < 1e-2 and "tflops" in row for row in rows.values())
        assert launches.listed(record, H200).keys() == {
            label for label, row in rows.items() if row["kind"] == "ours"
        }  # fmt: skip
    assert "µs" in benchmarks.table(found)


@every
@pytest.mark.parametrize("change, words", [(1.5, "is wrong"), (math.nan, "left elements")])
def test_what_is_wrong_is_not_timed(on_the_cpu, monkeypatch, module, change, words):  # noqa: F811
    shape, names = small(monkeypatch, module)
    *_, path, function, which = OPERATIONS[module]
    name, *more = path.split(".")
    kernels = importlib.import_module(f"course_lib.kernels.{name}")
    for each in more:
        kernels = getattr(kernels, each)
    right = getattr(kernels, function)

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        part = found if which is None else found[which]
        part.view(-1)[-1:].mul_(change).add_(1e-2) if part.dim() else part.mul_(change)
        return found

    monkeypatch.setattr(kernels, function, wrong)
    monkeypatch.setattr(bench, "device_times", lambda *_, **__: pytest.fail("timed"))
    of_it = [c.name for c in module.cases(shapes=[shape]) if name in c.name or more]
    of_it = [n for n in of_it if function in n or "both" in n] or of_it
    with pytest.raises(AssertionError, match=f"{words}.*, so it is not timed"):
        on_the_cpu(module, shape, names=of_it, dtypes=OF_DTYPES.get(module, ["float32"])[:1])


def test_optimisers_take_a_step_beside_pytorchs(on_the_cpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(layers, "PARAMETERS", [[(4, 3), (5,)]])
    found = on_the_cpu(layers, (17,))
    assert [record["name"] for record in found] == ["sgd.step", "adamw.step"]
    for record, n_arrays in zip(found, (5, 7), strict=True):
        labels = [row["label"] for row in record["rows"]]
        assert labels == ["ours", "PyTorch foreach", "PyTorch fused"]
        assert record["bytes"] == n_arrays * 4 * 17 and record["n_tensors"] == 2
        assert all(row["python_microseconds"] == 10 for row in record["rows"])

    class Wrong(torch.optim.SGD):
        def step(self):
            super().step()
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1e-3)

    monkeypatch.setattr(layers.optim, "SGD", Wrong)
    with pytest.raises(AssertionError, match="ours of sgd.step, beside .* is wrong"):
        on_the_cpu(layers, (17,), names=["sgd"])


def test_what_python_sees_and_what_is_saved(on_the_cpu, monkeypatch):  # noqa: F811
    shape, _ = small(monkeypatch, squeeze_excite)
    forward, both = on_the_cpu(
        squeeze_excite, shape, dtypes=["float32"], layouts=["contiguous"]
    )  # fmt: skip
    seen = {row["label"] for row in both["rows"] if "python_microseconds" in row}
    assert seen == {"auto", EAGER, f"{EAGER}, channels-last", COMPILED}
    assert both["compile_seconds"] >= 0 and both["squeeze_channels"] == 1
    assert both["saved_bytes"].keys() == {"ours", EAGER} and "saved_bytes" not in forward


def test_slow_rungs_and_those_that_refuse_are_left_out(on_the_cpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(case, "_once", lambda call, device: 60_000.0)
    monkeypatch.setattr(softmax, "SHORTEST_SPLIT", 300)
    (found,) = on_the_cpu(softmax, (3, 40), names=["softmax.backward"], dtypes=["float32"])
    assert [row["label"] for row in found["rows"]] == ["registers", EAGER, COMPILED]
    assert not any("latency_microseconds" in row for row in found["rows"])
    assert found["left_out"]["naive"] == "a call takes 60 ms"
    assert found["left_out"]["split"] == "it is for rows of 300 elements and more"
    assert "    without split: it is for" in benchmarks.table([found])


def test_settings_are_put_back(on_the_cpu, monkeypatch):  # noqa: F811
    backends = torch.backends
    flags = lambda: (  # noqa: E731
        backends.cudnn.allow_tf32, backends.cudnn.benchmark, backends.cuda.matmul.allow_tf32
    )
    before = flags()
    monkeypatch.setattr(bench, "device_times", lambda *_, **__: 1 / 0)
    for benchmark in (conv2d, linear, squeeze_excite):
        with pytest.raises(ZeroDivisionError):
            on_the_cpu(benchmark, OPERATIONS[benchmark][0])
        assert flags() == before


def test_a_peer_that_does_not_drop_is_not_timed(on_the_cpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(
        fused_softmax.SoftmaxDropout, "peer_forward", staticmethod(lambda x: (x.softmax(-1), ()))
    )
    ours = fused_softmax.SoftmaxDropout.module
    monkeypatch.setattr(ours, "FORWARD", Ladder(ours.FORWARD["registers"], auto="registers"))
    with pytest.raises(AssertionError, match="PyTorch eager keeps 100.0%, so it is not timed"):
        on_the_cpu(fused_softmax, (9, 370), names=["softmax_dropout.forward"], dtypes=["float32"])


def test_the_peak_of_an_h200():
    found = peaks.peaks_of((9, 0), 132, 1_980_000)
    assert found == {"fma": 66.9, "tf32": 535.3, "float16": 1070.5, "bfloat16": 1070.5,
                     "split": 178.4}  # fmt: skip
    assert "split" not in peaks.peaks_of((7, 5), 40, 1_590_000)
    assert peaks.peaks_of((12, 7), 1, 1) == {}


def test_scattered_and_gathered(on_the_cpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(lesson_09, "DEVICE", "cpu")
    (record,) = lesson_09.run(shapes=[(1, 2, 3, 4)], rounds=2)
    assert record["kernel_hash"] == lesson_09.kernel_hashes()[record["name"]]
    assert [row["label"] for row in record["rows"]] == ["scattered with atomics", "gathered"]
    assert record["rows"][1]["differing"] == 0


@every
def test_drawn_shapes_are_the_same_each_time_and_told_apart(module):
    found = list(case.drawn(module))
    assert [c.shape for c in found] == [c.shape for c in case.drawn(module)]
    assert len({c.shape for c in found}) >= 6
    assert all(c.name.endswith(".drawn") and c.facts["drawn"] == case.SEED for c in found)
    assert all(0 < c.n_bytes < 4 << 30 for c in found)
    fixed = {c.shape for c in module.cases()}
    assert not fixed & {c.shape for c in found}


def test_calls_drown_the_start_of_a_replay_and_walk_through_the_buffers():
    assert case._calls(10, 4) == 60 and case._calls(10, 100) == 100
    assert case._calls(1_000, 24) == 24 and case._calls(10_000, 24) == 1


def test_names_directions_and_layouts_choose():
    def names(**wanted):
        return {c.name for c in case.chosen(layers.cases(), **wanted)}

    assert names(names=["sgd"]) == {"sgd.step"}
    assert names(names=["max_pool2d.forward"]) == {"max_pool2d.forward"}
    last = names(names=["batch_norm"], directions=["forward"], layouts=["channels-last"])
    assert last == {"batch_norm.forward.channels-last"}


def held(*records):
    return {"device": H200, "records": list(records)}


def test_what_is_missing_or_stale_is_pending_cheapest_first(monkeypatch):
    whole = bench.load_records("NVIDIA H200")
    monkeypatch.setattr(benchmarks, "BENCHMARKS", ("softmax", "kernel_cache"))
    # As if today's kernels had been measured.
    softmaxes = [
        launches._bound(r, H200) for r in whole["records"] if r["name"].startswith("softmax.")
    ]
    table = next(r for r in softmaxes if r["name"] == "softmax.table")
    softmaxes[softmaxes.index(table)] = table | {"kernel_hash": "another"}
    found = pending.pending(held(*softmaxes))
    assert pending.count(held(*softmaxes))[1] == sum(each.why == "missing" for each in found)
    assert {each.label.split()[0] for each in found} == {
        "log_softmax.forward", "log_softmax.backward", "softmax.forward.drawn",
        "softmax.backward.drawn", "softmax.table", "kernel_cache",
    }  # fmt: skip
    seconds = [each.seconds for each in found]
    assert seconds == sorted(seconds) and found[-1].label == "kernel_cache"
    first = next(r for r in softmaxes if r["name"] == "softmax.forward")
    spoilt = copy.deepcopy(first)
    spoilt["launches"]["naive"][0]["grid"] = [12345]
    again = pending.pending(held(spoilt, *[r for r in softmaxes if r is not first]))
    (stale,) = [each for each in again if each.why.startswith("stale: naive")]
    assert stale.label.startswith("softmax.forward ")
    text = pending.listing(again)
    assert stale.label in text and f"{len(again)} to measure, about" in text
    assert pending.listing([]) == "Nothing is missing or stale."


def test_all_saves_each_record_at_once_and_can_be_stopped(monkeypatch, capsys):
    saved = []

    def measured(case):
        if len(saved) == 2:
            raise KeyboardInterrupt
        return dict(name=case.name, shape=case.shape, dtype=case.dtype, rows=[
            dict(label="ours", kind="ours", microseconds=4.0),
            dict(label="ours, captured", kind="ours", microseconds=3.0),
            dict(label="a peer, captured", kind="peer", microseconds=2.0),
        ], default="ours")  # fmt: skip

    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setattr(course_lib, "SIMULATED", False)
    monkeypatch.setattr(bench, "device_facts", lambda: H200)
    monkeypatch.setattr(bench, "load_records", lambda name: None)
    monkeypatch.setattr(launches, "save", saved.append)
    monkeypatch.setattr(benchmarks, "BENCHMARKS", ("linear",))
    monkeypatch.setattr(pending.one, "measure", measured)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert cli.main(["bench", "--all", "--record"]) == 130
    said = capsys.readouterr()
    assert len(saved) == 2 and "stopped after 2 records, which are kept" in said.err
    assert "less time than the fastest peer in 0 of 2 recorded cases and more in 2" in said.out
    assert "takes 1.5 times as long as a peer, captured" in said.out


@pytest.mark.gpu
@pytest.mark.timeout(600)
@every
def test_on_a_gpu(module):
    shape, names, *_ = OPERATIONS[module]
    for record in module.run(shapes=[shape], names=names, rounds=3):
        assert all(0 < row["microseconds"] < 1e5 for row in record["rows"])
