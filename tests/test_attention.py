"""Attention: every option on every rung, beside what the contract proves of all operations.

The bound is FlashAttention's own: an error of at most twice PyTorch's in the same dtype (3 times
with softcap), and of a rounding.
"""

import contextlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import PLACE, choosing, double

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import attention
from course_lib.kernels.attention import aligned_rows
from course_lib.kernels.operation import AUTO
from course_lib.runtime.host.arrays import ArrayError
from course_lib.runtime.host.launch import planning, recorded

GPU_ONLY = pytest.mark.skipif(SIMULATED, reason="takes the simulator too long")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = torch.finfo(torch.float32).eps
ON_ORDINARY_CORES = "separate", "streaming", "tiled"
#: Forwards, backwards.
WAYS = (
    ("tensor_core/mma",) * 2, ("tensor_core/warpgroup",) * 2, ("tensor_core/split",) * 2,
    ("tensor_core/scores",) * 2,
    ("tensor_core/warpgroup", "tensor_core/atomic"), ("tensor_core/warpgroup", "tensor_core/wide"),
)  # fmt: skip
NAMES = ("dq", "dk", "dv", "dmask")


def numbers(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(PLACE, dtype)


def only_on_hopper():
    if not SIMULATED and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compute capability 9.0 alone has wgmma")


def composed(
    q, k, v, scale=None, causal=False, lower_right=False, window=(None, None), mask=None,
    softcap=0.0, slopes=None, key_lengths=None, dropout_p=0.0, seed=0, offset=0,
):  # fmt: skip
    """(o, lse) as PyTorch computes them in the dtype of q, operator by operator."""
    (_, H, T, D), S = q.shape, k.shape[2]
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (D**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    lengths = None if key_lengths is None else key_lengths.cpu().numpy()
    visible = reference.attention_visible(T, S, causal, window, lower_right, lengths)
    visible = torch.from_numpy(visible).to(q.device)
    if slopes is not None:
        n_keys = S if lengths is None else torch.tensor(lengths)[:, None, None, None].clamp(max=S)
        beside = n_keys - T if lower_right else 0
        distance = torch.arange(S) - torch.arange(T)[:, None] - beside
        distance = distance.abs().to(q.device)
        scores = scores - (slopes[..., None, None] * distance).to(q.dtype)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        scores = scores + mask
    scores = scores.masked_fill(~visible, -math.inf)
    weights = torch.softmax(scores, -1).masked_fill((scores == -math.inf).all(-1)[..., None], 0)
    if dropout_p:
        kept = reference.dropout_mask(tuple(weights.shape), dropout_p, seed, offset)
        weights = weights * torch.from_numpy(kept).to(q.device) / (1 - dropout_p)
    return weights @ v, torch.logsumexp(scores, -1)


def floor(truth, dtype, size):
    """Roundings of float32 numbers of this size; of the dtype, of what these are."""
    near = torch.from_numpy(np.where(np.isfinite(truth), truth, 0.0)).to(dtype)
    lost = (near + 0.3 - 0.3).double() - near.double()
    return 4 * ROUNDING * size + (2 * lost.abs().max().item() if near.numel() else 0)


def no_further(name, found, peer, truth, times=2, size=1.0, term=0.0):
    """`found` is finite where the truth is, and its error at most `times` the peer's.

    size  of the terms that are added up
    term  what rounding a number, to 16 bits or as lse, changes in the largest one that holds it
    """
    dtype, found, peer = found.dtype, double(found), double(peer)
    assert found.shape == truth.shape, name
    there = np.isfinite(truth)
    assert np.array_equal(np.isneginf(found), np.isneginf(truth)), name
    assert np.isfinite(found[there]).all(), name
    error, theirs = (np.abs(x[there] - truth[there]).max(initial=0) for x in (found, peer))
    least = floor(truth, dtype, size) + term
    assert error <= times * theirs + least, f"{name}: {error:.1e}, {theirs:.1e}"


def summed(dscores, shape):
    """The gradient of a mask of `shape`, from that of all scores."""
    axes = tuple(a for a, n in enumerate((1,) * (4 - len(shape)) + tuple(shape)) if n == 1)
    return dscores.sum(axes, keepdims=True).reshape(shape)


def norm_by_key(q, k, lse, dropout_p=0.0, seed=0, offset=0, **options):
    """The largest norm of a key's weights, over all queries that share it."""
    scores, _ = reference.attention_scores(q, k, **options)
    weights = np.exp(scores - np.where(np.isfinite(lse), lse, 0)[..., None]) / (1 - dropout_p)
    weights = weights.reshape(len(k), k.shape[1], -1, k.shape[2])
    return np.linalg.norm(weights, axis=2).max(initial=0)


def check(q, k, v, forward=ON_ORDINARY_CORES, backward=("separate", "tiled"), **options):
    """Hold these rungs to the bound, o, lse and all gradients, that of lse and of a mask included.
    """
    with_mask = options.get("mask") is not None and options["mask"].dtype != torch.bool
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    given = options
    if with_mask:
        leaves.append(options["mask"].detach().clone().requires_grad_())
        given = options | {"mask": leaves[3]}
    o, lse = composed(*leaves[:3], **given)
    do = numbers(*o.shape, dtype=q.dtype, seed=1)
    dlse = numbers(*lse.shape, seed=2).masked_fill(torch.isinf(lse), 0)
    scalar = (o * do).sum() + (lse.masked_fill(torch.isinf(lse), 0) * dlse.to(lse.dtype)).sum()
    peers = torch.autograd.grad(scalar, leaves)
    told = {n: double(x) if n in ("slopes", "key_lengths") else x for n, x in options.items()}
    if options.get("mask") is not None:
        mask = options["mask"]
        told["mask"] = double(mask) if with_mask else mask.cpu().numpy()
    doubles = [double(x) for x in (q, k, v)]
    truth, true_lse = reference.attention(*doubles, **told)
    *truths, dscores = reference.attention_backward(
        double(do), *doubles, dlse=double(dlse), **told
    )
    truths += [summed(dscores, options["mask"].shape)] if with_mask else []
    times = 3 if options.get("softcap") else 2
    # A score's gradient is a difference of numbers of this size.
    shared = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    size = 1 + (do.abs().float() @ shared.abs().float().mT).max().item()
    for variant in forward:
        found, found_lse = attention.forward(q, k, v, variant=variant, **options)
        no_further(f"{variant} o", found, o, truth, times)
        no_further(f"{variant} lse", found_lse, lse.float(), true_lse, times)
        saved = found, found_lse
    # Gradients of scores hold o·do of an o that was rounded; tensor cores take them, and weights,
    # as numbers of the dtype. PyTorch rounds as often, but of few terms each may be lucky. Weights
    # are made of lse, where PyTorch has the largest score, which is exact. In a sum over queries or
    # keys such errors are as likely up as down.
    lost = torch.finfo(q.dtype).eps / 2
    of_o = truth * double(do) * (0 if q.dtype == torch.float32 else lost)
    by_query, by_key = (np.linalg.norm(of_o, axis=axes).max(initial=0) for axes in (-1, (-2, -1)))
    of_lse = ROUNDING / 2 * np.abs(true_lse[np.isfinite(true_lse)]).max(initial=0)
    scale = abs(options.get("scale") or q.shape[-1] ** -0.5)
    of_q, of_k, of_do = (x.abs().max().item() if x.numel() else 0 for x in (q, k, do))
    of_one_key = norm_by_key(*doubles[:2], true_lse, **told)
    for variant in backward:
        found = attention.backward(
            do, q, k, v, *saved, dlse=dlse, mask_gradient=with_mask, variant=variant, **options
        )
        of_weights = of_lse + (lost if variant.startswith("tensor_core") else 0)
        in_rows, in_columns = (
            np.linalg.norm(dscores, axis=axis).max(initial=0) * of_weights for axis in (-1, -2)
        )
        terms = (
            (by_query + in_rows) * scale * of_k, (by_key + in_columns) * scale * of_q,
            of_weights * of_do * of_one_key, by_key,
        )  # fmt: skip
        for name, one, peer, true, term in zip(NAMES, found, peers, truths, terms, strict=False):
            no_further(f"{variant} {name}", one, peer, true, times, size, term)


@st.composite
def calls(draw, dtypes=DTYPES):
    """(q, k, v, options) of any kind, as small as a simulator likes them."""
    share, G, B = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    T, S = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    D, E = draw(st.sampled_from((1, 7, 8, 24))), draw(st.sampled_from((1, 8, 17)))
    dtype = draw(st.sampled_from(dtypes))
    q, k, v = (numbers(*shape, dtype=dtype) for shape in (
        (B, share * G, T, D), (B, G, S, D), (B, G, S, E),
    ))  # fmt: skip
    if draw(st.booleans()):  # (B, T, H, D) in memory
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    reach = st.none() | st.integers(0, 9)
    options = dict(
        causal=draw(st.booleans()), lower_right=draw(st.booleans()),
        window=(draw(reach), draw(reach)),
        scale=draw(st.sampled_from((None, 0.5))), softcap=draw(st.sampled_from((0.0, 0.0, 1.5))),
    )  # fmt: skip
    kind = draw(st.sampled_from(("none", "bool", "numbers")))
    extents = [n if draw(st.booleans()) else 1 for n in (B, share * G, T, S)]
    extents = extents[draw(st.integers(0, 3)) :]
    if kind == "bool":
        options["mask"] = numbers(*extents) > -0.5
    elif kind == "numbers":
        options["mask"] = numbers(*extents, dtype=dtype)
    if draw(st.booleans()):
        shape = (share * G,) if draw(st.booleans()) else (B, share * G)
        options["slopes"] = numbers(*shape).abs()
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, S), min_size=B, max_size=B))
        options["key_lengths"] = torch.tensor(lengths, dtype=torch.int32, device=PLACE)
    if draw(st.booleans()):
        options |= dict(dropout_p=0.3, seed=draw(st.integers(0, 99)), offset=3)
    return q, k, v, options


@settings(max_examples=20, deadline=None)
@given(calls())
def test_every_option_on_every_rung(call):
    q, k, v, options = call
    check(q, k, v, **options)


@settings(max_examples=4 if SIMULATED else 50, deadline=None)
@given(calls())
def test_every_option_on_tensor_cores(call):
    q, k, v, options = call
    check(q, k, v, ("tensor_core",), ("tensor_core",), **options)


@pytest.mark.parametrize("forward, backward", WAYS)
def test_tiles_that_follow_one_another_on_tensor_cores(forward, backward):
    """Whole tiles, and those with an edge of queries or keys; the sanitizer watches them."""
    if "warpgroup" in forward:
        only_on_hopper()
    # The simulator takes long to split numbers; tiles of float32 are smaller.
    split = "split" in forward or "scores" in forward
    dtype, T, S = (torch.float32, 20, 70) if split else (torch.bfloat16, 70, 136)
    q, k, v = (numbers(1, 1, n, 24, dtype=dtype) for n in (T, S, S))
    with simulator.sanitize() if SIMULATED else contextlib.nullcontext() as report:
        check(q, k, v, (forward,), (backward,), causal=True, lower_right=True)
    assert report is None or not report.findings, report


@pytest.mark.parametrize("D, options", [
    (8, dict(window=(3, 2), lower_right=True)), (9, dict(causal=True)),
])  # fmt: skip
def test_scores_at_which_nobody_looks_are_passed_by(D, options):
    """Whole tiles before a window and behind it, by 16 bytes and by elements."""
    q, k, v = numbers(1, 2, 40, D), numbers(1, 1, 230, D), numbers(1, 1, 230, D)
    check(q, k, v, *[("tensor_core/scores",)] * 2, **options)


@pytest.mark.parametrize("E", [12, 16])
def test_a_gradient_may_begin_anywhere(E):
    """In the middle of 16 bytes, or with rows that do, where q, k and v are all in place."""
    q, k, v = (numbers(1, 1, 20, 16, dtype=torch.bfloat16, seed=n) for n in range(3))
    v, do = v[..., :E], numbers(1, 1, 20, E, dtype=torch.bfloat16, seed=3)
    elsewhere = numbers(1, 1, 20, E + 1, dtype=torch.bfloat16)[..., 1:].copy_(do)
    saved = attention.forward(q, k, v)
    expected = attention.backward(do, q, k, v, *saved, variant="tiled")
    for gradient in (do, elsewhere):
        for one, other in zip(attention.backward(gradient, q, k, v, *saved), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("D, E", [(33, 64), (65, 100), (129, 8), (136, 256)])
def test_each_size_of_heads_has_tiles(D, E):
    q, k, v = numbers(1, 2, 35, D), numbers(1, 1, 37, D), numbers(1, 1, 37, E)
    check(q, k, v, ("tiled",), ("tiled",), causal=True)
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    check(q, k, v, ("tensor_core",), ("tensor_core",), causal=True)


@pytest.mark.parametrize("D, E", [(9, 71), (129, 10), (64, 64)])
def test_rows_that_begin_anywhere_are_copied(D, E, monkeypatch):
    """Results, and all gradients, are those of rows where they should be."""
    monkeypatch.setattr(aligned_rows, "WORTH", 0)
    q, k = numbers(1, 2, 21, D, dtype=torch.float16), numbers(1, 1, 19, D, dtype=torch.float16)
    v = numbers(1, 1, 19, E + 1, dtype=torch.float16)[..., 1:]
    mask = numbers(21, 19, dtype=torch.float16)
    with recorded() as launches:
        check(q, k, v, (AUTO,), (AUTO,), mask=mask)
    names = [kernel.py_func.__name__ for kernel, *_ in launches]
    assert names.count("copy_rows_kernel") == 4 + 5 + 3


@pytest.mark.parametrize("D, E", [(136, 256)])
def test_heads_beyond_128_by_warpgroups(D, E):
    only_on_hopper()
    shapes = (2, 35, D), (1, 37, D), (1, 37, E)
    q, k, v = (numbers(1, *shape, dtype=torch.float16) for shape in shapes)
    check(q, k, v, ("streaming",), ("tensor_core/wide",), causal=True)


@GPU_ONLY
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [32, 40, 59, 64, 96, 111, 128, 192, 256])
@pytest.mark.parametrize("T, S", [
    (1, 1), (239, 1), (799, 3), (113, 203), (1023, 1024), (1024, 1023), (2048, 2048),
])  # fmt: skip
def test_lengths_and_heads_that_others_test(T, S, D, dtype):
    q, k, v = numbers(1, 4, T, D, dtype=dtype), *(numbers(1, 2, S, D, dtype=dtype) for _ in "kv")
    for options in ({}, dict(causal=True, lower_right=True), dict(window=(50, 9), softcap=30.0)):
        check(q, k, v, ("tiled",), ("tiled",), dropout_p=0.17, **options)


@pytest.mark.parametrize("T", [17, 64, 65] if SIMULATED else [64, 65, 127, 192, 704])
def test_padding_is_not_taken_for_a_score_of_zero(T):
    """All scores near −120: what counts as 0 would outweigh them by far, in either pass."""
    q, k, v = numbers(1, 1, T, 8), numbers(1, 1, T, 8), numbers(1, 1, T, 8)
    q[..., 0], k[..., 0] = 120 * 8**0.5, -1
    check(q, k, v, ("streaming", "tiled"), ("tiled",))


def packed(starts, H, *sizes):
    return [numbers(1, H, starts[-1], n) for n in sizes]


@pytest.mark.parametrize("options", [
    {}, dict(causal=True, lower_right=True), dict(window=(2, 1)), dict(dropout_p=0.4),
])  # fmt: skip
def test_packed_sequences_are_each_for_itself(options):
    q_starts, k_starts = [0, 5, 5, 12], [0, 3, 9, 20]
    (q, do), (k, v) = packed(q_starts, 2, 8, 8), packed(k_starts, 1, 8, 8)
    how = dict(max_q=7, max_k=11, **options)
    for name, starts in (("q_starts", q_starts), ("k_starts", k_starts)):
        how[name] = torch.tensor(starts, dtype=torch.int32, device=PLACE)
    for variant in ("streaming", "tiled"):
        o, lse = attention.forward(q, k, v, variant=variant, **how)
        dq, dk, dv = attention.backward(do, q, k, v, o, lse, variant="tiled", **how)
        if options.get("dropout_p"):
            assert o.abs().sum() > 0 and (dq, dk, dv)  # the mask counts sequences: no peer
            continue
        for n in range(3):
            rows, keys = slice(*q_starts[n : n + 2]), slice(*k_starts[n : n + 2])
            one = double(q[:, :, rows]), double(k[:, :, keys]), double(v[:, :, keys])
            truth, true_lse = reference.attention(*one, **options)
            truths = reference.attention_backward(double(do[:, :, rows]), *one, **options)
            found = o[:, :, rows], lse[:, :, rows], dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]
            for a, b in zip(found, (truth, true_lse, *truths[:3]), strict=True):
                np.testing.assert_allclose(double(a), b, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="takes no packed sequences: use one of streaming, tiled"):
        attention.forward(q, k, v, variant="separate", **how)


def test_padding_is_not_read():
    """Keys behind the length may be anything; their gradients are 0."""
    q, k, v, do = (numbers(2, 2, 6, 8, seed=n) for n in range(4))
    k[0, :, 4:], v[0, :, 4:] = math.nan, math.inf
    lengths = torch.tensor([4, 0], dtype=torch.int32, device=PLACE)
    for variant in ("streaming", "tiled"):
        o, lse = attention.forward(q, k, v, key_lengths=lengths, variant=variant)
        assert o[0].isfinite().all() and (o[1] == 0).all() and (lse[1] == -math.inf).all()
        found = attention.backward(
            do, q, k, v, o, lse, key_lengths=lengths, variant="tiled"
        )
        assert all(x.isfinite().all() for x in found) and (found[1][0, :, 4:] == 0).all()


@pytest.mark.skipif(not SIMULATED, reason="the sanitizer watches the simulator")
@pytest.mark.parametrize("forward, backward", [("separate",) * 2, ("tiled",) * 2, *WAYS])
def test_the_sanitizer_finds_nothing_with_all_options(forward, backward):
    """Nor does the order of threads change a bit, but where atomics add."""
    whole = forward in ("separate", "tiled") or "split" in forward or "scores" in forward
    dtype = torch.float32 if whole else torch.float16
    q, k, v = (numbers(1, *shape, dtype=dtype) for shape in ((2, 19, 8), (1, 18, 8), (1, 18, 8)))
    options = dict(
        causal=True, lower_right=True, window=(9, None), softcap=3.0, slopes=numbers(2).abs(),
        key_lengths=torch.tensor([17], dtype=torch.int32), dropout_p=0.2,
        mask=numbers(19, 18, dtype=dtype),
    )  # fmt: skip
    found = []
    for order in ("forward", "random"):
        watch = simulator.sanitize() if order == "forward" else contextlib.nullcontext()
        with watch as report, simulator.options(order=order, seed=3):
            o, lse = attention.forward(q, k, v, variant=forward, **options)
            saved = dict(variant=backward, mask_gradient=True, **options)
            found.append((o, lse, *attention.backward(o, q, k, v, o, lse, **saved)))
        assert report is None or not report.findings, report
    close = torch.equal if "atomic" not in backward else torch.allclose
    assert all(close(a, b) for a, b in zip(*found, strict=True))


@choosing("tiled", attention)
def test_results_lie_as_their_inputs_do():
    """By heads or by rows; slices of one projection are read where they lie."""
    B, T, H, D = 2, 5, 3, 8
    whole = numbers(B, T, 3, H, D)
    q, k, v = whole.permute(2, 0, 3, 1, 4)
    o, lse = attention.forward(q, k, v)
    assert o.transpose(1, 2).is_contiguous() and lse.is_contiguous()
    for found, x in zip(attention.backward(o, q, k, v, o, lse), (q, k, v), strict=True):
        assert found.transpose(1, 2).is_contiguous() and found.shape == x.shape
    same, _ = attention.forward(*(x.contiguous() for x in (q, k, v)))
    assert same.is_contiguous() and torch.equal(same, o)


def test_no_keys_and_no_queries():
    for T, S in ((3, 0), (0, 3), (0, 0)):
        q, k, v = numbers(2, 2, T, 8), numbers(2, 2, S, 8), numbers(2, 2, S, 4)
        for variant in ON_ORDINARY_CORES:
            o, lse = attention.forward(q, k, v, variant=variant)
            assert o.shape == (2, 2, T, 4) and (o == 0).all() and (lse == -math.inf).all()
        found = attention.backward(o, q, k, v, o, lse)
        assert all((x == 0).all() for x in found)
        assert [x.shape for x in found] == [x.shape for x in (q, k, v)]


Q = numbers(2, 4, 5, 8)
REFUSED = [
    (dict(q=numbers(4, 5, 8)), ArrayError, "q must have 4 dimensions"),
    (dict(q=numbers(2, 3, 5, 8)), ArrayError, "q has 3 heads, which the 2 of k and v do not"),
    (dict(k=numbers(2, 2, 6, 4)), ArrayError, r"k must have shape \(2, 2, 6, 8\)"),
    (dict(v=numbers(2, 2, 7, 8)), ArrayError, r"v must have shape \(2, 2, 6, 8\)"),
    (dict(k=numbers(2, 2, 6, 8).half()), ArrayError, "k must be float32, not float16"),
    (dict(mask=numbers(5, 6).half()), ArrayError, "mask must be bool or float32, not float16"),
    (dict(mask=numbers(4, 6)), ArrayError, r"mask must broadcast to \(2, 4, 5, 6\)"),
    (dict(window=3), TypeError, r"window must be \(left, right\)"),
    (dict(window=(-1, 3)), ValueError, "window must reach 0 keys or more"),
    (dict(softcap=-1.0), ValueError, "softcap must be at least 0"),
    (dict(scale="large"), TypeError, "scale must be a number"),
    (dict(dropout_p=1.5), ValueError, "p must be a probability"),
    (dict(slopes=numbers(3)), ArrayError, r"slopes must have shape \(4,\)"),
    (dict(key_lengths=torch.ones(2, device=PLACE)), ArrayError, "key_lengths must be int32"),
    (dict(max_q=3), ValueError, "packed sequences need q_starts, k_starts, max_q and max_k"),
    (dict(variant="flash"), ValueError, "unknown variant 'flash'"),
    (dict(q=numbers(2, 4, 5, 300), k=numbers(2, 2, 6, 300)), ArrayError, "1 to 256 elements"),
]


@pytest.mark.parametrize("wrong, error, says", REFUSED, ids=[says[:30] for *_, says in REFUSED])
def test_bad_input_is_refused_in_words(wrong, error, says):
    inputs = dict(q=Q, k=numbers(2, 2, 6, 8), v=numbers(2, 2, 6, 8)) | wrong
    with pytest.raises(error, match=says):
        attention.forward(**inputs)


@choosing("tiled", attention)
def test_lengths_beyond_the_keys_read_no_further():
    k = numbers(2, 2, 6, 8)
    far = torch.tensor([60, 6], dtype=torch.int32, device=PLACE)
    found, _ = attention.forward(Q, k, k, key_lengths=far)
    assert torch.equal(found, attention.forward(Q, k, k)[0])


@pytest.mark.skipif(not SIMULATED, reason="plans for other chips")
def test_tensor_cores_take_what_they_say():
    from test_chips import CHIPS

    for dtype, chip, D, chosen in [
        (torch.float32, CHIPS[4], 64, "tensor_core_kernel"),
        (torch.float32, CHIPS[4], 72, "score_products_kernel"),
        (torch.float32, CHIPS[0], 64, "tiled_kernel"),
        (torch.float16, CHIPS[0], 64, "tensor_core_kernel"),
        (torch.float16, CHIPS[0], 128, "tensor_core_kernel"),
        (torch.float16, CHIPS[0], 256, "tiled_kernel"),
        (torch.bfloat16, CHIPS[0], 64, "tiled_kernel"),
        (torch.float16, CHIPS[4], 64, "tensor_core_kernel"),
        (torch.bfloat16, CHIPS[1], 256, "tensor_core_kernel"),
        (torch.bfloat16, CHIPS[2]._replace(shared_bytes=64 << 10), 256, "tiled_kernel"),
    ]:  # fmt: skip
        q = torch.empty(1, 1, 64, D, dtype=dtype)
        with planning(chip) as launches:
            attention.forward(q, q, q)
        assert chosen in str(launches[0][0].py_func), (dtype, chip.name, D)
    with planning(CHIPS[0]), pytest.raises(ValueError, match="float16 alone on GPUs before"):
        attention.forward(*[Q.bfloat16()] * 3, variant="tensor_core/mma")
    for way, says in (("mma", "float16 and bfloat16"), ("split", "float32")):
        q = Q.half() if way == "split" else Q
        with pytest.raises(ValueError, match=f"'tensor_core/{way}' takes {says} alone: use one"):
            attention.forward(q, q, q, variant=f"tensor_core/{way}")


def test_a_chip_with_too_little_shared_memory_gets_another_way():
    from test_chips import CHIPS

    q = torch.empty(1, 1, 64, 256)
    with planning(CHIPS[0]) as launches:
        with pytest.raises(ValueError, match="'tensor_core' .*shared memory for heads of 256"):
            attention.backward(*[q.half()] * 5, torch.empty(1, 1, 64), variant="tensor_core")
        attention.backward(q, q, q, q, q, torch.empty(1, 1, 64))
        with pytest.raises(ValueError, match="shared memory for heads of 256.*use one of separate"):
            attention.backward(q, q, q, q, q, torch.empty(1, 1, 64), variant="tiled")
    assert any("gradients_kernel" in str(kernel.py_func) for kernel, *_ in launches)
