"""What the notebooks use: exercises that are checked, hints, solutions and progress.

    from course_lib.teach import TODO, check, hint, progress, solution, use

`check("relu", relu)` runs your own kernel on many inputs and says what is wrong;
`hint("relu")` helps a little more each time; `solution("relu")` shows the finished code;
`progress()` draws what you have solved; `use("relu", relu)` is your kernel once it has passed, and
`use("relu")`, in whichever lesson, the one of yours that passed last. A `Scoreboard` launches such
kernels, and counts by whose a network runs.
"""

from course_lib.teach.checking.check import check, use
from course_lib.teach.checking.compiling import prepare_compiler
from course_lib.teach.display import in_notebook
from course_lib.teach.exercise import UnknownExercise
from course_lib.teach.explaining.report import CheckFailed
from course_lib.teach.keeping.help import hint, progress, solution
from course_lib.teach.keeping.scoreboard import Scoreboard
from course_lib.teach.todo import TODO

__all__ = [
    "TODO",
    "CheckFailed",
    "Scoreboard",
    "UnknownExercise",
    "check",
    "hint",
    "progress",
    "solution",
    "use",
]

if in_notebook():
    prepare_compiler()  # it is ready when the first exercise is
