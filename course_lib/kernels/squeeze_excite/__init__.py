"""Squeeze and excitation: each channel of an image scaled by a number found from all channels.

    y = x · gate(logit)    logit = W2 · act(hidden) + b2    hidden = W1 · mean(x) + b1

x is N·C·H·W, contiguous or channels-last, and the mean that of each plane; W1 is (R, C), W2 (C, R).
float32, float16 or bfloat16 in and out, float32 in between; the weights are all of x's dtype or all
float32. With n elements of `s` bytes in x the forward pass must move 2·n·s bytes (read x, write y),
the backward pass 3·n·s (read dy and x, write dx), if what is read once could be kept on the chip;
without, 3·n·s and 4·n·s. The dense layers' 2·N·C·R multiplications are few beside that.

With ds the sum of dy·x over a plane of P pixels:

    dlogit = gate'(ds)     dhidden = act'(W2ᵀ · dlogit)     dmean = W1ᵀ · dhidden
    dx = dy · gate(logit) + dmean / P
    dW2 = Σ dlogit · act(hidden)ᵀ     db2 = Σ dlogit     dW1 = Σ dhidden · meanᵀ     db1 = Σ dhidden

========== ===================================================== ================ ================
rung       what it launches                                      forward moves    backward moves
========== ===================================================== ================ ================
`separate` a kernel for each step of the formula: 4 forward (5   3·n·s            4·n·s
           where few planes are cut into parts), 5 backward
`two_pass` one kernel for the sums over x, one that finds its    3·n·s            4·n·s
           blocks' gates and scales; backward likewise, and the
           weights' gradients
`fused`    one kernel that sums the next samples while it scales 2·n·s            3·n·s
           the last ones: what is read twice comes from the L2
           cache the second time; backward, the weights'
           gradients too. Contiguous images
`resident` one kernel that keeps x (backward dy) in shared       2·n·s            3·n·s
           memory between its sum and its scaling: all
           multiprocessors hold a few samples together.
           Contiguous images of which one fits
`batched`  one kernel whose blocks have several samples, and     2·n·s to 3·n·s   —
           read their weights once. What of x fits stays in
           shared memory. Contiguous images
========== ===================================================== ================ ================

`auto` takes `batched` forward where samples are many and the small layers large, else `resident`
where it fits and the small layers are small, `fused` where the images are larger than the cache and
the small layers very small (backward it comes before `resident`), and `two_pass` elsewhere.

All rungs save the same three arrays for the backward pass, float32: mean (N, C), hidden (N, R) and
logit (N, C). Sums are taken in a fixed order: two runs agree bit for bit. Images without a pixel
take the kernels of `separate`.

As in PyTorch: a NaN or an infinity anywhere in an image spreads through its mean to all of y.

Squeeze and excitation: Hu, Shen and Sun (2018). Derivation: notebook 06.
"""

from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.kernels.squeeze_excite import (
    batched,
    fused,
    resident,
    resident_plan,
    separate,
    two_pass,
    weights,
)
from course_lib.kernels.squeeze_excite.arguments import (
    checked_backward,
    checked_forward,
)
from course_lib.kernels.squeeze_excite.problem import DTYPES

#: AUTO takes `fused` from so many bytes of contiguous images on, if C·R is no more than that: a
#: single block does all of a sample's small layers there. Measured on an H200.
LARGE = {"forward": 64 << 20, "backward": 32 << 20}
SMALL_LAYERS = 2_000
#: Rung -> its module, and the compute capability it needs.
_RUNGS = {
    "separate": (separate,),
    "two_pass": (two_pass,),
    "fused": (fused,),
    "resident": (resident, resident_plan.CAPABILITY),
    "batched": (batched, resident_plan.CAPABILITY),
}
FORWARD = Ladder(
    *(
        Rung(name, module.forward, module.FORWARD_KERNELS, *more)
        for name, (module, *more) in _RUNGS.items()
    )
)
BACKWARD = Ladder(
    *(
        Rung(
            name, module.backward, (*module.BACKWARD_KERNELS, weights.weight_gradients_kernel),
            *more,
        )
        for name, (module, *more) in _RUNGS.items()
        if module is not batched
    )
)  # fmt: skip


def forward(
    x, weight1, bias1, weight2, bias2,
    *, activation="silu", gate="sigmoid", variant=AUTO, out=None,
):  # fmt: skip
    """(y, mean, hidden, logit): y as `x` in shape, dtype and memory format, the others float32.

    x                N·C·H·W, contiguous or channels-last
    weight1, bias1   (R, C) or (R, C, 1, 1), and (R,)
    weight2, bias2   (C, R) or (C, R, 1, 1), and (C,); all four of x's dtype, or all float32
    activation       of the hidden layer, "silu" or "relu"
    gate             "sigmoid" or "hard_sigmoid"

    `out`, if given, receives y. Raises ArrayError for a wrong dtype, shape or device, ValueError
    for an unknown variant, activation or gate, and where `fused`, `resident` or `batched` can't
    run. An `x` of another memory layout is copied first, because the kernels walk memory in one
    dimension.
    """
    problem, inputs, results = checked_forward(
        x, weight1, bias1, weight2, bias2, activation, gate, out
    )
    rung = _rung(FORWARD, variant, problem, "forward", inputs[0])
    if problem.N:
        rung.launch(problem, *inputs, *results)
    return results


def backward(
    dy, x, weight1, weight2, mean, hidden, logit,
    *, activation="silu", gate="sigmoid", variant=AUTO, out=None,
):  # fmt: skip
    """(dx, dweight1, dbias1, dweight2, dbias2), from `dy` and what forward was given and returned.

    dx has shape, dtype and memory format of x, the others shape and dtype of their weights. `out`,
    if given, receives dx. Raises as `forward` does.
    """
    problem, inputs, dx, gradients = checked_backward(
        dy, x, weight1, weight2, mean, hidden, logit, activation, gate, out
    )
    rung = _rung(BACKWARD, variant, problem, "backward", inputs[0])
    if problem.N:
        rung.launch(problem, *inputs, dx, gradients)
    else:  # sums of nothing
        mean, hidden, logit = inputs[-3:]
        weights.launch_weight_gradients(problem, logit, hidden, hidden, mean, gradients)
    return dx, *gradients


def _rung(ladder, variant, problem, direction, x):
    """The rung to run: of images without a pixel, whatever is asked for, `separate`."""
    if problem.N and problem.n_pixels:
        room_of = resident_plan.room_of
        return ladder.rung(variant, x, lambda: default_for(problem, direction, room_of(x)))
    ladder.require(variant)
    return ladder["separate"]


def default_for(problem, direction, room):
    """The rung that AUTO takes for a `Problem`, "forward" or "backward".

    room  of the device, from `resident_plan.room_of`
    """
    if direction == "forward" and batched.worthwhile(problem, room):
        return "batched"
    fits = resident_plan.worthwhile(problem, direction, room)
    large = resident_plan.bytes_of(problem) >= LARGE[direction] and not problem.channels_last
    takes_fused = large and problem.C * problem.R <= SMALL_LAYERS
    if fits and not (takes_fused and direction == "backward"):
        return "resident"
    return "fused" if takes_fused else "two_pass"


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    for dtype in DTYPES:
        yield from weights.specialisations(dtype)
        for weight_dtype in dict.fromkeys((dtype, "float32")):
            yield from separate.specialisations(dtype, weight_dtype)
            yield from two_pass.specialisations(dtype, weight_dtype)
            yield from fused.specialisations(dtype, weight_dtype)
            yield from resident.specialisations(dtype, weight_dtype)
            yield from batched.specialisations(dtype, weight_dtype)
