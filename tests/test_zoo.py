"""Every kernel of the zoo gives what NumPy gives: on a GPU, and in the simulator in any order.

Without a GPU the same sources are also compiled for one, so that the zoo stays real CUDA code.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from course_lib import SIMULATED, cuda

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from zoo import CASES  # noqa: E402

ORDERS = ["forward", "reverse", "random"] if SIMULATED else ["gpu"]
COMPILE_SECONDS = 400


def run(plan):
    """Run all launches on device copies, then return {id of a host array: its copy}."""
    device = {}
    for launch in plan.launches:
        for argument in launch.args:
            if isinstance(argument, np.ndarray) and id(argument) not in device:
                device[id(argument)] = cuda.to_device(argument)
    for launch in plan.launches:
        arguments = [device.get(id(argument), argument) for argument in launch.args]
        launch.kernel[launch.grid, launch.block, 0, launch.shared](*arguments)
    cuda.synchronize()
    return {key: array.copy_to_host() for key, array in device.items()}


def check(plan, results, seed):
    for array, value, rtol, transform in plan.expected:
        got = transform(results[id(array)])
        message = f"np.random.default_rng({seed})"
        if rtol == 0:
            np.testing.assert_array_equal(got, value, err_msg=message)
        else:
            atol = rtol * np.max(np.abs(value))
            np.testing.assert_allclose(got, value, rtol=rtol, atol=atol, err_msg=message)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_numpy(name, order):
    seed = np.random.SeedSequence().entropy
    plan = CASES[name](np.random.default_rng(seed))
    if SIMULATED:
        from course_lib import simulator

        with simulator.options(order=order, seed=seed % 2**32):
            results = run(plan)
    else:
        results = run(plan)
    check(plan, results, seed)


def test_a_wrong_result_is_noticed():
    """Each expectation fails for arrays as they were before the launch: no case checks nothing."""
    for name, build in CASES.items():
        plan = build(np.random.default_rng(0))
        arrays = [a for launch in plan.launches for a in launch.args if isinstance(a, np.ndarray)]
        untouched = {id(array): array for array in arrays}
        with pytest.raises(AssertionError):
            check(plan, untouched, name)


def test_the_zoo_is_wide():
    kernels = {launch.kernel.py_func for build in CASES.values() for launch in launches_of(build)}
    assert len(CASES) >= 24
    assert len(kernels) >= 24


def launches_of(build):
    return build(np.random.default_rng(0)).launches


@pytest.fixture(scope="module")
def compiler_messages():
    """What numba-cuda's compiler says to each kernel, from one process for all."""
    if importlib.util.find_spec("numba_cuda") is None:
        pytest.skip("numba-cuda isn't installed: nothing to compile with")
    tests = pathlib.Path(__file__).parent
    environment = dict(os.environ, COURSE_LIB_SIMULATOR="0", OMP_NUM_THREADS="1")
    paths = [str(tests.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    process = subprocess.run(
        [sys.executable, str(tests / "zoo" / "compile_all.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=COMPILE_SECONDS,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_kernel_compiles_for_a_gpu(name, compiler_messages):
    mine = {key: text for key, text in compiler_messages.items() if key.startswith(f"{name}: ")}
    assert mine, "the case launches nothing"
    assert not any(mine.values()), "\n".join(f"{key}: {text}" for key, text in mine.items())
