"""Several ranks train as one process does with the joint batch; they stop and fail together."""

import functools
import os
import signal

import pytest
import torch
from image_runs import at_step, run
from kill_and_resume import differences
from pairs import in_ranks
from stopped_runs import one_thread
from torch import nn
from torch.nn.functional import cross_entropy

from course_lib import backend, cli, data, train
from course_lib.train import checkpoint, folder, image_classifier, images, loop, ranks
from course_lib.train.fashion_mnist_graph import FashionMNISTPass
from course_lib.train.sar import SarSettings, train_sar
from course_lib.train.step import Step, scaler_for
from course_lib.train.sync_batch_norm import synchronised

STREAMS = "40KB"  # of two ranks, of which each would hold 23


@pytest.fixture(scope="module", autouse=True)
def _alone():
    with one_thread(), pytest.MonkeyPatch.context() as patch:
        held = functools.cache(data.leaves)
        patch.setattr(data, "leaves", lambda root, memory, **given: held(root, **given))
        yield


@pytest.fixture(scope="module")
def clothes():
    return [
        tensor[:n] for part, n in ((True, 21), (False, 5))
        for tensor in data.fashion_mnist(train=part)
    ]  # fmt: skip


def weights(model):
    """All that is learned, and running statistics, in a row."""
    return torch.cat([t.detach().double().flatten() for t in model.state_dict().values()])


# ------------------------------------------------------------------------- a batch's parts


def test_ranks_share_out_every_batch(monkeypatch):
    for n in (1, 2, 3):
        monkeypatch.setattr(ranks, "count", lambda n=n: n)
        for size, parts in ((7, 1), (12, 2), (13, 3), (n * 4, 4)):
            mine, weight = [], 0
            for rank in range(n):
                monkeypatch.setattr(ranks, "number", lambda rank=rank: rank)
                rows = ranks.rows(size, parts)
                mine += rows.tolist()
                weight += ranks.share(len(rows), size)
                assert len(rows)
            assert sorted(mine) == list(range(size)) and weight == pytest.approx(n)
        with pytest.raises(ValueError, match=rf"{n} ranks want a sample each.* has {n - 1}: "):
            ranks.require_enough(n - 1)


# ------------------------------------------------------------------- the joint batch's weights


def clothes_by_modules(clothes):
    """10 steps of SGD with momentum, batches of 7: 4 images and 3."""
    found = train.train_fashion_mnist(
        *clothes, epochs=4, batch_size=7, trainer="modules", device_name="cpu",
        use_cuda_kernels=False,
    )  # fmt: skip
    return weights(found[0]), found[1]


def photographs(root, model, **options):
    """12 steps of SGD, each in two parts, clipped."""
    given = dict(
        model=model, epochs=4, batch_size=8, mixup=0.0, cutmix=0.0, optimizer="sgd",
        learning_rate=0.02, sync_batch_norm=True, clip_grad=0.5, grad_accum_steps=2,
    )  # fmt: skip
    found = run(root, **given | options)
    return weights(found[0]), found[1]


class Wide(nn.Sequential):
    """A network that computes in float64."""

    def forward(self, x):
        return super().forward(x.double())


def leaves():
    """10 steps of AdamW, in float64."""
    torch.manual_seed(3)
    model = Wide(
        nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5)
    ).double()  # fmt: skip
    found = train.train_leaves(
        model, image_size=8, epochs=5, batch_size=181, learning_rate=1e-2, device_name="cpu",
        sync_batch_norm=True, use_cuda_kernels=False,
    )  # fmt: skip
    return weights(found[0]), found[1]


#: 12 steps of AdamW in float64, of 4 images and 3.
UNEVEN = {"batch_size": 7, "grad_accum_steps": 1, "optimizer": "adamw", "learning_rate": 1e-3}


def without_dropout(create, dtype=torch.float32):
    """`create`, whose networks drop nothing, which each rank would draw for itself."""

    def created(*arguments):
        model = create(*arguments)
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        model.register_forward_pre_hook(lambda model, inputs: tuple(x.to(dtype) for x in inputs))
        return model.to(dtype)

    return created


def radar():
    settings = SarSettings(
        use_cuda=False, depth=2, initial_channels=2, image_size=16, num_synthetic_samples=4,
        batch_size=3, num_epochs=2, use_batchnorm=False,
    )  # fmt: skip
    model, history = train_sar(settings, tell=str)
    return torch.cat([torch.tensor(a).flatten() for a in model.state_dict().values()]), history


@pytest.mark.parametrize("name, n", [
    ("clothes", 2), ("leaves", 2), ("tiny_cnn", 2), ("tiny_cnn", 3), ("tiny_cnn by AdamW", 2),
    ("two pathways", 2), ("radar", 2), ("radar", 3),
])  # fmt: skip
def test_the_weights_are_those_of_the_joint_batch(name, n, root, clothes, monkeypatch):
    monkeypatch.delenv("COURSE_LIB_SIMULATOR", raising=False)
    monkeypatch.setattr(backend, "_chosen", None)
    dtype = torch.float64 if "AdamW" in name else torch.float32
    monkeypatch.setattr(images, "create", without_dropout(images.create, dtype))
    options = {"batch_size": 12, "epochs": 6} if n == 3 else {}
    function = {
        "clothes": lambda: clothes_by_modules(clothes),
        "tiny_cnn": lambda: photographs(root, "tiny_cnn", **options),
        "tiny_cnn by AdamW": lambda: photographs(root, "tiny_cnn", **UNEVEN),
        "two pathways": lambda: photographs(
            root, "continuous_integration", base_channels=4, **options
        ),
        "radar": radar,
        "leaves": leaves,
    }[name]
    alone, history = function()
    for found, told in in_ranks(n, function):
        torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-6)
        for mine, theirs in zip(history, told, strict=True):
            for key, value in mine.items():
                if not isinstance(value, dict):
                    assert theirs[key] == pytest.approx(value, abs=1e-5), key


def test_gradients_that_are_averaged_at_once_are_those_of_the_overlapped_average():
    def gradients(capture):
        torch.manual_seed(ranks.number())  # rank 0's weights count
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 3))
        model[0].to(memory_format=torch.channels_last)
        model[2].double()
        model[1].register_forward_hook(lambda layer, x, y: y.double())
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        place = torch.device("cpu")
        make = Step(
            model, sgd, cross_entropy, precision="float32", max_norm=None, accumulate=2,
            measure=None, scaler=scaler_for(place, "float32", None), capture=capture,
        )  # fmt: skip
        torch.manual_seed(10 + ranks.number())
        make([torch.randn(5, 2, 3, 3)], [torch.tensor([0, 1, 2, 1, 0])])
        return [p.grad.clone() for p in model.parameters()]

    found = in_ranks(2, lambda: (gradients(True), gradients(False)))
    for one, other, third in zip(*found[0], found[1][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        assert torch.equal(one, third) and one.any()


@pytest.mark.usefixtures("first_rungs")
def test_a_pass_of_kernels_alone_shares_its_batches():
    pixels = torch.arange(6 * 28 * 28).mul(37).remainder(256).to(torch.uint8).view(6, 28, 28)
    labels = torch.tensor([0, 1, 2, 3, 4, 5])

    def trained():
        torch.manual_seed(0)
        model = train.fashion_mnist.models.FashionMNISTCNN(widths=(1, 2, 3))
        task = FashionMNISTPass(
            model, pixels, labels, (pixels[:1], labels[:1]), epochs=1, batch_size=3,
            learning_rate=0.1, seed=5,
        )  # fmt: skip
        task.train_step(0)
        task.load_state_dict(task.state_dict())
        task.train_step(1)
        return weights(model), task.end_epoch()

    alone, entry = trained()
    for found, told in in_ranks(2, trained):
        assert (found - alone).abs().max() <= 1e-6 and told == pytest.approx(entry, abs=1e-6)


def test_synchronised_statistics_are_those_of_the_joint_batch():
    x = torch.randn(7, 3, 4, generator=torch.Generator().manual_seed(0)) * 3 + 100

    def normalised():
        torch.manual_seed(1)
        layer = nn.BatchNorm1d(3, momentum=None)
        layer = synchronised(layer) if ranks.are_joined() else layer
        mine = x[ranks.rows(7)].requires_grad_()
        for _ in range(2):
            y = layer(mine)
        (y * y[:, :1]).sum().backward()
        return ranks.gathered(y.detach(), 7), ranks.gathered(mine.grad, 7), layer.state_dict()

    alone = normalised()
    for found in in_ranks(2, normalised):
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=2e-5)

    class More(nn.BatchNorm2d):
        pass

    with pytest.raises(ValueError, match="0 is a More, which cannot be synchronised"):
        synchronised(nn.Sequential(More(3)))


# --------------------------------------------------------------------- stopping and going on


def stopped_at(number, signals=(), **options):
    """A run that rank 1 alone hears Ctrl-C in."""

    def act():
        if ranks.number() == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        at_step(patch, number, act)
        run(**options)


@pytest.mark.parametrize("n", [2, 3])
def test_one_rank_hears_ctrl_c_and_all_stop_and_go_on_with_the_same_bits(n, root, tmp_path):
    """Two ranks hold their images in the one run, and stream them in the other; a disk fills up."""
    options = {"root": root, "sync_batch_norm": n == 3, "checkpoint_steps": 100, "epochs": 2}
    in_ranks(n, lambda: run(output=tmp_path / "whole", **options) and None)
    if n == 2:
        options |= {"memory_limit": STREAMS, "num_workers": 1}
    stop = functools.partial(stopped_at, 1, output=tmp_path / "run", **options)
    assert {type(found) for found in in_ranks(n, stop)} == {KeyboardInterrupt}
    kept = checkpoint.load(tmp_path / "run" / "checkpoint.pt")
    assert 2 <= kept["step"] <= 4
    go_on = functools.partial(run, output=tmp_path / "run", resume=True, **options)
    if n == 2:
        full, before = tmp_path / "run/checkpoint.pt.part", tmp_path / "run/checkpoint.pt"
        before = before, before.read_bytes()
        full.symlink_to("/dev/full")
        for told in in_ranks(n, go_on):
            assert "(No space left on device): the checkpoint.pt before it is whole" in str(told)
        assert before[0].read_bytes() == before[1]
    in_ranks(n, lambda: go_on() and None)
    found = differences(tmp_path / "whole/checkpoint.pt", tmp_path / "run/checkpoint.pt")
    assert found == (["checkpoint.settings.images"] if n == 2 else [])
    assert {f.name for f in (tmp_path / "run").iterdir()} == {
        "checkpoint.pt", "history.json", "history.png"
    }  # fmt: skip


def test_a_run_goes_on_with_another_number_of_ranks(root, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "create", without_dropout(images.create))
    options = {
        "root": root, "mixup": 0.0, "cutmix": 0.0, "sync_batch_norm": True, "optimizer": "sgd",
        "checkpoint_steps": 3,
    }  # fmt: skip
    alone, history = run(**options)
    output = tmp_path / "run"
    for n, end in ((2, 3), (3, 9), (1, None)):
        with monkeypatch.context() as patch:
            if end is not None:
                save = checkpoint.save

                def save_and_stop(path, *, step, save=save, end=end, **content):
                    save(path, step=step, **content)
                    if step == end:
                        raise loop.TrainingError("enough")

                patch.setattr(checkpoint, "save", save_and_stop)
            go_on = functools.partial(run, output=output, resume=output.exists(), **options)
            found = in_ranks(n, go_on)
        if end is not None:
            assert [str(each) for each in found] == ["enough"] * n
    model, told = found[0]
    assert (weights(model) - weights(alone)).abs().max() < 1e-5
    for mine, theirs in zip(history, told, strict=True):
        assert theirs == pytest.approx(mine, abs=1e-4)


# ------------------------------------------------------------------------- failing together


def test_what_concerns_the_folder_is_raised_on_every_rank(root, tmp_path):
    def told(n=2, **options):
        found = in_ranks(n, functools.partial(run, root, tmp_path / "run", epochs=1, **options))
        assert len({(type(each), str(each)) for each in found}) == 1
        return found[0]

    assert "There is no folder" in str(told(resume=True))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.pt.part").symlink_to("/dev/full")
    full = told()
    assert isinstance(full, folder.FolderError) and "No space left on device" in str(full)
    in_ranks(2, lambda: run(root, tmp_path / "run", epochs=1) and None)
    assert "is of an earlier run" in str(told())
    assert "batch_size was 6, and is now 8" in str(told(resume=True, batch_size=8))


@pytest.mark.parametrize(
    "first, second, told",
    [
        (
            ["images", "--checkpoint-steps", "1"],
            ["images", "--max-minutes", "1"],
            "rank 1 has checkpoint_steps None, and rank 0 1; max_minutes 1.0, and rank 0 None",
        ),
        (["images"], ["images", "--model", "resnet18_small"], "rank 1 has model 'resnet18_small'"),
        (
            ["images"],
            ["leaves"],
            "rank 1 has task 'leaves', and rank 0 'images': start all with one",
        ),
        (
            ["leaves"],
            ["leaves", "--evaluate", "a.pt"],
            "rank 1 has evaluate 'a.pt', and rank 0 None",
        ),
    ],
)
def test_other_commands_are_refused_before_anything_is_read(first, second, told, tmp_path, capfd):
    missing = ["--data", str(tmp_path / "missing"), "--device", "cpu"]

    def command():
        return cli.main(["train", *(second if os.environ["RANK"] == "1" else first), *missing])

    assert in_ranks(2, command, join=False) == [2, 2]
    assert told in capfd.readouterr().err


def test_other_images_on_a_host_are_told():
    def refused():
        ranks.require_same({"seed": 1, "images": f"a hash {ranks.number()}"})

    for found in in_ranks(2, refused):
        assert "rank 1 has read other images than rank 0, in number, names or" in str(found)


def _spoilt(task, loss, right):
    task.totals += 0.0 if ranks.is_first() else float("nan")


def test_ranks_with_other_settings_and_losses_that_are_not_finite(root, monkeypatch):
    for found in in_ranks(2, lambda: run(root, seed=ranks.number())):
        assert str(found) == "rank 1 has seed 1, and rank 0 0: start all with one command"

    monkeypatch.setattr(image_classifier.Classifier, "_count", _spoilt)
    for found in in_ranks(2, lambda: run(root)):
        assert isinstance(found, loop.TrainingError) and "the loss is nan" in str(found)


def test_the_time_limit_of_one_rank_ends_all():
    class Task:
        epochs, steps_per_epoch = 3, 2

        def train_step(self, step):
            pass

        def end_epoch(self):
            return {"loss": 0.5}

    late = lambda: len(loop.fit(Task(), {}, until=0.0 if ranks.number() else 1e12))  # noqa: E731
    assert in_ranks(2, late) == [1, 1]
