"""Training loops, with checkpoints that a killed run goes on from, bit for bit."""

from .checkpoint import CheckpointError
from .classifier import evaluate_accuracy, predict
from .leaves import accuracy_by_class, load_leaves, train_leaves
from .loop import TrainingError, fit

__all__ = [
    "CheckpointError",
    "TrainingError",
    "accuracy_by_class",
    "evaluate_accuracy",
    "fit",
    "load_leaves",
    "predict",
    "train_leaves",
]
