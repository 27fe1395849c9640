"""Our simulator passes what numba-cuda's own simulator passes, and the warp tests it skips.

A quick part of numba-cuda's test suite runs here; `python tests/stock_suite.py` runs all of it.
"""

import importlib.util
import pathlib
import sys
import warnings

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import stock_suite  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        stock_suite.version() is None, reason="numba-cuda isn't installed, so its tests aren't here"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("cffi") is None,
        reason="cffi isn't installed, and numba-cuda's tests import it",
    ),
]

# The tests of these that the stock simulator skips must pass on ours.
WARPS = ["cudapy/test_warp_ops.py", "cudapy/test_sync.py", "cudapy/test_cooperative_groups.py"]
# These start new Pythons or simulate a million threads: for the full run only.
SLOW = {
    "core/test_serialize.py",
    "cudapy/test_caching.py",
    "cudapy/test_multigpu.py",
    "cudapy/test_multiprocessing.py",
    "cudapy/test_multithreads.py",
    "cudapy/test_print.py",
    "doc_examples/test_laplace.py",
    "doc_examples/test_montecarlo.py",
    "doc_examples/test_random.py",
    "nocuda/test_import.py",
}
SECONDS = 200
LAUNCHES = 2000


@pytest.fixture(scope="module")
def results():
    """Every other module, in one process: about 20 seconds."""
    quick = [module for module in stock_suite.all_modules() if module not in SLOW]
    return stock_suite.run(quick, "ours", per_test=30, limit=SECONDS)


@pytest.fixture(scope="module")
def verdicts(results):
    return stock_suite.compare(results, stock_suite.load_record(), stock_suite.load_differences())


def test_nothing_is_worse_than_on_the_stock_simulator(results, verdicts):
    lines = [f"{test}: {results[test]}" for test in verdicts["worse"]]
    assert not lines, "\n".join(lines)


def test_the_record_is_complete(verdicts):
    """Tests that another numba-cuda adds or drops are reported; with the recorded one they fail."""
    strangers = verdicts["new"] + verdicts["missing"]
    recorded = stock_suite.load_record()["version"]
    if stock_suite.version() == recorded:
        assert not strangers
    elif strangers:
        warnings.warn(
            f"numba-cuda {stock_suite.version()} has other tests than {recorded}; "
            f"new: {verdicts['new']}, missing: {verdicts['missing']}",
            stacklevel=1,
        )


def test_the_kernels_ran_in_our_engine(results):
    """Else the overlay would have compared the stock simulator with itself."""
    launches = {test: result.get("launches", 0) for test, result in results.items()}
    assert sum(launches.values()) > LAUNCHES
    for module in WARPS:
        assert any(launches[test] for test in launches if test.startswith(module)), module


@pytest.mark.parametrize("module", WARPS)
def test_warp_and_group_tests_pass(module, results):
    reasons = stock_suite.kept_reasons() | set(stock_suite.load_skips().values())
    outcomes = {
        test: result["outcome"]
        for test, result in results.items()
        if test.startswith(f"{module}::")
        and not (result["outcome"] == "skip" and result["message"] in reasons)
    }
    assert outcomes
    assert set(outcomes.values()) == {"pass"}, outcomes


@pytest.mark.parametrize(
    "ours, stock, listed, verdict",
    [
        ("pass", "pass", None, "same"),
        ("fail", "timeout", None, "same"),
        ("pass", "skip", None, "better"),
        ("pass", "fail", None, "better"),
        ("xpass", "xfail", None, "better"),
        ("xfail", "skip", None, "better"),
        ("fail", "pass", None, "worse"),
        ("skip", "pass", None, "worse"),
        ("crash", "skip", None, "worse"),
        ("fail", "pass", "fail", "intended"),
        ("pass", "pass", "fail", "worse"),
        ("error", "pass", "fail", "worse"),
        ("pass", None, None, "new"),
        ("fail", None, None, "new"),
    ],
)
def test_verdicts(ours, stock, listed, verdict):
    differences = {"m.py::T::t": {"outcome": listed, "reason": "so"}} if listed else {}
    assert stock_suite.judge("m.py::T::t", ours, stock, differences) == verdict


def test_each_difference_has_a_reason_and_is_recorded():
    record = stock_suite.load_record()["stock"]
    for test, difference in stock_suite.load_differences().items():
        assert len(difference["reason"]) > 20, test
        assert test in record, f"{test} isn't in the record"
    for test in stock_suite.load_skips():
        assert record.get(test) == "skip", f"{test} runs on the stock simulator"
