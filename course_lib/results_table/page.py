"""RESULTS.md: every recorded operation, with what it loses."""

from . import images, networks, prefetch, several, softmax, squeeze_excite, unet
from .cases import by_operation, cases, conditions, is_lesson, verdict
from .drawn import drawn_report
from .operations import overview, section

_INTRODUCTION = """\
# Results

`make readme` writes this page from `data/results`; nothing in it is typed. A case is one operation,
type and shape, checked before it is timed. The *ratio* is our time ÷ the fastest peer's. *Ours* is
what runs by default, the *fastest peer* the fastest of those that stand under each heading, timed
in the same run; `torch.compile` is not among them everywhere. Where the fastest peer's step was
captured in a CUDA graph, so is ours. The *type* is that of the arithmetic: TF32 and bfloat16 also
where the arrays are float32. An operation's time is the device's, from a replayed CUDA graph whose
inputs change so that they do not lie in the L2 cache; a network's is that of whole steps. GB/s
counts the bytes that the operation must move, and the limit is a copy of as many bytes, or reading
or filling them where that is all that is done; in brackets stands the share of it that is reached.
*Kernels changed since* stands where a kernel, or what chooses it, is no longer the one that was
measured: a test compares hashes."""


_OF_DRAWN = """\
*Speed* is PyTorch eager's time ÷ ours, on the same tensors in the same layout, with cuDNN in
benchmark mode and without deterministic algorithms; *TF32* where products may be rounded so. Times
are the device's, as above. *Twice as slow* leaves out a difference of up to 3 µs where PyTorch
takes less than 5. In brackets stands how many were timed beside torch.compile."""


def page(recordings, pictures=None):
    """RESULTS.md for `recordings`, a list of record files as `bench.load_records` returns them.

    pictures  {"results" or "softmax": (path from the page, alternative text)}
    """
    parts, pictures = [_INTRODUCTION], pictures or {}
    for recording in recordings[:1]:
        parts += _device(recording, pictures)
    for recording in recordings[1:]:  # of each less is recorded than of the one before
        parts.append(f"# On an {recording['device']['name']}")
        parts += _device(recording, {}, linked=False)
    return "\n\n".join(filter(None, parts)) + "\n"


def summary(records):
    """The tables that the records of a benchmark fill on their own. "" where there are none."""
    tables = (squeeze_excite.render, networks.efficientnet, networks.first_calls)
    return "\n\n".join(filter(None, (render(records) for render in tables)))


def _device(recording, pictures, linked=True):
    """`linked`: headings are the first of their names, so that links lead to them."""
    records = recording["records"]
    found = cases(records)
    yield conditions(recording)
    if found:
        yield verdict(found)
        yield _picture(pictures, "results")
        yield overview(found, linked)
    for operation, group in by_operation(found).items():
        yield section(operation, group)
        yield "\n\n".join(filter(None, _more(group[0], records, pictures)))
    yield _titled("Drawn shapes", _drawn(records))
    yield _titled("U-Net on the tape", unet.tape(records))
    yield _titled("Copies behind steps", prefetch.copies(records))
    yield _titled("Several GPUs", several.several_gpus(records))
    yield _titled("Host times", networks.host(records))
    yield _titled("First calls", networks.first_calls(records))
    yield _titled("Elsewhere", _elsewhere(records))


def _more(case, records, pictures):
    """What one operation has beside its cases."""
    operation = case.name.partition(".")[0]
    if operation == "softmax":
        yield _picture(pictures, "softmax")
        yield softmax.ladder(records)
        yield softmax.readers(records)
    elif operation == "squeeze_excite":
        yield squeeze_excite.render(records)
    elif operation == "efficientnet":
        yield networks.efficientnet(records)
    elif operation == "fashion_mnist":
        yield networks.fashion_mnist(records)
    elif operation == "replace_layers":
        same = [record for record in records if record["name"] == case.name]
        yield networks.replaced(same)
    elif operation == "tiny_imagenet":
        yield images.softmax_shares(records)
        yield images.runs(records)
    elif operation == "two_pathways":
        yield images.switches(r for r in records if r["name"].startswith("two_pathways."))
    elif operation == "unet":
        yield unet.training(records)
        yield unet.kernels(records)


def _drawn(records):
    text = drawn_report(records)
    return text and f"{_OF_DRAWN}\n\n{text}"


def _titled(heading, text):
    return text and f"## {heading}\n\n{text}"


def _picture(pictures, name):
    if name not in pictures:
        return ""
    path, alt = pictures[name]
    return f"![{alt}]({path})"


def _elsewhere(records):
    """The records that this page does not show, by name, so that none is lost."""
    names = sorted({
        record["name"] for record in records
        if is_lesson(record) or record["name"] in ("softmax.profile", "fashion_mnist.parts",
                                                   "fashion_mnist.parts.tf32")
    })  # fmt: skip
    if not names:
        return ""
    return "Recorded for lessons, which show them: " + ", ".join(f"`{n}`" for n in names) + "."
