"""The benchmarks of the U-Net: what they check, time and record, without a GPU."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from benched import each_once, set_all, without_a_gpu
from test_benchmarks_efficientnet import Event

from course_lib import SIMULATED, bench, benchmarks, data, results_table
from course_lib import autograd as ag
from course_lib.benchmarks import sar_folds as folds
from course_lib.benchmarks import unet as benchmark
from course_lib.benchmarks import unet_kernels as kernels
from course_lib.benchmarks import unet_tape as tape

LAST = ["ours, channels-last", "PyTorch eager, channels-last"]
REST = ["ours, captured", "PyTorch captured", "torch.compile"]
LABELS = {"float32": ["ours", "PyTorch eager", *LAST, *REST], "bfloat16": [*LAST, *REST]}
RECORDS = [
    *2 * [("unet.training", "float32")], *2 * [("unet.training.tf32", "float32")],
    *2 * [("unet.training", "bfloat16")], ("unet.kernels", "float32"),
    ("unet.kernels", "bfloat16"), *2 * [("unet.tape", "float32")], ("unet.prefetch", "float32"),
    ("unet.shares", "float32"),
]  # fmt: skip
EVENTS = [  # as torch.profiler names them on a GPU
    ("Memcpy HtoD (Pinned -> Device)", 0, 10), ("cudapy::course_lib::kernels::conv2d::k", 4, 20),
    ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>", 18, 22),
]  # fmt: skip


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Let the benchmarks run tiny networks, all on PyTorch's layers, without a GPU or its times."""
    without_a_gpu(monkeypatch)
    set_all(
        monkeypatch, benchmark, DEVICE="cpu", SHAPES=((2, 2, 8, 8), (1, 2, 8, 8)),
        TAPE_SHAPE=(2, 2, 8, 8), DEPTH=2, CHANNELS=2, nn=torch.nn, ops=torch.nn.functional,
        optim=torch.optim, _captured=lambda step: step, _compiled=lambda model: model,
        network_hash=lambda: "a hash",
    )  # fmt: skip
    set_all(
        monkeypatch, tape, LIBRARY="numpy", CASES=((2, 1, 10), (3, 2, 40)), _event=Event,
        _sleep=lambda: None, BATCHES=2, _device_events=lambda call: call() or EVENTS,
    )  # fmt: skip
    monkeypatch.setattr(kernels, "device_events", lambda step, steps: step() or EVENTS)
    monkeypatch.setattr(bench, "loop_times", each_once)


@pytest.fixture
def layers(monkeypatch):
    """The layers of ours are told from PyTorch's, though both are PyTorch's."""
    kinds = type("Ours", (), {name: getattr(torch.nn, name) for name in (
        "Conv2d", "ConvTranspose2d", "BatchNorm2d", "ReLU", "MaxPool2d")})  # fmt: skip
    monkeypatch.setattr(benchmark, "nn", kinds)
    return kinds


def test_every_case_is_recorded(on_the_cpu, layers):
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32
    found = benchmark.run(rounds=2)
    assert (cudnn.benchmark, cudnn.allow_tf32) == before
    assert [(record["name"], record["dtype"]) for record in found] == RECORDS
    assert {name for name, _ in RECORDS} == benchmark.kernel_hashes().keys()
    for record in found:
        assert record["kernel_hash"] == "a hash"
        rows = {row["label"]: row for row in record["rows"]}
        if record["name"].startswith("unet.training"):
            assert list(rows) == LABELS[record["dtype"]] and record["left_out"] == {}
            assert all((row["kind"] == "ours") == at.startswith("ours") for at, row in rows.items())
            row = rows[record["default"]]
            assert row["images_per_second"] == record["shape"][0] * 100_000
            assert row["peak_bytes"] == 1000 and record["ratio"] == record["memory_ratio"] == 1
            limit = 0.5 if record["dtype"] == "bfloat16" else 1e-4
            assert 0 < record["gradient_errors"]["ours"] < limit
    assert [record["shape"][0] for record in found[:6]] == [2, 1] * 3
    deeper = found[9]
    assert deeper["shape"] == [2, 2, 8, 8] and deeper["bars"] == {"speedup": 40}
    assert deeper["cpu_threads"] >= 1 and deeper["depth"] == 3 and deeper["cpu_steps"] == 4
    prefetched, shares = found[10:]
    assert [row["label"] for row in prefetched["rows"]] == [
        "on the GPU already", "by prefetch", "copied when needed"
    ]  # fmt: skip
    assert prefetched["ratio"] == 1 and prefetched["copies_hidden"] == 0.6
    parts = {row["label"]: row for row in shares["rows"]}
    assert list(parts) == [*tape.OPERATIONS, tape.ADAM, tape.REST]
    assert all(row["microseconds"] > 0 for label, row in parts.items() if label != tape.REST)
    assert sum(row["share"] for row in parts.values()) == pytest.approx(1, abs=0.01)
    assert parts["convolution"]["backward_microseconds"] > 0
    text = benchmarks.table(found)
    assert "images/s" in text and "unet.tape 2x2x8x8 float32: the tape, GPU " in text
    page = results_table.page([{"device": {"name": "A chip"}, "records": found}])
    assert "| bfloat16 | 1 | 0.0 | 0.0 |" in page and "60\xa0% of the copies' time" in page
    assert all(part in page for part in (*tape.OPERATIONS, "by PyTorch's profiler", "NumPy, ms"))


def test_only_what_is_asked_for(monkeypatch):
    monkeypatch.setattr(benchmark, "network_hash", lambda: "a hash")

    def named(**options):
        return [name for name, _ in benchmark.listed(**options)]

    assert named(dtypes=["bfloat16"]) == 2 * ["unet.training"]
    assert named(shapes=[(4, 2, 64, 64)]) == [
        "unet.training", "unet.training.tf32", "unet.training"
    ]  # fmt: skip
    assert set(named()) == benchmark.kernel_hashes().keys()
    for shape in ((4, 64, 64), (4, 2, 0, 64)):
        assert "4 positive sizes here" in benchmarks.refused(benchmark, {"shapes": [shape]})


def test_one_slow_step_of_numpy_is_enough(monkeypatch):
    monkeypatch.setattr(tape, "NUMPY_SECONDS", 1e-9)
    timing, losses = tape._timed_on_the_cpu(lambda: ag.tensor(np.ones(1, np.float32)))
    assert losses == [1.0] and timing.quartiles == (timing.microseconds,) * 2


def test_families_of_kernels(monkeypatch):
    for family, names in {
        "Adam": ["void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::"
                 "(anonymous namespace)::FusedOptimizerTensorListMetadata<4>>",
                 "_ZN6cudapy10course_lib7kernels10optimizers17adam_fused_kernel"],
        "loss": ["void at::native::(anonymous namespace)::nll_loss2d_forward_kernel<float>",
                 "_ZN6cudapy10course_lib7kernels13cross_entropy8backward"],
        "batch norm, ReLU within": ["void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512>",
                                    "void at::native::batch_norm_collect_statistics_channels_last",
                                    "_ZN6cudapy10course_lib7kernels10batch_norm6pixels"],
        "max pooling": ["void at::native::(anonymous namespace)::max_pool_forward_nchw<float>",
                        "_ZN6cudapy10course_lib7kernels10max_pool2d5bands"],
        "convolution, transposed too": [
            "sm90_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckcrs_nhwc",
            "void implicit_convolve_sgemm<float, float, 1024>", "cutlass__5x_cudnn::Kernel<x>",
            "void cudnn::ops::nchwToNhwcKernel<float>",
            "_ZN6cudapy10course_lib7kernels16conv_transpose2d6direct",
            "_ZN6cudapy10course_lib7kernels6conv2d9warpgroup"],
        "ReLU": ["void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous "
                 "namespace)::launch_clamp_scalar(at::TensorIteratorBase&)>"],
        "concatenation": ["void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>"],
        kernels.REST: ["void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor"
                       "<float>>", "Memset (Device)", "void at::native::unrolled_elementwise_kernel"
                       "<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()>"],
    }.items():  # fmt: skip
        assert {kernels.family_of(name) for name in names} == {family}, names
    monkeypatch.setattr(kernels, "device_events", lambda step, steps: [])
    with pytest.raises(AssertionError, match="the profiler saw no kernel of ours"):
        kernels.measure({"ours": lambda: None}, (1,), "float32", "", "")


def test_copies_are_hidden_by_what_runs_beside_them():
    def hidden(*events):
        return kernels.share_hidden(events)

    copy = ("Memcpy HtoD (Pinned -> Device)", 10, 20)
    assert hidden(("kernel", 0, 30)) is None and hidden(copy) == 0
    assert hidden(copy, ("kernel", 12, 14), ("kernel", 13, 15), ("other", 18, 40)) == 0.5
    assert hidden(copy, ("kernel", 0, 30), ("kernel", 11, 12)) == 1
    assert hidden(copy, ("Memset (Device)", 0, 30), ("Memcpy DtoD", 0, 30)) == 0


def test_marks_are_taken_off_again(on_the_cpu):
    kinds = [kind for kinds in tape.OPERATIONS.values() for kind in kinds]

    def functions():  # without what copying an object of a kind notes at it
        return [{k: v for k, v in vars(kind).items() if k != "__slotnames__"} for kind in kinds]

    before = functions()
    tape.shares(2, 2, "", "", shape=(1, 2, 8, 8), channels=2, n_classes=2)
    assert functions() == before


def test_what_is_wrong_is_not_timed_and_the_rest_is_kept(on_the_cpu, layers, monkeypatch, capsys):
    class Wrong(torch.nn.ConvTranspose2d):
        def forward(self, x):
            return super().forward(x) * 1.001

    monkeypatch.setattr(layers, "ConvTranspose2d", Wrong)
    monkeypatch.setattr(tape, "CASES", ((2, 1, 10),))
    real = ag.UNet.forward
    timed = tape._timed_on_the_cpu

    def then_another(step):
        found = timed(step)
        monkeypatch.setattr(ag.UNet, "forward", lambda self, x: real(self, x) * 1.01)
        return found

    monkeypatch.setattr(tape, "_timed_on_the_cpu", then_another)
    names = ["unet.training", "unet.tape", "unet.shares"]
    with pytest.raises(bench.Stopped, match="after 3 records; unet.training.*unet.tape") as stopped:
        benchmark.run(names=names, rounds=2)
    # What is wrong is lost in bfloat16's own error.
    assert [record["dtype"] for record in stopped.value.records] == [*2 * ["bfloat16"], "float32"]
    told = capsys.readouterr().err
    assert "our gradients are wrong, so nothing is timed" in told
    assert "the losses differ, so nothing is timed" in told


def test_a_peer_that_fails_is_left_out_by_name(on_the_cpu, layers, monkeypatch):
    def fails(model):
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(benchmark, "_compiled", fails)
    (record,) = benchmark.run(dtypes=["bfloat16"], shapes=[(1, 2, 8, 8)], rounds=2)
    assert record["left_out"] == {"torch.compile": "RuntimeError: no compiler here"}
    assert "without torch.compile: RuntimeError: no compiler here" in benchmarks.table([record])


def test_stopped_by_the_keyboard_it_keeps_what_it_has(on_the_cpu, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(tape, "shares", stop)
    with pytest.raises(bench.Stopped, match="after 1 records") as stopped:
        benchmark.run(names=["unet.prefetch", "unet.shares"], rounds=2)
    assert [record["name"] for record in stopped.value.records] == ["unet.prefetch"]


# ── chips left out ───────────────────────────────────────────────────────────────────────────────

REAL = os.environ.get("COURSE_DATA")


@pytest.fixture
def small_folds(monkeypatch):
    for name, value in dict(
        IMAGE_SIZE=16, DEPTH=2, CHANNELS=4, BATCH_SIZE=4, LEARNING_RATE=1e-2,
        network_hash=lambda: "a hash",
    ).items():  # fmt: skip
        monkeypatch.setattr(folds, name, value)


def drawn_folds(**options):
    return folds.run(data_folder=None, **({"device": "cpu", "seeds": (0, 1)} | options))


def test_folds_are_left_out_and_pooled(small_folds):
    (record,) = drawn_folds(epochs=3)
    assert record["name"] == "unet.folds" and record["drawn"] and record["device"] == "cpu"
    assert [(row["label"], row["seed"]) for row in record["rows"]] == [
        (label, seed) for seed in (0, 1) for label in (folds.OURS, folds.PEER)
    ]
    assert len(record["folds"]) == 2 and set(record["folds"][0]).isdisjoint(record["folds"][1])
    for ours, peer in (record["rows"][:2], record["rows"][2:]):
        # The same weights, order and turns: the same losses, but for rounding.
        np.testing.assert_allclose(ours["losses_by_fold"], peer["losses_by_fold"], rtol=1e-2)
        assert np.shape(ours["losses_by_fold"]) == (2, 3)
        assert abs(ours["iou"] - peer["iou"]) < 0.05
        for row in (ours, peer):
            assert min(row["iou_by_fold"]) - 1e-4 <= row["iou"] <= max(row["iou_by_fold"]) + 1e-4
            assert all(losses[-1] < losses[0] for losses in row["losses_by_fold"])
    assert record["iou"][folds.OURS] == pytest.approx(
        np.mean([row["iou"] for row in record["rows"][::2]]), abs=1e-4
    )
    own = [row["iou_by_fold"] for row in record["rows"]]
    assert record["difference_by_fold"] == pytest.approx(
        np.mean(own[::2], axis=0) - np.mean(own[1::2], axis=0), abs=1e-4
    )
    iou = record["iou"]
    assert record["difference"] == pytest.approx(iou[folds.OURS] - iou[folds.PEER], abs=1e-4)
    assert 0 < record["threshold"] < 1 and record["published"]["threshold"] == 0.35
    page = results_table.page([{"device": {"name": "A chip"}, "records": [record]}])
    assert "| ours, on the tape | 2 | " in page and "| difference |  | " in page
    assert "U-Net, hand labels 0.64" in page and record["folds"][1][0] in page


def test_first_steps_are_the_same_to_rounding(small_folds):
    """The two ways differ by nothing but rounding: losses of an epoch of two steps."""
    study = folds.Study(*folds._scenes(None), epochs=1, device="cpu")
    losses = []
    for way in (folds.on_the_tape, folds.by_pytorch):
        task, held = study.task(0, 0)
        losses.append(way(task, held.images, "cpu")[1])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_a_stopped_run_keeps_whole_seeds_and_goes_on(small_folds, monkeypatch, tmp_path):
    real, calls, keep = folds.by_pytorch, [], tmp_path / "runs.json"

    def counted(task, *rest):
        calls.append(task.epochs)
        if len(calls) == 6:  # one warms up, two are of the first seed: the third one's second fold
            raise KeyboardInterrupt
        return real(task, *rest)

    monkeypatch.setattr(folds, "by_pytorch", counted)
    with pytest.raises(bench.Stopped) as stopped:
        drawn_folds(seeds=(0, 1, 2), epochs=2, keep=keep)
    (record,) = stopped.value.records
    assert [row["seed"] for row in record["rows"]] == [0, 0, 1, 1] and record["drawn"]
    (whole,) = drawn_folds(seeds=(0, 1, 2), epochs=2, keep=keep)
    assert whole["rows"][:4] == record["rows"] and len(calls) == 6 + 1 + 2
    (again,) = drawn_folds(seeds=(0, 1, 2), epochs=2, keep=keep)
    assert again == whole and len(calls) == 9 and os.listdir(tmp_path) == ["runs.json"]
    with pytest.raises(data.DataError, match="keeps other runs: of another epochs"):
        drawn_folds(epochs=3, keep=keep)
    for text in ("{", "[]", "{}", '{"settings": {}, "runs": 3}'):
        keep.write_text(text)
        with pytest.raises(data.DataError, match="no file of kept runs.*: name another"):
            drawn_folds(epochs=3, keep=keep)
        assert keep.read_text() == text


def test_the_tiles_must_be_those_of_the_folds(small_folds, tmp_path):
    assert benchmarks.refused(folds, {}) == "it needs --data"
    np.savez(tmp_path / "t.npz", s1_db_x100=np.full((1, 2, 16, 16), -900, np.int16),
             masks=np.zeros((1, 16, 16), np.int8), chip=np.array(["Bolivia_1"]),
             rowcol=np.zeros((1, 2), np.int64))  # fmt: skip
    with pytest.raises(data.DataError, match="has other chips than the folds: Bolivia_1, Ghana"):
        folds.run(data_folder=tmp_path)


def test_folds_as_a_command(small_folds, monkeypatch, capsys):
    real = folds._scenes
    monkeypatch.setattr(folds, "_scenes", lambda folder: real(None))
    options = ["--data", "x", "--device", "cpu", "--seeds", "3", "--epochs", "1"]
    assert folds.main(options) == 0
    out = capsys.readouterr().out
    assert "seed 3, PyTorch: IoU 0." in out and "difference +" in out.replace("-", "+")
    monkeypatch.setattr(folds, "_scenes", real)
    assert folds.main(options) == 2
    assert capsys.readouterr().err.startswith("sar_folds: There is no x")
    if SIMULATED:
        with pytest.raises(SystemExit):
            folds.main([*options, "--record"])
        assert "there is none here" in capsys.readouterr().err
        assert folds.main(["--data", "x", "--device", "gpu"]) == 2
        assert "library='torch' needs a GPU, but" in capsys.readouterr().err


def test_the_loss_of_the_twin_is_the_tapes():
    random = np.random.default_rng(0)
    for target in (random.integers(-1, 3, (2, 4, 4)), np.full((2, 4, 4), -1)):
        logits = random.standard_normal((2, 3, 4, 4)).astype(np.float32)
        weight = np.array([0.5, 1, 2], np.float32)
        ours = ag.tensor(logits, requires_grad=True)
        loss = ag.combined_loss(ours, target, weight)
        loss.backward()
        theirs = torch.from_numpy(logits).requires_grad_()
        found = folds.combined_loss(theirs, torch.from_numpy(target), torch.from_numpy(weight))
        found.backward()
        assert found.item() == pytest.approx(loss.item(), abs=1e-6)
        np.testing.assert_allclose(theirs.grad.numpy(), ours.grad, atol=1e-6)


@pytest.mark.skipif(
    REAL is None or not Path(REAL, "sen1floods11").is_dir(),
    reason="COURSE_DATA names no folder with sen1floods11",
)
def test_each_fold_of_the_real_chips_has_water_and_land_and_trains(monkeypatch):
    scenes, parts = folds._scenes(Path(REAL, "sen1floods11"))
    assert sorted(name for fold in parts for name in fold) == sorted(set(scenes.scenes))
    for names in parts:
        for part in data.sar.leave_out(scenes, names):
            assert part.class_counts().min() > 100_000
    assert 0.2 < folds._threshold(scenes, parts) < 0.6
    for name, value in dict(DEPTH=2, CHANNELS=4, LEARNING_RATE=1e-2).items():
        monkeypatch.setattr(folds, name, value)
    study, losses = folds.Study(scenes, parts, epochs=3, device="cpu"), []
    for way in (folds.on_the_tape, folds.by_pytorch):
        task, held = study.task(0, 1, n_images=32)
        found, of_epochs = way(task, held.images[:16], "cpu")
        assert found.shape == (16, 128, 128) and of_epochs[-1] < of_epochs[0]
        losses.append(of_epochs)
    np.testing.assert_allclose(*losses, rtol=1e-3)


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_bench_unet_on_a_gpu(monkeypatch):
    monkeypatch.setattr(benchmark, "SHAPES", ((4, 2, 64, 64),))
    monkeypatch.setattr(benchmark, "TAPE_SHAPE", (4, 2, 64, 64))
    monkeypatch.setattr(benchmark, "CHANNELS", 16)
    monkeypatch.setattr(tape, "CASES", ((2, 2, 10),))
    try:
        found = {(r["name"], r["dtype"]): r for r in benchmark.run(rounds=3)}
    except benchmark.Failed as failed:  # as Ctrl-C it would end pytest, which would not say why
        pytest.fail(str(failed))
    for name, record in found.items():
        assert all(row["microseconds"] > 0 for row in record["rows"]), name
        assert not record.get("left_out"), record["left_out"]
    assert sum(row["share"] for row in found["unet.shares", "float32"]["rows"]) > 0.95
    (record,) = folds.run(data_folder=None, seeds=(0,), epochs=4, device="gpu")
    assert abs(record["iou"][folds.OURS] - record["iou"][folds.PEER]) < 0.1
