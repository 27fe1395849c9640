"""Wrong kernels: an exercise's solution, or another right kernel, with one mistake in it."""

import functools
import inspect
import linecache
import re
import sys

from bank import wrong
from course_lib.teach.exercise import exercises, python_function


def mistakes(exercise, *entries):
    """Enter wrong kernels: `(name, says, old, new, …)`, or `(name, says, of, old, new, …)`.

    Each is the solution of the exercise, or the right kernel `of`, with every text `old`, which
    stands there once, replaced by the `new` after it. `says` is a pattern of the message that it
    must get.
    """
    for called, says, *changes in entries:
        origin = exercises()[exercise].solution if len(changes) % 2 == 0 else changes.pop(0)
        wrong(exercise, says)(changed(exercise, called, origin, changes))


def changed(exercise, called, origin, changes):
    """Return what `origin`, a kernel or function, is with each text replaced by the next one."""
    origin = python_function(origin)
    text = _source(origin)
    changes = [f"def {origin.__name__}(", f"def {called}(", *changes]
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        if text.count(old) != 1:
            raise ValueError(f"{called}: {old!r} stands {text.count(old)}× in {origin.__name__}")
        text = text.replace(old, new)
    file = f"<{exercise}: {called}>"
    # Where the simulator, like a debugger, finds the text of code that is in no file.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = dict(vars(sys.modules[origin.__module__]))
    exec(compile(text, file, "exec"), space)
    made = space[called]
    python_function(made).made_from = origin
    return made


@functools.cache
def _source(origin):
    """Its text, without the line above that has entered a kernel into the bank."""
    return re.sub(r"^@(right|wrong)\(.*\n", "", inspect.getsource(origin))
