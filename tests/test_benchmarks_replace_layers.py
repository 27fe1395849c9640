"""The benchmark of whole networks by our layers, without a GPU."""

import re

import pytest
import torch
import torchvision
from benched import set_all, without_a_gpu
from contract.operators import quick
from test_benchmarks_efficientnet import Event
from torch import nn

from course_lib import benchmarks, results_table
from course_lib.benchmarks import efficientnet, launches
from course_lib.benchmarks import replace_layers as benchmark
from course_lib.kernels import activation, global_avg_pool
from course_lib.nn.layer import Layer
from course_lib.runtime.host.launch import recorded


def network():
    """What stands in for ResNet-50: a layer of every kind that it has."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 5),
    )  # fmt: skip


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Let the benchmark run a small network without a GPU, and nothing be compiled."""
    without_a_gpu(monkeypatch)
    set_all(
        monkeypatch, benchmark, DEVICE="cpu", SHAPE=(3, 3, 5, 5), CHECKED=3, N_CLASSES=5,
        NETWORKS={"small": network}, _compiled=lambda model: model,
        _captured=lambda training: training.step,
        KERNELS={"small": benchmark.KERNELS["resnet50"]},
    )  # fmt: skip
    set_all(monkeypatch, efficientnet, WARM_UP=0, _event=Event)


def test_all_are_timed_in_both_layouts(on_the_cpu):
    found = benchmark.run(rounds=2)
    assert [(record["name"], record["dtype"]) for record in found] == [
        ("replace_layers.small", "float32"), ("replace_layers.small", "bfloat16")
    ]  # fmt: skip
    shown = results_table.page([{"device": {"name": "A chip"}, "records": found}])
    assert "\n| small | TF32 | " in shown and "\n| small | bfloat16 | " in shown
    other = {"contiguous": "channels-last", "channels-last": "contiguous"}
    for record in found:
        rows, best = {row["label"]: row for row in record["rows"]}, record["layouts"]
        assert list(best) == ["ours", "PyTorch eager", "torch.compile", "ours, faster",
                              "ours, captured", "PyTorch eager, captured"]  # fmt: skip
        assert list(rows) == [*best, *(f"{who}, {other[best[who]]}" for who in best)]
        assert all(rows[who]["microseconds"] <= rows[f"{who}, {other[best[who]]}"]["microseconds"]
                   for who in best)  # fmt: skip
        kinds = ["ours", "peer", "peer", "ours", "ours", "peer"]
        assert [row["kind"] for row in record["rows"]] == kinds * 2
        assert record["faster"].startswith("Every layer stays PyTorch's")  # there is no GPU
        ratio = rows["PyTorch eager"]["microseconds"] / rows["ours"]["microseconds"]
        assert record["ratio"] == pytest.approx(ratio, abs=1e-3)
        errors = record["gradient_errors"]
        assert 0 < errors["ours"] <= 2 * errors["PyTorch eager"] < 1e-4
        assert record["kernel_hash"] == benchmark.kernel_hash(benchmark.KERNELS["small"])
    assert "replace_layers.small 3x3x5x5 float32: ours " in benchmarks.table(found)


def test_the_kernels_of_groups_and_of_other_rungs_do_not_take_part(monkeypatch):
    listed = [*global_avg_pool.specialisations()]
    default = re.compile(r"relu\.\w+ (vectorised|rows) ").match
    relu = [each for each in activation.specialisations() if default(each[0])]
    (label, *first), *others = listed
    grouped = [(f"{label} of groups", *first), *others]
    monkeypatch.setattr(global_avg_pool, "specialisations", lambda: grouped)
    found = benchmark.kernel_hash(((global_avg_pool,), (activation.relu,)))
    assert found == launches.specialisations_hash([*others, *relu])
    assert found != launches.specialisations_hash([*listed, *relu])


def test_a_vision_transformer_takes_a_step(on_the_cpu):
    model = torchvision.models.VisionTransformer(5, 5, 1, 2, 8, 16, num_classes=5)
    training = benchmark.Training(model, "bfloat16", "contiguous", benchmark.OURS)
    with quick(), recorded() as launches:
        training.step()
    assert {k.py_func.__module__.split(".")[2] for k, *_ in launches} >= {"attention", "layer_norm"}
    assert all(p.isfinite().all() for p in training.model.parameters())


def test_who_runs_what(on_the_cpu):
    kinds = {
        who: {isinstance(module, Layer) for module in
              benchmark.Training(network(), "float32", "contiguous", who).model}
        for who in (benchmark.OURS, benchmark.EAGER)
    }  # fmt: skip
    assert kinds == {benchmark.OURS: {True}, benchmark.EAGER: {False}}


def test_wrong_gradients_are_not_timed(on_the_cpu, monkeypatch):
    replace = benchmark.replace_layers

    def wrong(model):
        swapped = replace(model)
        model[6].weight.register_hook(lambda gradient: gradient * 1.001)
        return swapped

    monkeypatch.setattr(benchmark, "replace_layers", wrong)
    with pytest.raises(AssertionError, match="gradients of small are wrong, so it is not timed"):
        benchmark.run(rounds=2)


def test_a_network_with_layers_that_stay_is_not_timed(on_the_cpu, monkeypatch):
    monkeypatch.setattr(benchmark, "NETWORKS", {"small": lambda: network().append(nn.Tanh())})
    with pytest.raises(AssertionError, match="layers of small stay PyTorch's, so it is not timed"):
        benchmark.run(rounds=2)


def test_settings_are_put_back(on_the_cpu, monkeypatch):
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    monkeypatch.setattr(benchmark, "_measure", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        benchmark.run(rounds=2)
    assert (cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32) == before


def test_the_networks_have_no_layer_that_stays():
    with torch.device("meta"):
        for make in benchmark.NETWORKS.values():
            left = benchmark.replace_layers(make()).left
            assert {type(each.module).__name__ for each in left} <= benchmark.NONE_OF_OURS


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_bench_replace_layers_on_a_gpu(monkeypatch):
    monkeypatch.setattr(benchmark, "SHAPE", (4, 3, 224, 224))
    monkeypatch.setattr(benchmark, "CHECKED", 4)
    for record in benchmark.run(dtypes=["float32"], rounds=2):
        errors = record["gradient_errors"]
        assert 0 < errors["ours"] <= 2 * errors["PyTorch eager"]
        assert all(row["microseconds"] > 0 for row in record["rows"])
