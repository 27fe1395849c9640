"""`numba.cuda.cg`: groups of threads that wait for each other; the grid group spans all blocks."""

from course_lib.simulator.cuda_api.primitives import Primitive, current_thread
from course_lib.simulator.engine import scheduler


class GridGroup:
    """All threads of the launch."""

    sync_operation = (scheduler.wait_for_grid,)

    def sync(self):
        """Wait for every thread of every block that has not exited."""
        return current_thread("grid.sync()").switch(self.sync_operation)

    def __repr__(self):
        return "<grid group>"


_grid = GridGroup()


def _this_grid():
    """The group of all threads of this launch."""
    return _grid


this_grid = Primitive("cuda.cg.this_grid", _this_grid)
