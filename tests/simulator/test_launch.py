"""What a launch accepts and refuses; arguments; threads; interrupts."""

import collections
import signal
import subprocess
import sys
import textwrap
import threading

import ml_dtypes
import numpy as np
import pytest

from course_lib import simulator
from course_lib.simulator import LaunchError, cuda


@cuda.jit
def nothing(x):
    pass


@pytest.mark.parametrize("grid, block, message", [
    (1, 1025, "blockDim.x is 1,025: the limit is 1,024"),
    (1, (32, 33), r"\(32, 33, 1\) has 1,056 threads: the limit is 1,024"),
    (1, (1, 1, 65), "blockDim.z is 65: the limit is 64"),
    (1, (1, 2048), "blockDim.y is 2,048: the limit is 1,024"),
    ((1, 65536), 1, "gridDim.y is 65,536: the limit is 65,535"),
    ((1, 1, 65536), 1, "gridDim.z is 65,536: the limit is 65,535"),
    (2**31, 1, "gridDim.x is 2,147,483,648"),
    (0, 1, "gridDim.x is 0: a launch needs at least 1"),
    (1, 0, "blockDim.x is 0"),
    (1, -1, "blockDim.x is -1"),
    ((1, 1, 1, 1), 1, "griddim must be a sequence of 1, 2 or 3"),
    ((), 1, "griddim must be a sequence of 1, 2 or 3"),
])
def test_limits(grid, block, message):
    with pytest.raises(LaunchError, match=message):
        nothing[grid, block](np.zeros(1))
    with pytest.raises(ValueError, match=message):
        simulator.run(nothing, grid, block, np.zeros(1))


def test_dimensions_are_integers():
    with pytest.raises(TypeError, match="integers"):
        nothing[1.5, 1](np.zeros(1))
    nothing[np.int64(1), (np.int32(2), 1)](np.zeros(1))
    nothing[[1, 1], [1]](np.zeros(1))


def test_missing_configuration():
    with pytest.raises(LaunchError, match=r"nothing\[grid, block\]"):
        nothing(np.zeros(1))
    with pytest.raises(LaunchError, match="shared_bytes"):
        nothing[1]
    with pytest.raises(RuntimeError, match="device function"):
        cuda.jit(device=True)(nothing.py_func)[1, 1]


def test_argument_count():
    with pytest.raises(TypeError, match="nothing takes 1 arguments; 2 were given"):
        nothing[1, 1](1, 2)
    with pytest.raises(TypeError, match="0 were given"):
        nothing[1, 1]()


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, "text", {1}, object()])
def test_refused_arguments(value):
    with pytest.raises(TypeError, match="argument 1 of nothing is a"):
        nothing[1, 1](value)


def test_arguments():
    Pair = collections.namedtuple("Pair", "left right")

    @cuda.jit
    def kernel(x, scalar, flag, whole, many, pair, zero, out):
        out[0] = x[1, 1] + scalar + flag + whole + many[1][0] + pair.right[0] + zero[()]
        x[0, 0] = -1

    base = np.arange(16.0).reshape(4, 4)
    out = np.zeros(1)
    kernel[1, 1](base[::2, ::2], np.float32(0.5), True, 3, (1, (7, 8)), Pair(1, np.ones(1)),
                 np.array(2.0), out)
    assert out[0] == 10 + 0.5 + 1 + 3 + 7 + 1 + 2
    assert base[0, 0] == -1


def test_numpy_scalars_keep_their_type():
    seen = []

    @cuda.jit
    def kernel(a, b, c):
        seen.append((type(a), type(b), type(c)))

    kernel[1, 1](np.float32(1), np.int8(2), 1j)
    assert seen == [(np.float32, np.int8, complex)]


def test_torch_tensors():
    torch = pytest.importorskip("torch")

    @cuda.jit
    def kernel(x, out):
        i = cuda.grid(1)
        out[i] = x[i] * x[i]

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        x, out = torch.arange(4).to(dtype), torch.zeros(4, dtype=dtype)
        kernel[1, 4](x, out)
        assert out.tolist() == [0, 1, 4, 9]
    parameter = torch.nn.Parameter(torch.ones(4))
    kernel[1, 4](parameter, out := torch.zeros(4))
    assert out.tolist() == [1, 1, 1, 1]


def test_bfloat16_arithmetic_rounds():
    @cuda.jit
    def kernel(x, out):
        out[0] = x[0] + x[1]

    x = np.array([256, 1], ml_dtypes.bfloat16)
    out = np.zeros(1, np.float32)
    kernel[1, 1](x, out)
    assert out[0] == 256


def test_argument_extensions():
    class Wrapped:
        def __init__(self, array):
            self.array = array

    class Unwrap:
        def prepare_args(self, kind, value, stream, retr):
            if isinstance(value, Wrapped):
                retr.append(lambda: done.append(float(value.array[0])))
                return kind, value.array
            return kind, value

    done = []

    @cuda.jit(extensions=[Unwrap()])
    def kernel(x, value):
        x[0] = value

    kernel[1, 1](Wrapped(np.zeros(1)), 3)
    assert done == [3]


def test_python_threads():
    @cuda.jit
    def kernel(x, rounds):
        s = cuda.shared.array(32, np.int64)
        tid = cuda.threadIdx.x
        for _ in range(rounds):
            s[tid] = x[tid]
            cuda.syncthreads()
            x[tid] = s[(tid + 1) % 32]
            cuda.syncthreads()

    arrays = [np.arange(32) + 100 * n for n in range(4)]
    threads = [threading.Thread(target=kernel[1, 32], args=(array, 40)) for array in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, array in enumerate(arrays):
        assert (array == (np.arange(32) + 40) % 32 + 100 * n).all()


def test_launch_inside_a_launch_of_another_thread_keeps_options_apart():
    seen = []

    @cuda.jit
    def kernel():
        seen.append(cuda.threadIdx.x)

    with simulator.options(order="reverse"):
        thread = threading.Thread(target=kernel[1, 3])
        thread.start()
        thread.join()
    assert seen == [0, 1, 2]


@pytest.mark.usefixtures("in_the_background")
@pytest.mark.parametrize("path", ["plain", "generators", "greenlets"])
def test_interrupt(path):
    """Ctrl-C ends the launch and leaves a simulator that works."""
    wait = {"plain": "for _ in range(10**9): x[0] += 1",
            "generators": "while x[0] < 10**9: x[0] = x[0]; cuda.syncthreads()",
            "greenlets": "while x[0] < 10**9: x[0] = x[0]; cuda.syncthreads()"}[path]
    program = textwrap.dedent(f"""
        import linecache, numba, numpy as np
        from course_lib import simulator
        from course_lib.simulator import cuda
        source = '''
        def kernel(x):
            if cuda.threadIdx.x == 0: print("running", flush=True)
            {wait}
        def fine(x):
            s = cuda.shared.array(4, np.int32)
            s[cuda.threadIdx.x] = cuda.threadIdx.x
            cuda.syncthreads()
            x[cuda.threadIdx.x] = s[3 - cuda.threadIdx.x]
        '''
        name = "<cell>"
        if {path != "greenlets"}:
            linecache.cache[name] = len(source), None, source.splitlines(True), name
        exec(compile(source, name, "exec"))
        try:
            with simulator.options(max_steps=10**10):
                cuda.jit(kernel)[1, 4](np.zeros(1))
        except KeyboardInterrupt:
            x = np.zeros(4)
            cuda.jit(fine)[1, 4](x)
            assert x.tolist() == [3, 2, 1, 0]
            print("interrupted", flush=True)
        """)
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "running\n"
        child.send_signal(signal.SIGINT)
        output, _ = child.communicate(timeout=250)
    finally:
        child.kill()
    assert output == "interrupted\n"
    assert child.returncode == 0
