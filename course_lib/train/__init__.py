"""Training loops, with checkpoints that a killed run goes on from, bit for bit."""

from .checkpoint import CheckpointError
from .classifier import accuracy_by_class, evaluate_accuracy, predict
from .fashion_mnist import load_fashion_mnist, train_fashion_mnist
from .graph_inference import GraphInference
from .graph_trainer import GraphTrainer
from .leaves import load_leaves, train_leaves
from .loop import TrainingError, fit

__all__ = [
    "CheckpointError",
    "GraphInference",
    "GraphTrainer",
    "TrainingError",
    "accuracy_by_class",
    "evaluate_accuracy",
    "fit",
    "load_fashion_mnist",
    "load_leaves",
    "predict",
    "train_fashion_mnist",
    "train_leaves",
]
