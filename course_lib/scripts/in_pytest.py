"""What watches tests under `pytest --cuda-sanitize`; `pytest_cuda_sanitize` is the plugin."""

import pytest

from course_lib import simulator
from course_lib.scripts.watching import threads_watched


class Sanitizing:
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
