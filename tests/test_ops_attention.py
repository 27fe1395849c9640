"""Attention as an operator: every option beside the truth and PyTorch's, dropout, packed rows."""

import attention_options
import pytest
import torch
from contract.operators import quick
from tensors import PLACE, close, double, randn
from torch.utils.flop_counter import FlopCounterMode

from course_lib import SIMULATED, ops, reference
from course_lib.ops.dropout import draw


@pytest.fixture(autouse=True)
def _quick():
    with quick():
        yield


def heads(*shape):
    """(q, k, v) of shape (B, H, T, S, D)."""
    B, H, T, S, D = shape
    return [randn(B, H, n, D) for n in (T, S, S)]


def test_every_option_gives_the_truth():
    assert list(attention_options.truth_faults(PLACE)) == []


def test_it_is_pytorch_s_function():
    assert list(attention_options.torch_faults(PLACE, range(20))) == []


def test_it_passes_pytorch_s_own_samples():
    dtypes, step = ("float32",), 5
    if not SIMULATED:
        dtypes, step = ("float32", "float16", "bfloat16"), 1
    for dtype in dtypes:
        assert list(attention_options.sample_faults(PLACE, getattr(torch, dtype), step)) == []


def test_packed_sequences_are_as_each_alone():
    assert list(attention_options.packed_faults(PLACE)) == []


@pytest.mark.parametrize("options", [{}, dict(causal=True, softcap=2.0)], ids=["plain", "more"])
def test_dropout_has_the_mask_of_the_truth(options):
    q, k, v = (x.requires_grad_() for x in heads(2, 2, 5, 6, 4))
    torch.manual_seed(3)
    o = ops.attention(q, k, v, dropout_p=0.4, **options)
    again, do = ops.attention(q, k, v, dropout_p=0.4, **options), torch.ones_like(o)
    torch.manual_seed(3)
    seed, offset = draw(q, 0)
    drawn = dict(dropout_p=0.4, seed=seed, offset=offset)
    given = double(q), double(k), double(v)
    expected = reference.attention(*given, **drawn, **options)[:1]
    expected += reference.attention_backward(double(do), *given, **drawn, **options)[:3]
    found = o, *torch.autograd.grad(o, (q, k, v), do)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(double(x), y, rtol=1e-4, atol=1e-5)
    assert not torch.equal(o, again)
    torch.manual_seed(3)
    assert torch.equal(ops.scaled_dot_product_attention(q, k, v, None, 0.4), o) == (not options)


def test_dropout_and_slopes_say_what_they_do_not_take():
    q, k, v = heads(1, 2, 3, 4, 4)
    with pytest.raises(RuntimeError, match="can't be mapped by torch.vmap with dropout"):
        torch.vmap(lambda q: ops.attention(q, k, v, dropout_p=0.5))(torch.stack((q, q)))
    o = ops.attention(q, k, v, slopes=torch.ones(2, device=PLACE, requires_grad=True))
    with pytest.raises(RuntimeError, match="no gradient for its slopes: detach them"):
        o.sum().backward()


@pytest.mark.skipif(not SIMULATED, reason="lengths on a GPU are not read")
@pytest.mark.parametrize(
    "options, words",
    [
        (dict(key_lengths=[6]), r"from 0 to 5, the keys that there are, not \[6\]"),
        (dict(key_lengths=[-1]), r"from 0 to 5, the keys that there are, not \[-1\]"),
        (dict(q_starts=[0, 3], k_starts=[0, 6], max_k=6), "k_starts must rise from 0 to 5"),
        (dict(q_starts=[0, 4], k_starts=[0, 5], max_k=5), "q_starts must rise from 0 to 3"),
        (dict(q_starts=[0, 3], k_starts=[0, 5], max_k=4), "the rows that there are, by 4 at most"),
        (dict(q_starts=[2, 1], k_starts=[0, 5], max_k=5), "q_starts must rise from 0 to 3"),
    ],
)
def test_lengths_beyond_the_tensors_are_refused(options, words):
    given = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in options.items()}
    given |= dict(max_q=4) if "q_starts" in options else {}
    with pytest.raises(RuntimeError, match=words):
        ops.attention(*heads(1, 2, 3, 5, 4), **given)


def test_heads_that_kernels_do_not_take_are_refused():
    q, k, v = heads(1, 1, 2, 2, 257)
    with pytest.raises(TypeError, match="must have 1 to 256 elements; q's have 257, v's 257"):
        ops.scaled_dot_product_attention(q, k, v)
    with pytest.raises(NotImplementedError, match='"attention" not implemented for .Double'):
        ops.attention(*(x.double() for x in heads(1, 1, 2, 2, 4)))


def test_autocast_takes_mixed_types():
    q, k, v = heads(1, 2, 3, 4, 4)
    with torch.autocast(PLACE, torch.bfloat16):
        o = ops.scaled_dot_product_attention(q, k.half(), v, randn(3, 4))
        assert ops.attention(q, k, v, return_lse=True)[1].dtype is torch.float32
    assert o.dtype is torch.bfloat16


def test_vmap_takes_masks_slopes_and_lengths():
    q, k, v = (torch.stack((x, -x)) for x in heads(2, 2, 3, 4, 4))
    numbers = dict(
        mask=randn(2, 2, 1, 3, 4), slopes=torch.rand(2, 2, device=PLACE),
        key_lengths=torch.tensor([[1, 4], [2, 3]], device=PLACE, dtype=torch.int32),
    )  # fmt: skip

    def mapped(q, k, v, mask, slopes, key_lengths):
        return ops.attention(q, k, v, mask=mask, slopes=slopes, key_lengths=key_lengths)

    for in_dims in ((0, 0, 0, 0, 0, 0), (0, None, 0, None, None, None), (1, 0, 0, None, 0, 0)):
        given = [
            x if axis is not None else x[0]
            for x, axis in zip((q, k, v, *numbers.values()), in_dims, strict=True)
        ]
        found = torch.vmap(mapped, in_dims)(*given)
        for n in range(2):
            sample = [x if axis is None else x.select(axis, n)
                      for x, axis in zip(given, in_dims, strict=True)]  # fmt: skip
            close(found[n], mapped(*sample), scale=4)


def test_flops_are_those_of_pytorch():
    def counted(function, *qkv, **options):
        with FlopCounterMode(display=False) as counter:
            function(*(x.requires_grad_() for x in qkv), **options).sum().backward()
        return counter.get_total_flops()

    found, peer = (
        counted(library.scaled_dot_product_attention, *heads(2, 2, 3, 5, 4))
        for library in (ops, torch.nn.functional)
    )
    assert found == 7 * 2 * 4 * 3 * 5 * 4
    assert peer == found or not SIMULATED  # on a GPU it may be made of products
    starts = torch.tensor([0, 1, 3], device=PLACE)
    packed = dict(q_starts=starts, k_starts=2 * starts, max_q=2, max_k=4)
    assert counted(ops.attention, *heads(1, 2, 3, 6, 4), **packed) == 7 * 2 * 2 * 10 * 4
