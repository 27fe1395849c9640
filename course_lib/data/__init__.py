"""Data sets, as tensors that a network can train on.

`leaves` reads a leaf-disease set from a folder or a zip, or draws a small one of its own.
"""

from .layouts import DataError
from .leaves import LeafImages, leaves

__all__ = ["DataError", "LeafImages", "leaves"]
