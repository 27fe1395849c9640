"""Drawn expressions: their types and values in the simulator, beside those of numba's compiler.

    python tests/simulator/drawn_expressions.py 2000 [seed]

Each subexpression of each expression is compared, once with the kinds of the arguments known to the
rewriter and once without. numba compiles for the CPU, with the rules of arithmetic that a GPU's
compiler has; on a GPU, a test compares the values with those of the GPU itself.
"""

import argparse
import itertools
import linecache
import math
import random
import sys

import numpy as np

WHOLE = ("i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64")
DTYPES = {"i8": np.int8, "u8": np.uint8, "i16": np.int16, "u16": np.uint16, "i32": np.int32,
          "u32": np.uint32, "i64": np.int64, "u64": np.uint64, "f32": np.float32,
          "f64": np.float64, "b": np.bool_}
NAMES = {**{name: np.dtype(kind).name for name, kind in DTYPES.items()}, "b": "boolean"}
CASTS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32",
         "float64")
LITERALS = ("0", "1", "2", "3", "7", "10", "100", "255", "1000000000", "4294967295", "2 ** 40",
            "-1", "-5", "0x7FFFFFFFFFFFFFFF", "0xFFFFFFFFFFFFFFFF", "0.5", "2.0", "0.1", "1e20",
            "-3.25", "1 / 3", "True")
ARITHMETIC = ("+", "-", "*", "+", "-", "*", "/", "//", "%", "&", "|", "^", "<<", ">>", "**")
#: subexpressions in one tuple
ROW = 20
COMPARED = ("<", "<=", ">", ">=", "==", "!=")


class Node:
    """A drawn expression: its text, its type as the generator believes, and its parts."""

    def __init__(self, text, kind, parts=(), symbol=None):
        self.text, self.kind, self.parts, self.symbol = text, kind, parts, symbol
        self.is_constant = bool(parts) and symbol in (*ARITHMETIC, *"-+~") and all(
            part.is_constant for part in parts)
        if self.is_constant:  # Python computes it, before numba sees it
            self.kind = _constant_kind(text)

    def all(self):
        """Every subexpression, the innermost first."""
        return [inner for part in self.parts for inner in part.all()] + [self]


def _constant_kind(text):
    try:
        value = eval(text)
    except (ArithmeticError, TypeError, ValueError):
        return None
    if isinstance(value, float | bool):
        return "float64" if isinstance(value, float) else "boolean"
    if isinstance(value, complex):
        return None
    return "int64" if -(2**63) <= value < 2**63 else "uint64" if 0 < value < 2**64 else None


def draw(rng, depth):
    """An expression that numba accepts."""
    from course_lib.simulator.rewrite.number_types import signature, unified

    if depth == 0 or rng.random() < 0.08:
        if rng.random() < 0.25:
            text = rng.choice(LITERALS)
            made = Node(f"({text})" if "-" in text or " " in text else text, _constant_kind(text))
            made.is_constant = True
            return made
        name = rng.choice(list(DTYPES))
        return Node(name, NAMES[name])
    while True:
        made = _draw_one(rng, depth, signature, unified)
        if made is not None and made.kind is not None and "complex" not in made.kind:
            return made


def _literal(text):
    made = Node(text, "int64")
    made.is_constant = True
    return made


def _draw_one(rng, depth, signature, unified):
    form = rng.choices(["binary", "unary", "compare", "extremum", "choice", "cast", "call"],
                       [10, 2, 2, 2, 1, 2, 2])[0]
    first = draw(rng, depth - 1)
    if form == "unary":
        symbol = rng.choice(["-", "+", "~", "not "])
        name = {"-": "neg", "+": "pos", "~": "invert"}.get(symbol)
        found = ((), "boolean") if name is None else signature(name, first.kind)
        return found and Node(f"({symbol}{first.text})", found[1], [first], symbol)
    if form == "cast":
        name = rng.choice(CASTS)
        return Node(f"{name}({first.text})", name, [first], "cast")
    if form == "call":
        name = rng.choice(["int", "float", "abs", "round"])
        if name == "float" and first.symbol == "if" and "boolean" in {
                part.kind for part in first.parts[::2]}:
            return None  # without kinds, the simulator refuses float(True), as numba does
        found = signature(name, first.kind)
        return found and Node(f"{name}({first.text})", found[1], [first], "cast" if name in (
            "int", "round") else name)
    second = draw(rng, depth - 1)
    if form == "extremum":
        name = rng.choice(["min", "max"])
        return Node(f"{name}({first.text}, {second.text})", unified(first.kind, second.kind),
                    [first, second], name)
    if form == "choice":
        test = draw(rng, depth - 1)
        if not any(part.text in DTYPES for part in test.all()):
            return None  # numba leaves out what a constant condition never takes
        return Node(f"({first.text} if {test.text} else {second.text})",
                    unified(first.kind, second.kind), [first, test, second], "if")
    symbol = rng.choice(COMPARED if form == "compare" else ARITHMETIC)
    if symbol in ("<<", ">>"):  # by less than the width
        second = _literal(str(rng.randrange(64))) if rng.random() < 0.6 or (
            "float" in second.kind) else Node(f"({second.text} & 31)", "int64", [second], "&")
    elif symbol in ("//", "%") and "float" not in first.kind + second.kind:
        # The lowest integer through -1 stops the CPU's process.
        second = _literal(rng.choice(["3", "7", "1000", "(-3)", "0"])) if rng.random() < 0.5 or (
            second.kind == "boolean") else Node(f"({second.text} & 7)", second.kind, [second], "&")
    elif symbol == "**":
        lowest = 0 if "float" in first.kind else -3  # a CPU raises for 0.0 ** -1
        second = second if "float" in second.kind else _literal(f"({rng.randrange(lowest, 6)})")
    if second.symbol == "&":
        found = signature("&", second.parts[0].kind, "int64")
        if found is None:
            return None
        second.kind = found[1]
    found = signature(symbol, first.kind, second.kind)
    return found and Node(f"({first.text} {symbol} {second.text})", found[1], [first, second],
                          symbol)


def arguments(rng):
    """Values for every variable: at the ends of the types, small, and anywhere."""
    values = {}
    for name, dtype in DTYPES.items():
        if name in WHOLE:
            low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
            value = rng.choice([low, high, 0, 1, 3, max(low, -7), rng.randint(low, high),
                                rng.randint(max(low, -100), min(high, 100))])
        elif name == "b":
            value = rng.random() < 0.5
        else:
            value = rng.choice([0.0, -0.0, 0.1, 1.5, -2.75, 16777217.0, 1e10, math.inf,
                                rng.uniform(-300, 300)])
        values[name] = value if name in ("i64", "f64") else dtype(value)
    return values


def compiled_source(source, name, **scope):
    """A function of `source`, whose text can be found as that of a file's can."""
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    exec(compile(source, name, "exec"), scope)
    return scope["function"]


def functions(expressions, batch):
    """(function that gives all subexpressions, the same as a kernel that appends them)."""
    import numba

    texts = [node.text for expression in expressions for node in expression.all()]
    # In rows: Python builds a longer tuple as a list, which numba refuses.
    listed = "".join("        (" + ",\n         ".join(texts[first:first + ROW]) + ",),\n"
                     for first in range(0, len(texts), ROW))
    names = ", ".join(DTYPES)
    scope = {name: getattr(numba, name) for name in CASTS}
    plain = compiled_source(f"def function({names}):\n    return (\n{listed}    )\n",
                            f"<drawn {batch}>", **scope)
    results = []
    kernel = compiled_source(f"def function({names}):\n    results.append((\n{listed}    ))\n",
                             f"<drawn kernel {batch}>", results=results, **scope)
    return texts, plain, kernel, results


def simulated(kernel, results, values, known):
    """What the kernel gives in the simulator, the kinds of its arguments known or not."""
    from course_lib.simulator import cuda
    from course_lib.simulator.engine import kernel as kernels

    saved = kernels.kind_of_value
    if not known:
        kernels.kind_of_value = lambda value: None
    try:
        launched = cuda.jit(kernel)
        for each in values:
            launched[1, 1](*each.values())
    finally:
        kernels.kind_of_value = saved
    found, results[:] = [sum(rows, ()) for rows in results], []
    return found


def type_name(value):
    """numba's name of the type that a value in the simulator stands for."""
    from course_lib.simulator.rewrite.number_types import NAMES

    return NAMES[value.__class__]


def _plain_name(kind):
    """The name of a numba type, that of a constant's type for a constant."""
    return {"bool": "boolean"}.get(str(found := getattr(kind, "literal_type", kind)), str(found))


def _undefined(node, known):
    """True where a GPU has no result of its own, or CPU and GPU have different ones."""
    values = [known[part.text] for part in node.parts]
    if node.symbol == "cast" and "int" in node.kind and (
            node.text.startswith("round") or isinstance(values[0], float | np.floating)):
        if not math.isfinite(values[0]):
            return True
        info = np.iinfo(node.kind)
        return not info.min <= int(float(values[0])) <= info.max
    if node.symbol == "**" and values[0] == 0 and values[1] < 0:  # an infinity as an integer
        return True
    if "int" in node.kind and len(values) == 2 and (
            node.symbol in ("+", "-", "*") and node.kind == "int64" or node.symbol == "**"):
        # LLVM may take it that none of these overflows; where it knows nothing, they wrap.
        exact = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "**": int.__pow__}
        low, high = (0, 2**64) if node.kind == "uint64" else (-(2**63), 2**63)
        return not low <= exact[node.symbol](*map(int, values)) < high
    if node.symbol in ("min", "max"):  # of NaN, and of zeros of both signs
        return any(value != value for value in values) or values[0] == values[1] == 0
    return node.symbol == "**" and isinstance(values[1], float | np.floating) or (
        node.symbol in ("%", "//") and "float" in node.kind and not math.isfinite(values[0]))


def differences(expressions, texts, truth, types, found, values, known):
    """Lines that tell which subexpressions differ in type or value."""
    lines, place = [], 0
    for expression in expressions:
        values_of, doubtful, mixed = {}, set(), set()
        for node in expression.all():
            text, right, got = texts[place], truth[place], found[place]
            kind = types[place]
            place += 1
            values_of[node.text] = right
            if any(part.text in mixed for part in node.parts) or node.symbol == "if" and (
                    not known):  # what the other branch gives is then not known
                mixed.add(node.text)
            elif type_name(got) != kind:
                lines.append(f"{text}: {type_name(got)}, compiled {kind}")
            if _undefined(node, values_of) or node.text in mixed or any(
                    part.text in doubtful for part in node.parts):
                doubtful.add(node.text)
            elif not _same(right, got):
                inputs = {name: value for name, value in values.items() if name in text}
                lines.append(f"{text}: {got!r}, compiled {right!r}, with {inputs}")
    return lines


def _same(right, got):
    if isinstance(right, float | np.floating):
        return math.isnan(right) and math.isnan(got) or (
            right == got and math.copysign(1, right) == math.copysign(1, got))
    return int(right) == int(got)


def compare(count, seed=0, batch=40, draws=4):
    """(number of subexpressions, lines about those that differ)."""
    import numba

    rng = random.Random(seed)
    total, lines = 0, []
    for number in range(-(-count // batch)):
        expressions = [draw(rng, rng.choice([1, 2, 2, 3]))
                       for _ in range(min(batch, count - number * batch))]
        texts, plain, kernel, results = functions(expressions, f"{seed}.{number}")
        values = [arguments(rng) for _ in range(draws)]
        compiled = numba.njit(error_model="numpy")(plain)
        truths = [sum(compiled(*each.values()), ()) for each in values]
        types = [_plain_name(kind) for row in compiled.nopython_signatures[0].return_type
                 for kind in row]
        for known in (True, False):
            for each, truth, found in zip(values, truths, simulated(kernel, results, values, known),
                                          strict=True):
                lines += differences(expressions, texts, truth, types, found, each, known)
        total += len(texts)
    return total, lines


def compare_on_a_gpu(count, seed=0, draws=4):
    """(number of subexpressions, lines about those whose values differ from a GPU's).

    A GPU's kernel stores each value as int64, uint64 or float64, by the type of the result.
    Products and sums of floats may be fused there, so floats are compared to a few last places, and
    only where they are not computed from other floats' sums.
    """
    import numba
    from numba import cuda

    rng = random.Random(seed)
    drawn = (draw(rng, rng.choice([1, 2])) for _ in iter(int, 1))
    # For a GPU, numba compiles no min and max of truth values.
    fit = (expression for expression in drawn if not any(
        node.symbol in ("min", "max") and any(part.kind == "boolean" for part in node.parts)
        for node in expression.all()))
    expressions = list(itertools.islice(fit, count))
    texts, _, kernel, results = functions(expressions, f"gpu {seed}")
    kinds = [node.kind for expression in expressions for node in expression.all()]
    goals = ["floats" if "float" in kind else "naturals" if kind == "uint64" else "wholes"
             for kind in kinds]
    body = "".join(f"    {goal}[{place}] = {text}\n"
                   for place, (goal, text) in enumerate(zip(goals, texts, strict=True)))
    names = ", ".join(DTYPES)
    plain = compiled_source(f"def function(wholes, naturals, floats, {names}):\n{body}",
                            f"<drawn for a GPU {seed}>",
                            **{name: getattr(numba, name) for name in CASTS})
    compiled = cuda.jit(plain, opt=True)
    lines = []
    values = [arguments(rng) for _ in range(draws)]
    for each, found in zip(values, simulated(kernel, results, values, True), strict=True):
        out = {"wholes": np.zeros(len(texts), np.int64), "naturals": np.zeros(
            len(texts), np.uint64), "floats": np.zeros(len(texts))}
        compiled[1, 1](*out.values(), *each.values())
        cuda.synchronize()
        truth = [out[goal][place].item() for place, goal in enumerate(goals)]
        own = [float(value) if goal == "floats" else int(value)
               for value, goal in zip(found, goals, strict=True)]
        place = 0
        for expression in expressions:
            values_of, doubtful = {}, set()
            for node in expression.all():
                right, got = truth[place], own[place]
                place += 1
                values_of[node.text] = right
                fused = any("float" in part.kind and part.symbol in ("+", "-", "*", "/", "**", "%",
                                                                     "//") for part in node.parts)
                if _undefined(node, values_of) or fused or any(
                        part.text in doubtful for part in node.parts):
                    doubtful.add(node.text)
                elif not (_same(right, got) or isinstance(got, float) and math.isclose(
                        right, got, rel_tol=1e-6 if node.kind == "float32" else 1e-14)):
                    lines.append(f"{node.text}: {got!r}, on the GPU {right!r}")
    return len(texts), lines


def main(options=None):
    """Print what differs; the number of differences is the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    options = parser.parse_args(options)
    total, lines = compare(options.count, options.seed)
    for line in dict.fromkeys(lines):
        print(line)
    print(f"{options.count:,} expressions, {total:,} subexpressions, {len(lines):,} differences")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
