"""Figures that the text of the sources gives: imports, lines, literals, marks, docstrings."""

import ast
import collections
import functools
import re
from pathlib import Path

import test_architecture as architecture

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "course_lib"
KERNELS = PACKAGE / "kernels"
#: What functions were called that chose a strategy by hand, before plans refused.
CHOOSING = re.compile(r"\w*_takes?|takes|fault|worthwhile|default_variant|decides")
#: Folders and files of the matrix product and of softmax.
WITH_WAYS = ("kernels/gemm", "kernels/linear", "kernels/softmax", "ops/linear", "ops/softmax")


@functools.cache
def text_of(path):
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path):
    return ast.parse(text_of(path))


def files(*folders):
    """Every Python file in these folders."""
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def lines(paths):
    return sum(text_of(path).count("\n") for path in paths)


# ---- imports ------------------------------------------------------------------------------------


def module_of(path):
    """The dotted name of a file of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules():
    """{dotted name: file} of the whole package."""
    return {module_of(path): path for path in files(PACKAGE)}


@functools.cache
def imported(path):
    """Every (module, name) that a file imports, anywhere in it; the name is None for a module.

    What is imported for annotations alone (`if TYPE_CHECKING`) is never imported.
    """
    found, here = [], module_of(path).split(".")
    for node in _running(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                up = node.level - (path.name == "__init__.py")
                base = here[: len(here) - up] + base
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                is_module = whole in modules()
                found.append((whole, None) if is_module else (".".join(base), alias.name))
    return found


def _running(tree):
    """As `ast.walk`, without what stands under `if TYPE_CHECKING`."""
    left = [tree]
    while left:
        yield (node := left.pop())
        left += [
            child for child in ast.iter_child_nodes(node)
            if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING")
        ]  # fmt: skip


def graph():
    """{module: modules of the package that it imports}, function-level imports included."""
    known = modules()
    return {
        name: {module for module, _ in imported(path) if module in known and module != name}
        for name, path in known.items()
    }


def circles(edges):
    """The sets of modules that reach each other (Tarjan), of two or more, largest first."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            circle = set()
            while node not in circle:
                circle.add(stack.pop())
            found.append(circle)

    for node in edges:
        if node not in index:
            visit(node)
    return sorted((each for each in found if len(each) > 1), key=len, reverse=True)


def parts_that_import_the_root():
    """Parts of the package that the root imports and that import the root."""
    edges = graph()
    inside = {each.split(".")[1] for each in edges["course_lib"]}
    return sorted(
        part for part in inside
        if any("course_lib" in edges[name] for name in edges if name.split(".")[1:2] == [part])
    )  # fmt: skip


def paths_into_tests():
    """Places in the package where a string names the folder of tests as a path."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files(PACKAGE) for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        and re.fullmatch(r"(\S*/)?tests(/\S*)?", node.value)
    ]  # fmt: skip


def borrowers():
    """{operation: what it imports from inside other operations}."""
    found = collections.defaultdict(list)
    for path in files(KERNELS):
        own = path.relative_to(KERNELS).parts[0].removesuffix(".py")
        found[own] += architecture.taken_from_inside(path, text_of(path))
    return {own: names for own, names in found.items() if names}


def unused_arrows(floors=architecture.FLOORS):
    """Arrows that the floors allow and no import uses."""
    unused = {(part, other) for part, others in floors.items() for other in others}
    for path in files(PACKAGE):
        for name in architecture.imported(tree_of(path), architecture.module_of(path)):
            top, *rest = name.split(".")
            if top == "course_lib":
                target = rest[0] if rest and architecture.is_part(rest[0]) else top
                unused.discard((architecture.part_of(path), target))
    return [f"{part} -> {other}" for part, other in sorted(unused)]


# ---- kernels ------------------------------------------------------------------------------------


def literals(number=132):
    """{operation: how often its files have the number}."""
    return collections.Counter(
        path.relative_to(KERNELS).parts[0].removesuffix(".py")
        for path in files(KERNELS) for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and node.value == number
    )  # fmt: skip


def choosing_functions():
    """Functions of the matrix product and of softmax that choose a strategy beside the plans."""
    return [
        f"{path.relative_to(PACKAGE)}:{node.name}"
        for path in files(PACKAGE / "kernels", PACKAGE / "ops")
        if str(path.relative_to(PACKAGE)).removesuffix(".py").startswith(WITH_WAYS)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef) and CHOOSING.fullmatch(node.name)
    ]


def kernel_functions():
    """(file, function) of each kernel: what `cuda.jit` makes, device functions left out."""
    for path in files(KERNELS):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list)):
                yield path, node


def _is_jit(decorator):
    options = decorator.keywords if isinstance(decorator, ast.Call) else ()
    name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
    return name == "cuda.jit" and not any(option.arg == "device" for option in options)


def undescribed_kernels():
    """Kernels without a docstring that names each of their parameters."""
    found = []
    for path, node in kernel_functions():
        said = ast.get_docstring(node) or ""
        names = [arg.arg for arg in node.args.args]
        if not said or not all(re.search(rf"\b{name}\b", said) for name in names):
            found.append(f"{path.relative_to(PACKAGE)}:{node.name}")
    return found


def long_files(most=300):
    return [str(p.relative_to(PACKAGE)) for p in files(KERNELS) if lines([p]) > most]


def marks(mark="fmt: " + "skip"):
    """How many lines of the project tell the formatter to leave them."""
    folders = PACKAGE, ROOT / "tests", ROOT / "notebooks" / "src"
    return sum(line.count(mark) for path in files(*folders) for line in text_of(path).splitlines())


def figures():
    """{name: (value, what was counted)} of what stands in the sources."""
    found, numbers = circles(graph()), literals()
    ways = [name for name in numbers if f"kernels/{name}" in WITH_WAYS]
    of_kernels, of_tests = files(KERNELS), files(ROOT / "tests")
    largest = sorted(found[0]) if found else []
    borrowed = [f"{own}: {', '.join(names)}" for own, names in borrowers().items()]
    return {
        "lines that the formatter is told to leave": (marks(), []),
        "lines of kernels": (lines(of_kernels), []),
        "lines of tests": (lines(of_tests), []),
        "literal 132 in linear and softmax": (sum(numbers[name] for name in ways), ways),
        "literal 132 in kernels": (
            sum(numbers.values()), [f"{n} {name}" for name, n in numbers.items()],
        ),
    } | {
        name: (len(counted), counted)
        for name, counted in {
            "circles of files, function-level imports included": list(map(sorted, found)),
            "files of the largest circle": largest,
            "operations that import inner files of others": borrowed,
            "parts that import the root, which imports them": parts_that_import_the_root(),
            "paths from the package into tests": paths_into_tests(),
            "arrows allowed and unused": unused_arrows(),
            "functions that choose in linear and softmax": choosing_functions(),
            "kernels without a docstring of their parameters": undescribed_kernels(),
            "files of kernels over 300 lines": long_files(),
        }.items()
    }  # fmt: skip
