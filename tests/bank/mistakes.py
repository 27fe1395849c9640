"""Wrong kernels that are an exercise's solution, or another right one, with one mistake in it."""

import inspect
import linecache
import sys

from bank import wrong
from course_lib.teach.exercise import exercises, python_function


def mistake(name, says, *changes, of=None):
    """Enter the solution of an exercise with each `(old, new)` text replaced, where it stands once.

    `name` is the exercise's, a colon, and what the mistake is called; `says` a pattern of the
    message that it must get. `of` is the right kernel that takes the solution's place.
    """
    exercise, _, called = name.partition(": ")
    kernel = python_function(of or exercises()[exercise].solution)
    text = inspect.getsource(kernel).removeprefix(f'@right("{exercise}")\n')
    text = text.replace(f"def {kernel.__name__}(", f"def {called}(")
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(
                f"{called}: {old!r} stands {text.count(old)} times in {kernel.__name__}"
            )
        text = text.replace(old, new)
    file = f"<{called}>"
    # Where the simulator, like a debugger, finds the text of code that is in no file.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = dict(vars(sys.modules[kernel.__module__]))
    exec(compile(text, file, "exec"), space)
    wrong(exercise, says)(space[called])
