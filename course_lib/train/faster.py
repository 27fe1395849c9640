"""`--kernels faster`: of a run's layers, those are ours that gain on its device."""

import functools
from pathlib import Path

from course_lib import nn

from . import checkpoint, loop, ranks
from .step import autocast

FASTER = "faster"
LAYERS = "faster_layers"  # the layers' names, in the settings that a checkpoint keeps


def require_known(kernels):
    """Raise ValueError for what is neither True, False nor "faster"."""
    if kernels is not True and kernels is not False and kernels != FASTER:
        raise ValueError(f'use_cuda_kernels must be True, False or "faster", not {kernels!r}')


def earlier(output, resume, names=(LAYERS,)):
    """The settings called `names` of the run that is to go on in `output`; {} where none is."""
    def look():
        path = Path(output or ".") / loop.CHECKPOINT
        if output is None or not resume or not path.exists():
            return {}
        kept = checkpoint.load(path)["settings"]
        return {name: kept[name] for name in names if name in kept}

    return ranks.first(look)


def settle(model, kept, example=None, precision="float32", *, captured=False, say=None):
    """Let the layers that `kept` names be ours, in place; without, choose them and name them there.

    kept      the settings that the run's checkpoint keeps
    example   a batch, as the model is called with in training
    captured  whether a step is one CUDA graph
    say       called with what was measured, as a table

    Of several ranks, rank 0 measures for all.
    """
    known = LAYERS in kept
    if not known:
        choose = functools.partial(_choose, model, example, precision, captured, say)
        kept[LAYERS] = ranks.first(choose)
    if known or not ranks.is_first():
        # A run that goes on computes as it did, whatever is faster today.
        for name, layer in list(model.named_modules(remove_duplicate=False)):
            if name in kept[LAYERS]:
                nn.replace_layers(layer)


def _choose(model, example, precision, captured, say):
    """Let the layers that gain by it be ours, in place; their names."""
    model.train()
    with autocast(example.device, precision):
        options = {"example_inputs": example, "captured": captured}
        swapped = nn.replace_layers(model, keep=FASTER, **options)
    if say is not None:
        say(swapped.table())
    return [each.name for each in swapped.replaced]
