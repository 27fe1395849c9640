"""What operators refuse, as PyTorch does: in its types of errors and, where it has any, its words.

Shapes may hold torch's symbolic numbers, and tensors may have no memory.
"""

import torch

from course_lib.kernels.blocks.options import as_int, as_pair


def require_tensor(x, name):
    """TypeError where `x` is none."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be Tensor, not {type(x).__name__}")


def require_one_device(tensors):
    """RuntimeError unless all of {name: tensor or None} are on one device."""
    given = [(name, x.device) for name, x in tensors.items() if x is not None]
    for name, device in given[1:]:
        if device != given[0][1]:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {given[0][0]} is on "
                f"{given[0][1]} and {name} on {device}"
            )


def require(x, name, *, shape=None, n_dims=None, dtypes=None):
    """RuntimeError where the tensor `x` is not as an operator needs it. None is no tensor."""
    if x is None:
        return
    if n_dims is not None and x.dim() != n_dims:
        raise RuntimeError(f"{name} must have {n_dims} dimensions, not shape {tuple(x.shape)}")
    if shape is not None and tuple(x.shape) != tuple(shape):
        raise RuntimeError(f"{name} must have shape {tuple(shape)}, not {tuple(x.shape)}")
    if dtypes is not None and x.dtype not in dtypes:
        wanted = " or ".join(dict.fromkeys(map(str, dtypes)))
        raise RuntimeError(f"{name} must be {wanted}, not {x.dtype}")


def require_elements(x, name, n):
    """RuntimeError unless `x`, if given, is one-dimensional with `n` elements."""
    if x is None:
        return
    if x.dim() != 1:
        raise RuntimeError(f"{name} should have one dimension, not shape {tuple(x.shape)}")
    if x.shape[0] != n:
        raise RuntimeError(f"{name} should contain {n} elements not {x.shape[0]}")


def of_sums(dtype):
    """In which numbers of `dtype` are added up: float32, but for float64, which only a CPU has."""
    return torch.promote_types(dtype, torch.float32)


def whole(value, name):
    """`value` as an int or torch's symbolic one; TypeError for anything else, True and False too.

    NumPy's integers and tensors of one integer are taken.
    """
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    if (found := as_int(value)) is None:
        raise TypeError(f"{name} must be int, not {type(value).__name__}")
    return found


def pair(value, name):
    """`value`, an int or one or two of them, as a pair of ints."""
    if type(value) is tuple and len(value) == 2 and type(value[0]) is int is type(value[1]):
        return value
    if (both := as_pair(value)) is None:
        raise RuntimeError(f"{name} must be a single int or a tuple of two ints, not {value!r}")
    return tuple(whole(each, name) for each in both)


def number(value, name):
    """`value` as a float; TypeError for what is no number."""
    try:
        if not isinstance(value, str):
            return float(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be float, not {type(value).__name__}")
