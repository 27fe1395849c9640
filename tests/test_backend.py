"""The choice of arrays: what is there, what is missing, and that nothing moves by itself."""

import numpy as np
import pytest
import torch

from course_lib import backend, device
from course_lib.backend import BackendError, get_backend, set_backend

needs_gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(backend, "_chosen", None)


def test_the_cpu_is_there_always():
    found = set_backend(use_cuda=False, library="numpy")
    assert found.name == "numpy" and not found.on_gpu and found.description == "CPU"
    assert get_backend() is found
    x = np.ones((2, 3), np.float32)
    assert found.to_device(x) is x and found.to_cpu(x) is x
    assert found.xp.permute_dims(x, (1, 0)).shape == (3, 2)
    found.synchronize()
    assert list(found.prefetch([(x, x), (x,)])) == [(x, x), (x,)]


def test_it_is_chosen_at_first_use():
    assert get_backend().on_gpu == backend.is_cuda_available()


@pytest.mark.parametrize("missing, words", [
    ({"driver": None}, "no NVIDIA driver"),
    ({"driver": object(), "count": 0}, "reports no GPU"),
    ({"driver": 1, "count": 1, "simulated": True, "package": 1}, "COURSE_LIB_SIMULATOR=1 is set"),
    ({"driver": object(), "count": 1, "package": None}, "numba-cuda is not installed"),
    ({"driver": object(), "count": 1, "package": True}, "PyTorch .* finds no GPU"),
])
def test_true_without_a_gpu_says_what_is_missing(missing, words, monkeypatch):
    monkeypatch.setattr(device, "driver", lambda: missing["driver"])
    monkeypatch.setattr(device, "count", lambda: missing.get("count", 0))
    monkeypatch.setattr("course_lib.SIMULATED", missing.get("simulated", False))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: missing.get("package"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("COURSE_LIB_SIMULATOR", raising=False)
    assert not backend.is_cuda_available()
    for options, asked in (
        ({"use_cuda": True}, "use_cuda is True, but"),
        ({"use_cuda": True, "library": "torch"}, "library='torch' needs a GPU, but"),
        ({"library": "cupy"}, "library='cupy' needs a GPU, but"),
    ):  # fmt: skip
        with pytest.raises(BackendError, match=f"(?s)^{asked} .*{words}"):
            set_backend(**options)
    assert set_backend(use_cuda=None).name == "numpy"


@pytest.mark.parametrize("options, words", [
    ({"use_cuda": "yes"}, "True, False or None"),
    ({"use_cuda": 2}, "True, False or None"),
    ({"library": "jax"}, "numpy, simulator, torch, cupy"),
    ({"use_cuda": True, "library": "numpy"}, "computes on the CPU"),
    ({"use_cuda": False, "library": "torch"}, "computes on a GPU"),
])
def test_wrong_choices(options, words):
    before = set_backend(False)
    with pytest.raises(ValueError, match=words):
        set_backend(**options)
    assert get_backend() is before


def test_nothing_is_moved_by_itself():
    found = set_backend(False, library="numpy")
    for a in (torch.ones(2), [1.0, 2.0], 3.0):
        with pytest.raises(TypeError, match="expected a NumPy array"):
            found.to_device(a)
        with pytest.raises(TypeError, match=r"pass backend.to_device\(x\)"):
            found.require(a, "x")


def test_the_simulator_is_numpy_with_kernels(monkeypatch):
    if backend.is_cuda_available():
        with pytest.raises(BackendError, match="COURSE_LIB_SIMULATOR=1"):
            set_backend(library="simulator")
        return
    monkeypatch.delenv("COURSE_LIB_SIMULATOR", raising=False)
    assert set_backend(library="simulator").kernels
    assert set_backend(False).name == "numpy"
    assert not set_backend(library="numpy").kernels
    monkeypatch.setenv("COURSE_LIB_SIMULATOR", "1")
    assert set_backend(False).name == "simulator"


def test_array_modules():
    found = set_backend(False)
    assert found.get_array_module(np.ones(1)).__name__ == "array_api_compat.numpy"
    assert found.get_array_module(torch.ones(1)).__name__ == "array_api_compat.torch"
    with pytest.raises(TypeError):
        found.get_array_module([1.0])


@needs_gpu
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_a_gpus_arrays(library):
    if library == "cupy":
        pytest.importorskip("cupy")
    found = set_backend(True, library=library)
    assert found.on_gpu and found.kernels
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    there = found.to_device(x)
    assert found.owns(there) and not found.owns(x)
    assert np.array_equal(found.to_cpu(there), x)
    assert found.to_cpu(found.xp.sum(there, axis=1)).tolist() == [3, 12]
    with pytest.raises(TypeError, match="to_device"):
        found.require(x, "x")
    with pytest.raises((TypeError, RuntimeError)):
        there + x
    found.synchronize()


@needs_gpu
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_prefetched_batches_are_the_batches(library):
    if library == "cupy":
        pytest.importorskip("cupy")
    found = set_backend(True, library=library)
    random = np.random.default_rng(0)
    batches = [(random.standard_normal((64, 1024)).astype(np.float32), np.array([i]))
               for i in range(20)]  # fmt: skip
    for (x, i), (a, j) in zip(found.prefetch(iter(batches)), batches, strict=True):
        y = x @ x.T  # keeps the device busy while the next one comes
        assert found.owns(y)
        assert np.array_equal(found.to_cpu(x), a) and found.to_cpu(i).tolist() == j.tolist()
    assert list(found.prefetch([])) == []


@needs_gpu
def test_the_next_batch_comes_while_this_one_is_computed():
    found = set_backend(True)
    batch = np.zeros((64, 1 << 18), np.float32)  # 64 MB
    a = torch.randn(4096, 4096, device="cuda")
    with torch.profiler.profile() as profile:
        for (_x,) in found.prefetch([(batch,)] * 6):
            for _ in range(40):
                a = a @ a * 1e-3
        found.synchronize()
    spans = {"copy": [], "product": []}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = "copy" if "Memcpy HtoD" in event.name else "product"
            spans[kind].append((event.time_range.start, event.time_range.end))
    overlap = sum(
        max(0, min(b, d) - max(a, c)) for a, b in spans["copy"] for c, d in spans["product"]
    )
    assert overlap > 0.5 * sum(b - a for a, b in spans["copy"][1:])
