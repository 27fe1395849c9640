"""What errors say: of calls that PyTorch refuses too, and of functions that it does not have."""

import math
import re

import torch
from operands import ACTIVATIONS
from refusals import LABELS, ROWS, X, cases, images, ones, outcome
from tensors import PLACE

from course_lib import ops

#: (function, label of its case in `refusals`): a pattern.
SAYS = {
    ("batch_norm", "one value a channel"): "Expected more than 1 value per channel when training",
    ("batch_norm", "no statistics in inference"): "must be defined in evaluation mode",
    ("batch_norm", "one dimension"): r"at least 2 dimensions, not shape \(4,\)",
    ("batch_norm", "integers"): '"batch_norm" not implemented for',
    ("batch_norm", "weight"): "weight should contain 4 elements not 8",
    ("batch_norm", "channels"): "running_mean should contain 4 elements not 8",
    ("conv2d", "integers"): "not implemented for",
    ("conv_transpose2d", "integers"): "not implemented for",
    ("max_pool2d", "integers"): '"max_pool2d" not implemented for',
    ("linear", "features"): "input must have 4 features",
    ("linear", "a number"): "input must have 5 features",
    ("linear", "rank of weight"): "weight must have 2 dimensions",
    ("linear", "integers"): "not implemented for",
    ("linear", "half weight"): "weight must be torch.float32, as input is",
    ("linear", "integer input"): "weight must be torch.int64, as input",
    ("linear", "bias"): r"bias must have shape \(2,\), not \(3,\)",
    ("linear", "half bias"): "bias must be torch.float32, as input is",
    **{
        ("scaled_dot_product_attention", label): words for label, words in (
            ("one dimension", r"at least, not \(8,\), \(2, 4, 5, 8\), \(2, 4, 5, 6\)"),
            ("head dimensions", r"k must have shape \(2, 4, 5, 8\), not \(2, 4, 5, 7\)"),
            ("rows of value", r"v must have shape \(2, 4, 5, 6\), not \(2, 4, 4, 6\)"),
            ("heads", r"\(or enable_gqa\); their shapes are \(2, 4, 3, 8\), \(2, 2, 5, 8\)"),
            ("heads that do not divide", "q has 4 heads, which the 3 of k and v do not divide"),
            ("half key", "k must be torch.float32, not torch.float16"),
            ("integers", '"attention" not implemented for .Long'),
            ("a row of a mask", r"2 dimensions at least, not shape \(5,\)"),
            ("a mask of others", r"mask must broadcast to \(2, 4, 3, 5\)"),
            ("a mask of integers", "mask must be torch.bool or torch.float32, not torch.int64"),
            ("causal with a mask", "attn_mask must not be set when is_causal=True"),
            ("above 1", "dropout probability has to be between 0 and 1, but got 1.1"),
        )
    },
    ("dropout", "above 1"): "dropout probability has to be between 0 and 1, but got",
    **{
        (name, label): words for name in ("softmax", "log_softmax") for label, words in (
            ("of integers", "not implemented for 'Long'"),
            ("of booleans", "not implemented for 'Bool'"),
            ("of complex numbers", "not implemented for 'ComplexFloat'"),
            ("a type of integers", "not implemented for 'Long'"),
            ("no such axis", r"expected to be in range of \[-4, 3\], but got 4"),
            ("nor from the end", r"expected to be in range of \[-4, 3\], but got -5"),
            ("of a number", r"expected to be in range of \[-1, 0\], but got 1"),
        )
    },
    **{
        ("cross_entropy", label): words for label, words in (
            ("batch", r"batch_size \(3\) to match target batch_size \(2\)"),
            ("rank of target", "0D or 1D target tensor expected, multi-target not supported"),
            ("weights", r"got weight tensor of shape: \[4\]"),
            ("rank of weight", r"got weight tensor of shape: \[5, 1\]"),
            ("double weight", "expected scalar type"),
            ("smoothing above 1", "must be between 0.0 and 1.0. Got: 1.5"),
            ("reduction", "all is not a valid value for reduction"),
            ("ignoring in probabilities", "ignore_index is not supported for floating point targ"),
            ("int32", "expected target dtype to be Long or Byte, but got"),
            ("too few probabilities", "expected target dtype to be Long or Byte, but got"),
            ("whole probabilities", "Expected floating point type for target with class probab"),
            ("integers", "not implemented for 'Long'"),
            ("pixels", r"size \[2, 3\], got \[2, 4\]"),
            ("rank of pixels", r"size \[2, 3\], got \[2, 3, 4\]"),
            ("no target", "must be Tensor, not NoneType"),
            ("a list as weight", "must be Tensor, not list"),
        )
    },
}  # fmt: skip
#: Functions whose kernels alone look at the type of numbers.
IN_KERNELS = (*ACTIVATIONS, "softmax_dropout", "bn_relu_softmax")
WEIGHTS = ones(2, 4), ones(2), ones(4, 2), ones(4)
FIVE = ones(5), ones(5), ones(5), ones(5)
PIXELS = images(2, 3, 4, 4), torch.ones(2, 4, 4, dtype=torch.int64)


def _gates(place, other):
    given = [images(1, 4, 2, 2), *WEIGHTS, "silu", "sigmoid"]
    return [*given[:place], other, *given[place + 1 :]]


#: (function, arguments, options, the error, a pattern of what it says)
OWN = [
    ("squeeze_excite", _gates(place, other), {}, error, words) for place, other, error, words in (
        (0, ones(4, 3), TypeError, r"x must have 4 dimensions, not shape \(4, 3\)"),
        (0, ones(1, 4, 2, 2).long(), NotImplementedError, "for 'Long'"),
        (1, ones(2, 5), TypeError, r"weight1 must have shape .*, not \(2, 5\)"),
        (2, ones(3), TypeError, r"bias1 must have shape \(2,\), not \(3,\)"),
        (3, ones(2, 4), TypeError, r"weight2 must have shape .*, not \(2, 4\)"),
        (4, ones(4, 1), TypeError, r"bias2 must have shape \(4,\), not \(4, 1\)"),
        (1, ones(2, 4).half(), TypeError, "weight1 must be .*float32, not .*float16"),
        (4, ones(4).half(), TypeError, "bias2 must be .*float32, not .*float16"),
        (5, "gelu", ValueError, "unknown activation 'gelu'; there are silu, relu"),
        (6, "tanh", ValueError, "unknown gate 'tanh'; there are sigmoid, hard_sigmoid"),
    )
]  # fmt: skip
QKV = ones(2, 4, 3, 8), ones(2, 2, 5, 8), ones(2, 2, 5, 6)
OWN += [
    ("attention", arguments, options, error, words) for arguments, options, error, words in (
        ([QKV[0][0], *QKV[1:]], {}, RuntimeError, r"q must have 4 dimensions, not shape \(4, 3, 8"),
        ([QKV[0], QKV[1].half(), QKV[2]], {}, RuntimeError, "k must be torch.float32, not torch.f"),
        ([x.long() for x in QKV], {}, NotImplementedError, '"attention" not implemented for .Long'),
        ([QKV[0][:, :3], *QKV[1:]], {}, RuntimeError, "q has 3 heads, which the 2 of k and v do n"),
        ([*QKV[:2], QKV[2][:, :, :4]], {}, RuntimeError, r"v must have shape \(2, 2, 5, 6\), no"),
        ([QKV[0], QKV[1][..., :7], QKV[2]], {}, RuntimeError, r"k must have shape \(2, 2, 5, 8\),"),
        ([*QKV], dict(mask=ones(4, 5)), RuntimeError,
         r"broadcast to \(2, 4, 3, 5\), .*its shape is \(4, 5\)"),
        ([*QKV], dict(mask=ones(3, 5).half()), RuntimeError, "mask must be torch.bool or torch.fl"),
        ([*QKV], dict(slopes=ones(3)), RuntimeError, r"slopes must have shape \(4,\), not \(3,\)"),
        ([*QKV], dict(key_lengths=ones(2)), RuntimeError, "key_lengths must be torch.int32, not "),
        ([*QKV], dict(q_starts=ones(2).int()), RuntimeError, "packed sequences need q_starts, k_"),
        ([*QKV], dict(q_starts=ones(2).int(), k_starts=ones(2).int(), max_q=2, max_k=2),
         RuntimeError, "packed sequences lie in one batch; q has 2"),
        ([*QKV], dict(window=2), TypeError, r"window must be \(left, right\), not 2"),
        ([*QKV], dict(window=(-1, None)), ValueError, "window must reach 0 keys or more, and left"),
        ([*QKV], dict(softcap=-1.0), ValueError, "softcap must be a number from 0 on, not -1.0"),
        ([*QKV], dict(dropout_p=1.5), ValueError, "between 0 and 1, but got 1.5"),
    )
]  # fmt: skip
OWN += [
    ("relu", [ones(3).long()], {}, TypeError, "x must be float32 or float16 or bfloat16, not int"),
    ("gelu", [X], dict(approximate="erf"), ValueError, "approximate must be 'none' or 'tanh', not"),
    ("global_avg_pool", [ROWS], {}, RuntimeError,
     r"expects \(N, C, H, W\) or .*not shape \(3, 5\)"),
    ("global_avg_pool", [X.long()], {}, NotImplementedError, "not implemented for 'Long'"),
    ("softmax_dropout", [ROWS, 1.5], {}, ValueError, "between 0 and 1, but got 1.5"),
    ("softmax_dropout", [ROWS, math.nan], {}, ValueError, "between 0 and 1, but got nan"),
    ("softmax_dropout", [ROWS, 0.5, True, 2], {}, IndexError, "Dimension out of range"),
    ("softmax_dropout", [ROWS.long()], {}, NotImplementedError, "not implemented for 'Long'"),
    ("scaled_softmax", [ones(4)], {}, RuntimeError, r"must have 2 to 4 dimensions, not shape .4,"),
    ("scaled_softmax", [X.long()], {}, NotImplementedError, "not implemented for 'Long'"),
    ("scaled_softmax", [X, ones(5)], {}, RuntimeError, r"\(2, 4, 6, 6\), and its shape is \(5,\)"),
    ("scaled_softmax", [X, ones(6).half()], {}, RuntimeError, "must be torch.bool or torch.floa"),
    ("scaled_softmax", [X], dict(scale="a"), TypeError, "scale must be float, not str"),
    ("bn_relu_softmax", [ROWS[..., None], *FIVE], {}, TypeError,
     r"x must have 2 dimensions, not shape \(3, 5, 1\)"),
    ("bn_relu_softmax", [ROWS[:, :4], *FIVE], {}, TypeError,
     r"mean must have shape \(4,\), not \(5,\)"),
    ("bn_relu_softmax", [ROWS.long(), *FIVE], {}, NotImplementedError, "not implemented for 'Lo"),
    ("cross_entropy", [ROWS, LABELS], dict(label_smoothing=-0.1), RuntimeError,
     "must be between 0.0 and 1.0. Got: -0.1"),  # PyTorch takes it for none
    ("cross_entropy", [ROWS.half(), ROWS.softmax(1)], {}, RuntimeError,
     "target of probabilities must have input's dtype"),
    *(
        ("dice_loss", arguments, {}, error, words) for error, arguments, words in (
            (RuntimeError, [PIXELS[0], PIXELS[1][:, :3]], r"Expected target size \[2, 4, 4\], got"),
            (RuntimeError, [PIXELS[0], PIXELS[1].int()], "to be Long or Byte, but got torch.i"),
            (RuntimeError, [*PIXELS, ones(2)], "defined for all 3 classes, but has shape"),
            (RuntimeError, [*PIXELS, ones(3).half()], "expected scalar type torch.float32 but"),
            (RuntimeError, [PIXELS[0][0, 0, 0], PIXELS[1]], r"must be \(N, C, …\) with a class at"),
            (NotImplementedError, [PIXELS[0].long(), PIXELS[1]], "not implemented for"),
            (TypeError, [PIXELS[0], [1]], "target must be Tensor, not list"),
            (ValueError, [*PIXELS, None, -1, -1.0], "smooth must be a number from 0 on, not -1"),
        )
    ),
    *(
        ("interpolate", [X, 6], options, NotImplementedError, "nn.functional.interpolate does")
        for options in (dict(mode="bicubic"), dict(mode="bilinear", antialias=True))
    ),
]  # fmt: skip


def faults(name):
    """Every error of this function that says something else, as a sentence."""
    rows = {label: row for function, label, *row in cases() if function == name}
    found = [(label, *rows[label], Exception, words)
             for (function, label), words in SAYS.items() if function == name]  # fmt: skip
    found += [(words, *row, error, words) for function, *row, error, words in OWN
              if function == name]  # fmt: skip
    for label, args, options, error, words in found:
        in_kernels = name in IN_KERNELS and not args[0].is_floating_point()
        for device in (PLACE,) if error is Exception or in_kernels else (PLACE, "meta"):
            moved = [x.to(device) if torch.is_tensor(x) else x for x in args]
            named = {k: x.to(device) if torch.is_tensor(x) else x for k, x in options.items()}
            said, _ = outcome(getattr(ops, name), moved, named)
            if not isinstance(said, error) or not re.search(words, str(said)):
                yield f"{name}, {label}, on {device}: {said!r}"


def _statistics(place):
    def loss(f, x, leaf):
        statistics = [ones(4).to(PLACE) for _ in range(2)]
        statistics[place] = leaf
        return f(x, *statistics, ones(4).to(PLACE), ones(4).to(PLACE)).sum()

    return loss


#: label: (loss(function, x, leaf), shapes of x and of the leaf, what is said). Labels begin with
#: the function.
UNDIFFERENTIABLE = {
    **{
        f"{name} by statistic {place}": (
            _statistics(place), (3, 4), (4,), "no gradient for running_mean and running_var"
        )
        for name in ("batch_norm", "bn_relu_softmax") for place in (0, 1)
    },
    "cross_entropy by target": (
        lambda f, x, leaf: f(x, leaf), (3, 4), (3, 4), "no gradient for its target: detach it"
    ),
    "cross_entropy by weight": (
        lambda f, x, leaf: f(x, LABELS.to(PLACE) % 4, leaf), (3, 4), (4,),
        "no gradient for its weight: detach it",
    ),
    "scaled_softmax by mask": (
        lambda f, x, leaf: f(x, leaf).sum(), (3, 4), (4,), "no gradient for its mask: detach it"
    ),
    "dice_loss by weight": (
        lambda f, x, leaf: f(x, LABELS.to(PLACE) % 4, leaf, cross_entropy_weight=1.0), (3, 4), (4,),
        "no gradient for its weight",
    ),
}  # fmt: skip
