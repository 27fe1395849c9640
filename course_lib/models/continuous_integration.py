"""A classifier that sees colour and brightness on two pathways, and learns how to weigh them."""

import torch

from course_lib import nn
from course_lib.models.integration import NAMES, Integration
from course_lib.models.pathways import both, recomputed
from course_lib.models.resnet import BasicBlock, start_convolutions
from course_lib.models.steps import Steps, require_counts, require_images

torch.fx.wrap("require_images")

#: Depth -> (residual blocks of each stage, its channels in base_channels).
DEPTHS = {
    "shallow": ((1, 1), (1, 2)),
    "medium": ((2, 2, 2), (1, 2, 4)),
    "deep": ((2, 3, 4, 2), (2, 4, 8, 16)),
}
INTEGRATION_POINTS = ("early", "middle", "late", "all")
#: The share of red, green and blue in brightness: luma of ITU-R BT.601.
LUMA = (0.299, 0.587, 0.114)


class ContinuousIntegrationModel(torch.nn.Module):
    """Logits (N, num_classes) of images' colour (N, 3, H, W) and brightness (N, 1, H, W).

    Each pathway is a 3×3 convolution and stages of residual blocks, each stage but the first at
    half the height and width. What both found is integrated (`Integration`) on the way and, last,
    as means over each plane: the sum of colour, brightness and what was integrated before has
    weights that are learned. Before the first point, that is the mean of both first convolutions.

    num_classes             of the logits
    depth                   "shallow", "medium" or "deep": 2, 3 or 4 stages (`DEPTHS`)
    base_channels           of the first convolutions
    enable_mixed_precision  on a GPU, compute under autocast, unless the caller has one open: in
                            bfloat16 or, where the GPU has none and no gradients are wanted (those
                            would need a scaler), in float16. The logits are float32
    memory_efficient        keep only what enters each stage, and compute the rest again in the
                            backward pass (gradient checkpointing)
    integration_points      where maps are integrated, before their means are: after the first stage
                            ("early"), after the one in the middle, nowhere ("late"), or after all
    dropout                 the share dropped before each of the two last layers, in training
    parallel_pathways       give each pathway a stream of its own on a GPU
    layers                  whose layers: `course_lib.nn`, or `torch.nn` for PyTorch's own. Both
                            kinds of network have the same state_dict, and the same first weights
                            from the same seed

    `memory_efficient`, `parallel_pathways` and `enable_mixed_precision` may be set at any time, and
    `spread` puts each pathway on a device of its own.
    Raises ValueError for a depth or point that there is not and for numbers out of range.
    """

    #: `recomputed` sees to it: hooks would keep batch norms apart from what follows them.
    moves_statistics_once = True

    def __init__(
        self, num_classes=1000, depth="shallow", base_channels=32, enable_mixed_precision=True,
        memory_efficient=True, integration_points="all", *, dropout=0.2, parallel_pathways=True,
        layers=nn,
    ):  # fmt: skip
        _require_one_of("depth", depth, DEPTHS)
        _require_one_of("integration_points", integration_points, INTEGRATION_POINTS)
        require_counts(num_classes=num_classes, base_channels=base_channels)
        super().__init__()
        self.depth, self.integration_points = depth, integration_points
        self.enable_mixed_precision = enable_mixed_precision
        self.memory_efficient, self.parallel_pathways = memory_efficient, parallel_pathways
        blocks, widths = DEPTHS[depth]
        channels = [base_channels * width for width in widths]
        self.colour = _pathway(3, base_channels, blocks, channels, layers)
        self.brightness = _pathway(1, base_channels, blocks, channels, layers)
        self.integrations = torch.nn.ModuleDict()
        c_before, stage_before = base_channels, 0
        for stage in _stages(integration_points, len(blocks)):
            c, stride = channels[stage], 2 ** (stage - stage_before)
            self.integrations[f"stage{stage + 1}"] = Integration(c, c_before, stride, True, layers)
            c_before, stage_before = c, stage
        c = channels[-1]
        self.pool = layers.AdaptiveAvgPool2d(1)
        self.integrations["pooled"] = Integration(c, c_before, 1, False, layers)
        self.classifier = torch.nn.Sequential(
            layers.Flatten(),
            layers.Dropout(dropout),
            layers.Linear(c, max(1, c // 2)),
            layers.ReLU(),
            layers.Dropout(dropout),
            layers.Linear(max(1, c // 2), num_classes),
        )
        start_convolutions(self)

    def forward(self, colour, brightness=None):
        """Logits (N, num_classes).

        colour      (N, 3, H, W), at least 2^(stages − 1) pixels each way
        brightness  (N, 1, H, W) of colour's dtype and device; by default `brightness_of(colour)`

        Images lie on `device`, and so do the logits, also where the pathways are on two devices.

        Raises ValueError for other shapes, dtypes and devices.
        """
        who = f"ContinuousIntegrationModel of depth {self.depth}"
        require_images(colour, who, 3, least=2 ** (len(self.colour) - 2))
        brightness = _brightness_beside(colour, brightness)
        dtype = self._mixed_dtype()
        if dtype is None:
            return self._logits(colour, brightness)
        with torch.autocast(self.device.type, dtype):
            return self._logits(colour, brightness).float()

    def _logits(self, colour, brightness):
        first, second = self.devices

        def moved(x, device):
            return x if first == second else x.to(device)

        colour, brightness = self._both(0, colour, moved(brightness, second))
        integrated = torch.lerp(colour, moved(brightness, first), 0.5)
        for stage in range(1, len(self.colour)):
            colour, brightness = self._both(stage, colour, brightness)
            if (name := f"stage{stage}") in self.integrations:
                point = self.integrations[name]
                integrated = self._run(point, colour, moved(brightness, first), integrated)
        colour, brightness, integrated = map(self.pool, (colour, brightness, integrated))
        pooled = colour, moved(brightness, first), integrated
        return self.classifier(self.integrations["pooled"](*pooled))

    def _both(self, stage, colour, brightness):
        def first(x):
            return self._run(self.colour[stage], x)

        def second(x):
            return self._run(self.brightness[stage], x)

        return both(first, second, colour, brightness, self.parallel_pathways)

    def _run(self, module, *inputs):
        if self.memory_efficient and torch.is_grad_enabled() and _is_tensor(inputs[0]):
            return recomputed(module, *inputs)
        return module(*inputs)

    def _mixed_dtype(self):
        kind = self.device.type
        if not self.enable_mixed_precision or torch.is_autocast_enabled(kind):
            return None
        return mixed_dtype(self.device)

    @property
    def device(self):
        """Where images go, and all parameters are but the brightness pathway's of two devices."""
        return next(self.parameters()).device

    @property
    def devices(self):
        """(the colour pathway's device, the brightness pathway's)."""
        return self.device, next(self.brightness.parameters()).device

    def spread(self, first, second):
        """Put the brightness pathway on the device `second`, and all else on `first`; the network.

        The two pathways then compute at the same time. Brightness and its feature maps cross over
        before the first convolution, behind it and at each integration point, and their gradients
        on the way back. Logits and gradients are those of one device of the same kind. `to` brings
        all to one device again.
        """
        self.to(first)
        self.brightness.to(second)
        return self

    def set_grad_checkpointing(self, enable=True):
        """Sets `memory_efficient`, by the name that timm's networks have for it."""
        self.memory_efficient = enable

    @torch.no_grad()
    def get_integration_weights(self):
        """{point: {"colour": w, "brightness": w, "integrated": w}}, as floats that sum to 1.

        The points are "stage1" and so on, as far as there are any, and "pooled".
        """
        return {
            point: dict(zip(NAMES, integration.weights().tolist(), strict=True))
            for point, integration in self.integrations.items()
        }

    def get_pathway_contributions(self):
        """{"colour": share, "brightness": share} in the last weighted sum; both sum to 1.

        What was integrated before counts as what it was made of, at every point. What the points'
        small networks add, which see both pathways, counts for neither.
        """
        colour = 0.5  # of the mean of both, which the first point is given
        for weights in self.get_integration_weights().values():
            colour = weights["colour"] + weights["integrated"] * colour
        return {"colour": colour, "brightness": 1 - colour}

    def get_memory_usage(self):
        """Bytes of "parameters", "gradients" (those there are) and "buffers".

        On a GPU, of its whole process too: "allocated" now, "peak" since the last
        `torch.cuda.reset_peak_memory_stats`, and "reserved" by PyTorch's allocator.
        """
        parameters = list(self.parameters())
        found = {
            "parameters": _bytes(parameters),
            "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
            "buffers": _bytes(self.buffers()),
        }
        if self.device.type == "cuda":
            found["allocated"] = torch.cuda.memory_allocated(self.device)
            found["peak"] = torch.cuda.max_memory_allocated(self.device)
            found["reserved"] = torch.cuda.memory_reserved(self.device)
        return found


def brightness_of(images):
    """Brightness (N, 1, H, W) of images (N, 3, H, W) of red, green and blue, on their device.

    0.299 R + 0.587 G + 0.114 B, the luma of ITU-R BT.601. Of images that were normalised by channel
    it is a weighted sum all the same, but no luma: each weight is divided by that channel's
    standard deviation, which for ImageNet's (0.229, 0.224, 0.225) shifts the three by 2 % at most.
    The offset makes no difference to a network whose first convolution has a batch norm behind it,
    but at the border.
    """
    red, green, blue = LUMA
    y = images[:, 0:1] * red
    y = torch.add(y, images[:, 1:2], alpha=green)
    return torch.add(y, images[:, 2:3], alpha=blue)


def mixed_dtype(device):
    """What to multiply in on `device` by default, or None for the dtype that things have."""
    if device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) >= (8, 0):
        return torch.bfloat16
    return None if torch.is_grad_enabled() else torch.float16


def _pathway(in_channels, base_channels, blocks, channels, layers):
    """The first convolution, then the stages, of one pathway."""
    convolution = layers.Conv2d(in_channels, base_channels, 3, padding=1, bias=False)
    parts = [Steps(convolution, layers.BatchNorm2d(base_channels), layers.ReLU())]
    c_in = base_channels
    for stage, (n, c) in enumerate(zip(blocks, channels, strict=True)):
        first = BasicBlock(c_in, c, 1 if stage == 0 else 2, layers)
        others = (BasicBlock(c, c, 1, layers) for _ in range(1, n))
        parts.append(torch.nn.Sequential(first, *others))
        c_in = c
    return torch.nn.ModuleList(parts)


def _stages(points, n):
    """The stages, counted from 0, after which maps are integrated."""
    return {"early": [0], "middle": [n // 2], "late": [], "all": range(n)}[points]


def _is_tensor(x):
    return isinstance(x, torch.Tensor)  # and not what torch.fx traces with


def _bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _require_one_of(name, value, known):
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")


@torch.fx.wrap
def _brightness_beside(colour, brightness):
    """`brightness` if it fits `colour`, or of `colour` if it is None. A node of its own, because
    torch.fx does not know which."""
    if brightness is None:
        return brightness_of(colour)
    wanted = (colour.shape[0], 1, *colour.shape[2:])
    if tuple(brightness.shape) != wanted:
        raise ValueError(
            f"brightness must be {wanted}, as colour is {tuple(colour.shape)}, not "
            f"{tuple(brightness.shape)}"
        )
    for name in ("dtype", "device"):
        if getattr(brightness, name) != getattr(colour, name):
            raise ValueError(
                f"brightness must have colour's {name}, {getattr(colour, name)}, not "
                f"{getattr(brightness, name)}"
            )
    return brightness
