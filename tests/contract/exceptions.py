"""Where a promise is not kept, and why; what takes too long to watch, and what watches it instead.

An exception names how the promise breaks. It is tried each time: one that is no longer needed
fails, and so does one that breaks otherwise.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Exception_:
    """The subjects whose labels match all of `subjects`, and what is broken of `property`.

    subjects  a pattern of "operation-direction-rung-dtype"
    says      what the failure says
    """

    subjects: str
    property: str
    says: str
    why: str

    def covers(self, subject, name):
        return name == self.property and re.fullmatch(self.subjects, subject.label) is not None


EXCEPTIONS = (
    Exception_(
        r"batch_norm-forward-one_pass-.*", "nonfinite", "infinities in x",
        "E(x²) − E(x)² is inf − inf where the variance is NaN, and what is made of it is clamped: "
        "the rung is there to be seen going wrong",
    ),
    Exception_(
        r"squeeze_excite-.*-(fused|resident|batched)-.*", "formats", "takes contiguous images",
        "images that stay on the chip lie there plane by plane",
    ),
    Exception_(
        r"(depthwise_)?conv2d-.*-tensor_core-float32|conv2d-backward-few_channels-float32"
        r"|conv_transpose2d-.*-conv_gradient-float32|conv_transpose2d-forward-upsample2x-float32"
        r"|attention-(forward|backward)-tensor_core(/split|/scores)?-float32",
        "nonfinite", "infinities in",
        "tensor cores multiply float32 numbers in parts, and inf − inf is the smaller part of inf",
    ),
    Exception_(
        r"attention-.*-tensor_core/(warpgroup|atomic|wide)-.*", "views",
        "begin on 16-byte boundaries",
        "its copies are of 16 bytes; the rung has a way for other rows",
    ),
    Exception_(
        r"conv_transpose2d-forward-scatter-float32", "bits", "others in the order",
        "the rung adds by atomics, in whatever order threads come",
    ),
    Exception_(
        r"dropout-.*", "views", "transposed inputs give other bits",
        "the mask's numbers are counted in the order of memory",
    ),
    Exception_(
        r"dropout-.*", "layouts", "beyond it",
        "the mask's numbers are counted in the order of memory",
    ),
    Exception_(
        r"dropout-.*", "formats", "beyond it",
        "the mask's numbers are counted in the order of memory",
    ),
    Exception_(
        r"(sgd|adam)-.*", "layouts", "parameters[0]",
        "a thread takes an element of all of them at one place in memory",
    ),
    Exception_(
        r"(sgd|adam)-.*", "views", "parameters[0]",
        "a thread takes an element of all of them at one place in memory",
    ),
)  # fmt: skip

#: Rungs whose blocks have so much to do that one call takes the simulator up to half a second,
#: whatever the shape: {operation: rungs, or single ways}. They are held to `truth` at one shape, to
#: `views` (sliced ones), `out` and `bits` (the reverse order) by one call together, to `formats`
#: and `nonfinite` by another; and the sanitizer watches them in the operation's own tests.
LEAN = {
    "attention": ("separate", "tiled", "tensor_core"),
    "linear": ("register_tiled", "vectorised", "tensor_core"),
    "conv2d": ("tiled", "im2col", "implicit_gemm", "tensor_core", "few_channels"),
    "depthwise_conv2d": ("tiled", "im2col", "implicit_gemm", "tensor_core"),
    "pointwise_conv2d": ("tensor_core",),
    "conv_transpose2d": ("conv_gradient", "upsample2x"),
    "squeeze_excite": ("two_pass", "fused", "resident", "batched"),
    "softmax": ("split/streamed",),
    "log_softmax": ("split/streamed",),
}

#: Rungs that only choose among ways, each of which is held: {operation: rungs}.
HELD_BY_WAYS = {"attention": ("tensor_core",)}


def lean(subject):
    return any(name in LEAN.get(subject.name, ()) for name in subject.named)


def of(subject, name):
    """The exception that covers this property of the subject, or None."""
    return next((each for each in EXCEPTIONS if each.covers(subject, name)), None)
