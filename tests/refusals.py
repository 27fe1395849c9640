"""What PyTorch's public functions refuse, and what they just take: cases for all of ours.

The same table holds where operators run PyTorch (a script in `on_the_cpu`), where they run our
kernels in the simulator, and on tensors without memory, which torch.compile sees.
"""

import math
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from operands import ACTIVATIONS, several

from course_lib import ops
from course_lib.ops.registration import simulate_on_cpu

#: In the simulator, as on a GPU: what kernels do not take.
ONLY_ON_THE_CPU = "integers", "double"


def ones(*shape, **options):
    return torch.ones(shape, **options)


def images(*shape):
    n = math.prod(shape)
    return torch.linspace(-2, 3, n).reshape(shape)


X, W = images(2, 4, 6, 6), images(6, 4, 3, 3) / 100
ROWS, LABELS = images(3, 5), torch.tensor([0, 4, 1])
STATISTICS = torch.zeros(4), torch.ones(4)


def cases():
    """(function's name, label, positional arguments, options)."""
    for label, args, options in (
        ("as it should be", (X, *STATISTICS, ones(4), ones(4)), {}),
        ("training", (X, *STATISTICS, ones(4), ones(4), True), {}),
        ("no statistics", (X, None, None), dict(training=True)),
        ("channels", (X, ones(8), ones(8)), {}),
        ("channels in training", (X, ones(8), ones(8)), dict(training=True)),
        ("fewer of running_var", (X, ones(4), ones(3)), dict(training=True)),
        ("one of the statistics", (X, ones(4), None), dict(training=True)),
        ("the other one", (X, None, ones(4)), dict(training=True)),
        ("no statistics in inference", (X, None, None), {}),
        ("weight", (X, *STATISTICS, ones(8)), {}),
        ("bias", (X, *STATISTICS, ones(4), ones(3)), dict(training=True)),
        ("rank of a statistic", (X, ones(4, 1), ones(4)), {}),
        ("double weight", (X, *STATISTICS, ones(4).double()), {}),
        ("half weight", (X, *STATISTICS, ones(4).half()), {}),
        ("double statistics", (X, ones(4).double(), ones(4).double()), {}),
        ("negative eps", (X, *STATISTICS), dict(eps=-1.0)),
        ("negative eps in training", (X, *STATISTICS), dict(training=True, eps=-1e-5)),
        ("eps of 0", (X, *STATISTICS), dict(eps=0.0)),
        ("one value a channel", (X[:1, :, :1, :1], *STATISTICS), dict(training=True)),
        ("one row", (images(1, 4), *STATISTICS), dict(training=True)),
        ("one dimension", (images(4), *STATISTICS), {}),
        ("a number", (images(), *STATISTICS), {}),
        ("integers", (X.long(), *STATISTICS), {}),
        ("momentum", (X, *STATISTICS), dict(training=True, momentum="a")),
        ("no momentum", (X, *STATISTICS), dict(training=True, momentum=None)),
        ("NumPy's numbers", (X, *STATISTICS), dict(eps=np.float64(0.1), momentum=np.float32(0.5))),
        ("meta statistics", (X, ones(4, device="meta"), ones(4, device="meta")), {}),
        ("two dimensions", (images(5, 4), *STATISTICS), dict(training=True)),
        ("five dimensions", (images(2, 4, 2, 3, 2), *STATISTICS), dict(training=True)),
        ("no image", (images(0, 4, 2, 2), *STATISTICS), {}),
        ("no image in training", (images(0, 4, 2, 2), *STATISTICS), dict(training=True)),
        ("no rows", (images(2, 4, 0, 2), *STATISTICS), dict(training=True)),
        ("no channels", (images(2, 0, 2, 2), ones(0), ones(0)), dict(training=True)),
    ):
        yield "batch_norm", label, args, options

    for label, args, options in (
        ("as it should be", (ROWS, (5,), ones(5), ones(5)), {}),
        ("two axes", (X, [6, 6], images(6, 6), ones(6, 6)), dict(eps=0.1)),
        ("no bias", (ROWS, (5,), ones(5)), {}),
        ("no weight", (ROWS, (5,), None, ones(5)), {}),
        ("other columns", (ROWS, (4,)), {}),
        ("too many axes", (ROWS, (3, 3, 5)), {}),
        ("no axes", (ROWS, ()), {}),
        ("a number of columns", (ROWS, 5), {}),
        ("a fraction", (ROWS, (5.0,)), {}),
        ("no shape", (ROWS, None), {}),
        ("short weight", (ROWS, (5,), ones(4)), {}),
        ("long bias", (ROWS, (5,), None, ones(6)), {}),
        ("rank of weight", (ROWS, (5,), ones(1, 5)), {}),
        ("double weight", (ROWS, (5,), ones(5).double()), {}),
        ("half weight", (ROWS, (5,), ones(5).half()), {}),
        ("half bias", (ROWS, (5,), ones(5), ones(5).half()), {}),
        ("half input", (ROWS.half(), (5,), ones(5), ones(5)), {}),
        ("a list as weight", (ROWS, (5,), [1.0] * 5), {}),
        ("no tensor", (ROWS.numpy(), (5,)), {}),
        ("integers", (ROWS.long(), (5,)), {}),
        ("double", (ROWS.double(), (5,), ones(5).double()), {}),
        ("a number", (images(), (1,)), {}),
        ("eps", (ROWS, (5,)), dict(eps="a")),
        ("meta weight", (ROWS, (5,), ones(5, device="meta")), {}),
        ("no rows", (images(0, 5), (5,), ones(5)), {}),
        ("no columns", (images(3, 0), (0,)), {}),
    ):
        yield "layer_norm", label, args, options

    for label, args, options in (
        ("as it should be", (X, W, ones(6)), {}),
        ("all options", (X, W[:, :2], ones(6), (2, 1), (1, 0), (1, 2), 2), {}),
        ("an image", (X[0], W), {}),
        ("channels", (images(2, 5, 6, 6), W), {}),
        ("two dimensions", (images(6, 6), W), {}),
        ("five dimensions", (images(1, 2, 4, 6, 6), W), {}),
        ("rank of weight", (X, images(6, 4, 3)), {}),
        ("no weight", (X, None), {}),
        ("no array", (X.numpy(), W), {}),
        ("bias", (X, W, ones(8)), {}),
        ("rank of bias", (X, W, ones(6, 1)), {}),
        ("double weight", (X, W.double()), {}),
        ("double bias", (X, W, ones(6).double()), {}),
        ("mixed integers", (X.long(), W), {}),
        ("half input", (X.half(), W), {}),
        ("integers", (X.long(), W.long()), {}),
        ("double", (X.double(), W.double()), {}),
        ("stride 0", (X, W), dict(stride=0)),
        ("stride below 0", (X, W), dict(stride=(1, -1))),
        ("three strides", (X, W), dict(stride=(1, 1, 1))),
        ("no strides", (X, W), dict(stride=())),
        ("a fraction", (X, W), dict(stride=1.5)),
        ("None", (X, W), dict(stride=None)),
        ("True", (X, W), dict(stride=True)),
        ("padding below 0", (X, W), dict(padding=-1)),
        ("three paddings", (X, W), dict(padding=(1, 1, 1))),
        ("unknown padding", (X, W), dict(padding="all")),
        ("same with strides", (X, W), dict(padding="same", stride=2)),
        ("same", (X, W), dict(padding="same")),
        ("dilation 0", (X, W), dict(dilation=0)),
        ("dilation too large", (X, W), dict(dilation=4)),
        ("groups 0", (X, W), dict(groups=0)),
        ("groups below 0", (X, W), dict(groups=-1)),
        ("groups that do not fit", (X, W), dict(groups=2)),
        ("groups that do not divide", (images(1, 6, 3, 3), images(4, 2, 3, 3)), dict(groups=3)),
        ("fraction of groups", (X, W), dict(groups=1.0)),
        ("filter too large", (X[..., :2], W), {}),
        ("no rows", (images(2, 4, 0, 6), W), {}),
        ("no image", (images(0, 4, 6, 6), W), {}),
        ("NumPy's int", (X, W), dict(stride=np.int64(2), groups=np.int32(1))),
        ("NumPy's ints", (X, W), dict(padding=(np.int64(2), 1), dilation=[np.int8(1)])),
        ("one of a pair", (X, W), dict(stride=(2,))),
    ):
        yield "conv2d", label, args, options

    for label, options in (
        ("nothing", {}), ("both", dict(size=6, scale_factor=2)),
        ("three sizes", dict(size=(1, 2, 3))),
        ("three factors", dict(scale_factor=(2, 2, 2))), ("size 0", dict(size=0)),
        ("a small factor", dict(scale_factor=0.1)), ("below 0", dict(size=-1)),
        ("corners of nearest", dict(size=6, align_corners=True)),
        ("recomputed of a size", dict(size=6, recompute_scale_factor=True)),
    ):
        yield "interpolate", label, (images(1, 2, 3, 3),), options

    weight = images(4, 3, 3, 3) / 100
    for label, args, options in (
        ("as it should be", (X, weight, ones(3)), {}),
        ("all options", (X, weight[:, :2], ones(4), (2, 3), (1, 0), (1, 2), 2, 2), {}),
        ("an image", (X[0], weight), {}),
        ("channels", (images(2, 5, 6, 6), weight), {}),
        ("two dimensions", (images(6, 6), weight), {}),
        ("no weight", (X, None), {}),
        ("no array", (X.numpy(), weight), {}),
        ("bias", (X, weight, ones(4)), {}),
        ("double weight", (X, weight.double()), {}),
        ("half input", (X.half(), weight), {}),
        ("integers", (X.long(), weight.long()), {}),
        ("no channels", (images(1, 0, 4, 4), images(0, 3, 3, 3)), {}),
        ("stride 0", (X, weight), dict(stride=0)),
        ("padding below 0", (X, weight), dict(padding=-1)),
        ("a word", (X, weight), dict(padding="same")),
        ("three strides", (X, weight), dict(stride=(1, 1, 1))),
        ("dilation 0", (X, weight), dict(dilation=0)),
        ("groups 0", (X, weight), dict(groups=0)),
        ("groups that do not divide", (X, weight), dict(groups=3)),
        ("output_padding below 0", (X, weight), dict(output_padding=-1)),
        ("output_padding too large", (X, weight), dict(output_padding=1)),
        ("padding too large", (X, weight), dict(padding=5)),
        ("no image", (images(0, 4, 6, 6), weight), {}),
        ("NumPy's ints", (X, weight), dict(stride=np.int64(2), output_padding=(np.int8(1), 0))),
    ):
        yield "conv_transpose2d", label, args, options

    for name in ACTIVATIONS:
        for label, args, options in (
            ("as it should be", (X,), {}),
            ("a number", (images(),), {}),
            ("nothing", (images(0, 3),), {}),
            ("None", (None,), {}),
            ("an array", (X.numpy(),), {}),
        ):
            yield name, label, args, options

    for label, args, options in (
        ("as it should be", (ROWS, images(2, 5), ones(2)), {}),
        ("features", (ROWS, images(2, 4)), {}),
        ("rank of weight", (ROWS, images(1, 2, 5)), {}),
        ("a number", (images(), images(2, 5)), {}),
        ("bias", (ROWS, images(2, 5), ones(3)), {}),
        ("double weight", (ROWS, images(2, 5).double()), {}),
        ("double bias", (ROWS, images(2, 5), ones(2).double()), {}),
        ("integers", (ROWS.long(), images(2, 5).long()), {}),
        ("integer input", (ROWS.long(), images(2, 5)), {}),
        ("half weight", (ROWS, images(2, 5).half()), {}),
        ("half bias", (ROWS, images(2, 5), ones(2).half()), {}),
        ("no weight", (ROWS, None), {}),
        ("meta bias", (ROWS, images(2, 5), ones(2, device="meta")), {}),
        ("one row", (ROWS[0], images(2, 5)), {}),
        ("no rows", (images(0, 5), images(2, 5), ones(2)), {}),
        ("no features", (images(3, 0), images(2, 0), ones(2)), {}),
        ("no results", (ROWS, images(0, 5)), {}),
        ("four dimensions", (images(2, 1, 3, 5), images(2, 5)), {}),
    ):
        yield "linear", label, args, options

    for label, args, options in (
        ("as it should be", (X, 3, 2, 1), {}),
        ("ceil_mode", (X, 3, 2, 0, 1, True), {}),
        ("ceil_mode over the end", (X, 2, 3, 1, 1, True), {}),
        ("ceil_mode, odd", (images(1, 1, 7, 5), (3, 2), (2, 3), 1, 1, True), {}),
        ("an image", (X[0], 2), {}),
        ("indices", (X, 2), dict(return_indices=True)),
        ("no stride", (X, 2, []), {}),
        ("size 0", (X, 0), {}),
        ("size below 0", (X, -1), {}),
        ("three sizes", (X, (2, 2, 2)), {}),
        ("no sizes", (X, ()), {}),
        ("None", (X, None), {}),
        ("a fraction", (X, 2.0), {}),
        ("True", (X, True), {}),
        ("stride 0", (X, 2, 0), {}),
        ("stride below 0", (X, 2, -1), {}),
        ("three strides", (X, 2, (1, 1, 1)), {}),
        ("padding below 0", (X, 2, 2, -1), {}),
        ("padding too large", (X, 2, 2, 2), {}),
        ("padding too large for one", (X, (4, 2), 2, 2), {}),
        ("three paddings", (X, 2, 2, (0, 0, 0)), {}),
        ("padding beside dilation", (X, 2, 1, 2, 3), {}),
        ("dilation 0", (X, 2, 2, 0, 0), {}),
        ("dilation below 0", (X, 2, 2, 0, -1), {}),
        ("window too large", (X, 9), {}),
        ("two dimensions", (X[0, 0], 2), {}),
        ("five dimensions", (X[None], 2), {}),
        ("booleans", (X.bool(), 2), {}),
        ("integers", (X.long(), 2), {}),
        ("no image", (images(0, 4, 6, 6), 2), {}),
        ("no channels", (images(2, 0, 6, 6), 2), {}),
        ("no rows", (images(2, 4, 0, 6), 2), {}),
        ("NumPy's int", (X, np.int64(2), np.int32(1), np.int8(1)), {}),
        ("NumPy's ints", (X, (np.int64(3), 2)), dict(dilation=[np.int64(1)])),
    ):
        yield "max_pool2d", label, args, options

    for name in ("softmax", "log_softmax"):
        for label, args, options in (
            ("as it should be", (X, 1), {}),
            ("from the end", (X, -3), {}),
            ("no such axis", (X, 4), {}),
            ("nor from the end", (X, -5), {}),
            ("of a number", (images(), 1), {}),
            ("a number", (images(), 0), {}),
            ("None", (X, None), {}),
            ("a fraction", (X, 1.0), {}),
            ("True", (X, True), {}),
            ("a name", (X, "N"), {}),
            ("NumPy's int", (X, np.int64(1)), {}),
            ("double", (X, 1), dict(dtype=torch.float64)),
            ("a type of integers", (X, 1), dict(dtype=torch.int64)),
            ("no type", (X, 1), dict(dtype="float")),
            ("of integers", (X.long(), 1), {}),
            ("of booleans", (X.bool(), 1), {}),
            ("of complex numbers", (X + 1j, 1), {}),
            ("no rows", (images(0, 5), 1), {}),
            ("no columns", (images(3, 0), 1), {}),
            ("no columns before rows", (images(0, 3), 0), {}),
        ):
            yield name, label, args, options

    q, k, v = images(2, 4, 3, 8), images(2, 4, 5, 8), images(2, 4, 5, 6)
    for label, args, options in (
        ("as it should be", (q, k, v), dict(scale=2)),
        ("one dimension", (q[0, 0, 0], k, v), {}),
        ("head dimensions", (q, k[..., :7], v), {}),
        ("rows of value", (q, k, v[:, :, :4]), {}),
        ("heads", (q, k[:, :2], v[:, :2]), {}),
        ("batches", (q, torch.cat((k, k)), torch.cat((v, v))), {}),
        ("heads that do not divide", (q, k[:, :3], v[:, :3]), dict(enable_gqa=True)),
        ("half key", (q, k.half(), v), {}),
        ("integers", (q.long(), k.long(), v.long()), {}),
        ("no key", (q, None, v), {}),
        ("a list as mask", (q, k, v, [[1.0]]), {}),
        ("a row of a mask", (q, k, v, ones(5)), {}),
        ("a mask of others", (q, k, v, ones(4, 5)), {}),
        ("five dimensions of a mask", (q, k, v, ones(1, 2, 4, 3, 5)), {}),
        ("a mask of integers", (q, k, v, ones(3, 5).long()), {}),
        ("half mask", (q, k, v, ones(3, 5).half()), {}),
        ("half numbers, float32 mask", (q.half(), k.half(), v.half(), ones(3, 5)), {}),
        ("causal with a mask", (q, k, v, ones(3, 5), 0.0, True), {}),
        ("causal by a number", (q, k, v, None, 0.0, 1), {}),
        ("above 1", (q, k, v, None, 1.1), {}),
        ("scale by a word", (q, k, v), dict(scale="a")),
        ("scale by position", (q, k, v, None, 0.0, False, 1.0), {}),
        ("meta key", (q, k.to("meta"), v), {}),
    ):
        yield "scaled_dot_product_attention", label, args, options

    for label, args, options in (
        ("all", (X, 1.0), {}),
        ("none", (X, 0.0), {}),
        ("not in training", (X, 0.5, False), {}),
        ("below 0", (X, -0.1), {}),
        ("above 1", (X, 1.1), {}),
        ("above 1 in inference", (X, 1.1, False), {}),
        ("None", (X, None), {}),
        ("a word", (X, "a"), {}),
        ("of a leaf in place", (images(3).requires_grad_(), 0.5, True, True), {}),
        ("of integers", (X.long(), 0.5), {}),
        ("no rows", (images(0, 4), 0.5), {}),
    ):
        yield "dropout", label, args, options

    shares = torch.softmax(images(3, 5), 1)
    for label, args, options in (
        ("as it should be", (ROWS, LABELS, ones(5) / 2), dict(label_smoothing=0.1)),
        ("in PyTorch's order", (ROWS, LABELS, None, None, 4, None, "sum", 0.5), {}),
        ("no reduction", (ROWS, LABELS), dict(reduction="none")),
        ("probabilities", (ROWS, shares), {}),
        ("probabilities above 1", (ROWS, shares * 3), {}),
        ("weights below 0", (ROWS, LABELS, -ones(5)), {}),
        ("size_average", (ROWS, LABELS), dict(size_average=False)),
        ("reduce", (ROWS, LABELS), dict(reduce=False)),
        ("an index", (ROWS[0], LABELS[1]), {}),
        ("images", (images(2, 5, 3), torch.zeros(2, 3, dtype=torch.int64)), {}),
        ("an index outside", (ROWS, torch.tensor([0, 5, 1])), {}),
        ("an index outside, before", (ROWS, torch.tensor([0, -1, 1])), {}),
        ("ignored", (ROWS, torch.tensor([0, 7, 1])), dict(ignore_index=7)),
        ("all ignored", (ROWS, torch.tensor([-100] * 3)), {}),
        ("ignoring in probabilities", (ROWS, shares), dict(ignore_index=1)),
        ("fraction of an index", (ROWS, LABELS), dict(ignore_index=1.0)),
        ("NumPy's int", (ROWS, LABELS), dict(ignore_index=np.int64(4))),
        ("batch", (ROWS, LABELS[:2]), {}),
        ("rank of target", (ROWS, LABELS[:, None]), {}),
        ("int32", (ROWS, LABELS.int()), {}),
        ("booleans", (ROWS, LABELS.bool()), {}),
        ("weights", (ROWS, LABELS, ones(4)), {}),
        ("rank of weight", (ROWS, LABELS, ones(5, 1)), {}),
        ("double weight", (ROWS, LABELS, ones(5).double()), {}),
        ("classes of probabilities", (ROWS, shares[:, :4]), {}),
        ("smoothing above 1", (ROWS, LABELS), dict(label_smoothing=1.5)),
        ("smoothing by a word", (ROWS, LABELS), dict(label_smoothing="a")),
        ("reduction", (ROWS, LABELS), dict(reduction="all")),
        ("no reduction named", (ROWS, LABELS), dict(reduction=None)),
        ("integers", (ROWS.long(), LABELS), {}),
        ("too few probabilities", (ROWS, shares[0, :3]), {}),
        ("whole probabilities", (ROWS, shares.long()), {}),
        ("pixels", (ones(2, 5, 3), torch.zeros(2, 4).long()), {}),
        ("rank of pixels", (ones(2, 5, 3), torch.zeros(2, 3, 4).long()), {}),
        ("a list as weight", (ROWS, LABELS, [1.0] * 5), {}),
        ("no target", (ROWS, None), {}),
        ("a number", (images(), LABELS[0]), {}),
        ("meta target", (ROWS, LABELS.to("meta")), {}),
        ("no rows", (images(0, 5), LABELS[:0]), {}),
        ("no rows to add", (images(0, 5), LABELS[:0]), dict(reduction="sum")),
        ("no rows, no reduction", (images(0, 5), LABELS[:0]), dict(reduction="none")),
        ("no pixels", (images(2, 5, 0), torch.zeros(2, 0, dtype=torch.int64)), {}),
    ):
        yield "cross_entropy", label, args, options


def outcome(function, args, options):
    """What `function` returns for copies of the arguments; or the exception that it raises."""
    args = [x.clone() if torch.is_tensor(x) and not x.requires_grad else x for x in args]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args, **options), args
    except Exception as error:
        return error, args


def fault(name, label, args, options):
    """Where our function and PyTorch's part, as a sentence; None where they agree."""
    theirs, their_args = outcome(getattr(F, name), args, options)
    ours, our_args = outcome(getattr(ops, name), args, options)
    if simulate_on_cpu and label in ONLY_ON_THE_CPU:
        refused = isinstance(ours, NotImplementedError) and "not implemented for" in str(ours)
        return None if refused else f"took it: {ours!r}"
    if simulate_on_cpu and name == "cross_entropy" and "outside" in label:
        return None if ours.isnan() else f"PyTorch says {theirs}; ours is {ours}, not NaN"
    if isinstance(theirs, Exception):
        allowed = (type(theirs), *DOCUMENTED.get((name, label), ()))
        if isinstance(ours, allowed) and not isinstance(ours, AttributeError):
            return None
        return f"PyTorch raises {theirs!r}; ours: {ours!r}"
    if isinstance(ours, Exception):
        return f"PyTorch takes it; ours raises {ours!r}"
    pairs = (*zip(several(ours), several(theirs), strict=True),
             *zip(our_args, their_args, strict=True))  # fmt: skip
    for found, expected in pairs:
        if torch.is_tensor(found) and found.device.type != "meta":
            try:
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
            except AssertionError as error:
                return str(error)
    return None


#: What ours raises instead, where PyTorch's type says less.
DOCUMENTED = {
    **{(name, "an array"): (RuntimeError,) for name in ACTIVATIONS},  # PyTorch's dispatcher's
    ("sigmoid", "None"): (TypeError,),
    ("scaled_dot_product_attention", "a row of a mask"): (RuntimeError,),
    ("scaled_dot_product_attention", "above 1"): (ValueError,),
    ("scaled_dot_product_attention", "integers"): (NotImplementedError,),
    ("dropout", "of integers"): (NotImplementedError, TypeError),
}


def fault_without_memory(name, label, args, options):
    """The same of tensors on the device "meta": whether they are refused where real ones are."""
    if "outside" in label or (name, label) == ("dropout", "of integers"):
        return None
    theirs, _ = outcome(getattr(F, name), args, options)
    bare = [x.to("meta") if torch.is_tensor(x) and not x.requires_grad else x for x in args]
    if any(torch.is_tensor(x) and x.device.type == "meta" for x in args):
        return None
    ours, _ = outcome(getattr(ops, name), bare, options)
    if isinstance(theirs, Exception):
        refused = isinstance(ours, (type(theirs), *DOCUMENTED.get((name, label), ())))
        return None if refused else f"PyTorch raises {theirs!r}; ours without memory: {ours!r}"
    if isinstance(ours, Exception):
        return f"PyTorch takes it; ours without memory raises {ours!r}"
    for found, expected in zip(several(ours), several(theirs), strict=True):
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            return f"without memory {found.shape}, {found.dtype}; {expected.shape} with"
    return None


def faults(*names):
    """Every fault of every case of these functions, or of all, as sentences."""
    for row in cases():
        for look in (fault, fault_without_memory) if row[0] in (names or ops.__all__) else ():
            if found := look(*row):
                yield f"{row[0]}, {row[1]}: {found}"
