"""What guides to CUDA extensions promise, beside what was recorded here, and why they differ."""

from .cases import arithmetic, measured, rows_of
from .markdown import percent, table
from .squeeze_excite import block_speedups, mean

_NAMES = {
    "softmax.table", "squeeze_excite.forward", "squeeze_excite.both", "squeeze_excite.profile",
    "efficientnet.step", "fashion_mnist.training", "fashion_mnist.runs",
}  # fmt: skip
_COLUMNS = {"what": "---", "guides promise": "---", "recorded here": "---", "why": "---"}


PROMISED_GAIN = 2.75  # of squeeze and excitation, by a guide


def promises(recording):
    """The table for one device. "" where none of it is recorded."""
    parts = (_softmax, _blocks, _training, _memory, _clothes)
    lines = [line for part in parts for line in part(recording["records"])]
    if not lines:
        return ""
    used = [record for record in recording["records"] if record["name"] in _NAMES]
    return (
        f"Recorded on an **{recording['device']['name']}**, {measured(used)}.\n\n"
        f"{table(_COLUMNS, lines)}"
    )


def _named(records, name, **wanted):
    return [record for record in records if record["name"] == name
            and all(record.get(key) == value for key, value in wanted.items())]  # fmt: skip


def _softmax(records):
    """A batch of 128 rows of 200 classes, the guides' own example."""
    for record in _named(records, "softmax.table"):
        found = {each["label"]: each for each in record["rows"]}
        for label, promised, why in (
            ("PyTorch, CPU", "about 2,000 µs", f"{record['cpu_threads']} threads of a CPU need so "
             "little for 25,600 numbers that 57 times as fast has no room"),
            ("PyTorch, GPU", "about 150 µs", "seen from Python, a call is mostly launch and wait"),
            ("ours, naive", "about 80 µs", "one thread reads a whole row, number by number"),
            ("ours, optimised", "about 35 µs, 57 times as fast as the CPU", "on the device the "
             "kernel decides, from Python the call"),
        ):  # fmt: skip
            each = found[label]
            times = [f"{each['microseconds']:.1f} µs on the device",
                     f"{each['python_microseconds']:.1f} µs from Python"]  # fmt: skip
            if each["speedup"] != 1:
                times[0] += f" ({each['speedup']:.1f} times as fast as the CPU)"
                times[1] += f" ({each['python_speedup']:.1f} times)"
            yield [f"softmax of 128 × 200: {label}", promised, ", ".join(times), why]


def _blocks(records):
    """Squeeze and excitation: what the block gains, by batch."""
    blocks = _named(records, "squeeze_excite.forward", dtype="float32")
    batches = sorted({record["shape"][0] for record in blocks})
    if not batches:
        return
    gains, every = [], block_speedups(blocks, "PyTorch eager")
    for N in batches:
        group = [record for record in blocks if record["shape"][0] == N]
        gains.append(f"{mean(block_speedups(group, 'PyTorch eager')):.2f} at batch {N}")
    reached = sum(gain >= PROMISED_GAIN for gain in every)
    moved = [{each["label"]: each["sizes_of_x"] for each in record["rows"]}
             for record in _named(records, "squeeze_excite.profile", dtype="float32")]  # fmt: skip
    why = "launches that are saved count less the larger the batch; then only bytes count"
    if moved:
        labels = "PyTorch eager", "auto"
        eager, ours = (mean([each[label] for each in moved]) for label in labels)
        why += f": PyTorch moves {eager:.1f} sizes of x, ours {ours:.1f}"
    yield ["squeeze and excitation, forward, float32",
           f"2.45 ms become 0.89 ms, {PROMISED_GAIN} times as fast (2 to 4), and more with larger "
           "batches",
           f"on the device {', '.join(gains)} (geometric means over the sizes of "
           f"EfficientNet-B4); {reached} of {len(every)} sizes reach {PROMISED_GAIN}, the best is "
           f"{max(every):.2f}", why]  # fmt: skip


def _training(records):
    for record in _named(records, "efficientnet.step"):
        law = record["amdahl"]
        yield [
            f"EfficientNet-B4, a training step, {arithmetic(record)}", "15 to 30 % faster",
            f"{percent(record['ratio'] - 1)} faster; in a CUDA graph "
            f"{percent(law['measured_ratio'] - 1)}",
            f"the blocks are {percent(law['share'])} of the time; Amdahl's law predicts "
            f"{percent(law['predicted_ratio'] - 1)}, and an infinitely fast block would bring "
            f"{percent(law['limit_ratio'] - 1)}",
        ]  # fmt: skip


def _memory(records):
    """What the blocks of EfficientNet-B4 keep for their backward pass, in PyTorch's bytes."""
    said, most = [], 0
    for dtype in ("float32", "bfloat16"):
        kept = [record["saved_bytes"] for record in _named(records, "squeeze_excite.both",
                dtype=dtype) if "saved_bytes" in record]  # fmt: skip
        if kept:
            ratios = [each["ours"] / each["PyTorch eager"] for each in kept]
            said.append(f"{min(ratios):.2f} to {max(ratios):.2f} times PyTorch's bytes in {dtype}, "
                        f"{mean(ratios):.2f} in the geometric mean")  # fmt: skip
            most = max(most, *(each["ours"] / 1e6 for each in kept))
    if said:
        yield ["EfficientNet-B4, peak memory", "“reduced”",
               "beside its input and result, a block keeps for its backward pass "
               f"{'; '.join(said)}; ours at most {most:.2f} MB",
               "we save float32 sums, PyTorch 16-bit numbers. The peak of the network is the "
               "activations of convolutions and batch norms, which the swap leaves alone; it is "
               "not recorded"]  # fmt: skip


def _clothes(records):
    """The Fashion-MNIST network in batches of 32."""
    for record in _named(records, "fashion_mnist.training", shape=[32, 1, 28, 28]):
        rows = {each["label"]: each for each in record["rows"]}
        best = max(rows_of(record, "peer"), key=lambda each: each["images_per_second"])
        ours, modules, eager = (rows[label] for label in ("ours, captured", "ours, modules",
                                                          "PyTorch eager"))  # fmt: skip
        rates = [f"{each['images_per_second']:,.0f}" for each in (ours, best, modules, eager)]
        peaks = [f"{each['peak_bytes'] / 1e6:.0f}" for each in (ours, best, modules, eager)]
        yield ["Fashion-MNIST, training in batches of 32", "8,500 images/s beside PyTorch's 7,200",
               f"in one graph {rates[0]} beside {rates[1]}; module by module {rates[2]} beside "
               f"{rates[3]}",
               "a step is many small launches: a captured graph saves them, for PyTorch too. "
               "Module by module, a Python operator costs the host more than PyTorch's own",
               ]  # fmt: skip
        yield ["Fashion-MNIST, peak memory", "about 250 MB",
               f"in one graph {peaks[0]} MB beside {peaks[1]}; module by module {peaks[2]} beside "
               f"{peaks[3]}",
               "the peak of one step, of a graph while it is captured; weights included, images "
               "not"]  # fmt: skip
    for record in _named(records, "fashion_mnist.runs"):
        accuracies = record["accuracy"].items()
        found = [f"{label} {percent(accuracy, 2)}" for label, accuracy in accuracies]
        yield [f"Fashion-MNIST, accuracy after {record['epochs']} epochs", "88 to 91 %",
               "; ".join(found), "the same network and recipe"]
