"""Whole networks on a GPU, before and after `nn.replace_layers` lets our kernels run the layers.

A training step (forward, loss, backward, SGD with momentum) of 16 to 64 images of 224 × 224, in
float32 (TF32 allowed) and in bfloat16 by autocast, contiguous and channels-last: all layers ours,
those alone that gain (`keep="faster"`), PyTorch eager and torch.compile of the same network, in
turns; ours and eager also captured in a CUDA graph. Before anything is timed, a step's gradients,
in float32 without TF32, all together, may be twice as far from float64 as PyTorch's own; both
errors are kept in the record.
"""

import copy
import functools
import importlib.util
import itertools

import torch
import torchvision

from course_lib import bench
from course_lib.benchmarks import efficientnet, launches
from course_lib.benchmarks.case import FORMATS
from course_lib.kernels import (
    activation,
    attention,
    batch_norm,
    conv2d,
    global_avg_pool,
    layer_norm,
    linear,
    max_pool2d,
    squeeze_excite,
)
from course_lib.nn import replace_layers

SHAPE = (32, 3, 224, 224)
IMAGES = {"resnet18": 64, "convnext_tiny": 16}  # in a step, where they are not SHAPE's
CHECKED = 8  # images of them that the check takes: float64 needs memory
DTYPES = ("float32", "bfloat16")
N_CLASSES = 1000


def _torchvision(name):
    model = torchvision.models.get_model(name, num_classes=N_CLASSES)
    if name.startswith("vit"):  # its last layer is 0, and no other would have a gradient to check
        torch.nn.init.normal_(model.heads.head.weight, std=0.02)
    return model


def _timm(name):
    import timm

    return timm.create_model(name, num_classes=N_CLASSES)


NETWORKS = {
    name: functools.partial(_torchvision, name) for name in (
        "resnet18", "resnet50", "mobilenet_v2", "efficientnet_b0", "convnext_tiny", "vit_b_16",
    )
}  # fmt: skip
if importlib.util.find_spec("timm"):
    NETWORKS["vit_tiny_patch16_224"] = functools.partial(_timm, "vit_tiny_patch16_224")
#: Whose kernels may take part: modules, and activations.
_OF_IMAGES = (
    (conv2d, batch_norm, max_pool2d, global_avg_pool, linear), (activation.relu, activation.relu6),
)  # fmt: skip
_OF_TRANSFORMERS = (conv2d, layer_norm, linear, attention), (activation.gelu,)
_OF_BLOCKS = (*_OF_IMAGES[0], squeeze_excite), (activation.swish,)
_OF_CONVNEXT = (conv2d, layer_norm, linear, global_avg_pool), (activation.gelu,)
KERNELS = {
    **dict.fromkeys(("resnet18", "resnet50", "mobilenet_v2"), _OF_IMAGES),
    "efficientnet_b0": _OF_BLOCKS, "convnext_tiny": _OF_CONVNEXT,
    **dict.fromkeys(("vit_b_16", "vit_tiny_patch16_224"), _OF_TRANSFORMERS),
}  # fmt: skip
#: Layers that stay PyTorch's in these networks: we have none in their place.
NONE_OF_OURS = {"StochasticDepth", "Permute", "LayerNorm2d"}
COMMAND = "python -m course_lib bench replace_layers --record"
DEVICE = "cuda"
EAGER, COMPILED, OURS, FASTER = "PyTorch eager", "torch.compile", "ours", "ours, faster"
CAPTURED = {OURS: "ours, captured", EAGER: "PyTorch eager, captured"}
ALLOWED = 2  # times PyTorch's own error


def run(*, names=None, dtypes=DTYPES, rounds=8, progress=lambda cases: cases):
    """Check, then time, each network and type. Returns a record of each.

    Of `names`, as ["resnet50"], only these networks. timm's is one of them where it is installed.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    cases = [
        (name, dtype) for name in NETWORKS if names is None or name in names for dtype in dtypes
    ]

    def measured():
        errors = {}
        for name, dtype in progress(cases):
            if name not in errors:
                cudnn.allow_tf32 = matmul.allow_tf32 = False
                errors[name] = check(name)
            cudnn.benchmark = cudnn.allow_tf32 = matmul.allow_tf32 = True
            yield _measure(name, dtype, rounds) | {"gradient_errors": errors[name]}

    try:
        return bench.collected(measured())
    finally:
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


def check(name):
    """{who: how far all gradients together are from float64}; AssertionError if ours are too far.

    Also if a layer stays PyTorch's.
    """
    theirs = without_chance(NETWORKS[name]()).to(DEVICE)
    ours, exact = copy.deepcopy(theirs), copy.deepcopy(theirs).double()
    left = replace_layers(ours).left
    if left := [each for each in left if type(each.module).__name__ not in NONE_OF_OURS]:
        raise AssertionError(f"layers of {name} stay PyTorch's, so it is not timed: {left}")
    x = torch.randn(CHECKED, *SHAPE[1:], device=DEVICE)
    target = torch.randint(N_CLASSES, (CHECKED,), device=DEVICE)
    true = gradients(exact, x.double(), target)
    del exact
    errors = {}
    for who, model in ((EAGER, theirs), (OURS, ours)):
        error = (gradients(model, x, target) - true).norm() / true.norm()
        errors[who] = float(f"{error.item():.3e}")
    if not errors[OURS] <= ALLOWED * errors[EAGER]:
        raise AssertionError(f"the gradients of {name} are wrong, so it is not timed: {errors}")
    return errors


def without_chance(model):
    """`model`, whose dropout drops nothing: ours and PyTorch's would drop different elements."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout | torchvision.ops.StochasticDepth):
            module.p = 0.0
    return model


def gradients(model, x, target):
    """The gradients of all parameters, one after another, in float64."""
    loss = torch.nn.functional.cross_entropy(model(x), target)
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.double().flatten() for gradient in found])


class Training:
    """A network, its optimiser and a batch, in one layout."""

    def __init__(self, model, dtype, layout, who, shape=None):
        model = model.to(DEVICE, memory_format=FORMATS[layout]).train()
        self.autocast, self.kind = dtype != "float32", getattr(torch, dtype)
        shape, self.note = shape or SHAPE, None
        self.x = torch.randn(shape, device=DEVICE).to(memory_format=FORMATS[layout])
        self.target = torch.randint(N_CLASSES, shape[:1], device=DEVICE)
        if who == OURS:
            replace_layers(model)
        elif who == FASTER:
            with torch.autocast(DEVICE, self.kind, enabled=self.autocast):
                self.note = replace_layers(model, keep="faster", example_inputs=self.x).note
        self.model = _compiled(model) if who == COMPILED else model
        self.optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(self):
        """One step of training."""
        self.optimiser.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, self.kind, enabled=self.autocast):
            outputs = self.model(self.x)
        torch.nn.functional.cross_entropy(outputs.float(), self.target).backward()
        self.optimiser.step()


def _compiled(model):
    return torch.compile(model)


def _captured(training):
    """A function that replays a step, captured as PyTorch's manual has it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            training.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step()

    def replay(kept=training):  # what the graph reads and writes must not be freed
        graph.replay()

    return replay


def _measure(name, dtype, rounds):
    torch.compiler.reset()  # or it gives up after a few networks, and runs them eagerly
    model, shape = NETWORKS[name](), (IMAGES.get(name, SHAPE[0]), *SHAPE[1:])
    steps, notes = {}, {}
    # Ours first: the swap makes others compile again.
    for who, layout in itertools.product((OURS, FASTER, EAGER, COMPILED), FORMATS):
        training = Training(copy.deepcopy(model), dtype, layout, who, shape)
        steps[who, layout], notes[who, layout] = training.step, training.note
    for who, layout in itertools.product(CAPTURED, FORMATS):
        training = Training(copy.deepcopy(model), dtype, layout, who, shape)
        steps[CAPTURED[who], layout] = _captured(training)
    device, host = efficientnet.times(steps, rounds)
    best = {who: min(FORMATS, key=lambda layout: device[who, layout].microseconds)
            for who in (OURS, EAGER, COMPILED, FASTER, *CAPTURED.values())}  # fmt: skip
    order = list(best)
    in_order = sorted(steps, key=lambda case: (best[case[0]] != case[1], order.index(case[0])))
    rows = [_row(case, best, shape[0], device[case], host[case]) for case in in_order]
    digest = kernel_hash(KERNELS[name])
    record = bench.host_record(f"replace_layers.{name}", shape, dtype, rows, digest, COMMAND)
    ours, eager, compiled = (device[who, best[who]].microseconds for who in order[:3])
    return record | {
        "default": OURS, "layouts": best, "tf32": True, "autocast": dtype != "float32",
        "ratio": round(eager / ours, 4), "ratio_to_compiled": round(compiled / ours, 4),
        "faster": notes[FASTER, best[FASTER]],
    }  # fmt: skip


def _row(case, best, n_images, device, host):
    who, layout = case
    return {
        "label": who if best[who] == layout else f"{who}, {layout}",
        "kind": "ours" if who.startswith(OURS) else "peer",
        "microseconds": round(device.microseconds, 1),
        "quartiles": [round(quartile, 1) for quartile in device.quartiles],
        "python_microseconds": round(host.microseconds, 1),
        "python_quartiles": [round(quartile, 1) for quartile in host.quartiles],
        "images_per_second": round(n_images / host.microseconds * 1e6, 1),
    }


@functools.cache
def kernel_hash(operations):
    """Of all kernels of `operations`, as in `KERNELS`."""
    return launches.network_hash(*operations)


def kernel_hashes():
    """{record name: hash of our kernels that take part}."""
    return {f"replace_layers.{name}": kernel_hash(each) for name, each in KERNELS.items()}
