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
        config.pluginmanager.register(_Sanitizing(config.getoption("cuda_order")))


class _Sanitizing:
    """Watches every test, its fixtures included."""

    def __init__(self, order):
        self.order = order

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        return (yield from self._watched(item, "setup"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        return (yield from self._watched(item, "call"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item):
        return (yield from self._watched(item, "teardown"))

    def _watched(self, item, when):
        """Fail the test for what is found; a test that has failed anyway shows it beside."""
        if item.get_closest_marker("no_cuda_sanitize"):
            return (yield)
        from course_lib import simulator
        from course_lib.scripts.watching import threads_watched

        with simulator.options(order=self.order), simulator.sanitize() as report:
            with threads_watched():
                try:
                    result = yield
                except BaseException:
                    if report:
                        item.add_report_section(when, "cuda-sanitize", _shown(report))
                    raise
        if report:
            pytest.fail(_shown(report), pytrace=False)
        return result


def _shown(report):
    return "\n".join(f"{each.filename}:{each.line}: {each}\n    {each.source}" for each in report)
