"""Operators called directly, with one tensor changed: what must be refused."""

import re

import torch
from operands import ACTIVATIONS, IN_PLACE

#: (operator, argument): the changes below that leave a call as right as it was.
ALL = {"another rank", "longer", "shorter", "none", "wider", "double"}
RIGHT = {(name, "x"): ALL for name in ("softmax", "log_softmax", "dropout", "softmax_dropout")}
RIGHT |= {(name, "x"): ALL for name in (*ACTIVATIONS, "gelu_tanh", *(f"{n}_" for n in IN_PLACE))}
RIGHT |= {
    (name, argument): {"longer", "shorter", "none"}
    for name, argument in (
        ("batch_norm", "x"), ("batch_norm_inference", "x"), ("conv2d", "weight"), ("conv2d", "x"),
        ("conv2d_batch_norm", "x"),
        ("linear", "weight"), ("bn_relu_softmax", "x"), ("conv_transpose2d", "x"),
    )
}  # fmt: skip
RIGHT |= {
    ("dropout_backward", "grad_output"): ALL | {"elsewhere"},
    ("dropout_backward", "drawn"): {"shorter"},  # one number is a seed that lies with the gradient
    ("attention", "q"): {"wider"},  # heads may share keys and values
    ("attention", "mask"): {"another rank"},
    ("attention_backward", "mask"): {"another rank"},
    ("scaled_softmax", "x"): {"longer", "shorter", "none", "double"},
    ("scaled_softmax", "mask"): {"another rank", "shorter"},
    ("layer_norm", "x"): {"another rank", "longer", "shorter", "none"},
    ("linear", "input"): {"another rank", "longer", "shorter", "none"},
    ("max_pool2d", "x"): ALL - {"another rank"},
    ("max_pool2d_backward", "grad_output"): {"double"},
    ("global_avg_pool", "x"): ALL - {"another rank"},
    ("global_avg_pool_backward", "grad_output"): {"double"},
    ("upsample", "x"): ALL - {"another rank"},
    ("upsample_backward", "grad_output"): {"double"},
    ("squeeze_excite", "x"): {"longer", "shorter", "none", "double"},
}


def changes(x):
    """{what is different: `x` so changed}."""
    changed = {"None": None, "a list": x.tolist(), "another rank": x[None]}
    changed["double"] = x.double() if x.is_floating_point() else x.float()
    changed["elsewhere"] = x.to("meta")
    if x.dim():
        changed |= {"longer": torch.cat((x, x)), "shorter": x[:-1], "none": x[:0]}
    if x.dim() > 1:
        changed["wider"] = torch.cat((x, x), -1 if x.dim() == 3 else 1)
    return changed


def faults(operator, args, device):
    """What is not refused of calls in which one tensor is changed, as sentences.

    args    a right call's
    device  "cpu", or "meta", which all of a call's tensors are then moved to
    """
    name, arguments = operator._schema.name.removeprefix("course_lib::"), operator._schema.arguments
    name = re.sub(r"^planted_\d+", "relu", name)  # one of `operator_mistakes`
    for i, (argument, x) in enumerate(zip(arguments, args, strict=True)):
        for what, other in changes(x).items() if torch.is_tensor(x) else ():
            optional = what == "None" and str(argument.type) == "Optional[Tensor]"
            moved = what == "elsewhere" and (device == "meta" or argument.name == "drawn")
            if optional or moved or what in RIGHT.get((name, argument.name), ()):
                continue
            given = [*args[:i], other, *args[i + 1 :]]
            given = [y.clone() if torch.is_tensor(y) else y for y in given]
            if device == "meta":
                given = [
                    y.to("meta") if torch.is_tensor(y) and each.name != "drawn" else y
                    for y, each in zip(given, arguments, strict=True)
                ]
            alone = what == "elsewhere" and sum(map(torch.is_tensor, args)) == 1
            try:
                operator(*given)
            except (RuntimeError, TypeError, ValueError) as error:
                if "INTERNAL" in str(error):
                    yield f"{name}, {argument.name} {what}, on {device}: {error!r}"
            else:
                if not alone:
                    yield f"{name} takes {argument.name} {what}, on {device}"
