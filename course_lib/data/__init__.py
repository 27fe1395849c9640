"""Data sets, as tensors that a network can train on.

`leaves` reads a leaf-disease set from a folder or a zip, `fashion_mnist` Fashion-MNIST; or either
draws a small set of its own. `sar` does so for radar scenes, as NumPy arrays.
"""

from . import sar
from .fashion_mnist import CLASSES as FASHION_CLASSES
from .fashion_mnist import fashion_mnist
from .layouts import DataError
from .leaves import LeafImages, leaves

__all__ = ["FASHION_CLASSES", "DataError", "LeafImages", "fashion_mnist", "leaves", "sar"]
