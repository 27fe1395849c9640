"""Data sets, as tensors that a network can train on.

`images` reads class folders, Tiny-ImageNet and CIFAR-100, `leaves` a leaf-disease set,
`fashion_mnist` Fashion-MNIST; each draws a small set of its own where none is named. `sar` does so
for radar scenes, as NumPy arrays.
"""

from . import sar
from .decoded import DecodedImages
from .fashion_mnist import CLASSES as FASHION_CLASSES
from .fashion_mnist import fashion_mnist
from .files import DataError
from .images import images
from .leaves import LeafImages, leaves
from .streamed import Streamed

__all__ = [
    "FASHION_CLASSES", "DataError", "DecodedImages", "LeafImages", "Streamed", "fashion_mnist",
    "images", "leaves", "sar",
]  # fmt: skip
