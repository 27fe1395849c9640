"""Operations on images: N x C x H x W."""

import math

import numpy as np

from course_lib import reference
from course_lib.kernels import global_avg_pool, squeeze_excite
from course_lib.operations.numbers import Draw, beside, gradient, torch
from course_lib.operations.passes import Operation, Pass

F = torch.nn.functional
SQUEEZE = 4  # channels of x for each number of the hidden layer of squeeze_excite


def global_avg_pool_operation():
    pool = global_avg_pool

    def share(dy, size):
        return torch.div(dy[:, :, None, None].expand(*dy.shape, *size), math.prod(size))

    def mean_magnitude(truth, x):
        return np.abs(x).sum(axis=(2, 3)) / max(1, x.shape[2] * x.shape[3])

    return Operation(
        pool,
        forward=Pass(
            pool.FORWARD,
            inputs=lambda x: {"x": x},
            ours=pool.forward,
            peer=lambda x: torch.mean(x, (2, 3)),
            truth=reference.global_avg_pool,
            scale=mean_magnitude,
            scale_in_words="the plane's mean |x|",
            out=True,
        ),
        backward=Pass(
            pool.BACKWARD,
            inputs=lambda x: {"dy": gradient(x, x.shape[:2]), "size": x.shape[2:]},
            ours=pool.backward,
            peer=share,
            truth=reference.global_avg_pool_backward,
            scale_in_words="the row's largest |dx|",
            out=True,
        ),
        n_dims=4,
        layout="images, N x C x H x W",
        example=(2, 3, 5, 7),
    )


def squeeze_excite_operation():
    """With SiLU and sigmoid, float32 weights, and a quarter as many hidden numbers as channels.

    Of the gradients, dx.
    """

    def weights(x):
        """Weights for the channels of x, always the same; as x's kind of array."""
        C = x.shape[1]
        R = max(1, C // SQUEEZE)
        draw, shapes = Draw(C), ((R, C), (R,), (C, R), (C,))
        found = [draw.normal(shape) / max(1, shape[-1]) ** 0.5 for shape in shapes]
        return [beside(one, x) for one in found]

    def peer(x):
        weight1, bias1, weight2, bias2 = weights(x)
        hidden = F.silu(F.linear(x.float().mean((2, 3)), weight1, bias1))
        gate = torch.sigmoid(F.linear(hidden, weight2, bias2))
        return x * gate.to(x.dtype)[:, :, None, None]

    def peer_backward(dy, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(peer(x), x, dy)[0]

    def ours_backward(dy, x, **options):
        weight1, bias1, weight2, bias2 = weights(x)
        affine = weight1, bias1, weight2, bias2
        _, *saved = squeeze_excite.forward(x, *affine, variant="separate")
        return squeeze_excite.backward(dy, x, weight1, weight2, *saved, **options)[0]

    def image_largest(truth, dy, x):
        return np.abs(truth).max(axis=(1, 2, 3), keepdims=True, initial=0.0)

    return Operation(
        squeeze_excite,
        forward=Pass(
            squeeze_excite.FORWARD,
            inputs=lambda x: {"x": x},
            ours=lambda x, **options: squeeze_excite.forward(x, *weights(x), **options)[0],
            peer=peer,
            truth=lambda x: reference.squeeze_excite(x, *weights(x)),
            scale=lambda truth, x: np.abs(x),
            scale_in_words="the element's own |x|",
            out=True,
        ),
        backward=Pass(
            squeeze_excite.BACKWARD,
            inputs=lambda x: {"dy": gradient(x), "x": x},
            ours=ours_backward,
            peer=peer_backward,
            truth=lambda dy, x: reference.squeeze_excite_backward(dy, x, *weights(x))[0],
            scale=image_largest,
            scale_in_words="the image's largest |dx|",
            out=True,
        ),
        n_dims=4,
        layout="images, N x C x H x W",
        example=(2, 3, 5, 7),
    )
