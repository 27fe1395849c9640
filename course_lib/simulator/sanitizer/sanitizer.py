"""`simulator.sanitize()`: run kernels and say what is wrong with them, with the line.

    with simulator.sanitize() as report:
        kernel[grid, block](x, y)
    print(report)

It collects and goes on: a read outside an array gives NaN (or garbage), such a write is dropped, a
launch that cannot go on ends. What counts as in order is told in `ordering`. Further rules:

- Out of bounds is any index below 0 or past the end, negative ones included.
- Reading shared or local memory that nobody has written is an uninitialised read. So is reading
  what `cuda.device_array` made, until the host, or a kernel under the sanitizer, writes it; a
  kernel that runs without one counts as writing all of it. Of other global memory the host has
  written every element.
- At a barrier all threads of a block must wait on the same line, in the same calls of functions and
  the same rounds of the loops around (else barrier-divergence); none may
  have run past it to the kernel's end (barrier-mismatch), or have returned early out of a warp
  whose other threads wait (exited-before-barrier). Whole warps may leave: the hardware counts
  them out.
- A grid barrier counts every thread of the grid: no warp may have left, no block may skip it.
- A loop that waits for memory must make the compiler read it again: by an atomic or volatile read,
  or by a store, atomic, fence, barrier, warp operation or sleep in the loop (else endless-poll).
- A shuffle may read only from a lane that takes part, and every lane that its mask names must come
  unless it returned early (shuffle-inactive-lane).
- Views of dynamic shared memory overlap unless they are sliced apart: reading through one what was
  last written through another is shared-aliasing.
- A barrier of a cluster counts as one of each of its blocks, and no block may run to its end
  without it (barrier-mismatch). A block's shared memory is gone when the block has exited: another
  block's read of it must be known to be over (read-after-exit).
- A load in the condition of a `while` counts as waiting for another thread, unless the loop adds to
  that array atomically: then it acts on what may have changed since.
- Atomics alone never race. An update made of two, a read and an exchange, is found by its result
  in the order "interleaved".
- An asynchronous copy (`postponed.begin`) writes its target and reads its source at any time until
  its thread has waited for it.
- One run shows one order of threads and one input: what did not happen is not found. A function
  whose source cannot be found cannot be watched: a launch that needs it raises SourceMissing.
"""

import contextlib

from course_lib.simulator.observe.observer import Observer
from course_lib.simulator.observe.real import observing_with
from course_lib.simulator.sanitizer.checking import Checking
from course_lib.simulator.sanitizer.findings import Report


class Sanitizer(Observer):
    """The observer behind `sanitize`."""

    def __init__(self):
        self.report = Report()

    def execution(self, launch):
        """The Execution that checks everything."""
        return Checking(launch, self.reports(launch))

    @staticmethod
    def reports(launch):
        """The reports that a launch's findings go to: those of all sanitizers that watch it."""
        return [observer.report_of(launch) for observer in launch.observers
                if isinstance(observer, Sanitizer)]

    def report_of(self, launch):
        """What takes the findings of this launch, by `again` and `add`, as a `Report` does."""
        return self.report


@contextlib.contextmanager
def sanitize():
    """Check every launch inside the `with` block; gives the `Report`.

    Real numba.cuda kernels launched inside run in the simulator, on copies of their arguments, and
    what they wrote is copied back.
    """
    with observing_with(Sanitizer()) as sanitizer:
        yield sanitizer.report
