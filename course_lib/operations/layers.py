"""Layers: products with weights, pooling, normalisation. Weights follow from the input's shape."""

import math

import numpy as np

from course_lib import reference
from course_lib.kernels import (
    batch_norm,
    conv2d,
    conv_transpose2d,
    layer_norm,
    linear,
    max_pool2d,
    upsample,
)
from course_lib.operations.numbers import Draw, alike, gradient, saved, torch
from course_lib.operations.passes import Operation, Pass, largest
from course_lib.runtime.host.arrays import is_tensor

IMAGES = "images, N x C x H x W"
TERMS = "the sum of its terms' magnitudes"
POOL = dict(kernel_size=3, stride=2, padding=1)
F, _aten = torch.nn.functional, torch.ops.aten


def _random(x, *shapes):
    """Numbers of these shapes, like x, and always the same; small where many are added up."""
    draw = Draw(sum(map(math.prod, shapes)))
    return [alike(draw.normal(shape) / math.prod(shape[1:]) ** 0.5, x) for shape in shapes]


def _single(x):
    return x.float() if is_tensor(x) else x.astype(np.float32)


def _product(module, ladders, truths, ours, theirs, arrays_of, rungs=None, **facts):
    """An operation that adds up products: forward, backward to x, and to the weights.

    ladders       of forward, of dx and of dweight
    truths        in float64: y of (x, weight, bias); (dx, dweight, …) of (dy, x, weight)
    ours, theirs  (forward, backward) of tensors alike; ours take `variant`, forward `out` too, and
                  backward `needs`
    arrays_of     function(x): weight and bias
    rungs         as in `Pass`
    """
    (forward, dx, dweight), (truth, backward) = ladders, truths

    def inputs(x):
        weight, bias = arrays_of(x)
        return {"x": x, "weight": weight, "bias": bias}

    def backward_inputs(x):
        weight, bias = arrays_of(x)
        y = saved(theirs[0], truth, x, weight, bias)
        return {"dy": gradient(y), "x": x, "weight": weight}

    def gradient_of(number, ladder):
        needs = tuple(which == number for which in range(3))
        there = rungs and tuple(rung for rung in rungs if rung in ladder.variants)
        return Pass(
            ladder, backward_inputs, rungs=there,
            ours=lambda *inputs, variant: ours[1](*inputs, variant=variant, needs=needs)[number],
            peer=lambda *inputs: theirs[1](*inputs)[number],
            truth=lambda *inputs: backward(*inputs)[number],
            scale=lambda truth, *inputs: backward(*map(np.abs, inputs))[number],
            scale_in_words=TERMS, whole=True, unread=("weight" if number else "x",),
        )  # fmt: skip

    return Operation(
        module,
        forward=Pass(
            forward, inputs, ours=ours[0], peer=theirs[0], truth=truth, rungs=rungs,
            scale=lambda found, *inputs: truth(*map(np.abs, inputs)),
            scale_in_words=TERMS, whole=True, out=True,
        ),
        backward=gradient_of(0, dx),
        weights=gradient_of(1, dweight),
        **facts,
    )  # fmt: skip


def linear_operation():
    """Half as many outputs as inputs."""

    def arrays_of(x):
        n_in = x.shape[-1]
        n_out = (n_in + 1) // 2
        return _random(x, (n_out, n_in), (n_out,))

    def backward(dy, x, weight):
        return dy @ weight, dy.flatten(0, -2).mT @ x.flatten(0, -2)

    return _product(
        linear, (linear.FORWARD, linear.BACKWARD, linear.BACKWARD),
        (reference.linear, reference.linear_backward), (linear.forward, linear.backward),
        (F.linear, backward), arrays_of, layout="rows, … x C", example=(8, 32),
    )  # fmt: skip


def conv2d_operation(depthwise=False, pointwise=False):
    """3 x 3 filters, padding 1: as many as channels and one more, or `depthwise` one for each.

    `pointwise` ones are 1 x 1, and held to the way that is theirs alone.
    """

    def options(x):
        return dict(padding=0 if pointwise else 1, groups=x.shape[1] if depthwise else 1)

    def arrays_of(x):
        C, size = x.shape[1], 1 if pointwise else 3
        K, of = (C, 1) if depthwise else (C + 1, C)
        return _random(x, (K, of, size, size), (K,))

    def peer_backward(dy, x, weight):
        return torch.nn.grad.conv2d_input(x.shape, weight, dy, **options(x)), (
            torch.nn.grad.conv2d_weight(x, weight.shape, dy, **options(x)))  # fmt: skip

    def ours(x, *rest, **others):
        return conv2d.forward(x, *rest, **options(x), **others)

    def ours_backward(dy, x, weight, **others):
        return conv2d.backward(dy, x, weight, **options(x), **others)

    other = ("few_channels",) if depthwise else ("depthwise",)
    rungs = tuple(rung for rung in conv2d.FORWARD if rung not in other)
    if depthwise:  # ways that others are taken before
        rungs += ("depthwise/by_element", "tensor_core/few_filters")
    return _product(
        conv2d, (conv2d.FORWARD, conv2d.DX, conv2d.DWEIGHT),
        (lambda x, weight, bias: reference.conv2d(x, weight, bias, **options(x)),
         lambda dy, x, weight: reference.conv2d_backward(dy, x, weight, **options(x))),
        (ours, ours_backward),
        (lambda x, weight, bias: F.conv2d(x, weight, bias, **options(x)), peer_backward),
        arrays_of, ("tensor_core/gemm",) if pointwise else rungs,
        n_dims=4, layout=IMAGES, example=(1, 8, 3, 4) if pointwise else (2, 3, 9, 11),
    )  # fmt: skip


def conv_transpose2d_operation():
    """Filters of 2 x 2 with stride 2, half as many as channels: what doubles images in a U-Net."""

    def arrays_of(x):
        C = x.shape[1]
        K = max(1, C // 2)
        return _random(x, (C, K, 2, 2), (K,))

    def peer_backward(dy, x, weight):
        return _aten.convolution_backward(
            dy, x, weight, None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1, [True, True, False]
        )

    kernels = conv_transpose2d
    return _product(
        kernels, (kernels.FORWARD, kernels.BACKWARD, kernels.BACKWARD),
        (lambda x, weight, bias: reference.conv_transpose2d(x, weight, bias, stride=2),
         lambda dy, x, weight: reference.conv_transpose2d_backward(dy, x, weight, stride=2)),
        (lambda *inputs, **options: kernels.forward(*inputs, stride=2, **options),
         lambda *inputs, **options: kernels.backward(*inputs, stride=2, **options)),
        (lambda x, weight, bias: F.conv_transpose2d(x, weight, bias, stride=2), peer_backward),
        arrays_of, n_dims=4, layout=IMAGES, example=(2, 4, 4, 4),
    )  # fmt: skip


def max_pool2d_operation():
    """Windows of 3 x 3, stride 2, padding 1."""

    def found(x):
        return F.max_pool2d(x, **POOL, return_indices=True)

    def backward_inputs(x):
        y, indices = found(x) if is_tensor(x) else reference.max_pool2d(x, **POOL)
        indices = indices.int() if is_tensor(x) else indices.astype(np.int32)
        return {"dy": gradient(x, y.shape), "indices": indices, "x": x}

    def ours_backward(dy, indices, x, **options):
        return max_pool2d.backward(dy, indices, x.shape, **options, **POOL)

    def peer_backward(dy, indices, x):
        return _aten.max_pool2d_with_indices_backward(
            dy, x, [3, 3], [2, 2], [1, 1], [1, 1], False, indices.long()
        )

    def truth(dy, indices, x):
        return reference.max_pool2d_backward(dy, indices.astype(np.int64), x.shape)

    return Operation(
        max_pool2d,
        forward=Pass(
            max_pool2d.FORWARD,
            inputs=lambda x: {"x": x},
            ours=lambda x, **options: max_pool2d.forward(x, **options, **POOL)[0],
            peer=lambda x: found(x)[0], truth=lambda x: reference.max_pool2d(x, **POOL)[0],
            out=True,
        ),
        backward=Pass(
            max_pool2d.BACKWARD,
            backward_inputs, ours_backward, peer_backward, truth,
            scale=lambda found, dy, indices, x: truth(np.abs(dy), indices, x),
            scale_in_words=TERMS, out=True, unread=("x",),
        ),
        n_dims=4, layout=IMAGES, example=(2, 3, 9, 11),
    )  # fmt: skip


def batch_norm_operation():
    """In training: statistics of this batch, weights and biases for each channel."""

    def affine(x):
        return [_single(each) for each in _random(x, (x.shape[1],), (x.shape[1],))]

    def inputs(x):
        return dict(zip(("x", "weight", "bias"), (x, *affine(x)), strict=True))

    def statistics(x):
        if not is_tensor(x):
            return [_single(each) for each in reference.batch_norm(x)[1:]]
        variance, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
        return mean.float(), torch.rsqrt(variance + 1e-5).float()

    def backward_inputs(x):
        mean, rstd = statistics(x)
        return {"dy": gradient(x), "x": x, "weight": affine(x)[0], "mean": mean, "rstd": rstd}

    def peer_backward(dy, x, weight, mean, rstd):
        return _aten.native_batch_norm_backward(
            dy, x, weight, None, None, mean, rstd, True, 1e-5, [True, True, True]
        )

    def by_channel(values):
        return values[:, None, None]

    def gradient_of(number, scale, words):
        return Pass(
            batch_norm.BACKWARD, backward_inputs,
            ours=lambda *inputs, **options: batch_norm.backward(*inputs, **options)[number],
            peer=lambda *inputs: peer_backward(*inputs)[number],
            truth=lambda *inputs: reference.batch_norm_backward(*inputs)[number],
            scale=scale, scale_in_words=words, whole=True, out=number == 0,
        )  # fmt: skip

    def backward_scale(truth, dy, x, weight, mean, rstd):
        most = np.abs(dy).max(axis=(0, 2, 3), initial=0.0)
        reach = 1 + np.abs((x - by_channel(mean)) * by_channel(rstd)).max(initial=0.0)
        return np.broadcast_to(by_channel(most * reach * np.abs(weight) * rstd), truth.shape)

    def weight_scale(truth, dy, x, weight, mean, rstd):
        return np.abs(dy * (x - by_channel(mean)) * by_channel(rstd)).sum(axis=(0, 2, 3))

    def by_running(x):
        mean, rstd = statistics(x)
        return inputs(x) | {"running_mean": mean + 0.1, "running_var": rstd**-2 + 0.1}

    def of_channel(truth, *inputs):
        most = np.abs(truth).max(axis=(0, 2, 3), initial=0.0)
        return np.broadcast_to(by_channel(most), truth.shape)

    return Operation(
        batch_norm,
        forward=Pass(
            batch_norm.FORWARD, inputs,
            ours=lambda *inputs, **options: batch_norm.forward(*inputs, **options)[0],
            peer=lambda x, weight, bias: _aten.native_batch_norm(
                x, weight, bias, None, None, True, 0.1, 1e-5)[0],
            truth=lambda *inputs: reference.batch_norm(*inputs)[0],
            scale=of_channel, scale_in_words="the channel's largest |y|", whole=True, out=True,
        ),
        inference=Pass(
            batch_norm.INFERENCE, by_running, ours=batch_norm.inference,
            peer=lambda x, weight, bias, mean, var: F.batch_norm(x, mean, var, weight, bias),
            truth=lambda x, weight, bias, mean, var: reference.batch_norm(
                x, weight, bias, mean=mean, var=var)[0],
            scale=of_channel, scale_in_words="the channel's largest |y|", whole=True, out=True,
        ),
        backward=gradient_of(0, backward_scale, "the channel's largest |dy| · weight / σ"),
        weights=gradient_of(1, weight_scale, TERMS),
        n_dims=4, layout=IMAGES, example=(4, 3, 6, 5),
    )  # fmt: skip


def layer_norm_operation():
    """Weights and biases for each column, of x's dtype."""

    def affine(x):
        return _random(x, (x.shape[-1],), (x.shape[-1],))

    def inputs(x):
        return dict(zip(("x", "weight", "bias"), (x, *affine(x)), strict=True))

    def statistics(x):
        if not is_tensor(x):
            return reference.layer_norm(x)[1:]
        mean = x.double().mean(-1)
        return mean, torch.rsqrt((x - mean[..., None]).square().mean(-1) + 1e-5)

    def backward_inputs(x):
        mean, rstd = map(_single, statistics(x))
        return {"dy": gradient(x), "x": x, "weight": affine(x)[0], "mean": mean, "rstd": rstd}

    def peer_backward(dy, x, weight, mean, rstd):
        of_rows = (each[..., None] for each in (mean, rstd))
        # On a CPU weights go with the statistics, which are float32.
        given = weight.float() if x.device.type == "cpu" else weight
        dx, *sums = _aten.native_layer_norm_backward(
            dy, x, list(x.shape[-1:]), *of_rows, given, torch.zeros_like(given), [True] * 3
        )
        return dx, *(each.to(weight.dtype) for each in sums)

    def forward_scale(truth, x, weight, bias):
        _, mean, rstd = reference.layer_norm(x)
        far = np.abs(mean * rstd)[..., None]  # what x has lost to a mean far from zero
        return largest(truth) + far * largest(weight)

    def magnitudes(dy, x, weight, mean, rstd):
        """Of x̂, and of g = dy·weight."""
        return np.abs((x - mean[..., None]) * rstd[..., None]), np.abs(dy * weight)

    def backward_scale(truth, *inputs):
        x_hat, g = magnitudes(*inputs)
        share = x_hat.mean(axis=-1, keepdims=True) if x_hat.size else x_hat
        return inputs[-1][..., None] * largest(g) * (1 + largest(x_hat) * share)

    def weight_scale(truth, *inputs):
        rows = tuple(range(inputs[0].ndim - 1))
        return (np.abs(inputs[0]) * magnitudes(*inputs)[0]).sum(axis=rows)

    def gradient_of(number, scale, words, **facts):
        return Pass(
            layer_norm.BACKWARD, backward_inputs,
            ours=lambda *inputs, **options: layer_norm.backward(*inputs, **options)[number],
            peer=lambda *inputs: peer_backward(*inputs)[number],
            truth=lambda *inputs: reference.layer_norm_backward(*inputs)[number],
            scale=scale, scale_in_words=words, whole=True, **facts,
        )  # fmt: skip

    return Operation(
        layer_norm,
        forward=Pass(
            layer_norm.FORWARD, inputs,
            ours=lambda *inputs, **options: layer_norm.forward(*inputs, **options)[0],
            peer=lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias),
            truth=lambda *inputs: reference.layer_norm(*inputs)[0],
            scale=forward_scale, whole=True,
            scale_in_words="the row's largest |y|, and |mean| / σ · the largest |weight|",
            chosen=lambda x, *_: layer_norm.default_variant("forward", x.shape[-1]),
            out=True, in_place=("x",),
        ),
        backward=gradient_of(
            0, backward_scale,
            "the row's largest |g| · (1 + largest |x̂| · mean |x̂|) / σ, g = dy · weight",
            out=True, in_place=("dy", "x"),
        ),
        weights=gradient_of(1, weight_scale, TERMS),
        layout="any shape, and works along its last axis",
    )  # fmt: skip


def upsample_operation():
    """Twice as high and wide, bilinear."""
    options = dict(mode="bilinear", align_corners=False)

    def backward_inputs(x):
        N, C, H, W = x.shape
        return {"dy": gradient(x, (N, C, 2 * H, 2 * W)), "x": x}

    def peer_backward(dy, x):
        size = [2 * n for n in x.shape[2:]]
        return _aten.upsample_bilinear2d_backward(dy, size, list(x.shape), False, 2.0, 2.0)

    def ours(x, **others):
        return upsample.forward(x, [2 * n for n in x.shape[2:]], **options, **others)

    return Operation(
        upsample,
        forward=Pass(
            upsample.FORWARD, inputs=lambda x: {"x": x},
            ours=ours, peer=lambda x: F.interpolate(x, scale_factor=2, **options),
            truth=lambda x: reference.upsample(x, [2 * n for n in x.shape[2:]], **options),
            scale=lambda truth, x: np.abs(x).max(axis=(2, 3), keepdims=True, initial=0.0),
            scale_in_words="the plane's largest |x|", out=True,
        ),
        backward=Pass(
            upsample.BACKWARD,
            backward_inputs,
            ours=lambda dy, x, **others: upsample.backward(dy, x.shape, **options, **others),
            peer=peer_backward,
            truth=lambda dy, x: reference.upsample_backward(dy, x.shape, **options),
            scale=lambda truth, dy, x: reference.upsample_backward(
                np.abs(dy), x.shape, **options),
            scale_in_words=TERMS, out=True, unread=("x",),
        ),
        n_dims=4, layout=IMAGES, example=(2, 3, 5, 6),
    )  # fmt: skip
