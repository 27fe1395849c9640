"""What `sanitize_launches` runs of pooling, batch normalisation, dropout and the optimisers."""

import contextlib
from unittest import mock

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = (torch.contiguous_format, torch.channels_last)
# Images and the options of a pooling layer.
POOLED = (
    ((1, 1, 1, 1), dict(kernel_size=1)),
    ((3, 8, 11, 11), dict(kernel_size=2)),
    ((2, 5, 7, 9), dict(kernel_size=3, stride=2, padding=1)),
    ((2, 16, 10, 7), dict(kernel_size=(2, 3), stride=(3, 1), dilation=(3, 2), padding=(1, 1))),
    ((1, 3, 12, 13), dict(kernel_size=3, stride=1, padding=1, ceil_mode=True)),
)
NORMALISED = ((2, 3, 5, 7), (1, 8, 4, 4), (3, 16, 1, 2), (2, 40, 3, 3), (3, 2, 33, 31))
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
        for variant in max_pool2d.VARIANTS:
            for relu in (True, False):
                y, indices = max_pool2d.forward(
                    x, variant=variant, index_dtype=index_dtype, relu=relu, **options
                )
                yield y
        for variant in max_pool2d.BACKWARD_VARIANTS:
            yield max_pool2d.backward(y, indices, x.shape, variant=variant, **options)


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
        for variant in batch_norm.VARIANTS:
            y, mean, rstd = batch_norm.forward(
                x, weight, bias, *statistics, relu=relu, variant=variant
            )
            yield y
        for variant in batch_norm.BACKWARD_VARIANTS:
            yield from batch_norm.backward(
                x, x, weight, mean, rstd, relu=relu, y=y, variant=variant
            )
        for variant in batch_norm.INFERENCE_VARIANTS:
            yield batch_norm.inference(x, weight, bias, *statistics, relu=relu, variant=variant)


def dropping():
    from course_lib.kernels import dropout

    for dtype in DTYPES:
        for size in SIZES:
            for start in (0, 1):
                x = torch.randn(size + start).to(dtype)[start:]
                for variant in dropout.VARIANTS:
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
            for variant in optimizers.VARIANTS:
                optimizers.sgd(*lists[:2], lr=0.1, variant=variant)
                optimizers.sgd(*lists[:3], lr=0.1, momentum=0.9, variant=variant)
                for peaks in (None, lists[4]):
                    optimizers.adam(
                        *lists[:4], steps, lr=0.1, max_exp_avg_sqs=peaks, variant=variant
                    )
                yield from lists[0]


PARTS = (max_pooling, batch_normalising, dropping, optimising)
