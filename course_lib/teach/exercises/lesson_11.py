"""Lesson 11: what a whole network needs beside its layers.

| exercise | it gets | what is new |
|---|---|---|
| pick_batch | images, labels, order, first, x, y; a block per image | bytes become a batch |
| pool_relu | x of (planes, H, W), y of half the size; any launch | two layers in one kernel |
| linear_relu | x of (M, I), weight of (O, I), bias, y; a warp per result | dense and activation |
| pool_relu_backward | dy, x, y, k, dx; any launch | two layers back, and the first of equals |
| backward_chain | dlogits, kept, weights, back | the whole network backwards |
| sgd_nesterov | p, g, v, rate, momentum, decay, new_p, new_v; any launch | the step of the recipe |
| confusion | logits of (N, classes), labels, counts, all 0; any launch | whom is taken for whom |

Arrays are float32 but for images (uint8), labels and order (int64) and counts (int32).
`backward_chain` starts no kernels itself: the check gives it gradients of layers made with NumPy.
"""

from types import SimpleNamespace

import numpy as np

from course_lib import cuda, reference
from course_lib.runtime.intrinsics import warp_sum
from course_lib.teach.checking.cases import drawn, extremes, numbers
from course_lib.teach.checking.work import Spares
from course_lib.teach.exercise import EXACT, Exercise, Tolerance, case

ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)
SCALE = np.float32(1 / 127.5)


# ---- pick_batch ------------------------------------------------------------------------------


@cuda.jit
def pick_batch(images, labels, order, first, x, y):
    row = order[first + cuda.blockIdx.x]
    for i in range(cuda.threadIdx.x, images.shape[1], cuda.blockDim.x):
        x[cuda.blockIdx.x, i] = np.float32(images[row, i]) * SCALE - ONE
    if cuda.threadIdx.x == 0:
        y[cuda.blockIdx.x] = labels[row]


def _pick_reference(images, labels, order, first, batch):
    rows = order[int(first) : int(first) + int(batch)] % len(images)
    return images[rows] / 127.5 - 1, labels[rows]


def _pick_cases(rng):
    sizes = [
        (1, 1, 1, 0, 32),
        (3, 0, 2, 1, 32),
        (4, 5, 2, 1, 32),
        (6, 3, 3, 3, 64),
        (9, 33, 4, 2, 32),
        (5, 40, 2, 3, 64),
        (7, 50, 1, 6, 16),
        (12, 70, 5, 7, 33),
        (drawn(rng, 1030, 1060), 3, 2, drawn(rng, 1025, 1027), 32),
        (drawn(rng, 17, 25), drawn(rng, 1030, 1200), drawn(rng, 3, 4), drawn(rng, 8, 12), 256),
    ]
    return [
        case(
            batch, block, images=rng.integers(0, 256, (n, pixels)).astype(np.uint8),
            labels=rng.integers(0, 1000, n), order=rng.permutation(n), first=np.int64(first),
            batch=np.int64(batch),
        )
        for n, pixels, batch, first, block in sizes
    ]  # fmt: skip


PICK_BATCH = Exercise(
    name="pick_batch",
    title="A batch from the heap of pictures",
    solution=pick_batch,
    reference=_pick_reference,
    cases=_pick_cases,
    tolerance=Tolerance(0.0, 2e-7, "a product and a difference in float32"),
    outputs=("x", "y"),
    dtype={"x": np.float32, "y": np.int64},
    call=lambda kernel, run: run.launch(
        kernel, run.images, run.labels, run.order, run.first, run.x, run.y
    ),
    once=True,
    forbids=("float64-promotion",),
    hints=(
        "Block b makes picture b of the batch. Which number of `order` tells it where that lies?",
        "The picture is row `order[first + blockIdx.x]` of images. Its pixels are shared by the "
        "threads; each is a byte, and becomes `np.float32(byte) * SCALE - ONE`. One thread "
        "copies the label.",
        "```python\nrow = order[first + cuda.blockIdx.x]\n"
        "for i in range(cuda.threadIdx.x, images.shape[1], ...):\n"
        "    x[cuda.blockIdx.x, i] = np.float32(images[row, i]) * ...\n```",
    ),
)


# ---- pool_relu -------------------------------------------------------------------------------


@cuda.jit
def pool_relu(x, y):
    OH, OW = y.shape[1:]
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        plane, h, w = i // (OH * OW), 2 * (i // OW % OH), 2 * (i % OW)
        upper = max(x[plane, h, w], x[plane, h, w + 1])
        lower = max(x[plane, h + 1, w], x[plane, h + 1, w + 1])
        y[plane, i // OW % OH, i % OW] = max(max(upper, lower), ZERO)


def _pool_relu_reference(x):
    n, H, W = x.shape
    parts = x[:, : H // 2 * 2, : W // 2 * 2].reshape(n, H // 2, 2, W // 2, 2)
    return np.maximum(parts.max(axis=(2, 4)), 0)


def _pool_relu_cases(rng):
    launches = [
        ((1, 2, 2), 1, 32),
        ((0, 4, 2), 1, 32),
        ((1, 3, 2), 1, 32),
        ((2, 2, 5), 2, 1),
        ((3, 4, 4), 1, 32),
        ((2, 5, 7), 2, 4),
        ((2, 11, 6), 1, 33),
        ((4, 6, 8), 2, 32),
        ((9, drawn(rng, 22, 24), drawn(rng, 24, 27)), 1, 288),
    ]
    return [
        case(grid, block, x=extremes(rng, numbers(rng, shape, *((1.0, -0.7), (1e-6, 0.0))[k % 2])))
        for k, (shape, grid, block) in enumerate(launches)
    ]


POOL_RELU = Exercise(
    name="pool_relu",
    title="Max pooling and ReLU in one kernel",
    solution=pool_relu,
    reference=_pool_relu_reference,
    cases=_pool_relu_cases,
    tolerance=EXACT,
    once=True,
    forbids=("float64-promotion",),
    hints=(
        "The largest of four numbers, and of 0. Which four belong to output i?",
        "Output i is in plane `i // (OH * OW)`, row `i // OW % OH`, column `i % OW`. Its window "
        "begins at twice that row and twice that column of x.",
        "```python\nh, w = 2 * (i // OW % OH), 2 * (i % OW)\n"
        "upper = max(x[plane, h, w], x[plane, h, w + 1])\nlower = ...\n```",
    ),
)


# ---- linear_relu -----------------------------------------------------------------------------


@cuda.jit
def linear_relu(x, weight, bias, y):
    warp, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    n_out, total = y.shape[1], ZERO
    if warp < y.size:
        for k in range(lane, x.shape[1], 32):
            total += x[warp // n_out, k] * weight[warp % n_out, k]
        total = warp_sum(total) + bias[warp % n_out]
        if lane == 0:
            y[warp // n_out, warp % n_out] = max(total, ZERO)


def _linear_cases(rng):
    launches = [
        ((1, 1, 1), 1, 32),
        ((1, 2, 3), 2, 64),
        ((2, 0, 2), 2, 64),
        ((2, 3, 2), 3, 64),
        ((3, 33, 2), 2, 128),
        ((1, 70, 5), 3, 96),
        ((2, 8, 1), 1, 64),
        ((4, 40, 3), 4, 96),
        ((1, 2, drawn(rng, 33, 39)), 5, 256),
        ((drawn(rng, 3, 4), drawn(rng, 260, 290), 5), 2, 480),
    ]
    return [
        case(grid, block, x=numbers(rng, (m, i), 1.0, 0.5), weight=numbers(rng, (o, i), 0.4, 0.2),
             bias=numbers(rng, o, 1.0))
        for (m, i, o), grid, block in launches
    ]  # fmt: skip


LINEAR_RELU = Exercise(
    name="linear_relu",
    title="A dense layer with its ReLU",
    solution=linear_relu,
    reference=lambda x, weight, bias: np.maximum(x @ weight.T + bias, 0),
    cases=_linear_cases,
    tolerance=Tolerance(1e-6, 2e-5, "float32 rounds sums of up to 290 products"),
    once=True,
    about=(Spares("x"), Spares("weight")),
    forbids=("float64-promotion",),
    hints=(
        "A warp has one result: row `warp // n_out`, column `warp % n_out`. Its 32 lanes share a "
        "sum of products. You know from lesson 2 how they add up what they have.",
        "Lane k takes products k, k + 32, … of row `warp // n_out` of x and row `warp % n_out` of "
        "weight. `warp_sum` gives all lanes the sum. Add the bias, then take the larger of that "
        "and 0; one lane writes.",
        "```python\nfor k in range(lane, x.shape[1], 32):\n    total += x[warp // n_out, k] * ...\n"
        "total = warp_sum(total) + ...\nif lane == 0:\n    y[...] = max(..., ZERO)\n```",
    ),
)


# ---- pool_relu_backward ----------------------------------------------------------------------


@cuda.jit
def pool_relu_backward(dy, x, y, k, dx):
    H, W = x.shape[1:]
    for i in range(cuda.grid(1), dx.size, cuda.gridsize(1)):
        plane, h, w = i // (H * W), i // W % H, i % W
        p, q, gradient = h // k, w // k, ZERO
        if p < y.shape[1] and q < y.shape[2] and y[plane, p, q] > ZERO:
            first = k * k
            for j in range(k * k - 1, -1, -1):
                if x[plane, p * k + j // k, q * k + j % k] == y[plane, p, q]:
                    first = j
            if first == h % k * k + w % k:
                gradient = dy[plane, p, q]
        dx[plane, h, w] = gradient


def _pooled(x, k):
    """Return the largest of each window, or 0, and where it was."""
    y, at = reference.max_pool2d(x[None], k)
    return np.maximum(y, 0)[0], at[0]


def _pool_relu_inputs(rng, shape, k):
    """Return dy, x and y. A window's maximum stands there twice, another one is exactly 0."""
    n, H, W = shape
    x = numbers(rng, shape, 1.0, 0.9)
    windows = [
        (plane, slice(p * k, p * k + k), slice(q * k, q * k + k))
        for plane, p, q in np.ndindex(n, H // k, W // k)
    ]
    for window in windows:  # a network's outputs are 0 half the time; here, few may be equal
        x[window] += max(0, ONE + rng.random(dtype=np.float32) - x[window].max())
    if len(windows) > 2:
        x[windows[1]] -= x[windows[1]].max()
        x[windows[-1]] -= x[windows[-1]].max() + ONE
    if windows and k > 1:
        x[windows[0]][-1, 0] = x[windows[0]][0, 1] = x[windows[0]].max() + ONE
    y = _pooled(x, k)[0].astype(np.float32)
    return {"dy": numbers(rng, y.shape, 1.0, 2.0), "x": x, "y": y, "k": np.int64(k)}


def _pool_relu_gradient(dy, x, y, k):
    if x.size == 0:
        return np.zeros_like(x)
    at = _pooled(x, int(k))[1]
    return reference.max_pool2d_backward((dy * (y > 0))[None], at[None], x[None].shape)[0]


def _pool_relu_backward_cases(rng):
    launches = [
        ((1, 1, 1), 1, 1, 32),
        ((1, 2, 2), 2, 1, 32),
        ((0, 4, 2), 2, 1, 32),
        ((1, 3, 2), 2, 2, 1),
        ((2, 2, 3), 1, 1, 32),
        ((2, 4, 4), 2, 1, 32),
        ((2, 5, 7), 2, 2, 16),
        ((1, 7, 8), 3, 1, 33),
        ((3, 4, 6), 2, 2, 32),
        ((4, 3, 5), 1, 3, 32),
        ((1, 9, 11), drawn(rng, 2, 5), 1, 48),
        ((1, 7, 13), 6, 1, 32),
        ((6, drawn(rng, 10, 12), drawn(rng, 18, 19)), drawn(rng, 2, 3), 1, 288),
    ]
    return [
        case(grid, block, **_pool_relu_inputs(rng, shape, k)) for shape, k, grid, block in launches
    ]


POOL_RELU_BACKWARD = Exercise(
    name="pool_relu_backward",
    title="Back through ReLU and pooling at once",
    solution=pool_relu_backward,
    reference=_pool_relu_gradient,
    cases=_pool_relu_backward_cases,
    tolerance=EXACT,
    outputs=("dx",),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(kernel, run.dy, run.x, run.y, run.k, run.dx),
    once=True,
    forbids=("float64-promotion",),
    hints=(
        "A thread has one element of x. Which window does it lie in, is there such a window, and "
        "has the window's result come from this element?",
        "The window is (h // k, w // k), if y has that row and column. If its y is 0, nothing goes "
        "back. Else its `dy` goes to the first of its elements that equals y, row by row. Walk "
        "through the k · k places from the last one to the first: the last hit is the first place.",
        "```python\nfor j in range(k * k - 1, -1, -1):\n"
        "    if x[plane, p * k + j // k, q * k + j % k] == ...:\n        first = j\n"
        "if first == h % k * k + ...:\n    gradient = ...\n```",
    ),
)


# ---- backward_chain --------------------------------------------------------------------------


def backward_chain(dlogits, kept, weights, back):
    x, a, c, d, e, g = kept
    conv1, conv2, fc1, fc2 = weights
    dg, *d_fc2 = back.linear(dlogits, g, fc2)
    de, *d_fc1 = back.linear(back.relu(dg, g), e.reshape(len(e), -1), fc1)
    dd = back.pool_relu(de.reshape(e.shape), d, e)
    dc, *d_conv2 = back.conv(dd, c, conv2)
    da = back.pool_relu(dc, a, c)
    _, *d_conv1 = back.conv(da, x, conv1, needs_dx=False)
    return *d_conv1, *d_conv2, *d_fc1, *d_fc2


_LAYERS = ("conv1", "conv2", "fc1", "fc2")
_PARAMETERS = tuple(f"{layer}_{kind}" for layer in _LAYERS for kind in ("weight", "bias"))


def _logits(x, conv1, bias1, conv2, bias2, fc1, bias3, fc2, bias4):
    """Return the logits, and what the backward pass needs of the way there."""
    a = reference.conv2d(x, conv1, bias1)
    c = np.maximum(reference.max_pool2d(a, 2)[0], 0)
    d = reference.conv2d(c, conv2, bias2)
    e = np.maximum(reference.max_pool2d(d, 2)[0], 0)
    g = reference.linear(e.reshape(len(e), -1), fc1, bias3, activation="relu")
    return reference.linear(g, fc2, bias4), (x, a, c, d, e, g)


def _chain_reference(dlogits, x, *parameters):
    conv1, _, conv2, _, fc1, _, fc2, _ = parameters
    _, (x, a, c, d, e, g) = _logits(x, *parameters)
    dg, *d_fc2 = reference.linear_backward(dlogits, g, fc2)
    de, *d_fc1 = reference.linear_backward(dg * (g > 0), e.reshape(len(e), -1), fc1)
    dc, *d_conv2 = reference.conv2d_backward(_unpooled(de.reshape(e.shape), d, e), c, conv2)
    _, *d_conv1 = reference.conv2d_backward(_unpooled(dc, a, c), x, conv1)
    return *d_conv1, *d_conv2, *d_fc1, *d_fc2


def _unpooled(dy, x, y):
    return reference.max_pool2d_backward(dy * (y > 0), reference.max_pool2d(x, 2)[1], x.shape)


def _require(name, **shapes):
    """Raise ValueError unless both of two arrays have one shape."""
    (one, first), (other, second) = shapes.items()
    if first != second:
        raise ValueError(
            f"back.{name}: {one} has shape {first} and {other} {second}, which must be the same"
        )


def _conv_back(dy, x, weight, needs_dx=True):
    sizes = [n - taps + 1 for n, taps in zip(x.shape[2:], weight.shape[2:], strict=True)]
    _require("conv", dy=dy.shape, the_result=(len(x), len(weight), *sizes))
    dx, dweight, dbias = reference.conv2d_backward(dy, x, weight)
    return dx if needs_dx else None, dweight, dbias


def _linear_back(dy, x, weight):
    _require("linear", dy=dy.shape, the_result=(len(x), len(weight)))
    _require("linear", x=x.shape, the_input=(len(x), weight.shape[1]))
    return reference.linear_backward(dy, x, weight)


def _relu_back(dy, y):
    _require("relu", dy=dy.shape, y=y.shape)
    return dy * (y > 0)


def _pool_back(dy, x, y):
    _require("pool_relu", dy=dy.shape, y=y.shape)
    _require("pool_relu", y=y.shape, the_result=(*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2))
    return _unpooled(dy, x, y)


_BACK = SimpleNamespace(
    conv=_conv_back, linear=_linear_back, relu=_relu_back, pool_relu=_pool_back
)


def _run_chain(function, run):
    """Call it with layers made with NumPy, on a forward pass of the case's network."""
    exact = {name: np.asarray(value, np.float64) for name, value in run.case.inputs.items()}
    _, kept = _logits(exact["x"], *(exact[name] for name in _PARAMETERS))
    weights = [exact[f"{layer}_weight"] for layer in _LAYERS]
    return function(exact["dlogits"], kept, weights, _BACK)


def _chain_cases(rng):
    networks = [
        (1, 10, 10, (1, 2, 3, 4)),
        (2, 10, 10, (1, 1, 1, 2)),
        (1, 10, 11, (2, 1, 2, 3)),
        (2, 11, 10, (1, 2, 3, 2)),
        (3, 10, 14, (2, 3, 2, 4)),
        (1, 14, 10, (3, 2, 4, 3)),
        (2, 13, 12, (2, 2, 5, 2)),
        (4, 10, 10, (1, 3, 3, 5)),
        (drawn(rng, 5, 6), 14, 15, (3, drawn(rng, 4, 5), 7, 6)),
    ]
    found = []
    for n, H, W, (first, second, hidden, classes) in networks:
        flat = second * ((H - 2) // 2 // 2 - 1) * ((W - 2) // 2 // 2 - 1)
        shapes = (
            (first, 1, 3, 3), first, (second, first, 3, 3), second, (hidden, flat), hidden,
            (classes, hidden), classes,
        )  # fmt: skip
        inputs = {"dlogits": numbers(rng, (n, classes), 1.0, 0.8), "x": numbers(rng, (n, 1, H, W))}
        for name, shape in zip(_PARAMETERS, shapes, strict=True):
            inputs[name] = numbers(rng, shape, 0.3, 0.25)
        found.append(case(1, 1, **inputs))
    return found


BACKWARD_CHAIN = Exercise(
    name="backward_chain",
    title="The whole network backwards",
    solution=backward_chain,
    kind="function",
    reference=_chain_reference,
    cases=_chain_cases,
    tolerance=Tolerance(1e-9, 1e-9, "the same sums in another order, in float64", scaled=True),
    outputs=tuple(f"d{name}" for name in _PARAMETERS),
    dtype=np.float64,
    call=_run_chain,
    primal=lambda x, *parameters: _logits(x, *parameters)[0],
    hints=(
        "Write the forward pass on a sheet of paper, a line for each layer: x → conv1 → a → pool "
        "and ReLU → c → … Then read it from below. Each layer wants the gradient of what it made, "
        "and what it was given.",
        "The last linear layer made the logits of `g`. Before it, a ReLU made `g`; before that, a "
        "linear layer was given `e`, as rows: `e.reshape(len(e), -1)`. What comes back from there "
        "has rows as well, and pooling wants the shape of `e`.",
        "```python\ndg, *d_fc2 = back.linear(dlogits, g, fc2)\n"
        "de, *d_fc1 = back.linear(back.relu(dg, g), ..., fc1)\n"
        "dd = back.pool_relu(de.reshape(...), d, e)\ndc, *d_conv2 = back.conv(dd, ..., conv2)\n"
        "...\nreturn *d_conv1, *d_conv2, *d_fc1, *d_fc2\n```",
    ),
)


# ---- sgd_nesterov ----------------------------------------------------------------------------


@cuda.jit
def sgd_nesterov(p, g, v, rate, momentum, decay, new_p, new_v):
    for i in range(cuda.grid(1), p.size, cuda.gridsize(1)):
        gradient = g[i] + decay * p[i]
        velocity = momentum * v[i] + gradient
        new_v[i] = velocity
        new_p[i] = p[i] - rate * (gradient + momentum * velocity)


def _sgd_reference(p, g, v, rate, momentum, decay):
    gradient = g + decay * p
    velocity = momentum * v + gradient
    return p - rate * (gradient + momentum * velocity), velocity


def _sgd_cases(rng):
    launches = [
        (1, 1, 32),
        (0, 1, 32),
        (2, 2, 1),
        (5, 1, 4),
        (33, 1, 32),
        (40, 2, 16),
        (65, 3, 32),
        (70, 1, 64),
        (drawn(rng, 1030, 1200), 1, 288),
    ]
    return [
        case(
            grid, block, p=numbers(rng, n, 1.0, 0.5), g=numbers(rng, n, 1.0, 0.8),
            v=numbers(rng, n, 0.5, 0.2), rate=np.float32(rng.uniform(0.01, 0.3)),
            momentum=np.float32(rng.uniform(0.5, 0.95)), decay=np.float32(rng.uniform(0.01, 0.1)),
        )
        for n, grid, block in launches
    ]  # fmt: skip


SGD_NESTEROV = Exercise(
    name="sgd_nesterov",
    title="A step with momentum, looking ahead",
    solution=sgd_nesterov,
    reference=_sgd_reference,
    cases=_sgd_cases,
    tolerance=Tolerance(1e-6, 1e-6, "a few products and sums in float32"),
    outputs=("new_p", "new_v"),
    call=lambda kernel, run: run.launch(
        kernel, run.p, run.g, run.v, run.rate, run.momentum, run.decay, run.new_p, run.new_v
    ),
    once=True,
    forbids=("float64-promotion",),
    hints=(
        "Three lines, in the order of the text: the gradient with the pull towards 0, the new "
        "velocity, the step.",
        "The gradient is `g + decay · p`, the velocity `momentum · v + gradient`. Nesterov steps "
        "by `gradient + momentum · velocity`, with the *new* velocity.",
        "```python\ngradient = g[i] + decay * p[i]\nvelocity = ...\n"
        "new_p[i] = p[i] - rate * (gradient + ...)\n```",
    ),
)


# ---- confusion -------------------------------------------------------------------------------


@cuda.jit
def confusion(logits, labels, counts):
    for i in range(cuda.grid(1), labels.size, cuda.gridsize(1)):
        best = 0
        for k in range(1, logits.shape[1]):
            if logits[i, k] > logits[i, best]:
                best = k
        cuda.atomic.add(counts, (labels[i], best), 1)


def _confusion_reference(logits, labels):
    found = np.zeros((logits.shape[1],) * 2, np.int64)
    np.add.at(found, (labels % logits.shape[1], logits.argmax(axis=1)), 1)
    return found


def _tied(logits):
    # The largest twice in the first row, and in the last of many nothing but −∞; before it one
    # whose last class is the largest.
    if logits.shape[0] and logits.shape[1] > 1:
        logits[0, 0] = logits[0, -1] = logits.max() + ONE
    if len(logits) > 4:
        logits[-2, -1] = logits[-2].max() + ONE
        logits[-1] = -np.inf
    return logits


def _confusion_cases(rng):
    launches = [
        ((1, 1), 1, 32),
        ((0, 3), 1, 32),
        ((2, 2), 2, 1),
        ((5, 3), 1, 32),
        ((40, 10), 2, 8),
        ((33, 4), 2, 32),
        ((9, 5), 1, 32),
        ((70, 10), 1, 64),
        ((drawn(rng, 1030, 1200), 3), 1, 288),
        ((9, drawn(rng, 260, 290)), 1, 32),
    ]
    return [
        case(grid, block, logits=_tied(numbers(rng, shape, *((2.0, -5.0), (600.0, -1e5))[k % 2])),
             labels=rng.integers(0, shape[1], shape[0]))
        for k, (shape, grid, block) in enumerate(launches)
    ]  # fmt: skip


CONFUSION = Exercise(
    name="confusion",
    title="What is taken for what",
    solution=confusion,
    reference=_confusion_reference,
    cases=_confusion_cases,
    tolerance=EXACT,
    outputs=("counts",),
    dtype=np.int32,
    start=0,
    hints=(
        "The answer is the place of the largest logit. Then many threads may want to count in the "
        "same place of the table.",
        "Start with `best = 0` and walk through the other classes; of equal ones the first counts. "
        "Row: the true class. Column: the answer. And it must be an atomic, as for the histogram.",
        "```python\nfor k in range(1, logits.shape[1]):\n"
        "    if logits[i, k] > logits[i, best]:\n        best = k\n"
        "cuda.atomic.add(counts, (..., ...), 1)\n```",
    ),
)
