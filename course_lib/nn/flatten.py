"""Flattening: no kernel, because no element moves."""

from torch import nn

from course_lib.nn.layer import Layer


class Flatten(Layer, nn.Flatten):
    """As `torch.nn.Flatten`: a view wherever the memory layout allows it."""
