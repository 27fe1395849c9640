"""What every test shares: where the GPU tests run, and where a learner's progress is not."""

import collections
import contextlib
import functools
import gc
import itertools
import os
import pathlib
import signal
import sys
import tempfile
from unittest import mock

import pytest

from course_lib.runtime.host import device

if device.count() == 0:
    # Say so aloud: it makes `course_lib.ops` run our kernels on CPU tensors, in the simulator,
    # where a learner without a GPU gets PyTorch's. Tests are to test our kernels.
    os.environ.setdefault(device.SIMULATOR_VARIABLE, "1")

# Processes that tests start find the course and what tests share, wherever they run, and everything
# that PYTHONPATH already names.
_ours = [str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(__file__).parent)]
_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, [*_ours, *_paths])))

try:
    import hypothesis
except ImportError:
    # A borrowed GPU machine may have only what kernels need. There, tests of properties are
    # skipped, and the other tests of the same files still run.
    _skip = pytest.mark.skip(reason="hypothesis is not installed")
    _absent = mock.MagicMock(given=lambda *_, **__: _skip, settings=lambda *_, **__: lambda f: f)
    sys.modules |= {"hypothesis": _absent, "hypothesis.strategies": _absent.strategies}
else:
    # A machine that others use as well may be slow: no example, and no draw, is told off for it.
    hypothesis.settings.register_profile(
        "any_machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("any_machine")


_torn_down = itertools.count(1)
YOUNG, TESTS_BETWEEN = 10_000, 32  # objects, tests, after which the collector looks for garbage
KEPT = 1 << 30  # bytes of GPU memory that a process may keep between two tests
#: Files whose tests take half a minute and more (`.reports/tests.xml` has each test's seconds): the
#: longest first, so that no process ends long before the others.
SLOW = (
    "test_contract", "test_check_bank", "test_operators", "test_attention",
    "test_teach", "test_contract_rows", "test_squeeze_excite", "test_teach_messages",
    "test_on_the_cpu", "test_teach_causes", "test_ops_attention",
    "test_warpgroup", "test_squeeze_excite_held", "test_teach_grafts", "test_benchmarks",
    "test_conv2d_warpgroup", "test_nn_squeeze_excitation", "test_conv2d", "test_teach_kept",
    "test_jupyter", "test_compiler", "test_browser", "test_notebooks", "test_stock_suite",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Slow files first. Skip the tests marked `gpu` where no kernel runs on a GPU, and say why."""
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else 99)
    reason = _why_no_gpu()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """What is imported by now stays: the collector need not go through it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG)


def pytest_runtest_teardown(item, nextitem):
    """Nor through what tests have imported since, and made to last."""
    if next(_torn_down) % TESTS_BETWEEN == 0 or nextitem and item.path != nextitem.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure():
    """Let it be collected as Python ends, or libraries would tell of what is left."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter):
    """What the contract has proved in this run, as its tests noted it."""
    noted = collections.Counter(
        name for report in terminalreporter.stats.get("passed", ())
        for name, _ in getattr(report, "user_properties", ())
    )  # fmt: skip
    if noted["proved"]:
        terminalreporter.write_line(
            f"contract: {noted['proved']:,} (operation × rung × dtype × property) proved, "
            f"{noted['rejected']} planted mistakes rejected"
        )
    if noted["kept"]:
        terminalreporter.write_line(
            f"operators: {noted['kept']:,} (form of an operator × promise) kept, "
            f"{noted['rejected operator']} planted mistakes rejected"
        )


def _why_no_gpu():
    if device.count() == 0:
        return "no NVIDIA GPU here"
    if os.environ.get(device.SIMULATOR_VARIABLE) == "1":
        return f"{device.SIMULATOR_VARIABLE}=1: kernels run in the simulator"
    return None


@pytest.fixture(autouse=True)
def _float32():
    """PyTorch, the peer, multiplies in float32 on a GPU, unless a test says otherwise: no TF32."""
    import torch

    backends = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield
    for backend, allowed in zip(backends, before, strict=True):
        backend.allow_tf32 = allowed


@pytest.fixture(autouse=True)
def _seed(request):
    """Tests marked `seed` draw the same random numbers each time."""
    marker = request.node.get_closest_marker("seed")
    if marker is not None:
        import torch

        torch.manual_seed(*marker.args)


@pytest.fixture(autouse=True)
def _ctrl_c():
    """SIGINT interrupts each test and the processes that it starts, wherever tests run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="class")  # set up before `_ctrl_c`
def in_the_background():
    """The tests run as a background job does, which ignores SIGINT and so do its children."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the wheel as it is installed."""
    pytest.importorskip("hatchling")
    from installed import unpacked

    with unpacked(tmp_path_factory.mktemp("with spaces")) as folder:
        yield folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A set of 24 images to train on and 6 to validate, in the layout of Tiny-ImageNet."""
    from image_sets import tiny_imagenet

    return tiny_imagenet(tmp_path_factory.mktemp("sets") / "tiny-imagenet-200", train=8)


@pytest.fixture(scope="module")
def leaves_drawn_once():
    """Every run takes the same leaves; to draw them again would be most of the time."""
    from course_lib import data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "leaves", functools.cache(data.leaves))
        yield


@pytest.fixture
def first_rungs(monkeypatch):
    """In the simulator, which is slow, convolutions and linear layers take their simplest rungs."""
    if os.environ.get(device.SIMULATOR_VARIABLE) != "1":
        return
    from course_lib.kernels import conv2d, linear

    for module, variant in ((conv2d, "direct"), (linear, "naive")):
        for name in ("forward", "backward"):
            simple = functools.partial(getattr(module, name), variant=variant)
            monkeypatch.setattr(module, name, simple)


@pytest.fixture(autouse=True)
def _gpu_memory(request):
    """Processes share the GPU: a test that wants much of it waits until no other has it."""
    marker = request.node.get_closest_marker("gpu_memory")
    if marker is None and not request.node.get_closest_marker("gpu"):
        yield
        return
    import torch

    with contextlib.ExitStack() as stack:
        if marker is not None:
            import fcntl

            (gib,) = marker.args
            if torch.cuda.mem_get_info()[1] < gib << 30:
                pytest.skip(f"needs a GPU of {gib} GiB")
            lock = pathlib.Path(tempfile.gettempdir()) / "course_lib_gpu_memory.lock"
            fcntl.flock(stack.enter_context(lock.open("w")), fcntl.LOCK_EX)
        yield
        if torch.cuda.memory_reserved() > KEPT:
            gc.collect()
            torch.cuda.empty_cache()


@pytest.fixture(autouse=True, scope="session")
def _autograd_before_compilers():
    """Autograd sets itself up before torch.compile does: afterwards it would start threads, and
    tests that fork could not use it in their children."""
    import torch

    torch.ones((), requires_grad=True).backward()


@pytest.fixture(autouse=True, scope="session")
def _progress_of_tests(tmp_path_factory):
    """Tests solve exercises too; what they record is not what a learner solved."""
    before = os.environ.get("COURSE_LIB_PROGRESS")
    os.environ["COURSE_LIB_PROGRESS"] = str(tmp_path_factory.mktemp("progress") / "progress.json")
    yield
    del os.environ["COURSE_LIB_PROGRESS"]
    if before is not None:
        os.environ["COURSE_LIB_PROGRESS"] = before


@pytest.fixture
def progress_file(tmp_path, monkeypatch):
    """A progress record of the test's own, empty, and nothing passed yet. Returns its path."""
    from course_lib.teach.checking import check as checking
    from course_lib.teach.keeping import record

    monkeypatch.setenv("COURSE_LIB_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setattr(record, "_unsaved", {})
    monkeypatch.setattr(record, "_told", set())
    monkeypatch.setattr(checking, "_passed", {})
    monkeypatch.delenv("COURSE_LIB_STRICT", raising=False)
    return tmp_path / "progress.json"


@pytest.fixture
def patience(monkeypatch):
    """Let a check find and compile on a slow machine what it does in time on others."""
    from course_lib.teach.checking import compiling
    from course_lib.teach.explaining import causes
    from course_lib.teach.explaining.mutation import sentence

    limits = (causes, "LOOKING"), (compiling, "WAIT")
    searches = ((sentence, name) for name in ("GRAFTING", "MATCHING", "REPAIR", "ALONE"))
    for module, name in (*limits, *searches):
        monkeypatch.setattr(module, name, 10 * getattr(module, name))
