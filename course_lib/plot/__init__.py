"""The course's pictures: plain data in, a Matplotlib figure out.

Every function takes Python numbers, lists and NumPy arrays (nothing here knows about kernels or
devices) and returns a `Picture`: a Matplotlib `Figure` that brings its alternative text along.
In a notebook, a `Picture` on the last line of a cell shows itself; nothing here calls `plt.show()`.
All pictures are made for a notebook column of about 900 pixels and stay readable without colour:
what colour says is also said by lightness, by hatching or by a number.
"""

from .access import access_map, bank_map
from .basic import curves, images
from .cell import cell
from .channels import cache_walk, channel_gates, work_items
from .convolution import arithmetic, asked, grids, windows
from .fusing import arrays_moved
from .learning import integration_weights, learning_curves
from .limit import in_flight, loads_in_time, shared_row, stalls, tables, times
from .memory import access_order, tensor_layout, thread_map
from .networks import confusion, fragments, losses, relative
from .picture import Picture
from .ratios import ratios
from .reduction import histograms, interleaving, run_to_run, tree
from .segmentation import segmentation
from .shares import shares
from .softmax import butterfly, one_pass, passes, probabilities
from .speed import durations, ladder, roofline, sweep, timeline
from .squeeze_excite import bytes_moved, speedups, step_times
from .tape import tape

__all__ = [
    "Picture",
    "access_map",
    "access_order",
    "arithmetic",
    "arrays_moved",
    "asked",
    "bank_map",
    "butterfly",
    "bytes_moved",
    "cache_walk",
    "cell",
    "channel_gates",
    "confusion",
    "curves",
    "durations",
    "fragments",
    "grids",
    "histograms",
    "images",
    "in_flight",
    "integration_weights",
    "interleaving",
    "ladder",
    "learning_curves",
    "loads_in_time",
    "losses",
    "one_pass",
    "passes",
    "probabilities",
    "ratios",
    "relative",
    "roofline",
    "run_to_run",
    "shared_row",
    "segmentation",
    "shares",
    "speedups",
    "stalls",
    "step_times",
    "sweep",
    "tables",
    "tape",
    "tensor_layout",
    "thread_map",
    "timeline",
    "times",
    "tree",
    "windows",
    "work_items",
]
