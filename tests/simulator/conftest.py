import types

import pytest

from course_lib import simulator


def without_source(function):
    """The same function, but its source cannot be found: it runs unmodified, in greenlets."""
    copy = types.FunctionType(function.__code__.replace(co_filename="<nowhere>"),
                              function.__globals__, function.__name__, function.__defaults__,
                              function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@pytest.fixture(params=["source", "greenlets"])
def jit(request):
    """`cuda.jit` for each of the two ways a kernel can run."""

    def decorate(function=None, **options):
        if function is None:
            return lambda inner: decorate(inner, **options)
        if request.param == "greenlets":
            function = without_source(function)
        return simulator.cuda.jit(function, **options)

    decorate.path = request.param
    return decorate
