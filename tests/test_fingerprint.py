"""What a fingerprint follows beside functions and constants, and what it refuses."""

import functools
import linecache
import threading

import pytest

from course_lib.runtime.compile.fingerprint import fingerprint


def first():
    return 1


def second():
    return 2


class Plan:
    def __init__(self, function):
        self.made_by = function


class Wider(Plan):
    @property
    def width(self):
        return first()


class Narrower(Plan):
    @property
    def width(self):
        return second()


@functools.cache
def remembered_first():
    return first()


@functools.lru_cache(maxsize=4)
def remembered_second():
    return second()


def digest_of(value):
    def host():
        return value

    return fingerprint(host)


@pytest.mark.parametrize("one, other", [
    ({"a": 1}, {"a": 2}), ({"a": 1}, {"b": 1}), ({"a": {"b": first}}, {"a": {"b": second}}),
    ([1, 2], [1, 3]), ([first], [second]), ({1, 2}, {1, 3}),
    (functools.partial(first), functools.partial(second)),
    (functools.partial(first, 1), functools.partial(first, 2)),
    (functools.partial(first, x=first), functools.partial(first, x=second)),
    (remembered_first, remembered_second), (Plan, Wider), (Wider, Narrower),
])  # fmt: skip
def test_a_digest_tells_apart_what_is_held(one, other):
    assert digest_of(one) == digest_of(one) != digest_of(other)


def test_what_is_remembered_is_what_is_wrapped():
    assert fingerprint(remembered_first) == fingerprint(remembered_first.__wrapped__)


def test_what_cannot_be_followed_is_named():
    with pytest.raises(TypeError, match=r"can't follow value\['plan'\], a .*test_fingerprint.Plan"):
        digest_of({"plan": Plan(first)})
    with pytest.raises(TypeError, match="is no function"):
        fingerprint(3)


def test_what_libraries_hold_is_theirs():
    assert digest_of(threading.Lock()) == digest_of(threading.Lock())


TEXT = """
from math import floor, ceil

def scale(x, factor=2):
    return floor(x) * factor

halve = lambda x: floor(x) / 2
"""


def digests_of(text):
    """The fingerprints of `scale` and `halve` in a text."""
    file = f"<text {hash(text)}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    space = {}
    exec(compile(text, file, "exec", dont_inherit=True), space)
    return fingerprint(space["scale"]), fingerprint(space["halve"])


@pytest.mark.parametrize("before, after", [
    ("    return floor", '    """What it does."""\n    return floor'),
    ("    return floor", "    # Why.\n\n    return floor"),
    ("x, factor=2)", "x: float, factor: int = 2) -> float"),
    ("floor(x) * factor", "(floor( x )\n        * factor)  # once"),
    ("/ 2", "/ 2  # half"),
    ("halve = lambda x: floor(x) / 2", "halve = (lambda x:\n    floor(x) / 2)"),
])
def test_text_that_changes_nothing_does_not_count(before, after):
    assert before in TEXT
    assert digests_of(TEXT.replace(before, after)) == digests_of(TEXT)


@pytest.mark.parametrize("before, after, which", [
    ("factor=2", "factor=3", 0), ("* factor", "+ factor", 0), ("(x) * factor", "(factor) * x", 0),
    ("    return floor", "    'no docstring', x\n    return floor", 0),
])
def test_text_that_changes_something_counts(before, after, which):
    assert before in TEXT
    pairs = zip(digests_of(TEXT), digests_of(TEXT.replace(before, after)), strict=True)
    changed = [one != other for one, other in pairs]
    assert changed == [place == which for place in range(2)]
