"""Why a learner's kernel is wrong, found by experiment: which small mistake makes a right one so?

`grafts` puts pieces of a right kernel into the learner's, and `words` tells what they replace.
`edits` are the mistakes, `mutants` makes them in a right kernel; `matching` looks for those that
behave exactly like the learner's kernel; `repair` undoes them in the learner's own code, which
shows the line; `sentence` puts the findings into words.
"""

from course_lib.teach.explaining.mutation.matching import fresh
from course_lib.teach.explaining.mutation.sentence import cause

__all__ = ["cause", "fresh"]
