"""Lesson 12: a choice, leaks of float64, derivatives, the order of a tape, a walk, transfers.

Most wrong functions are the solution with one mistake in it, and `mistake` says which text stands
in place of which. The right ones are written out.
"""

import math

import numpy as np

from bank import right, wrong
from bank.equivalent import EQUIVALENT
from bank.mistakes import mistakes
from course_lib.autograd import Function
from course_lib.backend import get_array_module

# ---- choose_backend(use_cuda, missing, start_gpu, start_cpu) ---------------------------------


class NoChoice(Exception):
    """An exception of the learner's own."""


@right("choose_backend")
def choose_case_by_case(use_cuda, missing, start_gpu, start_cpu):
    if use_cuda is False:
        return start_cpu()
    if use_cuda is None:
        return start_gpu() if missing() is None else start_cpu()
    if use_cuda is True:
        reason = missing()
        if reason is not None:
            raise NoChoice("no GPU: " + reason)
        return start_gpu()
    raise NoChoice(f"{use_cuda} is neither of true, false and null")


@right("choose_backend")
def choose_and_explain_the_start(use_cuda, missing, start_gpu, start_cpu):
    if not isinstance(use_cuda, bool | type(None)):
        raise ValueError(f"true, false or null, not {use_cuda!r}")
    what = None if use_cuda is False else missing()
    if use_cuda is False or (use_cuda is None and what):
        return start_cpu()
    if what:
        raise RuntimeError(f"{what}, so use_cuda=True cannot be")
    try:
        return start_gpu()
    except OSError as error:
        raise RuntimeError("the GPU does not start; use_cuda=False takes the CPU") from error


REFUSE = 'raise RuntimeError(f"use_cuda is True, but {what}")'
mistakes("choose_backend",
    ("choose_falls_back_in_silence", "took the CPU without a word, although", REFUSE,
     "return start_cpu()"),
    ("choose_falls_back_with_a_warning", "took the CPU without a word, although", REFUSE,
     "what = print('no GPU') or what", "start_cpu() if what else start_gpu()",
     "start_gpu() if not what else start_cpu()"),
    ("choose_does_not_say_what", "does not say what is missing", REFUSE,
     'raise RuntimeError("there is no GPU here")'),
    ("choose_asserts", "does not say what is missing", REFUSE, "assert not what"),
    ("choose_believes_a_text", "'false' is neither True nor False",
     "use_cuda is not None and not isinstance(use_cuda, bool)", "use_cuda == 'maybe'"),
    # Then 0 is not `is False`, and would start the GPU.
    ("choose_believes_a_number", "use_cuda=0 is neither True.*: 0 equals False in Python",
     "use_cuda is not None and not isinstance(use_cuda, bool)",
     "use_cuda not in (None, True, False)"),
    ("choose_none_means_false", "it returned the CPU, and should have taken",
     "if use_cuda is False", "if not use_cuda"),
    ("choose_none_means_true", "RuntimeError", "if what and use_cuda", "if what"),
    ("choose_asks_first", "with use_cuda=False it called missing", "if use_cuda is False",
     "if missing() is not missing and use_cuda is False"),
    ("choose_never_asks", "start_gpu\\(\\) was called where there is no GPU", "what = missing()",
     "what = None"),
    ("choose_turned", "returned the CPU, and should have taken the GPU",
     "start_cpu() if what else start_gpu()", "start_gpu() if what else start_cpu()"),
    ("choose_returns_nothing", "which is no backend", "return start_cpu() if what else start_gpu()",
     "start_cpu() if what else start_gpu()"),
    ("choose_returns_a_name", "which is no backend", "return start_cpu() if what else start_gpu()",
     'return "cpu" if what else "cuda"'),
    ("choose_forgets_to_start", "function start_gpu itself",
     "return start_cpu() if what else start_gpu()", "return start_cpu if what else start_gpu"))


@wrong("choose_backend", "took the CPU without a word, although the GPU is there, but")
def choose_by_trying(use_cuda, missing, start_gpu, start_cpu):
    if use_cuda not in (None, True, False):
        raise ValueError(f"not {use_cuda!r}")
    if use_cuda is False:
        return start_cpu()
    if use_cuda and missing():
        raise RuntimeError(missing())
    try:
        return start_gpu()
    except Exception:
        return start_cpu()


@wrong("choose_backend", "was lost: it raised|does not say what is missing")
def choose_hides_the_reason(use_cuda, missing, start_gpu, start_cpu):
    if use_cuda not in (None, True, False):
        raise ValueError(f"not {use_cuda!r}")
    if use_cuda is False or (use_cuda is None and missing()):
        return start_cpu()
    backend = None
    try:
        backend = start_gpu() if not missing() else None
    except OSError:
        pass
    if backend is None:
        raise RuntimeError("CUDA cannot be used")
    return backend


# ---- weighted_error(images, labels, weight) --------------------------------------------------


@right("weighted_error")
def error_in_the_dtype_of_the_weight(images, labels, weight):
    dtype = weight.dtype
    n_classes = weight.shape[1]
    x = np.divide(images, 255, dtype=dtype)
    target = np.zeros((len(labels), n_classes), dtype)
    target[np.arange(len(labels)), labels] = 1
    share = target.sum(axis=0) / dtype.type(len(labels))
    return (x @ weight / np.sqrt(dtype.type(len(weight))) - target) * share


@right("weighted_error")
def error_by_scaling_the_weight(images, labels, weight):
    pixels = images.astype("float32")
    scores = pixels @ (weight * np.float32(1 / (255 * len(weight) ** 0.5)))
    is_class = np.equal.outer(labels, np.arange(weight.shape[1]))
    counts = np.count_nonzero(is_class, axis=0).astype(np.float32)
    return (scores - is_class) * (counts / len(labels))


X, SHARE = "images.astype(np.float32) / 255", "is_class.mean(axis=0, dtype=np.float32)"
mistakes("weighted_error",
    ("error_bytes_divided", r"Float64 in line 3, `x = .*uint8 gives float64", X, "images / 255"),
    ("error_cast_after_division", "Float64 in line 3.*uint8 gives float64", X,
     "(images / 255).astype(np.float32)"),
    ("error_mean_of_bools", "Float64 in line 5.*sum of bool is float64", SHARE,
     "is_class.mean(axis=0)"),
    ("error_root_by_numpy", "Float64 in line 8.*is a number of NumPy", "1 / math.sqrt(n_pixels)",
     "1 / np.sqrt(n_pixels)"),
    ("error_eye_without_dtype", "Float64 in line 7.*np.eye makes an array",
     "np.eye(n_classes, dtype=np.float32)", "np.eye(n_classes)"),
    ("error_cast_at_the_end", "Float64 in line 3", X, "images / 255",
     "return (x @ weight * scale - target) * share",
     "return ((x @ weight * scale - target) * share).astype(np.float32)"),
    ("error_in_float64_for_exactness", "Float64 in line 3.*turned into float64", X,
     "images.astype(np.float64) / 255"),
    ("error_as_float", "Float64 in line 3.*turned into float64", X, "images.astype(float) / 255"),
    ("error_counts_over_n", "Float64 in line 5.*int64 gives float64", SHARE,
     "is_class.sum(axis=0) / len(labels)"),
    ("error_labels_times_float", "Float64 in line 8.*float32 and int64 together",
     "- target) * share", "- target) * share * (labels[:, None] * 0 + np.int64(1))"),
    ("error_in_float16", "error is float16|wrong values|is float", X,
     "images.astype(np.float16) / 255", "(x @ weight", "(x @ weight.astype(np.float16)"),
    ("error_not_scaled", "wrong values in error", " * scale - ", " - "),
    ("error_pixels_not_scaled", "wrong values in error", ") / 255", ")"),
    ("error_scale_by_the_pixels", "wrong values in error", "1 / math.sqrt(n_pixels)",
     "1 / n_pixels"),
    ("error_not_weighted", "wrong values in error", "- target) * share", "- target)"),
    ("error_share_of_pictures", "error has shape|wrong values|broadcast", "mean(axis=0, dtype",
     "mean(axis=1, dtype"),
    ("error_returns_nothing", "it returned nothing", "return (x @", "_ = (x @"))


# ---- matmul_backward(dy, a, b) ---------------------------------------------------------------


@right("matmul_backward")
def matmul_through_the_namespace(dy, a, b):
    xp = get_array_module(dy)
    return xp.matmul(dy, xp.matrix_transpose(b)), xp.matmul(xp.matrix_transpose(a), dy)


@right("matmul_backward")
def matmul_transposed_twice(dy, a, b):
    da = (b @ dy.T).T
    db = (dy.T @ a).T
    return da, db


mistakes("matmul_backward",
    ("matmul_forgets_a_transpose", "matmul|wrong values in da", "dy @ b.T", "dy @ b"),
    ("matmul_forgets_the_other", "matmul|wrong values in db", "a.T @ dy", "a @ dy"),
    ("matmul_swaps_its_results", "has shape|wrong values in da", "return dy @ b.T, a.T @ dy",
     "return a.T @ dy, dy @ b.T"),
    ("matmul_as_if_by_element", "operands|wrong values|broadcast|has shape",
     "return dy @ b.T, a.T @ dy", "return dy * b, dy * a"),
    ("matmul_in_the_wrong_order", "matmul|has shape|wrong values in db", "a.T @ dy", "dy.T @ a"),
    ("matmul_wrong_sign", "wrong values in db", "a.T @ dy", "-a.T @ dy"),
    ("matmul_mean_over_the_batch", "wrong values in db", "a.T @ dy",
     "a.T @ dy / max(1, dy.shape[0])"),
    ("matmul_one_gradient", "should return 2 values, da, db; it returned one, of type ndarray",
     "return dy @ b.T, a.T @ dy", "return dy @ b.T"),
    ("matmul_ignores_dy", "wrong values|matmul|has shape", "return dy @ b.T, a.T @ dy",
     "return (dy * 0 + 1) @ b.T, a.T @ (dy * 0 + 1)"),
    ("matmul_by_numpy", "right with NumPy's arrays, but with another library's", "dy @ b.T",
     "np.matmul(dy, np.transpose(b))"),
    ("matmul_in_float64", "da is float64, and should be float32", "dy @ b.T",
     "dy @ b.T * np.float64(1)"))


# ---- summed_to(dy, shape) --------------------------------------------------------------------


@right("summed_to")
def summed_one_axis_after_another(dy, shape):
    while len(dy.shape) > len(shape):
        dy = dy.sum(0)
    for axis in range(len(shape)):
        if shape[axis] == 1:
            dy = dy.sum(axis, keepdims=True)
    return dy


@right("summed_to")
def summed_from_the_last_axis(dy, shape):
    xp = get_array_module(dy)
    padded = (1,) * (len(dy.shape) - len(shape)) + tuple(shape)
    for axis, (n, m) in enumerate(zip(dy.shape, padded, strict=True)):
        if n != m:
            dy = xp.sum(dy, axis=axis, keepdims=True)
    return xp.reshape(dy, tuple(shape))


SUM = "get_array_module(dy).sum(dy, axis=tuple(axes)).reshape(shape)"
mistakes("summed_to",
    ("summed_new_axes_only", "cannot reshape|shape", "if n == 1", "if n == 0"),
    ("summed_ones_only", "cannot reshape|shape|match", "list(range(new))", "[]"),
    ("summed_new_axes_at_the_end", "cannot reshape|wrong values|shape|out of bounds",
     "list(range(new))", "list(range(len(shape), len(dy.shape)))"),
    ("summed_axes_not_shifted", "cannot reshape|wrong values|index|duplicate|out of",
     "axes.append(new + i)", "axes.append(i)"),
    ("summed_looks_at_dy", "cannot reshape|wrong values|shape", "if n == 1",
     "if dy.shape[new + i] == 1"),
    ("summed_mean", "wrong values in dx", ".sum(dy", ".mean(dy"),
    ("summed_largest", "wrong values in dx|reduction|max", ".sum(dy", ".max(dy"),
    ("summed_everything", "cannot reshape|shape", "axis=tuple(axes)", "axis=None"),
    ("summed_first_of_them", "no part in the result", SUM,
     "dy[tuple(0 if i in axes else slice(None) for i in range(len(dy.shape)))].reshape(shape)"),
    ("summed_not_reshaped", "dx has shape", ".reshape(shape)", ""),
    ("summed_by_the_method", "with another library's", SUM,
     "dy.sum(axis=tuple(axes)).reshape(shape)"),
    ("summed_by_numpy", "with another library's", "get_array_module(dy)", "np"),
    ("summed_always_float32", "dy is float64, and dx is float32", "axis=tuple(axes))",
     "axis=tuple(axes), dtype=get_array_module(dy).float32)"),
    ("summed_in_float64", "dy is float32, and dx is float64", "axis=tuple(axes))",
     "axis=tuple(axes), dtype=get_array_module(dy).float64)"),
    ("summed_broadcast_again", "dx has shape", SUM, "(dy * 0 + 1) * " + SUM))


# ---- from_end_to_beginning(last) -------------------------------------------------------------


@right("from_end_to_beginning")
def order_with_a_stack(last):
    order, seen, stack = [], set(), [(last, False)]
    while stack:
        x, done = stack.pop()
        if done:
            order.insert(0, x)
        elif id(x) not in seen and x.requires_grad:
            seen.add(id(x))
            stack.append((x, True))
            stack.extend((y, False) for y in x.made_from)
    return order


@right("from_end_to_beginning")
def order_by_counting_users(last):
    # Kahn's: a tensor is due when all that were made from it have been.
    users, found = {}, [last]
    for x in found:
        for y in dict.fromkeys(x.made_from):
            if y.requires_grad:
                users[y] = users.get(y, 0) + 1
                if y not in found:
                    found.append(y)
    order, due = [], [last]
    while due:
        x = due.pop()
        order.append(x)
        for y in dict.fromkeys(x.made_from):
            if y.requires_grad:
                users[y] -= 1
                due += [y] * (users[y] == 0)
    return tuple(order)


VISIT = "x.requires_grad and x not in seen"
mistakes("from_end_to_beginning",
    ("order_before_its_inputs", "stands before", "            order.append(x)\n", "", "seen.add(x)",
     "seen.add(x)\n            order.append(x)", "order[::-1]", "order"),
    ("order_not_turned", "stands before", "order[::-1]", "order"),
    ("order_with_repeats", "in the order twice", VISIT, "x.requires_grad"),
    ("order_of_all", "needs no gradient: its requires_grad is False", VISIT, "x not in seen"),
    ("order_of_results_only", "is not in the order", VISIT,
     "x.made_from and x.requires_grad and x not in seen"),
    ("order_of_leaves_only", "is not in the order", "            order.append(x)",
     "            order.extend([] if x.made_from else [x])"),
    ("order_along_one_arm", "is not in the order", "in x.made_from:", "in x.made_from[:1]:"),
    ("order_without_the_last", "is not in the order", "visit(last)",
     "[visit(x) for x in last.made_from]"),
    ("order_of_functions", "and holds a function", "            order.append(x)",
     "            order.append(x.made_by)"),
    ("order_lost", "it returned nothing", "return order[::-1]", "order.reverse()"),
    ("order_never_marks", "in the order twice|did not end", "            seen.add(x)\n", ""))


@wrong("from_end_to_beginning", "stands before")
def order_by_breadth(last):
    # Nearest first, each when it is first met: right until an arm is longer than the other.
    order = [last]
    for x in order:
        order += [y for y in dict.fromkeys(x.made_from) if y.requires_grad and y not in order]
    return order


@wrong("from_end_to_beginning", "did not end|RecursionError|in the order twice")
def order_by_every_path(last):
    if not last.requires_grad:
        return []
    found = [last]
    for y in last.made_from:
        found += order_by_every_path(y)
    return [x for i, x in enumerate(found) if x not in found[i + 1 :]]


# ---- walk_back(order, dy) --------------------------------------------------------------------


@right("walk_back")
def walk_with_lists(order, dy):
    parts = {id(x): [] for x in order}
    parts[id(order[0])].append(dy)
    sums = {}
    for x in order:
        total = parts[id(x)][0]
        for part in parts[id(x)][1:]:
            total = total + part
        sums[id(x)] = total
        if x.made_by:
            gradients = x.made_by.backward(total)
            if len(x.made_from) == 1:
                gradients = [gradients]
            for y, part in zip(x.made_from, gradients, strict=True):
                if part is not None:
                    parts[id(y)].append(part)
    return sums


@right("walk_back")
def walk_with_zeros(order, dy):
    found = {id(x): np.zeros_like(dy) for x in order}
    found[id(order[0])] += dy
    for result in (x for x in order if x.made_from):
        gradients = result.made_by.backward(found[id(result)].copy())
        if isinstance(gradients, np.ndarray):
            gradients = (gradients,)
        for x, dx in zip(result.made_from, gradients, strict=True):
            if id(x) in found:
                found[id(x)] += dx  # in place, but in an array of its own
    return found


ADD = "found[id(x)] + dx if id(x) in found else dx"
mistakes("walk_back",
    ("walk_keeps_the_last", "wrong values in gradients|a part of dy", ADD, "dx"),
    ("walk_keeps_the_first", "wrong values in gradients", ADD,
     "found[id(x)] if id(x) in found else dx"),
    ("walk_adds_in_place", "was changed in place later", "found[id(x)] = " + ADD,
     "found[id(x)] = np.add(found[id(x)], dx, out=found[id(x)]) if id(x) in found else dx"),
    ("walk_from_the_beginning", "KeyError|is asked before the one", "for result in order",
     "for result in reversed(order)"),
    ("walk_begins_with_one", "wrong values in gradients|shape", "{id(order[0]): dy}",
     "{id(order[0]): np.ones_like(dy)}"),
    ("walk_always_passes_dy", "wrong values in gradients", "backward(found[id(result)])",
     "backward(dy)"),
    ("walk_ignores_requires_grad", "TypeError|which needs no gradient", "if x.requires_grad",
     "if True"),
    ("walk_asks_leaves", "NoneType", "if result.made_by is not None", "if True"),
    ("walk_by_tensor", "is not the id of any tensor|KeyError|there is no gradient",
     "found[id(x)] = " + ADD, "found[x] = found[x] + dx if x in found else dx"),
    ("walk_leaves_only", "there is no gradient of", "return found",
     "return {id(x): found[id(x)] for x in order if x.made_by is None}"),
    ("walk_wants_a_tuple", "zip|iter",
     "gradients if isinstance(gradients, tuple) else (gradients,)", "gradients"),
    ("walk_returns_nothing", "it returned nothing", "    return found\n", ""),
    ("walk_returns_a_list", "it should return a dict", "return found",
     "return list(found.values())"),
    ("walk_multiplies", "wrong values in gradients|gradients", ADD,
     "found[id(x)] * dx if id(x) in found else dx"),
    ("walk_stops_after_one", "there is no gradient of|wrong values", "    return found",
     "            break\n    return found"))


@wrong("walk_back", "is asked a second time")
def walk_along_every_path(order, dy):
    found = {}

    def go(x, dx):
        found[id(x)] = found[id(x)] + dx if id(x) in found else dx
        if x.made_by is not None:
            gradients = x.made_by.backward(dx)
            gradients = gradients if isinstance(gradients, tuple) else (gradients,)
            for y, part in zip(x.made_from, gradients, strict=True):
                if y.requires_grad:
                    go(y, part)

    go(order[0], dy)
    return found


mistakes("walk_back",
    ("walk_doubles_what_it_got", "was changed in place later",
     "found[id(x)] = found[id(x)] + dx if id(x) in found else", "if id(x) in found:\n"
     "                        found[id(x)] += dx\n"
     "                    else:\n"
     "                        found[id(x)] ="))


# ---- on_the_tape(launch_forward, launch_backward) --------------------------------------------


@right("on_the_tape")
def tape_with_a_constructor(launch_forward, launch_backward):
    class Softmax(Function):
        def __init__(self, forward, backward):
            self.launches = forward, backward

        def forward(self, *arrays):
            self.saved = self.launches[0](*arrays)
            return self.saved

        def backward(self, dy):
            return (self.launches[1](dy, self.saved),)

    return Softmax(launch_forward, launch_backward)


@right("on_the_tape")
def tape_with_a_dict(launch_forward, launch_backward):
    class Own(Function):
        def forward(self, x):
            y = launch_forward(x)
            self.kept = {"y": y}
            return y

        def backward(self, dy):
            dx = launch_backward(dy, self.kept["y"])
            return dx

    return Own()


FORWARD, BACK = "self.y = launch_forward(x)", "return launch_backward(dy, self.y)"
mistakes("on_the_tape",
    ("tape_keeps_the_input", "wrong values in dx", FORWARD,
     "self.x = x\n            self.y = launch_forward(x)", BACK,
     "return launch_backward(dy, self.x)"),
    ("tape_keeps_it_in_the_class", "the y of another call", FORWARD,
     "Own.kept = self.y = launch_forward(x)", BACK, "return launch_backward(dy, Own.kept)"),
    ("tape_keeps_a_stack", "the y of another call", "    class Own",
     "    kept = []\n\n    class Own", FORWARD,
     "self.y = launch_forward(x)\n            kept.append(self.y)", BACK,
     "return launch_backward(dy, kept.pop())"),
    ("tape_keeps_a_queue", "the y of another call", "    class Own",
     "    kept = []\n\n    class Own", FORWARD,
     "self.y = launch_forward(x)\n            kept.append(self.y)", BACK,
     "return launch_backward(dy, kept.pop(0))"),
    ("tape_keeps_one_dict_for_all", "the y of another call", "        def forward",
     "        kept = {}  # a copy of the function shares it\n\n        def forward", FORWARD,
     "self.kept['y'] = self.y = launch_forward(x)", BACK,
     "return launch_backward(dy, self.kept['y'])"),
    ("tape_computes_again", "launch_forward was called 5 times", FORWARD, "self.x = x",
     "return self.y", "return launch_forward(x)", BACK,
     "return launch_backward(dy, launch_forward(self.x))"),
    ("tape_computes_twice", "launch_forward was called 6 times", FORWARD,
     "launch_forward(x)\n            self.y = launch_forward(x)"),
    ("tape_swaps_the_arguments", "wrong values in dx", "launch_backward(dy, self.y)",
     "launch_backward(self.y, dy)"),
    ("tape_forgets_dy", "launch_backward takes dy, y; it got 1", "launch_backward(dy, self.y)",
     "launch_backward(self.y)"),
    ("tape_returns_the_class", "it returned the class", "Own()", "Own"),
    ("tape_returns_nothing", "should return a Function, and returned nothing", "return Own()",
     "Own()"),
    ("tape_forward_returns_nothing", "forward should return an array",
     "            return self.y\n", ""),
    ("tape_backward_returns_nothing", "backward returned nothing", BACK,
     "launch_backward(dy, self.y)"),
    ("tape_backward_is_the_forward", "wrong values in dx|was called", BACK,
     "return launch_forward(dy)"),
    ("tape_is_no_function", "should return a Function", "class Own(Function)", "class Own"),
    ("tape_returns_the_launcher", "should return a Function", "return Own()",
     "return launch_forward"),
    ("tape_changes_y_in_place", "changed in place on the way back", BACK,
     "dx = launch_backward(dy, self.y)\n            self.y *= 0\n            return dx"),
    ("tape_changes_x_in_place", "changes its input in place", FORWARD,
     "self.y = launch_forward(x)\n            x -= 1"))


# ---- predict_transfers(n_batches, n_bytes, gbps, compute_ms) ---------------------------------


@right("predict_transfers")
def transfers_batch_by_batch(n_batches, n_bytes, gbps, compute_ms):
    copy_ms = 1e3 * n_bytes / (gbps * 1e9)
    there = done = 0.0
    for _ in range(n_batches):
        there += copy_ms
        done = max(there, done) + compute_ms
    return math.fsum([copy_ms, compute_ms] * n_batches), done


@right("predict_transfers")
def transfers_by_what_is_hidden(n_batches, n_bytes, gbps, compute_ms):
    copy_ms = n_bytes / gbps / 1e6
    one_by_one = n_batches * (copy_ms + compute_ms)
    hidden = (n_batches - 1) * min(copy_ms, compute_ms)
    return one_by_one, one_by_one - hidden


BOTH = "copy_ms + (n_batches - 1) * max(copy_ms, compute_ms) + compute_ms"
mistakes("predict_transfers",
    ("transfers_in_seconds", "wrong values in one_by_one_ms", "(gbps * 1e6)", "(gbps * 1e9)"),
    ("transfers_in_bits", "wrong values in one_by_one_ms", "n_bytes / (gbps",
     "8 * n_bytes / (gbps"),
    ("transfers_turned", "wrong values in one_by_one_ms|ZeroDivision", "n_bytes / (gbps * 1e6)",
     "gbps * 1e6 / max(1, n_bytes)"),
    ("transfers_nothing_alone", "wrong values in overlapped_ms", BOTH,
     "n_batches * max(copy_ms, compute_ms)"),
    ("transfers_last_not_computed", "wrong values in overlapped_ms", BOTH,
     "copy_ms + n_batches * max(copy_ms, compute_ms)"),
    ("transfers_first_not_copied", "wrong values in overlapped_ms", BOTH,
     "n_batches * max(copy_ms, compute_ms) + compute_ms"),
    ("transfers_shorter_one", "wrong values in overlapped_ms", "max(copy_ms, compute_ms)",
     "min(copy_ms, compute_ms)"),
    ("transfers_always_hidden", "wrong values in overlapped_ms", BOTH,
     "copy_ms + n_batches * compute_ms"),
    ("transfers_one_copy", "wrong values in one_by_one_ms", "n_batches * (copy_ms + compute_ms)",
     "copy_ms + n_batches * compute_ms"),
    ("transfers_the_saving", "wrong values in overlapped_ms", "return one_by_one, overlapped",
     "return one_by_one, one_by_one - overlapped"),
    ("transfers_half", "wrong values in overlapped_ms", BOTH, "one_by_one / 2"),
    ("transfers_one_number", "it returned one, of type float", "return one_by_one, overlapped",
     "return overlapped"))


EQUIVALENT.update({})
