"""numba-cuda's own tests, run on our simulator and compared with its own one.

    python tests/stock_suite.py                        all modules on ours, against the record
    python tests/stock_suite.py cudapy/test_sync.py    some modules only
    python tests/stock_suite.py --record               the stock simulator too; renews the record

Three things decide whether a test on our simulator is as it should be:

- `stock_suite_outcomes.json`: what the stock simulator does with each test (recorded, since the
  stock simulator needs minutes);
- `stock_suite_differences.toml`: the intended differences, each with its reason;
- the rule in `judge` below.

`stock_suite_child.py` runs the tests, `stock_suite_overlay.py` puts our simulator underneath.
"""

import argparse
import collections
import concurrent.futures
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import tomllib

HERE = pathlib.Path(__file__).parent
OUTCOMES = HERE / "stock_suite_outcomes.json"
DIFFERENCES = HERE / "stock_suite_differences.toml"
MESSAGE_LENGTH = 300
FAILED = ("fail", "error", "timeout", "crash")
FOLDERS = ("cudasim", "cudapy", "cudadrv", "nocuda", "nrt", "core", "doc_examples")


def version():
    """The installed numba-cuda's version, or None."""
    try:
        return importlib.metadata.version("numba-cuda")
    except importlib.metadata.PackageNotFoundError:
        return None


def all_modules():
    """Paths of the shipped test modules, relative to numba-cuda's `tests` folder."""
    root = pathlib.Path(importlib.util.find_spec("numba_cuda").origin).parent
    root = root / "numba" / "cuda" / "tests"
    return [
        str(path.relative_to(root))
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("test_*.py"))
    ]


def run(modules, simulator, per_test=60, limit=600):
    """Run test modules in one process; start it again behind a test that kills or hangs it.

    Returns {test id: {"outcome", "message", "seconds", "launches"}}.
    """
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        log, done = pathlib.Path(folder, "log"), pathlib.Path(folder, "done")
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONFAULTHANDLER="1")
        environment.pop("PYTEST_ADDOPTS", None)
        command = [sys.executable, str(HERE / "stock_suite_child.py"), simulator, str(log)]
        command += ["--per-test", str(per_test), "--done", str(done)]
        while True:
            done.write_text("\n".join(results))
            log.write_text("")
            try:
                process = subprocess.run(
                    command + modules,
                    env=environment,
                    cwd=folder,
                    timeout=limit,
                    capture_output=True,
                    text=True,
                )
                ending, output = "crash", process.stdout[-2000:] + process.stderr[-2000:]
            except subprocess.TimeoutExpired:
                ending, output = "timeout", ""
            unfinished = None
            for line in log.read_text().splitlines():
                record = json.loads(line)
                test = record.pop("test")
                if record["outcome"] == "started":
                    unfinished = test
                else:
                    results[test] = record
                    unfinished = None
            if unfinished is None:
                if not results and "no tests ran" not in output:
                    # It did not even come to collecting: an error for each module.
                    failure = {"outcome": "error", "message": output[-MESSAGE_LENGTH:]}
                    results = {module: failure for module in modules}
                return results
            results[unfinished] = {"outcome": ending, "message": output[-MESSAGE_LENGTH:]}


def run_all(modules, simulator, jobs, report=lambda module, results: None):
    """Run each module in a process of its own, `jobs` at a time."""
    results = {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run, [module], simulator): module for module in modules}
        for future in concurrent.futures.as_completed(futures):
            results.update(future.result())
            report(futures[future], future.result())
    return results


def load_record():
    """{"version": str, "stock": {test id: outcome}} as recorded on the stock simulator."""
    data = json.loads(OUTCOMES.read_text())
    stock = {
        f"{module}{test}": outcome
        for module, outcomes in data["stock"].items()
        for outcome, tests in outcomes.items()
        for test in tests
    }
    return {"version": data["version"], "stock": stock}


def save_record(results):
    """Write the stock outcomes, one line per module and outcome."""
    stock = collections.defaultdict(lambda: collections.defaultdict(list))
    for test in sorted(results):
        module, separator, name = test.partition("::")
        stock[module][results[test]["outcome"]].append(separator + name)
    modules = [
        f" {json.dumps(module)}: {{\n"
        + ",\n".join(f"  {json.dumps(o)}: {json.dumps(tests)}" for o, tests in outcomes.items())
        + "\n }"
        for module, outcomes in stock.items()
    ]
    text = ",\n".join(modules)
    OUTCOMES.write_text(f'{{"version": "{version()}", "stock": {{\n{text}\n}}}}\n')


def load_differences():
    """{test id: {"outcome", "reason"}}: where ours is meant to differ from stock."""
    data = tomllib.loads(DIFFERENCES.read_text())
    return {
        test: {"outcome": group["outcome"], "reason": group["reason"]}
        for group in data.get("difference", [])
        for test in group["tests"]
    }


def load_skips():
    """{test id: reason}: tests that stay skipped although the stock simulator's reason is gone."""
    data = tomllib.loads(DIFFERENCES.read_text())
    return {test: group["reason"] for group in data["skipped"] for test in group.get("tests", [])}


def kept_reasons():
    """Texts given to `skip_on_cudasim` that hold for ours as well."""
    data = tomllib.loads(DIFFERENCES.read_text())
    return {text for group in data["skipped"] for text in group.get("stock_reasons", [])}


def judge(test, ours, stock, differences):
    """The verdict on one test: "same", "better", "intended", "new" or "worse".

    Args:
        test: the test's id.
        ours: its outcome on our simulator.
        stock: its outcome on the stock simulator, or None if it isn't in the record.
        differences: from `load_differences`.
    """
    listed = differences.get(test)
    if listed:
        # A list that is out of date is an error as well: it must not rot.
        return "intended" if listed["outcome"] == ours else "worse"
    if stock is None:
        return "new"
    if ours == stock or {ours, stock} <= set(FAILED):
        return "same"
    return "better" if ours in ("pass", "xpass", "xfail") else "worse"


def compare(ours, record, differences):
    """{verdict: [test id, ...]} for the results of `run`; "missing" for tests that vanished."""
    verdicts = collections.defaultdict(list)
    for test, result in ours.items():
        stock = record["stock"].get(test)
        verdicts[judge(test, result["outcome"], stock, differences)].append(test)
    modules = {test.partition("::")[0] for test in ours}
    for test in record["stock"]:
        if test.partition("::")[0] in modules and test not in ours:
            verdicts["missing"].append(test)
    return verdicts


def tally(outcomes):
    """(passed, failed, skipped) of a list of outcomes; expected failures, xfail, count as passed.

    So does xpass: a failure was expected, of the stock simulator or a GPU, and did not come.
    """
    passed = sum(outcome in ("pass", "xfail", "xpass") for outcome in outcomes)
    failed = sum(outcome in FAILED for outcome in outcomes)
    return passed, failed, len(outcomes) - passed - failed


def print_table(ours, record, verdicts):
    """One line per module, then what differs."""
    modules = sorted({test.partition("::")[0] for test in ours})
    print(f"{'module':44} {'stock':>16} {'ours':>16} launches  (passed failed skipped)")
    total = [0] * 7
    for module in modules:
        mine = {test: r for test, r in ours.items() if test.partition("::")[0] == module}
        stock = [o for test, o in record["stock"].items() if test.partition("::")[0] == module]
        row = tally(stock) + tally([r["outcome"] for r in mine.values()])
        row += (sum(r.get("launches", 0) for r in mine.values()),)
        total = [a + b for a, b in zip(total, row, strict=True)]
        print_row(module, row)
    print_row("total", total)
    for verdict in ("better", "intended", "new", "missing", "worse"):
        print(f"{verdict}: {len(verdicts[verdict])}")
    for verdict in ("new", "missing", "worse"):
        for test in verdicts[verdict]:
            result = ours.get(test, {"outcome": "missing"})
            was = record["stock"].get(test, "unknown")
            print(f"  {verdict}: {test}: {was} -> {result['outcome']} {result.get('message', '')}")


def print_row(name, row):
    print(f"{name:44} {row[0]:6}{row[1]:5}{row[2]:5} {row[3]:6}{row[4]:5}{row[5]:5} {row[6]:8}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="such as cudapy/test_sync.py; default: all")
    parser.add_argument("--record", action="store_true", help="renew the stock outcomes (slow)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=pathlib.Path, help="write our results here")
    options = parser.parse_args()
    if version() is None:
        sys.exit("numba-cuda isn't installed, so its tests aren't here")
    modules = options.modules or all_modules()

    def report(module, results):
        counts = tally([result["outcome"] for result in results.values()])
        print("{}: {} passed, {} failed, {} skipped".format(module, *counts), file=sys.stderr)

    if options.record:
        save_record(run_all(modules, "stock", options.jobs, report))
        return
    ours = run_all(modules, "ours", options.jobs, report)
    if options.json:
        options.json.write_text(json.dumps(ours, indent=1))
    record = load_record()
    verdicts = compare(ours, record, load_differences())
    print_table(ours, record, verdicts)
    print(f"numba-cuda {version()}, record of {record['version']}")
    sys.exit(1 if verdicts["worse"] else 0)


if __name__ == "__main__":
    main()
