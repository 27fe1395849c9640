"""Figures of the last run of the suite, from pytest's JUnit reports that `make test` keeps."""

import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".reports"
RUNS = ("tests", "notebooks", "solutions")  # what `make test` runs, one after the other
BAD = "failure", "error", "skipped"


def read(folder=FOLDER):
    """{run: its root element} of the reports that there are."""
    paths = {name: folder / f"{name}.xml" for name in RUNS}
    return {n: ElementTree.parse(path).getroot() for n, path in paths.items() if path.exists()}


def figures(folder=FOLDER):
    """{name: (value, what was counted)}; the value is a text where there is no report."""
    runs = read(folder)
    cases = [*runs["tests"].iter("testcase")] if "tests" in runs else []
    noted = Counter(each.get("name") for case in cases for each in case.iter("property"))
    wrong = [case for case in cases if case.get("name").startswith("test_wrong_is_rejected[")]
    rejected = sum(not any(map(case.findall, BAD)) for case in wrong)
    spent = Counter()
    for run in runs.values():
        for case in run.iter("testcase"):
            spent[case.get("classname")] += float(case.get("time"))
    slowest = [f"{seconds:.0f} s {name}" for name, seconds in spent.most_common(20)]
    suites = [suite for run in runs.values() for suite in run.iter("testsuite")]
    minutes = round(sum(float(suite.get("time")) for suite in suites) / 60)
    n_tests = [f"of a run of {len(cases):,} tests"]
    found = {
        "contract proofs": (noted["proved"], n_tests),
        "planted mistakes rejected": (noted["rejected"], n_tests),
        "known-wrong kernels rejected": (rejected, n_tests),
    }
    if not cases:
        found = dict.fromkeys(found, ("no report", ()))
    whole = (minutes, slowest) if len(runs) == len(RUNS) else ("no report", ())
    return found | {"minutes of make test": whole}
