"""Batch normalisation: every channel of a batch to mean 0 and variance 1, then weight and bias.

y = (x − mean)/√(var + eps)·weight + bias for each channel, over N, H and W; optionally max(y, 0).
x is N·C·H·W, contiguous or channels-last; float32, float16 or bfloat16, computed with in float32.
With `s` bytes an element and n elements, training moves 3·n·s bytes forward (statistics must be
known before the first value can be normalised, so x is read twice) and 5·n·s backward (dy and x
twice, dx once; 7·n·s with ReLU, which reads y as well); inference moves 2·n·s. A dozen operations
an element at most: memory is the limit.

============== =================================== ================================================
rung           a channel's statistics              its memory
============== =================================== ================================================
`naive`        a thread: mean, then Σ(x − mean)²   read three times, an element at a time
`one_pass`     a block: Σx and Σx² at once         read twice, an element at a time
`welford`      a block, by Welford's method;       read twice, an element at a time
               partial results by Chan's
`vectorised`   several blocks, by vectors: sums    read twice, 16 bytes at a time, several loads in
               from near the mean, then Chan       flight; the second time from L2, where it can
============== =================================== ================================================

`one_pass` is here to be seen going wrong: its variance is the small difference of two large numbers
where the mean is large. With a mean of 1000 and a deviation of 0.1, float32 keeps no digit of it.
All others subtract the mean before they square.

The backward pass needs Σdy and Σdy·(x − mean) before the first dx:
dx = weight/σ·(dy − Σdy/n − (x − mean)·Σdy·(x − mean)/(n·σ²)). Its rungs are `naive` (a thread for
each channel), `block` and `vectorised`. Sums are taken in a fixed order: two runs agree bit for
bit.

`vectorised` has several ways: a cluster of blocks for a small channel (`planes_kernels`), a walk
over channels that the L2 cache can hold (`walk`), and else a kernel for the parts of a channel, one
to put them together and one to write. Channels-last images that do not begin on a 16-byte boundary
are copied first; where the result does not, `welford` and `block` write it, an element at a time,
also where `vectorised` was asked for.

Sources: S. Ioffe and C. Szegedy (2015); Welford (1962); Chan, Golub and LeVeque (1979). Derivation:
notebook 10.
"""

from course_lib.kernels.batch_norm import (
    ladder,
    merging,
    pixels,
    planes_kernels,
    vectorised,
    walk,
)
from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.runtime.host import arrays
from course_lib.runtime.host.outputs import output

DTYPES = ("float32", "float16", "bfloat16")
MOST_THREADS = 512  # of a block of any rung

FORWARD = Ladder(
    Rung("naive", ladder.launch_naive, (ladder.naive_kernel,)),
    Rung("one_pass", ladder.launch_one_pass, (ladder.one_pass_kernel,)),
    Rung("welford", ladder.launch_welford, (ladder.welford_kernel,)),
    Rung(
        "vectorised", vectorised.forward,
        (
            planes_kernels.channel_kernel, walk.walk_kernel, planes_kernels.statistics_kernel,
            merging.statistics_merge_kernel, planes_kernels.normalise_kernel,
            pixels.pixel_statistics_kernel, pixels.pixel_normalise_kernel, ladder.welford_kernel,
        ),
    ),
    auto="vectorised",
)  # fmt: skip
INFERENCE = Ladder(
    Rung("naive", ladder.launch_inference, (ladder.inference_kernel,)),
    Rung(
        "vectorised", vectorised.inference,
        (planes_kernels.normalise_kernel, pixels.pixel_normalise_kernel, ladder.inference_kernel),
    ),
    auto="vectorised",
)  # fmt: skip
BACKWARD = Ladder(
    Rung("naive", ladder.launch_naive_backward, (ladder.naive_backward_kernel,)),
    Rung("block", ladder.launch_block_backward, (ladder.block_backward_kernel,)),
    Rung(
        "vectorised", vectorised.backward,
        (
            planes_kernels.channel_backward_kernel, planes_kernels.sums_kernel,
            merging.sums_merge_kernel, planes_kernels.gradient_kernel,
            pixels.pixel_sums_kernel, pixels.pixel_gradient_kernel, ladder.block_backward_kernel,
        ),
    ),
    auto="vectorised",
)  # fmt: skip


def forward(
    x,
    weight=None,
    bias=None,
    running_mean=None,
    running_var=None,
    *,
    momentum=0.1,
    eps=1e-5,
    relu=False,
    variant=AUTO,
    out=None,
):
    """(y, mean, rstd) of a batch in training; the last two are float32, for `backward`.

    weight, bias               (C,), float32 or x's dtype, or None
    running_mean, running_var  (C,), likewise: moved by `momentum` towards the batch's mean and its
                               unbiased variance, in place; or None
    relu                       y = max(y, 0)
    out                        receives y; it must have x's memory format

    An `x` that is neither contiguous nor channels-last is copied first. Raises ArrayError for a
    wrong rank, dtype, shape or device, ValueError for an unknown variant, a negative eps, one
    of two running statistics, and a batch of fewer than two values a channel.
    """
    rung = FORWARD.rung(variant, x)
    x, channels_last, C, P, count = _check(
        x, weight, bias, running_mean, running_var, eps
    )
    if count == 1:
        raise ValueError(f"a variance needs two values a channel, but x has shape {tuple(x.shape)}")
    reads = dict(x=x, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    y = output(out, x.shape, like=x, channels_last=channels_last, reads=reads)
    mean, rstd = (arrays.empty((C,), like=x, dtype="float32") for _ in range(2))
    if count * C == 0:
        return y, mean, rstd
    tracked = running_mean is not None
    running = (running_mean, running_var) if tracked else (mean, rstd)
    affine = *_affine(weight, bias, mean), bool(relu)
    numbers = tracked, float(momentum), float(eps)
    sizes = C, P, count, channels_last
    rung.launch(x, y, sizes, affine, mean, rstd, running, numbers)
    return y, mean, rstd


def inference(
    x, weight, bias, running_mean, running_var, *, eps=1e-5, relu=False, variant=AUTO, out=None
):
    """y with the running statistics; arguments and errors as in `forward`."""
    rung = INFERENCE.rung(variant, x)
    x, channels_last, C, P, count = _check(
        x, weight, bias, running_mean, running_var, eps, moved=False
    )
    if running_mean is None:
        raise ValueError("inference needs running_mean and running_var")
    reads = dict(x=x, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    y = output(out, x.shape, like=x, channels_last=channels_last, reads=reads)
    if count * C == 0:
        return y
    running_mean, running_var = map(arrays.contiguous, (running_mean, running_var))
    affine = (*_affine(weight, bias, running_mean), bool(relu), running_mean, running_var)
    rung.launch(x, y, (C, P, count, channels_last), affine, float(eps))
    return y


def backward(
    dy, x, weight, mean, rstd, *, relu=False, y=None, training=True, variant=AUTO, out=None
):
    """(dx, dweight, dbias), of x's dtype the first, of weight's (or float32) the others.

    x, weight, relu  as given to `forward`; mean and rstd as it returned them
    y                its output, needed with `relu`
    training         False where mean and rstd were constants, as in `inference`: rstd is
                     1/√(running_var + eps) then
    out              receives dx; it must have x's memory format

    Raises as `forward` does.
    """
    rung = BACKWARD.rung(variant, x)
    x, channels_last, C, P, count = _check(x, weight, None, None, None, 0)
    dtype = arrays.dtype_name(x)
    arrays.require(dy, "dy", shape=x.shape, dtypes=(dtype,))
    for name, array in (("mean", mean), ("rstd", rstd)):
        arrays.require(array, name, shape=(C,), dtypes=("float32",))
    if relu:
        if y is None:
            raise ValueError("the gradient of a ReLU needs its output: pass y")
        arrays.require(y, "y", shape=x.shape, dtypes=(dtype,))
    dy = arrays.laid_out_like(dy, x)
    y = arrays.laid_out_like(y, x) if relu else x
    reads = dict(dy=dy, x=x, weight=weight, mean=mean, rstd=rstd, y=y)
    dx = output(out, x.shape, like=x, channels_last=channels_last, reads=reads)
    of_weight = "float32" if weight is None else arrays.dtype_name(weight)
    dweight, dbias = (arrays.empty((C,), like=x, dtype=of_weight) for _ in range(2))
    if count * C == 0:
        for gradient in (dweight, dbias):
            gradient[...] = 0  # sums over nothing
        return dx, dweight, dbias
    images = dy, x, y, dx
    mean, rstd = arrays.contiguous(mean), arrays.contiguous(rstd)
    scale, _, has_weight, _ = _affine(weight, None, mean)
    options = scale, has_weight, bool(relu), mean, rstd
    sizes = C, P, count, channels_last
    rung.launch(images, sizes, options, dweight, dbias, bool(training))
    return dx, dweight, dbias


def _affine(weight, bias, unused):
    """Weight and bias as kernels take them: an array in any case, and whether it counts."""
    return (
        unused if weight is None else arrays.contiguous(weight),
        unused if bias is None else arrays.contiguous(bias),
        weight is not None,
        bias is not None,
    )


def _check(x, weight, bias, running_mean, running_var, eps, moved=True):
    """(x as the kernels take it, whether that is channels-last, C, pixels, values a channel).

    moved  whether the running statistics will be written to
    """
    arrays.require(x, "x", dtypes=DTYPES, n_dims=4)
    N, C, H, W = x.shape
    allowed = dict.fromkeys(("float32", arrays.dtype_name(x)))
    given = dict(weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    for name, array in given.items():
        if array is None:
            continue
        running = moved and name.startswith("running")
        arrays.require(array, name, shape=(C,), dtypes=allowed, writable=running)
        if running and not arrays.is_contiguous_array(array):
            raise arrays.ArrayError(
                f"{name} must be contiguous; its strides are {arrays.strides_of(array)}"
            )
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must be given together, or neither")
    if eps < 0:
        raise ValueError(f"eps must be at least 0, not {eps}")
    return *arrays.as_images(x), C, H * W, N * H * W


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    row, counted, flag, number = ("float32", 1), ("int32", 1), "boolean", "float32"
    sizes = {"ladder": 5, "alone": 6, "parts": 7, "walk": 8, "pixels": 0}
    for dtype in DTYPES:
        x = (dtype, 1)
        affine = [row, row, flag, flag, flag]
        training = [row] * 4 + [flag, number, number]
        gradients = [row, row, flag]
        rows = [
            (f"forward {name}", *FORWARD[name].kernels, [x] * 2, "ladder", affine + training)
            for name in ("naive", "one_pass", "welford")
        ]
        fixed = [*affine, row, row, flag, number]
        weight = [row, flag, flag, row, row]
        rows += [
            ("forward vectorised, alone", planes_kernels.channel_kernel, [x] * 2, "alone",
             affine + training),
            ("forward vectorised, walk", walk.walk_kernel, [x] * 2 + [row, counted], "walk",
             affine + training),
            ("statistics", planes_kernels.statistics_kernel, [x, row], "parts", []),
            ("normalise", planes_kernels.normalise_kernel, [x] * 2, "parts", fixed),
            ("statistics channels-last", pixels.pixel_statistics_kernel, [x, row], "pixels", []),
            ("normalise channels-last", pixels.pixel_normalise_kernel, [x] * 2, "pixels", fixed),
            ("backward naive", ladder.naive_backward_kernel, [x] * 4, "ladder",
             weight + gradients),
            ("backward block", ladder.block_backward_kernel, [x] * 4, "ladder",
             weight + gradients),
            ("backward vectorised, alone", planes_kernels.channel_backward_kernel, [x] * 4,
             "alone", weight + gradients),
            ("sums", planes_kernels.sums_kernel, [x] * 3 + [row], "parts", [flag, row]),
            ("gradient", planes_kernels.gradient_kernel, [x] * 4, "parts", [*weight, row]),
            ("sums channels-last", pixels.pixel_sums_kernel, [x] * 3 + [row], "pixels",
             [flag, row]),
            ("gradient channels-last", pixels.pixel_gradient_kernel, [x] * 4, "pixels",
             [*weight, row]),
        ]  # fmt: skip
        for label, kernel, images, kind, rest in rows:
            shared = [pixels.Share] if kind == "pixels" else []
            types = images + shared + ["int64"] * sizes[kind] + rest
            yield f"batch_norm {label} {dtype}", kernel, types
        types = [x] * 2 + ["int64"] * 3 + [*affine, row, row, number]
        yield f"batch_norm inference naive {dtype}", ladder.inference_kernel, types
    types = [row, "int64", "int64", *[row] * 4, flag, number, number]
    yield "batch_norm merge statistics", merging.statistics_merge_kernel, types
    types = [row, *["int64"] * 3, *[row] * 4, flag]
    yield "batch_norm merge sums", merging.sums_merge_kernel, types
