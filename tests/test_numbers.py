"""Every measured number on a page is generated, or stands in numbers.txt with where it is from."""

import functools
import json
import re
from collections import namedtuple
from pathlib import Path

import pytest

from course_lib import bench

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_name("numbers.txt")
PAGES = [
    *sorted((ROOT / "notebooks" / "src").glob("*.py")), ROOT / "notebooks" / "glossary.md",
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "data" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]  # fmt: skip
UNITS = {
    "%": 0.01, "percent": 0.01, "×": 1, "times": 1, "s": 1, "second": 1, "seconds": 1,
    "milliseconds": 1e-3, "ms": 1e-3, "microseconds": 1e-6, "µs": 1e-6, "ns": 1e-9,
    "kilobytes": 1e3, "megabytes": 1e6, "gigabytes": 1e9, "KB": 1e3, "MB": 1e6, "GB": 1e9,
    "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "GB/s": 1e9, "TB/s": 1e12,
    "GFLOP/s": 1e9, "TFLOP/s": 1e12, "images/s": 1, "pictures/s": 1, "samples/s": 1,
    "images a second": 1, "pictures a second": 1,
}  # fmt: skip
BINARY = {"KB": 2**10, "MB": 2**20, "GB": 2**30}  # what some pages mean by them
WORDS = {word: str(n) for n, word in enumerate(
    "one two three four five six seven eight nine ten eleven twelve".split(), 1)}  # fmt: skip
DIGITS = r"(?<![\w.,^])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
UNIT = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
NUMBER = re.compile(  # "3 × 4" is a size, and no number with a unit
    rf"({DIGITS})(?:(?:\s(?:to|and|or)\s|–)({DIGITS}))?\s?({UNIT})(?![\w/])(?<!×(?=\s?\d))"
)
IN_WORDS = re.compile(
    rf"\b({'|'.join(WORDS)})(?:\s(?:to|and|or)\s({'|'.join(WORDS)}))?\s"
    r"(percent|microseconds|milliseconds|seconds|(?:kilo|mega|giga)bytes|times(?=\sas\s))",
    re.IGNORECASE,
)
SHOWN = re.compile(rf"{DIGITS}|\b(?:{'|'.join(WORDS)})\b")
Entry = namedtuple("Entry", "page number kind source")
KINDS = "computed recorded printed wrong given published specification seen".split()


def key(path):
    """What the list calls a page: a lesson by its number, others by their path."""
    return path.name[:2] if path.suffix == ".py" else path.relative_to(ROOT).as_posix()


def text_of(path):
    """What a reader sees of a page without code, and without what is generated."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        cells = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)[1:]
        markdown = [body for head, body in zip(cells[::2], cells[1::2], strict=True)
                    if head.strip().startswith("[markdown]")]  # fmt: skip
        text = "\n\n".join(re.sub(r"^# ?", "", body, flags=re.MULTILINE) for body in markdown)
    text = re.sub(r"<!-- ([\w-]+):begin -->.*?<!-- \1:end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return " ".join(re.sub(r"`[^`]*`", "`", text).split())  # no-break spaces, too


def numbers(text):
    """Every number with a unit, as the list writes it."""
    text = re.sub(r"[*$]", "", text)
    found = [match[0] for match in NUMBER.finditer(text)]
    return {*found, *(match[0].lower() for match in IN_WORDS.finditer(text))}


def entries(text):
    """The list: a line for each page and number, `page | number | kind: source`."""
    found = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            page, number, source = map(str.strip, line.split(" | ", 2))
            kind, _, source = source.partition(": ")
            assert kind in KINDS and source, line
            found.append(Entry(page, number, kind, source))
    return found


# ------------------------------------------------------------------- what the sources say


RECORDS = {
    (record["name"], "x".join(map(str, record["shape"])), record["dtype"]): record
    for record in bench.load_records("NVIDIA H200")["records"]
}


def recorded(which, label=None, field="microseconds"):
    """A field of the record `which`, "name shape dtype", or of its row; microseconds as seconds."""
    found = RECORDS[tuple(which.split())]
    if label is not None:
        (found,) = [row for row in found["rows"] if row["label"] == label]
    return found[field] * (1e-6 if field.endswith("microseconds") else 1)


class MoreThan(float):
    """What the page rounds down, and says so: "more than"."""


def known(source):
    """What an expression of the list comes to: one number, or one for each that is shown."""
    found = eval(source, {"__builtins__": {}}, {"R": recorded, "more_than": MoreThan})
    return found if isinstance(found, tuple) else (found,)


def agrees(number, source):
    """Whether the number is what its source comes to, rounded to the digits that are shown."""
    unit = max(filter(number.endswith, UNITS), key=len)
    shown = [WORDS.get(each, each) for each in SHOWN.findall(number.removesuffix(unit))]
    values = known(source)
    assert len(values) == len(shown), f"{number}: {source}"
    return all(_rounds(each, value, unit) for each, value in zip(shown, values, strict=True))


def _rounds(shown, value, unit):
    digits = shown.replace(",", "")
    zeros = min(len(digits) - len(digits.rstrip("0")), max(len(digits) - 2, 0))
    _, _, decimals = digits.partition(".")
    step = 10.0 ** (-len(decimals) if decimals else zeros)  # two digits at least are meant
    for scale in {UNITS[unit], BINARY.get(unit, UNITS[unit])}:
        found = value / scale
        if isinstance(value, MoreThan):
            if float(digits) <= found < 1.5 * float(digits):
                return True
        elif abs(found - float(digits)) <= step / 2 * 1.0001:
            return True
    return False


@functools.cache
def printed(page):
    """What the cells of a solved lesson print, and say of their pictures."""
    (path,) = (ROOT / "notebooks" / "solutions").glob(f"{page}_*.ipynb")
    found = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", ()):
            texts = {k: v for k, v in output.get("data", {}).items() if k.startswith("text/")}
            for text in (output.get("text", ()), *texts.values()):
                found += [text] if isinstance(text, str) else text
    return "".join(found)


# ------------------------------------------------------------------------------ the tests


LISTED = entries(LIST.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", PAGES, ids=key)
def test_every_number_of_a_page_is_generated_or_listed(path):
    listed = {entry.number for entry in LISTED if entry.page == key(path)}
    found = numbers(text_of(path))
    assert found - listed == set(), "not in tests/numbers.txt: say where they are from"
    assert listed - found == set(), "in tests/numbers.txt, and no longer on the page"


@pytest.mark.parametrize("entry", LISTED, ids=lambda entry: f"{entry.page}: {entry.number}")
def test_what_is_listed_is_what_its_source_says(entry):
    if entry.kind in ("computed", "recorded"):
        assert agrees(entry.number, entry.source)
    elif entry.kind == "printed":
        number = rf"(?<![\d.,]){re.escape(entry.source)}(?!\d|[.,]\d)"
        assert re.search(number, printed(entry.page))
    elif entry.kind == "wrong":  # until the sentence is corrected
        assert not agrees(entry.number, entry.source)
    assert len([other for other in LISTED if other[:2] == entry[:2]]) == 1


@pytest.mark.parametrize("text, found", [
    ("tiles of 3 × 4, or 3×4, in `5 ms`", set()), ("in lesson 2, and 222 MB", {"222 MB"}),
    ("**16 times** as much, $384$ times", {"16 times", "384 times"}),
    ("5 to 10 times, 96–130 TFLOP/s (25 %)", {"5 to 10 times", "96–130 TFLOP/s", "25 %"}),
    ("**Ten times** as fast, asked five times", {"ten times"}),
    ("4,200\N{NO-BREAK SPACE}GB/s; 2.5×", {"4,200 GB/s", "2.5×"}),
    ("<!-- a:begin -->\n3 ms\n<!-- a:end --> 4 ms\n```text\n5 ms\n```", {"4 ms"}),
])  # fmt: skip
def test_what_a_number_is(text, found, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    assert numbers(text_of(page)) == found


@pytest.mark.parametrize("number, right, wrong", [
    ("250 µs", "249.8e-6", "244e-6"), ("0.05 %", "2**-11", "2**-10"), ("48 KB", "48 * 1024", "5e4"),
    ("4,200 GB/s", "4229.7e9", "4251e9"), ("5 to 10 times", "5.2, 9.9", "5.6, 9.9"),
    ("three times", "more_than(3.4)", "more_than(2.9)"), ("10 times", "10.1", "10.6"),
])  # fmt: skip
def test_numbers_agree_to_the_digits_that_are_shown(number, right, wrong):
    assert agrees(number, right) and not agrees(number, wrong)
