"""`python tests/sanitizer_cases`: the table; `--gpu NAME`: one case on the GPU."""

import argparse
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parent.parent)]

from course_lib.simulator.engine.options import ORDERS  # noqa: E402
from sanitizer_cases import CASES, run, run_on_gpu  # noqa: E402


def table(cases, order):
    """Print one row for each case; the number of wrong ones."""
    wrong = 0
    print(f"{'case':38}{'kind':24}{'line':>5}  {'result':8}message")
    for case in cases:
        outcome = run(case, order)
        wrong += not outcome.right
        if case.kind is None:
            result = "clean" if outcome.right else "ALARM"
        else:
            result = "found" if outcome.right else "MISSED" if not outcome.hits else "EXTRA"
        message = outcome.hits[0].message if outcome.hits and outcome.right else (
            "; ".join(map(str, outcome.report)))
        print(f"{case.name:38}{case.kind or 'correct':24}{case.line or '':>5}  {result:8}{message}")
    planted = sum(case.kind is not None for case in cases)
    print(f"{planted} planted bugs, {len(cases) - planted} correct kernels, {wrong} judged wrongly")
    return wrong


def main(arguments=None):
    """Run what is asked for; 0 if all is well, 1 if a case is judged wrongly."""
    parser = argparse.ArgumentParser(prog="python tests/sanitizer_cases",
                                     description=__doc__)
    parser.add_argument("names", nargs="*", help="cases to run (default: all)")
    parser.add_argument("--order", default="forward", choices=ORDERS)
    parser.add_argument("--gpu", metavar="NAME", help="launch this case on the GPU instead")
    parser.add_argument("--tools", action="store_true",
                        help="list which tool of compute-sanitizer can see each planted bug")
    options = parser.parse_args(arguments)
    unknown = [name for name in [*options.names, *filter(None, [options.gpu])]
               if name not in CASES]
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}")
    if options.gpu:
        run_on_gpu(CASES[options.gpu])
        return 0
    cases = [CASES[name] for name in options.names] or list(CASES.values())
    if options.tools:
        for case in cases:
            if case.kind is not None:
                print(f"{case.name:38}{case.kind:24}{case.gpu_tool or '-':12}{case.gpu_reason}")
        return 0
    return 1 if table(cases, options.order) else 0


if __name__ == "__main__":
    sys.exit(main())
