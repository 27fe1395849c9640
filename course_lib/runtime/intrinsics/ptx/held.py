"""Machine code of `intrinsics.held`, as `base` has that of `intrinsics` itself."""

from llvmlite import ir
from numba.cuda import types

from course_lib.runtime.intrinsics.ptx.base import _F32, _I32, _I64, _check, _check_local
from course_lib.runtime.intrinsics.ptx.matrix import _check_words, _places, _shared_address, _trap
from course_lib.runtime.intrinsics.ptx.warpgroup import (
    _DESCRIPTOR,
    _KINDS,
    _STEP_BY_ROW,
    PANEL_BYTES,
    STEPS,
    _check_columns,
    _on_sums,
    _where_there_are_any,
)
from course_lib.runtime.intrinsics.ptx.words import _of_literals

WORDS, ROWS, ROW_BYTES = 16, 64, 128


def _code(dtype, columns):
    """PTX of the product: sums first, then words, then the descriptor of B."""
    n_sums = columns // 2
    sums = ", ".join(f"${r}" for r in range(n_sums))
    b = 2 * n_sums + WORDS
    lines = ["{", ".reg .pred all;", ".reg .b64 b;", "setp.eq.u32 all, 0, 0;"]
    lines.append("wgmma.fence.sync.aligned;")
    for n in range(STEPS):
        words = ", ".join(f"${2 * n_sums + 4 * n + r}" for r in range(4))
        lines += [
            f"add.s64 b, ${b}, {n * _STEP_BY_ROW};",
            f"wgmma.mma_async.sync.aligned.m64n{columns}{_KINDS[dtype]} "
            f"{{{sums}}}, {{{words}}}, b, all, 1, 1, 1;",
        ]
    lines += ["wgmma.commit_group.sync.aligned;", "}"]
    return "\n".join(lines)


@_of_literals
def multiply_held(typingctx, acc, words, w, tiles, j, columns, rows):
    _check(tiles, "multiply_held")
    _check_local(acc, "multiply_held")
    _check_words(words, "multiply_held")
    number = _check_columns(columns, "multiply_held")
    if number % ROWS:
        raise TypeError(f"multiply_held takes a multiple of {ROWS} columns, not {number}")
    if not isinstance(rows, types.IntegerLiteral) or rows.literal_value % ROWS:
        raise TypeError(f"multiply_held needs a constant multiple of {ROWS} rows, not {rows}")
    if tiles.dtype == types.float32:
        raise TypeError(f"multiply_held takes 16-bit numbers, not {tiles.dtype}")
    panel = rows.literal_value * ROW_BYTES
    fields = _DESCRIPTOR - ((PANEL_BYTES >> 4) << 16) + ((panel >> 4) << 16)
    code = _code(tiles.dtype, number)

    def codegen(context, builder, sig, args):
        with _where_there_are_any(builder) as (then, otherwise):
            with then:
                address = _shared_address(
                    context, builder, sig.args[3], args[3], sig.args[4], args[4]
                )
                start = builder.and_(builder.lshr(address, _I32(4)), _I32(0x3FFF))
                tile = builder.or_(builder.zext(start, _I64), _I64(fields))
                w_at = context.cast(builder, args[2], sig.args[2], types.int64)
                places = _places(context, builder, sig.args[0], args[0], _I64(0), number // 2)
                held = _places(context, builder, sig.args[1], args[1], w_at, WORDS)
                _multiply(builder, places, [builder.load(place) for place in held], tile, code)
            with otherwise:
                _trap(builder)
        return context.get_dummy_value()

    return types.void(acc, words, w, tiles, j, columns, rows), codegen


def _multiply(builder, places, words, tile, code):
    count = len(places)
    sums = [builder.load(place) for place in places]
    kind = ir.FunctionType(
        ir.LiteralStructType([_F32] * count), [value.type for value in (*sums, *words, tile)]
    )
    constraints = ["=f"] * count + [str(r) for r in range(count)] + ["r"] * len(words)
    constraints = ",".join([*constraints, "l", "~{memory}"])
    found = builder.asm(kind, code, constraints, [*sums, *words, tile], True)
    found.attributes.add("convergent")
    for r, place in enumerate(places):
        builder.store(builder.extract_value(found, r), place)


@_of_literals
def wait_for_products_but(typingctx, count, acc, columns):
    _check_local(acc, "wait_for_products_but")
    if not isinstance(count, types.IntegerLiteral):
        raise TypeError(f"wait_for_products_but needs a constant count, not {count}")
    number, code = _check_columns(columns, "wait_for_products_but"), count.literal_value

    def codegen(context, builder, sig, args):
        with _where_there_are_any(builder) as (then, otherwise):
            with then:
                places = _places(context, builder, sig.args[1], args[1], _I64(0), number // 2)
                _on_sums(builder, places, f"wgmma.wait_group.sync.aligned {code};", [])
            with otherwise:
                _trap(builder)
        return context.get_dummy_value()

    return types.void(count, acc, columns), codegen
