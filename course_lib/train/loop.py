"""The training loop: steps, epochs, history, checkpoints and resuming, for any task.

A task is whatever knows how to train: `Classifier` in this package is one. It has

    epochs, steps_per_epoch
    train_step(step)     train on batch number `step`, counted from the start of the run
    end_epoch()          -> dict of numbers about the epoch that has ended, "loss" among them, and
                         perhaps of dicts of such, which are kept and not told
    state_dict()         everything that the next steps depend on, beside their numbers
    load_state_dict(state)

Everything random in `train_step(step)` must follow from the run's seed and `step` alone (see
`randomness`). Then a run needs no generator's state to be resumed exactly.
"""

import contextlib
import json
import math
import signal
import threading
import time
from pathlib import Path

import torch

from course_lib import plot

from . import checkpoint, folder, memory, ranks
from .memory import TrainingError
from .timing import Estimate

__all__ = ["TrainingError", "fit", "require_room", "save_history", "sentence"]
CHECKPOINT, HISTORY, CURVES = "checkpoint.pt", "history.json", "history.png"


def fit(
    task, settings, *, output=None, resume=False, checkpoint_steps=None, progress=None, report=None,
    say=None, earlier=None, until=None,
):  # fmt: skip
    """Train `task` to its last epoch; the history: a list of one dict for each epoch.

    settings          what decides the result, a dict of plain values; kept in the checkpoint
    output            a folder for the checkpoint, the history and its picture; None keeps nothing
    resume            go on from the folder's checkpoint, if its run got as far as to write one
    checkpoint_steps  steps from one checkpoint to the next; None: one epoch
    progress          called as tqdm is
    report            called with each epoch's dict when the epoch has ended
    say               called with a sentence once it is known how long training takes
    earlier           settings that earlier versions' checkpoints do not name, and what they were
    until             of `time.monotonic`, in seconds: no epoch begins that would end later, judged
                      by the longest before it; the run can go on from its checkpoint

    Ctrl-C ends a run after the step in hand, with a checkpoint, and comes out as KeyboardInterrupt;
    a second one ends it at once. One run at a time may write to the folder. Raises CheckpointError,
    TrainingError, and `folder.FolderError` where the folder cannot be written to; the last
    checkpoint stays whole.

    Of several ranks (`ranks`), all of which call it, rank 0 reports and keeps. They stop at the
    same step, and what concerns the folder is raised on each; ValueError where their settings
    differ.
    """
    if checkpoint_steps is not None and checkpoint_steps < 1:
        raise ValueError(f"checkpoint_steps must be 1 or more, not {checkpoint_steps}")
    plan = {"checkpoint_steps": checkpoint_steps, "has a time limit": until is not None}
    ranks.require_same(settings | plan)
    if not ranks.is_first():
        output = progress = report = say = None
    with contextlib.ExitStack() as stack:
        if ranks.first(lambda: output is not None):
            output = Path(output) if ranks.is_first() else None
            ranks.first(lambda: _take(stack, output, resume))
        stack.enter_context(memory.explained(settings))
        # A rank alone must not leave the others: it tells them of Ctrl-C, and goes on till then.
        heard = stack.enter_context(_put_off()) if ranks.count() > 1 else ()
        return _fit(
            task, settings, output, checkpoint_steps, progress, report, say, earlier or {}, until,
            heard,
        )  # fmt: skip


def _fit(task, settings, output, checkpoint_steps, progress, report, say, earlier, until, heard):
    step, history = 0, []
    path = ranks.first(lambda: None if output is None else output / CHECKPOINT)
    kept = ranks.first(lambda: _kept(path, task, earlier, settings))
    if kept is not None:
        step, history = kept["step"], kept["history"]
        load_state(path, task, kept["state"])

    def keep():
        def write():
            checkpoint.save(path, settings=settings, step=step, history=history, state=state)
            save_history(output, history)

        if path is not None:
            state = task.state_dict()
            ranks.first(write)

    total = task.epochs * task.steps_per_epoch
    bar = progress(total=total, initial=step, unit=" steps") if progress is not None else None
    estimate = Estimate(task, total - step, say)
    begin, longest, agreement = time.monotonic(), 0.0, ranks.Agreement()
    try:
        while step < total:
            with _put_off() as interrupted:
                task.train_step(step)
            step += 1
            estimate.step()
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
            if ended and until is not None:
                now = time.monotonic()
                begin, longest = now, max(longest, now - begin)
            late = ended and until is not None and now + longest > until
            interrupted, stopped = agreement(step, interrupted or heard, late, ended)
            due = step % checkpoint_steps == 0 if checkpoint_steps else ended
            if step == total or due or stopped or interrupted:
                keep()
            if interrupted:
                raise KeyboardInterrupt
            if stopped:
                break
    finally:
        if bar is not None:
            bar.close()
    ranks.first(lambda: _draw(output, history))
    return history


def _take(stack, output, resume):
    """Hold the folder `output` until `stack` ends."""
    _require_fitting(output, resume)
    stack.enter_context(folder.held(output))
    _require_fitting(output, resume)  # another run may have ended here meanwhile


def _kept(path, task, earlier, settings):
    """The checkpoint at `path` that `task` goes on from; None where there is none."""
    if path is None or not path.exists():
        return None
    kept = checkpoint.load(path)
    checkpoint.require_same(path, earlier | kept["settings"], settings)
    _require_whole(path, task, kept["step"], kept["history"])
    return kept


def _draw(output, history):
    if output is not None:
        save_history(output, history)  # once more: it may be lost where the checkpoint is not
        picture = plot.learning_curves(history).png()
        checkpoint.write_whole(output / CURVES, lambda file: file.write(picture))


def require_room(output, resume):
    """Raise, before long work begins, what `fit` would raise about the folder `output`.

    That is CheckpointError where it is not what `resume` takes it for, and `folder.FolderError`.
    """
    def look():
        with contextlib.ExitStack() as stack:
            _take(stack, Path(output), resume)

    ranks.first(look)


def _require_fitting(output, resume):
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
        _told(name.replace("_", " "), value) for name, value in entry.items()
        if name != "epoch" and not isinstance(value, dict)
    )  # fmt: skip
    return f"epoch {entry['epoch']}: {', '.join(told)}"


def _told(name, value):
    if name == "images per second":
        return f"{value:,.0f} images/s"
    return f"{name} {value:.1%}" if "accuracy" in name else f"{name} {value:.4f}"


@contextlib.contextmanager
def _put_off():
    """A list that Ctrl-C writes to, instead of interrupting; a second Ctrl-C does interrupt."""
    asked = []
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or (
        threading.current_thread() is not threading.main_thread()
    ):
        yield asked
        return

    def note(number, frame):
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _require_whole(path, task, step, history):
    """Raise CheckpointError unless `step` and `history` are those of one run of `task`."""
    epochs, total = step // task.steps_per_epoch, task.epochs * task.steps_per_epoch
    if step > total or [entry.get("epoch") for entry in history] != list(range(1, epochs + 1)):
        raise checkpoint.CheckpointError(
            f"{path} is of step {step} and has {len(history)} epochs, as no run of {total} steps "
            "has. Put back a good copy, or start a new run in another folder."
        )


def load_state(path, task, state):
    """Let `task` go on where the checkpoint at `path` was taken; CheckpointError if it can't."""
    try:
        task.load_state_dict(state)
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise checkpoint.CheckpointError(
            f"{path} does not fit this network ({error}). Name the network it was made with, or "
            "start a new run in another folder."
        ) from error


def _require_finite(entry):
    for name, value in entry.items():
        if not isinstance(value, dict) and not math.isfinite(value):
            raise TrainingError(
                f"In epoch {entry['epoch']} the {name.replace('_', ' ')} is {value}: start again "
                "with a lower learning rate."
            )
