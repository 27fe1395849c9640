"""The benchmark of training on several GPUs, by processes without any."""

import contextlib
import functools
import multiprocessing

import pytest
import torch
import torch._dynamo  # noqa: F401  once: processes that are forked have it
from benched import set_all, without_a_gpu

from course_lib import benchmarks, models, results_table
from course_lib.benchmarks import data_parallel, tiny_imagenet, unet, unet_kernels
from course_lib.runtime.host import device

EVENTS = [("ncclDevKernel_AllReduce_Sum_f32", 2, 10), ("a kernel", 0, 8)]


def forked(function, arguments, nprocs):
    """`torch.multiprocessing.spawn`, whose processes find what is patched here."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=function, args=(rank, *arguments)) for rank in range(nprocs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        if process.exitcode != 0:
            raise RuntimeError(f"a rank ended with {process.exitcode}")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    without_a_gpu(monkeypatch)
    layers = torch.nn
    set_all(
        monkeypatch,
        data_parallel,
        DEVICE="cpu",
        BACKEND="gloo",
        ROUND=0,
        WARM_UP=1,
        nn=layers,
        optim=torch.optim,
        ops=torch.nn.functional,
        PRECISIONS=("float32",),
        SHAPES={"resnet18_small": (2, 3, 16, 16), "unet": (2, 2, 8, 8)},
        WAYS={label: (layers, False, bar) for label, (_, _, bar) in data_parallel.WAYS.items()},
    )
    narrow = functools.partial(models.resnet18_small, widths=(2, 2, 4, 4))
    monkeypatch.setattr(models, "resnet18_small", narrow)
    set_all(monkeypatch, unet, DEPTH=2, CHANNELS=2, network_hash=lambda: "a hash")
    monkeypatch.setattr(tiny_imagenet, "network_hash", lambda: "a hash")
    monkeypatch.setattr(data_parallel.multiprocessing, "spawn", forked)
    monkeypatch.setattr(unet_kernels, "device_events", lambda call, n: (call(), EVENTS)[1])
    monkeypatch.setattr(device, "count", lambda: 2)


def test_both_networks_on_one_rank_and_on_two():
    found = data_parallel.run(rounds=2)
    assert {record["name"] for record in found} == data_parallel.kernel_hashes().keys()
    for record in found:
        rows = {row["label"]: row for row in record["rows"]}
        assert list(rows) == [
            f"{label}, {gpus}" for label in data_parallel.WAYS for gpus in ("1 GPU", "2 GPUs")
        ] + ["NCCL's all-reduce alone"]
        one, two = rows["ours, 1 GPU"], rows["ours, 2 GPUs"]
        assert record["shape"][0] == 2 and record["default"] in rows
        scaling = two["images_per_second"] / one["images_per_second"]
        assert record["scaling_ours"] == pytest.approx(scaling, rel=0.01)
        assert record["bars"] == {"scaling_ours": 1.85, "scaling_ours_captured": 1.8}
        assert record["exchange_hidden"] == 0.75 and record["exchange_traced"] == 2.7
    weights = models.UNet(2, 2, 2, 2).parameters()
    assert found[1]["gradient_bytes"] == 4 * sum(p.numel() for p in weights)
    told = results_table.page([{"device": {"name": "A chip"}, "records": found}])
    assert "## Several GPUs" in told and "lie under others for 75\xa0% of their time" in told
    left_out = found[0] | {"left_out": {"ours": "it is late", "PyTorch": "it is late"}}
    told = results_table.page([{"device": {"name": "A chip"}, "records": [left_out]}])
    assert "Without PyTorch of `resnet18_small` in float32: it is late." in told


@pytest.mark.parametrize(
    "place, name",
    [
        (torch.nn.parallel, "DistributedDataParallel"),
        (data_parallel.ranks, "Overlapped"),
    ],
)
def test_gradients_that_are_no_average_are_not_timed(monkeypatch, capfd, place, name):
    def alone(given):
        return given if name == "DistributedDataParallel" else contextlib.nullcontext()

    monkeypatch.setattr(place, name, alone)
    with pytest.raises(RuntimeError, match="a rank ended with 1"):
        data_parallel.run(names=["data_parallel.unet"], rounds=2)
    assert f"averaged by {name}, rank 0 is off by" in capfd.readouterr().err


def test_one_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(device, "count", lambda: 1)
    assert benchmarks.refused(data_parallel, {}) == "it needs 2 GPUs, and there are 1"
