"""Cross-entropy as operator and module: options, shapes, gradients and errors are PyTorch's."""


import pytest
import torch
import torch.nn.functional as F
from tensors import PLACE, close, never_waiting, randn

from course_lib import nn, ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPERATOR = torch.ops.course_lib.cross_entropy.default
SHAPES = [
    ((5,), ()),
    ((4, 7), (4,)),
    ((2, 5, 3), (2, 3)),
    ((2, 3, 2, 4), (2, 2, 4)),
    ((3, 1), (3,)),
]


def classes(n_classes, shape):
    return torch.randint(n_classes, shape, device=PLACE)


def targets(shape, target_shape, dtype=torch.float32):
    """Class indices, and probabilities, for logits of `shape`."""
    axis = min(1, len(shape) - 1)
    yield classes(shape[axis], target_shape)
    yield torch.softmax(randn(shape), axis).to(dtype)


def compare(x, target, **options):
    x = x.detach().requires_grad_()
    found = []
    for function in (ops.cross_entropy, F.cross_entropy):
        loss = function(x, target, **options)
        dloss = torch.ones_like(loss) if loss.dim() == 0 else torch.linspace(
            -1, 2, loss.numel(), device=PLACE).reshape(loss.shape).to(loss.dtype)  # fmt: skip
        found.append((loss, torch.autograd.grad(loss, x, dloss)[0]))
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs, scale=8)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("shape", "target_shape"), SHAPES, ids=str)
def test_any_shape_and_option(shape, target_shape, reduction):
    x = randn(shape) * 3
    weight = torch.rand(shape[min(1, len(shape) - 1)], device=PLACE)
    for target in targets(shape, target_shape):
        for smoothing in (0.0, 0.2, 1):
            for chosen in (None, weight):
                compare(x, target, weight=chosen, reduction=reduction, label_smoothing=smoothing)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    x = (randn(6, 33) * 2).to(dtype)
    loss = ops.cross_entropy(x, target := classes(33, (6,)))
    assert loss.dtype == dtype
    close(loss.float(), F.cross_entropy(x.float(), target).to(dtype).float())
    soft = torch.softmax(randn(6, 33), -1).to(dtype)
    close(ops.cross_entropy(x, soft), F.cross_entropy(x.float(), soft.float()).to(dtype))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows(reduction):
    x, target = randn(5, 4), classes(4, (5,))
    for ignored, index in (([1, 3], -100), ([0], 2), ([0, 1, 2, 3, 4], -1)):
        target[ignored] = index
        weight = torch.rand(4, device=PLACE)
        compare(x, target, ignore_index=index, reduction=reduction, weight=weight)
        target[ignored] = 0


def test_gaps_in_memory_bytes_and_no_rows():
    wide = randn(8, 12)
    compare(wide[::2, 1::3], classes(4, (8,))[::2])
    compare(wide.t(), classes(8, (12,)))
    compare(wide, classes(12, (8,)).to(torch.uint8))
    assert ops.cross_entropy(randn(0, 3), classes(3, (0,))).isnan()
    assert ops.cross_entropy(randn(0, 3), classes(3, (0,)), reduction="sum") == 0
    assert ops.cross_entropy(randn(0, 3), classes(3, (0,)), reduction="none").shape == (0,)
    assert ops.cross_entropy(randn(2, 3, 0), classes(3, (2, 0)), reduction="none").shape == (2, 0)


def test_a_class_out_of_range_is_not_silent():
    x = randn(3, 4, requires_grad=True)
    target = torch.tensor([0, 4, 1], device=PLACE)
    losses = ops.cross_entropy(x, target, reduction="none")
    assert losses.isnan().tolist() == [False, True, False]
    assert ops.cross_entropy(x, target).isnan()


X = torch.ones(3, 5)
INDICES = torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("x", "target", "options", "words"),
    [
        (X, INDICES[:2], {}, "batch_size (3) to match target batch_size (2)"),
        (X, INDICES[:, None], {}, "0D or 1D target tensor expected, multi-target not supported"),
        (X, INDICES, {"weight": X[0, :4]}, "got weight tensor of shape: [4]"),
        (X, INDICES, {"weight": X[:1].t()}, "got weight tensor of shape: [5, 1]"),
        (X, INDICES, {"weight": X[0].double()}, "expected scalar type"),
        (X, INDICES, {"label_smoothing": 1.5}, "must be between 0.0 and 1.0. Got: 1.5"),
        (X, INDICES, {"reduction": "all"}, "all is not a valid value for reduction"),
        (X, X, {"ignore_index": 2}, "ignore_index is not supported for floating point target"),
        (X, INDICES.int(), {}, "expected target dtype to be Long or Byte, but got"),
        (X, X[:, :4], {}, ""),
        (X, X[0, :3], {}, "expected target dtype to be Long or Byte, but got"),
        (X, X.long(), {}, "Expected floating point type for target with class probabilities"),
        (X.long(), INDICES, {}, "not implemented for 'Long'"),
        (torch.ones(2, 5, 3), torch.zeros(2, 4).long(), {}, "size [2, 3], got [2, 4]"),
        (torch.ones(2, 5, 3), torch.zeros(2, 3, 4).long(), {}, "size [2, 3], got [2, 3, 4]"),
        (torch.tensor(1.0), torch.tensor(0), {}, ""),
        (X, None, {}, "must be Tensor, not NoneType"),
        (X, INDICES, {"weight": [1.0] * 5}, "must be Tensor, not list"),
    ],
)
def test_errors_are_those_of_pytorch(x, target, options, words):
    options = {k: v.to(PLACE) if torch.is_tensor(v) else v for k, v in options.items()}
    raised = []
    for function in (ops.cross_entropy, F.cross_entropy):
        with pytest.raises(Exception) as caught:
            function(x.to(PLACE), target if target is None else target.to(PLACE), **options)
        raised.append(caught.value)
    ours, theirs = raised
    assert words in str(ours)
    if type(theirs) is NotImplementedError and target.dtype is not torch.int64:
        return  # on a GPU PyTorch learns of a wrong target from a kernel that it doesn't find
    assert type(ours) is type(theirs) and words in str(theirs)


def test_negative_smoothing_is_refused():  # PyTorch takes it for none
    with pytest.raises(RuntimeError, match="must be between 0.0 and 1.0. Got: -0.1"):
        ops.cross_entropy(randn(2, 3), classes(3, (2,)), label_smoothing=-0.1)


def test_probabilities_of_another_dtype_are_refused():
    with pytest.raises(RuntimeError, match="target of probabilities must have input's dtype"):
        ops.cross_entropy(randn(2, 3).half(), torch.softmax(randn(2, 3), -1))


@pytest.mark.parametrize("name", ["target", "weight"])
def test_gradients_for_target_and_weight_are_refused(name):
    inputs = {"target": torch.softmax(randn(3, 4), -1), "weight": torch.ones(4, device=PLACE)}
    inputs[name].requires_grad_()
    with torch.no_grad():
        ops.cross_entropy(randn(3, 4, requires_grad=True), **inputs)
    loss = ops.cross_entropy(randn(3, 4, requires_grad=True), **inputs)
    with pytest.raises(RuntimeError, match=f"no gradient for its {name}: detach it"):
        loss.backward()


def test_second_gradients_and_transforms_are_refused():
    x, target = randn(3, 4, requires_grad=True), classes(4, (3,))
    (dx,) = torch.autograd.grad(ops.cross_entropy(x, target), x, create_graph=True)
    with pytest.raises(RuntimeError, match="course_lib.cross_entropy has no second derivative"):
        dx.sum().backward()
    with pytest.raises(RuntimeError, match="can't be transformed by torch.func"):
        torch.func.grad(lambda x: ops.cross_entropy(x, target))(x.detach())


def test_vmap():
    x, target = randn(2, 3, 4), classes(4, (2, 3))
    close(torch.vmap(ops.cross_entropy)(x, target), torch.vmap(F.cross_entropy)(x, target))


@pytest.mark.parametrize("dtype, reduction", [
    (torch.float32, "none"), (torch.float16, "mean"), (torch.bfloat16, "none"),
], ids=str)  # fmt: skip
def test_opcheck(dtype, reduction):
    x = randn(3, 6, dtype=dtype, requires_grad=True)
    weight = torch.rand(6, device=PLACE).to(dtype)
    backward = torch.ops.course_lib.cross_entropy_backward.default
    for target in targets((3, 6), (3,), dtype):
        for chosen in (None, weight):
            args = (x, target, chosen, -100, reduction, 0.1)
            torch.library.opcheck(OPERATOR, args)
        loss, stats, normaliser = OPERATOR(x.detach(), *args[1:])
        saved = (x.detach(), target, stats, normaliser)
        torch.library.opcheck(backward, (torch.ones_like(loss), *saved, *args[2:]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic):
    def network(x, target, weight):
        return ops.cross_entropy(x * 2, target, weight, label_smoothing=0.1)

    torch.compiler.reset()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((3, 5), (4, 5), (2, 5, 3)):
        x = randn(shape, requires_grad=True)
        args = (x, classes(5, (shape[0], *shape[2:])), torch.rand(5, device=PLACE))
        loss, expected = compiled(*args), network(*args)
        close(loss, expected)
        close(*(torch.autograd.grad(each, x)[0] for each in (loss, expected)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype):
    x, target = randn(3, 5, dtype=dtype, requires_grad=True), classes(5, (3,))
    weight = torch.rand(5, device=PLACE)  # a module's buffer, float32
    with torch.autocast(PLACE, dtype=dtype):
        soft = torch.softmax(randn(3, 5), -1).to(dtype)
        losses = [ops.cross_entropy(x, target, weight), ops.cross_entropy(x, soft)]
        by_torch = [F.cross_entropy(x, target, weight), F.cross_entropy(x, soft)]
    assert [loss.dtype for loss in losses] == [loss.dtype for loss in by_torch]
    # On a GPU PyTorch rounds the logarithms to `dtype`; ours are float32's.
    exact = F.cross_entropy(x.float(), target, weight), F.cross_entropy(x.float(), soft.float())
    for loss, expected in zip(losses, exact, strict=True):
        close(loss, expected)
        close(*(torch.autograd.grad(each, x)[0] for each in (loss, expected)))


def test_inference_mode():
    x, target = randn(3, 5), classes(5, (3,))
    with torch.inference_mode():
        close(ops.cross_entropy(x, target), F.cross_entropy(x, target))


@pytest.mark.parametrize("options", [
    {}, {"weight": torch.tensor([1.0, 2, 3])}, {"ignore_index": 1, "label_smoothing": 0.1},
    {"reduction": "none"}, {"reduction": "sum"},
])  # fmt: skip
def test_module_is_drop_in(options):
    ours, theirs = (m.CrossEntropyLoss(**options).to(PLACE) for m in (nn, torch.nn))
    assert repr(ours) == repr(theirs) and isinstance(ours, torch.nn.CrossEntropyLoss)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    for x, target in (
        (randn(4, 3), torch.tensor([0, 1, 2, 1], device=PLACE)),
        (randn(2, 3, 5), classes(3, (2, 5))),
    ):
        close(ours(x, target), theirs(x, target))


def test_module_takes_what_pytorch_calls_deprecated():
    x, target = randn(4, 3), classes(3, (4,))
    with pytest.warns(UserWarning, match="will be deprecated"):
        module = nn.CrossEntropyLoss(reduce=False)
    assert module(x, target).shape == (4,)


@pytest.mark.gpu
def test_no_wait_for_the_gpu():
    x, target = randn(64, 100, requires_grad=True), classes(100, (64,))
    ops.cross_entropy(x, target, label_smoothing=0.1).backward()
    with never_waiting():
        ops.cross_entropy(x, target, label_smoothing=0.1).backward()
