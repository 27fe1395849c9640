"""The errors a simulated launch can raise."""


class SimulatorError(Exception):
    """Base of every error that the simulator itself raises."""


class OutOfBounds(SimulatorError, IndexError):
    """A kernel read or wrote outside an array.

    Attributes
    ----------
    array : str
        The array as the source writes it.
    index, shape : the index used and the array's shape.
    thread, block : tuple of int
        The (x, y, z) of the thread and of its block.
    filename, lineno : where in the user's source.
    """

    def __init__(self, message, *, array=None, index=None, shape=None, thread=None, block=None,
                 filename=None, lineno=None):
        super().__init__(message)
        self.array, self.index, self.shape = array, index, shape
        self.thread, self.block = thread, block
        self.filename, self.lineno = filename, lineno


class LaunchError(SimulatorError, ValueError):
    """A launch that a GPU would refuse: a limit passed, a dimension or an argument missing."""


class NotCompilable(SimulatorError, TypeError):
    """A kernel holds Python that no GPU's compiler takes, at `filename` and `lineno`."""

    def __init__(self, message, filename, lineno):
        super().__init__(message)
        self.filename, self.lineno = filename, lineno


class Deadlock(SimulatorError, RuntimeError):
    """No thread of a launch can go on, or none has finished within the step budget."""


class MaskError(SimulatorError):
    """A lane calls a warp operation with a mask that leaves it out, or without all others.

    `place` is (file, line, function) where lanes wait for others that do not come; else None.
    """

    place = None


class Unreachable(SimulatorError):
    """A block reads the shared memory of a rank that its cluster lacks, or whose block has exited.

    `exited` is that block, or None.
    """

    def __init__(self, message, exited=None):
        super().__init__(message)
        self.exited = exited


class SourceMissing(SimulatorError):
    """A function that is to be watched has no source, so that its accesses cannot be seen."""
