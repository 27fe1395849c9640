"""Out of memory: what was asked for, what is free, and what to reduce, in one sentence."""

import contextlib
import re

import torch

_SIZE = r"([\d.]+ [KMG]iB|\d+ bytes)"
_ASKED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_FREE = re.compile(rf"total capacity of {_SIZE} of which {_SIZE} is free")
_ON_CPU = re.compile(r"can't allocate memory|not enough memory|out of memory")


class TrainingError(RuntimeError):
    """Training that cannot go on, and why."""


@contextlib.contextmanager
def explained(settings):
    """Raise TrainingError for PyTorch's errors about memory, with what of `settings` to reduce."""
    try:
        yield
    except TrainingError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_about_memory(error):
            raise
        # `from None`: the error's frames hold the tensors that fill the memory.
        raise TrainingError(sentence(str(error), settings)) from None


def is_about_memory(error):
    known = MemoryError, torch.cuda.OutOfMemoryError
    return isinstance(error, known) or _ON_CPU.search(str(error)) is not None


def sentence(message, settings):
    """What to do about PyTorch's `message`."""
    asked, free = _ASKED.search(message), _FREE.search(message)
    told = [f"{asked[1]} more were asked for"] if asked else []
    told += [f"{free[2]} of the GPU's {free[1]} are free"] if free else []
    facts = f" ({', and '.join(told)})" if told else ""
    cures = [
        f"{name.replace('_', ' ')} (it is {settings[name]})"
        for name, least in (("batch_size", 1), ("image_size", 32))
        if settings.get(name, 0) > least
    ]
    reduce = f"choose a smaller {' or '.join(cures)}" if cures else "choose a smaller network"
    if "grad_accum_steps" in settings:
        reduce += f", more grad_accum_steps (it is {settings['grad_accum_steps']})"
    if settings.get("enable_gradient_checkpointing") is False:
        reduce += ", enable_gradient_checkpointing where the network has it"
    if settings.get("precision") == "float32" and free:
        reduce += ", or bfloat16"
    if free:
        reduce += ", or end what else uses the GPU"
    return (
        f"There is not enough memory{facts}: {reduce}. Other settings begin a new run, in another "
        "folder."
    )
