"""Adam and AdamW on our kernels."""

import torch

from course_lib.kernels import optimizers
from course_lib.optim.fused import Fused, rate

_NUMBERS = "lr", "eps", "weight_decay", "decoupled_weight_decay", "maximize"


class Adam(Fused, torch.optim.Adam):
    """As `torch.optim.Adam`, in one launch for all parameters of a group and dtype.

    Sparse gradients are refused. The counts of steps lie on the parameters' device, as with
    PyTorch's ``capturable=True``: a captured CUDA graph goes on counting. A learning rate that is
    a float32 tensor there is read there, too. The first step must come before the capture.
    """

    theirs = torch.optim.Adam

    def _names(self, group):
        peak = ["max_exp_avg_sq"] if group["amsgrad"] else []
        return ["exp_avg", "exp_avg_sq", *peak, "step"]

    def _kind(self, p, group):
        state = self.state[p]
        missing = [] if state else ["exp_avg", "exp_avg_sq"]
        if group["amsgrad"] and "max_exp_avg_sq" not in state:
            missing.append("max_exp_avg_sq")
        step = state.get("step")
        if missing or step.device != p.device or step.dtype is not torch.float32:
            self._refuse_capture(p)
            step = 0.0 if step is None else step
            state["step"] = torch.as_tensor(step, dtype=torch.float32).to(p.device)
            for name in missing:
                state[name] = torch.zeros_like(p, requires_grad=False)
        return p.device

    def _numbers(self, group):
        return *group["betas"], *[group[name] for name in _NUMBERS]

    def _launch(self, group, parameters, gradients, states, **options):
        first, second, *peak, steps = states
        optimizers.adam(
            parameters, gradients, first, second, steps, max_exp_avg_sqs=peak[0] if peak else None,
            betas=group["betas"], **options,
            **{name: group[name] for name in _NUMBERS} | {"lr": rate(group["lr"], parameters[0])},
        )  # fmt: skip


class AdamW(Adam, torch.optim.AdamW):
    """As `torch.optim.AdamW`: `Adam` with a weight decay that does not enter the averages."""

    theirs = torch.optim.AdamW
