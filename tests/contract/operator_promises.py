"""The promises of every operator: functions that raise `Broken` where one is not kept."""

import contextlib
import functools
import importlib
import math
import re
from unittest import mock

import extremes
import operands
import peers
import refusals
import torch
from contract import operator_calls, options, wording
from contract.held import Broken, require
from contract.memory import same_bits
from contract.operator_exceptions import EXCEPTIONS
from contract.operator_gpu import ON_A_GPU
from contract.operators import FORMS, near, quick, said
from tensors import PLACE, choosing
from torch.autograd import forward_ad

from course_lib import SIMULATED, ops
from course_lib.kernels import attention, conv2d, conv_transpose2d, linear
from course_lib.ops import registration
from course_lib.runtime.host.launch import recorded

NARROW = torch.float16, torch.bfloat16
#: Whose parameters may be float32 beside narrow images.
MIXED = "batch_norm", "layer_norm", "squeeze_excite", "bn_relu_softmax"
#: Operators without a rule for torch.vmap, which then calls them for each sample, and warns.
ONE_BY_ONE = (
    "batch_norm", "bn_relu_softmax", "cross_entropy", "dice_loss", "interpolate", "max_pool2d",
    "squeeze_excite",
)  # fmt: skip


# ── values ───────────────────────────────────────────────────────────────────────────────────────


def values(held):
    """The result and all gradients are PyTorch's in float32, and lie in memory as its do."""
    near("values", held.first, held.expected, scale=64, norm=1e-5)
    y, peer = held.first[0], held.expected[0]
    if not held.subject.label.startswith(operands.LAID_OUT):
        require(y.stride() == peer.stride(), "values", f"strides {y.stride()}, not {peer.stride()}")


def dtypes(held):
    """float16 and bfloat16 are computed in float32 and rounded; gradients have the leaves' type."""
    for dtype in NARROW:
        given = held.subject.operands(dtype)
        mixed = [given[0], *(x.float() for x in given[1:])]
        for each in (given, mixed) if held.subject.name in MIXED else (given,):
            names, found = operands.run(held.subject.call, ops, each)
            expected = held.run([x.float() for x in each], library=peers)
            wanted = torch.float32 if held.subject.label.endswith("in float32") else dtype
            require(found[0].dtype == wanted, "dtypes", f"{found[0].dtype} of {dtype}")
            for name, x in zip(names, found, strict=True):
                if name.startswith("gradient"):
                    of = each[int(name.split()[1])].dtype
                    require(x.dtype == of, "dtypes", f"{name} is {x.dtype}, its operand {of}")
            rounded = [e.to(f.dtype) for f, e in zip(found, expected, strict=True)]
            norm = torch.finfo(dtype).eps if held.subject.name in options.NORMS else math.inf
            near("dtypes", found, rounded, scale=4, dtype=dtype, norm=norm)


def ways_to_call(held):
    """Every option, and every shape that there may be: values, gradients and strides."""
    for fault in options.faults(held.subject.name):
        require(False, "ways_to_call", fault)


def layouts(held):
    """Every operand in every layout, and gradients that are expanded, transposed or with gaps."""
    with choosing("tiled", attention):
        for fault in operands.faults(held.subject.label):
            require(False, "layouts", fault)


def extreme_numbers(held):
    """NaN, infinities, large and small numbers, and nothing at all: what PyTorch gives."""
    with choosing("tiled", attention, conv2d, linear), choosing("gather", conv_transpose2d):
        for fault in extremes.faults([held.subject.name]):
            require(False, "extreme_numbers", fault)


def writable(held):
    """The result is no view, and may be written to wherever PyTorch's may: gradients are as its."""
    found = []
    for library in (ops, peers):
        torch.manual_seed(3)
        leaf = held.operands[0].clone().requires_grad_()
        y = held.forward(leaf, *held.operands[1:], library=library)
        is_view = y._is_view()
        y.add_(1).mul_(y.detach().clone())
        message = said(RuntimeError, lambda y=y, leaf=leaf: y.sum().backward())
        known = message is None or "modified by an inplace operation" in message
        require(known, "writable", f"says: {message}")
        found.append((is_view, message, y.detach(), leaf.grad))
    ours, theirs = found
    require(not ours[0] or theirs[0], "writable", "a view")
    near("writable", [ours[2]], [theirs[2]], scale=64)
    require(theirs[1] is not None or ours[1] is None, "writable", f"says: {ours[1]}")
    if ours[1] is None is theirs[1]:
        near("writable", [ours[3]], [theirs[3]], scale=256)


def bits(held):
    """Twice the same gives the same bits."""
    require(all(map(same_bits, held.first, held.run())), "bits", "a second run differs")


def our_kernels(held):
    """Both passes launch kernels of ours."""
    with recorded() as forward, torch.no_grad():
        held.forward(*held.operands)
    with recorded() as both:
        held.run()
    require(len(forward) > 0, "our_kernels", "no kernel is launched forward")
    require(len(both) > len(forward), "our_kernels", "no kernel is launched backward")


# ── what is refused ──────────────────────────────────────────────────────────────────────────────


def refused(held):
    """What PyTorch refuses is, in its types of errors and in words; what it takes is taken."""
    for fault in refusals.faults(held.subject.name):
        require(False, "refused", fault)


def worded(held):
    """Errors say what was expected, as PyTorch's do where it has such a function."""
    for fault in wording.faults(held.subject.name):
        require(False, "worded", fault)


def direct_calls(held):
    """An operator called directly refuses tensors that do not go together, without memory too."""
    for operator, args in held.calls.items():
        for device in ("cpu", "meta"):
            for fault in operator_calls.faults(operator, args, device):
                require(False, "direct_calls", fault)


def second_gradients(held):
    """Differentiating any gradient again is an error that names the operator."""
    names = {operator._schema.name for operator in held.calls}
    leaves = held.leaves()
    y = held.forward(*leaves)
    dy = torch.ones_like(y).requires_grad_()
    for dx in torch.autograd.grad(y, leaves, dy, create_graph=True, allow_unused=True):
        if dx is not None:
            require(dx.requires_grad, "second_gradients", "a gradient forgets where it is from")
            message = said(RuntimeError, lambda dx=dx: dx.sum().backward(retain_graph=True)) or ""
            found = re.match(r"(course_lib.\w+) has no second derivative; torch.nn.functi", message)
            name = found and found[1].replace(".", "::")
            require(name in names or f"{name}_" in names, "second_gradients", f"says: {message}")


def transforms(held):
    """torch.func's transforms and forward-mode differentiation are refused in words."""
    x, *others = held.operands

    def total(x):
        return held.forward(x, *others).sum()

    for transform in (
        lambda: torch.func.grad(total)(x), lambda: torch.func.jvp(total, (x,), (x,)),
        lambda: torch.vmap(torch.func.grad(total))(torch.stack((x, x))),
    ):  # fmt: skip
        message = said(RuntimeError, transform) or ""
        require("can't be transformed by torch.func" in message, "transforms", f"says: {message}")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        message = said(NotImplementedError, held.forward, dual, *others) or ""
    found = re.search(r"course_lib.\w+ has no forward-mode derivative", message)
    require(found is not None, "transforms", f"says of forward mode: {message}")


# ── gradients ────────────────────────────────────────────────────────────────────────────────────


def recording(held):
    """Without gradients, and in inference mode, nothing is recorded and the result is the same."""
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.manual_seed(3)
            y = held.forward(*held.leaves())
        require(y.is_inference() == (mode is torch.inference_mode), "recording", "wrong kind")
        require(not y.requires_grad and y.grad_fn is None, "recording", f"recorded in {mode}")
        require(same_bits(y, held.first[0]), "recording", f"another result in {mode}")
    require(not held.forward(*held.operands).requires_grad, "recording", "of no leaf")


def needed(held):
    """A gradient that is asked for alone is as it is among all."""
    torch.manual_seed(3)
    y = held.forward(*(leaves := held.leaves()))
    dy = torch.linspace(-1, 2, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    found = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    for n, together in enumerate(found):
        if together is not None:
            torch.manual_seed(3)
            given = [x.clone() for x in held.operands]
            y = held.forward(*given[:n], given[n].requires_grad_(), *given[n + 1 :])
            (alone,) = torch.autograd.grad(y, given[n], dy)
            near("needed", [alone], [together], scale=8)  # sums may go in another order


# ── who else has a say ───────────────────────────────────────────────────────────────────────────


def opcheck(held):
    """PyTorch's own checks of schema, aliases, autograd and shapes, of both passes."""
    for dtype, checks in (
        (torch.float32, ("test_schema", "test_autograd_registration", "test_faketensor")),
        (torch.bfloat16, ("test_faketensor",)),
    ):  # fmt: skip
        calls = held.calls if dtype == torch.float32 else held.calls_of(dtype)
        for operator, args in calls.items():
            args = [
                x.detach() if torch.is_tensor(x) and argument.alias_info else x
                for x, argument in zip(args, operator._schema.arguments, strict=True)
            ]
            fewer = isinstance(args[-1], list) and args[-1] == [True] * 3  # gradients: needs
            for each in (args, [*args[:-1], [False, True, False]]) if fewer else (args,):
                with _drawing_alike():
                    check = functools.partial(torch.library.opcheck, test_utils=checks)
                    fault = said(Exception, check, operator, each)
                require(fault is None, "opcheck", f"{operator} of {dtype}: {fault}")


@contextlib.contextmanager
def _drawing_alike():
    """Dropout has the same mask each time, without asking the generator."""
    with contextlib.ExitStack() as stack:
        for name in ("attention", "dropout", "fused_softmax"):
            module = importlib.import_module(f"course_lib.ops.{name}")  # `ops.dropout` is another
            stack.enter_context(mock.patch.object(module, "_draw", lambda *_: (-5, 8)))
        yield


def compiled(held):
    """torch.compile finds one graph, of one shape and then of any; both passes are the same."""
    torch.compiler.reset()
    network = torch.compile(
        lambda *given: held.subject.call(ops, *given), fullgraph=True, backend="aot_eager"
    )
    for more in (0, 1):
        given = held.subject.operands(more=more)
        found = operands.run(lambda _, *given: network(*given), ops, given)[1]
        near("compiled", found, held.run(given))
    if "dropout" in held.subject.name:
        differ = not torch.equal(*(network(*given) for _ in range(2)))
        require(differ, "compiled", "every call draws the same")


def mapped(held):
    """torch.vmap over one operand, over its second axis, and over all: what a loop gives."""
    first, *others = ([x, -x, x / 2] for x in held.operands)
    cases = [(0, *(None for _ in others)), (1, *(None for _ in others)), (0, *(0 for _ in others))]
    for in_dims in cases[: 3 if others else 2]:
        given = [
            stacked(samples, axis) for samples, axis in zip((first, *others), in_dims, strict=True)
        ]
        y, slow = one_by_one(torch.vmap(held.forward, in_dims), *given)
        require(slow == (held.subject.name in ONE_BY_ONE), "mapped", f"slow: {slow} in {in_dims}")
        found = y, *torch.autograd.grad(y.square().sum(), given, allow_unused=True)
        y = torch.stack([
            held.forward(*(x if axis is None else x.select(axis, n)
                           for x, axis in zip(given, in_dims, strict=True)), library=peers)
            for n in range(3)
        ])  # fmt: skip
        expected = y, *torch.autograd.grad(y.square().sum(), given, allow_unused=True)
        both = [pair for pair in zip(found, expected, strict=True) if pair[1] is not None]
        near("mapped", *zip(*both, strict=True), scale=64, norm=1e-5)


def one_by_one(call, *given):
    """(the result, whether torch.vmap calls an operator of ours once for each sample).

    Its warning goes to Python or to stderr, as the version of PyTorch likes.
    """
    functorch = torch._C._functorch
    functorch._set_vmap_fallback_enabled(False)
    try:
        return call(*given), False
    except RuntimeError as error:
        if "fallback which is currently disabled" not in str(error):
            raise
    finally:
        functorch._set_vmap_fallback_enabled(True)
    return call(*given), True


def stacked(samples, axis):
    """The samples along `axis`, or the first alone where that is None; a leaf."""
    x = samples[0] if axis is None else torch.stack(samples, axis)
    return x.detach().clone().requires_grad_()


def autocast(held):
    """Under autocast results have PyTorch's types, and gradients those of the operands."""
    for dtype in NARROW:
        for given in (held.operands, held.subject.operands(dtype)):
            with torch.autocast(PLACE, dtype=dtype):
                found, expected = (held.run(given, library) for library in (ops, peers))
            kinds = [[x.dtype for x in each] for each in (found, expected)]
            require(kinds[0] == kinds[1], "autocast", f"{kinds[0]}, PyTorch's {kinds[1]}")
            near("autocast", found, expected, scale=2, dtype=dtype)


def traced(held):
    """torch.fx makes a call a node of its graph."""
    function, graph = getattr(ops, held.subject.name), torch.fx.Graph()
    function(torch.fx.Proxy(graph.placeholder("x")))
    require(list(graph.nodes)[-1].target is function, "traced", f"{list(graph.nodes)}")


def dispatched(held):
    """The short way past the dispatcher gives the same bits, and leaves the same node."""
    found = []
    keys = registration.plain_keys("CPU") if SIMULATED else registration._direct_keys
    for idle in (True, False):
        with (
            mock.patch.object(registration, "_direct_keys", keys),
            mock.patch.object(registration, "dispatcher_is_idle", lambda idle=idle: idle),
        ):
            torch.manual_seed(3)
            y, *others = operands.several(held.subject.call(ops, *(leaves := held.leaves())))
            gradients = torch.autograd.grad(y.sum(), leaves, allow_unused=True)
            results = [y, *others, *(dx for dx in gradients if dx is not None)]
            found.append((type(y.grad_fn).__name__, results))
    (name, short), (other, long) = found
    require(name == other, "dispatched", f"the nodes are {name} and {other}")
    require(all(map(same_bits, short, long)), "dispatched", "other bits")


def on_a_mac(held):
    """Every operator has an implementation on MPS."""
    for operator in held.calls:
        there = torch._C._dispatch_has_kernel_for_dispatch_key(operator._schema.name, "MPS")
        require(there, "on_a_mac", f"{operator} has none")


#: Of every form, and of those that are no more than other shapes.
OF_SHAPES = values, dtypes, writable, bits
OF_FORMS = (
    *OF_SHAPES, second_gradients, transforms, recording, needed, opcheck, mapped, autocast,
    dispatched, on_a_mac, *((our_kernels, direct_calls) if SIMULATED else ()),
)  # fmt: skip
#: Of a function, whatever its form.
OF_FUNCTIONS = (ways_to_call, worded, traced, *((extreme_numbers, refused) if SIMULATED else ()))
BY_NAME = {
    each.__name__: each for each in (*OF_FORMS, layouts, compiled, *OF_FUNCTIONS, *ON_A_GPU)
}
FOR_A_GPU = {each.__name__ for each in ON_A_GPU}


def promises(subject):
    """Names of the promises that a subject is held to: everywhere, or (`ON_A_GPU`) on a GPU."""
    principal = subject.label == subject.name
    own = principal or subject.label in FORMS or subject.label in OWN
    found = [*(OF_FORMS if own else OF_SHAPES), *(OF_FUNCTIONS if principal else ())]
    if subject.label in operands.CASES:
        found.append(layouts)
    if principal or subject.label in COMPILED_TOO:
        found.append(compiled)  # no operator twice: it takes long
    return [each.__name__ for each in (*found, *(ON_A_GPU if own else ()))]


#: Forms tried in all layouts that are more than other shapes.
OWN = "batch_norm in inference", "cross_entropy of probabilities"
#: Forms that are compiled too: operators of their own, and one that writes to its operands.
COMPILED_TOO = {
    "batch_norm in inference", "batch_norm with statistics", "gelu by tanh",
    *(f"{name} in place" for name in operands.IN_PLACE),
}  # fmt: skip
assert COMPILED_TOO - FORMS.keys() - operands.CASES.keys() == set()


def keep(held, name):
    """Hold a subject to a promise: `Broken` where it is not kept; False where that is excepted.

    An exception must be needed, and the promise be broken as it says.
    """
    exception = next((each for each in EXCEPTIONS if each.covers(held.subject, name)), None)
    try:
        with contextlib.nullcontext() if name in (layouts.__name__, extreme_numbers.__name__) else (
            quick()
        ):
            BY_NAME[name](held)
    except Broken as error:
        broken = error
    except Exception as error:
        broken = Broken(name, repr(error))
        broken.__cause__ = error
    else:
        require(exception is None, name, f"no exception is needed: {exception}")
        return True
    if exception is None:
        raise broken
    require(exception.says in str(broken), name, f"not as excepted, but: {broken}")
    return False
