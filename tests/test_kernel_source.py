"""What the source of our kernels keeps to, beside what the compiler of this machine demands."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "course_lib"
ARRAYS = "cuda.shared.array", "cuda.local.array"


def computed_shapes(source):
    """The shapes of arrays in `source` that are not names and numbers alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ARRAYS:
            shape = node.args[0] if node.args else node.keywords[0].value
            sizes = shape.elts if isinstance(shape, ast.Tuple) else [shape]
            for size in sizes:
                if not isinstance(size, ast.Name | ast.Constant):
                    yield f"line {node.lineno}: {ast.unparse(size)}"


@pytest.mark.parametrize("part", ["kernels", "runtime"])
def test_shapes_of_arrays_are_names(part):
    # Of a product of two names, numba makes a constant on some versions of Python only.
    found = {
        str(path): faults
        for path in sorted((PACKAGE / part).rglob("*.py"))
        if (faults := list(computed_shapes(path.read_text(encoding="utf-8"))))
    }
    assert not found


@pytest.mark.parametrize("shape, wrong", [
    ("N", 0), ("32", 0), ("(2, N)", 0), ("A * B", 1), ("(A + 1, B)", 1), ("f(A)", 1),
])  # fmt: skip
def test_what_is_computed_is_found(shape, wrong):
    source = f"def kernel():\n    x = cuda.shared.array({shape}, np.float32)"
    assert len(list(computed_shapes(source))) == wrong
