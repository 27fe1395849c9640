"""The benchmarks of the Fashion-MNIST network: what they check, time and record, without a GPU."""

import sys

import pytest
import torch
import torch.nn.functional as F
from benched import each_once, set_all, without_a_gpu

from course_lib import bench, benchmarks
from course_lib.benchmarks import fashion_mnist as benchmark
from course_lib.benchmarks import fashion_mnist_command as whole_command
from course_lib.benchmarks import fashion_mnist_parts as parts
from course_lib.benchmarks import fashion_mnist_training as training
from course_lib.benchmarks import gpu
from course_lib.data import DataError
from course_lib.kernels import conv2d, linear, max_pool2d

WIDTHS = (2, 3, 8)
LABELS = [
    "ours, captured", "ours, modules", "PyTorch eager", "PyTorch eager, channels-last",
    "PyTorch captured", "PyTorch captured, channels-last",
]  # fmt: skip
#: In training, too: the trainer of any network.
ANY = benchmark.ANY, benchmark.ANY + benchmark.LAST


def compute_by_torch(monkeypatch):
    """Let PyTorch compute what the larger layers give: they have tests, and are slow simulated."""

    def forward(x, weight, bias, *, activation="none", out=None, **_):
        y = F.linear(x, weight, bias)
        y = y.relu() if activation == "relu" else y
        return y if out is None else out.copy_(y)

    def backward(dy, x, weight, **_):
        return dy @ weight, dy.t() @ x, dy.sum(0)

    monkeypatch.setattr(linear, "forward", forward)
    monkeypatch.setattr(linear, "backward", backward)

    def conv_forward(x, weight, bias, *, out=None, **_):
        y = F.conv2d(x, weight, bias)
        return y if out is None else out.copy_(y)

    monkeypatch.setattr(conv2d, "forward", conv_forward)
    pair, aten = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1), torch.ops.aten

    def conv_backward(dy, x, weight, *, needs=(True, True, True), **_):
        n_out = [len(weight)]
        return aten.convolution_backward(dy, x, weight, n_out, *pair, [*needs])

    monkeypatch.setattr(conv2d, "backward", conv_backward)
    twos = [2, 2], [2, 2], [0, 0], [1, 1], False

    def pool(x, kernel_size, *, relu=False, **_):
        y, indices = aten.max_pool2d_with_indices(x, *twos)
        return (y.relu(), indices.where(y > 0, -1)) if relu else (y, indices)

    def pool_backward(dy, indices, shape, kernel_size, **_):
        dy, indices = dy.where(indices >= 0, 0), indices.clamp(min=0)
        return aten.max_pool2d_with_indices_backward(dy, dy.new_empty(shape), *twos, indices)

    monkeypatch.setattr(max_pool2d, "forward", pool)
    monkeypatch.setattr(max_pool2d, "backward", pool_backward)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Let the benchmarks run a small network without a GPU, a graph or real times."""
    without_a_gpu(monkeypatch)
    compute_by_torch(monkeypatch)
    for each in (benchmark, parts):
        monkeypatch.setattr(each, "DEVICE", "cpu")
        monkeypatch.setattr(each, "_once", lambda candidate: 1e6)
    peak = iter(range(0, 10**9, 10**3))
    monkeypatch.setattr(gpu, "peak", lambda: next(peak))
    set_all(
        monkeypatch, benchmark, WIDTHS=WIDTHS, N_IMAGES=8,
        _captured_eager=lambda model, x: lambda: model(x), _captured_step=captured_step,
    )  # fmt: skip
    set_all(monkeypatch, bench, loop_times=each_once, device_times=each_once)


def captured_step(step, model, optimizer, state, label, expected, precision):
    step()
    benchmark._same(label, benchmark._parameters(model), expected, precision)
    return step


def test_all_ways_are_checked_and_timed(on_the_cpu, monkeypatch):
    monkeypatch.setattr(parts, "BATCHES", (2,))
    before = torch.backends.cudnn.benchmark
    found = benchmark.run(batches=(2,), precisions=("float32",), rounds=2)
    assert torch.backends.cudnn.benchmark is before
    assert [(record["name"], record["shape"][0]) for record in found] == [
        ("fashion_mnist.training", 2), ("fashion_mnist.inference", 2), ("fashion_mnist.parts", 2),
    ]  # fmt: skip
    hashes = benchmark.kernel_hashes()
    for record in found:
        assert record["kernel_hash"] == hashes[record["name"]]
        labels = [row["label"] for row in record["rows"]]
        if record["name"] == parts.NAME:
            assert labels[-1] == parts.STEP and len(labels) == 16
            continue
        expected = [*LABELS, *ANY] if record["name"] == benchmark.TRAINING else LABELS
        assert sorted(labels) == sorted(expected)
        for row in record["rows"]:
            assert row["images_per_second"] == 100_000 * record["shape"][0]
            assert row["kind"] == ("ours" if row["label"].startswith("ours") else "peer")
            assert row["peak_bytes"] >= 0
    assert "images/s" in benchmarks.table(found)


def test_a_step_that_goes_elsewhere_is_not_timed(on_the_cpu, monkeypatch):
    backward = linear.backward

    def wrong(*arguments, **options):
        dx, dweight, dbias = backward(*arguments, **options)
        return dx, 1.01 * dweight, dbias

    monkeypatch.setattr(linear, "backward", wrong)
    with pytest.raises(AssertionError, match="ours, captured is wrong.*one step changes"):
        benchmark.training("float32", 2)


def test_wrong_logits_are_not_timed(on_the_cpu, monkeypatch):
    forward = linear.forward

    def wrong(*arguments, **options):
        return forward(*arguments, **options) + 0.01

    monkeypatch.setattr(linear, "forward", wrong)
    with pytest.raises(AssertionError, match="ours, modules is wrong.*its logits are off"):
        benchmark.inference("float32", 2)


# --------------------------------------------------------------------------- the command


@pytest.fixture
def small_command(monkeypatch):
    monkeypatch.setattr(whole_command, "PLACE", "cpu")
    monkeypatch.setattr(whole_command, "OPTIONS", ("--device", "cpu", "--no-cuda-kernels"))
    for name, value in dict(N_TRAIN=32, N_TEST=8, EPOCHS=2, BATCH_SIZE=16).items():
        monkeypatch.setattr(whole_command, name, value)


@pytest.mark.timeout(300)
def test_the_command_is_timed_beside_pytorchs_script(small_command, tmp_path, monkeypatch):
    # What is measured is what was run: lines that come a known time apart.
    made = []
    monkeypatch.setattr(whole_command, "_seconds", lambda line: made.append(line) or (
        0.5 if "course_lib" in line else 2.0
    ))  # fmt: skip
    record = whole_command.measure("float32", 2, "a hash", "bench")
    assert [row["label"] for row in record["rows"]] == [whole_command.OURS, whole_command.PEER]
    ours, peer = record["rows"]
    assert (ours["microseconds"], peer["microseconds"]) == (250_000, 1_000_000)  # of two steps
    assert ours["images_per_second"] == 64 and record["speedup"] == 4
    assert (record["name"], record["shape"][0]) == (whole_command.NAME, 16)
    assert "64 images/s" in benchmarks.table([record])
    assert len(made) == 4 and made[0][2:5] == ["course_lib", "train", "fashion-mnist"]


@pytest.mark.timeout(300)
def test_both_sides_run_as_processes_and_save(small_command, tmp_path):
    images = whole_command._write_set(tmp_path)
    for make, files in (
        (whole_command._command, {"checkpoint.pt", "history.json", "history.png"}),
        (whole_command._script, {"checkpoint.pt", "history.json"}),
    ):
        output = tmp_path / make.__name__
        assert 0 < whole_command._seconds(make(images, output, "float32")) < 100
        assert {path.name for path in output.iterdir()} == files
    for script in ("print('epoch 1')", "raise SystemExit('wrong')"):  # too few lines; no success
        with pytest.raises(RuntimeError, match="(?s)-c .* failed:"):
            whole_command._seconds([sys.executable, "-c", script])


def test_the_command_is_timed_with_its_batch_size_alone(monkeypatch):
    monkeypatch.setattr(benchmark, "_measure", lambda *case: [case])
    monkeypatch.setattr(whole_command, "measure", lambda *case: case)
    both = "float32", "tf32"
    assert len(benchmark.run(batches=(1, 8), rounds=9)) == 4
    found = benchmark.run(batches=(32,), rounds=9)
    assert [case[:2] for case in found[2:]] == [(precision, 5) for precision in both]


# ------------------------------------------------------------------------------ training


def test_runs_are_recorded_with_losses_and_answers(on_the_cpu, monkeypatch):
    monkeypatch.setattr(training, "DEVICE", "cpu")
    monkeypatch.setattr(training, "BATCH_SIZE", 4)
    monkeypatch.setattr(training, "WARM_UP", 4)
    monkeypatch.setattr(training, "POINTS", 2)
    few = [(x[:12], y[:12]) for x, y in (training.data.fashion_mnist(),) * 2]
    monkeypatch.setattr(training.data, "fashion_mnist", lambda folder, train: few[train])
    monkeypatch.setattr(training.fashion_mnist, "create", create_small)
    (record,) = training.run(data_folder=None, seeds=(3, 4), epochs=2)
    assert record["drawn"] and record["kernel_hash"] == training.kernel_hashes()[training.NAME]
    assert [(row["seed"], row["label"]) for row in record["rows"]] == [
        (seed, label) for seed in (3, 4) for label in training.WAYS
    ]
    for row in record["rows"]:
        assert row["steps"] == 6 and row["steps_to_a_point"] == 3 and len(row["losses"]) == 2
        assert [entry["epoch"] for entry in row["history"]] == [1, 2]
        mean = sum(row["losses"]) / 2
        assert mean == pytest.approx(sum(e["loss"] for e in row["history"]) / 2, abs=1e-3)
        if row["seed"] == 3:
            assert sum(map(sum, row["confusion"])) == 12
            right = sum(row["confusion"][k][k] for k in range(10)) / 12
            assert right == row["history"][-1]["validation_accuracy"]
    assert record["accuracy"].keys() == training.WAYS.keys()
    assert benchmarks.table([record])


def create_small(settings):
    torch.manual_seed(settings["seed"])
    layers = training.fashion_mnist.nn if settings["use_cuda_kernels"] else torch.nn
    return training.fashion_mnist.models.FashionMNISTCNN(widths=WIDTHS, layers=layers)


def test_the_images_must_be_named_and_be_there(tmp_path):
    assert benchmarks.refused(training, {}) == "it needs --data"
    assert benchmarks.refused(training, {"data_folder": tmp_path}) is None
    assert benchmarks.refused(benchmark, {"data_folder": tmp_path}) == "it has no choice of --data"
    with pytest.raises(DataError, match="has no Fashion-MNIST"):
        training.run(data_folder=tmp_path)


def test_the_recorded_command_is_five_times_as_fast_as_the_script():
    records = [record for held in bench.recordings() for record in held["records"]]
    speedups = [r["speedup"] for r in records if r["name"].startswith(whole_command.NAME)]
    assert speedups and min(speedups) >= 5


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_bench_fashion_mnist_on_a_gpu(monkeypatch):
    for name, value in dict(N_TRAIN=4096, N_TEST=512, EPOCHS=2).items():
        monkeypatch.setattr(whole_command, name, value)
    for record in benchmark.run(batches=(32,), rounds=3):
        rows = {row["label"]: row for row in record["rows"]}
        assert all(row["microseconds"] > 0 for row in rows.values())
        if record["name"].startswith(whole_command.NAME):
            assert record["speedup"] > 0
        elif not record["name"].startswith(parts.NAME):
            more = set(ANY) if record["name"].startswith(benchmark.TRAINING) else set()
            assert set(rows) == {*LABELS} | more and rows["ours, captured"]["peak_bytes"] > 0
    (record,) = training.run(data_folder=None, seeds=(0,), epochs=2)
    assert min(record["accuracy"].values()) > 0.8
