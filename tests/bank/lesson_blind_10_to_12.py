"""Wrong answers of lessons 10 to 12 by somebody who knew no more than the lessons."""

import numpy as np

from bank import wrong
from course_lib import cuda

ZERO = np.float32(0)
ONE = np.float32(1)

# ---- channel_moments -----------------------------------------------------------------------------


@wrong("channel_moments", "wrong values in variance")
@cuda.jit
def moments_old_mean_twice(x, mean, variance):
    counts = cuda.shared.array(256, np.float32)
    means = cuda.shared.array(256, np.float32)
    spreads = cuda.shared.array(256, np.float32)
    N, _, P = x.shape
    c, t, width = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    count, middle, spread = ZERO, ZERO, ZERO
    i = t
    while i < N * P:
        away = x[i // P, c, i % P] - middle
        count += ONE
        middle += away / count
        spread += away * away
        i += width
    counts[t] = count
    means[t] = middle
    spreads[t] = spread
    half = width
    while half > 1:
        cuda.syncthreads()
        half //= 2
        if t < half and counts[t + half] > ZERO:
            a, b = counts[t], counts[t + half]
            gap = means[t + half] - means[t]
            spreads[t] += spreads[t + half] + gap * gap * (a * b / (a + b))
            means[t] += gap * (b / (a + b))
            counts[t] = a + b
    cuda.syncthreads()
    if t == 0:
        mean[c] = means[0]
        variance[c] = spreads[0] / counts[0]


@cuda.jit(device=True)
def merged(na, ma, sa, nb, mb, sb):
    gap = mb - ma
    part = nb / (na + nb)
    return na + nb, ma + gap * part, sa + sb + gap * gap * na * part


@wrong("channel_moments", "0 is divided by 0|without one part of an `and`; line")
@cuda.jit
def moments_of_nothing(x, mean, variance):
    counts = cuda.shared.array(256, np.float32)
    means = cuda.shared.array(256, np.float32)
    squares = cuda.shared.array(256, np.float32)
    c, t = cuda.blockIdx.x, cuda.threadIdx.x
    n, m, m2 = ZERO, ZERO, ZERO
    for i in range(t, x.shape[0] * x.shape[2], cuda.blockDim.x):
        value = x[i // x.shape[2], c, i % x.shape[2]]
        n += ONE
        new = m + (value - m) / n
        m2 += (value - m) * (value - new)
        m = new
    counts[t], means[t], squares[t] = n, m, m2
    cuda.syncthreads()
    step = cuda.blockDim.x // 2
    while step > 0:
        if t < step:
            n, m, m2 = merged(
                counts[t],
                means[t],
                squares[t],
                counts[t + step],
                means[t + step],
                squares[t + step],
            )
            counts[t], means[t], squares[t] = n, m, m2
        cuda.syncthreads()
        step //= 2
    if t == 0:
        mean[c], variance[c] = m, m2 / n


@wrong("channel_moments", "wrong values in variance")
@cuda.jit
def moments_lost_gap(x, mean, variance):
    board = cuda.shared.array((3, 256), np.float32)  # counts, means, sums of squares
    c, t, P = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[2]
    board[0, t], board[1, t], board[2, t] = ZERO, ZERO, ZERO
    for i in range(t, x.shape[0] * P, cuda.blockDim.x):
        n = i // P
        value = x[n, c, i - n * P]
        delta = value - board[1, t]
        board[0, t] += ONE
        board[1, t] += delta / board[0, t]
        board[2, t] += delta * (value - board[1, t])
    cuda.syncthreads()
    step = cuda.blockDim.x >> 1
    while step > 0:
        other = t + step
        if t < step and board[0, other] > ZERO:
            n_both = board[0, t] + board[0, other]
            shift = (board[1, other] - board[1, t]) * board[0, other] / n_both
            board[2, t] = board[2, t] + board[2, other]
            board[1, t] += shift
            board[0, t] = n_both
        cuda.syncthreads()
        step >>= 1
    if t == 0:
        mean[c] = board[1, 0]
        variance[c] = board[2, 0] / board[0, 0]


# ---- max_pool_backward ---------------------------------------------------------------------------


@wrong("max_pool_backward", "without the 1 that is added; line .*`last_row = ")
@cuda.jit
def max_last_window_left_out(dy, at, k, stride, dx):
    me = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if me >= dx.size:
        return
    H, W = dx.shape[1:]
    OH, OW = dy.shape[1:]
    plane, place = me // (H * W), me % (H * W)
    h, w = place // W, place % W
    first_row = max(0, (h - k) // stride + 1)
    last_row = min(OH, h // stride)
    first_col = max(0, (w - k) // stride + 1)
    last_col = min(OW, w // stride + 1)
    found = ZERO
    for oh in range(first_row, last_row):
        for ow in range(first_col, last_col):
            found += dy[plane, oh, ow] if at[plane, oh, ow] == place else ZERO
    dx[plane, h, w] = found


@wrong("max_pool_backward", "with one size in place of another; line .*`own = h")
@cuda.jit
def max_place_by_h(dy, at, k, stride, dx):
    H, W = dx.shape[1], dx.shape[2]
    for i in range(cuda.grid(1), dx.size, cuda.gridsize(1)):
        w, rest = i % W, i // W
        h, plane = rest % H, rest // H
        own = h * H + w
        total = ZERO
        oh = max(0, (h - k) // stride + 1)
        while oh < dy.shape[1] and oh * stride <= h:
            ow = max(0, (w - k) // stride + 1)
            while ow < dy.shape[2] and ow * stride <= w:
                if at[plane, oh, ow] == own:
                    total += dy[plane, oh, ow]
                ow += 1
            oh += 1
        dx[plane, h, w] = total


@cuda.jit(device=True)
def asked(dy, at, k, stride, plane, h, w, W):
    for oh in range(max(0, (h - k) // stride + 1), min(dy.shape[1], h // stride + 1)):
        for ow in range(max(0, (w - k) // stride + 1), min(dy.shape[2], w // stride + 1)):
            if at[plane, oh, ow] == h * W + w:
                return dy[plane, oh, ow]
    return ZERO


@wrong("max_pool_backward", "has no part in the result|wrong values in dx")
@cuda.jit
def max_ends_at_the_first(dy, at, k, stride, dx):
    i = cuda.grid(1)
    if i < dx.size:
        H, W = dx.shape[1:]
        plane, h, w = i // (H * W), i // W % H, i % W
        dx[plane, h, w] = asked(dy, at, k, stride, plane, h, w, W)


# ---- confusion -----------------------------------------------------------------------------------


@cuda.jit(device=True)
def answer_of(logits, i):
    best, top = 0, logits[i, 0]
    for k in range(1, logits.shape[1]):
        score = logits[i, k]
        if score >= top:
            best, top = k, score
    return best


@wrong("confusion", "with `>=` in place of `>`; line .* of answer_of, `if score >= top:`")
@cuda.jit
def confusion_last_of_equals(logits, labels, counts):
    i = cuda.grid(1)
    while i < labels.size:
        cuda.atomic.add(counts, (labels[i], answer_of(logits, i)), 1)
        i += cuda.gridsize(1)


@wrong("confusion", "race.* in line .*`counts.truth, answer. [+]= 1`")
@cuda.jit
def confusion_no_atomic(logits, labels, counts):
    first, step = cuda.grid(1), cuda.gridsize(1)
    for i in range(first, labels.size, step):
        truth, answer = labels[i], 0
        k = 1
        while k < logits.shape[1]:
            if logits[i, k] > logits[i, answer]:
                answer = k
            k += 1
        counts[truth, answer] += 1


@wrong("confusion", r"in place of `\(labels\[i\], best\)`; line .*`cell = ")
@cuda.jit
def confusion_turned(logits, labels, counts):
    n_classes = logits.shape[1]
    for i in range(cuda.grid(1), labels.size, cuda.gridsize(1)):
        best = n_classes - 1
        for back in range(1, n_classes):
            k = n_classes - 1 - back
            if logits[i, k] >= logits[i, best]:
                best = k
        cell = (best, labels[i])
        cuda.atomic.add(counts, cell, 1)


# ---- choose_backend ------------------------------------------------------------------------------


@wrong("choose_backend", "0 equals False in Python, and is not the same thing")
def backend_by_equality(use_cuda, missing, start_gpu, start_cpu):
    if use_cuda not in (True, False, None):
        raise ValueError(f"use_cuda must be True, False or None, not {use_cuda!r}")
    if use_cuda is None:
        return start_gpu() if missing() is None else start_cpu()
    if not use_cuda:
        return start_cpu()
    sentence = missing()
    if sentence is not None:
        raise RuntimeError(f"no GPU can be used: {sentence}")
    return start_gpu()


@wrong("choose_backend", r"with use_cuda=False it called missing\(\)")
def backend_asks_first(use_cuda, missing, start_gpu, start_cpu):
    allowed = use_cuda is None or use_cuda is True or use_cuda is False
    if not allowed:
        raise ValueError(f"use_cuda must be True, False or None, not {use_cuda!r}")
    reason = missing()
    if use_cuda is True:
        if reason:
            raise RuntimeError("use_cuda is True, but there is no GPU: " + reason)
        return start_gpu()
    if use_cuda is None and not reason:
        return start_gpu()
    return start_cpu()


@wrong("choose_backend", r"although the GPU is there, but(?![\s\S]*one number)")
def backend_hides_the_error(use_cuda, missing, start_gpu, start_cpu):
    match use_cuda:
        case False:
            return start_cpu()
        case True:
            if (sentence := missing()) is not None:
                raise RuntimeError(sentence)
            return start_gpu()
        case None:
            if missing() is not None:
                return start_cpu()
            try:
                return start_gpu()
            except Exception:
                return start_cpu()
        case _:
            raise ValueError(f"use_cuda must be True, False or None, not {use_cuda!r}")


# ---- walk_back -----------------------------------------------------------------------------------


@wrong("walk_back", r"was changed in place later[\s\S]*in place of line .*`found.key. [+]= share`")
def walk_adds_in_place(order, dy):
    found = {}
    found[id(order[0])] = dy
    for tensor in order:
        if tensor.made_by is None:
            continue
        shares = tensor.made_by.backward(found[id(tensor)])
        if not isinstance(shares, tuple):
            shares = (shares,)
        for source, share in zip(tensor.made_from, shares, strict=True):
            if not source.requires_grad:
                continue
            key = id(source)
            if key in found:
                found[key] += share
            else:
                found[key] = share
    return found


@wrong("walk_back", "wrong values in gradients")
def walk_keeps_the_last(order, dy):
    gradient_of = {id(order[0]): dy}
    for y in order:
        function = y.made_by
        if function is not None:
            parts = function.backward(gradient_of[id(y)])
            parts = parts if isinstance(parts, tuple) else (parts,)
            for k in range(len(parts)):
                x = y.made_from[k]
                if x.requires_grad:
                    gradient_of[id(x)] = parts[k]
    return gradient_of


@wrong("walk_back", "is asked a second time")
def walk_asks_again(order, dy):
    found = {id(order[0]): dy}
    for result in order:
        if result.made_by is None:
            continue
        for k, x in enumerate(result.made_from):
            if not x.requires_grad:
                continue
            answer = result.made_by.backward(found[id(result)])
            dx = answer[k] if isinstance(answer, tuple) else answer
            before = found.get(id(x))
            found[id(x)] = dx if before is None else before + dx
    return found
