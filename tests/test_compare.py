"""`compare`: what it lets pass, what it catches, and what the command says and returns."""

import dataclasses
import importlib
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, cli, compare, kernels
from course_lib.compare import OPERATIONS
from course_lib.compare.errors import Comparison, Errors
from course_lib.kernels.operation import AUTO, Ladder

ROOT = Path(__file__).resolve().parent.parent
def ladders():
    """(where, ladder) of every one that a module of kernels, or an object in it, has."""
    found = {}
    for info in pkgutil.walk_packages(kernels.__path__, "course_lib.kernels."):
        for owner in (module := importlib.import_module(info.name), *vars(module).values()):
            if owner is module or type(owner).__module__.startswith("course_lib.kernels."):
                found |= {
                    id(each): (f"{info.name}.{name}", each)
                    for name, each in getattr(owner, "__dict__", {}).items()
                    if isinstance(each, Ladder)
                }
    return list(found.values())


def test_every_rung_of_every_ladder_can_be_compared():
    tried = {
        (id(one.ladder), variant)
        for operation in OPERATIONS.values()
        for one in operation.passes.values()
        for variant in one.variants
    }
    found = ladders()
    assert len(found) > 30
    missing = [
        (where, rung)
        for where, ladder in found for rung in ladder if (id(ladder), rung) not in tried
    ]  # fmt: skip
    # It adds up the buffers of several ranks, in place: `test_all_reduce` holds it to float64.
    left_out = "course_lib.kernels.all_reduce.ALL_REDUCE"
    assert [(where, rung) for where, rung in missing if where != left_out] == []


# ------------------------------------------------------------------- what is compared


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_of_the_ladders_is_there_and_has_a_default(name):
    found = compare.compare(name)
    assert "the default" in found.title
    for one in OPERATIONS[name].passes.values():
        inputs = one.inputs(torch.zeros(OPERATIONS[name].example))
        assert one.default(inputs) in (AUTO, *one.variants)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (5, 1), (0, 5), (5, 0), (2, 0, 3), (2, 3, 4, 5)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_odd_shapes(shape, direction):
    for name in ("softmax", "log_softmax", "relu"):
        assert compare.compare(name, shape, direction=direction).right
    if len(shape) == 2 and shape[1]:
        for name in ("cross_entropy", "softmax_dropout", "bn_relu_softmax"):
            assert compare.compare(name, shape, direction=direction).right, name


def test_rows_without_a_class_are_refused_like_any_bad_shape():
    with pytest.raises(compare.UsageError, match="need a class"):
        compare.compare("cross_entropy", (5, 0))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 5, 1, 1), (0, 3, 4, 4), (2, 3, 0, 4)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_odd_images(shape, direction):
    assert compare.compare("squeeze_excite", shape, direction=direction).right
    if shape[2]:
        for name in ("conv2d", "depthwise_conv2d", "max_pool2d", "upsample", "conv_transpose2d"):
            assert compare.compare(name, shape, direction=direction).right, name
            if OPERATIONS[name].weights:
                assert compare.compare(name, shape, direction="weights").right, name


def test_images_without_channels_are_refused_like_any_bad_shape():
    with pytest.raises(compare.UsageError, match="channel"):
        compare.compare("squeeze_excite", (2, 0, 4, 4))


def with_ours(monkeypatch, name, change, direction="forward"):
    """Let `name` give what `change` makes of its right result."""
    right = getattr(OPERATIONS[name], direction)
    wrong = dataclasses.replace(
        right, ours=lambda *inputs, variant: change(right.ours(*inputs, variant=variant))
    )
    changed = dataclasses.replace(OPERATIONS[name], **{direction: wrong})
    monkeypatch.setitem(OPERATIONS, name, changed)


def test_one_wrong_element_is_found_wherever_it_is(monkeypatch):
    def off(y):
        y[4, 2] += 0.01
        return y

    with_ours(monkeypatch, "softmax", off)
    monkeypatch.setattr(compare, "CHUNK", 8)  # so that it is not in the first chunk
    found = compare.compare("softmax", (7, 5), tolerance=1e-5)
    assert not found.right
    assert (found.ours.beyond, found.peer.beyond, found.apart.beyond) == (1, 0, 1)
    assert found.n_elements == 35
    assert found.worst.index == (4, 2)
    assert found.worst.ours == pytest.approx(found.worst.truth + 0.01, abs=1e-6)
    assert found.worst.peer == pytest.approx(found.worst.truth, abs=1e-6)
    x = 3 * torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    assert found.worst.inputs == {"x": float(x[4, 2])}
    assert found.ours.absolute == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_wrong_at_any_tolerance(monkeypatch, value):
    with_ours(monkeypatch, "relu", lambda y: torch.cat([y[:1], y[1:2] * 0 + value, y[2:]]))
    found = compare.compare("relu", (3, 4), tolerance=1e30)
    assert found.ours.beyond == 4 and found.worst.index[0] == 1


def test_what_is_left_unwritten_is_wrong(monkeypatch):
    with_ours(monkeypatch, "softmax", lambda y: torch.empty_like(y))
    assert compare.compare("softmax", (3, 4), tolerance=1.0).ours.beyond == 12
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_error_is_measured_against_its_row():
    x = np.zeros((2, 3))
    errors = Errors(tolerance=1e-3)
    scaled = errors.add(x + [[1e-3], [0.0]], x, np.array([[1.0], [0.0]]))
    assert scaled.tolist() == [[1e-3] * 3, [0.0] * 3] and errors.beyond == 0
    errors.add(x + [[0.0], [1e-30]], x, np.array([[1.0], [0.0]]))  # where 0 is right, only 0 is
    assert errors.beyond == 3 and errors.scaled == np.inf


def test_errors_of_the_smallest_step_are_none():
    step = 2.0**-24  # of float16
    errors = Errors(tolerance=1e-3, resolution=step)
    expected, scale = np.full(3, 1e-7), np.full(3, 1e-6)
    assert errors.add(expected + [0, step, 2 * step], expected, scale).tolist()[:2] == [0, 0]
    assert errors.beyond == 1
    found = compare.compare("softmax", (2, 3), dtype="float16")
    assert found.resolution == step and found.ours.resolution == step


def test_equal_infinities_are_equal_and_nothing_equals_nan():
    errors = Errors(tolerance=1.0)
    expected = np.array([np.inf, -np.inf, np.nan, np.inf])
    actual = np.array([np.inf, -np.inf, np.nan, 1.0])
    assert errors.add(actual, expected, np.full(4, np.inf)).tolist() == [0, 0, np.inf, np.inf]
    assert errors.beyond == 2


def test_the_report_names_the_worst_element():
    found = Comparison("a title", 1e-5, "the largest |y|")
    truth = np.array([[1.0, 2.0], [3.0, 4.0]])
    x = truth * 10
    found.add(10, {"x": x, "size": (2, 2)}, truth + [[0, 0], [0.5, 0]], truth, truth, 1.0)
    text = str(found)
    assert "worst element [11, 0]: x 30, ours 3.5, PyTorch 3, float64 3" in text
    assert "✗ 1 of 4 elements of ours are beyond it." in text
    assert "largest absolute error              5.00e-01            0.00e+00" in text


@pytest.mark.parametrize("arguments, said", [
    ({"name": "softmx"}, "there are softmax, log_softmax"),
    ({"variant": "fast"}, "there are naive, shared"),
    ({"direction": "sideways"}, "there are forward, backward"),
    ({"dtype": "float64"}, "softmax takes float32, float16, bfloat16"),
    ({"place": "tpu"}, "there are gpu, simulator"),
    ({"shape": ()}, "softmax needs a shape, such as 4 x 5"),
    ({"tolerance": -1.0}, "from 0 on"),
    ({"tolerance": float("nan")}, "from 0 on"),
    ({"name": "global_avg_pool"}, "N x C x H x W"),
    ({"seed": 2**64}, "a seed has 64 bits"),
    ({"shape": (0, 2**63)}, "a size has 63 bits"),
    ({"shape": (10**9, 10**9)}, "1000000000 x 1000000000 cannot be made here"),
    ({"shape": (1, 50_000), "variant": "registers"}, "at most 28,672"),
])
def test_what_does_not_exist_is_refused(arguments, said):
    name, shape = arguments.pop("name", "softmax"), arguments.pop("shape", (3, 4))
    with pytest.raises(compare.UsageError, match=said):
        compare.compare(name, shape, **arguments)


@pytest.mark.skipif(not SIMULATED, reason="about machines without a GPU")
def test_the_gpu_is_not_replaced_silently():
    with pytest.raises(compare.UsageError, match="no NVIDIA GPU|asks for the simulator"):
        compare.compare("softmax", (3, 4), place="gpu")


@pytest.mark.gpu
def test_the_simulator_can_be_asked_for_beside_a_gpu():
    assert "in the simulator" in compare.compare("softmax", (3, 4), place="simulator").title
    assert "on the GPU (" in compare.compare("softmax", (3, 4), place="gpu").title


# ----------------------------------------------------------------------- the command


def test_the_command_prints_and_returns_0(capsys):
    arguments = ["compare", "softmax", "--shape", "8x50", "--tolerance", "1e-5"]
    assert cli.main([*arguments, "--variant", "online"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("softmax forward of 8 x 50 float32: variant online, ")
    assert "✓ All 400 elements" in said.out and said.err == ""


def test_both_directions_and_exit_status_1(capsys):
    arguments = ["compare", "log_softmax", "--shape", "4x30", "--direction", "all"]
    assert cli.main([*arguments, "--tolerance", "1e-12"]) == 1
    said = capsys.readouterr().out
    assert "log_softmax forward" in said and "log_softmax backward" in said and "✗" in said
    assert cli.main(["compare", "linear", "--direction", "all"]) == 0
    assert "linear weights of 8 x 32 float32: " in capsys.readouterr().out


def test_one_wrong_direction_of_two_is_enough(monkeypatch, capsys):
    with_ours(monkeypatch, "relu", lambda y: y + 1)
    assert cli.main(["compare", "relu", "--shape", "4x3", "--direction", "all"]) == 1
    with_ours(monkeypatch, "relu", lambda dx: dx + 1, "backward")
    monkeypatch.undo()
    assert cli.main(["compare", "relu", "--shape", "4x3", "--direction", "all"]) == 0


@pytest.mark.parametrize("text", ["0xabc", "128*200", "", "x", "3x", "-3x4", "3x4.5", "٣x4"])
def test_a_shape_that_is_none(text, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["compare", "softmax", f"--shape={text}"])
    assert stopped.value.code == 2
    assert "sizes joined by x, such as 128x200" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, said", [
    (["softmx", "--shape", "3x4"], "no operation 'softmx'; there are softmax"),
    (["softmax", "--shape", "3x4", "--variant", "fast"], "no variant 'fast'; there are naive"),
    (["softmax", "--shape", "3x4", "--tolerance", "-1"], "from 0 on"),
    (["swish", "--shape", "3x4", "--dtype", "int8"], "takes float32"),
    (["softmax", "--direction", "up"], "there are forward, inference, backward, weights, all"),
])
def test_bad_arguments_end_with_2(arguments, said, capsys):
    assert cli.main(["compare", *arguments]) == 2
    found = capsys.readouterr()
    assert said in found.err and found.out == ""


def test_a_long_run_is_announced_with_its_time(monkeypatch, capsys):
    monkeypatch.setattr(compare, "LONG_SECONDS", 1e-4)
    monkeypatch.setattr(compare, "PILOT", 64)
    said, bars = [], []

    def progress(blocks, total):
        bars.append(total)
        return blocks

    found = compare.compare(
        "softmax", (8, 64), variant="warp", place="simulator", progress=progress, warn=said.append
    )
    assert found.right and bars == [8]  # a block per row; the trial draws no bar
    assert len(said) == 1 and "Ctrl-C" in said[0]
    compare.compare("softmax", (4, 16), place="simulator", warn=said.append)
    assert len(said) == 1  # hardly more than the trial


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ")
def test_ctrl_c_ends_a_long_run_with_130():
    command = [sys.executable, "-m", "course_lib", "compare", "softmax", "--shape", "4096x2000"]
    process = subprocess.Popen(
        [*command, "--device", "simulator"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        announced = process.stderr.readline()
        assert "Ctrl-C ends it" in announced
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=250)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out == "" and "Traceback" not in err and err.rstrip().endswith("Stopped.")
