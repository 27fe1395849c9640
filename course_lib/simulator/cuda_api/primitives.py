"""What `cuda.syncthreads`, `cuda.threadIdx` and their kin are made of.

The rewriter knows these objects and puts code in their place. Called directly, from a function
that could not be rewritten, they find the thread they run for through its greenlet.
"""

from typing import NamedTuple

from course_lib.simulator.engine import greenlets
from course_lib.simulator.engine.checked import checked, pause


def current_thread(name):
    """The CUDA thread running in this greenlet; RuntimeError outside a kernel."""
    thread = greenlets.current()
    if thread is None:
        raise RuntimeError(f"{name} means something only inside a kernel; it was used on the host")
    return thread


class Dim3(NamedTuple):
    """An (x, y, z) triple."""

    x: int
    y: int
    z: int

    def __str__(self):
        # What `print` shows on a GPU.
        return f"({self.x}, {self.y}, {self.z})"


class Primitive:
    """One device function of `numba.cuda`.

    Parameters
    ----------
    name : str
        As a user writes it, "cuda.syncthreads".
    impl : callable
    kind : str
        "pure": `impl(*args)`; "thread": `impl(thread, *args)`; "blocking": `impl(thread, *args)`
        returns an operation for the scheduler, whose answer is the result.
    inline : str or None
        The rewriter's name for a short form.
    """

    def __init__(self, name, impl, kind="pure", inline=None, access=None):
        self.name, self.impl, self.kind, self.inline = name, impl, kind, inline
        self.access = access
        self.safe_name = name.replace(".", "_")
        self.__doc__ = impl.__doc__

    def __call__(self, *args, **kwargs):
        # Only functions that could not be rewritten come this way.
        if self.kind == "pure":
            if self.access:
                pause()
            return checked(self.impl(*args, **kwargs))
        thread = current_thread(self.name)
        if self.kind == "thread":
            return checked(self.impl(thread, *args, **kwargs))
        return thread.switch(self.impl(thread, *args, **kwargs))

    def __repr__(self):
        return f"<{self.name}()>"


class Index:
    """`cuda.threadIdx`, `blockIdx`, `blockDim` or `gridDim`: three integers of this thread."""

    #: name -> the attributes of the rewriter's `_t` that hold x, y and z
    FIELDS = {
        "threadIdx": ("tx", "ty", "tz"),
        "blockIdx": ("b.x", "b.y", "b.z"),
        "blockDim": ("b.dx", "b.dy", "b.dz"),
        "gridDim": ("b.gx", "b.gy", "b.gz"),
    }

    def __init__(self, name):
        self.name = name

    def of(self, thread):
        """The triple for `thread`."""
        owner = thread if self.name == "threadIdx" else thread.b
        return Dim3(*(getattr(owner, field.split(".")[-1]) for field in self.FIELDS[self.name]))

    x = property(lambda self: self.of(current_thread(f"cuda.{self.name}")).x)
    y = property(lambda self: self.of(current_thread(f"cuda.{self.name}")).y)
    z = property(lambda self: self.of(current_thread(f"cuda.{self.name}")).z)

    def __str__(self):
        # Printed by a kernel without source, which holds this object itself.
        try:
            return str(self.of(current_thread(f"cuda.{self.name}")))
        except RuntimeError:
            return repr(self)

    def __repr__(self):
        return f"<{self.name}.{{x,y,z}}>"


class LaneId:
    """`cuda.laneid` outside a kernel; inside one the rewriter puts the number."""

    def __repr__(self):
        return "<laneid>"


class Namespace:
    """A plain bag of names such as `cuda.atomic`, which the rewriter may look into."""

    def __init__(self, name, **members):
        self.__dict__.update(members)
        self.__dict__["__name__"] = name

    def __repr__(self):
        return f"<{self.__name__}>"

    def __getattr__(self, name):
        raise AttributeError(f"{self.__dict__.get('__name__')} has no {name}", name=name, obj=self)
