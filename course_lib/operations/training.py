"""What only training needs: dropout, and one step of an optimiser."""

from copy import deepcopy

import numpy as np

from course_lib import reference
from course_lib.kernels import dropout, optimizers
from course_lib.operations.numbers import alike, gradient, torch
from course_lib.operations.passes import Operation, Pass
from course_lib.runtime.host.arrays import is_tensor

P, SEED, OFFSET = 0.3, 1234, 0
SGD = dict(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
ADAM = dict(lr=1e-2, weight_decay=0.01)
STEPS = 4  # that the optimiser has made already


def dropout_operation():
    """Of three in ten elements. PyTorch drops others: its result is that of the same mask."""

    def masked(x):
        mask = torch.from_numpy(reference.dropout_mask(tuple(x.shape), P, SEED, OFFSET))
        return x * mask.to(x.device) / (1 - P)

    def truth(x):
        return x * reference.dropout_mask(x.shape, P, SEED, OFFSET) / (1 - P)

    def one(name, ours, inputs):
        return Pass(
            dropout.FORWARD, inputs,
            ours=lambda x, **options: ours(x, P, SEED, OFFSET, **options),
            peer=masked, truth=truth,
            scale=lambda truth, x: np.abs(x), scale_in_words=f"the element's own |{name}|",
            whole=True, out=True, in_place=(name,),
        )  # fmt: skip

    return Operation(
        dropout,
        forward=one("x", dropout.forward, lambda x: {"x": x}),
        backward=one("dy", dropout.backward, lambda x: {"dy": gradient(x)}),
    )


def _step(ladder, ours, peer, truth, n_states, scale_in_words):
    """One step: forward gives the parameter as it is afterwards; there is no backward."""

    def inputs(x):
        states = [alike(abs(gradient(x) * (0.5 + number)), x) for number in range(n_states)]
        return {"parameter": x, "gradient": gradient(x), **dict(zip("mv", states, strict=False))}

    return Operation(
        optimizers,
        forward=Pass(
            ladder, inputs, ours, peer, truth,
            # The step as well as the number it is taken from: either may be the larger one.
            scale=lambda truth, parameter, *rest: np.abs(parameter) + np.abs(truth - parameter),
            scale_in_words=scale_in_words,
        ),
        backward=None,
    )  # fmt: skip


def sgd_operation():
    """With momentum 0.9 (Nesterov's) and weight decay."""

    def ours(parameter, gradient, m, *, variant):
        found, m = deepcopy((parameter, m))
        optimizers.sgd([found], [gradient], [m], variant=variant, **SGD)
        return found

    def peer(parameter, gradient, m):
        found, m = parameter.clone(), m.clone()
        torch.optim._functional.sgd(
            [found], [gradient], [m], dampening=0, maximize=False, foreach=False, **SGD
        )
        return found

    return _step(
        optimizers.SGD, ours, peer, lambda *inputs: reference.sgd(*inputs, **SGD)[0], 1,
        "|parameter| and the step's length",
    )  # fmt: skip


def adam_operation():
    """The step after four others, with weight decay as in Adam, not as in AdamW."""

    def ours(parameter, gradient, m, v, *, variant):
        found, m, v = deepcopy((parameter, m, v))
        count = np.full(1, STEPS, np.float32)
        if is_tensor(found):
            count = torch.from_numpy(count).to(found.device)
        optimizers.adam([found], [gradient], [m], [v], [count], variant=variant, **ADAM)
        return found

    def peer(parameter, gradient, m, v):
        found = parameter.clone()
        torch.optim._functional.adam(
            [found], [gradient], [m.clone()], [v.clone()], [], [torch.tensor(float(STEPS))],
            amsgrad=False, beta1=0.9, beta2=0.999, eps=1e-8, maximize=False, foreach=False, **ADAM,
        )  # fmt: skip
        return found

    return _step(
        optimizers.ADAM, ours, peer, lambda *inputs: reference.adam(*inputs, STEPS, **ADAM)[0], 2,
        "|parameter| and the step's length",
    )  # fmt: skip
