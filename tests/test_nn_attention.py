"""`nn.MultiheadAttention` in PyTorch's place: alone, in its encoders, and in others' networks."""

import collections
import contextlib
import copy
import itertools

import pytest
import timm
import torch
import torchvision
from contract.operators import near, quick
from drop_in import apart
from drop_in import passes as passes_of_parameters
from tensors import PLACE, randn
from torch import nn as torch_nn

from course_lib import SIMULATED, nn
from course_lib.runtime.host.launch import recorded

N, L, S, E, H = 2, 3, 4, 8, 2
HIDDEN = torch.tensor([[False, False, True, False], [True, False, False, False]])
FORBIDDEN = torch.ones(L, S, dtype=torch.bool).triu(1)
#: (options of the module, of the call): masks are moved, and inputs made for the module.
CALLS = [
    ({}, {}),
    ({}, dict(need_weights=False)),
    (dict(batch_first=True, bias=False), dict(average_attn_weights=False)),
    (dict(batch_first=True, kdim=5, vdim=6), dict(need_weights=False, attn_mask=FORBIDDEN)),
    (dict(kdim=5, vdim=8), dict(attn_mask=torch.linspace(-1, 2, L * S).view(L, S))),
    (dict(add_bias_kv=True), dict(key_padding_mask=HIDDEN, attn_mask=FORBIDDEN)),
    (dict(add_zero_attn=True), dict(key_padding_mask=HIDDEN.float() * -3, need_weights=False)),
    (
        dict(add_bias_kv=True, add_zero_attn=True, batch_first=True),
        dict(need_weights=False, key_padding_mask=HIDDEN),
    ),
    ({}, dict(need_weights=False, attn_mask=FORBIDDEN, is_causal=True)),
    ({}, dict(attn_mask=FORBIDDEN, is_causal=True)),
    (
        dict(batch_first=True),
        dict(need_weights=False, attn_mask=torch.linspace(-2, 1, N * H * L * S).view(-1, L, S)),
    ),
]


def pair(**options):
    """(ours, PyTorch's), of the same numbers."""
    made = []
    for module in (nn, torch_nn):
        torch.manual_seed(3)
        made.append(module.MultiheadAttention(E, H, **options).to(PLACE))
    torch.nn.init.normal_(made[1].in_proj_bias) if made[1].in_proj_bias is not None else None
    made[0].load_state_dict(made[1].state_dict())
    return made


def passes(module, inputs, options):
    """The results, and gradients of them all by inputs and parameters."""
    leaves = [x.clone().requires_grad_() for x in dict.fromkeys(inputs)]
    given = dict(zip(dict.fromkeys(inputs), leaves, strict=True))
    results = [y for y in module(*(given[x] for x in inputs), **options) if y is not None]
    dys = [torch.linspace(-1, 2, y.numel(), device=PLACE).view(y.shape) for y in results]
    return results + [*torch.autograd.grad(results, [*leaves, *module.parameters()], dys)]


@pytest.mark.parametrize("options, call", CALLS, ids=str)
def test_it_is_drop_in(options, call):
    ours, theirs = pair(**options)
    assert repr(ours) == repr(theirs) and vars(ours).keys() == vars(theirs).keys()
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    call = {name: x.to(PLACE) if torch.is_tensor(x) else x for name, x in call.items()}
    inputs = [randn(n, N, width) for n, width in ((L, E), (S, ours.kdim), (S, ours.vdim))]
    if ours.batch_first:
        inputs = [x.transpose(0, 1).contiguous() for x in inputs]
    with quick():
        near("values", *(passes(module, inputs, call) for module in (ours, theirs)), scale=64)


@pytest.mark.parametrize("batch_first, weights", [*itertools.product((True, False), repeat=2)])
def test_one_sequence_and_attention_to_itself(batch_first, weights):
    ours, theirs = pair(batch_first=batch_first)
    for x in (randn(L, E), randn(N, L, E)):
        with quick():
            near("values", *(passes(module, [x] * 3, dict(need_weights=weights))
                             for module in (ours, theirs)), scale=64)  # fmt: skip


def test_dropout_is_of_the_weights():
    ours, x = pair(dropout=0.5)[0], randn(12, N, E)
    with quick():
        for weights in (True, False):
            torch.manual_seed(4)
            first, again = (ours(x, x, x, need_weights=weights)[0] for _ in range(2))
            torch.manual_seed(4)
            assert torch.equal(ours(x, x, x, need_weights=weights)[0], first)
            assert not torch.equal(first, again)
        zeros = (ours(x, x, x, average_attn_weights=False)[1] == 0).float().mean()
        assert 0.3 < zeros < 0.7
        assert torch.equal(ours.eval()(x, x, x)[0], ours(x, x, x)[0])


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(key=randn(S, N, 5)), "must have 8, 8, 8 features"),
        (dict(value=randn(L, N, E)), "key and value the same rows"),
        (dict(query=randn(1, L, N, E)), "unbatched 2D or batched 3D"),
        (dict(attn_mask=torch.ones(S, L)), r"2D attn_mask is \(4, 3\), but should be \(3, 4\)"),
        (dict(attn_mask=torch.ones(3, L, S)), r"3D attn_mask .* should be \(4, 3, 4\)"),
        (dict(key_padding_mask=torch.ones(N, L)), "key_padding_mask must be of 2 × 4"),
        (dict(key_padding_mask=torch.ones(N, S).long()), "only bool and floating types"),
        (dict(is_causal=True), "Need attn_mask if specifying the is_causal hint"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_pytorch_refuses_is_refused(given, words):
    inputs = dict(query=randn(L, N, E), key=randn(S, N, E), value=randn(S, N, E)) | given
    inputs = {name: x.to(PLACE) if torch.is_tensor(x) else x for name, x in inputs.items()}
    ours, theirs = pair()
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        theirs(**inputs)
    with pytest.raises(caught.type, match=words):
        ours(**inputs)


def test_what_kernels_do_not_take_is_left():
    model = torch_nn.ModuleList([torch_nn.MultiheadAttention(600, 2), torch_nn.Linear(2, 2)])
    swapped = nn.replace_layers(model)
    assert [each.name for each in swapped.replaced] == ["1"]
    assert swapped.left[0][2] == "its heads have 300 elements; our kernels take 256 at most"
    assert len(swapped.left) == 1
    norm = timm.layers.LayerNorm(4)
    norm._fast_norm = True
    assert "fast_norm is on" in nn.replace_layers(norm).left[0].reason


# ── PyTorch's encoders, and a network of torchvision's ───────────────────────────────────────────


def encoder(**options):
    layer = torch_nn.TransformerEncoderLayer(E, H, 12, dropout=0.0, batch_first=True, **options)
    nested = not options.get("norm_first")
    return torch_nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).to(PLACE)


def attention_launches(launches):
    return sum("attention" in kernel.py_func.__module__ for kernel, *_ in launches)


@pytest.mark.parametrize("types", [None, [torch_nn.MultiheadAttention]], ids=["all", "attention"])
@pytest.mark.parametrize("options", [{}, dict(norm_first=True, activation="gelu")], ids=str)
def test_an_encoder_calls_it_in_inference_too(types, options):
    theirs = encoder(**options)
    ours = copy.deepcopy(theirs)
    swapped = nn.replace_layers(ours, types)
    assert swapped.left == []
    x, hidden = randn(N, S, E), torch.arange(S, device=PLACE) > torch.tensor([[3], [1]]).to(PLACE)
    masks = [None, torch_nn.Transformer.generate_square_subsequent_mask(S, PLACE)]
    for training, mask in itertools.product((True, False), masks):
        for hides in (None, hidden) if mask is None else (None,):
            with quick(), torch.no_grad(), recorded() as launches:
                found = ours.train(training)(x, mask, hides)
            with torch.no_grad(), no_fast_path():
                expected = theirs.train(training)(x, mask, hides)
            seen = ~hidden if hides is not None else torch.ones_like(hidden)
            torch.testing.assert_close(found[seen], expected[seen], rtol=1e-4, atol=1e-5)
            assert attention_launches(launches) == 2  # one in each layer
    swapped.restore()
    assert {type(each.module) for each in swapped.replaced} == {e.kind for e in swapped.replaced}
    assert torch.equal(ours(x), theirs(x))


@contextlib.contextmanager
def no_fast_path():
    """PyTorch's layers in inference as in training: on a GPU their fast path has another GELU."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_one_graph_is_compiled():
    ours, x = pair(batch_first=True)[0], randn(N, L, E)
    for weights in (True, False):
        compiled = torch.compile(
            lambda x, weights=weights: ours(x, x, x, need_weights=weights)[0],
            fullgraph=True, backend="aot_eager",
        )  # fmt: skip
        with quick():
            torch.testing.assert_close(compiled(x), ours(x, x, x)[0], rtol=1e-4, atol=1e-5)


#: A block's width, heads, wider layer and tokens: of ViT-B/16, in the simulator smaller ones.
WIDTH, HEADS, WIDER, TOKENS = (64, 2, 128, 5) if SIMULATED else (768, 12, 3072, 197)
BLOCKS = {
    "torchvision": lambda: torchvision.models.vision_transformer.EncoderBlock(
        HEADS, WIDTH, WIDER, 0.0, 0.0
    ),
    "timm": lambda: timm.models.vision_transformer.Block(
        WIDTH, HEADS, WIDER / WIDTH, qkv_bias=True, norm_layer=timm.layers.LayerNorm
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)
def test_a_block_of_a_vision_transformer(make):
    torch.manual_seed(2)
    block, x, dy = make().to(PLACE), randn(2, TOKENS, WIDTH), randn(2, TOKENS, WIDTH)
    for parameter in block.parameters():  # biases that are 0 would not show
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() == 1 else None
    ours, exact = copy.deepcopy(block), copy.deepcopy(block).double()
    assert nn.replace_layers(ours).left == []
    y, true = passes_of_parameters(exact, x.double(), dy)
    peer, theirs = passes_of_parameters(block, x, dy)
    with quick():
        found, gradients = passes_of_parameters(ours, x, dy)
        with torch.no_grad(), recorded() as launches:
            assert torch.equal(ours.eval()(x), found)
    assert 0 < apart(found, y) <= 2 * apart(peer, y)
    for name, gradient in gradients.items():
        assert 0 < apart(gradient, true[name]) <= 2 * apart(theirs[name], true[name]), name
    counted = collections.Counter(k.py_func.__module__.split(".")[2] for k, *_ in launches)
    gemms = counted.pop("gemm")
    assert counted == dict(attention=1, layer_norm=2, activation=1) and gemms >= 4


@pytest.mark.parametrize(
    "options",
    [
        {}, dict(qkv_bias=True, qk_norm=True, norm_layer=torch_nn.LayerNorm),
        dict(gated=True, scale_norm=True, norm_layer=torch_nn.LayerNorm),
    ],
    ids=["plain", "norm of q and k", "gated"],
)  # fmt: skip
def test_attention_of_timm(options):
    torch.manual_seed(2)
    theirs, x = timm.layers.Attention(E, H, **options).to(PLACE), randn(N, 5, E)
    ours = copy.deepcopy(theirs)
    assert nn.replace_layers(ours).left == []
    for given in ({}, dict(attn_mask=randn(5, 5) > -1), dict(is_causal=True)):
        with quick(), recorded() as launches:
            found = ours(x, **given)
        torch.testing.assert_close(found, theirs(x, **given), rtol=1e-4, atol=1e-5)
        assert attention_launches(launches) == 1


def test_attention_in_a_network_of_timm():
    whole = timm.models.VisionTransformer(32, 16, 3, 2, embed_dim=E, depth=2, num_heads=H).to(PLACE)
    swapped, images = nn.replace_layers(whole, [timm.layers.Attention]), randn(N, 3, 32, 32)
    assert len(swapped.replaced) == 2
    with quick(), recorded() as launches:
        found = whole(images)
    swapped.restore()
    torch.testing.assert_close(found, whole(images), rtol=1e-4, atol=1e-5)
    assert attention_launches(launches) == 2


def test_an_encoder_trains_as_pytorch_s():
    theirs, x = encoder(), randn(N, S, E)
    ours = copy.deepcopy(theirs)
    nn.replace_layers(ours)
    with quick():
        found, expected = (
            torch.autograd.grad(each(x).square().sum(), each.parameters())
            for each in (ours, theirs)
        )
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
