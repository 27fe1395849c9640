"""Wrong kernels: an exercise's solution, or another right kernel, with one mistake in it."""

import inspect
import linecache
import sys

from bank import wrong
from course_lib.teach.exercise import exercises, python_function


def mistake(name, says, *changes, of=None):
    """Enter the solution of an exercise with each `(old, new)` text replaced, where it stands once.

    `name` is the exercise's, a colon, and what the mistake is called; `says` a pattern of the
    message that it must get. With `of`, a right kernel of the same exercise is changed in place of
    the solution.
    """
    exercise, _, called = name.partition(": ")
    origin = python_function(exercises()[exercise].solution if of is None else of)
    # A kernel that the bank has entered as right keeps that line out of the wrong one.
    text = inspect.getsource(origin).removeprefix(f'@right("{exercise}")\n')
    renamed = (f"def {origin.__name__}(", f"def {called}(")
    for old, new in (renamed, *changes):
        if text.count(old) != 1:
            raise ValueError(f"{name}: {old!r} stands {text.count(old)} times in {origin.__name__}")
        text = text.replace(old, new)
    file = f"<{name}>"
    # Where the simulator, like a debugger, finds the text of code that is in no file.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = dict(vars(sys.modules[origin.__module__]))
    exec(compile(text, file, "exec"), space)
    wrong(exercise, says)(space[called])
