"""What is compared with what: of each record, what runs by default beside its fastest peer."""

import statistics
from dataclasses import dataclass

from .markdown import percent

#: Records that are no such comparison, or repeat one: their own parts of the page show them.
APART = {
    "softmax.table", "softmax.profile", "squeeze_excite.profile", "kernel_cache.first_call",
    "launch.host", "softmax.host", "fashion_mnist.parts", "fashion_mnist.parts.tf32",
    "fashion_mnist.command", "fashion_mnist.command.tf32", "fashion_mnist.runs",
    "unet.kernels", "unet.tape", "unet.prefetch", "unet.shares", "unet.folds",
    "tiny_imagenet.softmax", "tiny_imagenet.runs", "prefetch.training", "all_reduce",
    "data_parallel.resnet18_small", "data_parallel.unet",
}  # fmt: skip
#: What whole networks are called, by the first part of their records' names, or the first two.
NETWORKS = {
    "efficientnet": "EfficientNet-B4, its blocks ours",
    "fashion_mnist": "Fashion-MNIST network",
    "replace_layers.convnext_tiny": "ConvNeXt-T, its layers ours",
    "replace_layers.efficientnet_b0": "EfficientNet-B0, its layers ours",
    "replace_layers.mobilenet_v2": "MobileNetV2, all layers ours",
    "replace_layers.resnet18": "ResNet-18, all layers ours",
    "replace_layers.resnet50": "ResNet-50, all layers ours",
    "replace_layers.vit_b_16": "ViT-B/16, all layers ours",
    "replace_layers.vit_tiny_patch16_224": "ViT-Ti/16, all layers ours",
    "tiny_imagenet": "Tiny-ImageNet network",
    "two_pathways": "Two pathways",
    "unet": "U-Net",
}
SLOWER = 1.03  # times as long as the peer: what counts as slower, not as noise
CAPTURED = "captured"  # in the label of a step that is replayed as one CUDA graph


def when(record):
    """The date of a record; and that its kernels have changed since, where it says so.

    A record may have the field `stale` until it is measured again, which replaces it.
    """
    return record["date"] + (", kernels changed since" if record.get("stale") else "")


def days_of(records):
    """The first and the last date of several records."""
    dates = sorted({record["date"] for record in records})
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def measured(records):
    """`days_of`, and how many of the kernels have changed since."""
    stale = sum(bool(record.get("stale")) for record in records)
    if not stale:
        return days_of(records)
    some = f" for {stale}" if stale < len(records) else ""
    return f"{days_of(records)}, kernels changed since{some}"


def size(shape):
    """A shape in words: "128 × 200"."""
    return " × ".join(f"{n:,}" for n in shape)


def compact(shape):
    """A shape for a table, where it is not broken: "128×200"."""
    return "×".join(f"{n:,}" for n in shape)


def rows_of(record, kind):
    """The rows of a record that are "ours", or a "peer"."""
    return [row for row in record["rows"] if row["kind"] == kind]


def is_lesson(record):
    """Whether a record belongs to a lesson or to the tracer's tests, which show it themselves."""
    return record["name"].startswith(("lesson_", "tracer."))


def arithmetic(record, label=""):
    """What the arithmetic of a record, or of its row `label`, was done in."""
    if record["dtype"] != "float32":
        return record["dtype"]
    for precision in ("bfloat16", "TF32"):
        if precision in label:
            return precision
    is_tf32 = "tf32" in (record.get("precision"), *record["name"].split("."))
    return "TF32" if is_tf32 or record.get("autocast") is False else "float32"


@dataclass(frozen=True)
class Case:
    """One operation, type and shape: our time and the fastest peer's."""

    record: dict

    @property
    def name(self):
        """The record's name, such as `softmax.forward`."""
        return self.record["name"]

    @property
    def operation(self):
        """What the case is listed under: the operation, or the whole network."""
        first, _, rest = self.name.partition(".")
        return NETWORKS.get(f"{first}.{rest}") or NETWORKS.get(first) or first

    @property
    def is_network(self):
        """Whether a whole network was timed."""
        return self.operation in NETWORKS.values()

    @property
    def ours(self):
        """The row that runs by default; where none is named, the last, the top rung.

        Where peers and ours were captured in a CUDA graph, the fastest of ours that was.
        """
        ours = rows_of(self.record, "ours")
        named = [row for row in ours if row["label"] == self.record.get("default")]
        chosen = (named or ours)[-1]
        captured = [row for row in ours if CAPTURED in row["label"]]
        if CAPTURED in chosen["label"] or CAPTURED not in self.peer["label"] or not captured:
            return chosen
        return min(captured, key=lambda row: row["microseconds"])

    @property
    def peer(self):
        """The row of the fastest peer."""
        return min(rows_of(self.record, "peer"), key=lambda row: row["microseconds"])

    @property
    def ratio(self):
        """Our time in times of the fastest peer's: below 1, ours is faster."""
        return self.ours["microseconds"] / self.peer["microseconds"]

    @property
    def arithmetic(self):
        """The type, or the precision where the numbers are float32 and the arithmetic is not."""
        return arithmetic(self.record, self.ours["label"])

    @property
    def work(self):
        """What the case must do, to find the largest of several."""
        return self.record.get("flops") or self.record.get("bytes") or self.ours["microseconds"]

    @property
    def title(self):
        """The case in words."""
        return f"`{self.name}` of {size(self.record['shape'])} {self.arithmetic}"


def cases(records):
    """Every record that is such a comparison, as `Case`."""
    return [
        Case(record)
        for record in records
        if record["name"] not in APART
        and not is_lesson(record)
        and rows_of(record, "peer")
        and rows_of(record, "ours")
    ]


def by_operation(found):
    """{operation: its cases}, from the best median ratio to the worst, networks last."""
    groups = {}
    for case in found:
        groups.setdefault(case.operation, []).append(case)

    def place(item):
        return item[1][0].is_network, statistics.median(case.ratio for case in item[1])

    return dict(sorted(groups.items(), key=place))


def losses(found):
    """The cases in which the fastest peer took less time, the worst first."""
    return sorted((case for case in found if case.ratio > 1), key=lambda case: -case.ratio)


def verdict(found):
    """How many of `found` beat their fastest peers, and the worst: a paragraph; "" for none."""
    if not found:
        return ""
    lost, groups = losses(found), by_operation(found)
    clear = sum(case.ratio > SLOWER for case in lost)
    large = sorted(groups.values(), key=len)[-2:]
    rest = [case for group in groups.values() if group not in large for case in group]
    names = " and ".join(f"`{group[0].operation}`" for group in reversed(large))
    n_large = len(found) - len(rest)
    text = (
        f"Ours takes less time than the fastest peer in {len(found) - len(lost)} of {len(found):,} "
        f"recorded cases and more in {len(lost)}; in {clear} of these it takes over "
        f"{percent(SLOWER - 1)} more."
    )
    if rest:
        won = sum(case.ratio <= 1 for case in rest)
        text += (
            f" Of the {len(found):,} cases, {n_large} are of {names}; ours is faster in {won} of "
            f"the other {len(rest)}."
        )
    if lost:
        text += (
            f" The worst: {lost[0].title} takes {lost[0].ratio:.1f} times as long as "
            f"{lost[0].peer['label']}."
        )
    return text


def conditions(recording):
    """Where, with what and when the records of one device were made: a sentence."""
    device, records = recording["device"], recording["records"]
    versions = {}
    for record in records:
        for name, version in record.get("versions", {}).items():
            versions.setdefault(name, set()).add(_version(name, version))
    told = {"torch": "PyTorch", "torch_cuda": "CUDA", "cudnn": "cuDNN", "triton": "Triton",
            "numba": "numba", "numba-cuda": "numba-cuda", "python": "Python"}  # fmt: skip
    parts = [f"{label} {', '.join(sorted(versions[key]))}"
             for key, label in told.items() if key in versions]  # fmt: skip
    if "driver" in device:
        parts.insert(0, f"driver {device['driver']}")
    stale = sum(bool(record.get("stale")) for record in records)
    changed = f" Kernels changed since in {stale} of {len(records):,} records." if stale else ""
    return f"Measured on an **{device['name']}**, {days_of(records)}: {'; '.join(parts)}.{changed}"


def _version(name, version):
    if name == "cudnn":  # 91900 is 9.19.0
        return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return str(version)
