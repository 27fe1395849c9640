"""Machine code of `intrinsics.warpgroup`, as `base` has that of `intrinsics` itself."""

from llvmlite import ir
from numba.cuda import cgutils, cudaimpl, types
from numba.cuda.cudadrv import nvvm
from numba.cuda.extending import intrinsic
from numba.cuda.np import arrayobj

from course_lib.runtime.intrinsics.ptx.base import _F32, _I32, _I64, _check, _check_local, _since
from course_lib.runtime.intrinsics.ptx.matrix import _places, _shared_address, _trap
from course_lib.runtime.intrinsics.ptx.shared import _STAND_IN
from course_lib.runtime.intrinsics.ptx.words import _of_literals

BOUNDARY, PANEL_BYTES = 1024, 8192
MOST_COLUMNS = 256
STEPS = 4  # instructions for 128 bytes along k
_NOTHING = ir.FunctionType(ir.VoidType(), [])
# k of one instruction, and what its operands are made of.
_KINDS = {
    types.float32: "k8.f32.tf32.tf32",
    types.float16: "k16.f32.f16.f16",
    types.bfloat16: "k16.f32.bf16.bf16",
}
# Of a tile's descriptor, all but where the tile begins: chunks of 16 bytes change places in rows of
# 128 bytes (bits 62 to 63); 1024 bytes further on are the next eight rows, or by rows the next
# eight k (bits 32 to 45, in units of 16), and 8192 the next panel (bits 16 to 29; without panels
# they have no meaning).
_DESCRIPTOR = 1 << 62 | (BOUNDARY >> 4) << 32 | (PANEL_BYTES >> 4) << 16
# How much further, in units of 16 bytes, the numbers for the next instruction begin.
_STEP, _STEP_BY_ROW = 32 >> 4, 16 * 128 >> 4


def _code(dtype, columns, by_row, afresh=False):
    """PTX of the product: it is begun, and a group of its own to wait for.

    `afresh`: of sums from 0 on, which are no operands then.
    """
    kind, flags, steps = _KINDS[dtype], "1, 1", [_STEP, _STEP]
    if dtype != types.float32:
        by_rows = [by_row >> side & 1 for side in (0, 1)]
        flags += "".join(f", {flag}" for flag in by_rows)
        steps = [_STEP_BY_ROW if flag else _STEP for flag in by_rows]
    sums = ", ".join(f"${r}" for r in range(columns // 2))
    a = columns // 2 if afresh else columns
    b = a + 1
    lines = ["{", ".reg .pred all;", ".reg .b64 a, b;", "setp.eq.u32 all, 0, 0;"]
    if afresh:
        lines += [".reg .pred none;", "setp.ne.u32 none, 0, 0;"]
    lines.append("wgmma.fence.sync.aligned;")
    for n in range(STEPS):
        lines += [f"add.s64 a, ${a}, {n * steps[0]};", f"add.s64 b, ${b}, {n * steps[1]};"]
        add = "none" if afresh and n == 0 else "all"
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}{kind} {{{sums}}}, a, b, {add}, {flags};"
        )
    lines += ["wgmma.commit_group.sync.aligned;", "}"]
    return "\n".join(lines)


def _check_columns(columns, name):
    """The number of columns, a literal."""
    if not isinstance(columns, types.IntegerLiteral):
        raise TypeError(f"{name} needs a constant number of columns, not {columns}")
    number = columns.literal_value
    if number % 8 or not 8 <= number <= MOST_COLUMNS:
        raise TypeError(f"{name} takes 8, 16 … {MOST_COLUMNS} columns, not {number}")
    return number


def _on_sums(builder, places, code, arguments, afresh=False):
    """Run `code` on the sums at `places`, which it finds in its first operands and leaves there.

    `afresh`: it leaves them there, and does not ask what they were.
    """
    count = len(places)
    sums = [] if afresh else [builder.load(place) for place in places]
    kind = ir.FunctionType(
        ir.LiteralStructType([_F32] * count), [value.type for value in (*sums, *arguments)]
    )
    operands = ["=f"] * count + [str(r) for r in range(len(sums))] + ["l"] * len(arguments)
    constraints = ",".join([*operands, "~{memory}"])
    found = builder.asm(kind, code, constraints, [*sums, *arguments], True)
    found.attributes.add("convergent")
    for r, place in enumerate(places):
        builder.store(builder.extract_value(found, r), place)


def _where_there_are_any(builder):
    """A branch for the one generation of chips that has the instruction; the others trap."""
    here = builder.and_(_since(builder, 900), builder.not_(_since(builder, 1000)))
    return builder.if_else(here)


@_of_literals
def multiply_tiles(typingctx, acc, tiles, i, j, columns, by_row):
    _check(tiles, "multiply_tiles")
    _check_local(acc, "multiply_tiles")
    number = _check_columns(columns, "multiply_tiles")
    if not isinstance(by_row, types.IntegerLiteral):
        raise TypeError(f"multiply_tiles needs a constant by_row, not {by_row}")
    if by_row.literal_value and tiles.dtype == types.float32:
        raise TypeError(f"tiles by rows are of 16-bit numbers, not {tiles.dtype}")
    codegen = _product(number, _code(tiles.dtype, number, by_row.literal_value))
    return types.void(acc, tiles, i, j, columns, by_row), codegen


@_of_literals
def multiply_halves(typingctx, acc, tiles, i, j, columns):
    _check(tiles, "multiply_halves")
    _check_local(acc, "multiply_halves")
    number = _check_columns(columns, "multiply_halves")
    codegen = _product(number, _code(types.bfloat16, number, 0, afresh=True), afresh=True)
    return types.void(acc, tiles, i, j, columns), codegen


def _product(number, code, afresh=False):
    """Machine code of a product of `number` columns; arguments: sums, tiles, and where they are."""

    def codegen(context, builder, sig, args):
        def descriptor(position):
            address = _shared_address(
                context, builder, sig.args[1], args[1], sig.args[position], args[position]
            )
            start = builder.and_(builder.lshr(address, _I32(4)), _I32(0x3FFF))
            return builder.or_(builder.zext(start, _I64), _I64(_DESCRIPTOR))

        with _where_there_are_any(builder) as (then, otherwise):
            with then:
                places = _places(context, builder, sig.args[0], args[0], _I64(0), number // 2)
                _on_sums(builder, places, code, [descriptor(2), descriptor(3)], afresh)
            with otherwise:
                _trap(builder)
        return context.get_dummy_value()

    return codegen


@intrinsic
def wait_for_earlier_products(typingctx):
    def codegen(context, builder, sig, args):
        with _where_there_are_any(builder) as (then, otherwise):
            with then:
                # Nobody may touch the sums, so that it need not know them.
                builder.asm(_NOTHING, "wgmma.wait_group.sync.aligned 1;", "~{memory}", [], True)
            with otherwise:
                _trap(builder)
        return context.get_dummy_value()

    return types.void(), codegen


@_of_literals
def wait_for_products(typingctx, acc, columns):
    _check_local(acc, "wait_for_products")
    number = _check_columns(columns, "wait_for_products")

    def codegen(context, builder, sig, args):
        with _where_there_are_any(builder) as (then, otherwise):
            with then:
                places = _places(context, builder, sig.args[0], args[0], _I64(0), number // 2)
                _on_sums(builder, places, "wgmma.wait_group.sync.aligned 0;", [])
            with otherwise:
                _trap(builder)
        return context.get_dummy_value()

    return types.void(acc, columns), codegen


@intrinsic
def show_to_products(typingctx):
    def codegen(context, builder, sig, args):
        with builder.if_then(_since(builder, 900)):
            builder.asm(_NOTHING, "fence.proxy.async.shared::cta;", "~{memory}", [], True)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def tiles_in_shared(typingctx, like):
    _check(like, "tiles_in_shared")
    array_type = types.Array(like.dtype, 1, "C")
    stand_in = _STAND_IN[like.dtype]

    def codegen(context, builder, sig, args):
        value = cudaimpl._generic_array(
            context, builder, shape=(0,), dtype=stand_in,
            symbol_name="course_lib_tiles_in_shared", addrspace=nvvm.ADDRSPACE_SHARED,
            can_dynsized=True, alignment=BOUNDARY,
        )  # fmt: skip
        raw = arrayobj.make_array(types.Array(stand_in, 1, "C"))(context, builder, value)
        found = arrayobj.make_array(array_type)(context, builder)
        arrayobj.populate_array(
            found,
            data=builder.bitcast(raw.data, found.data.type),
            shape=cgutils.unpack_tuple(builder, raw.shape),
            strides=cgutils.unpack_tuple(builder, raw.strides),
            itemsize=raw.itemsize,
            meminfo=None,
        )
        return found._getvalue()

    return array_type(like), codegen
