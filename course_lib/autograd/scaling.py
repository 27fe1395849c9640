"""Loss scaling: so that small gradients do not become 0 in float16.

The least positive number of float16 is 6·10⁻⁸; many gradients are smaller. The loss is therefore
multiplied by a large power of two, and with it all gradients, which are divided again, in float32,
before the optimiser sees them (Micikevicius and others, 2018). Where one overflows, the step
is left out and the factor halved; after many steps without that it is doubled.
"""

from course_lib.backend import get_array_module

GROWTH_STEPS = 2000


class LossScaler:
    """scale(loss).backward(), then step(optimizer) in place of optimizer.step().

    enabled  False: the factor is 1 and stays so, and no gradient is looked at
    """

    def __init__(self, enabled=True, factor=2.0**16):
        self.enabled, self.factor = enabled, factor if enabled else 1.0
        self.good_steps = 0

    def scale(self, loss):
        """The loss to walk back from."""
        return loss * self.factor if self.enabled else loss

    def step(self, optimizer):
        """Divide the gradients and make a step, if all are finite; whether it was made."""
        if not self.enabled:
            optimizer.step()
            return True
        gradients = [p.grad for p in optimizer.parameters if p.grad is not None]
        finite = None
        for gradient in gradients:
            xp = get_array_module(gradient)
            gradient *= 1 / self.factor
            this = xp.all(xp.isfinite(gradient))
            finite = this if finite is None else finite & this
        if finite is not None and not bool(finite):  # the host waits here
            self.factor, self.good_steps = max(1.0, self.factor / 2), 0
            return False
        optimizer.step()
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.factor, self.good_steps = min(self.factor * 2, 2.0**24), 0
        return True

    def state_dict(self):
        return {"factor": self.factor, "good_steps": self.good_steps}

    def load_state_dict(self, state):
        self.factor, self.good_steps = state["factor"], state["good_steps"]
