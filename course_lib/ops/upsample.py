"""Upsampling by the nearest or the surrounding pixels as an operator of PyTorch."""

import math

import torch

from course_lib.kernels import upsample as kernels
from course_lib.ops.checks import require, require_tensor
from course_lib.ops.formats import empty, memory_format
from course_lib.ops.registration import Operator, as_float32, require_floating_point
from course_lib.runtime.host.launch_cache import cached_launch

_aten = torch.ops.aten
_OPTIONS = "float? factor_h, float? factor_w, str mode, bool align_corners"


def _check(x, size, factor_h, factor_w, mode, align_corners):
    require(x, "input", n_dims=4)
    _check_sizes(x.shape[1:], size)
    _check_options(factor_h, factor_w, mode)


def _check_backward(grad_output, shape, factor_h, factor_w, mode, align_corners):
    require(grad_output, "grad_output", n_dims=4)
    if len(shape) != 4:
        raise RuntimeError(f"shape must be that of the input, N·C·H·W, not {list(shape)}")
    _check_sizes(shape[1:], grad_output.shape[2:])
    require(grad_output, "grad_output", shape=(*shape[:2], *grad_output.shape[2:]))
    _check_options(factor_h, factor_w, mode)


def _check_sizes(sizes, new_sizes):
    if min(*sizes, *new_sizes) < 1:
        raise RuntimeError(
            "Input and output sizes should be greater than 0, but got input (C, H, W): "
            f"{tuple(sizes)}, output (H, W): {tuple(new_sizes)}"
        )


def _check_options(factor_h, factor_w, mode):
    if mode not in kernels.MODES:
        raise RuntimeError(f"mode must be {' or '.join(kernels.MODES)}, not {mode!r}")
    if any(f is not None and not 0 < f < math.inf for f in (factor_h, factor_w)):
        raise RuntimeError(f"scale factors must be above 0, not {(factor_h, factor_w)}")


def _kernel(x, size, factor_h, factor_w, mode, align_corners):
    return _forward(x, tuple(size), _pair_of(factor_h, factor_w), mode, align_corners)


@cached_launch(1)
def _forward(x, size, factors, mode, align_corners):
    require_floating_point("upsample", x.dtype)
    return kernels.forward(
        x, size, mode=mode, align_corners=align_corners, scale_factor=factors
    )


def _backward_kernel(grad_output, shape, factor_h, factor_w, mode, align_corners):
    return _gradient_of_x(
        grad_output, tuple(shape), _pair_of(factor_h, factor_w), mode, align_corners
    )


@cached_launch(1)
def _gradient_of_x(grad_output, shape, factors, mode, align_corners):
    return kernels.backward(
        grad_output, shape, mode=mode, align_corners=align_corners, scale_factor=factors
    )


def _pair_of(factor_h, factor_w):
    return None if factor_h is None and factor_w is None else (factor_h, factor_w)


def _by_torch(x, size, factor_h, factor_w, mode, align_corners):
    if mode == "nearest":
        y = _aten.upsample_nearest2d(x, size, factor_h, factor_w)
    else:
        y = _aten.upsample_bilinear2d(x, size, align_corners, factor_h, factor_w)
    return y.contiguous(memory_format=memory_format(x))


def _backward_by_torch(grad_output, shape, factor_h, factor_w, mode, align_corners):
    size = list(grad_output.shape[2:])
    if mode == "nearest":
        found = _aten.upsample_nearest2d_backward(grad_output, size, shape, factor_h, factor_w)
    else:
        found = _aten.upsample_bilinear2d_backward(
            grad_output, size, shape, align_corners, factor_h, factor_w
        )
    return found.contiguous(memory_format=memory_format(grad_output))


def _fake(x, size, *_):
    return empty((*x.shape[:2], *size), x)


def _fake_backward(grad_output, shape, *_):
    return empty(tuple(shape), grad_output)


def _save(ctx, inputs, y):
    x, _, *ctx.options = inputs
    ctx.shape = list(x.shape)


def _gradient(ctx, grad_output):
    return _backward(grad_output, ctx.shape, *ctx.options), None, None, None, None, None


_backward = Operator(
    "upsample_backward",
    f"(Tensor grad_output, SymInt[] shape, {_OPTIONS}) -> Tensor",
    kernel=_backward_kernel,
    on_cpu=_backward_by_torch,
    fake=_fake_backward,
    check=_check_backward,
    title="UpsampleBackward",
)
_upsample = Operator(
    "upsample",
    f"(Tensor x, SymInt[2] size, {_OPTIONS}) -> Tensor",
    kernel=_kernel,
    on_cpu=_by_torch,
    fake=_fake,
    check=_check,
    save=_save,
    gradient=_gradient,
    autocast={"cuda": lambda x, *others: (as_float32(x), *others)},
    title="Upsample",
)


def interpolate(
    input, size=None, scale_factor=None, mode="nearest", align_corners=None,
    recompute_scale_factor=None, antialias=False,
):  # fmt: skip
    """Images of another size, as `torch.nn.functional.interpolate`.

    input         (N, C, H, W), float32, float16 or bfloat16, on a CPU float64 too. Contiguous or
                  channels-last, and the result the same; in other layouts it is copied
    size          an int or a pair; or, in its place,
    scale_factor  a number or a pair: the size is ⌊H·scale_factor⌋, and pixels are 1/scale_factor
                  apart, unless `recompute_scale_factor`
    mode          "nearest" or "bilinear"

    Second gradients raise RuntimeError. Raises what PyTorch raises for arguments that do not go
    together, and NotImplementedError for other modes, dimensions and `antialias`.
    """
    require_tensor(input, "input")
    if mode not in kernels.MODES or antialias or input.dim() != 4:
        raise NotImplementedError(
            f"interpolate takes images (N, C, H, W) by {' or '.join(kernels.MODES)}, without "
            f"antialias; not {input.dim()} dimensions by {mode!r}, antialias={antialias}: "
            "torch.nn.functional.interpolate does"
        )
    if mode == "nearest" and align_corners is not None:
        raise ValueError("align_corners option can only be set with mode='bilinear'")
    if (size is None) == (scale_factor is None):
        raise ValueError("one, and only one, of size and scale_factor must be given")
    factors = None, None
    if size is None:
        factors = _pair(scale_factor, "scale_factor")
        size = tuple(math.floor(n * f) for n, f in zip(input.shape[2:], factors, strict=True))
        if recompute_scale_factor:
            factors = None, None
    else:
        size = _pair(size, "size")
        if recompute_scale_factor:
            raise ValueError("recompute_scale_factor is not meaningful with an explicit size.")
    factors = (None if f is None else float(f) for f in factors)
    return _upsample(input, list(size), *factors, mode, bool(align_corners))


def _pair(value, name):
    if not isinstance(value, (tuple, list)):
        return value, value
    if len(value) != 2:
        raise ValueError(f"{name} must be one number or two for images, not {value!r}")
    return tuple(value)
