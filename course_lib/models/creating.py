"""Networks by name: torchvision's, timm's and our own, with our kernels put in."""

import difflib
import importlib.util
import logging

import torch

from course_lib import SIMULATED, nn
from course_lib.models.continuous_integration import ContinuousIntegrationModel
from course_lib.models.resnet import resnet18_small
from course_lib.models.small import SmallSENet
from course_lib.models.steps import require_counts
from course_lib.models.tiny_imagenet import TinyImageNetCNN
from course_lib.nn import replace_layers
from course_lib.nn.fused import Fused
from course_lib.ops.registration import simulate_on_cpu

_log = logging.getLogger("course_lib.models")
_said = set()
#: Networks of the course that run on layers of ours, all of them.
_WHOLE = {
    "tiny_cnn": TinyImageNetCNN,
    "resnet18_small": resnet18_small,
    "continuous_integration": ContinuousIntegrationModel,
}
_OWN = ("small_se_net", *_WHOLE)


def create_model(name, num_classes, use_cuda_kernels=True, *, pretrained=False, **options):
    """The network called `name`, on the CPU, with `num_classes` outputs and random weights.

    name              of the course, for small images: "small_se_net", "tiny_cnn",
                      "resnet18_small", "continuous_integration"; a classifier of torchvision, as
                      "efficientnet_b4", "mobilenet_v3_large", "regnet_y_8gf"; or else of timm, if
                      that is installed, as "tf_efficientnet_b4_ns", "seresnet50". "timm/…" is
                      timm's where both have one of that name
    use_cuda_kernels  let squeeze and excitation, and each layer of the last three of the course,
                      run our kernels, for tensors on an NVIDIA GPU. On a CPU and on MPS the same
                      network runs PyTorch's operators. False: it does so on a GPU too. Parameters
                      and their names are the same either way
    pretrained        download weights; those of the last layer only fit the classes they are for
    options           for the network itself: ``dropout=0.4``, ``drop_path_rate=0.2``

    A line of the log says, once for each network, which of these it runs. Raises ValueError for an
    unknown name, with those most like it, and for `num_classes` below 1.
    """
    require_counts(num_classes=num_classes)
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not a {type(name).__name__}")
    if name in _OWN:
        model = _of_the_course(name, num_classes, use_cuda_kernels, pretrained, options)
    elif name in _torchvision_names():
        model = _of_torchvision(name, num_classes, pretrained, options)
    else:
        model = _of_timm(name, num_classes, pretrained, options)
    left = replace_layers(model, types=[Fused]).left if use_cuda_kernels else []
    _say(f"{name}: {_path(model, name in _WHOLE, use_cuda_kernels, left)}")
    return model


def _of_the_course(name, num_classes, use_cuda_kernels, pretrained, options):
    if pretrained:
        raise ValueError(f"{name} has no pretrained weights")
    if name in _WHOLE:
        return _WHOLE[name](num_classes, layers=nn if use_cuda_kernels else torch.nn, **options)
    block = (nn if use_cuda_kernels else _torchvision().ops).SqueezeExcitation
    return SmallSENet(num_classes, block=block, **options)


def _of_torchvision(name, num_classes, pretrained, options):
    models = _torchvision().models
    model = models.get_model(name, weights=None, num_classes=num_classes, **options)
    if pretrained:
        weights = models.get_model_weights(name).DEFAULT
        _load_what_fits(model, weights.get_state_dict(progress=True, check_hash=True))
    return model


def _load_what_fits(model, state):
    """Load `state` but for the last layer, if that is of another number of classes."""
    own = model.state_dict()
    fits = {key: value for key, value in state.items() if value.shape == own[key].shape}
    others = own.keys() - fits.keys()
    if len({key.rpartition(".")[0] for key in others}) > 1:
        raise ValueError(f"pretrained weights do not fit {', '.join(sorted(others))}")
    model.load_state_dict(fits, strict=False)


def _of_timm(name, num_classes, pretrained, options):
    if importlib.util.find_spec("timm") is None:
        raise _unknown(name, "; timm, which has more, is not installed: pip install timm")
    import timm

    asked = name.removeprefix("timm/")
    today = timm.models.get_deprecated_models().get(asked, asked)
    with_weights = timm.list_models(pretrained=True)
    if today is None or not timm.is_model(today) or ("." in today and today not in with_weights):
        raise _unknown(name, "", [*timm.list_models(), *with_weights])
    return timm.create_model(today, pretrained=pretrained, num_classes=num_classes, **options)


def _torchvision():
    import torchvision  # takes as long as torch itself, which networks of the course need not spend

    return torchvision


def _torchvision_names():
    models = _torchvision().models
    return models.list_models(module=models)


def _unknown(name, remark, more=()):
    names = [*_OWN, *_torchvision_names()]
    near = difflib.get_close_matches(name.removeprefix("timm/"), dict.fromkeys([*names, *more]), 5)
    like = f"; the most like it: {', '.join(near)}"
    if not near:
        like = f"; there are {', '.join(names)}" + (f", and {len(more)} of timm's" if more else "")
    return ValueError(f"there is no network {name!r}{like}{remark}")


def _path(model, is_whole, use_cuda_kernels, left):
    """What the squeeze and excitation of `model` runs, or, if it `is_whole`, each of its layers:
    the end of a sentence."""
    if not use_cuda_kernels:
        return "PyTorch's operators"
    what = "every layer" if is_whole else "squeeze and excitation"
    has_blocks = left or any(isinstance(module, Fused) for module in model.modules())
    if not is_whole and not has_blocks:
        return "PyTorch's operators: the network has no squeeze and excitation"
    if torch.cuda.is_available() and not SIMULATED:
        path = f"{what} runs course_lib's CUDA kernels on a GPU"
    elif simulate_on_cpu:
        path = f"{what} runs course_lib's kernels in the simulator, which is slow"
    else:
        path = f"{what} runs PyTorch's operators: there is no NVIDIA GPU here"
    reasons = ", ".join(sorted({each.reason for each in left}))
    return path + (f"; {len(left)} blocks stay PyTorch's, because {reasons}" if left else "")


def _say(line):
    if line not in _said:
        _said.add(line)
        _log.warning(line)  # of a level that is shown where nobody has set up logging
