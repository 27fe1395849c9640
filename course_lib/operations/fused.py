"""Operations that are one kernel here and a chain of operators in PyTorch."""

import math

import numpy as np

from course_lib import reference
from course_lib.kernels import (
    bn_relu_softmax,
    cross_entropy,
    dice,
    scaled_softmax,
    softmax_dropout,
)
from course_lib.operations.numbers import Draw, beside, gradient, saved, torch
from course_lib.operations.passes import Operation, Pass, largest
from course_lib.runtime.host.arrays import is_tensor

F = torch.nn.functional
DROPPED, SEED = 0.1, 2011  # of softmax_dropout: the probability, and the mask's seed
SCALED = dict(scale=0.3, causal=True)  # of scaled_softmax


def losses(x):
    """The shape of a loss for each row or pixel."""
    return x.shape[0], *x.shape[2:]


def classes(x):
    """A class for each row or pixel, always the same."""
    return beside(Draw(math.prod(x.shape) + 2).integers(max(1, x.shape[1]), losses(x)), x)


def cross_entropy_operation(images):
    """With class indices, and a loss for each row, or pixel of `images`: no sum hides an error."""
    options = {"reduction": "none"}
    of_images = tuple(rung for rung in cross_entropy.FORWARD if rung == "strided")
    rungs = tuple(rung for rung in cross_entropy.FORWARD if (rung in of_images) == images)

    def forward_inputs(x):
        return {"logits": x, "target": classes(x)}

    def backward_inputs(x):
        return {"dloss": gradient(x, losses(x))} | forward_inputs(x)

    def ours_backward(dloss, logits, target, *, variant, out=None):
        _, stats, normaliser = cross_entropy.forward(logits, target, variant=variant, **options)
        return cross_entropy.backward(
            dloss, logits, target, stats, normaliser, variant=variant, out=out, **options
        )

    def peer_backward(dloss, logits, target):
        logits = logits.detach().requires_grad_()
        loss = F.cross_entropy(logits, target, **options)
        return torch.autograd.grad(loss, logits, dloss)[0]

    def truth_backward(dloss, logits, target):
        return reference.cross_entropy_backward(dloss, logits, target.astype(int), **options)

    return Operation(
        cross_entropy,
        forward=Pass(
            cross_entropy.FORWARD,
            inputs=forward_inputs,
            ours=lambda *inputs, variant: cross_entropy.forward(
                *inputs, variant=variant, **options
            )[0],
            peer=lambda logits, target: F.cross_entropy(logits, target, **options),
            truth=lambda logits, target: reference.cross_entropy(
                logits, target.astype(int), **options
            ),
            scale=lambda truth, logits, target: np.maximum(
                np.abs(logits).max(axis=1, initial=0.0), np.abs(truth)
            ),
            scale_in_words=f"the {'pixel' if images else 'row'}'s largest |logit|, or |loss|",
            rungs=rungs,
        ),
        backward=Pass(
            cross_entropy.BACKWARD,
            inputs=backward_inputs,
            ours=ours_backward,
            peer=peer_backward,
            truth=truth_backward,
            scale=lambda truth, dloss, logits, target: np.abs(dloss)[:, None],
            scale_in_words=f"the {'pixel' if images else 'row'}'s |dloss|",
            rungs=rungs,
            out=True,
        ),
        n_dims=4 if images else 2,
        layout="images of logits, N x C x H x W" if images else "logits, rows x classes",
        example=(2, 3, 5, 7) if images else (8, 50),
    )


def softmax_dropout_operation():
    """With the mask that the reference's own generator gives: one that is wrong shows at once."""

    def keep(x):
        mask = reference.dropout_mask(tuple(x.shape), DROPPED, SEED, 0)
        return torch.from_numpy(mask).to(x.device) if is_tensor(x) else mask

    def drop(y, keep):
        return y * keep / (1 - DROPPED)

    def ours(x, keep, **options):
        return softmax_dropout.forward(x, DROPPED, SEED, 0, **options)[0]

    def ours_backward(dz, x, keep, **options):
        _, stats = softmax_dropout.forward(x, DROPPED, SEED, 0, variant="naive")
        return softmax_dropout.backward(dz, x, stats, DROPPED, SEED, 0, **options)

    def peer_backward(dz, x, keep):
        y = torch.softmax(x, -1)
        return torch.ops.aten._softmax_backward_data(drop(dz, keep), y, -1, x.dtype)

    return Operation(
        softmax_dropout,
        forward=Pass(
            softmax_dropout.FORWARD,
            inputs=lambda x: {"x": x, "keep": keep(x)},
            ours=ours,
            peer=lambda x, keep: drop(torch.softmax(x, -1), keep),
            truth=lambda x, keep: drop(reference.softmax(x), keep),
            scale_in_words="the row's largest |z|",
            out=True,
            unread=("keep",),
        ),
        backward=Pass(
            softmax_dropout.BACKWARD,
            inputs=lambda x: {"dz": gradient(x), "x": x, "keep": keep(x)},
            ours=ours_backward,
            peer=peer_backward,
            truth=lambda dz, x, keep: reference.softmax_backward(
                drop(dz, keep), reference.softmax(x)
            ),
            scale=lambda truth, dz, x, keep: largest(reference.softmax(x)) * largest(dz),
            scale_in_words="the row's largest |y| · largest |dz|, y before dropout",
            out=True,
            unread=("keep",),
        ),
        layout="any shape, and works along its last axis",
    )


def scaled_softmax_operation():
    """Causal, and with a mask for all heads of a batch that is added."""

    def forward_inputs(x):
        return {"x": x, "mask": gradient(x[:, :1])}

    def peer(x, mask):
        seen = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
        scores = (x * SCALED["scale"] + mask).masked_fill(~seen, -torch.inf)
        return torch.softmax(scores, -1)

    def truth(x, mask):
        return reference.scaled_softmax(x, mask, **SCALED)

    def peer_backward(dy, y):
        return SCALED["scale"] * torch.ops.aten._softmax_backward_data(dy.tril(), y, -1, y.dtype)

    return Operation(
        scaled_softmax,
        forward=Pass(
            scaled_softmax.FORWARD,
            inputs=forward_inputs,
            ours=lambda *inputs, **options: scaled_softmax.forward(*inputs, **SCALED, **options),
            peer=peer,
            truth=truth,
            scale=lambda truth, x, mask: largest(truth) * (1 + largest(x) * SCALED["scale"]),
            scale_in_words="the row's largest |y|, times its largest score",
            out=True,
        ),
        backward=Pass(
            scaled_softmax.BACKWARD,
            inputs=lambda x: {
                "dy": gradient(x), "y": saved(peer, truth, *forward_inputs(x).values()),
            },
            ours=lambda *inputs, **options: scaled_softmax.backward(*inputs, **SCALED, **options),
            peer=peer_backward,
            truth=lambda *inputs: reference.scaled_softmax_backward(*inputs, **SCALED),
            scale=lambda truth, dy, y: largest(y) * largest(dy) * SCALED["scale"],
            scale_in_words="the row's largest |y| · largest |dy|, scaled",
            out=True,
        ),
        n_dims=4,
        layout="scores, B x H x T x S",
        example=(2, 3, 4, 16),
    )


def bn_relu_softmax_operation():
    """Inference statistics, float32; of the gradients, dx."""

    def statistics(x):
        """mean, var, weight, bias of the features of x, always the same; as x's kind of array.

        The variance is about that of x, as it is where a network has been trained.
        """
        C, draw = x.shape[1], Draw(x.shape[1])
        mean, weight, bias = (draw.normal((C,)) for _ in range(3))
        found = mean, 9 * (draw.uniform((C,)) + 0.5), weight, bias
        return [beside(one, x) for one in found]

    def peer(x):
        mean, var, weight, bias = statistics(x)
        return torch.softmax(torch.relu(F.batch_norm(x, mean, var, weight, bias)), -1)

    def peer_backward(dy, y, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(peer(x), x, dy)[0]

    def truth(x):
        return reference.bn_relu_softmax(x, *statistics(x))

    def steepness(truth, dy, y, x):
        _, var, weight, _ = statistics(x)
        return largest(y) * largest(dy) * np.abs(weight / np.sqrt(var))

    return Operation(
        bn_relu_softmax,
        forward=Pass(
            bn_relu_softmax.FORWARD,
            inputs=lambda x: {"x": x},
            ours=lambda x, **options: bn_relu_softmax.forward(x, *statistics(x), **options),
            peer=peer,
            truth=truth,
            out=True,
        ),
        backward=Pass(
            bn_relu_softmax.BACKWARD,
            inputs=lambda x: {"dy": gradient(x), "y": saved(peer, truth, x), "x": x},
            ours=lambda *inputs, **options: bn_relu_softmax.backward(
                *inputs, *statistics(inputs[-1]), **options
            )[0],
            peer=peer_backward,
            truth=lambda dy, y, x: reference.bn_relu_softmax_backward(
                dy, y, x, *statistics(x)
            )[0],
            scale=steepness,
            scale_in_words="the row's largest |y| · largest |dy|, times |weight| / √var",
            out=True,
        ),
        n_dims=2,
        layout="rows x features",
    )


def dice_loss_operation():
    """Of images' classes, N x C x H x W: one number, and its gradient to the logits."""

    def forward_inputs(x):
        return {"logits": x, "target": classes(x)}

    def peer(logits, target):
        p = torch.softmax(logits.float(), 1)
        t = F.one_hot(target, logits.shape[1]).movedim(-1, 1)
        pixels = 0, *range(2, p.ndim)
        found = (2 * (p * t).sum(pixels) + 1) / (p.sum(pixels) + t.sum(pixels) + 1)
        return (1 - found.mean()).to(logits.dtype).reshape(1)

    def one(x):
        return x.new_ones(()) if is_tensor(x) else np.ones((), x.dtype)

    def ours_backward(dloss, logits, target, *, variant, out=None):
        _, factors = dice.forward(logits, target, variant=variant)
        return dice.backward(dloss, logits, target, factors, variant=variant, out=out)

    def peer_backward(dloss, logits, target):
        logits = logits.detach().requires_grad_()
        return torch.autograd.grad(peer(logits, target), logits, dloss.reshape(1))[0]

    def truth(logits, target):
        return reference.dice_loss(logits, target.astype(int)).reshape(1)

    def steepness(truth, dloss, logits, target):
        """The pixel's largest p, times the largest derivative of the loss by any p."""
        p, pixels = reference.softmax(np.moveaxis(logits, 1, -1)), tuple(range(logits.ndim - 1))
        counts = [np.sum(target == c) for c in range(logits.shape[1])]
        smallest = (p.sum(axis=pixels) + counts + 1).min(initial=np.inf)
        most = np.moveaxis(largest(p), -1, 1) * 3 / (max(1, len(counts)) * smallest)
        return np.broadcast_to(most, truth.shape)

    return Operation(
        dice,
        forward=Pass(
            dice.FORWARD, forward_inputs,
            ours=lambda *inputs, variant: dice.forward(*inputs, variant=variant)[0].reshape(1),
            peer=peer, truth=truth,
            scale=lambda truth, *inputs: np.ones(1), scale_in_words="1", whole=True,
        ),
        backward=Pass(
            dice.BACKWARD,
            inputs=lambda x: {"dloss": one(x)} | forward_inputs(x),
            ours=ours_backward, peer=peer_backward,
            truth=lambda dloss, logits, target: reference.dice_loss_backward(
                dloss, logits, target.astype(int)),
            scale=steepness, whole=True, out=True,
            scale_in_words="the pixel's largest p · the largest |dloss/dp|",
        ),
        n_dims=4, layout="images of logits, N x C x H x W",
        example=(2, 3, 5, 7),
    )  # fmt: skip
