"""Lesson 07: Amdahl's law, a fake implementation, autograd with five gradients, a swap, a gate.

The messages about shuffles, races and memory outside an array are the sanitizer's own.
"""

import math

import numpy as np
import torch

from bank import right, wrong
from course_lib import cuda
from course_lib.runtime.intrinsics import warp_sum

OUTSIDE = "out-of-bounds"
ALL = 0xFFFFFFFF
ZERO, ONE, THREE, SIX = (np.float32(n) for n in (0, 1, 3, 6))

# ---- amdahl(shares, speedups) ----------------------------------------------------------------


@right("amdahl")
def amdahl_part_by_part(shares, speedups):
    new = 1.0
    for share, times in zip(shares, speedups, strict=True):
        new -= share * (1 - 1 / times)
    return 1 / new, 1 / (1 - math.fsum(shares))


@right("amdahl")
def amdahl_with_the_rest_as_a_part(shares, speedups):
    rest = 1 - np.sum(shares)
    parts, times = np.append(shares, rest), np.append(speedups, 1.0)
    return float(parts.sum() / (parts / times).sum()), float(1 / rest)


@wrong("amdahl", "wrong values in whole")
def amdahl_mean_of_speedups(shares, speedups):
    # Rates are not averaged by time, times are.
    rest = 1 - shares.sum()
    return rest + (shares * speedups).sum(), 1 / rest


@wrong("amdahl", "wrong values in whole")
def amdahl_without_the_rest(shares, speedups):
    rest = 1 - shares.sum()
    return shares.sum() / max((shares / speedups).sum(), 1e-9), 1 / rest


@wrong("amdahl", "wrong values in whole")
def amdahl_multiplies(shares, speedups):
    each = 1 / (1 - shares + shares / speedups)
    return each.prod(), 1 / (1 - shares.sum())


@wrong("amdahl", "wrong values in whole")
def amdahl_time_and_not_ratio(shares, speedups):
    rest = 1 - shares.sum()
    return rest + (shares / speedups).sum(), 1 / rest


@wrong("amdahl", "wrong values in whole")
def amdahl_first_part_only(shares, speedups):
    rest = 1 - shares.sum()
    if shares.size == 0:
        return 1.0, 1 / rest
    return 1 / (1 - shares[0] + shares[0] / speedups[0]), 1 / rest


@wrong("amdahl", "wrong values in whole")
def amdahl_mean_speedup_of_the_sum(shares, speedups):
    total = shares.sum()
    mean = speedups.mean() if speedups.size else 1.0
    return 1 / (1 - total + total / mean), 1 / (1 - total)


@wrong("amdahl", "wrong values in whole")
def amdahl_saves_the_speedup(shares, speedups):
    # 3 times as fast saves two thirds, and not three.
    rest = 1 - shares.sum()
    return 1 / (1 - (shares * (speedups - 1)).sum()), 1 / rest


@wrong("amdahl", "wrong values in limit")
def amdahl_limit_is_the_share(shares, speedups):
    rest = 1 - shares.sum()
    return 1 / (rest + (shares / speedups).sum()), 1 / max(shares.sum(), 1e-3)


@wrong("amdahl", "wrong values in limit")
def amdahl_limit_of_the_largest(shares, speedups):
    rest = 1 - shares.sum()
    return 1 / (rest + (shares / speedups).sum()), 1 / (1 - shares.max(initial=0.0))


@wrong("amdahl", "it returned a float")
def amdahl_without_the_limit(shares, speedups):
    return float(1 / (1 - shares.sum() + (shares / speedups).sum()))


# ---- describe_block(x, weight1, bias1, weight2, bias2) ---------------------------------------


@right("describe_block")
def describe_by_torch(x, weight1, bias1, weight2, bias2):
    n, c = x.size(0), x.size(1)
    like = {"dtype": torch.float32, "device": x.device}
    hidden = torch.empty(n, bias1.shape[0], **like)
    return torch.empty_like(x), torch.empty(n, c, **like), hidden, torch.empty(n, c, **like)


@right("describe_block")
def describe_by_computing_shapes(x, weight1, bias1, weight2, bias2):
    # On tensors without numbers, computing costs nothing either.
    mean = x.float().mean((2, 3))
    hidden = mean @ weight1.T + bias1
    logit = hidden @ weight2.T + bias2
    return x * torch.ones_like(x), mean, hidden, logit


@wrong("describe_block", "y has the strides")
def describe_always_channels_first(x, weight1, bias1, weight2, bias2):
    n, c = x.shape[:2]
    like = {"dtype": torch.float32}
    r = weight1.shape[0]
    return x.new_empty(x.shape), *(x.new_empty((n, k), **like) for k in (c, r, c))


@wrong("describe_block", "mean has the type torch.(b?)float16")
def describe_mean_in_the_type_of_x(x, weight1, bias1, weight2, bias2):
    n, c = x.shape[:2]
    hidden = x.new_empty((n, weight1.shape[0]), dtype=torch.float32)
    return torch.empty_like(x), x.new_empty((n, c)), hidden, x.new_empty((n, c)).float()


@wrong("describe_block", "the device cpu")
def describe_on_the_cpu(x, weight1, bias1, weight2, bias2):
    n, c = x.shape[:2]
    r = weight1.shape[0]
    return torch.empty_like(x), torch.empty(n, c), torch.empty(n, r), torch.empty(n, c)


@wrong("describe_block", "hidden has the shape")
def describe_hidden_with_all_channels(x, weight1, bias1, weight2, bias2):
    return torch.empty_like(x), *(x.new_empty(x.shape[:2], dtype=torch.float32) for _ in range(3))


@wrong("describe_block", "mean has the shape")
def describe_mean_with_places(x, weight1, bias1, weight2, bias2):
    n, c, r = *x.shape[:2], weight1.shape[0]
    shapes = (n, c, 1, 1), (n, r, 1, 1), (n, c, 1, 1)
    return torch.empty_like(x), *(x.new_empty(s, dtype=torch.float32) for s in shapes)


@wrong("describe_block", "one tensor is used twice")
def describe_mean_is_logit(x, weight1, bias1, weight2, bias2):
    n, c, r = *x.shape[:2], weight1.shape[0]
    mean = x.new_empty((n, c), dtype=torch.float32)
    return torch.empty_like(x), mean, x.new_empty((n, r), dtype=torch.float32), mean


@wrong("describe_block", "one tensor is used twice")
def describe_y_is_x(x, weight1, bias1, weight2, bias2):
    n, c, r = *x.shape[:2], weight1.shape[0]
    return x, *(x.new_empty((n, k), dtype=torch.float32) for k in (c, r, c))


@wrong("describe_block", "it returned a Tensor")
def describe_y_alone(x, weight1, bias1, weight2, bias2):
    return torch.empty_like(x)


@wrong("describe_block", "it returned 3 values")
def describe_without_the_mean(x, weight1, bias1, weight2, bias2):
    n, c, r = *x.shape[:2], weight1.shape[0]
    return torch.empty_like(x), *(x.new_empty((n, k), dtype=torch.float32) for k in (r, c))


@wrong("describe_block", "mean should be a tensor, and is a tuple")
def describe_shapes_only(x, weight1, bias1, weight2, bias2):
    n, c, r = *x.shape[:2], weight1.shape[0]
    return torch.empty_like(x), (n, c), (n, r), (n, c)


@wrong("describe_block", "y has the type torch.float32")
def describe_y_as_float32(x, weight1, bias1, weight2, bias2):
    n, c, r = *x.shape[:2], weight1.shape[0]
    y = torch.empty_like(x, dtype=torch.float32)
    return y, *(x.new_empty((n, k), dtype=torch.float32) for k in (c, r, c))


@wrong("describe_block", "NotImplementedError|RuntimeError|ValueError|meta")
def describe_looks_at_numbers(x, weight1, bias1, weight2, bias2):
    if x.abs().sum().item() == 0:
        return None
    return describe_by_torch(x, weight1, bias1, weight2, bias2)


# ---- block_function(compute_forward, compute_backward) ---------------------------------------


def _function(forward, backward):
    """An autograd function made of two plain ones."""
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Block", (torch.autograd.Function,), parts).apply


def _keeping(compute_forward):
    """A forward pass as it should be."""

    def forward(ctx, x, weight1, bias1, weight2, bias2, gate):
        y, *saved = compute_forward(x, weight1, bias1, weight2, bias2, gate=gate)
        ctx.save_for_backward(x, weight1, weight2, *saved)
        ctx.gate = gate
        return y

    return forward


@right("block_function")
def function_with_setup_context(compute_forward, compute_backward):
    # The newer form, in which forward has no ctx. All outputs are returned, and three dropped.
    class Block(torch.autograd.Function):
        @staticmethod
        def forward(x, weight1, bias1, weight2, bias2, gate):
            return compute_forward(x, weight1, bias1, weight2, bias2, gate=gate)

        @staticmethod
        def setup_context(ctx, inputs, output):
            x, weight1, _, weight2, _, ctx.gate = inputs
            _, mean, hidden, logit = output
            ctx.mark_non_differentiable(mean, hidden, logit)
            ctx.save_for_backward(x, weight1, weight2, mean, hidden, logit)

        @staticmethod
        def backward(ctx, dy, *_):
            return *compute_backward(dy.contiguous(), *ctx.saved_tensors, gate=ctx.gate), None

    return lambda *inputs: Block.apply(*inputs)[0]


@right("block_function")
def function_saves_more(compute_forward, compute_backward):
    def forward(ctx, x, *rest):
        *parameters, ctx.gate = rest
        y, *saved = compute_forward(x, *parameters, gate=ctx.gate)
        ctx.save_for_backward(x, *parameters, *saved)
        return y

    def backward(ctx, dy):
        x, weight1, _, weight2, _, *saved = ctx.saved_tensors
        dy = dy if dy.is_contiguous() else dy.clone(memory_format=torch.contiguous_format)
        dx, *found = compute_backward(dy, x, weight1, weight2, *saved, gate=ctx.gate)
        return dx, found[0], found[1], found[2], found[3], None

    return _function(forward, backward)


@wrong("block_function", "invalid gradient|wrong values in d")
def function_weights_before_biases(compute_forward, compute_backward):
    def backward(ctx, dy):
        dx, dweight1, dbias1, dweight2, dbias2 = compute_backward(
            dy.contiguous(), *ctx.saved_tensors, gate=ctx.gate
        )
        return dx, dweight1, dweight2, dbias1, dbias2, None

    return _function(_keeping(compute_forward), backward)


@wrong("block_function", "invalid gradient|wrong values in dweight")
def function_swaps_the_weights(compute_forward, compute_backward):
    def backward(ctx, dy):
        dx, dweight1, dbias1, dweight2, dbias2 = compute_backward(
            dy.contiguous(), *ctx.saved_tensors, gate=ctx.gate
        )
        return dx, dweight2, dbias1, dweight1, dbias2, None

    return _function(_keeping(compute_forward), backward)


@wrong("block_function", "dy.contiguous\\(\\) makes a copy")
def function_takes_any_dy(compute_forward, compute_backward):
    def backward(ctx, dy):
        return *compute_backward(dy, *ctx.saved_tensors, gate=ctx.gate), None

    return _function(_keeping(compute_forward), backward)


@wrong("block_function", "incorrect number of gradients|expected 6")
def function_forgets_the_gate_has_none(compute_forward, compute_backward):
    def backward(ctx, dy):
        return compute_backward(dy.contiguous(), *ctx.saved_tensors, gate=ctx.gate)

    return _function(_keeping(compute_forward), backward)


@wrong("block_function", "wrong values in dx|wrong values in dweight|invalid gradient")
def function_keeps_the_last_call(compute_forward, compute_backward):
    # A variable outside ctx holds what the latest call saved.
    kept = {}

    def forward(ctx, x, weight1, bias1, weight2, bias2, gate):
        y, *saved = compute_forward(x, weight1, bias1, weight2, bias2, gate=gate)
        kept["all"] = x, weight1, weight2, *saved
        kept["gate"] = gate
        return y

    def backward(ctx, dy):
        return *compute_backward(dy.contiguous(), *kept["all"], gate=kept["gate"]), None

    return _function(forward, backward)


@wrong("block_function", "changed in place between forward and backward, and nobody noticed")
def function_keeps_x_in_ctx(compute_forward, compute_backward):
    def forward(ctx, x, weight1, bias1, weight2, bias2, gate):
        y, *saved = compute_forward(x, weight1, bias1, weight2, bias2, gate=gate)
        ctx.kept, ctx.gate = (x, weight1, weight2, *saved), gate
        return y

    def backward(ctx, dy):
        return *compute_backward(dy.contiguous(), *ctx.kept, gate=ctx.gate), None

    return _function(forward, backward)


@wrong("block_function", "wrong values in d")
def function_assumes_the_sigmoid(compute_forward, compute_backward):
    def backward(ctx, dy):
        found = compute_backward(dy.contiguous(), *ctx.saved_tensors, gate="sigmoid")
        return *found, None

    return _function(_keeping(compute_forward), backward)


@wrong("block_function", "wrong values in y")
def function_forward_assumes_the_sigmoid(compute_forward, compute_backward):
    def forward(ctx, x, weight1, bias1, weight2, bias2, gate):
        y, *saved = compute_forward(x, weight1, bias1, weight2, bias2, gate="sigmoid")
        ctx.save_for_backward(x, weight1, weight2, *saved)
        ctx.gate = gate
        return y

    def backward(ctx, dy):
        return *compute_backward(dy.contiguous(), *ctx.saved_tensors, gate=ctx.gate), None

    return _function(forward, backward)


@wrong("block_function", "compute_backward was called 0 times")
def function_lets_autograd_try(compute_forward, compute_backward):
    # The launcher's results know no gradient, so this one makes it from PyTorch's own functions.
    def apply(x, weight1, bias1, weight2, bias2, gate):
        compute_forward(x, weight1, bias1, weight2, bias2, gate=gate)
        hidden = torch.nn.functional.silu(x.mean((2, 3)) @ weight1.T + bias1)
        logit = hidden @ weight2.T + bias2
        gates = {"sigmoid": torch.sigmoid, "hard_sigmoid": torch.nn.functional.hardsigmoid}
        return x * gates[gate](logit)[:, :, None, None]

    return apply


@wrong("block_function", "compute_forward was called 4 times")
def function_computes_again(compute_forward, compute_backward):
    def forward(ctx, x, weight1, bias1, weight2, bias2, gate):
        ctx.save_for_backward(x, weight1, bias1, weight2, bias2)
        ctx.gate = gate
        return compute_forward(x, weight1, bias1, weight2, bias2, gate=gate)[0]

    def backward(ctx, dy):
        x, weight1, bias1, weight2, bias2 = ctx.saved_tensors
        _, *saved = compute_forward(x, weight1, bias1, weight2, bias2, gate=ctx.gate)
        found = compute_backward(dy.contiguous(), x, weight1, weight2, *saved, gate=ctx.gate)
        return *found, None

    return _function(forward, backward)


@wrong("block_function", "it gives a tuple")
def function_returns_all_four(compute_forward, compute_backward):
    def forward(ctx, x, weight1, bias1, weight2, bias2, gate):
        y, *saved = compute_forward(x, weight1, bias1, weight2, bias2, gate=gate)
        ctx.save_for_backward(x, weight1, weight2, *saved)
        ctx.gate = gate
        return y, *saved

    def backward(ctx, dy, *_):
        return *compute_backward(dy.contiguous(), *ctx.saved_tensors, gate=ctx.gate), None

    return _function(forward, backward)


@wrong("block_function", "takes dy, x, weight1, weight2, mean, hidden, logit")
def function_saves_the_results_only(compute_forward, compute_backward):
    def forward(ctx, x, weight1, bias1, weight2, bias2, gate):
        y, *saved = compute_forward(x, weight1, bias1, weight2, bias2, gate=gate)
        ctx.save_for_backward(*saved)
        ctx.gate = gate
        return y

    def backward(ctx, dy):
        return *compute_backward(dy.contiguous(), *ctx.saved_tensors, gate=ctx.gate), None

    return _function(forward, backward)


@wrong("block_function", "wrong values in d|matmul|mismatch|broadcast|invalid gradient")
def function_saves_in_another_order(compute_forward, compute_backward):
    def forward(ctx, x, weight1, bias1, weight2, bias2, gate):
        y, mean, hidden, logit = compute_forward(x, weight1, bias1, weight2, bias2, gate=gate)
        ctx.save_for_backward(x, weight1, weight2, logit, hidden, mean)
        ctx.gate = gate
        return y

    def backward(ctx, dy):
        return *compute_backward(dy.contiguous(), *ctx.saved_tensors, gate=ctx.gate), None

    return _function(forward, backward)


@wrong("block_function", "bias1 has no gradient")
def function_leaves_the_biases_out(compute_forward, compute_backward):
    def backward(ctx, dy):
        dx, dweight1, _, dweight2, _ = compute_backward(
            dy.contiguous(), *ctx.saved_tensors, gate=ctx.gate
        )
        return dx, dweight1, None, dweight2, None, None

    return _function(_keeping(compute_forward), backward)


@wrong("block_function", "something to call")
def function_no_return(compute_forward, compute_backward):
    _function(_keeping(compute_forward), lambda ctx, dy: None)


# ---- swap_blocks(model, old_type, make_new) --------------------------------------------------


@right("swap_blocks")
def swap_recursively(model, old_type, make_new):
    swapped = []

    def walk(parent, prefix):
        for name, child in parent.named_children():
            if isinstance(child, old_type):
                new = make_new(child)
                new.fc1, new.fc2 = child.fc1, child.fc2
                new.training = child.training
                for each, like in zip(new.children(), child.children(), strict=True):
                    each.training = like.training
                parent.add_module(name, new)
                swapped.append(prefix + name)
            else:
                walk(child, f"{prefix}{name}.")

    walk(model, "")
    return swapped


@right("swap_blocks")
def swap_parameters_only(model, old_type, make_new):
    names = [name for name, each in model.named_modules() if isinstance(each, old_type)]
    for name in names:
        old = model.get_submodule(name)
        new = make_new(old).train(old.training)
        for layer in ("fc1", "fc2"):
            for which, parameter in list(getattr(old, layer).named_parameters()):
                setattr(getattr(new, layer), which, parameter)
        model.set_submodule(name, new)
    return names


def _swapped(model, old_type, make_new, dress):
    """Swap as one should, but for what `dress(new, old)` does with the new block."""
    names = [name for name, each in model.named_modules() if isinstance(each, old_type)]
    for name in names:
        old = model.get_submodule(name)
        new = make_new(old)
        dress(new, old)
        model.set_submodule(name, new)
    return names


@wrong("swap_blocks", "another Parameter than before the swap")
def swap_copies_the_weights(model, old_type, make_new):
    def dress(new, old):
        new.load_state_dict(old.state_dict())
        new.train(old.training)

    return _swapped(model, old_type, make_new, dress)


@wrong("swap_blocks", "another Parameter than before the swap")
def swap_keeps_new_weights(model, old_type, make_new):
    return _swapped(model, old_type, make_new, lambda new, old: new.train(old.training))


@wrong("swap_blocks", "fc2.weight is another Parameter")
def swap_forgets_the_second_layer(model, old_type, make_new):
    def dress(new, old):
        new.fc1 = old.fc1
        new.train(old.training)

    return _swapped(model, old_type, make_new, dress)


@wrong("swap_blocks", "bias is another Parameter")
def swap_forgets_the_biases(model, old_type, make_new):
    def dress(new, old):
        new.fc1.weight, new.fc2.weight = old.fc1.weight, old.fc2.weight
        new.train(old.training)

    return _swapped(model, old_type, make_new, dress)


@wrong("swap_blocks", "has training=True after the swap")
def swap_loses_the_mode(model, old_type, make_new):
    def dress(new, old):
        new.fc1, new.fc2 = old.fc1, old.fc2

    return _swapped(model, old_type, make_new, dress)


@wrong("swap_blocks", "has training=False after the swap")
def swap_ends_training(model, old_type, make_new):
    def dress(new, old):
        new.fc1, new.fc2 = old.fc1, old.fc2
        new.eval()

    return _swapped(model, old_type, make_new, dress)


@wrong("swap_blocks", "another Parameter|state_dict has changed|size mismatch")
def swap_crosses_the_layers(model, old_type, make_new):
    def dress(new, old):
        new.fc1, new.fc2 = old.fc2, old.fc1
        new.train(old.training)

    return _swapped(model, old_type, make_new, dress)


@wrong("swap_blocks", "is not a new block")
def swap_only_children(model, old_type, make_new):
    swapped = []
    for name, old in model.named_children():
        if isinstance(old, old_type):
            new = make_new(old)
            new.fc1, new.fc2 = old.fc1, old.fc2
            setattr(model, name, new.train(old.training))
            swapped.append(name)
    return swapped


@wrong("swap_blocks", "is not a new block")
def swap_only_the_first(model, old_type, make_new):
    for name, old in model.named_modules():
        if isinstance(old, old_type):
            new = make_new(old)
            new.fc1, new.fc2 = old.fc1, old.fc2
            model.set_submodule(name, new.train(old.training))
            return [name]
    return []


@wrong("swap_blocks", "is not a new block")
def swap_sets_on_the_model(model, old_type, make_new):
    names = []
    for name, old in list(model.named_modules()):
        if isinstance(old, old_type):
            new = make_new(old)
            new.fc1, new.fc2 = old.fc1, old.fc2
            setattr(model, name, new.train(old.training))
            names.append(name)
    return names


@wrong("swap_blocks", "is not a new block")
def swap_changes_a_variable(model, old_type, make_new):
    names = []
    for name, module in model.named_modules():
        if isinstance(module, old_type):
            new = make_new(module)
            new.fc1, new.fc2 = module.fc1, module.fc2
            module = new.train(module.training)
            names.append(name)
    return names


@wrong("swap_blocks", "was no block, and is not what it was|has no attribute")
def swap_by_attribute(model, old_type, make_new):
    names = [name for name, each in model.named_modules() if hasattr(each, "fc1")]
    for name in names:
        old = model.get_submodule(name)
        sizes = old if isinstance(old, old_type) else model.gate
        new = make_new(sizes)
        new.fc1, new.fc2 = old.fc1, old.fc2
        model.set_submodule(name, new.train(old.training))
    return names


@wrong("swap_blocks", "it returned \\[")
def swap_returns_last_names(model, old_type, make_new):
    found = swap_parameters_only(model, old_type, make_new)
    return [name.rpartition(".")[2] for name in found] + [""] * (not found)


@wrong("swap_blocks", "it returned \\[")
def swap_returns_names_backwards(model, old_type, make_new):
    return swap_parameters_only(model, old_type, make_new)[::-1]


@wrong("swap_blocks", "it returned None")
def swap_returns_nothing(model, old_type, make_new):
    swap_parameters_only(model, old_type, make_new)


@wrong("swap_blocks", "it returned \\[\\]; the blocks")
def swap_looks_too_late(model, old_type, make_new):
    new_type = []
    swap_parameters_only(model, old_type, lambda old: new_type.append(old) or make_new(old))
    return [name for name, each in model.named_modules() if type(each) is old_type]


@wrong("swap_blocks", "requires_grad|has changed|another Parameter|wrong values")
def swap_mixes_up_the_blocks(model, old_type, make_new):
    names = [name for name, each in model.named_modules() if isinstance(each, old_type)]
    olds = [model.get_submodule(name) for name in names]
    for name, old in zip(names, reversed(olds), strict=True):
        new = make_new(old)
        new.fc1, new.fc2 = old.fc1, old.fc2
        model.set_submodule(name, new.train(model.get_submodule(name).training))
    return names


# ---- hard_gate_backward(dy, x, logit, dlogit) ------------------------------------------------


@right("hard_gate_backward")
@cuda.jit
def hard_gate_each_lane_scales(dy, x, logit, dlogit):
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < logit.size:
        slope = ONE / SIX if abs(logit[plane]) < THREE else ZERO
        total = ZERO
        for place in range(lane, x.shape[1], 32):
            total += slope * (dy[plane, place] * x[plane, place])
        for step in (16, 8, 4, 2, 1):
            total += cuda.shfl_down_sync(ALL, total, step)
        if lane == 0:
            dlogit[plane] = total


@right("hard_gate_backward")
@cuda.jit
def hard_gate_thread_per_plane(dy, x, logit, dlogit):
    for plane in range(cuda.grid(1), logit.size, cuda.gridsize(1)):
        total = ZERO
        if logit[plane] > -THREE and not logit[plane] >= THREE:
            for place in range(x.shape[1]):
                total += dy[plane, place] * x[plane, place]
        dlogit[plane] = total / SIX


@right("hard_gate_backward")
@cuda.jit
def hard_gate_last_lane_writes(dy, x, logit, dlogit):
    lane = cuda.threadIdx.x % 32
    warps = cuda.gridsize(1) // 32
    for plane in range(cuda.grid(1) // 32, logit.shape[0], warps):
        total = ZERO
        for place in range(x.shape[1] - 1 - lane, -1, -32):
            total += x[plane, place] * dy[plane, place]
        total = warp_sum(total)
        inside = logit[plane] > -THREE and logit[plane] < THREE
        if lane == 31:
            dlogit[plane] = total * (ONE / SIX) if inside else ZERO


@wrong("hard_gate_backward", "wrong values in dlogit")
@cuda.jit
def hard_gate_at_the_corners(dy, x, logit, dlogit):
    # At −3 and at 3 the gradient is 0.
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < logit.size:
        total = ZERO
        for place in range(lane, x.shape[1], 32):
            total += dy[plane, place] * x[plane, place]
        total = warp_sum(total)
        if lane == 0:
            inside = -THREE <= logit[plane] and logit[plane] <= THREE
            dlogit[plane] = total / SIX if inside else ZERO


@wrong("hard_gate_backward", "wrong values in dlogit")
@cuda.jit
def hard_gate_without_corners(dy, x, logit, dlogit):
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < logit.size:
        total = ZERO
        for place in range(lane, x.shape[1], 32):
            total += dy[plane, place] * x[plane, place]
        total = warp_sum(total)
        if lane == 0:
            dlogit[plane] = total / SIX


@wrong("hard_gate_backward", "wrong values in dlogit")
@cuda.jit
def hard_gate_of_the_sigmoid(dy, x, logit, dlogit):
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < logit.size:
        total = ZERO
        for place in range(lane, x.shape[1], 32):
            total += dy[plane, place] * x[plane, place]
        total = warp_sum(total)
        if lane == 0:
            gate = ONE / (ONE + math.exp(-logit[plane]))
            dlogit[plane] = total * gate * (ONE - gate)


@wrong("hard_gate_backward", "6 times what it should be|wrong values in dlogit")
@cuda.jit
def hard_gate_slope_one(dy, x, logit, dlogit):
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < logit.size:
        total = ZERO
        for place in range(lane, x.shape[1], 32):
            total += dy[plane, place] * x[plane, place]
        total = warp_sum(total)
        if lane == 0:
            dlogit[plane] = total if -THREE < logit[plane] < THREE else ZERO


@wrong("hard_gate_backward", "wrong values in dlogit")
@cuda.jit
def hard_gate_mean_over_the_plane(dy, x, logit, dlogit):
    # The gate multiplies every place in full: a sum, and no mean.
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < logit.size:
        total = ZERO
        for place in range(lane, x.shape[1], 32):
            total += dy[plane, place] * x[plane, place]
        total = warp_sum(total) / np.float32(max(x.shape[1], 1))
        if lane == 0:
            dlogit[plane] = total / SIX if -THREE < logit[plane] < THREE else ZERO


@wrong("hard_gate_backward", "wrong values in dlogit")
@cuda.jit
def hard_gate_forgets_x(dy, x, logit, dlogit):
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < logit.size:
        total = ZERO
        for place in range(lane, x.shape[1], 32):
            total += dy[plane, place]
        total = warp_sum(total)
        if lane == 0:
            dlogit[plane] = total / SIX if -THREE < logit[plane] < THREE else ZERO


@wrong("hard_gate_backward", "wrong values in dlogit")
@cuda.jit
def hard_gate_first_round_only(dy, x, logit, dlogit):
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < logit.size:
        total = ZERO
        if lane < x.shape[1]:
            total = dy[plane, lane] * x[plane, lane]
        total = warp_sum(total)
        if lane == 0:
            dlogit[plane] = total / SIX if -THREE < logit[plane] < THREE else ZERO


@wrong("hard_gate_backward", "wrong values in dlogit")
@cuda.jit
def hard_gate_lane_0_alone(dy, x, logit, dlogit):
    # The shares of the other 31 lanes are never added.
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < logit.size:
        total = ZERO
        for place in range(lane, x.shape[1], 32):
            total += dy[plane, place] * x[plane, place]
        if lane == 0:
            dlogit[plane] = total / SIX if -THREE < logit[plane] < THREE else ZERO


@wrong("hard_gate_backward", OUTSIDE)
@cuda.jit
def hard_gate_no_guard(dy, x, logit, dlogit):
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    total = ZERO
    for place in range(lane, x.shape[1], 32):
        total += dy[plane, place] * x[plane, place]
    total = warp_sum(total)
    if lane == 0:
        dlogit[plane] = total / SIX if -THREE < logit[plane] < THREE else ZERO


@wrong("hard_gate_backward", "shuffle|inactive|lane|warp")
@cuda.jit
def hard_gate_sum_inside_the_loop(dy, x, logit, dlogit):
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < logit.size:
        total = ZERO
        for place in range(lane, x.shape[1], 32):
            total += warp_sum(dy[plane, place] * x[plane, place])
        if lane == 0:
            dlogit[plane] = total / SIX if -THREE < logit[plane] < THREE else ZERO


@wrong("hard_gate_backward", "never written")
@cuda.jit
def hard_gate_writes_inside_only(dy, x, logit, dlogit):
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < logit.size:
        total = ZERO
        for place in range(lane, x.shape[1], 32):
            total += dy[plane, place] * x[plane, place]
        total = warp_sum(total)
        if lane == 0 and -THREE < logit[plane] and logit[plane] < THREE:
            dlogit[plane] = total / SIX


@wrong("hard_gate_backward", "written by more than one thread|race")
@cuda.jit
def hard_gate_every_lane_writes(dy, x, logit, dlogit):
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < logit.size:
        total = ZERO
        for place in range(lane, x.shape[1], 32):
            total += dy[plane, place] * x[plane, place]
        total = warp_sum(total)
        dlogit[plane] = total / SIX if -THREE < logit[plane] < THREE else ZERO


@wrong("hard_gate_backward", "float64")
@cuda.jit
def hard_gate_in_float64(dy, x, logit, dlogit):
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < logit.size:
        total = 0.0
        for place in range(lane, x.shape[1], 32):
            total += dy[plane, place] * x[plane, place]
        total = warp_sum(np.float32(total))
        if lane == 0:
            dlogit[plane] = total / SIX if -THREE < logit[plane] < THREE else ZERO


@wrong("hard_gate_backward", "race")
@cuda.jit
def hard_gate_adds_without_atomics(dy, x, logit, dlogit):
    plane, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if plane < logit.size:
        if lane == 0:
            dlogit[plane] = ZERO
        for place in range(lane, x.shape[1], 32):
            if -THREE < logit[plane] < THREE:
                dlogit[plane] += dy[plane, place] * x[plane, place] / SIX
