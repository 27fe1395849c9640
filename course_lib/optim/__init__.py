"""Optimisers on our kernels, with PyTorch's names, signatures and state_dicts.

``course_lib.optim.SGD(model.parameters(), lr=0.1)`` goes wherever ``torch.optim.SGD`` does.
"""

from course_lib.optim.adam import Adam, AdamW
from course_lib.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]
