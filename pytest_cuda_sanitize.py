"""A plugin of pytest: `pytest --cuda-sanitize` fails every test whose numba.cuda kernel races.

Kernels then run in the simulator of `course_lib`, on a machine with a GPU too. Without the option
nothing of the course is imported, and `numba.cuda` is what it always was.
"""

import pytest

_MARK = "no_cuda_sanitize: pytest --cuda-sanitize lets the kernels of this test be"


def pytest_addoption(parser):
    """Add the options."""
    group = parser.getgroup("cuda", "kernels of numba.cuda")
    group.addoption(
        "--cuda-sanitize", action="store_true",
        help="run kernels in a simulator, and fail tests whose kernels race, read past an array, …",
    )  # fmt: skip
    group.addoption(
        "--cuda-order", choices=("forward", "reverse", "random", "interleaved"), default="forward",
        help="how the threads of a kernel take turns under --cuda-sanitize (default: forward)",
    )  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Put the simulator in the place of numba.cuda before any test file imports it."""
    if not early_config.known_args_namespace.cuda_sanitize:
        return
    import course_lib

    try:
        course_lib.simulate()
    except course_lib.simulator.SimulatorError as error:
        raise pytest.UsageError(f"--cuda-sanitize: {error}") from None


def pytest_configure(config):
    """Register the mark, and the part that watches tests if it was asked for."""
    config.addinivalue_line("markers", _MARK)
    if config.getoption("cuda_sanitize"):
        from course_lib.scripts.in_pytest import Sanitizing

        config.pluginmanager.register(Sanitizing(config.getoption("cuda_order")))
