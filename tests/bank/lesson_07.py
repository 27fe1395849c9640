"""Lesson 07: Amdahl's law, a fake implementation, autograd with five gradients, a swap, a gate.

Nearly all wrong kernels are a right one with one mistake in it, and `mistake` says which text
stands in place of which. The messages about shuffles, races and memory outside an array are the
sanitizer's own.
"""

import math

import numpy as np
import torch

from bank import right, wrong
from bank.mistakes import mistakes
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


WHOLE = "1 / (rest + (shares / speedups).sum())"
mistakes("amdahl",
    # Rates are not averaged by time, times are.
    ("amdahl_mean_of_speedups", "wrong values in whole", WHOLE, "rest + (shares * speedups).sum()"),
    ("amdahl_without_the_rest", "wrong values in whole", WHOLE,
     "shares.sum() / max((shares / speedups).sum(), 1e-9)"),
    ("amdahl_multiplies", "wrong values in whole", WHOLE,
     "(1 / (1 - shares + shares / speedups)).prod()"),
    ("amdahl_time_and_not_ratio", "wrong values in whole", WHOLE,
     "rest + (shares / speedups).sum()"),
    ("amdahl_first_part_only", "wrong values in whole", WHOLE,
     "1 / (1 - shares[:1].sum() + (shares / speedups)[:1].sum())"),
    ("amdahl_mean_speedup_of_the_sum", "wrong values in whole", WHOLE,
     "1 / (rest + shares.sum() / (speedups.mean() if speedups.size else 1))"),
    # 3 times as fast saves two thirds, and not three.
    ("amdahl_saves_the_speedup", "wrong values in whole", WHOLE,
     "1 / (1 - (shares * (speedups - 1)).sum())"),
    ("amdahl_limit_is_the_share", "wrong values in limit", "1 / rest",
     "1 / max(shares.sum(), 1e-3)"),
    ("amdahl_limit_of_the_largest", "wrong values in limit", "1 / rest",
     "1 / (1 - shares.max(initial=0.0))"),
    ("amdahl_without_the_limit", "it returned one, of type float", "return whole, 1 / rest",
     "return float(whole)"))


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


MEAN = "x.new_empty((n_images, n_channels), dtype=torch.float32)"
HIDDEN = "x.new_empty((n_images, n_hidden), dtype=torch.float32)"
mistakes("describe_block",
    ("describe_always_channels_first", "y has the strides", "torch.empty_like(x)",
     "x.new_empty(x.shape)"),
    ("describe_mean_in_the_type_of_x", "mean has the type torch.(b?)float16", MEAN,
     "x.new_empty((n_images, n_channels))"),
    ("describe_on_the_cpu", "the device cpu", MEAN, "torch.empty(n_images, n_channels)", HIDDEN,
     "torch.empty(n_images, n_hidden)"),
    ("describe_hidden_with_all_channels", "hidden has the shape", HIDDEN, MEAN),
    ("describe_mean_with_places", "mean has the shape", MEAN,
     MEAN.replace("n_channels", "n_channels, 1, 1"), HIDDEN,
     HIDDEN.replace("n_hidden", "n_hidden, 1, 1")),
    ("describe_mean_is_logit", "one tensor is used twice", "torch.empty_like(mean)", "mean"),
    ("describe_y_is_x", "one tensor is used twice", "torch.empty_like(x)", "x"),
    ("describe_y_alone", "it returned a Tensor", "return y, mean, hidden, logit", "return y"),
    ("describe_without_the_mean", "it returned 3 values", "return y, mean, hidden",
     "return y, hidden"),
    ("describe_shapes_only", "mean should be a tensor, and is a tuple",
     "return y, mean, hidden, logit",
     "return y, *(tuple(each.shape) for each in (mean, hidden, logit))"),
    ("describe_y_as_float32", "y has the type torch.float32", "torch.empty_like(x)",
     "torch.empty_like(x, dtype=torch.float32)"),
    ("describe_looks_at_numbers", "NotImpl|RuntimeError|should return|meta", "    y =",
     "    if x.abs().sum().item() == 0:\n        return None\n    y ="))


# ---- block_function(compute_forward, compute_backward) ---------------------------------------


def _function(forward, backward):
    """An autograd function made of two plain ones."""
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Block", (torch.autograd.Function,), parts).apply


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


SAVE = "ctx.save_for_backward(x, w1, w2, *saved)"
FOUND = "found[0], found[1], found[2], found[3]"
mistakes("block_function",
    ("function_weights_before_biases", "invalid gradient|wrong values in d", function_saves_more,
     FOUND, "found[0], found[2], found[1], found[3]"),
    ("function_swaps_the_weights", "invalid gradient|wrong values in dweight", function_saves_more,
     FOUND, "found[2], found[1], found[0], found[3]"),
    ("function_takes_any_dy", "dy.contiguous\\(\\) makes a copy", "dy.contiguous()", "dy"),
    ("function_forgets_the_gate_has_none", "incorrect number of gradients|expected 6",
     "return *compute_backward", "return compute_backward", "), None", ")"),
    # A variable outside ctx holds what the latest call saved.
    ("function_keeps_the_last_call", "wrong values in dx|wrong values in dweight|invalid gradient",
     "    class", "    kept = []\n\n    class", SAVE, "kept[:] = x, w1, w2, *saved",
     "*ctx.saved_tensors", "*kept"),
    ("function_keeps_x_in_ctx", "changed in place between forward and backward, and nobody noticed",
     SAVE, "ctx.kept = x, w1, w2, *saved", "*ctx.saved_tensors", "*ctx.kept"),
    ("function_assumes_the_sigmoid", "wrong values in d", "gate=ctx.gate", 'gate="sigmoid"'),
    ("function_forward_assumes_the_sigmoid", "wrong values in y", "gate=gate", 'gate="sigmoid"'),
    ("function_computes_again", "compute_forward was called 4 times", function_saves_more,
     "ctx.save_for_backward(x, *parameters, *saved)", "ctx.save_for_backward(x, *parameters)",
     "x, weight1, _, weight2, _, *saved = ctx.saved_tensors",
     "x, weight1, _, weight2, _ = ctx.saved_tensors\n"
     "        _, *saved = compute_forward(*ctx.saved_tensors, gate=ctx.gate)"),
    ("function_returns_all_four", "it gives a tuple", "return y\n", "return y, *saved\n",
     "backward(ctx, dy)", "backward(ctx, dy, *_)"),
    ("function_saves_the_results_only", "takes dy, x, weight1, weight2, mean, hidden, logit", SAVE,
     "ctx.save_for_backward(*saved)"),
    ("function_saves_in_another_order",
     "wrong values in d|matmul|mismatch|broadcast|invalid gradient", SAVE,
     "ctx.save_for_backward(x, w1, w2, *reversed(saved))"),
    ("function_leaves_the_biases_out", "bias1 has no gradient", function_saves_more, FOUND,
     "found[0], None, found[2], None"),
    ("function_no_return", "something to call", "return SqueezeExcite.apply",
     "SqueezeExcite.apply"))


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


LAYERS = "new.fc1, new.fc2 = old.fc1, old.fc2"
PUT = "setattr(model.get_submodule(parent), last, new)"
mistakes("swap_blocks",
    ("swap_copies_the_weights", "another Parameter than before the swap", LAYERS,
     "new.load_state_dict(old.state_dict())"),
    ("swap_keeps_new_weights", "another Parameter than before the swap", LAYERS, ""),
    ("swap_forgets_the_second_layer", "fc2.weight is another Parameter", LAYERS,
     "new.fc1 = old.fc1"),
    ("swap_forgets_the_biases", "bias is another Parameter", LAYERS,
     "new.fc1.weight, new.fc2.weight = old.fc1.weight, old.fc2.weight"),
    ("swap_loses_the_mode", "has training=True after the swap", "new.train(old.training)", ""),
    ("swap_ends_training", "has training=False after the swap", "new.train(old.training)",
     "new.eval()"),
    ("swap_crosses_the_layers", "another Parameter|state_dict has changed|size mismatch", LAYERS,
     "new.fc1, new.fc2 = old.fc2, old.fc1"),
    ("swap_only_children", "is not a new block", "named_modules", "named_children"),
    ("swap_only_the_first", "is not a new block", "swapped.append(name)", "return [name]"),
    ("swap_sets_on_the_model", "is not a new block", PUT, "setattr(model, name, new)"),
    ("swap_changes_a_variable", "is not a new block", PUT, "old = new"),
    ("swap_by_attribute", "was no block, and is not what it was|has no attribute",
     "if isinstance(old, old_type)", 'if hasattr(old, "fc1")', "make_new(old)",
     "make_new(old if isinstance(old, old_type) else model.gate)"),
    ("swap_returns_last_names", "it returned \\[", "swapped.append(name)", "swapped.append(last)"),
    ("swap_returns_names_backwards", "it returned \\[", "return swapped", "return swapped[::-1]"),
    ("swap_returns_nothing", "it returned None", "    return swapped\n", ""),
    ("swap_looks_too_late", "it returned \\[\\]; the blocks", "return swapped",
     "return [name for name, each in model.named_modules() if isinstance(each, old_type)]"),
    ("swap_mixes_up_the_blocks", "requires_grad|has changed|another Parameter|wrong values",
     "swapped = []", "swapped, olds = [], [m for m in model.modules() if isinstance(m, old_type)]",
     LAYERS, "new.fc1, new.fc2 = olds[-1].fc1, olds.pop().fc2"))


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


@wrong("hard_gate_backward", "should share the work")
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


INSIDE = "-THREE < z and z < THREE"
mistakes("hard_gate_backward",
    # At −3 and at 3 the gradient is 0.
    ("hard_gate_at_the_corners", "wrong values in dlogit", INSIDE, "-THREE <= z and z <= THREE"),
    ("hard_gate_without_corners", "wrong values in dlogit", f" if {INSIDE} else ZERO", ""),
    ("hard_gate_of_the_sigmoid", "wrong values in dlogit", hard_gate_each_lane_scales,
     "slope = ONE / SIX if abs(logit[plane]) < THREE else ZERO",
     "gate = ONE / (ONE + math.exp(-logit[plane]))\n        slope = gate * (ONE - gate)"),
    ("hard_gate_slope_one", "6 times what it should be|wrong values in dlogit", "total / SIX",
     "total"),
    # The gate multiplies every place in full: a sum, and no mean.
    ("hard_gate_mean_over_the_plane", "wrong values in dlogit", "warp_sum(total)",
     "warp_sum(total) / np.float32(max(x.shape[1], 1))"),
    ("hard_gate_forgets_x", "wrong values in dlogit", "dy[plane, place] * x[plane, place]",
     "dy[plane, place]"),
    ("hard_gate_first_round_only", "wrong values in dlogit", "range(lane, x.shape[1], 32)",
     "range(lane, min(x.shape[1], 32), 32)"),
    # The shares of the other 31 lanes are never added.
    ("hard_gate_lane_0_alone", "wrong values in dlogit", "        total = warp_sum(total)\n", ""),
    ("hard_gate_no_guard", OUTSIDE, "if plane < logit.size:", "if True:"),
    ("hard_gate_sum_inside_the_loop", "shuffle|inactive|lane|warp",
     "dy[plane, place] * x[plane, place]", "warp_sum(dy[plane, place] * x[plane, place])",
     "        total = warp_sum(total)\n", ""),
    ("hard_gate_writes_inside_only", "never written",
     f"dlogit[plane] = total / SIX if {INSIDE} else ZERO",
     f"if {INSIDE}:\n                dlogit[plane] = total / SIX"),
    ("hard_gate_every_lane_writes", "written by more than one thread|race", "if lane == 0:",
     "if True:"),
    ("hard_gate_in_float64", "float64", "total = ZERO", "total = 0.0"))


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
