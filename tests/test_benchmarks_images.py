"""The benchmarks of networks for photographs: what they check, time and record, without a GPU."""

import dataclasses

import pytest
import torch
from benched import set_all, without_a_gpu

from course_lib import backend, bench, benchmarks, data, results_table
from course_lib.benchmarks import gpu, prefetch, unet_kernels
from course_lib.benchmarks import tiny_imagenet as steps
from course_lib.benchmarks import tiny_imagenet_runs as runs
from course_lib.benchmarks import two_pathways as pathways
from course_lib.runtime.host import device as here

EVENTS = [("cudapy::softmax::online", 0, 3), ("cudapy::conv2d::tiled", 3, 10)]
SHAPE = (2, 3, 16, 16)
APART = {f"{who}, two GPUs" for who in ("PyTorch", "PyTorch, TF32", "ours", "ours, TF32")}


def times(candidates, *, calls, rounds):
    for candidate in candidates.values():
        candidate(0)
    return {
        label: bench.Timing(20.0 if "captured" in label else 50.0, (19.0, 21.0))
        for label in candidates
    }


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Let the benchmarks run tiny networks on PyTorch's layers, without a GPU or its times."""
    without_a_gpu(monkeypatch)
    for module in (steps, pathways):
        set_all(
            monkeypatch, module, DEVICE="cpu", network_hash=lambda: "a hash", nn=torch.nn,
            ops=torch.nn.functional,
        )  # fmt: skip
        # Nothing is captured or compiled, and what is ours is PyTorch's.
        monkeypatch.setattr(module, "WAYS", {
            label: {k: v for k, v in way.items() if k not in ("capture", "captured", "compiled")}
            | ({"kernels": "torch"} if "kernels" in way else {})
            for label, way in module.WAYS.items()
        })  # fmt: skip
    # With fewer channels PyTorch 2.15 writes beside its memory, on processors without AVX-512: in
    # the gradient of a channels-last 1 × 1 convolution of stride 2.
    set_all(monkeypatch, pathways, optim=torch.optim, SECOND="cpu")
    set_all(monkeypatch, pathways, SHAPE=SHAPE, CHANNELS=8, N_CLASSES=5)
    set_all(monkeypatch, steps, BATCH_SIZE=2, SIDE=16, N_IMAGES=8, N_CLASSES=5)
    monkeypatch.setattr(steps.program.device, "compiled", lambda model, *_, **__: model)
    monkeypatch.setattr(unet_kernels, "device_events", lambda call, n: call() or EVENTS)
    monkeypatch.setattr(bench, "loop_times", times)


def page(records):
    return results_table.page([{"device": {"name": "A chip"}, "records": records}])


def test_steps_and_the_share_of_softmax():
    found = steps.run(rounds=2)
    assert [(each["name"], each["dtype"]) for each in found] == [
        ("tiny_imagenet.training", "float32"), ("tiny_imagenet.training.tf32", "float32"),
        ("tiny_imagenet.training", "bfloat16"), ("tiny_imagenet.softmax", "float32"),
    ]  # fmt: skip
    assert {each["name"] for each in found} == steps.kernel_hashes().keys()
    for record in found[:3]:
        assert record["default"] == "ours, captured" and record["ratio"] == 1
        row = record["rows"][0]
        assert row["images_per_second"] == 100_000 and row["peak_bytes"] == 1000
        assert record["gradient_errors"]["ours"] == record["gradient_errors"]["PyTorch eager"]
    assert [row["share"] for row in found[3]["rows"]] == [0.3, 0.3]
    text = page(found)
    assert "## Tiny-ImageNet network" in text and "softmax in inference: 30.00\xa0% of" in text


def test_wrong_gradients_are_not_timed(monkeypatch):
    def wrong(layers, loss, x, target, precision):
        sign = 1 if x.dtype == torch.float64 or loss is not ours else -1
        return sign * real(layers, loss, x, target, precision)

    def ours(*inputs):
        return torch.nn.functional.cross_entropy(*inputs)

    real = steps.gradients
    monkeypatch.setattr(steps, "gradients", wrong)
    monkeypatch.setattr(steps, "ops", type("Ours", (), {"cross_entropy": staticmethod(ours)}))
    with pytest.raises(AssertionError, match="gradients are wrong, so nothing is timed"):
        steps.run(rounds=2)


def test_each_switch_of_two_pathways(monkeypatch):
    before = torch.backends.cudnn.benchmark
    monkeypatch.setattr(here, "count", lambda: 2)
    training, forward = pathways.run(rounds=2)
    assert torch.backends.cudnn.benchmark == before
    assert training["name"] == pathways.TRAINING and forward["name"] == pathways.FORWARD
    for record in (training, forward):
        assert record["captured_peaks"] == gpu.CAPTURED_PEAKS
        assert [row["label"] for row in record["rows"]] == list(pathways.WAYS)
        assert record["ratio"] == 2.5 and record["left_out"] == {}
        assert record["default"] == "ours, captured" and record["fastest"] == "PyTorch, captured"
        assert {row["label"] for row in record["rows"] if row["kind"] == "two GPUs"} == APART
    text = page([training])
    assert "## Two pathways" in text and "the fastest: PyTorch, captured, 2.50 times" in text
    assert "| PyTorch, checkpointing | 0.05 | 40,000 | 1.00 | 0.00 |" in text


def test_a_machine_with_one_gpu_says_that_two_were_not_measured(monkeypatch):
    monkeypatch.setattr(here, "count", lambda: 1)
    few = {label: way for label, way in pathways.WAYS.items() if way.get("apart") or len(way) < 2}
    monkeypatch.setattr(pathways, "WAYS", few)
    record = pathways.measure(pathways.FORWARD, pathways.Forward, 2, {})
    assert record["left_out"] == dict.fromkeys(APART, "it takes two GPUs, and there is 1")
    told = benchmarks.table([record])
    assert "    without ours, two GPUs: it takes two GPUs, and there is 1" in told
    assert "PyTorch, two GPUs is left out: it takes two GPUs, and there is 1." in page([record])


def test_batches_that_come_during_the_step_before(monkeypatch):
    set_all(monkeypatch, prefetch, DEVICE="cpu", LIBRARY="numpy", _pin=torch.clone)
    monkeypatch.setattr(backend, "_chosen", None)
    events = [("Memcpy HtoD", 0, 10), ("a kernel", 0, 7)]
    monkeypatch.setattr(unet_kernels, "device_events", lambda call: call() or events)
    found = prefetch.run(shapes=[(4, 3)], rounds=2)
    assert found[0]["name"] in prefetch.kernel_hashes() and found[0]["bars"] == {}
    labels = [row["label"] for row in found[0]["rows"]]
    hidden = [row["copies_hidden"] for row in found[0]["rows"]]
    assert len(labels) == 5 and hidden == [None, 0.7, 0.7, 0.7, 0.7]
    assert "| 3 | 0\xa0% | by crossing | 0.00 | 70\xa0% |" in page(found)
    monkeypatch.setattr(prefetch.feeding, "crossing", lambda batches, place: [batches[0] + 1] * 12)
    with pytest.raises(AssertionError, match="by crossing brings other batches"):
        prefetch.run(shapes=[(4, 3)], rounds=2)


@pytest.mark.parametrize("captured, expected", [(False, 30), (True, 900)])
def test_the_peak_of_a_captured_step_is_that_of_its_capture(captured, expected, monkeypatch):
    seen = {"calls": 0, "peak": 0}

    def step():  # the second call is captured: only then its pool counts
        seen["calls"] += 1
        of_this = {1: 5000, 2: 900 if captured else 4000}.get(seen["calls"], 5 if captured else 30)
        seen["peak"] = max(seen["peak"], of_this)

    monkeypatch.setattr(gpu, "reset_peak", lambda: seen.update(peak=0))
    monkeypatch.setattr(gpu, "peak", lambda: seen["peak"])
    assert gpu.peak_of(step, captured=captured) == expected


def test_a_switch_that_fails_is_told(monkeypatch):
    real = pathways.network

    def failing(layers, checkpointing=False, parallel=False):
        if parallel:
            raise RuntimeError("no streams")
        return real(layers, checkpointing, parallel)

    monkeypatch.setattr(pathways, "network", failing)
    record = pathways.run(rounds=2)[0]
    assert record["left_out"]["PyTorch, pathways in parallel"] == "RuntimeError: no streams"
    assert "PyTorch, pathways in parallel is left out: RuntimeError: no streams" in page([record])


def test_runs_go_on_where_they_were_stopped(tmp_path, monkeypatch):
    small = {"epochs": 1, "batch_size": 100, "kernels": "torch", "image_size": 8}
    recipe = runs.RECIPES["tiny_cnn"] | small | {"precision": "float32", "warm_up_epochs": 0.0}
    train = runs.train_images

    def on_drawn_leaves(settings, **options):
        return train(dataclasses.replace(settings, data=None), **options)

    monkeypatch.setattr(runs, "train_images", on_drawn_leaves)
    monkeypatch.setattr(runs, "FOLDER", tmp_path)
    monkeypatch.setattr(runs, "network_hash", lambda: "a hash")
    row = runs.row_of("guide, ours, seed 0", recipe, tmp_path)
    assert runs.row_of("guide, ours, seed 0", recipe, tmp_path) == row
    assert len(row["history"]) == 1 and row["microseconds"] > 0
    second = row | {"label": "guide, ours, seed 1", "accuracy": row["accuracy"] + 0.02}
    record = runs.record_of([row, second])
    assert record["guide"]["ours"]["standard_error"] == 0.01
    assert record["guide"]["ours"]["accuracy"] == pytest.approx(row["accuracy"] + 0.01)
    text = results_table.images.runs([record])
    assert "sgd 0.05, batch 100, float32, decay 0.0005" in text


def test_every_recipe_is_a_run_that_there_is():
    for recipe in runs.RECIPES.values():
        runs.ImageSettings(**recipe)
    with pytest.raises(data.DataError):
        runs.run(data_folder="/nowhere")
