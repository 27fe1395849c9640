"""Living in one process with numba, and with the real numba.cuda."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

needs_numba_cuda = pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None,
                                      reason="numba-cuda isn't installed")


def run(program, simulator="1"):
    environment = {**os.environ, "COURSE_LIB_SIMULATOR": simulator}
    environment.pop("NUMBA_ENABLE_CUDASIM", None)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment,
                          capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_install_and_uninstall():
    run("""
        import importlib, sys
        from course_lib import simulator
        simulator.uninstall()
        before = list(sys.meta_path)
        simulator.install()
        simulator.install()
        import numba
        from numba import cuda
        import numba.cuda as again
        assert cuda is again is simulator.cuda is numba.cuda
        import numba.cuda.random, numba.cuda.libdevice as libdevice
        from numba.cuda.cudadrv.devicearray import DeviceNDArray
        assert libdevice.expf(0) == 1
        try:
            import numba.cuda.no_such_thing
        except ModuleNotFoundError as error:
            assert "simulator has no numba.cuda.no_such_thing" in str(error)
        else:
            raise AssertionError
        assert simulator.is_installed()
        simulator.uninstall()
        assert sys.meta_path == before and not simulator.is_installed()
        assert not [name for name in sys.modules if name.startswith("numba.cuda")]
        assert "cuda" not in vars(numba)
        """)


def test_install_after_numba():
    run("""
        import numba
        from course_lib import simulator
        assert numba.cuda is simulator.cuda if hasattr(numba, "cuda") else True
        from numba import cuda
        assert cuda is simulator.cuda
        """)


def test_import_is_light():
    out = run("""
        import sys, time
        start = time.process_time()
        import numpy
        unit, start = time.process_time() - start, time.process_time()
        import course_lib.simulator
        print((time.process_time() - start) / unit)
        assert "numba" not in sys.modules and "torch" not in sys.modules
        """)
    assert float(out) < 6


@needs_numba_cuda
def test_real_numba_cuda_is_already_there():
    run("""
        from numba import cuda
        from course_lib import simulator
        try:
            simulator.install()
        except simulator.SimulatorError as error:
            assert "Restart" in str(error)
        else:
            raise AssertionError("installed over the real numba.cuda")
        assert not simulator.is_installed()
        """, simulator="0")


@needs_numba_cuda
def test_uninstall_gives_the_real_one_back():
    run("""
        from course_lib import simulator
        from numba import cuda as simulated
        simulator.uninstall()
        from numba import cuda
        assert cuda is not simulated and cuda.__file__
        """)


@needs_numba_cuda
def test_kernels_of_the_real_numba_cuda(tmp_path):
    """Everything a kernel module refers to is the real numba.cuda's; the simulator runs it."""
    module = tmp_path / "real_kernels.py"
    module.write_text(textwrap.dedent("""
        import math
        from math import sqrt

        import numba
        import numpy as np
        from numba import cuda, float32, int32
        from numba.cuda import bf16, cg, fp16, libdevice, syncthreads
        from numba.cuda.extending import intrinsic
        from numba.cuda.random import create_xoroshiro128p_states, xoroshiro128p_uniform_float32
        from numba.core import types
        from numba.cuda import types as cuda_types
        from llvmlite import ir

        @intrinsic
        def neighbour(context, value):
            def codegen(context, builder, signature, args):
                return args[0]
            return value(value), codegen

        @cuda.jit(device=True)
        def reduce_sum(value):
            step = 16
            while step > 0:
                value += cuda.shfl_down_sync(0xFFFFFFFF, value, step)
                step //= 2
            return value

        @numba.njit
        def square(x):
            return x * x

        @cuda.jit
        def kernel(x, out):
            s = cuda.shared.array(32, float32)
            t = cuda.shared.array(shape=4, dtype=types.int32)
            own = cuda.local.array(2, dtype=numba.float64)
            tid = cuda.threadIdx.x
            s[tid] = square(x[tid])
            syncthreads()
            own[0] = s[31 - tid]
            total = reduce_sum(float32(own[0]))
            if tid == 0:
                t[0] = cuda.blockDim.x
                out[0] = total
                out[1] = math.exp(float32(1000)) + sqrt(float32(4)) * 0
                out[2] = libdevice.rsqrtf(float32(4))
                out[3] = fp16.hadd(cuda_types.float16(1), cuda_types.float16(2))
                out[4] = cuda.popc(int32(7)) + t[0]
                vector = cuda.float32x2(3, 4)
                out[5] = vector.x + vector.y
                cuda.atomic.add(out, 6, 1)
            out[7 + tid] = cuda.laneid

        @cuda.jit
        def grid_kernel(x):
            x[cuda.grid(1)] = cuda.grid(1)
            cg.this_grid().sync()
            x[cuda.grid(1)] += x[x.size - 1 - cuda.grid(1)] * 0 + 1

        @cuda.jit
        def random_kernel(states, out):
            out[cuda.grid(1)] = xoroshiro128p_uniform_float32(states, cuda.grid(1))

        @cuda.jit
        def with_intrinsic(out):
            out[cuda.threadIdx.x] = neighbour(cuda.threadIdx.x)
        """))
    run(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import numpy as np
        import real_kernels as real
        from course_lib import simulator
        assert real.cuda is not simulator.cuda
        before = dict(vars(real))
        x = np.arange(32, dtype=np.float32)
        out = np.zeros(39, np.float32)
        for order in ("forward", "reverse", "random"):
            out[:] = 0
            simulator.run(real.kernel, 1, 32, x, out, order=order)
            assert out[0] == (x * x).sum(), out[0]
            assert out[1:7].tolist() == [np.inf, 0.5, 3, 35, 7, 1], out[:7]
            assert (out[7:] == np.arange(32)).all()
        y = np.zeros(8)
        simulator.run(real.grid_kernel, 4, 2, y)
        assert y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
        from course_lib.simulator.cuda_api import random
        states = random.create_xoroshiro128p_states(2, 1).copy_to_host()
        simulator.run(real.random_kernel, 1, 2, states, y)
        assert 0 <= y[0] < 1 and y[0] != y[1]
        try:
            simulator.run(real.with_intrinsic, 1, 2, y)
        except simulator.SimulatorError as error:
            assert "register_twin(neighbour" in str(error), error
        else:
            raise AssertionError
        simulator.register_twin(
            real.neighbour, lambda value: simulator.cuda.shfl_xor_sync(0xFFFFFFFF, value, 1))
        simulator.run(real.with_intrinsic, 1, 2, y)
        assert y[:2].tolist() == [1, 0]
        assert vars(real) == before
        """, simulator="0")


@needs_numba_cuda
def test_the_benchmark_runs():
    out = run("""
        import simulator_benchmark as benchmark
        import numpy as np
        name, rows = "softmax", benchmark._inputs()
        benchmark._inputs = lambda: {name: rows[name], "warp_sum": rows["warp_sum"]}
        status = benchmark.main(["--runs", "1"])
        print(status)
        """)
    assert "softmax" in out and "cannot" in out and out.splitlines()[-1] in "01"
