"""What runs under compute-sanitizer: each rung as the contract calls it, and ways of large inputs.

Shapes are odd, tiny and misaligned on purpose, because that is where a guard is missing, and small,
because compute-sanitizer is slow. What planners keep for large inputs is taken here by other
constants of theirs; ways of larger problems are taken by name, as the contract does.
"""

import contextlib
import functools
import itertools
import sys
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = (torch.contiguous_format, torch.channels_last)
#: By dimensions: every number of slots per thread, for teams of lanes and for blocks; planes for
#: lanes, for a block, in parts, and vectors of channels.
SHAPES = {
    2: ((1, 1), (3, 37), (300, 5), (5, 200), (5, 400), (3, 1000), (3, 1504), (2, 2600), (1, 9001)),
    4: ((1, 1, 1, 1), (2, 3, 5, 7), (1, 8, 12, 12), (3, 40, 9, 9), (1, 2, 95, 95), (1, 4, 150, 90),
        (1, 1, 250, 141), (2, 16, 10, 7), (2, 300, 2, 4)),
}  # fmt: skip
SPLIT_COLS = (1000, 1003)  # of rows in parts, on 16-byte boundaries and not
LONG_ROWS = ((2, 40000), (1, 60000))  # a block's and a cluster's, as the chip would have it
#: Images and a hidden layer: groups that end early, whole planes and parts, samples in turns.
SQUEEZED = (
    ((1, 1, 1, 1), 1), ((2, 3, 5, 7), 2), ((3, 40, 9, 9), 6), ((2, 300, 2, 3), 9),
    ((1, 2, 95, 95), 3), ((1, 4, 150, 90), 1), ((2, 3, 3, 3), 1031), ((300, 8, 3, 3), 2),
    ((20, 48, 24, 24), 200),
)  # fmt: skip
#: Images and the options of a pooling layer.
POOLED = (
    ((1, 1, 1, 1), dict(kernel_size=1)),
    ((3, 8, 11, 11), dict(kernel_size=2, stride=1)),
    ((2, 5, 7, 9), dict(kernel_size=3, stride=(2, 1), padding=1)),
    ((2, 16, 10, 7), dict(kernel_size=(2, 3), stride=(3, 1), dilation=(3, 2), padding=(1, 1))),
    ((1, 3, 12, 13), dict(kernel_size=3, stride=1, padding=1, ceil_mode=True)),
)
#: For windows that are known to the compiler: rows of whole patches, rows of none; and pixels.
IN_PATCHES, IN_COLUMNS, IN_PIXELS = (2, 3, 7, 16), (2, 3, 7, 9), (2, 7, 9)
NORMALISED = ((2, 3, 5, 7), (1, 8, 4, 4), (3, 16, 1, 2), (2, 40, 3, 3), (3, 2, 33, 31))


def main(names):
    """Launch the parts with these names on the GPU; without names, everything."""
    torch.set_default_device("cuda")
    chosen = parts()
    for name in names or chosen:
        print(f"{sum(1 for _ in chosen[name]())} calls: {name}", flush=True)
    torch.cuda.synchronize()


def parts():
    """{name: generator that launches kernels and yields what they wrote}, the longest first."""
    from course_lib.operations import OPERATIONS

    found = {}
    for part in (squeezing, max_pooling_in_patches):
        for dtype in DTYPES:
            name = f"{part.__name__}_{str(dtype).removeprefix('torch.')}"
            found[name] = functools.partial(part, dtype)
    for part in (max_pooling, batch_normalising, rows_in_parts, cross_entropies, optimising,
                 spreading_means, drawing_batches, intrinsics):  # fmt: skip
        found[part.__name__] = part
    return found | {name: functools.partial(on_cpu_first, rungs, name) for name in OPERATIONS}


def on_cpu_first(part, *arguments):
    """The calls of a part whose inputs are drawn on the CPU, and then taken to the GPU."""
    with torch.device("cpu"):
        yield from part(*arguments)


def rungs(name):
    """Every rung of an operation: arrays on a boundary and beside one, and channels-last."""
    from contract.cases import subjects
    from contract.memory import channels_last, shifted

    places = (torch.clone, shifted, channels_last)
    for subject in (each for each in subjects() if each.name == name):
        shapes = SHAPES[subject.operation.n_dims or 2]
        if name == "linear":  # whose weights are as long both ways
            shapes = [shape for shape in shapes if max(shape) <= 400]
        for shape, place in (*itertools.product(shapes, places), (None, torch.clone)):
            inputs = subject.inputs(shape or subject.operation.example)
            inputs |= {key: place(x) for key, x in subject.read(inputs).items()}
            try:
                found = subject.call(inputs)
            except ValueError:  # of sizes that the rung does not take; the example it must
                if shape is None:
                    raise
                continue
            yield found


def tensor(shape, dtype, start=0, layout=LAYOUTS[0]):
    """Random numbers in memory of their own, from its element `start` on."""
    size = torch.Size(shape).numel()
    found = torch.randn(size + start).to(dtype)[start:].view(shape)
    return found if layout is LAYOUTS[0] else found.contiguous(memory_format=layout)


@contextlib.contextmanager
def changed(module, *plans, **constants):
    """In this block the planner has these constants; what its functions `plans` found is forgotten.

    plans  their names; without any, all that remember
    """
    plans = plans or [name for name, p in vars(module).items() if hasattr(p, "cache_clear")]
    with contextlib.ExitStack() as stack:
        for name, value in constants.items():
            stack.enter_context(mock.patch.object(module, name, value))
        for name in plans:
            getattr(getattr(module, name), "cache_clear", lambda: None)()
        yield
    for name in plans:
        getattr(module, name).cache_clear()


@contextlib.contextmanager
def launched(*kernels):
    """In this block each of the kernels must be launched, as often as it is named."""
    from course_lib.runtime.host.launch import recorded

    with recorded() as launches:
        yield
    found = [kernel for kernel, *_ in launches]
    for kernel in kernels:
        if found.count(kernel) != kernels.count(kernel):
            names = [each.py_func.__name__ for each in found]
            raise AssertionError(f"another kernel than {kernel.py_func.__name__}: {names}")


# Each generator below yields what a kernel has written.


def rows_in_parts():
    """Softmax of rows that a block or a cluster shares, dropout of long ones, and own features."""
    from softmax_checks import parts_of_a_row

    from course_lib.kernels import bn_relu_softmax, softmax, softmax_dropout

    def passes(operation, shape, dtype):
        x, dy, y, dx = (tensor(shape, dtype) for _ in range(4))
        yield operation.forward(x, variant="split", out=y)
        yield operation.backward(dy, y, variant="split", out=dx)

    for operation, dtype in itertools.product(softmax.OPERATIONS.values(), DTYPES):
        for shape in LONG_ROWS:
            yield from passes(operation, shape, dtype)
        for n_cols, n_parts in itertools.product(SPLIT_COLS, (1, 2, 4, 8, None)):
            with parts_of_a_row(n_cols, dtype.itemsize, n_parts):
                yield from passes(operation, (3, n_cols), dtype)
    for dtype, shape, start in itertools.product(DTYPES, SHAPES[2], (0, 1)):
        x, dy = (tensor(shape, dtype, start) for _ in range(2))
        features = [tensor(shape[1:], dtype, start) for _ in range(4)]
        features[1].abs_()
        for variant in bn_relu_softmax.FORWARD:
            y = bn_relu_softmax.forward(x, *features, variant=variant)
            yield y
            yield bn_relu_softmax.backward(dy, y, x, *features, variant=variant)
        long = mock.patch.object(softmax_dropout, "ROW_LIMIT", {1: 0, 2: 0})
        for offset, limit in ((3, contextlib.nullcontext()), (0, long)):
            with limit:
                z, stats = softmax_dropout.forward(x, 0.5, 1, offset, variant="registers")
                yield z
                yield softmax_dropout.backward(
                    dy, x, stats, 0.5, 1, offset, variant="registers"
                )


def cross_entropies():
    """Of probabilities that start on another boundary and on the same; with weights."""
    from course_lib.kernels import cross_entropy

    for dtype, shape in itertools.product(DTYPES, SHAPES[2]):
        logits, weight = tensor(shape, dtype, 1), torch.rand(shape[1]).to(dtype)
        indices = torch.randint(shape[1], shape[:1])
        own = dict(weight=weight, label_smoothing=0.1, reduction="none")
        for target, options in itertools.product(
            (indices, logits.clone().softmax(1), logits), ({}, own)
        ):
            for variant in ("naive", "online", "vectorised"):
                options = options | dict(variant=variant)
                loss, *saved = cross_entropy.forward(logits, target, **options)
                yield loss
                yield cross_entropy.backward(loss, logits, target, *saved, **options)


def squeezing(dtype):
    """Squeeze and excitation with weights of the images' dtype, and of float32."""
    from course_lib.kernels import squeeze_excite as se

    cases = itertools.product(dict.fromkeys((dtype, torch.float32)), SQUEEZED, LAYOUTS, (0, 1))
    for weight_dtype, (shape, R), layout, start in cases:
        C, way = shape[1], dict(activation="relu")
        weights = [tensor(s, weight_dtype) for s in ((R, C), (R,), (C, R), (C,))]
        x, dy, y, dx = (tensor(shape, dtype, start, layout) for _ in range(4))
        saved = se.forward(x, *weights, **way)[1:]
        for variant in se.FORWARD:
            with contextlib.suppress(ValueError):  # of layouts and sizes that it does not take
                found = se.forward(x, *weights, variant=variant, out=y, **way)
                yield from found
        for variant in se.BACKWARD:
            with contextlib.suppress(ValueError):
                found = se.backward(
                    dy, x, weights[0], weights[2], *saved, variant=variant, out=dx, **way
                )
                yield from found


def max_pooling():
    from course_lib.kernels import max_pool2d
    from course_lib.kernels.max_pool2d import plan

    def passes(x, options):
        for index_dtype in max_pool2d.INDEX_DTYPES:
            options = options | dict(index_dtype=index_dtype)
            for variant, relu in itertools.product(max_pool2d.FORWARD, (True, False)):
                y, indices = max_pool2d.forward(x, variant=variant, relu=relu, **options)
                yield y
            del options["index_dtype"]
            for variant in max_pool2d.BACKWARD:
                yield max_pool2d.backward(y, indices, x.shape, variant=variant, **options)

    for constants in (
        {}, dict(ENOUGH_PATCHES=1), dict(BAND_BYTES=400), dict(BAND_BYTES=3000, ENOUGH_BLOCKS=1),
    ):  # fmt: skip
        with changed(plan, **constants):
            for (shape, options), *how in itertools.product(POOLED, DTYPES, (0, 1), LAYOUTS):
                yield from passes(tensor(shape, *how), options)


def max_pooling_in_patches(dtype):
    """Every patch and pixel kernel of `vectorised`, for indices of a byte."""
    from course_lib.kernels import max_pool2d
    from course_lib.kernels.max_pool2d import columns, patches, pixel_patches, plan, vectorised
    from course_lib.kernels.max_pool2d.fixed import WIDE_WINDOWS, WINDOWS

    width = 16 // dtype.itemsize
    N, H, W = IN_PIXELS
    in_pixels = tensor((N, 2 * width, H, W), dtype, 0, LAYOUTS[1])

    def passes(kernel, x, options, forward, **constants):
        if forward:
            for relu in (True, False):
                with changed(plan, **constants), launched(kernel):
                    y, _ = max_pool2d.forward(x, index_dtype="uint8", relu=relu, **options)
                yield y
        else:
            y, indices = max_pool2d.forward(x, index_dtype="uint8", **options)
            with changed(plan, **constants), launched(kernel):
                dx = max_pool2d.backward(y, indices, x.shape, **options)
            yield dx

    for fixed in WIDE_WINDOWS:
        window = dict(kernel_size=fixed.kernel, stride=fixed.stride, padding=fixed.padding)
        for forward in (True, False):
            make = columns.forward_kernel if forward else columns.backward_kernel
            x = tensor(IN_COLUMNS, dtype, 1)
            yield from passes(make(fixed, plan.COLUMN_ROWS), x, window, forward)
    for fixed in WINDOWS:
        window = dict(kernel_size=fixed.kernel, stride=fixed.stride, padding=fixed.padding)
        whole = window | dict(ceil_mode=window["padding"] == 0)
        of_rows = (  # whole patches, or on other boundaries with a rest
            (tensor(IN_COLUMNS, dtype, 1), window), (tensor(IN_PATCHES, dtype), whole)
        )
        for shape in plan.forward_shapes(fixed.stride, dtype.itemsize):
            kernel, only = vectorised._forward_kernel(fixed, *shape), lambda *_, s=shape: [s]
            yield from passes(kernel, *of_rows[shape[-1]], True, forward_shapes=only)
        for shape in plan.backward_shapes(fixed, dtype.itemsize):
            kernel, only = patches.backward_kernel(fixed, *shape), lambda *_, s=shape: [s]
            yield from passes(kernel, *of_rows[shape[-1]], False, backward_shapes=only)
        for tall in range(1, plan.forward_tall(fixed, dtype.itemsize) + 1):
            kernel = pixel_patches.forward_kernel(fixed, width, tall)
            yield from passes(kernel, in_pixels, window, True, ENOUGH_PATCHES=0,
                              FORWARD_TALL={fixed.stride: tall})  # fmt: skip
        for tall in range(1, plan.backward_tall(fixed, dtype.itemsize) + 1):
            kernel = pixel_patches.backward_kernel(fixed, width, tall)
            yield from passes(kernel, in_pixels, window, False, ENOUGH_PATCHES=0,
                              BACKWARD_TALL={dtype.itemsize: tall})  # fmt: skip


def batch_normalising():
    from course_lib.kernels import batch_norm
    from course_lib.kernels.batch_norm import plan, walk

    def passes(x):
        weight, bias, *statistics = torch.rand(4, x.shape[1])
        for relu in (False, True):
            for variant in batch_norm.FORWARD:
                y, mean, rstd = batch_norm.forward(
                    x, weight, bias, *statistics, relu=relu, variant=variant
                )
                yield y
            for variant in batch_norm.BACKWARD:
                yield from batch_norm.backward(
                    x, x, weight, mean, rstd, relu=relu, y=y, variant=variant
                )
            for variant in batch_norm.INFERENCE:
                yield batch_norm.inference(
                    x, weight, bias, *statistics, relu=relu, variant=variant
                )

    in_parts = dict(ALONE_BYTES=0, ENOUGH_CHANNELS=10**9, LEAST_PART=64, PIXEL_ROWS=1, WAVE=24)
    for constants, enough in (({}, 8), (in_parts, 8), (in_parts, 0), (dict(LEAST_SHARE=16), 8)):
        with changed(plan, **constants), mock.patch.object(walk, "ENOUGH", enough):
            for how in itertools.product(NORMALISED, DTYPES, (0, 1), LAYOUTS):
                yield from passes(tensor(*how))


def spreading_means():
    """The gradient of global pooling, for channels-last images."""
    from course_lib.kernels import global_avg_pool as pool

    for shape, dtype, variant in itertools.product(SHAPES[4], DTYPES, pool.BACKWARD):
        dy = tensor(shape[:2], dtype)
        yield pool.backward(dy, shape[2:], channels_last=True, variant=variant)


def optimising():
    """Several parameters at once, with momentum and without, and with the peaks of Adam."""
    from course_lib.kernels import optimizers

    sizes = (1, 3, 270, 4099)
    for dtype, start in itertools.product(DTYPES, (0, 1)):
        p, g, m, v, peaks = (
            [torch.rand(size + start).to(dtype)[start:] for size in sizes] for _ in range(5)
        )
        steps = list(torch.zeros(len(sizes)))
        for variant in optimizers.SGD:
            optimizers.sgd(p, g, lr=0.1, variant=variant)
            optimizers.sgd(p, g, m, lr=0.1, momentum=0.9, variant=variant)
            for given in (None, peaks):
                optimizers.adam(p, g, m, v, steps, lr=0.1, max_exp_avg_sqs=given, variant=variant)
            yield from p


def drawing_batches():
    from course_lib.kernels import batches

    for n, batch, n_pixels, n_classes in ((1, 1, 1, 1), (37, 5, 27, 3), (300, 64, 784, 10)):
        images = torch.randint(256, (n, n_pixels), dtype=torch.uint8)
        labels, step = torch.randint(n_classes, (n,)), torch.zeros(1, dtype=torch.int64)
        rate, loss = torch.zeros(1), torch.ones(())
        x, y = torch.empty(batch, n_pixels), torch.empty(batch, dtype=torch.int64)
        losses, right = torch.zeros(n // batch), torch.zeros(n // batch, dtype=torch.int32)
        for _ in range(n // batch + 1):  # into the second epoch
            options = dict(seed=1, highest=0.1, rise=2, total=5)
            batches.next_batch(images, labels, step, rate, x, y, **options)
            batches.tally(loss, torch.randn(batch, n_classes), y, step, losses, right)
            yield x
        batches.normalise(images, everything := torch.empty(n, n_pixels))
        yield everything


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
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    main(sys.argv[1:])
