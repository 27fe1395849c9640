"""The training loop: steps, epochs, history, checkpoints and resuming, for any task.

A task is whatever knows how to train: `Classifier` in this package is one. It has

    epochs, steps_per_epoch
    train_step(step)     train on batch number `step`, counted from the start of the run
    end_epoch()          -> dict of numbers about the epoch that has ended, "loss" among them
    state_dict()         everything that the next steps depend on, beside their numbers
    load_state_dict(state)

Everything random in `train_step(step)` must follow from the run's seed and `step` alone (see
`randomness`). Then a run needs no generator's state to be resumed exactly.
"""

import json
import math
from pathlib import Path

from course_lib import plot

from . import checkpoint

CHECKPOINT, HISTORY, CURVES = "checkpoint.pt", "history.json", "history.png"


class TrainingError(RuntimeError):
    """Training that cannot go on, and why."""


def fit(
    task, settings, *, output=None, resume=False, checkpoint_steps=None, progress=None, report=None
):
    """Train `task` to its last epoch; the history: a list of one dict for each epoch.

    settings          what decides the result, a dict of plain values; kept in the checkpoint
    output            a folder for the checkpoint, the history and its picture; None keeps nothing
    resume            go on from the folder's checkpoint, if its run got as far as to write one
    checkpoint_steps  steps from one checkpoint to the next; None: one epoch
    progress          called as tqdm is
    report            called with each epoch's dict when the epoch has ended
    """
    if checkpoint_steps is not None and checkpoint_steps < 1:
        raise ValueError(f"checkpoint_steps must be 1 or more, not {checkpoint_steps}")
    step, history = 0, []
    if output is not None:
        output = Path(output)
        require_room(output, resume)
        output.mkdir(parents=True, exist_ok=True)
        path = output / CHECKPOINT
        if path.exists():
            kept = checkpoint.load(path)
            checkpoint.require_same(path, kept["settings"], settings)
            step, history = kept["step"], kept["history"]
            _load(path, task, kept["state"])

    def keep():
        if output is not None:
            state = task.state_dict()
            checkpoint.save(path, settings=settings, step=step, history=history, state=state)
            save_history(output, history)

    total = task.epochs * task.steps_per_epoch
    bar = progress(total=total, initial=step, unit=" steps") if progress is not None else None
    try:
        while step < total:
            task.train_step(step)
            step += 1
            if bar is not None:
                bar.update()
            ended = step % task.steps_per_epoch == 0
            if ended:
                history.append({"epoch": len(history) + 1} | task.end_epoch())
                _require_finite(history[-1])
                if bar is not None:
                    bar.set_postfix_str(sentence(history[-1]))
                if report is not None:
                    report(history[-1])
            if step == total or (step % checkpoint_steps == 0 if checkpoint_steps else ended):
                keep()
    finally:
        if bar is not None:
            bar.close()
    if output is not None:
        save_history(output, history)  # once more: it may be lost where the checkpoint is not
        picture = plot.learning_curves(history).png()
        checkpoint.write_whole(output / CURVES, lambda file: file.write(picture))
    return history


def require_room(output, resume):
    """Raise CheckpointError where `output` is not what `resume` takes it for."""
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise checkpoint.CheckpointError(f"{output} is a file: name a folder for the run.")
    if resume and not output.is_dir():
        raise checkpoint.CheckpointError(
            f"There is no folder {output} to go on from: name the run's own, or start without "
            "resuming."
        )
    if not resume and (output / CHECKPOINT).exists():
        raise checkpoint.CheckpointError(
            f"{output / CHECKPOINT} is of an earlier run: resume that run, or name another folder."
        )


def save_history(output, history):
    """Write the history as JSON."""
    text = json.dumps(history, indent=1) + "\n"
    checkpoint.write_whole(output / HISTORY, lambda file: file.write(text.encode()))


def sentence(entry):
    """An epoch of the history in words."""
    told = (
        f"{name.replace('_', ' ')} {value:.1%}" if "accuracy" in name
        else f"{name.replace('_', ' ')} {value:.4f}"
        for name, value in entry.items() if name != "epoch"
    )  # fmt: skip
    return f"epoch {entry['epoch']}: {', '.join(told)}"


def _load(path, task, state):
    try:
        task.load_state_dict(state)
    except (RuntimeError, KeyError, ValueError) as error:
        raise checkpoint.CheckpointError(
            f"{path} does not fit this network ({error}). Name the network it was made with, or "
            "start a new run in another folder."
        ) from error


def _require_finite(entry):
    for name, value in entry.items():
        if not math.isfinite(value):
            raise TrainingError(
                f"In epoch {entry['epoch']} the {name.replace('_', ' ')} is {value}: start again "
                "with a lower learning rate."
            )
