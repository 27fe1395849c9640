"""Training loops, with checkpoints that a killed run goes on from, bit for bit."""

from . import schedules
from .checkpoint import CheckpointError
from .classifier import accuracy_by_class, evaluate_accuracy, predict
from .fashion_mnist import load_fashion_mnist, train_fashion_mnist
from .fashion_mnist_graph import FashionMNISTPass
from .graph_inference import GraphInference
from .graph_trainer import GraphTrainer, right_answers
from .image_settings import ImageSettings
from .images import load_images, train_images
from .leaves import load_leaves, train_leaves
from .loop import TrainingError, fit
from .weights import export_onnx, load_weights, save_weights

__all__ = [
    "CheckpointError",
    "FashionMNISTPass",
    "GraphInference",
    "GraphTrainer",
    "ImageSettings",
    "TrainingError",
    "accuracy_by_class",
    "evaluate_accuracy",
    "export_onnx",
    "fit",
    "load_fashion_mnist",
    "load_images",
    "load_leaves",
    "load_weights",
    "predict",
    "right_answers",
    "save_weights",
    "schedules",
    "train_fashion_mnist",
    "train_images",
    "train_leaves",
]
