"""What a network has learned as NumPy arrays, whether it is on the tape or PyTorch's."""

import numpy as np
import torch

COUNTS = "num_batches_tracked"  # of batch norm: PyTorch's networks have them, those on the tape not


def arrays_of(model):
    """{name: NumPy array} of what `model`, of `autograd` or of PyTorch, has learned.

    bfloat16, which NumPy does not have, becomes float32. What torch.compile and wrappers for
    several GPUs put before the names is left out.
    """
    return {name: _array(value) for name, value in _inner(model).state_dict().items()}


def load_arrays(model, state):
    """Give `model`, of `autograd` or of PyTorch, what `arrays_of` or a state_dict has of another.

    Numbers are rounded to the model's dtypes. Where `state` has no counts of batches, as that of a
    network on the tape, those of the model stay. Raises ValueError, and changes nothing, where a
    name is missing, unknown, of another shape or no numbers.
    """
    model, state = _inner(model), {name: _array(value) for name, value in state.items()}
    own = model.state_dict()
    counts = {name for name in (*own, *state) if name.endswith(COUNTS)}
    if wrong := sorted((own.keys() ^ state.keys()) - counts):
        missing = [name for name in wrong if name in own]
        unknown = [name for name in wrong if name not in own]
        raise ValueError(f"missing: {missing}; unknown: {unknown}")
    state = {name: state[name] for name in own if name in state}
    for name, value in state.items():
        if value.dtype.kind not in "fiu":
            raise ValueError(f"{name} must be of numbers, not of {value.dtype}")
        if value.shape != tuple(own[name].shape):
            raise ValueError(f"{name} must have shape {tuple(own[name].shape)}, not {value.shape}")
    if isinstance(model, torch.nn.Module):
        state = {name: torch.from_numpy(np.array(value)) for name, value in state.items()}
    model.load_state_dict(state)


def _inner(model):
    """The network itself, where `model` is what torch.compile or a wrapper made of it."""
    while isinstance(model, torch.nn.Module):
        if isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        elif type(model).__name__ in ("DataParallel", "DistributedDataParallel"):
            model = model.module
        else:
            break
    return model


def _array(value):
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach().cpu()
    return (value.float() if value.dtype is torch.bfloat16 else value).numpy()
