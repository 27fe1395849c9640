"""`train` as a user starts it, where things go wrong: one sentence, no traceback, nothing lost."""

import contextlib
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import zipfile

import pytest
import torch
from kill_and_resume import differences
from test_data import by_folder, marked, zipped
from test_fashion_mnist import idx

from course_lib import cli, data, train
from course_lib.train import checkpoint, classifier, folder, memory, timing

OPTIONS = "--device cpu --no-cuda-kernels --epochs 2 --batch-size 16 --checkpoint-steps 2".split()


@pytest.fixture(scope="module")
def clothes(tmp_path_factory):
    """A folder with a very small Fashion-MNIST."""
    place = tmp_path_factory.mktemp("clothes")
    for part, name, n in ((True, "train", 64), (False, "t10k", 16)):
        images, labels = (tensor[:n].numpy() for tensor in data.fashion_mnist(train=part))
        (place / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
        (place / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels.astype("uint8")))
    return place


def words(clothes, output, *more):
    return ["train", "fashion-mnist", "--data", clothes, "--output", output, *OPTIONS, *more]


def start(arguments, errors):
    """A process that runs the command, without a second import of torch; it writes to `errors`."""

    def run():
        with open(errors, "w") as file:
            os.dup2(file.fileno(), 2)
        sys.stderr = open(2, "w", closefd=False)
        torch.set_num_threads(1)
        sys.exit(cli.main(list(map(str, arguments))))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def told(arguments, status, errors):
    """The one sentence with which the command ends."""
    process = start(arguments, errors)
    process.join(100)
    return ended(process.exitcode, status, errors.read_text())


def ended(found, status, errors):
    assert found == status and "Traceback" not in errors, errors
    (sentence,) = [line for line in errors.splitlines() if line.startswith("python -m course_lib")]
    return sentence


@pytest.fixture(scope="module")
def whole(clothes, tmp_path_factory):
    """A run that was left alone."""
    output = tmp_path_factory.mktemp("whole")
    assert cli.main(list(map(str, words(clothes, output)))) == 0
    return output


@pytest.fixture
def begun(clothes, tmp_path, monkeypatch):
    """The folder of a run that was stopped after 5 of its 8 steps."""
    with monkeypatch.context() as patch:
        step = classifier.Classifier.train_step

        def train_step(task, number):
            if number == 5:
                raise KeyboardInterrupt
            step(task, number)

        patch.setattr(classifier.Classifier, "train_step", train_step)
        assert cli.main(list(map(str, words(clothes, tmp_path / "run")))) == 130
    return tmp_path / "run"


def goes_on(clothes, begun, whole):
    """A run that is resumed ends with the bits of one that was left alone."""
    assert cli.main(list(map(str, words(clothes, begun, "--resume")))) == 0
    assert differences(whole / "checkpoint.pt", begun / "checkpoint.pt") == []
    assert {file.name for file in begun.iterdir()} == {file.name for file in whole.iterdir()}


# ------------------------------------------------------------------------ the folder


@pytest.mark.parametrize("name", ["checkpoint.pt", "history.json", "history.png"])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux's full device")
def test_no_file_of_a_run_is_lost_to_a_full_disk(clothes, begun, whole, name, tmp_path):
    before = (begun / "checkpoint.pt").read_bytes()
    (begun / f"{name}.part").symlink_to("/dev/full")
    said = told(words(clothes, begun, "--resume"), 1, tmp_path / "said")
    assert f"{name} cannot be written to the folder {begun} (No space left on device)" in said
    checkpoint.load(begun / "checkpoint.pt")
    if name == "checkpoint.pt":
        assert "the checkpoint.pt before it is whole" in said and "go on with --resume" in said
        assert (begun / "checkpoint.pt").read_bytes() == before
    goes_on(clothes, begun, whole)


def test_a_folder_that_cannot_be_written_to(clothes, tmp_path):
    (tmp_path / "file").write_text("")
    said = told(words(clothes, tmp_path / "file" / "run"), 1, tmp_path / "said")
    assert f"The folder {tmp_path / 'file' / 'run'} cannot be written to" in said


def test_one_run_at_a_time(clothes, begun, whole, tmp_path):
    before = {file.name: file.read_bytes() for file in begun.iterdir()}
    with folder.held(begun):
        said = told(words(clothes, begun, "--resume"), 1, tmp_path / "said")
    assert f"Another run is writing to {begun}: wait until it ends" in said
    assert {file.name: file.read_bytes() for file in begun.iterdir()} == before
    goes_on(clothes, begun, whole)


def test_a_killed_runs_lock_stops_nobody(tmp_path):
    if (child := os.fork()) == 0:
        with folder.held(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert (tmp_path / folder.LOCK).exists()
    for _ in range(2):
        with folder.held(tmp_path), pytest.raises(folder.FolderError), folder.held(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def slow_disk(path):
    """Make `path` lead to a disk that takes a pipe's worth and then waits: yields "is it full?"."""
    pipe = path.with_name("slow")
    os.mkfifo(pipe)
    path.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        yield lambda: not select.select([], [writer], [], 0)[1]
    finally:
        os.close(writer)
        os.close(reader)
        pipe.unlink()


def test_ctrl_c_while_a_checkpoint_is_written(clothes, begun, whole, tmp_path):
    before = (begun / "checkpoint.pt").read_bytes()
    with slow_disk(begun / "checkpoint.pt.part") as is_full:
        process = start(words(clothes, begun, "--resume"), tmp_path / "said")
        while not is_full():
            assert process.is_alive()
            time.sleep(0.01)
        time.sleep(0.2)  # what filled it may have been the end of a write: there comes another
        os.kill(process.pid, signal.SIGINT)
        process.join(250)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 130 and "Traceback" not in said
    assert "Stopped." in said and "the last checkpoint is whole" in said
    assert (begun / "checkpoint.pt").read_bytes() == before
    goes_on(clothes, begun, whole)


def test_what_is_still_to_be_written_does_not_hold_up_ctrl_c(tmp_path):
    """Neither what waits in a buffer nor what the writer adds to end its file."""
    def write(file):
        file.write(b"begin")
        try:
            file.write(bytes(1 << 20))
        finally:
            file.write(b"end")

    def press():
        while not is_full():
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with slow_disk(tmp_path / "file.part") as is_full:
        threading.Thread(target=press, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            checkpoint.write_whole(tmp_path / "file", write)


# ------------------------------------------------------------------- spoilt checkpoints


@pytest.mark.parametrize("change, sentence", [
    ({"step": "5"}, "is no whole checkpoint"),
    ({"step": -1}, "is no whole checkpoint"),
    ({"step": 99}, "is of step 99 and has 1 epochs, as no run of 8 steps has"),
    ({"history": []}, "is of step 4 and has 0 epochs"),
    ({"history": [1]}, "is no whole checkpoint"),
    ({"settings": []}, "is no whole checkpoint"),
    ({"settings": {}}, "belongs to another run: batch_size was None"),
    ({"state": {}}, "does not fit this network"),
    ({"state": {"model": 3, "optimizer": {}, "totals": 0}}, "does not fit this network"),
])
def test_hand_edited_checkpoints(clothes, begun, change, sentence, capsys):
    path = begun / "checkpoint.pt"
    torch.save(checkpoint.load(path) | change, path)
    before = path.read_bytes()
    assert cli.main(list(map(str, words(clothes, begun, "--resume")))) == 2
    assert f"{path} {sentence}" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize("settings, state, sentence", [
    ({"seed": "none"}, {}, "has 'none' for its seed"),
    ({"precision": None}, {}, "has None for its precision"),
    ({"precision": "int8"}, {}, "precision must be"),
    ({}, {"model": {}}, "does not hold the weights of its network"),
    ({}, {"model": None}, "does not hold the weights of its network"),
])
def test_hand_edited_checkpoints_are_not_evaluated(whole, tmp_path, settings, state, sentence):
    kept = checkpoint.load(whole / "checkpoint.pt")
    kept["settings"] |= settings
    kept["state"] |= state
    torch.save(kept, tmp_path / "edited.pt")
    with pytest.raises(ValueError, match=sentence):
        train.load_fashion_mnist(tmp_path / "edited.pt", device_name="cpu")


def test_a_foreign_file_is_not_evaluated(clothes, tmp_path):
    with zipfile.ZipFile(tmp_path / "foreign.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02cno\nsuch\n.")
        archive.writestr("archive/version", "3")
    arguments = words(clothes, tmp_path, "--evaluate", tmp_path / "foreign.pt")
    said = told(arguments, 2, tmp_path / "said")
    assert f"{tmp_path / 'foreign.pt'} is no whole checkpoint" in said


# --------------------------------------------------------------------------- data sets


def leaves(root, output, *more):
    options = "--model small_se_net --no-cuda-kernels --device cpu --epochs 1 --batch-size 4"
    data_set = [] if root is None else ["--data", root]
    return ["train", "leaves", *data_set, "--output", output, *options.split(), *more]


def test_an_image_size_that_no_machine_has_room_for(tmp_path):
    said = told(leaves(None, tmp_path / "run", "--image-size", 100_000_000), 2, tmp_path / "said")
    assert "Six batches of 4 images take 720,000,000.0 GB" in said and "or image_size" in said


def test_a_zip_with_a_password(tmp_path):
    packed = zipped(by_folder(tmp_path / "set"), tmp_path / "set.zip")
    marked(packed, (6, 8), 1)  # the flags of every member
    said = told(leaves(packed, tmp_path / "run", "--image-size", 16), 2, tmp_path / "said")
    assert "cannot be unpacked here" in said and "unpack the zip, and name the folder" in said


def test_a_pipe_among_the_images(tmp_path):
    root = by_folder(tmp_path / "set")
    os.mkfifo(root / "rust" / "pipe.png")
    said = told(leaves(root, tmp_path / "run", "--image-size", 16), 2, tmp_path / "said")
    assert f"{root / 'rust' / 'pipe.png'} is no file, or a link to none: remove it" in said


def test_a_set_that_is_split_is_told_and_learnt_so(tmp_path, capsys):
    by_folder(tmp_path / "set" / "train")
    by_folder(tmp_path / "set" / "val")
    for file in (tmp_path / "set" / "val").glob("*/[3-9].png"):
        file.unlink()
    arguments = leaves(tmp_path / "set", tmp_path / "run", "--image-size", 16)
    assert cli.main(list(map(str, arguments))) == 0
    said = capsys.readouterr().err
    assert "2 classes, 20 images to train on + 6 to validate with: healthy 10 + 3, rust" in said


# ---------------------------------------------------------------------- memory and time


GPU_IS_FULL = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 14.56 GiB of "
    "which 307.81 MiB is free. Process 4 has 14.26 GiB memory in use."
)


@pytest.mark.parametrize("error, sentences", [
    (torch.cuda.OutOfMemoryError(GPU_IS_FULL), [
        "(2.50 GiB more were asked for, and 307.81 MiB of the GPU's 14.56 GiB are free)",
        "choose a smaller batch size (it is 4) or image size (it is 48), or bfloat16, or end what",
    ]),
    (RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
                  "2097152 bytes. Error code 12"), ["(2097152 bytes more were asked for)"]),
    (RuntimeError("CUDA error: out of memory"), ["There is not enough memory: choose"]),
    (MemoryError(), ["There is not enough memory: choose a smaller batch size (it is 4)"]),
])
@pytest.mark.parametrize("place", ["to", "train_step"])
def test_out_of_memory_says_what_to_reduce(tmp_path, monkeypatch, capsys, error, sentences, place):
    def full(*_, **__):
        raise error

    owner = classifier.Classifier if place == "train_step" else torch.nn.Module
    monkeypatch.setattr(owner, place, full)
    root = by_folder(tmp_path / "set")
    arguments = leaves(root, tmp_path / "run", "--image-size", 48)
    assert cli.main(list(map(str, arguments))) == 1
    said = capsys.readouterr().err
    assert all(sentence in said for sentence in sentences), said


def test_other_errors_are_not_about_memory():
    with pytest.raises(RuntimeError, match="^shapes") as caught, memory.explained({}):
        raise RuntimeError("shapes do not fit")
    assert not isinstance(caught.value, train.TrainingError)
    with pytest.raises(train.TrainingError, match="choose a smaller network"):
        with memory.explained({}), memory.explained({"batch_size": 1}):
            raise MemoryError


def test_how_long_training_takes_is_told_once(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0])
    estimate = timing.Estimate(None, 601, said.append)
    for step in range(601):
        now[0] += 100.0 if step == 0 else 2.0
        estimate.step()
        assert bool(said) == (step >= 3)
    assert said == ["601 steps take about 20 minutes, validation aside."]


@pytest.mark.parametrize("seconds, words", [
    (0.2, "1 second"), (1.6, "2 seconds"), (89, "89 seconds"), (91, "2 minutes"), (5400, "2 hours"),
])
def test_durations_are_told_in_words(seconds, words):
    assert timing.duration(seconds) == words


def test_the_time_is_told_before_the_first_epoch_ends(clothes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "STEPS", 2)
    assert cli.main(list(map(str, words(clothes, tmp_path)))) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("8 steps take about ") and said[-1].endswith("validation aside.")
    assert said[-2] == "64 images, PyTorch's modules through autograd, float32, on cpu."
