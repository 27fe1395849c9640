"""Recorded measurements as text: RESULTS.md and what other pages quote. Take data, return text."""

from .cases import Case, by_operation, cases, conditions, losses, verdict, when
from .drawn import drawn_report, drawn_sentence
from .page import page, summary
from .promises import promises
from .softmax import SHAPE as SOFTMAX_SHAPE
from .squeeze_excite import block_speedups
from .unet import beside_numpy

__all__ = [
    "SOFTMAX_SHAPE", "Case", "beside_numpy", "block_speedups", "by_operation", "cases",
    "conditions", "drawn_report", "drawn_sentence", "losses", "page", "promises",
    "summary", "verdict", "when",
]  # fmt: skip
