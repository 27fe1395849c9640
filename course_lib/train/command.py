"""`python -m course_lib train leaves`: train on leaves, go on after a stop, or evaluate."""

import sys

from course_lib import data, device

from . import leaves, loop
from .checkpoint import CheckpointError
from .classifier import evaluate_accuracy

WRONG_USAGE, FAILED, INTERRUPTED = 2, 1, 130  # exit statuses, as a shell knows them
SETTINGS = (
    "model", "image_size", "epochs", "batch_size", "learning_rate", "precision", "checkpoint_steps",
)  # fmt: skip


def run(options, progress):
    """Do what the command line's `options` ask for; the exit status. `progress` is tqdm."""
    try:
        if device.count() == 0 or options.device == "cpu":
            print("No GPU is used: PyTorch's operators run on the CPU.", file=sys.stderr)
        if options.evaluate:
            return _evaluate(options, progress)
        return _train(options, progress)
    except (data.DataError, CheckpointError, ValueError) as error:
        print(f"python -m course_lib train leaves: {error}", file=sys.stderr)
        return WRONG_USAGE
    except loop.TrainingError as error:
        print(f"python -m course_lib train leaves: {error}", file=sys.stderr)
        return FAILED


def _train(options, progress):
    output = options.output
    given = {key: value for key in SETTINGS if (value := getattr(options, key)) is not None}
    if options.resume and output.is_dir() and not (output / loop.CHECKPOINT).exists():
        print(f"{output} has no checkpoint yet: the run starts from its beginning.")
    on_terminal = sys.stderr.isatty()
    try:
        _, history = leaves.train_leaves(
            root=options.data, output=output, resume=options.resume, seed=options.seed,
            validation_fraction=options.validation_fraction, device_name=options.device,
            use_cuda_kernels=options.use_cuda_kernels, **given,
            progress=progress if on_terminal else None,
            report=None if on_terminal else lambda entry: print(loop.sentence(entry), flush=True),
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
    return 0


def _evaluate(options, progress):
    model, part, settings = leaves.load_leaves(
        options.evaluate, options.data, device_name=options.device,
        progress=progress if sys.stderr.isatty() else None,
    )  # fmt: skip
    shares = leaves.accuracy_by_class(model, part, precision=settings["precision"])
    width = max(map(len, shares))
    for name, share in shares.items():
        print(f"{name:{width}}  {share:7.1%}")
    right = evaluate_accuracy(model, part.images, part.labels, precision=settings["precision"])
    print(f"{right:.1%} of {len(part)} validation images.")
    return 0
