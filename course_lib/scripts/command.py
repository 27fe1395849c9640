"""`python -m course_lib sanitize | trace | lint`: options, the run, and the exit status."""

import argparse
import importlib.util
import sys
from pathlib import Path

WRONG_USAGE = 2  # an exit status; the others are told by `watched_run.status_of`
COMMANDS = {
    "sanitize": "find races in a script's numba.cuda kernels, without a GPU",
    "trace": "count what the warps of a script's kernels ask of memory",
    "lint": "find float64 and spills in a script's kernels, by numba-cuda's compiler",
}
_ORDERS = "forward", "reverse", "random", "interleaved"
_STATUSES = """exit status: 0 nothing found, 1 findings, 2 wrong usage, 3 the script failed,
4 nothing found but not all was looked at, 130 Ctrl-C"""


def add_options(parser, command):
    """Add the options of one of COMMANDS to its parser."""
    parser.usage = f"python -m course_lib {command} [options] SCRIPT | -m MODULE | -c CODE [ARGS]"
    parser.epilog = _STATUSES
    parser.add_argument("--kernel", metavar="NAME", help="look at kernels of this name alone")
    parser.add_argument("--max-launches", type=_positive, metavar="N",
                        help="look at the first N launches of each kernel alone")
    parser.add_argument("--order", choices=_ORDERS, default="forward",
                        help="how threads take turns (default: forward)")
    parser.add_argument("--seed", type=int, default=0, help="of the random order (default: 0)")
    parser.add_argument("--timeout", type=_positive, metavar="SECONDS",
                        help="end a script that takes longer, and tell what was found")
    kinds = ("text", "json") if command == "trace" else ("text", "json", "sarif", "github")
    parser.add_argument("--format", choices=kinds, default="text",
                        help="of the report (default: text); the script's own output then goes to "
                             "the error stream")
    parser.add_argument("--output", type=_file, metavar="FILE", help="write the report there")
    if command == "trace":
        parser.add_argument("--html", type=_file, metavar="FILE",
                            help="draw who touched what, as one page without a network")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE",
                        help="run a module, as python -m does")
    parser.add_argument("-c", dest="code", nargs=argparse.REMAINDER, metavar="CODE",
                        help="run these lines")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS]",
                        help="a script, or a notebook, with its arguments")


def _file(text):
    return Path(text).resolve()  # the script may go to another folder


def _positive(text):
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"a positive whole number; not {text!r}")
    return int(text)


def run(options):
    """Run a script under a command's observer, write the report, and return the exit status."""
    import course_lib
    from course_lib import simulator
    from course_lib.scripts import running

    try:
        course_lib.simulate()  # before a module's package, which may want numba.cuda, is imported
        program = _program(options, running)
        _check_files(options)
        if options.what == "lint" and importlib.util.find_spec("numba_cuda") is None:
            raise running.NoScript("lint compiles kernels with numba-cuda, which is not installed: "
                                   "pip install 'course_lib[gpu]'")
        from course_lib.scripts.watched_run import WatchedRun  # which imports the simulator

        run = WatchedRun(options, program)
    except (running.NoScript, OSError, simulator.SimulatorError) as error:
        print(f"python -m course_lib {options.what}: {error}", file=sys.stderr)
        return WRONG_USAGE
    return run.status()


def _program(options, running):
    given = {running.script: options.script, running.module: options.module,
             running.line: options.code}
    given = {make: words for make, words in given.items() if words}
    if len(given) != 1:
        raise running.NoScript("name one script, or -m MODULE, or -c CODE")
    [(make, words)] = given.items()
    return make(words[0], words[1:])


def _check_files(options):
    """Raise OSError now, and not after the run, for files that cannot be written."""
    for file in (options.output, getattr(options, "html", None)):
        if file is not None:
            file.open("a").close()
