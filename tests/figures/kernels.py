"""Figures of kernels as objects: what ways launch, what AUTO takes on seven chips, what is dead.

AUTO's launches are planned and not run. A draw is a call of tests/test_chips.py with numbers from
its own seed. `calls.json` keeps the draws and chips in which AUTO launched a kernel first, and of
how many draws of each operation; they are planned again each time. `search` draws all anew.
"""

import collections
import functools
import importlib
import json
import os
import random
import re
import sys
import types
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
CALLS = FOLDER / "calls.json"
DRAWS = 2000
WITH_WAYS = "linear.", "softmax.", "log_softmax."
LESSONS = ROOT / "notebooks" / "src", ROOT / "course_lib" / "teach" / "exercises"


# ---- ways ---------------------------------------------------------------------------------------


def ladders():
    """{label: Ladder} of every operation's passes, each once."""
    from course_lib.operations import OPERATIONS

    found = {}
    for name, operation in OPERATIONS.items():
        for direction, one in operation.passes.items():
            if all(one.ladder is not other for other in found.values()):
                found[f"{name}.{direction}"] = one.ladder
    return found


def ways():
    """(label, way) of every way; a rung without ways is one."""
    for label, ladder in ladders().items():
        for rung in ladder.values():
            for way in getattr(rung, "ways", None) or (rung,):
                name = rung.name if way is rung else f"{rung.name}/{way.name}"
                yield f"{label} {name}", way


def function_of(kernel):
    """What all kernels of one function share: its file and its line."""
    code = kernel.py_func.__code__
    return os.path.relpath(code.co_filename, ROOT / "course_lib"), code.co_firstlineno


@functools.cache
def device_files(kernel):
    """Files of the kernel and of all device functions that it reaches, intrinsics left out."""
    from course_lib.runtime.compile import fingerprint

    visited = {}
    fingerprint._visit(kernel.py_func, [], visited)
    found = {f.__code__.co_filename for f in visited if isinstance(f, types.FunctionType)}
    kernels = str(ROOT / "course_lib" / "kernels")
    return {os.path.relpath(file, kernels) for file in found if file.startswith(kernels)}


# ---- what AUTO launches -------------------------------------------------------------------------


@functools.cache
def operations():
    """{name: function that calls all passes of an operation} of tests/test_chips.py."""
    import test_chips

    return {each.__name__: each for each in (*test_chips.OPERATIONS, *test_chips.OTHERS)}


def planned(name, number, chips):
    """The kernels that one drawn call of an operation launches on each of the chips."""
    from hypothesis.control import BuildContext
    from hypothesis.internal.conjecture.data import ConjectureData

    from course_lib.kernels.operation import AUTO
    from course_lib.runtime.host.launch import planning

    data, drawn = ConjectureData(random=random.Random(f"{name} {number}")), []

    def draw(strategy):
        value = data.draw(strategy)  # drawn even where it is not used, as the next depend on it
        drawn.append(AUTO if AUTO in getattr(strategy, "elements", ()) else value)
        return drawn[-1]

    with BuildContext(data, wrapped_test=planned):
        for chip in chips:
            with planning(chip) as launches:
                operations()[name](draw)
            yield {kernel for kernel, *_ in launches}
            again = iter(drawn)
            draw = lambda strategy, again=again: next(again)  # noqa: E731 - the same for all chips


def search(draws=DRAWS, step=50):
    """Plan `draws` calls of each operation on each chip; keep those that launch something new.

    They are written down after each `step` draws, so that a search can be stopped.
    """
    import test_chips

    seen, kept = {name: set() for name in operations()}, {name: [] for name in operations()}
    for first in range(0, draws, step):
        for name, operation in operations().items():
            if operation in test_chips.OTHERS and first:
                continue  # called as registered, it computes its inputs, which takes long
            for number in range(first, first + step):
                for index, found in enumerate(planned(name, number, test_chips.CHIPS)):
                    if not found <= seen[name]:
                        seen[name] |= found
                        kept[name].append([number, index])
        rows = [f" {json.dumps(name)}: {json.dumps(calls)}" for name, calls in kept.items()]
        rows.insert(0, f' "draws": {first + step}')
        CALLS.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def launched_by_auto():
    """Kernels that the calls of `CALLS` launch."""
    import test_chips

    calls, found = json.loads(CALLS.read_text(encoding="utf-8")), set()
    for name in operations():
        for number, index in calls[name]:
            found |= next(planned(name, number, test_chips.CHIPS[index : index + 1]))
    return found


# ---- what lessons run ---------------------------------------------------------------------------


def looped(text):
    """The ladders of which a lesson runs all rungs: `for variant in operation.FORWARD`."""
    aliases = re.findall(r"from course_lib\.kernels import (\w+) as (\w+)", text)
    modules = {alias: module for module, alias in aliases}
    for loop in re.findall(r"for variant in (\w+(?:\.\w+)*\.[A-Z]+):", text):
        name, *attributes = loop.split(".")
        module = importlib.import_module(f"course_lib.kernels.{modules.get(name, name)}")
        yield functools.reduce(getattr, attributes, module)


def ways_of_lessons():
    """Labels of the ways that a lesson or an exercise asks for by their names, as "rung/way"."""
    paths = (path for folder in LESSONS for path in folder.glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    labels = (label for label, _ in ways() if "/" in label)
    return {label for label in labels if f'"{label.partition(" ")[2]}"' in text}


def rungs_of_lessons():
    """{(label of a ladder, name of a rung)} of those that a lesson or an exercise tells of.

    It runs all rungs of the ladder, or it speaks of the operation and has the rung in quotes.
    """
    paths = (path for folder in LESSONS for path in folder.glob("*.py"))
    texts, found = [path.read_text(encoding="utf-8") for path in paths], set()
    run = [id(ladder) for text in texts for ladder in looped(text)]
    for label, ladder in ladders().items():
        operation = label.partition(".")[0]
        about = [text for text in texts if re.search(rf"\b{operation}\b", text)]
        found |= {
            (label, rung) for rung in ladder
            if id(ladder) in run or any(re.search(rf"[`\"]{rung}[`\"]", text) for text in about)
        }  # fmt: skip
    return found


def left_out():
    """{kernel: label of its way} of what AUTO did not launch and no lesson tells of.

    A lesson's rung excuses its kernels where AUTO does not take it, by the ladder's word, or since
    it launches none that the rung alone names; where AUTO takes the rung, a kernel that is never
    launched is one that the rung need not name.
    """
    by_auto, by_lessons = launched_by_auto(), rungs_of_lessons()
    alive = set(by_auto)
    for label, ladder in ladders().items():
        named = collections.Counter(kernel for rung in ladder.values() for kernel in rung.kernels)
        for rung in ladder.values():
            own = {kernel for kernel in rung.kernels if named[kernel] == 1}
            passed_by = ladder.auto and ladder._prefer is None and rung.name not in ladder.auto
            if (label, rung.name) in by_lessons and (passed_by or not by_auto & own):
                alive |= set(rung.kernels)
    named = ways_of_lessons()
    alive |= {kernel for label, way in ways() if label in named for kernel in way.kernels}
    return {k: label for label, way in ways() for k in way.kernels if k not in alive}


def figures():
    """{name: (value, what was counted)}."""
    every = [(label, kernel) for label, way in ways() for kernel in way.kernels]
    functions, files = collections.defaultdict(set), collections.defaultdict(set)
    for label, kernel in every:
        functions[label].add(function_of(kernel))
        files[label] |= device_files(kernel)
    with_ways = [label for label in functions if label.startswith(WITH_WAYS)]
    unused = left_out()
    used = {function_of(kernel) for _, kernel in every if kernel not in unused}
    unused_functions = {function_of(k): label for k, label in unused.items()}
    alone = [
        f"{file}:{line} {label}" for (file, line), label in sorted(unused_functions.items())
        if (file, line) not in used
    ]  # fmt: skip
    objects = [f"{n} {label}" for label, n in collections.Counter(unused.values()).items()]
    return {
        "kernel functions behind a way of linear or softmax": most(functions, with_ways),
        "kernel functions behind any way": most(functions, functions),
        "files of device code behind a way": most(files, files),
        "kernel functions that neither AUTO nor a lesson takes": (len(alone), alone),
        "kernel objects that neither AUTO nor a lesson takes": (len(unused), objects),
    }


def most(counted, labels):
    """(the largest count, [the ten ways with most])."""
    by_count = sorted(((len(counted[label]), label) for label in labels), reverse=True)
    return by_count[0][0], [f"{n} {label}" for n, label in by_count[:10]]


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ["COURSE_LIB_SIMULATOR"] = "1"
    if "--all" in sys.argv:
        search()
    json.dump(figures(), sys.stdout)
