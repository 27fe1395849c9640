"""What the exercises of lesson 07 run: a block's formula, what stands for its launchers, a network.

Each of `describe`, `train_block` and `swap_and_run` is the `call` of an exercise: it runs the
learner's function on one case, says in words what is wrong with what surrounds the numbers, and
returns the numbers.
"""

import copy

import numpy as np

from course_lib.teach.late_torch import torch

#: The block's parameters, in the order in which every function here takes them.
PARAMETERS = ("weight1", "bias1", "weight2", "bias2")


# ---- an operator without numbers -------------------------------------------------------------


_TYPES = ("float32", "float16", "bfloat16")


def describe(function, run):
    """Call it with tensors whose numbers do not count; return the bytes of what it describes."""
    n, c, h, w, r, kind, last = (int(value) for value in run.case.inputs.values())
    device = ("cpu", "meta")[(n + r) % 2]  # what it describes is where x is
    x = torch.empty(n, c, h, w, dtype=getattr(torch, _TYPES[kind]), device=device)
    if last:
        x = x.to(memory_format=torch.channels_last)
    weights = [torch.empty(shape, device=device) for shape in ((r, c), (r,), (c, r), (c,))]
    found = function(x, *weights)
    _require_described(found, x, r, weights)
    return np.float64(sum(each.numel() * each.element_size() for each in found))


def _require_described(found, x, r, weights):
    """Raise unless four tensors of their own, of the right shape, type, device and strides."""
    names = "y", "mean", "hidden", "logit"
    if not isinstance(found, tuple | list) or len(found) != 4:
        several = isinstance(found, tuple | list)
        what = f"{len(found)} values" if several else f"a {type(found).__name__}"
        raise ValueError(f"it should return {', '.join(names)}; it returned {what}")
    n, c = x.shape[:2]
    shapes = tuple(x.shape), (n, c), (n, r), (n, c)
    for name, tensor, shape in zip(names, found, shapes, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} should be a tensor, and is a {type(tensor).__name__}")
        dtype = x.dtype if name == "y" else torch.float32
        for what, got, wanted in (
            ("the shape", tuple(tensor.shape), shape),
            ("the type", tensor.dtype, dtype),
            ("the device", tensor.device, x.device),
        ):
            if got != wanted:
                raise ValueError(f"{name} has {what} {got}; the kernel's {name} has {wanted}")
    if found[0].stride() != torch.empty_like(x).stride():
        raise ValueError(
            f"y has the strides {found[0].stride()}; the kernel's y lies in memory as x does, "
            f"with the strides {x.stride()}"
        )
    memory = [each.untyped_storage()._cdata for each in (*found, x, *weights)]  # meta has none
    if len(set(memory)) < len(memory):
        raise ValueError("one tensor is used twice: the kernel writes four new ones")


# ---- the block, and what stands for its launchers --------------------------------------------


def _gates(logit, gate):
    """The gate of each channel, and its derivative."""
    if gate == "sigmoid":
        found = 1 / (1 + np.exp(-logit))
        return found, found * (1 - found)
    return np.clip(logit + 3, 0, 6) / 6, ((logit > -3) & (logit < 3)) / 6


def _silu(z):
    sigmoid = 1 / (1 + np.exp(-z))
    return z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))


def block_forward(x, weight1, bias1, weight2, bias2, gate):
    mean = x.mean(axis=(2, 3))
    hidden = mean @ weight1.T + bias1
    logit = _silu(hidden)[0] @ weight2.T + bias2
    return x * _gates(logit, gate)[0][:, :, None, None], mean, hidden, logit


def block_backward(dy, x, weight1, weight2, mean, hidden, logit, gate):
    value, slope = _gates(logit, gate)
    act, act_slope = _silu(hidden)
    dlogit = (dy * x).sum(axis=(2, 3)) * slope
    dhidden = dlogit @ weight2 * act_slope
    dmean = dhidden @ weight1 / (x.shape[2] * x.shape[3])
    dx = dy * value[:, :, None, None] + dmean[:, :, None, None]
    return dx, dhidden.T @ mean, dhidden.sum(axis=0), dlogit.T @ act, dlogit.sum(axis=0)


class _Launcher:
    """Stands for a launcher of the block's kernels; strict, and counts how often it was called."""

    def __init__(self, name, formula, arguments):
        self.name, self.formula, self.arguments, self.calls = name, formula, arguments, 0

    def __call__(self, *tensors, gate):
        if len(tensors) != len(self.arguments):
            wanted = ", ".join(self.arguments)
            raise TypeError(f"{self.name} takes {wanted}, and gate=...; it got {len(tensors)}")
        for name, tensor in zip(self.arguments, tensors, strict=True):
            if not isinstance(tensor, torch.Tensor):
                what = type(tensor).__name__
                raise TypeError(f"{self.name} takes a tensor for {name}; it got a {what}")
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{self.name} reads {name} 16 bytes at a time, so it must lie in one piece; "
                    f"it got the strides {tensor.stride()}; {name}.contiguous() makes a copy"
                )
        if gate not in ("sigmoid", "hard_sigmoid"):
            raise ValueError(f"{self.name} knows no gate {gate!r}")
        self.calls += 1
        arrays = [tensor.detach().double().numpy() for tensor in tensors]
        found = self.formula(*arrays, gate)
        return tuple(torch.from_numpy(np.ascontiguousarray(each)).float() for each in found)


def train_block(function, run):
    """Two forward passes, then both backward passes: each must find what belongs to it."""
    forward = _Launcher("compute_forward", block_forward, ("x", *PARAMETERS))
    saved = ("dy", "x", "weight1", "weight2", "mean", "hidden", "logit")
    backward = _Launcher("compute_backward", block_backward, saved)
    apply = function(forward, backward)
    if not callable(apply):
        kind = type(apply).__name__
        raise TypeError(f"it must return something to call, ….apply; it returned a {kind}")
    names = ("x", *PARAMETERS)
    one = [torch.from_numpy(getattr(run, name).copy()).requires_grad_() for name in names]
    other = [(-each.detach()).requires_grad_() for each in one]
    gate, second = str(run.gate), "sigmoid"
    y, y_other = (_one_tensor(apply(*each, g)) for each, g in ((one, gate), (other, second)))
    y.backward(_not_contiguous(torch.from_numpy(run.dy.copy())))
    y_other.sum().backward()  # a gradient of ones that are one number, repeated
    for launcher in (forward, backward):
        if launcher.calls != 2:
            raise ValueError(
                f"{launcher.name} was called {launcher.calls} times in 2 forward and 2 backward "
                "passes, and should have been called 2 times"
            )
    for name, leaf in zip((*names, *names), (*one, *other), strict=True):
        if leaf.grad is None:
            raise ValueError(f"{name} has no gradient after y.backward(dy)")
    if 1 < len(run.x) < 4:  # in the smallest cases wrong numbers shall show first
        dy = torch.from_numpy(run.dy.copy())
        calls = ((*one, gate), dy), ((*other, second), torch.ones_like(dy))
        require_any_order(apply, calls, [[leaf.grad for leaf in each] for each in (one, other)])
        _require_noticed(apply, one, gate)
    return y, y_other, *(each.grad for each in (*one, *other))


def _one_tensor(y):
    if not isinstance(y, torch.Tensor):
        raise TypeError(f"the call should give y, a tensor; it gives a {type(y).__name__}")
    if not y.requires_grad:
        raise ValueError("y knows no gradient: it is not on the way back to x")
    return y


def _not_contiguous(dy):
    """The same numbers, with the images as the last axis in memory."""
    return dy.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)


def _require_noticed(apply, leaves, gate):
    """Raise unless a change of a tensor between the passes is noticed, as PyTorch notices it."""
    for place, name in ((0, "x"), (1, "weight1"), (3, "weight2")):
        tensors = [leaf.detach().clone().requires_grad_() * 1 for leaf in leaves]
        y = apply(*tensors, gate)
        tensors[place].add_(1)
        try:
            y.sum().backward()
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
        else:
            raise ValueError(
                f"{name} was changed in place between forward and backward, and nobody noticed: "
                "the gradients are wrong without a word. ctx.save_for_backward keeps watch; a "
                f"tensor in any other place, ctx.{name} for example, is not watched"
            )


def require_any_order(apply, calls, gradients):
    """Raise unless the passes find the same when they go back in the order they came, or twice.

    `calls` are the arguments of two calls and the dy of each; `gradients` what was found when the
    other of the two went back first.
    """
    leaves, results = [], []
    for arguments, _ in calls:
        own = [a.detach().clone().requires_grad_() if _is_leaf(a) else a for a in arguments]
        leaves.append([a for a in own if _is_leaf(a)])
        results.append(apply(*own))
    for y, (_, dy) in reversed(list(zip(results, calls, strict=True))):
        kept = y.detach().clone()
        y.backward(dy, retain_graph=True)
        y.backward(dy)  # as PyTorch allows: the gradients are added to those of the first time
        if not torch.equal(kept, y.detach()):
            raise ValueError("the way back changes y in place, which others may need still")
    for own, before in zip(leaves, gradients, strict=True):
        for leaf, gradient in zip(own, before, strict=True):
            if not torch.allclose(leaf.grad, 2 * gradient, rtol=1e-4, atol=1e-6):
                raise ValueError(
                    "two calls went back in the other order, each twice (retain_graph=True), and "
                    "the gradients were not those of before: what a call saves belongs into its "
                    "own ctx, and backward must not change it"
                )


def _is_leaf(argument):
    return isinstance(argument, torch.Tensor)


# ---- a network with blocks -------------------------------------------------------------------


#: Where the blocks of a test network are: at its top, two levels deep, under a name.
PLACES = ("gate", "stages.0.1", "stages.2.attention", "stages.1.0.0")


def _network(run):
    """Return a network with blocks, the type of these, and a function that makes new ones."""
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self, n_channels, n_hidden):
            super().__init__()
            self.avgpool = nn.AdaptiveAvgPool2d(1)
            self.fc1 = nn.Conv2d(n_channels, n_hidden, 1)
            self.fc2 = nn.Conv2d(n_hidden, n_channels, 1)
            self.activation, self.scale_activation = nn.SiLU(), nn.Sigmoid()

        def forward(self, x):
            hidden = self.activation(self.fc1(self.avgpool(x)))
            return x * self.scale_activation(self.fc2(hidden))

    class Old(Block):
        pass

    class New(Block):
        pass

    class Mixer(nn.Module):
        """No block, although it has an fc1 and an fc2."""

        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Identity(), nn.Identity()

        def forward(self, x):
            return self.fc2(self.fc1(x))

    class Network(nn.Module):
        def __init__(self, n_blocks, sizes):
            super().__init__()
            blocks = [Old(*sizes) for _ in range(n_blocks)]
            blocks += [nn.Identity() for _ in range(len(PLACES) - n_blocks)]
            self.stages = nn.Sequential(
                nn.Sequential(Mixer(), blocks[1]),
                nn.Sequential(nn.Sequential(blocks[3]), nn.Identity()),
                nn.ModuleDict({"attention": blocks[2]}),
            )
            self.gate = blocks[0]

        def forward(self, x):
            x = self.stages[1](self.stages[0](self.gate(x)))
            return self.stages[2]["attention"](x)

    n_blocks, n_hidden, n_channels = run.weight1.shape
    network = Network(n_blocks, (n_channels, n_hidden))
    for i, place in enumerate(PLACES[:n_blocks]):
        block = network.get_submodule(place)
        values = (run.weight1[i][..., None, None], run.bias1[i],
                  run.weight2[i][..., None, None], run.bias2[i])  # fmt: skip
        for parameter, value in zip(block.parameters(), values, strict=True):
            parameter.data.copy_(torch.from_numpy(value.copy()))
        block.train(i % 2 == 0)
    if n_blocks:
        network.gate.fc1.weight.requires_grad_(False)  # one that shall not learn
    return network, Old, New, lambda old: New(old.fc1.in_channels, old.fc1.out_channels)


def swap_and_run(swap, run):
    """Let it swap, see that nothing else has changed, and run the network with its new blocks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network, old_type, new_type, make_new = _network(run)
        before = dict(network.named_modules())
        names = [name for name, each in before.items() if isinstance(each, old_type)]
        parameters = dict(network.named_parameters())
        modes = {name: each.training for name, each in before.items()}
        state = copy.deepcopy(network.state_dict())
        returned = swap(network, old_type, make_new)
    after = dict(network.named_modules())
    _require_swapped(names, network, before, after, new_type)
    if not isinstance(returned, list) or returned != names:
        raise ValueError(f"it returned {returned!r}; the blocks of this network are {names!r}")
    _require_kept(parameters, dict(network.named_parameters()), modes, after)
    now = network.state_dict()
    if list(now) != list(state) or any(not torch.equal(now[k], v) for k, v in state.items()):
        raise ValueError(f"the state_dict has changed; it was {list(state)}, it is {list(now)}")
    x = torch.from_numpy(run.x.copy()).requires_grad_()
    y = network(x)
    y.backward(torch.from_numpy(run.dy.copy()))
    dweight2 = [network.get_submodule(name).fc2.weight.grad for name in PLACES[: len(names)]]
    dweight2 = torch.stack(dweight2)[..., 0, 0] if names else torch.zeros(run.weight2.shape)
    return y, x.grad, dweight2


def _require_swapped(names, network, before, after, new_type):
    for name in names:
        found = network.get_submodule(name)  # as the network itself finds it
        if not isinstance(found, new_type):
            raise ValueError(f"{name} is not a new block: it is a {type(found).__name__}")
    inside = tuple(f"{name}." for name in names)
    for name, module in before.items():
        if name not in names and not name.startswith(inside) and after.get(name) is not module:
            raise ValueError(f"{name!r} was no block, and is not what it was")
    for name in set(after) - set(before):
        raise ValueError(f"{name!r} is new in the network, and should not be there")


def _require_kept(parameters, now, modes, after):
    for name, parameter in parameters.items():
        if now.get(name) is not parameter:
            raise ValueError(
                f"{name} is another Parameter than before the swap: an optimiser that was made "
                "before goes on training the old one"
            )
    for name, training in modes.items():
        if after[name].training != training:
            raise ValueError(
                f"{name or 'the network'} has training={after[name].training} after the swap, and "
                f"had {training} before"
            )
