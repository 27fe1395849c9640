"""`python -m course_lib train TASK`: train, go on after a stop, or evaluate."""

import contextlib
import dataclasses
import functools
import os
import sys
from collections import namedtuple

from course_lib import data, device
from course_lib.backend import BackendError

from . import (
    config,
    fashion_mnist,
    image_settings,
    images,
    joining,
    leaves,
    loop,
    memory,
    ranks,
    sar,
)
from .checkpoint import CheckpointError
from .classifier import PRECISIONS, accuracy_by_class, evaluate_accuracy
from .device import ORDER
from .faster import FASTER

WRONG_USAGE, FAILED, INTERRUPTED = 2, 1, 130  # exit statuses, as a shell knows them
Part = namedtuple("Part", "images labels classes")
KERNELS = {"ours": True, "torch": False, FASTER: FASTER}  # as the tasks' use_cuda_kernels
#: Settings of each task that are its own default where the command line does not name them.
SETTINGS = {
    "leaves": (
        "model", "image_size", "epochs", "batch_size", "learning_rate", "precision",
        "checkpoint_steps", "validation_fraction", "sync_batch_norm", "memory_limit",
    ),
    "fashion-mnist": (
        "epochs", "batch_size", "learning_rate", "precision", "checkpoint_steps", "trainer",
    ),
}  # fmt: skip
#: Settings in which ranks may differ: what there is on a host, and where.
OF_A_HOST = frozenset(
    "cache checkpoint_dir data data_dir device download memory_fraction memory_limit num_workers "
    "prefetch_factor use_cuda".split()
)


def run(options, progress):
    """Do what the command line's `options` ask for; the exit status. `progress` is tqdm.

    `options.downloads` is the folder for sets that are downloaded. As one of several ranks, train
    with them; rank 0 alone speaks, and evaluates.
    """
    try:
        _read_settings(options)
        if options.evaluate:
            with joining.joined("cpu", options.rank_timeout):
                _require_one_command(options)
            if joining.is_started() and os.environ["RANK"] != "0":
                return 0
            _warn_of_cpu(options)
            with memory.explained({}):
                return EVALUATE[options.task](options, progress)
        with joining.joined(_asked_device(options), options.rank_timeout) as name, _by_rank():
            _require_one_command(options)
            _place(options, name)
            _warn_of_cpu(options)
            return _train(options, progress)
    except (data.DataError, CheckpointError, ValueError, BackendError) as error:
        return _ended(options, error, WRONG_USAGE)
    except (loop.TrainingError, OSError) as error:
        return _ended(options, error, FAILED)


def _ended(options, error, status):
    """Tell why a run ends, unless another rank has; the exit status."""
    if joining.is_news():
        print(f"python -m course_lib train {options.task}: {error}", file=sys.stderr)
    return status


@contextlib.contextmanager
def _by_rank():
    """Other ranks than 0 print nothing."""
    with contextlib.ExitStack() as stack:
        if not ranks.is_first():
            nothing = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nothing))
            stack.enter_context(contextlib.redirect_stderr(nothing))
        yield


def _require_one_command(options):
    """Raise ValueError, on every rank, where one was started to do something else.

    What is of a host alone may differ; of `resume`, rank 0's counts.
    """
    evaluate = options.evaluate and str(options.evaluate)
    ranks.require_same({"task": options.task, "evaluate": evaluate})
    if options.task in SETTINGS:
        names = *SETTINGS[options.task], "seed", "kernels", "use_cuda_kernels"
        found = {name: getattr(options, name) for name in names}
    else:
        found = dataclasses.asdict(options.settings)
    ranks.require_same({name: found[name] for name in found.keys() - OF_A_HOST})


def _read_settings(options):
    if options.task == "sar":
        options.settings = sar.read_settings(options.config)
    if options.task == "images":
        options.settings = _image_settings(options)


def _asked_device(options):
    """The name of the device that options or settings ask for; None: whichever there is."""
    if options.task == "sar":
        return {None: None, True: "cuda", False: "cpu"}[options.settings.use_cuda]
    return options.settings.device if options.task == "images" else options.device


def _place(options, name):
    """Let the run be on the device called `name`."""
    if options.task == "images":
        options.settings = dataclasses.replace(options.settings, device=name)
    elif options.task in SETTINGS:
        options.device = name


def _warn_of_cpu(options):
    if options.task in SETTINGS and "cpu" in (options.device, device.best(ORDER)):
        print("No GPU is used: PyTorch's operators run on the CPU.", file=sys.stderr)


def _train(options, progress):
    if options.task not in SETTINGS:
        options.output = options.output or options.settings.checkpoint_dir
    output = options.output = options.output or options.downloads / "runs" / options.task
    names = SETTINGS.get(options.task, ())
    given = {key: value for key in names if (value := getattr(options, key)) is not None}
    if options.task in SETTINGS:  # the others' own settings say all that
        given |= {
            "seed": options.seed, "device_name": options.device,
            "use_cuda_kernels": KERNELS.get(options.kernels, options.use_cuda_kernels),
        }  # fmt: skip
    options.resume |= joining.is_restarted() and (output / loop.CHECKPOINT).exists()
    if options.resume and output.is_dir() and not (output / loop.CHECKPOINT).exists():
        print(f"{output} has no checkpoint yet: the run starts from its beginning.")
    on_terminal = sys.stderr.isatty()
    report = functools.partial(_report, print if not on_terminal else progress.write)
    if on_terminal and options.task != "images":
        report = None  # the bar says it all, but for images in a second
    try:
        _, history = TRAIN[options.task](
            options, output=output, resume=options.resume, **given,
            progress=progress if on_terminal else None,
            report=report,
            say=functools.partial(progress.write, file=sys.stderr),
        )  # fmt: skip
    except KeyboardInterrupt:
        there = (output / loop.CHECKPOINT).exists()
        holds = "the last checkpoint is whole" if there else "it holds no checkpoint yet"
        print(
            f"\nStopped. {output}: {holds}. To go on, add --resume to the same command.",
            file=sys.stderr,
        )
        return INTERRUPTED
    print(f"{loop.sentence(history[-1])}. Kept in {output}.")
    if options.task == "images" and len(history) < options.settings.epochs:
        print(
            f"Stopped after epoch {len(history)} of {options.settings.epochs}, as max_minutes "
            "says: the same command goes on."
        )
    return 0


def _report(write, entry):
    write(loop.sentence(entry))
    sys.stdout.flush()


def _train_leaves(options, **settings):
    return leaves.train_leaves(root=options.data, **settings)


def _train_fashion_mnist(options, output, resume, **settings):
    loop.require_room(output, resume)  # before anything is downloaded
    with ranks.in_turn():
        parts = _fashion_mnist(options, True), _fashion_mnist(options, False)
    return fashion_mnist.train_fashion_mnist(
        *parts[0], *parts[1], output=output, resume=resume, **settings
    )


def _fashion_mnist(options, train):
    """A part of the set in --data; without that, of the one that is downloaded."""
    root = options.data or options.downloads / "fashion-mnist"
    return data.fashion_mnist(root, train=train, download=options.data is None)


def _evaluate_leaves(options, progress):
    model, part, settings = leaves.load_leaves(
        options.evaluate, options.data, device_name=options.device,
        progress=progress if sys.stderr.isatty() else None, memory_limit=options.memory_limit,
    )  # fmt: skip
    return _tell(model, part, settings, "validation")


def _evaluate_fashion_mnist(options, progress):
    model, settings = fashion_mnist.load_fashion_mnist(options.evaluate, device_name=options.device)
    part = Part(*_fashion_mnist(options, False), data.FASHION_CLASSES)
    return _tell(model, part, settings, "test")


def _tell(model, part, settings, name_of_part):
    precision = settings["precision"] if settings["precision"] in PRECISIONS else "float32"
    shares = accuracy_by_class(model, part, precision=precision)
    width = max(map(len, shares))
    for name, share in shares.items():
        print(f"{name:{width}}  {share:7.1%}")
    right = evaluate_accuracy(model, part.images, part.labels, precision=precision)
    print(f"{right:.1%} of {len(part.labels)} {name_of_part} images.")
    return 0


def _train_sar(options, **settings):
    return sar.train_sar(options.settings, **settings)


def _evaluate_sar(options, progress):
    for name, value in sar.evaluate(options.evaluate, options.settings).items():
        print(f"{name.replace('_', ' '):20}  {value:.4f}")
    return 0


def _image_settings(options):
    """The settings of the YAML file in --config, and over them those of the command line."""
    kind = image_settings.ImageSettings
    settings = config.read(options.config, kind) if options.config else kind()
    return dataclasses.replace(settings, **config.given(options, kind))


def _train_images(options, **settings):
    return images.train_images(options.settings, downloads=options.downloads, **settings)


def _evaluate_images(options, progress):
    settings = options.settings
    task, part, _ = images.load_images(
        options.evaluate, settings.data, device_name=settings.device, cache=settings.cache,
        downloads=options.downloads, progress=progress if sys.stderr.isatty() else None,
        memory_limit=settings.memory_limit,
    )  # fmt: skip
    found = task.predict(part.images).argmax(1).cpu() == part.labels
    for line in images.worst_classes(task, part, len(part.classes)):
        print(line)
    print(f"{found.double().mean():.1%} of {len(part)} validation images.")
    return 0


TRAIN = {
    "leaves": _train_leaves, "fashion-mnist": _train_fashion_mnist, "sar": _train_sar,
    "images": _train_images,
}  # fmt: skip
EVALUATE = {
    "leaves": _evaluate_leaves, "fashion-mnist": _evaluate_fashion_mnist, "sar": _evaluate_sar,
    "images": _evaluate_images,
}  # fmt: skip
