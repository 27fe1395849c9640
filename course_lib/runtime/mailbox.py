"""Numbers that the blocks of a grid send each other while they run: values with a mark.

What one block writes to memory, another sees in no promised order: a flag may arrive before the
data that it announces. The usual remedy is a fence before the flag and one after it has been seen,
and that costs two trips to memory and back. A *mailbox* does with one: a word of 64 bits carries a
float32 together with a mark, and a word arrives whole. Whoever waits for it looks again until the
mark is the one it expects, and then has the value too.

    post(box, i, value, mark)         # one block
    value, found = look(box, i)       # another one: until found == mark

=========================== ====================================================================
`post(box, i, value, mark)` box[i] gets the float32 `value` and the 31-bit integer `mark`, at once
                            (PTX st.relaxed.gpu, 64 bits)
`look(box, i)`              the pair (value, mark) that box[i] holds now (PTX ld.relaxed.gpu)
=========================== ====================================================================

`box` is an int64 array of one dimension. Marks must differ from whatever an earlier launch left
behind, so they count launches. A block that waits in this way needs the other one to be running:
`launch(..., cooperative=True)` promises that all blocks of a grid are.

Each is machine code (`nvvm_mailbox`) and a twin, as told in `intrinsics`.
"""

import numpy as np

from course_lib import simulator
from course_lib.runtime import twins

_LOW = 0xFFFFFFFF


def _post(box, i, value, mark):
    word = int(np.float32(value).view(np.uint32)) | int(mark) << 32
    simulator.cuda.stwt(box, i, np.int64(word))


def _look(box, i):
    word = int(simulator.cuda.ldcv(box, i))
    return np.uint32(word & _LOW).view(np.float32), word >> 32


_post.relaxed = _look.relaxed = True  # made to be raced: the sanitizer takes them for atomics
#: Name of an intrinsic -> what it does in the simulator.
TWINS = {"post": _post, "look": _look}

_here = twins.in_use(TWINS, "course_lib.runtime.nvvm_mailbox")
post, look = _here["post"], _here["look"]
