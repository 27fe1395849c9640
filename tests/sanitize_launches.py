"""Every kernel variant, dtype and direction once at least: what runs under compute-sanitizer.

Shapes are odd, tiny and misaligned on purpose, because that is where a guard is missing, and small,
because compute-sanitizer is slow. Rows that would have to be long to take a path of their own take
it here by a chip that is said to have little shared memory.
"""

import functools
import itertools
import sys
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (1, 3, 127, 1000, 4099)
IMAGES = (
    (1, 1, 1, 1), (2, 3, 5, 7), (1, 8, 12, 12), (3, 40, 9, 9), (1, 2, 95, 95), (1, 4, 150, 90),
    (1, 1, 250, 141),
)  # fmt: skip
# Images and a hidden layer: planes for lanes, for a block, in parts; groups that end early.
SQUEEZED = (
    ((1, 1, 1, 1), 1), ((2, 3, 5, 7), 2), ((3, 40, 9, 9), 6), ((2, 300, 2, 3), 9),
    ((1, 2, 95, 95), 3), ((1, 4, 150, 90), 1), ((2, 3, 3, 3), 1031),
)  # fmt: skip
# Images, filters and options: by element and by vectors, one tile and several.
CONVOLUTIONS = (
    ((3, 1, 9, 11), (18, 1, 3, 3), {}), ((2, 3, 8, 7), (9, 3, 3, 3), dict(stride=2, padding=1)),
    ((1, 1, 1, 1), (1, 1, 1, 1), {}), ((2, 3, 7, 9), (70, 3, 3, 2), dict(stride=(2, 1), padding=1)),
    ((2, 16, 11, 9), (80, 8, 3, 3), dict(padding=1, groups=2)),
    ((1, 5, 9, 8), (10, 1, 2, 5), dict(dilation=(2, 1), padding=2, groups=5)),
)  # fmt: skip
# The same in groups, for the larger tile of 16-bit numbers, both ways.
WIDE = (((1, 144, 6, 5), (144, 72, 3, 3), dict(padding=1, groups=2)),)
# Rows, inputs and outputs of linear layers: a fragment, tiles cut off, and k in parts; then a k in
# parts for each of the three products; then few rows.
PRODUCTS = ((1, 1, 1), (3, 37, 5), (70, 136, 264), (33, 1288, 40), (257, 72, 130))
IN_PARTS = ((33, 1288, 40), (33, 40, 1288), (1288, 40, 24))
FEW_ROWS = ((1, 136, 24), (2, 1032, 5), (3, 40, 9), (7, 2056, 3))
LOGITS = ((1, 1), (3, 37), (300, 5), (2, 2600), (1, 9001))  # rows and classes
PIXELS = ((1, 1, 1, 1), (2, 3, 5, 7), (1, 40, 33, 31), (3, 2, 16, 16))  # the same, strided
# Rows and columns: every number of slots per thread, for teams of lanes and for blocks.
ROWS = (
    (1, 1), (3, 37), (300, 5), (5, 200), (5, 400), (3, 1000), (3, 1504), (2, 2600), (1, 9001),
)  # fmt: skip
SPLIT_COLS = (1000, 1003)  # of rows in parts, on 16-byte boundaries and not
LONG_ROWS = ((2, 40000), (1, 60000))  # a block's and a cluster's, as the chip would have it


def main(names):
    """Launch the parts with these names on the GPU; without names, everything."""
    torch.set_default_device("cuda")
    chosen = parts()
    for name in names or chosen:
        print(f"{sum(1 for _ in chosen[name]())} calls: {name}", flush=True)
    torch.cuda.synchronize()


def parts():
    """{name: generator that launches kernels and yields what they wrote}, the longest first."""
    import sanitize_halo
    import sanitize_layers
    import sanitize_planned

    found = (
        *each_dtype(convolutions), *each_dtype(squeezing_and_exciting), *each_dtype(linears),
        *itertools.chain.from_iterable(map(each_dtype, sanitize_planned.PARTS)),
        *sanitize_planned.OTHER_PARTS, *sanitize_halo.PARTS,
        *itertools.chain.from_iterable(map(each_dtype, sanitize_layers.PARTS_BY_DTYPE)),
        *sanitize_layers.PARTS, softmax_rows, softmax_parts,
        softmax_with_dropout, bn_relu_and_softmax, cross_entropies, activations, pooling,
        intrinsics,
    )  # fmt: skip
    return {part.__name__: part for part in found}


def tensor(shape, dtype, start=0):
    """Random numbers in memory of their own, from its element `start` on."""
    size = torch.Size(shape).numel()
    return torch.randn(size + start).to(dtype)[start:].view(shape)


# Each generator below yields what a kernel has written.


def activations():
    from course_lib.kernels import activation

    for operation in activation.OPERATIONS.values():
        for variant in operation.FORWARD:
            for dtype in DTYPES:
                for size in SIZES:
                    for start in (0, 1):
                        x = tensor((size,), dtype, start)
                        y = operation.forward(x, variant=variant)
                        yield y
                        yield operation.backward(x, y, variant=variant)


def pooling():
    from course_lib.kernels import global_avg_pool

    for layout in (torch.contiguous_format, torch.channels_last):
        for dtype in DTYPES:
            for shape in IMAGES:
                x = torch.randn(shape).to(dtype, memory_format=layout)
                last = layout is torch.channels_last
                for variant in global_avg_pool.FORWARD:
                    y = global_avg_pool.forward(x, variant=variant)
                    yield y
                for variant in list(global_avg_pool.BACKWARD)[last:]:  # all but `naive`
                    yield global_avg_pool.backward(
                        y, shape[2:], channels_last=last, variant=variant
                    )


def softmax_rows():
    from course_lib.kernels import softmax

    for operation in softmax.OPERATIONS.values():
        for dtype in DTYPES:
            for shape in ROWS:
                for start in (0, 1):
                    yield from softmax_passes(operation, shape, dtype, start)
            for shape in LONG_ROWS:
                yield from softmax_passes(operation, shape, dtype, 0, ("split",))


def softmax_passes(operation, shape, dtype, start, variants=None):
    """Both directions of `operation`, by all its variants or those named."""
    # With `out` every call decides anew how to launch.
    x, dy, y, dx = (tensor(shape, dtype, start) for _ in range(4))
    for variant in variants or operation.FORWARD:
        yield operation.forward(x, variant=variant, out=y)
    for variant in variants or operation.BACKWARD:
        yield operation.backward(dy, y, variant=variant, out=dx)


def softmax_parts():
    from softmax_checks import parts_of_a_row

    from course_lib.kernels import softmax

    for operation in softmax.OPERATIONS.values():
        for dtype in DTYPES:
            for n_cols in SPLIT_COLS:
                for n_parts in (1, 2, 4, 8, None):
                    with parts_of_a_row(n_cols, dtype.itemsize, n_parts):
                        yield from softmax_passes(operation, (3, n_cols), dtype, 0, ("split",))


def softmax_with_dropout():
    from course_lib.kernels import softmax_dropout

    def passes(shape, dtype, start, offset, variant):
        x, dz = (tensor(shape, dtype, start) for _ in range(2))
        z, stats = softmax_dropout.forward(x, 0.5, 1, offset, variant=variant)
        yield z
        yield softmax_dropout.backward(dz, x, stats, 0.5, 1, offset, variant=variant)

    for dtype in DTYPES:
        for shape in ROWS:
            for start, offset in ((0, 0), (1, 3)):
                for variant in softmax_dropout.FORWARD:
                    yield from passes(shape, dtype, start, offset, variant)
        with mock.patch.object(softmax_dropout, "ROW_LIMIT", {1: 0, 2: 0}):
            for n_cols in (3000, 3003):
                yield from passes((2, n_cols), dtype, 0, 0, "registers")


def bn_relu_and_softmax():
    from course_lib.kernels import bn_relu_softmax

    for dtype in DTYPES:
        for feature_dtype in dict.fromkeys((dtype, torch.float32)):
            for shape in ROWS:
                for start in (0, 1):
                    x, dy = (tensor(shape, dtype, start) for _ in range(2))
                    features = [tensor(shape[1:], feature_dtype, start) for _ in range(4)]
                    features[1].abs_()
                    for variant in bn_relu_softmax.FORWARD:
                        y = bn_relu_softmax.forward(x, *features, variant=variant)
                        yield y
                        yield bn_relu_softmax.backward(dy, y, x, *features, variant=variant)


def cross_entropies():
    from course_lib.kernels import cross_entropy

    for dtype in DTYPES:
        for n_rows, n_classes in LOGITS:
            logits = tensor((n_rows, n_classes), dtype, 1)
            weight = torch.rand(n_classes).to(dtype)
            indices = torch.randint(n_classes, (n_rows,))
            # Probabilities that start on another boundary, and on the same.
            for target in (indices, logits.clone().softmax(1), logits):
                for options in ({}, dict(weight=weight, label_smoothing=0.1, reduction="none")):
                    for variant in ("naive", "online", "vectorised"):
                        options["variant"] = variant
                        loss, *saved = cross_entropy.forward(logits, target, **options)
                        yield loss
                        yield cross_entropy.backward(loss, logits, target, *saved, **options)
        for shape in PIXELS:
            for start in (0, 1):
                logits = tensor(shape, dtype, start)
                target = torch.randint(-1, shape[1], (shape[0], *shape[2:]))
                for smoothing in (0.0, 0.1):
                    options = dict(ignore_index=-1, label_smoothing=smoothing)
                    options["weight"] = torch.rand(shape[1]).to(dtype) if start else None
                    loss, *saved = cross_entropy.forward(logits, target, **options)
                    yield loss
                    yield cross_entropy.backward(loss, logits, target, *saved, **options)


def squeezing_and_exciting(dtype):
    from course_lib.kernels import squeeze_excite

    for weight_dtype in dict.fromkeys((dtype, torch.float32)):
        for shape, R in SQUEEZED:
            C = shape[1]
            weights = [tensor(s, weight_dtype) for s in ((R, C), (R,), (C, R), (C,))]
            for layout in (torch.contiguous_format, torch.channels_last):
                for start in (0, 1):
                    x, dy, y, dx = (
                        tensor(shape, dtype, start).to(memory_format=layout) for _ in range(4)
                    )
                    fused = () if layout is torch.channels_last else ("fused",)
                    for variant in ("separate", "two_pass", *fused):
                        options = {"variant": variant, "activation": "relu"}
                        yield squeeze_excite.forward(x, *weights, out=y, **options)
                        _, *saved = squeeze_excite.forward(x, *weights, **options)
                        options["out"] = dx
                        yield squeeze_excite.backward(
                            dy, x, weights[0], weights[2], *saved, **options
                        )


def convolutions(dtype):
    from course_lib.kernels import conv2d
    from course_lib.kernels.conv2d import few_channels_plan, gathering

    def passes(x, weight, variant, **options):
        bias = torch.randn(weight.shape[0]).to(x.dtype)
        for precision in precisions(dtype, variant):
            options["precision"] = precision
            y = conv2d.forward(x, weight, bias, variant=variant, **options)
            yield y
            yield from conv2d.backward(y, x, weight, variant=variant, **options)

    for layout in (torch.contiguous_format, torch.channels_last):
        for x_shape, weight_shape, options in CONVOLUTIONS:
            x, weight = (
                torch.randn(shape).to(dtype, memory_format=layout)
                for shape in (x_shape, weight_shape)
            )
            groups = options.get("groups", 1)
            few = groups == 1 and (x_shape[1], *weight_shape[2:]) in few_channels_plan.FILTER_SIZES
            fits = {"depthwise": groups == x_shape[1], "few_channels": few}
            for variant in conv2d.FORWARD:
                if fits.get(variant, True):
                    yield from passes(x, weight, variant, **options)
            with mock.patch.object(gathering, "LARGE_FROM", 0):
                yield from passes(x, weight, "tensor_core", **options)
        for x_shape, weight_shape, options in WIDE if dtype.itemsize == 2 else ():
            x, weight = (
                torch.randn(shape).to(dtype, memory_format=layout)
                for shape in (x_shape, weight_shape)
            )
            with mock.patch.object(gathering, "LARGE_FROM", 0):
                yield from passes(x, weight, "tensor_core", **options)


def linears(dtype):
    from course_lib.kernels import linear, operation
    from course_lib.kernels.gemm import plan

    def passes(variant, products=PRODUCTS):
        for precision in precisions(dtype, variant):
            for n_rows, n_in, n_out in products:
                for start in (0, 1):
                    x, weight = tensor((n_rows, n_in), dtype), tensor((n_out, n_in), dtype, start)
                    options = {"variant": variant, "precision": precision}
                    y = linear.forward(x, weight, weight[:, 0], activation="relu", **options)
                    yield y
                    yield from linear.backward(y, x, weight, **options)

    for variant in linear.FORWARD:
        yield from passes(variant, FEW_ROWS if variant == "tensor_core" else PRODUCTS)
    ways = ["mma", "split_k"]
    if torch.cuda.get_device_capability() >= plan.CLUSTERS:
        ways.append("split_k_cluster")
    shapes = plan.SHAPES
    for i in range(max(map(len, shapes.values()))):  # each tile, whatever the plan would take
        tiles = {mode: (found[min(i, len(found) - 1)],) for mode, found in shapes.items()}
        for cached in (plan.best, operation._chosen):
            cached.cache_clear()
        with mock.patch.multiple(plan, SHAPES=tiles, FULL=0.0):
            for way in ways:
                yield from passes(f"tensor_core/{way}", PRODUCTS if way == "mma" else IN_PARTS)
    for cached in (plan.best, operation._chosen):
        cached.cache_clear()


def precisions(dtype, variant):
    """What `precision` may be, where it makes a difference."""
    both = dtype is torch.float32 and variant.startswith("tensor_core")
    return ("float32", "tf32") if both else ("float32",)


def each_dtype(part):
    """`part` with each dtype, as parts of their own."""

    def named(dtype):
        found = functools.partial(part, dtype)
        found.__name__ = f"{part.__name__}_{str(dtype).removeprefix('torch.')}"
        return found

    return [named(dtype) for dtype in DTYPES]


def intrinsics():
    from course_lib import cuda
    from course_lib.runtime.host.launch import launch
    from course_lib.runtime.intrinsics import block_max, block_online, block_sum

    @cuda.jit
    def block_kernel(x, y):
        scratch = cuda.shared.array(32, "float32")
        other_scratch = cuda.shared.array(32, "float32")
        i = cuda.grid(1)
        value = block_sum(x[i], scratch) + block_max(x[i], scratch)
        m, s = block_online(x[i], x[i] * x[i], scratch, other_scratch)
        y[i] = value + m + s

    for block in (32, 96, 1024):
        x = torch.randn(2 * block)
        y = torch.empty_like(x)
        launch(block_kernel, 2, block, x, y)
        yield y


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1:])
