"""Stochastic gradient descent on our kernels."""

import torch

from course_lib.kernels import optimizers
from course_lib.optim.fused import Fused, rate


class SGD(Fused, torch.optim.SGD):
    """As `torch.optim.SGD`, in one launch for all parameters of a group and dtype.

    Sparse gradients are refused. A learning rate that is a float32 tensor on the parameters' GPU is
    read there, also by a captured CUDA graph; the step that makes the momentum buffers must come
    before the capture.
    """

    theirs = torch.optim.SGD

    def _kind(self, p, group):
        # With whether this is the parameter's first step.
        first = group["momentum"] != 0 and self.state[p].get("momentum_buffer") is None
        if first:
            self._refuse_capture(p)
        return first, p.device

    def _update(self, group, kind, parameters, gradients):
        first_step, buffers = kind[0], None
        if first_step:
            buffers = [torch.empty_like(p, requires_grad=False) for p in parameters]
        elif group["momentum"]:
            buffers = self._states(parameters, "momentum_buffer")
        table, again = self._table(parameters, gradients, () if buffers is None else (buffers,))
        optimizers.sgd(
            parameters, gradients, buffers, lr=rate(group["lr"], parameters[0]),
            momentum=group["momentum"], dampening=group["dampening"],
            weight_decay=group["weight_decay"], nesterov=group["nesterov"],
            maximize=group["maximize"], first_step=first_step, table=table, again=again,
        )  # fmt: skip
        if first_step:
            for p, buffer in zip(parameters, buffers, strict=True):
                self.state[p]["momentum_buffer"] = buffer
