"""Kernels as users write them: indices, closures, device functions, notebooks, missing source."""

import linecache
import math
import types

import numpy as np
import pytest

from course_lib import simulator
from course_lib.simulator import cuda

OFFSET = 10
TABLE = np.array([5, 6, 7, 8])


def test_indices(jit):
    @jit
    def kernel(out):
        i, j, k = cuda.grid(3)
        width, height, depth = cuda.gridsize(3)
        tid = cuda.threadIdx.x + cuda.blockDim.x * (
            cuda.threadIdx.y + cuda.blockDim.y * cuda.threadIdx.z)
        out[i, j, k, 0] = tid
        out[i, j, k, 1] = cuda.blockIdx.x + 10 * cuda.blockIdx.y + 100 * cuda.blockIdx.z
        out[i, j, k, 2] = width + 10 * height + 100 * depth
        out[i, j, k, 3] = cuda.gridDim.x + 10 * cuda.gridDim.y + 100 * cuda.gridDim.z
        out[i, j, k, 4] = cuda.laneid + 100 * cuda.warpsize

    out = np.full((6, 4, 6, 5), -1)
    kernel[(2, 1, 2), (3, 4, 3)](out)
    i, j, k = np.indices((6, 4, 6))
    tid = i % 3 + 3 * (j + 4 * (k % 3))
    assert (out[..., 0] == tid).all()
    assert (out[..., 1] == i // 3 + 100 * (k // 3)).all()
    assert (out[..., 2] == 6 + 40 + 600).all()
    assert (out[..., 3] == 2 + 10 + 200).all()
    assert (out[..., 4] == tid % 32 + 3200).all()


def test_index_objects_as_values(jit):
    @jit
    def kernel(out):
        place = cuda.threadIdx
        out[place.x] = place.x + cuda.blockDim.x

    out = np.zeros(4)
    kernel[1, 4](out)
    assert out.tolist() == [4, 5, 6, 7]


def test_closures_globals_and_defaults(jit):
    factor = 3

    @jit
    def kernel(x, out, bias=OFFSET):
        i = cuda.grid(1)
        if i < x.size:
            out[i] = x[i] * factor + bias + TABLE[i]

    out = np.zeros(4)
    kernel[1, 32](np.arange(4), out)
    assert out.tolist() == [15, 19, 23, 27]
    kernel[1, 32](np.arange(4), out, 0)
    assert out.tolist() == [5, 9, 13, 17]


def test_global_arrays_are_constants():
    @cuda.jit
    def kernel():
        TABLE[0] = 1

    with pytest.raises(ValueError, match="read-only"):
        kernel[1, 1]()
    assert TABLE[0] == 5


def test_device_functions_with_barriers(jit):
    @jit(device=True)
    def swap(buffer, value):
        tid = cuda.threadIdx.x
        buffer[tid] = value
        cuda.syncthreads()
        return buffer[cuda.blockDim.x - 1 - tid]

    @jit(device=True)
    def twice(buffer, value):
        first = swap(buffer, value)
        cuda.syncthreads()
        return swap(buffer, first + 1)

    @jit
    def kernel(out):
        buffer = cuda.shared.array(32, np.int32)
        out[cuda.threadIdx.x] = twice(buffer, cuda.threadIdx.x)

    out = np.zeros(32)
    kernel[1, 32](out)
    assert out.tolist() == list(range(1, 33))


def test_device_functions_out_of_a_list():
    @cuda.jit(device=True)
    def one(x):
        cuda.syncthreads()
        return x + 1

    @cuda.jit(device=True)
    def two(x):
        cuda.syncthreads()
        return x * 2

    steps = (one, two)

    @cuda.jit
    def kernel(out):
        value = cuda.grid(1)
        for step in steps:
            value = step(value)
        out[cuda.grid(1)] = value

    out = np.zeros(4)
    kernel[1, 4](out)
    assert out.tolist() == [2, 4, 6, 8]


def test_nested_functions():
    @cuda.jit
    def kernel(x, out):
        def square(value):
            return value * value + cuda.threadIdx.x * 0

        i = cuda.grid(1)
        out[i] = square(x[i])

    out = np.zeros(4)
    kernel[1, 4](np.arange(4.0), out)
    assert out.tolist() == [0, 1, 4, 9]


def test_a_kernel_may_not_return_a_value():
    @cuda.jit
    def kernel(out):
        return out[0]

    with pytest.raises(TypeError, match="kernel returns a value"):
        kernel[1, 1](np.zeros(1))


def test_notebook_cells():
    """IPython keeps the text of cells in linecache, under names that are no files."""
    source = ("@cuda.jit\n"
              "def kernel(x, out):\n"
              "    s = cuda.shared.array(4, float32)\n"
              "    i = cuda.grid(1)\n"
              "    s[i] = x[i]\n"
              "    cuda.syncthreads()\n"
              "    out[i] = s[3 - i]\n")
    name = "ipykernel_1/123.py"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    namespace = {"cuda": cuda, "float32": np.float32}
    exec(compile(source, name, "exec"), namespace)
    out = np.zeros(4, np.float32)
    namespace["kernel"][1, 4](np.arange(4), out)
    assert out.tolist() == [3, 2, 1, 0]
    assert not namespace["kernel"].program().greenlets


def test_redefined_device_function():
    """A notebook cell run again takes effect, as everything else in a notebook does."""
    namespace = {"cuda": cuda}
    exec("@cuda.jit(device=True)\ndef f(x):\n    return x + 1\n", namespace)
    exec("@cuda.jit\ndef kernel(out):\n    out[0] = f(1)\n", namespace)
    out = np.zeros(1)
    namespace["kernel"][1, 1](out)
    assert out[0] == 2
    exec("@cuda.jit(device=True)\ndef f(x):\n    return x + 10\n", namespace)
    namespace["kernel"][1, 1](out)
    assert out[0] == 11


def test_changed_closure():
    step = 1

    @cuda.jit
    def kernel(out):
        out[0] += step

    out = np.zeros(1)
    kernel[1, 1](out)
    step = 5
    kernel[1, 1](out)
    assert out[0] == 6


@pytest.mark.parametrize("edited", ["out[0] = 2", "out[0] = cuda.grid(1) - 1",
                                    "out[0] =  cuda.grid(1) + 1"])
def test_source_that_no_longer_matches(tmp_path, edited):
    """A file edited after it was imported must not change what runs, nor which lines are named."""
    path = tmp_path / "edited.py"
    path.write_text("@cuda.jit\ndef kernel(out):\n    out[0] = cuda.grid(1) + 1\n")
    namespace = {"cuda": cuda}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    path.write_text(f"@cuda.jit\ndef kernel(out):\n    {edited}\n")
    linecache.checkcache()
    out = np.zeros(1)
    with pytest.warns(UserWarning, match=r"kernel runs as it was made: .*edited.py has changed"):
        namespace["kernel"][1, 1](out)
    assert out[0] == 1


def test_lambdas_on_one_line(jit):
    """Each runs its own text, whatever names and constants they share."""
    def scaled(q):
        return (lambda a, b: (lambda c: c * q)(a + b)), (lambda a, b: (a - b) * q)

    steps = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "max": lambda a, b: max(a, b),
             "if": lambda a, b: a if a < b else -b, "pow": lambda a, b: (
                 a ** b), "mod": lambda a, b: a % b}
    steps["outer"], steps["scaled"] = scaled(10)

    def result(step):
        @jit
        def kernel(out):
            out[0] = step(7, 3)

        out = np.zeros(1)
        kernel[1, 1](out)
        return out[0]

    assert {name: result(jit(step, device=True)) for name, step in steps.items()} == {
        "add": 10, "sub": 4, "max": 7, "if": -3, "pow": 343, "mod": 1, "outer": 100, "scaled": 40}
    total, most = cuda.reduce(lambda a, b: a + b), cuda.reduce(lambda a, b: max(a, b))
    assert (total(np.arange(5.0)), most(np.arange(5.0))) == (10, 4)


def test_linking_is_refused():
    with pytest.raises(NotImplementedError, match="link"):
        cuda.jit(link=["code.ptx"])


def test_names_imported_from_numba_cuda():
    from numba.cuda import grid, shared, syncthreads, threadIdx

    @cuda.jit
    def kernel(out):
        s = shared.array(4, "int32")
        s[threadIdx.x] = grid(1)
        syncthreads()
        out[threadIdx.x] = s[3 - threadIdx.x]

    out = np.zeros(4)
    kernel[1, 4](out)
    assert out.tolist() == [3, 2, 1, 0]


def test_numba_types_cast():
    from numba import float32, int32, uint8

    @cuda.jit
    def kernel(out):
        out[0] = uint8(300)
        out[1] = int32(2**31)
        out[2] = int32(2.9)
        out[3] = float32(1) / float32(3)
        out[4] = np.uint32(-1)

    out = np.zeros(5)
    kernel[1, 1](out)
    assert out.tolist() == [44, -2**31, 2, np.float32(1) / np.float32(3), 2**32 - 1]


def test_expressions_are_evaluated_once_and_in_order():
    calls = []

    @cuda.jit(device=True)
    def note(value):
        calls.append(value)
        return value

    @cuda.jit
    def kernel(x):
        x[note(1)] += note(2)
        x[note(3), ] = note(4)
        x[note(5) - 5] = max(note(6), note(7))

    x = np.zeros(8)
    kernel[1, 1](x)
    assert calls == [1, 2, 4, 3, 6, 7, 5]
    assert x.tolist() == [7, 2, 0, 4, 0, 0, 0, 0]


def test_print(capsys):
    @cuda.jit
    def kernel():
        print("thread", cuda.threadIdx.x)

    kernel[1, 2]()
    assert capsys.readouterr().out == "thread 0\nthread 1\n"


def test_user_globals_are_never_changed():
    before = dict(globals())

    @cuda.jit
    def kernel(out):
        out[0] = math.exp(OFFSET)

    kernel[1, 1](np.zeros(1))
    assert {key: value for key, value in globals().items() if before.get(key) is not value} == {}


def test_plain_functions_and_run():
    def kernel(x):
        x[cuda.grid(1)] += 1

    x = np.zeros(4)
    simulator.run(kernel, 2, 2, x)
    assert x.tolist() == [1, 1, 1, 1]
    assert isinstance(kernel, types.FunctionType)


def test_run_refuses_what_is_no_kernel():
    with pytest.raises(TypeError, match="no kernel"):
        simulator.run(3, 1, 1)


def test_twins():
    intrinsic = object()

    def twin(x):
        return cuda.shfl_xor_sync(0xFFFFFFFF, x, 1)

    simulator.register_twin(intrinsic, twin)

    def kernel(out):
        out[cuda.threadIdx.x] = intrinsic(cuda.threadIdx.x)

    out = np.zeros(4)
    simulator.run(kernel, 1, 4, out)
    assert out.tolist() == [1, 0, 3, 2]
    with pytest.raises(TypeError, match="twin"):
        simulator.register_twin(intrinsic, 3)


def test_walrus_and_conditional_expressions():
    @cuda.jit
    def kernel(x, out):
        i = cuda.grid(1)
        if (value := x[i]) > 1:
            out[i] = value if i else -value

    out = np.zeros(4)
    kernel[1, 4](np.arange(4.0), out)
    assert out.tolist() == [0, 0, 2, 3]


def test_attribute_of_numba_module(monkeypatch):
    import numba

    # On a machine with a GPU, it is the real one.
    monkeypatch.setattr(numba, "cuda", cuda, raising=False)

    @numba.cuda.jit
    def kernel(out):
        out[numba.cuda.grid(1)] = numba.float32(0.1)

    out = np.zeros(2)
    kernel[1, 2](out)
    assert (out == np.float32(0.1)).all()


@cuda.jit(device=True)
def _even(n):
    if n == 0:
        return 1
    return _odd(n - 1)


@cuda.jit(device=True)
def _odd(n):
    cuda.syncthreads()
    if n == 0:
        return 0
    return _even(n - 1)


def test_functions_that_call_each_other_and_wait():
    """Either is written before it is known whether the other waits."""
    @cuda.jit
    def kernel(out):
        cell = cuda.shared.array(4, np.int32)
        cell[cuda.threadIdx.x] = cuda.threadIdx.x
        found = 10 * _even(5) + _odd(5)
        out[cuda.threadIdx.x] = found + cell[3 - cuda.threadIdx.x]

    out = np.zeros(4)
    kernel[1, 4](out)
    assert out.tolist() == [4, 3, 2, 1]
    with simulator.sanitize() as report:
        kernel[1, 4](out)
    assert not report, str(report)
