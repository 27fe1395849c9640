"""Which device is here, and what it says of itself."""

import os
import subprocess
import sys

import pytest

from course_lib.runtime.host import device


def test_the_first_device_present_is_taken(monkeypatch):
    monkeypatch.setattr(device, "count", lambda: 0)
    monkeypatch.setattr(device, "_mps_available", lambda: False)
    assert device.best() == "cpu"
    monkeypatch.setattr(device, "_mps_available", lambda: True)
    assert device.best() == "mps"
    monkeypatch.setattr(device, "count", lambda: 2)
    assert device.best() == "cuda"
    assert device.best(("cpu", "cuda")) == "cpu"
    assert device.best(("mps",)) == "mps"


def test_orders_that_lead_nowhere(monkeypatch):
    monkeypatch.setattr(device, "count", lambda: 0)
    with pytest.raises(device.DeviceError, match=r"none of the devices \('cuda',\) is here"):
        device.best(("cuda",))
    with pytest.raises(ValueError, match="unknown device 'gpu'; expected some of"):
        device.best(("gpu",))


@pytest.mark.parametrize("index", [-1, 99])
def test_a_gpu_that_is_not_there(index):
    with pytest.raises(device.DeviceError, match=f"no GPU {index} here: the CUDA driver reports"):
        device.properties(index)


@pytest.mark.parametrize(("value", "gpus", "simulated"), [
    ("1", 1, True), ("0", 0, False), ("", 0, True), ("", 1, False), (None, 0, True),
])  # fmt: skip
def test_who_decides_for_the_simulator(monkeypatch, value, gpus, simulated):
    monkeypatch.setattr(device, "count", lambda: gpus)
    if value is None:
        monkeypatch.delenv(device.SIMULATOR_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(device.SIMULATOR_VARIABLE, value)
    assert device.use_simulator() is simulated


def test_another_value_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setenv(device.SIMULATOR_VARIABLE, "yes")
    with pytest.raises(ValueError, match="must be unset, 0 or 1; it is 'yes'"):
        device.use_simulator()


@pytest.mark.parametrize("first", ["import course_lib", "import numba; import course_lib"])
def test_numba_cuda_is_the_simulator_where_there_is_no_gpu(first):
    code = f"{first}\nfrom numba import cuda\nassert cuda is course_lib.cuda, cuda\nprint('same')"
    environment = os.environ | {"COURSE_LIB_SIMULATOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.stdout.strip() == "same", done.stderr


@pytest.mark.gpu
def test_a_real_gpu():
    found = device.properties()
    assert found.name and found.compute_capability >= (7, 0)
    assert found.warp_size == 32 and found.multiprocessors > 0
    assert found.shared_bytes_per_block_optin >= found.shared_bytes_per_block
    assert device.driver_version() >= (12, 0)
    free, total = device.memory()
    assert 0 < free <= total <= found.total_bytes


@pytest.mark.gpu
def test_copy_bandwidth_is_below_what_the_memory_can_do():
    found = device.properties()
    limit = 2 * found.memory_clock_khz * 1e3 * found.memory_bus_bits / 8 / 1e9
    assert 0.5 * limit < device.copy_bandwidth(1 << 28) < 1.05 * limit


@pytest.mark.gpu
def test_peak_memory_can_be_reset():
    import torch

    device.peak_memory(reset=True)
    before = device.peak_memory()
    x = torch.empty(1 << 24, device="cuda")
    del x
    assert device.peak_memory(reset=True) >= before + (1 << 26)
    assert device.peak_memory() < before + (1 << 26)
