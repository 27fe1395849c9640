"""An average of a network's weights over the steps, which often answers better than the last."""

import copy

import torch


class Average:
    """The exponential moving average of `model`: its weights, and its running statistics.

    decay  what a step leaves of the average before it, in the long run: it is 1/10 in the first
           step, then (1 + n)/(10 + n), so that the first weights are soon forgotten

    `module` is the averaged network. PyTorch's AveragedModel does as much, but lets the host wait
    for a GPU in every step.
    """

    def __init__(self, model, decay):
        self.decay, self.steps = decay, 0
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        pairs = list(zip(_tensors(self.module), _tensors(model), strict=True))
        self.floats = [pair for pair in pairs if pair[0].is_floating_point()]
        self.counts = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self):
        """Take in the model's weights as they are now."""
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(*_columns(self.floats), 1 - decay)
        if self.counts:
            torch._foreach_copy_(*_columns(self.counts))
        self.steps += 1

    def state_dict(self):
        """The averaged weights, and how many steps are in them."""
        return {"module": self.module.state_dict(), "steps": self.steps}

    def load_state_dict(self, state):
        """Go on where `state` was taken."""
        self.module.load_state_dict(state["module"])
        self.steps = state["steps"]


def _tensors(module):
    return [*module.parameters(), *module.buffers()]


def _columns(pairs):
    return [list(column) for column in zip(*pairs, strict=True)]
