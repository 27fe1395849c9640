"""Signatures, options and versions of a kernel: as numba-cuda has them, where it has them."""

import warnings

import numpy as np
import pytest

from course_lib import simulator
from course_lib.simulator import cuda
from course_lib.simulator.cuda_api.modules import submodule


def fill(x, value):
    x[0] = value


def test_arguments_that_the_signature_does_not_take():
    kernel = cuda.jit("void(int32[:], float64)")(fill)
    kernel[1, 1](x := np.zeros(1, np.int32), 2)
    assert x[0] == 2
    with pytest.raises(TypeError, match=r"array\(float64, 1d, C\).*fill takes \(array\(int32"):
        kernel[1, 1](np.zeros(1), 2.0)
    with pytest.raises(TypeError, match="void return type"):
        cuda.jit("int32(int32[:], float64)")(fill)


def test_scalars_are_converted():
    seen = []

    def note(value):
        seen.append(value)

    cuda.jit("void(float32)")(note)[1, 1](0.1)
    cuda.jit("void(int8)")(note)[1, 1](300)
    cuda.jit("void(uint64)")(note)[1, 1](-1)
    assert seen == [np.float32(0.1), 44, 2**64 - 1]
    assert [type(value) for value in seen] == [np.float32, np.int8, np.uint64]
    with pytest.raises(TypeError, match="argument 1 is 1.5.*not converted to int8"):
        cuda.jit("void(int8)")(note)[1, 1](1.5)
    with pytest.raises(TypeError, match="not converted|No matching definition"):
        cuda.jit("void(int8)")(note)[1, 1](1j)


def test_one_of_several_signatures_is_chosen():
    kernel = cuda.jit(["void(int32[:], int64)", "void(float32[:], int64)"])(fill)
    for dtype in (np.int32, np.float32):
        kernel[1, 1](x := np.zeros(1, dtype), 3)
        assert x[0] == 3
    assert [str(key[0].dtype) for key in kernel.overloads] == ["int32", "float32"]
    with pytest.raises(TypeError, match="No matching definition.* or "):
        kernel[1, 1](np.zeros(1), 3)
    alike = cuda.jit(["void(float64[:], int32, float64)", "void(float64[:], float64, int32)"])(
        lambda x, a, b: None)
    with pytest.raises(TypeError, match="(?i)ambiguous"):
        alike[1, 1](np.zeros(1), 1, 1)


def test_overloads_are_the_types_launched():
    kernel = cuda.jit(fill)
    assert len(kernel.overloads) == 0
    kernel[1, 1](np.zeros(1, np.int32), 2)
    kernel[1, 1](np.ones(5, np.int32), 7)
    kernel[1, 1](np.zeros(1, np.float32), 2.5)
    assert [str(key) for key in kernel.overloads] == [
        "(Array(int32, 1, 'C', False, aligned=True), int64)",
        "(Array(float32, 1, 'C', False, aligned=True), float64)"]
    assert next(iter(kernel.overloads.values())).max_cooperative_grid_blocks(128) > 0


def test_options():
    with pytest.raises(TypeError, match="'foo'; there are cache, debug"):
        cuda.jit(foo=1)
    with pytest.raises(NotImplementedError, match="bounds checking"):
        cuda.jit(boundscheck=True)(fill)
    bound = cuda.jit(launch_bounds=(64, 2))(fill)
    bound[1, (32, 2)](np.zeros(1), 1)
    with pytest.raises(simulator.LaunchError, match=r"65 threads: launch_bounds of fill allows 64"):
        bound[1, 65](np.zeros(1), 1)
    with pytest.raises(ValueError, match="Got 4 launch bounds"):
        cuda.jit(launch_bounds=(1, 2, 3, 4))(fill)


SCALE = 2


def test_a_changed_global_is_told_once(monkeypatch):
    @cuda.jit
    def kernel(x):
        x[0] = SCALE

    x = np.zeros(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel[1, 1](x)
        kernel[1, 1](x)
    monkeypatch.setitem(globals(), "SCALE", 3)
    with pytest.warns(UserWarning, match="uses SCALE, which was 2 at its first launch and is 3"):
        kernel[1, 1](x)
    assert x[0] == 3
    monkeypatch.setitem(globals(), "SCALE", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel[1, 1](x)


def test_device_arrays_describe_their_memory():
    array = cuda.to_device(np.arange(6, dtype=np.int16).reshape(2, 3))
    interface = array.__cuda_array_interface__
    assert interface["shape"] == (2, 3) and interface["typestr"] == "<i2"
    assert interface["version"] == 3 and interface["data"][0] == array._array.ctypes.data


def test_vectorize_for_a_gpu_says_that_it_is_not_supported():
    vectorizers = submodule("numba.cuda.vectorizers")
    for name in ("CUDAVectorize", "CUDAGUFuncVectorize"):
        with pytest.raises(NotImplementedError, match="not supported by the simulator"):
            getattr(vectorizers, name)(fill)


RECORD = np.dtype([("a", np.int32), ("b", np.float32, (2,)), ("c", np.uint8)], align=True)


@pytest.mark.parametrize("flavour", [simulator.options, simulator.sanitize, simulator.trace])
def test_records_in_shared_local_and_global_arrays(flavour):
    @cuda.jit
    def kernel(x, out):
        tid = cuda.threadIdx.x
        s = cuda.shared.array(4, RECORD)
        mine = cuda.local.array(1, RECORD)
        s[tid].a = tid + 5
        s[tid]["c"] = 300
        mine[0].a = 2
        mine[0]["a"] += 1
        cuda.syncthreads()
        other = s[3 - tid]
        x[tid].a = other.a * 1000000000 * 3 >> 30
        x[tid]["c"] = other["c"]
        x[tid].c += 250
        out[tid] = mine[0].a + x[tid]["a"]

    x, out = np.zeros(4, RECORD), np.zeros(4, np.int64)
    with flavour():
        kernel[1, 4](x, out)
    wanted = [(8 - tid) * 3 * 10**9 >> 30 for tid in range(4)]
    assert x["a"].tolist() == wanted and x["c"].tolist() == [(44 + 250) % 256] * 4
    assert out.tolist() == [value + 3 for value in wanted]
