"""Optimisers of tensors: steps as PyTorch's of the same names, in place.

On a GPU all parameters are updated in one launch (`kernels.optimizers`), on the CPU by NumPy.
"""

import numpy as np

from course_lib.backend import get_array_module, get_backend


class _Optimizer:
    def __init__(self, parameters, lr):
        self.parameters, self.lr = list(parameters), lr
        if not self.parameters:
            raise ValueError("there are no parameters to learn")
        self.steps = 0

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        """One step for all parameters that have a gradient."""
        self.steps += 1
        chosen = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        (self.by_kernels if get_backend().kernels else self.by_numpy)(chosen)

    def _zeros(self):
        return [get_array_module(p.data).zeros_like(p.data) for p in self.parameters]

    def state_dict(self):
        """Steps done and all running averages, as NumPy arrays."""
        to_cpu = get_backend().to_cpu
        kept = {name: [np.array(to_cpu(a)) for a in getattr(self, name)] for name in self.averages}
        return {"steps": self.steps} | kept

    def load_state_dict(self, state):
        self.steps = int(state["steps"])
        for name in self.averages:
            for a, kept in zip(getattr(self, name), state[name], strict=True):
                a[...] = get_backend().to_device(np.asarray(kept))


class SGD(_Optimizer):
    """Stochastic gradient descent, with momentum: `torch.optim.SGD`."""

    averages = ("velocity",)

    def __init__(self, parameters, lr=0.01, momentum=0.0, weight_decay=0.0):
        super().__init__(parameters, lr)
        self.momentum, self.weight_decay = momentum, weight_decay
        self.velocity = self._zeros()

    def by_numpy(self, chosen):
        for i in chosen:
            p, v = self.parameters[i], self.velocity[i]
            v *= self.momentum
            v += p.grad + self.weight_decay * p.data
            p.data -= self.lr * v

    def by_kernels(self, chosen):
        from course_lib.kernels import optimizers

        pick = [self.parameters[i] for i in chosen]
        optimizers.sgd(
            [p.data for p in pick], [p.grad for p in pick], [self.velocity[i] for i in chosen],
            lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay,
        )  # fmt: skip


class Adam(_Optimizer):
    """Adam (Kingma and Ba, 2015), as `torch.optim.Adam`."""

    averages = ("first", "second", "counts")

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(parameters, lr)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.first, self.second = self._zeros(), self._zeros()
        to_device = get_backend().to_device
        # On the device, where the kernels count.
        self.counts = [to_device(np.zeros((), np.float32)) for _ in self.parameters]

    def by_numpy(self, chosen):
        (b1, b2), one = self.betas, np.float32(1)
        for i in chosen:
            p, m, v = self.parameters[i], self.first[i], self.second[i]
            self.counts[i] += one
            t = float(self.counts[i])
            g = p.grad + self.weight_decay * p.data
            m += (g - m) * np.float32(1 - b1)
            v += (g * g - v) * np.float32(1 - b2)
            root = np.sqrt(v / np.float32(1 - b2**t)) + np.float32(self.eps)
            p.data -= np.float32(self.lr / (1 - b1**t)) * m / root

    def by_kernels(self, chosen):
        from course_lib.kernels import optimizers

        pick = [self.parameters[i] for i in chosen]
        optimizers.adam(
            [p.data for p in pick], [p.grad for p in pick],
            *([kept[i] for i in chosen] for kept in (self.first, self.second, self.counts)),
            lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay,
        )  # fmt: skip
