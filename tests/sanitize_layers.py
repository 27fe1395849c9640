"""What `sanitize_launches` runs of pooling, normalisation, dropout and the optimisers."""

import contextlib
from unittest import mock

import torch
from sanitize_planned import launched

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = (torch.contiguous_format, torch.channels_last)
# Images and the options of a pooling layer.
POOLED = (
    ((1, 1, 1, 1), dict(kernel_size=1)),
    ((3, 8, 11, 11), dict(kernel_size=2, stride=1)),
    ((2, 5, 7, 9), dict(kernel_size=3, stride=(2, 1), padding=1)),
    ((2, 16, 10, 7), dict(kernel_size=(2, 3), stride=(3, 1), dilation=(3, 2), padding=(1, 1))),
    ((1, 3, 12, 13), dict(kernel_size=3, stride=1, padding=1, ceil_mode=True)),
)
# For windows that are known to the compiler: rows of whole patches, rows of none; and pixels.
IN_PATCHES, IN_COLUMNS, IN_PIXELS = (2, 3, 7, 16), (2, 3, 7, 9), (2, 7, 9)
NORMALISED = ((2, 3, 5, 7), (1, 8, 4, 4), (3, 16, 1, 2), (2, 40, 3, 3), (3, 2, 33, 31))
# Rows and columns: lanes of a warp, blocks, rows on 16-byte boundaries and not.
LAYER_ROWS = ((1, 1), (300, 5), (3, 37), (5, 400), (2, 2600), (1, 9001))
SIZES = (1, 3, 270, 4099)


@contextlib.contextmanager
def planned(module, **constants):
    """In this block, the planner `module` has these constants, as large inputs would have it."""
    plans = [p for p in vars(module).values() if hasattr(p, "cache_clear")]
    with contextlib.ExitStack() as stack:
        for name, value in constants.items():
            stack.enter_context(mock.patch.object(module, name, value))
        for p in plans:
            p.cache_clear()
        yield
    for p in plans:
        p.cache_clear()


def image(shape, dtype, layout, start=0):
    x = torch.randn(torch.Size(shape).numel() + start).to(dtype)[start:].view(shape)
    return x if layout is torch.contiguous_format else x.contiguous(memory_format=layout)


def max_pooling():
    from course_lib.kernels import max_pool2d
    from course_lib.kernels.max_pool2d import plan

    large = dict(ENOUGH_PATCHES=1)
    for constants in (
        {}, large, dict(BAND_BYTES=400), dict(BAND_BYTES=3000, ENOUGH_BLOCKS=1),
    ):  # fmt: skip
        with planned(plan, **constants):
            for dtype in DTYPES:
                for layout in LAYOUTS:
                    for shape, options in POOLED:
                        for start in (0, 1):
                            x = image(shape, dtype, layout, start)
                            yield from max_pool_passes(max_pool2d, x, options)


def max_pool_passes(max_pool2d, x, options):
    for index_dtype in max_pool2d.INDEX_DTYPES:
        for variant in max_pool2d.FORWARD:
            for relu in (True, False):
                y, indices = max_pool2d.forward(
                    x, variant=variant, index_dtype=index_dtype, relu=relu, **options
                )
                yield y
        for variant in max_pool2d.BACKWARD:
            yield max_pool2d.backward(y, indices, x.shape, variant=variant, **options)


def max_pooling_in_patches(dtype):
    """Every patch and pixel kernel of `vectorised`, for indices of a byte."""
    from course_lib.kernels.max_pool2d import patches, plan, vectorised
    from course_lib.kernels.max_pool2d.fixed import WINDOWS

    for fixed in WINDOWS:
        window = dict(kernel_size=fixed.kernel, stride=fixed.stride, padding=fixed.padding)
        for shape in plan.forward_shapes(fixed.stride, dtype.itemsize):
            kernel = vectorised._forward_kernel(fixed, *shape)
            with planned(plan, forward_shapes=lambda *_, shape=shape: [shape]):
                for x, options in patched(dtype, shape[-1], window):
                    for relu in (True, False):
                        yield pooled(kernel, x, options, relu=relu)[0]
        for shape in plan.backward_shapes(fixed, dtype.itemsize):
            kernel = patches.backward_kernel(fixed, *shape)
            for x, options in patched(dtype, shape[-1], window):
                found = pooled(None, x, options)
                with planned(plan, backward_shapes=lambda *_, shape=shape: [shape]):
                    yield pooled_back(kernel, x, *found, options)
        yield from max_pooling_by_pixels(dtype, fixed, window)


def patched(dtype, aligned, window):
    """(image, options) of rows that are whole patches, or on other boundaries with a rest."""
    if aligned:
        yield image(IN_PATCHES, dtype, LAYOUTS[0]), window | dict(ceil_mode=window["padding"] == 0)
    else:
        yield image(IN_COLUMNS, dtype, LAYOUTS[0], 1), window


def max_pooling_by_pixels(dtype, fixed, window):
    from course_lib.kernels.max_pool2d import pixel_patches, plan

    N, H, W = IN_PIXELS
    width = 16 // dtype.itemsize
    x = image((N, 2 * width, H, W), dtype, LAYOUTS[1])
    found = pooled(None, x, window)
    for tall in range(1, plan.forward_tall(fixed, dtype.itemsize) + 1):
        kernel = pixel_patches.forward_kernel(fixed, width, tall)
        with planned(plan, FORWARD_TALL={fixed.stride: tall}, ENOUGH_PATCHES=0):
            for relu in (True, False):
                yield pooled(kernel, x, window, relu=relu)[0]
    for tall in range(1, plan.backward_tall(fixed, dtype.itemsize) + 1):
        kernel = pixel_patches.backward_kernel(fixed, width, tall)
        with planned(plan, BACKWARD_TALL={dtype.itemsize: tall}, ENOUGH_PATCHES=0):
            yield pooled_back(kernel, x, *found, window)


def pooled(kernel, x, options, **more):
    """(y, indices) by this kernel, or by any where that is None."""
    from course_lib.kernels import max_pool2d

    with launched(*[kernel] if kernel else ()):
        return max_pool2d.forward(x, index_dtype="uint8", **options, **more)


def pooled_back(kernel, x, y, indices, options):
    from course_lib.kernels import max_pool2d

    with launched(kernel):
        return max_pool2d.backward(y, indices, x.shape, **options)


def batch_normalising():
    from course_lib.kernels import batch_norm
    from course_lib.kernels.batch_norm import plan, walk

    in_parts = dict(ALONE_BYTES=0, ENOUGH_CHANNELS=10**9, LEAST_PART=64, PIXEL_ROWS=1, WAVE=24)
    in_clusters = dict(LEAST_SHARE=16)
    for constants, enough in (({}, 8), (in_parts, 8), (in_parts, 0), (in_clusters, 8)):
        with planned(plan, **constants), mock.patch.object(walk, "ENOUGH", enough):
            for dtype in DTYPES:
                for layout in LAYOUTS:
                    for shape in NORMALISED:
                        for start in (0, 1):
                            x = image(shape, dtype, layout, start)
                            yield from batch_norm_passes(batch_norm, x)


def batch_norm_passes(batch_norm, x):
    weight, bias, running_mean, running_var = torch.rand(4, x.shape[1])
    statistics = running_mean, running_var
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
            yield batch_norm.inference(x, weight, bias, *statistics, relu=relu, variant=variant)


def layer_normalising(dtype):
    from course_lib.kernels import layer_norm
    from course_lib.kernels.layer_norm import plan

    for shape in LAYER_ROWS:
        for start in (0, 1):
            x, dy = (image(shape, dtype, LAYOUTS[0], start) for _ in range(2))
            weight, bias = torch.rand(2, shape[1]).to(dtype)
            for variant in layer_norm.FORWARD:
                if variant != "registers" or shape[1] <= plan.FORWARD_LIMIT:
                    y, mean, rstd = layer_norm.forward(x, weight, bias, variant=variant)
                    yield y
            for variant in layer_norm.BACKWARD:
                if variant != "registers" or shape[1] <= min(plan.BACKWARD_LIMIT.values()):
                    yield from layer_norm.backward(dy, x, weight, mean, rstd, variant=variant)


def dropping():
    from course_lib.kernels import dropout

    for dtype in DTYPES:
        for size in SIZES:
            for start in (0, 1):
                x = torch.randn(size + start).to(dtype)[start:]
                for variant in dropout.FORWARD:
                    for offset in (0, 3):
                        yield dropout.forward(x, 0.3, 1, offset, variant=variant)


def optimising():
    from course_lib.kernels import optimizers

    for dtype in DTYPES:
        for start in (0, 1):
            lists = [
                [torch.rand(size + start).to(dtype)[start:] for size in SIZES] for _ in range(5)
            ]
            steps = list(torch.zeros(len(SIZES)))
            for variant in optimizers.SGD:
                optimizers.sgd(*lists[:2], lr=0.1, variant=variant)
                optimizers.sgd(*lists[:3], lr=0.1, momentum=0.9, variant=variant)
                for peaks in (None, lists[4]):
                    optimizers.adam(
                        *lists[:4], steps, lr=0.1, max_exp_avg_sqs=peaks, variant=variant
                    )
                yield from lists[0]


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


PARTS_BY_DTYPE = (max_pooling_in_patches, layer_normalising)
PARTS = (max_pooling, batch_normalising, dropping, optimising, drawing_batches)
