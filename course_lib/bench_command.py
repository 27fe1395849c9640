"""The command `bench`: measure on this GPU, list what is missing, compile ahead."""

import gc
import importlib
import signal
import sys
import time

from tqdm import tqdm

import course_lib
from course_lib import bench, benchmarks, results_table
from course_lib.runtime.host import device

WRONG_USAGE, INTERRUPTED = 2, 130  # exit statuses, as a shell knows them
SAVE_EVERY = 30  # s, in which a benchmark of drawn shapes writes down what it has measured


def run(options):
    """Exit status 1 where there is no GPU to measure on, 2 for what a benchmark does not take.

    Stopped halfway, by Ctrl-C or by a time limit, its status is 130, and benchmarks of many cases
    (those with `bench.collected`) keep what they have measured.
    """
    if options.drawn is None and bool(options.what) == options.all:
        options.refuse("say what to measure, or --all")
    if options.drawn is not None and (options.all or options.drawn < 1):
        options.refuse("--drawn is a number from 1 on, and goes without --all")
    of_drawn = "seed", "seconds", "compile_seconds", "compile_only"
    of_others = "rounds", "shapes", "dtypes", "names", "plot", "data"
    for name in of_drawn if options.drawn is None else of_others:
        if getattr(options, name) not in (None, False):
            without = "" if options.drawn is None else "out"
            options.refuse(f"--{name.replace('_', '-')} goes with{without} --drawn")
    if unknown := [name for name in options.what if name not in _to_measure(options)]:
        known = ", ".join(_to_measure(options))
        options.refuse(f"there is no {unknown[0]!r}; there are {known}")
    if options.all and not options.record:
        return _list_pending()
    if options.drawn is not None and options.compile_only:
        return _compile_drawn(options)
    if device.count() == 0 or course_lib.SIMULATED:
        print(
            "Speed is measured on a GPU, and kernels run in the simulator here. "
            "What was measured for the course is in data/results."
        )
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit is as good as Ctrl-C
    if options.drawn is not None:
        return _measure_drawn(options)
    return _measure_pending() if options.all else _measure_named(options)


def _to_measure(options):
    if options.drawn is None:
        return benchmarks.BENCHMARKS
    from course_lib.benchmarks.drawn_problems import OPERATIONS

    return tuple(OPERATIONS)


def _compile_drawn(options):
    from course_lib.benchmarks import drawn, drawn_compiling

    recorded = bench.load_records()
    facts = bench.device_facts() if device.count() else recorded and recorded["device"]
    if facts is None:
        print("There is no GPU here, and of none something is recorded", file=sys.stderr)
        return 1
    seed = drawn.SEED if options.seed is None else options.seed
    n_kernels = drawn_compiling.run(facts, options.drawn, options.what, seed)
    print(f"{n_kernels} kernels are compiled for an {facts['name']}")
    return 0


def _measure_drawn(options):
    from course_lib.benchmarks import drawn

    held = bench.load_records(bench.device_facts()["name"]) if options.record else None
    wanted = {name: value for name in ("seed", "seconds", "compile_seconds")
              if (value := getattr(options, name)) is not None}  # fmt: skip
    found, status, saved = [], 0, time.monotonic()
    gc.collect()
    gc.freeze()  # as in `_measure_named`
    try:
        for found in drawn.run(
            options.drawn, names=options.what or None, held=held["records"] if held else (),
            progress=tqdm, **wanted,
        ):  # fmt: skip
            if options.record and time.monotonic() > saved + SAVE_EVERY:
                bench.save_records(found)
                saved = time.monotonic()
    except KeyboardInterrupt:
        status = INTERRUPTED
        print("stopped; what was measured is kept", file=sys.stderr)
    finally:
        gc.unfreeze()
        if options.record and found:
            print(f"Recorded in {bench.save_records(found)}")
    print(results_table.drawn_report(found))
    n_wanted = options.drawn * drawn.n_passes(options.what or None)
    print(f"\n{drawn.n_cases(found, options.drawn):,} of {n_wanted:,} passes are measured")
    return status


def _list_pending():
    from course_lib.benchmarks import pending

    held = bench.load_records(device.properties().name if device.count() else None)
    if held is None:
        print("Nothing is recorded yet: everything is missing")
    else:
        print(held["device"]["name"], pending.listing(pending.pending(held)), sep="\n")
    return 0


def _measure_pending():
    from course_lib.benchmarks import launches, pending

    facts, measured = bench.device_facts(), []
    held = bench.load_records(facts["name"]) or {"records": []}
    status = 0
    try:
        for each in tqdm(pending.pending(held | {"device": facts})):
            records = each.measure()
            launches.save(records)
            print(benchmarks.table(records))
            measured += records
    except KeyboardInterrupt:
        status = INTERRUPTED
        print(f"stopped after {len(measured)} records, which are kept", file=sys.stderr)
    print(results_table.verdict(results_table.cases(measured)))
    return status


def _measure_named(options):
    from course_lib.benchmarks import launches
    from course_lib.data import DataError

    options.data_folder = options.data
    wanted = {
        name: value
        for name in ("rounds", "shapes", "dtypes", "names", "data_folder")
        if (value := getattr(options, name)) is not None
    }
    status = 0
    for name in options.what:
        benchmark = importlib.import_module(f"course_lib.benchmarks.{name}")
        if refused := benchmarks.refused(benchmark, wanted):
            print(f"python -m course_lib bench {name}: {refused}", file=sys.stderr)
            return WRONG_USAGE
        # PyTorch collects garbage before it captures a graph: a second for every few candidates, if
        # all that was imported is looked through each time.
        gc.collect()
        gc.freeze()
        try:
            found = benchmark.run(**wanted, progress=tqdm)
        except DataError as error:
            print(f"python -m course_lib bench {name}: {error}", file=sys.stderr)
            return WRONG_USAGE
        except bench.Stopped as stopped:
            found, status = stopped.records, INTERRUPTED
            print(f"python -m course_lib bench {name}: stopped {stopped}", file=sys.stderr)
        finally:
            gc.unfreeze()
        if status and not found:
            return status
        if options.names and not found:
            what = ", ".join(options.names)
            print(f"python -m course_lib bench {name}: nothing is called {what}", file=sys.stderr)
            return WRONG_USAGE
        print(benchmarks.table(found))
        print(results_table.verdict(results_table.cases(found)))
        if summary := results_table.summary(found):
            print(f"\n{summary}")
        if options.plot:
            benchmarks.save_plots(found, bench.device_facts(), options.plot)
        if options.record:
            print(f"Recorded in {launches.save(found)}")
        if status:
            break
    return status
