"""Python that no GPU's compiler takes is refused, and nothing else: the compiler agrees."""

import importlib.util
import textwrap

import numpy as np
import pytest

from course_lib import simulator
from course_lib.simulator import NotCompilable, cuda
from tests.simulator import drawn_expressions

N, PAIR, COUNT = 4, (4, 4), 0
KERNEL = """
@cuda.jit(device=True)
def first_of(v, n):
    s = cuda.local.array(n, np.float32)
    s[0] = v
    return s[0]


@cuda.extending.register_jitable
def registered(v):
    return v


def plain(v):
    return v


@cuda.jit
def function(x, y, m):
    i = cuda.grid(1)
    if i < x.size:
        v = x[i]
"""


def shaped(*shapes, before=""):
    """A kernel's lines for each shape of a shared array."""
    return [f"{before}s = cuda.shared.array({shape}, np.float32)\ny[i] = s.size"
            for shape in shapes]


#: What the refusal says -> lines of kernels; the shapes are those of `shaped`.
REFUSED = {
    "a list": ["a = [v, v]\ny[i] = a[0]", "y[i] = [1.0, 2.0][i]", "a = []\ny[i] = v",
               "y[i] = sum([v, v])", "a = list((v, v))\ny[i] = a[0]"],
    "a list comprehension": ["a = [v for k in range(3)]\ny[i] = a[0]"],
    "a generator expression": ["y[i] = sum(v for k in range(3))"],
    "a dict": ["a = {1: v}\ny[i] = a[1]", "a = dict()\ny[i] = v"],
    "a set": ["if i in {1, 2}:\n    y[i] = v"],
    "try and except": ["try:\n    y[i] = v\nexcept IndexError:\n    pass",
                       "try:\n    y[i] = v\nfinally:\n    pass"],
    "a `with` block": ["with m:\n    y[i] = v"],
    "making text": ["print(f'{v}')", "assert v > 0, f'{v}'", "print('%d' % i)",
                    "print('{}'.format(i))", "print(str(i))"],
    "assigning to a global name": ["global COUNT\nCOUNT = 1"],
    "an import": ["import math\ny[i] = math.exp(v)"],
    "a class": ["class A:\n    pass"],
    "`del`": ["a = v\ndel a"],
    "a starred name": ["a, *b = (1, 2, 3)\ny[i] = a"],
    "np.exp": ["y[i] = np.exp(v)"],
    "np.zeros": ["a = np.zeros(4)\ny[i] = a[0]"],
    "np.where": ["y[i] = np.where(v > 1, v, 0)"],
    "the method max": ["y[i] = x.max()"],
    "is no constant": shaped("m", "x.size", "x.shape[0]", "cuda.blockDim.x", "N * 2", "(N, N + 1)",
                             "-N", "max(N, 4)", "cuda.warpsize",
             "(cuda.warpsize, 2)", "len(PAIR)", "[4, 4]", "4.0", "np.int32(4)")
    + shaped("n", before="n = 4 if v > 1 else 8\n") + shaped("n", before="n = 4\nn += 1\n")
    + shaped("n", before="n = cuda.warpsize\n"),
    "plain, a plain Python function": ["y[i] = plain(v)", "y[i] = plain(plain(v))"],
    "copying a whole array": ["y[:] = x", "y[1:3] = x[1:3]", "a, b = x[:2], y[:2]\nb[:] = a",
                              "s = cuda.local.array(4, np.float32)\ns[0] = v\ny[:] = s"],
}
COMPILES = [
    "for k in [1, 2]:\n    y[i] += k", "if i in [1, 2]:\n    y[i] = v", "y[i] = sum((v, v))",
    "print('abc', i)", "assert v > 0, 'positive'", "global COUNT\ny[i] = COUNT",
    "f = lambda a: a + 1\ny[i] = f(v)", "a = (1, 2) + (3,)\ny[i] = a[2]", "y[i] = np.sin(v)",
    "y[i] = np.float32(np.pi) * np.maximum(v, 1)", "y[i] = x.reshape((2, 2))[0, 1]",
    "y[i] = first_of(v, 4)", "y[i] = registered(v)", "y[:] = v", "y[1:3] = 1",
    *shaped("4", "2 * 4", "N", "PAIR", "PAIR[0]", "(N, 4)", "4 if N > 2 else 8"),
    *shaped("n", before="n = 4\n"), *shaped("n", before="n = (4, 4)\n"),
]


def made(lines):
    text = f"{KERNEL}{textwrap.indent(lines, ' ' * 8)}\n"
    return drawn_expressions.compiled_source(
        text, f"<compilable {hash(lines)}>", cuda=cuda, np=np, N=N, PAIR=PAIR, COUNT=COUNT)


def launched(kernel):
    x, y = np.full(4, 2, np.float32), np.zeros(4, np.float32)
    kernel[1, 4](x, y, 4)
    return x, y, 4


@pytest.mark.parametrize("what, lines", [(what, each) for what, lines in REFUSED.items()
                                         for each in lines])
def test_refused(what, lines):
    for flavour in (simulator.options, simulator.sanitize, simulator.trace):
        with flavour(), pytest.raises(NotCompilable, match="cannot be compiled") as caught:
            launched(made(lines))
        assert what in str(caught.value) and caught.value.lineno > KERNEL.count("\n")


@pytest.mark.parametrize("lines", COMPILES)
def test_let_pass(lines):
    launched(made(lines))


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None,
                    reason="numba-cuda isn't installed")
def test_the_compiler_agrees():
    arguments = launched(made("y[i] = v"))
    wrong = []
    for lines in (*COMPILES, *(each for several in REFUSED.values() for each in several)):
        try:
            simulator.lint(made(lines), *arguments)
        except simulator.LintError:
            compiles = False
        else:
            compiles = True
        if compiles != (lines in COMPILES):
            wrong.append((lines, compiles))
    assert wrong == []


def test_pythons_own_functions_in_intrinsics_stay():
    """Twins are Python, whatever they call."""
    def twin(values):
        return sum([value for value in {0: values}[0]])

    simulator.register_twin(twin, twin)

    @cuda.jit
    def kernel(x):
        x[0] = twin((1, 2))

    x = np.zeros(1)
    kernel[1, 1](x)
    assert x[0] == 3
