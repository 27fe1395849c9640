"""The commands: `python -m course_lib [doctor | lab | compare | sanitize | trace | …]`.

Every command is imported only when it is asked for, so that `doctor` runs where another's
imports are what is broken.
"""

import argparse
import os
import re
import sys
from pathlib import Path

import course_lib
from course_lib.benchmarks import BENCHMARKS
from course_lib.runtime.compile.cache import CacheError
from course_lib.runtime.host import folders
from course_lib.scripts import command as scripts

WRONG_USAGE, INTERRUPTED = 2, 130  # exit statuses, as a shell knows them


def main(arguments=None):
    """Run the command named in `arguments` (default: the command line's); its exit status."""
    parser = argparse.ArgumentParser(prog="python -m course_lib", description=__doc__)
    parser.set_defaults(command=doctor)
    commands = parser.add_subparsers(title="commands")

    command = commands.add_parser("doctor", help="what is here, and what is wrong with it")
    command.set_defaults(command=doctor)

    command = commands.add_parser("lab", help="the lessons in a folder of yours, in JupyterLab")
    command.set_defaults(command=lab)
    command.add_argument(
        "folder", type=Path, nargs="?", help="made if need be (default: gpu-lessons)"
    )
    command.add_argument("--no-browser", action="store_true", help="print the address instead")
    command.add_argument("--port", type=port, help="of the server (default: a free one from 8888)")
    command.add_argument("--ip", help="who reaches it (default: 127.0.0.1, this machine alone)")

    command = commands.add_parser("compare", help="ours beside PyTorch and float64, by element")
    command.set_defaults(command=compare)
    command.add_argument("operation", help="what to run, such as softmax")
    command.add_argument("--shape", type=shape, help="such as 128x200 (default: a small one)")
    command.add_argument("--tolerance", type=float, help="error allowed, in units of the scale")
    command.add_argument("--variant", default="auto", help="the rung of the ladder (default: auto)")
    command.add_argument("--dtype", default="float32", help="float32 (default), float16, bfloat16")
    command.add_argument(
        "--direction", default="forward", help="forward, inference, backward, weights, all"
    )
    command.add_argument("--seed", type=int, default=0, help="of the random numbers (default: 0)")
    command.add_argument("--device", help="gpu or simulator (default: gpu, if there is one)")

    for name, about in scripts.COMMANDS.items():
        command = commands.add_parser(name, help=about)
        command.set_defaults(command=globals()[name], what=name)
        scripts.add_options(command, name)

    command = commands.add_parser("bench", help="measure on this GPU, beside the peers")
    command.set_defaults(command=bench)
    command.set_defaults(refuse=command.error)
    command.add_argument(
        "what", nargs="*", help=f"what to measure: {', '.join(BENCHMARKS)}; or with --drawn, "
        "operations (default: all)"
    )
    command.add_argument(
        "--all", action="store_true",
        help="list what is missing or stale; with --record, measure it, cheapest first",
    )  # fmt: skip
    command.add_argument(
        "--drawn", type=int, metavar="N", help="measure N problems of drawn shapes, each operation"
    )
    command.add_argument("--seed", type=int, help="of the drawn shapes (default: 2026)")
    command.add_argument("--seconds", type=float, help="start no drawn problem later than this")
    command.add_argument(
        "--compile-seconds", type=float,
        help="time torch.compile on drawn problems this long for each operation (default: 20)",
    )  # fmt: skip
    command.add_argument(
        "--compile-only", action="store_true",
        help="compile what drawn problems launch, in all processors; needs no GPU",
    )  # fmt: skip
    command.add_argument("--record", action="store_true", help="keep the result in data/results")
    command.add_argument("--rounds", type=int, help="timed rounds (default: 15 to 30)")
    command.add_argument("--shapes", type=shapes, help="only these, such as 128x200,1024x10000")
    command.add_argument("--dtypes", type=names, help="only these, such as float32,bfloat16")
    command.add_argument("--names", type=names, help="only these, such as softmax.backward")
    command.add_argument("--plot", type=Path, metavar="FOLDER", help="save the ladders as pictures")
    command.add_argument("--data", type=Path, help="folder of real images, for what trains on them")

    command = commands.add_parser("kernels", help="what was compiled, and where it is kept")
    command.set_defaults(command=kernels)
    command.add_argument("word", nargs="?", default="", help="only what has it in its line")
    command.add_argument("--paths", action="store_true", help="show every kernel's file")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--ptx", metavar="NAME", help="print the PTX of this kernel, or of this key")
    which.add_argument("--sass", metavar="NAME", help="print its machine instructions")
    which.add_argument("--clear", action="store_true", help="delete what was compiled")

    command = commands.add_parser("train", help="train a network, with checkpoints")
    command.set_defaults(command=train)
    tasks = command.add_subparsers(
        dest="task", required=True, metavar="task", parser_class=_LateParser
    )
    clothes = tasks.add_parser("fashion-mnist", help="clothes, with our kernels alone")
    _training_options(clothes, "folder of its four files (default: downloaded)", "tf32")
    clothes.add_argument(
        "--modules", action="store_const", const="modules", dest="trainer",
        help="train through autograd, not in a captured graph (on a GPU; as bfloat16 does)",
    )  # fmt: skip
    leaves = tasks.add_parser("leaves", help="sick and healthy leaves")
    _training_options(leaves, "folder or zip of images (default: drawn ones)")
    leaves.add_argument("--model", help="efficientnet_b4 (default on a GPU), small_se_net, …")
    leaves.add_argument("--image-size", type=int, help="height and width of the images")
    leaves.add_argument("--validation-fraction", type=float, default=0.2, help="(default: 0.2)")
    leaves.add_argument(
        "--sync-batch-norm", action="store_true",
        help="of several ranks, batch norms take the joint batch's statistics",
    )  # fmt: skip

    leaves.add_argument(
        "--memory-limit",
        help="memory for decoded images, such as 8GB; a larger set is streamed (default: three "
        "quarters of what is free)",
    )

    sar = tasks.add_parser("sar", help="water in radar images, by the U-Net on NumPy or a GPU")
    sar.add_argument("--config", type=Path, metavar="FILE", help="YAML: the run's settings")
    _run_options(sar)

    images = tasks.add_parser("images", help="photographs of any kind, on any device")
    images.late = _image_options

    command = commands.add_parser("data", help="fetch a public data set")
    command.set_defaults(command=data)
    command.add_argument("name", choices=("tiny-imagenet", "fashion-mnist", "cifar100"))
    sets = folders.written("data")
    command.add_argument("folder", type=Path, nargs="?", default=sets, help="of all sets")
    command.add_argument("--yes", action="store_true", help="do not ask")

    command = commands.add_parser("readme", help="write README, RESULTS and docs again")
    command.set_defaults(command=readme)
    command.add_argument("--check", action="store_true", help="only say whether it is in step")

    try:
        options = parser.parse_args(arguments)
        if course_lib.start_error is not None and options.command is not doctor:
            raise course_lib.start_error
        return options.command(options)
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return INTERRUPTED
    except CacheError as error:
        print(f"python -m course_lib: {error}", file=sys.stderr)
        return WRONG_USAGE
    except ModuleNotFoundError as error:
        from course_lib.doctor import without

        if (cure := without(error.name)) is None:
            raise
        print(f"python -m course_lib: {cure}", file=sys.stderr)
        return 1


class _LateParser(argparse.ArgumentParser):
    """A parser whose options are found when it is asked for: `late(parser)` adds them."""

    late = None

    def parse_known_args(self, args=None, namespace=None):
        if self.late is not None:
            late, self.late = self.late, None
            late(self)
        return super().parse_known_args(args, namespace)


def _image_options(task):
    """The options of `train images` are the keys of its settings."""
    if course_lib.start_error is not None:
        raise course_lib.start_error
    from course_lib.train.config import add_options
    from course_lib.train.image_settings import ImageSettings

    task.add_argument("--config", type=Path, metavar="FILE", help="YAML: the run's settings")
    _run_options(task)
    add_options(task, ImageSettings)


def _training_options(task, data, *precisions):
    """The options that all tasks of `train` have; `data` says what --data is.

    precisions  what this task computes in beside those that all do
    """
    precisions = ("float32", "bfloat16", *precisions)
    task.add_argument("--data", type=Path, help=data)
    _run_options(task)
    task.add_argument("--epochs", type=int, help="how often each image is seen")
    task.add_argument("--batch-size", type=int, help="images in a step")
    task.add_argument("--lr", type=float, dest="learning_rate", help="highest learning rate")
    task.add_argument("--seed", type=int, default=0, help="of all random numbers (default: 0)")
    task.add_argument("--precision", choices=precisions, help="(default: float32)")
    task.add_argument("--checkpoint-steps", type=int, help="steps between (default: an epoch)")
    task.add_argument("--device", help="such as cuda:1, mps or cpu (default: a GPU if any)")
    whose = task.add_mutually_exclusive_group()
    whose.add_argument(
        "--kernels", choices=("ours", "torch", "faster"),
        help="whose layers: ours (default), torch, or on each layer the faster",
    )  # fmt: skip
    whose.add_argument(
        "--no-cuda-kernels", action="store_false", dest="use_cuda_kernels",
        help="as --kernels torch",
    )  # fmt: skip


def _run_options(task):
    """Where a run is kept, and whether it goes on or is only looked at."""
    task.add_argument("--output", type=Path, help="folder for checkpoint, history and pictures")
    task.add_argument("--resume", action="store_true", help="go on with the run in --output")
    task.add_argument("--evaluate", type=Path, metavar="CHECKPOINT", help="only evaluate this")
    task.add_argument(
        "--rank-timeout", type=float, default=1800, metavar="SECONDS",
        help="under torchrun, how long ranks wait for one that is silent (default: 1800)",
    )  # fmt: skip


def shape(text):
    """The sizes in `text`, such as "128x200". argparse turns the error into exit status 2."""
    if not re.fullmatch(r"\d+(x\d+)*", text, flags=re.ASCII):
        raise argparse.ArgumentTypeError(f"sizes joined by x, such as 128x200; not {text!r}")
    return tuple(map(int, text.split("x")))


def port(text):
    """The port in `text`; 0 lets JupyterLab find a free one, and it would for what is no port."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"a number from 0 to 65535; not {text!r}")
    return int(text)


def shapes(text):
    """The shapes in `text`, such as "128x200,1024x10000"."""
    return [shape(part) for part in text.split(",")]


def names(text):
    """The names in `text`, joined by commas."""
    return text.split(",")


def doctor(_options):
    """Exit status 0 when all is well, 1 when something is wrong."""
    from course_lib import doctor

    status = doctor.main()
    if status == 0 and course_lib.start_error is not None:
        raise course_lib.start_error
    return status


def lab(options):
    """Exit status 1 where the folder can't be written, or JupyterLab is not installed."""
    from course_lib import lab

    return lab.run(
        options.folder, browser=not options.no_browser, port=options.port, ip=options.ip
    )


def compare(options):
    """Exit status 0 when every element is within the tolerance, 1 when not, 2 for bad arguments."""
    from course_lib import compare as comparing

    def bar(blocks, total):
        # Only for launches that take a while, and never left behind.
        try:
            from tqdm import tqdm
        except ModuleNotFoundError:
            return blocks
        return tqdm(blocks, total=total, unit=" blocks", delay=2, leave=False)

    def warn(sentence):
        print(sentence, file=sys.stderr)

    known = *comparing.DIRECTIONS, "all"
    right, directions = True, [options.direction]
    if options.direction == "all" and options.operation in comparing.OPERATIONS:
        directions = comparing.OPERATIONS[options.operation].passes
    try:
        if options.direction not in known:
            raise comparing.UsageError(
                f"there is no direction {options.direction!r}; there are {', '.join(known)}"
            )
        for direction in directions:
            found = comparing.compare(
                options.operation, options.shape, variant=options.variant, dtype=options.dtype,
                direction=direction, tolerance=options.tolerance, seed=options.seed,
                place=options.device, progress=bar, warn=warn,
            )  # fmt: skip
            print(found)
            right = right and found.right
    except comparing.UsageError as error:
        print(f"python -m course_lib compare: {error}", file=sys.stderr)
        return WRONG_USAGE
    return 0 if right else 1


def sanitize(options):
    """The exit statuses of `sanitize`, `trace` and `lint` are told in docs/sanitize.md."""
    return scripts.run(options)


trace = lint = sanitize


def bench(options):
    """Exit status 1 where there is no GPU to measure on, 2 for what a benchmark does not take."""
    from course_lib import bench_command

    return bench_command.run(options)


def kernels(options):
    """Exit status 1 where a file can't be deleted, 2 for a kernel that is not there."""
    from course_lib import kernels_command

    try:
        text = kernels_command.run(
            options.word, ptx_of=options.ptx, sass_of=options.sass, clear=options.clear,
            paths=options.paths,
        )  # fmt: skip
    except kernels_command.NotFound as error:
        print(f"python -m course_lib kernels: {error}", file=sys.stderr)
        return WRONG_USAGE
    except OSError as error:
        print(f"python -m course_lib kernels: {error}", file=sys.stderr)
        return 1
    try:
        print(text, flush=True)
    except BrokenPipeError:  # read by something like head, which has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def train(options):
    """Exit status 2 for data, checkpoints or options that cannot be used, 1 for failed training."""
    from tqdm import tqdm

    from course_lib.train import command

    options.downloads = folders.written("data")
    return command.run(options, tqdm)


def data(options):
    """Exit status 1 where the set cannot be fetched, 2 where nobody agrees to its terms."""
    from tqdm import tqdm

    from course_lib.train import data_command

    bar = tqdm if sys.stderr.isatty() else None
    return data_command.run(options.name, options.folder, yes=options.yes, progress=bar)


def readme(options):
    """Exit status 1 when `--check` was asked for and something is out of step."""
    if folders.clone() is None:
        print("There is no README.md here: this command is for a clone of the course.")
        return 1
    from course_lib import readme as documents

    late = documents.run(check=options.check)
    if not late:
        print("README.md, RESULTS.md, docs and their pictures are in step with data/results.")
        return 0
    if options.check:
        print(f"Out of step with data/results: {', '.join(late)}. Run `make readme`.")
        return 1
    print(f"Written again: {', '.join(late)}.")
    return 0
