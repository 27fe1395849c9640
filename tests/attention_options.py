"""Attention with drawn options, beside PyTorch's and beside the truth in float64.

The same rows hold where operators run PyTorch (a script in `on_the_cpu`) and where they run our
kernels.
"""

import itertools
import math
import random

import torch
import torch.nn.functional as F
from tensors import double

from course_lib import ops, reference
from course_lib.ops.checks import of_sums

B, H, G, T, S, D, E = 2, 4, 2, 5, 7, 6, 3


def _randn(*shape):
    return torch.randn(shape)


#: label: options of `ops.attention`, of shapes as above
ROWS = {
    "nothing": lambda: {},
    "causal": lambda: dict(causal=True, scale=0.7),
    "causal from the lower right": lambda: dict(causal=True, lower_right=True),
    "a window": lambda: dict(window=(2, 1)),
    "a window before": lambda: dict(window=(1, None), lower_right=True),
    "a window behind": lambda: dict(window=(None, 0)),
    "softcap": lambda: dict(softcap=1.5),
    "slopes": lambda: dict(slopes=torch.rand(H), causal=True),
    "slopes of each batch": lambda: dict(slopes=torch.rand(B, H), lower_right=True),
    "key lengths": lambda: dict(key_lengths=torch.tensor([0, 4])),
    "key lengths, causal": lambda: dict(
        key_lengths=torch.tensor([7, 3], dtype=torch.int32), causal=True
    ),
    "key lengths from the lower right": lambda: dict(
        key_lengths=torch.tensor([6, 2]), lower_right=True, window=(2, 0), slopes=torch.rand(H)
    ),
    "an additive mask": lambda: dict(mask=_randn(B, 1, T, S)),
    "numbers for keys": lambda: dict(mask=_randn(S), softcap=2.0),
    "a boolean mask": lambda: dict(mask=torch.rand(1, S).expand(T, S) > 0.4),
    "a boolean mask of heads": lambda: dict(mask=torch.rand(H, T, 1) > 0.3, window=(3, 3)),
    "all of it": lambda: dict(
        mask=_randn(T, S), softcap=3.0, slopes=torch.rand(H), causal=True, window=(4, 2), scale=0.4
    ),
}


def truth_faults(place):
    """Every row beside the truth: o, lse and gradients of both, as sentences."""
    for label, make in ROWS.items():
        torch.manual_seed(len(label))
        q, k, v = _randn(B, H, T, D), _randn(B, G, S, D), _randn(B, G, S, E)
        options = make()
        given = {name: x.to(place) if torch.is_tensor(x) else x for name, x in options.items()}
        found = passes([x.to(place) for x in (q, k, v)], given)
        exact = {
            name: (x.numpy() if x.dtype is not torch.float32 else double(x))
            if torch.is_tensor(x) else x for name, x in options.items()
        }  # fmt: skip
        o, lse = reference.attention(*map(double, (q, k, v)), **exact)
        do, dlse = (_like(x).double().numpy() for x in (o, lse))
        dlse[lse == -math.inf] = 0
        *gradients, dscores = reference.attention_backward(
            do, *map(double, (q, k, v)), dlse=dlse, **exact
        )
        expected = [o, lse, *gradients]
        if len(found) == 6:
            expected.append(torch.from_numpy(dscores).sum_to_size(options["mask"].shape))
        for number, (x, y) in enumerate(zip(found, expected, strict=True)):
            error = _difference(x, torch.as_tensor(y))
            if error:
                yield f"{label}, result {number}: {error}"


def passes(qkv, options):
    """o, lse, and gradients of q, k, v and an additive mask, by both."""
    leaves = [x.clone().requires_grad_() for x in qkv]
    mask = options.get("mask")
    if mask is not None and mask.is_floating_point():
        leaves.append(mask.clone().requires_grad_())
        options = options | dict(mask=leaves[-1])
    o, lse = ops.attention(*leaves[:3], **options, return_lse=True)
    return [o, lse, *torch.autograd.grad((o, lse), leaves, (_like(o), _like(lse)))]


def packed_faults(place):
    """Packed sequences, one without queries and one without keys, beside each alone."""
    torch.manual_seed(1)
    q, k, v = (_randn(*shape).to(place) for shape in ((1, 2, 10, 4), (1, 1, 9, 4), (1, 1, 9, 6)))
    starts = torch.tensor([[0, 0], [3, 2], [3, 3], [7, 3], [9, 8]], device=place)
    packed = dict(q_starts=starts[:, 0], k_starts=starts[:, 1], max_q=4, max_k=5)
    numbers = dict(slopes=torch.rand(4, 2, device=place), mask=_randn(4, 1, 4, 5).to(place))
    for options in (dict(causal=True, lower_right=True), dict(softcap=2.0) | numbers):
        found = passes([q, k, v], packed | options)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        mask = numbers["mask"].clone().requires_grad_()
        leaves += [mask] if "mask" in options else []
        each = []
        for n, ((a, c), (b, d)) in enumerate(itertools.pairwise(starts.tolist())):
            own = dict(options)
            if "mask" in own:
                own |= dict(mask=mask[n, :, : b - a, : d - c], slopes=numbers["slopes"][n])
            qkv = leaves[0][:, :, a:b], *(x[:, :, c:d] for x in leaves[1:3])
            each.append(ops.attention(*qkv, **own, return_lse=True))
        o, lse = (torch.cat(x, 2) for x in zip(*each, strict=True))
        dys = _like(found[0])[:, :, :9], _like(found[1])[:, :, :9]
        expected = o, lse, *torch.autograd.grad((o, lse), leaves, dys)
        rest = found[0][:, :, 9:], found[1][:, :, 9:]
        if rest[0].any() or (rest[1] > -math.inf).any():
            yield f"{list(options)}: a row of no sequence has {rest}"
        found[:2] = (x[:, :, :9] for x in found[:2])
        for number, (x, y) in enumerate(zip(found, expected, strict=True)):
            if error := _difference(x, y):
                yield f"{list(options)}, result {number}: {error}"


def _like(x):
    """A gradient for `x`: numbers that differ from place to place."""
    n = math.prod(x.shape)
    made = torch.linspace(-1, 2, n).cos().view(x.shape)
    return made.to(x) if torch.is_tensor(x) else made


def _difference(found, expected):
    try:
        torch.testing.assert_close(
            found.detach().cpu().double(), expected.detach().cpu().double(), rtol=1e-4, atol=2e-5
        )
    except AssertionError as error:
        return str(error)
    return None


# ── PyTorch's function ───────────────────────────────────────────────────────────────────────────


def drawn(seed):
    """(query, key, value, mask or None, options) for `F.scaled_dot_product_attention`."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    n, shared, *extents = (rng.randint(1, 2) for _ in range(4))
    n_rows, n_cols = (extent * rng.randint(1, 4) - 1 or 1 for extent in extents)
    n_keys, width = rng.randint(1, 2), rng.choice((1, 3, 8, 33))
    layout, n_heads = rng.choice(("heads", "rows", "packed")), n_keys * shared
    if layout == "packed":
        n_cols = n_rows
        whole = _randn(n, n_rows, (n_heads + 2 * n_keys) * width).unflatten(-1, (-1, width))
        qkv = whole.split((n_heads, n_keys, n_keys), 2)
    else:
        shapes = (n, n_rows, n_heads, width), *[(n, n_cols, n_keys, width)] * 2
        qkv = [_randn(*shape) for shape in shapes]
    qkv = [x.transpose(1, 2) for x in qkv]
    if layout == "heads":
        qkv = [x.contiguous() for x in qkv[:2]] + [_randn(n, n_keys, n_cols, rng.choice((2, 9)))]
    options = dict(enable_gqa=shared > 1, scale=rng.choice((None, 0.3)))
    shapes = ((n_rows, n_cols), (1, n_cols), (n_rows, 1), (n, 1, 1, n_cols),
              (n_heads, n_rows, n_cols), (n, n_heads, n_rows, n_cols), "expanded")  # fmt: skip
    masks = None, "causal", *itertools.product(shapes, (torch.bool, torch.float32))
    mask = masks[seed % len(masks)]  # each has its turn
    if mask == "causal":
        return *qkv, None, options | dict(is_causal=True)
    if mask is not None:
        shape, dtype = mask
        numbers = _randn(*(shape if shape != "expanded" else (n, 1, 1, n_cols)))
        numbers = numbers > -0.3 if dtype is torch.bool else numbers
        expanded = numbers.expand(n, n_heads, n_rows, n_cols)
        mask = expanded if shape == "expanded" else numbers
    return *qkv, mask, options


def torch_faults(place, seeds):
    """Every difference from PyTorch's function, computed in float64, as a sentence."""
    for seed in seeds:
        *tensors, options = drawn(seed)
        leaves = [None if x is None else x.to(place) for x in tensors]
        leaves = [
            x.detach().requires_grad_(x.is_floating_point()) if x is not None else x for x in leaves
        ]
        exact = [x.double() if x is not None and x.is_floating_point() else x for x in leaves]
        found = _pass(ops.scaled_dot_product_attention, leaves, options)
        expected = _pass(F.scaled_dot_product_attention, exact, options)
        for number, (x, y) in enumerate(zip(found, expected, strict=True)):
            if x.shape != y.shape or (error := _difference(x, y)):
                shapes = [None if x is None else tuple(x.shape) for x in tensors]
                yield f"{seed}, {shapes}, {options}, result {number}: {error}"


#: The leading axes of query, key and value in PyTorch's own tests of its function.
LEADS = ((4,), (4,), (4,)), ((4, 4), (4, 4), (4, 4)), ((4,), (4, 4), (4, 4))


def samples():
    """As `drawn`, of each sample in PyTorch's own tests, and of a wider value."""
    torch.manual_seed(0)

    def made(leads, width=8):
        shapes = zip(leads, (3, 6, 6), (8, 8, width), strict=True)
        return [_randn(*lead, n, columns) for lead, n, columns in shapes]

    both = True, False
    for leads, causal, p, shared in itertools.product(LEADS, both, (0.0, 0.5), both):
        yield *made(leads), None, dict(is_causal=causal, dropout_p=p, enable_gqa=shared)
    yield *made(LEADS[1], 16), None, dict(is_causal=False)
    yield *made(LEADS[1]), _randn(3, 6), dict(is_causal=False)


def sample_faults(place, dtype, step=1):
    """Every sample, or each of `step`, that is too far from PyTorch's function in float64.

    Dropout is of other weights than PyTorch's: there it is as in `ops.attention`, bit for bit.
    """
    rounding = max(4 * torch.finfo(dtype).eps, 32 * torch.finfo(of_sums(dtype)).eps)
    for *tensors, options in itertools.islice(samples(), 0, None, step):
        leaves = [x.to(place, dtype).requires_grad_() for x in tensors if x is not None]
        found = _pass(ops.scaled_dot_product_attention, leaves, options)
        if dropped := options.get("dropout_p", 0) > 0:
            expected = _pass(_of_four_axes, leaves, options)
        else:
            exact = [x.double() for x in leaves]
            expected = _pass(F.scaled_dot_product_attention, exact, options)
        for number, (x, y) in enumerate(zip(found, expected, strict=True)):
            error, size = (each.double().norm().item() for each in (x.double() - y, y))
            if x.shape != y.shape or not error <= rounding * size * (not dropped):
                yield f"{dtype}, {options}, result {number} of {tuple(x.shape)}: {error} of {size}"


def _pass(function, inputs, options):
    """The result, and the gradients of all inputs that have one."""
    torch.manual_seed(1)
    y = function(*inputs, **options)
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    return [y, *torch.autograd.grad(y, wanted, _like(y))]


def _of_four_axes(q, k, v, *, is_causal, dropout_p, enable_gqa):
    given = [x if x.dim() == 4 else x[None] for x in (q.expand(*k.shape[:-2], *q.shape[-2:]), k, v)]
    o = ops.attention(*given, causal=is_causal, dropout_p=dropout_p)
    return o.view(*k.shape[:-2], *o.shape[-2:])
