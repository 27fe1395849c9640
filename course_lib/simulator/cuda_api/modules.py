"""The modules of numba.cuda by name, each made when it is first asked for."""

_makers, _made = {}, {}


def provide(name, maker):
    """Let the module called `name`, such as "numba.cuda.random", be what `maker()` gives."""
    _makers[name] = maker


def submodule(name):
    """The module that stands for `name`, "numba.cuda" or below; None if there is none."""
    if name not in _made and name in _makers:
        _made[name] = _makers[name]()
    return _made.get(name)
