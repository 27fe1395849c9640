"""Weights as a file that every U-Net reads, on the tape or PyTorch's: one array to a name (.npz).

And as ONNX, for programs that know neither of them: this needs the extra `onnx`.
"""

import copy
import importlib.util
import zipfile
from pathlib import Path

import numpy as np
import torch

from course_lib import models, ops

from .checkpoint import CheckpointError, write_whole
from .folder import FolderError, reason

NEEDED_FOR_ONNX = ("onnx", "onnxscript")


class MissingExtraError(ImportError):
    """A package that is not installed; the message names the extra that brings it."""


def save_weights(path, model):
    """Write what `model`, of `autograd` or of PyTorch, has learned to `path`, an .npz file.

    The file is whole or not there: a process that is killed leaves the one before it. Raises
    FolderError where it cannot be written.
    """
    arrays = models.arrays_of(model)
    _write(path, lambda file: np.savez(file, **arrays))


def load_weights(path, model):
    """Read the weights at `path` into `model`, of `autograd` or of PyTorch; returns `model`.

    Reading runs no code that the file might hold. Raises CheckpointError, and changes nothing,
    where the file is not there, damaged, none of weights, or of another network: the message names
    what is missing, unknown or of another shape.
    """
    state = read_weights(path)
    try:
        models.load_arrays(model, state)
    except ValueError as error:
        raise CheckpointError(f"{path} holds the weights of another network: {error}") from None
    return model


def read_weights(path):
    """{name: NumPy array} of the weights at `path`; errors as of `load_weights`."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"There is no file of weights {path}.")
    try:
        # zipfile compares the sum of every member that it reads to its end.
        with zipfile.ZipFile(path):  # an array alone would be no archive
            pass
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read ({reason(error)}).") from error
    except MemoryError:
        raise
    except Exception as error:  # whatever the readers of a foreign file stumble over
        raise CheckpointError(
            f"{path} is no whole file of weights ({error}): put back a good copy, or save it again."
        ) from error


def export_onnx(path, model, image_size=(128, 128), *, opset=18):
    """Write `model`, a network for images, to `path` as ONNX, weights and all.

    model       any of PyTorch's, by our layers or others; or a U-Net of `autograd`
    image_size  (H, W) of the images; their number may be any when the file is used

    The input is called "images", the output "logits"; batch norm has its running statistics. What
    is exported computes by PyTorch's own operators, which any runtime of ONNX knows. Raises
    MissingExtraError without the packages of the extra `onnx`, ValueError for an image smaller than
    a U-Net takes, FolderError where the file cannot be written.
    """
    if missing := [name for name in NEEDED_FOR_ONNX if importlib.util.find_spec(name) is None]:
        raise MissingExtraError(
            f"to export ONNX, {' and '.join(missing)} must be installed: "
            f"pip install {' '.join(NEEDED_FOR_ONNX)}"
        )
    if not isinstance(model, torch.nn.Module):
        model = models.UNet.of_weights(models.arrays_of(model), layers=torch.nn)
    twin = copy.deepcopy(model).cpu().float().eval()
    first = next((m for m in twin.modules() if isinstance(m, torch.nn.Conv2d)), None)
    if first is None:
        raise ValueError(f"{type(model).__name__} has no convolution, so it is none for images")
    # Two images: of one alone, the exporter takes the number to be fixed.
    images = torch.zeros(2, first.in_channels, *image_size)
    if isinstance(twin, models.UNet):
        who, least = f"UNet of depth {twin.depth}", 2**twin.depth
        models.steps.require_images(images, who, twin.in_channels, least)
    program = torch.export.export(
        twin, (images,), dynamic_shapes=({0: torch.export.Dim("n")},)
    ).run_decompositions(ops.DECOMPOSITIONS)
    program = torch.onnx.export(
        program, (images,), dynamo=True, input_names=["images"], output_names=["logits"],
        opset_version=opset, verbose=False,
    )  # fmt: skip
    content = program.model_proto.SerializeToString()
    _write(path, lambda file: file.write(content))


def _write(path, write):
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise FolderError(f"{path} cannot be written: {why}.")
    write_whole(path, write)
