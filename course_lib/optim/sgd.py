"""Stochastic gradient descent on our kernels."""

import torch

from course_lib.kernels import optimizers
from course_lib.optim.fused import Fused, rate

_NUMBERS = "lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"


class SGD(Fused, torch.optim.SGD):
    """As `torch.optim.SGD`, in one launch for all parameters of a group and dtype.

    Sparse gradients are refused. A learning rate that is a float32 tensor on the parameters' GPU is
    read there, also by a captured CUDA graph; the step that makes the momentum buffers must come
    before the capture.
    """

    theirs = torch.optim.SGD

    def _names(self, group):
        return ["momentum_buffer"] if group["momentum"] else []

    def _kind(self, p, group):
        # With whether this is the parameter's first step.
        first = group["momentum"] != 0 and self.state[p].get("momentum_buffer") is None
        if first:
            self._refuse_capture(p)
        return first, p.device

    def _update(self, group, kind, parameters, gradients):
        if not kind[0]:
            super()._update(group, kind, parameters, gradients)
            return
        # The host may wait for the GPU here: a first step is never captured. And a buffer that no
        # step has filled must not be there for the next one.
        found_inf = self._of_scaler("found_inf")
        if found_inf is not None and found_inf.item() != 0:
            return
        buffers = [torch.empty_like(p, requires_grad=False) for p in parameters]
        self._run_new(group, parameters, gradients, [buffers], first_step=True)
        for p, buffer in zip(parameters, buffers, strict=True):
            self.state[p]["momentum_buffer"] = buffer

    def _numbers(self, group):
        return [group[name] for name in _NUMBERS]

    def _launch(self, group, parameters, gradients, states, **options):
        optimizers.sgd(
            parameters, gradients, *states, **options,
            **{name: group[name] for name in _NUMBERS} | {"lr": rate(group["lr"], parameters[0])},
        )  # fmt: skip
