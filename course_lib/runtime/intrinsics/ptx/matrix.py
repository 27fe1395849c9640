"""Machine code of `intrinsics.matrix`, as `base` has that of `intrinsics` itself."""

import itertools

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic
from numba.cuda.np import arrayobj

from course_lib.runtime.intrinsics.ptx.base import (
    _BYTES,
    _F32,
    _I16,
    _I32,
    _I64,
    VECTOR_BYTES,
    _check,
    _element_pointer,
    _since,
)

_NOTHING = ir.VoidType()
_KINDS = {
    types.float32: "m16n8k8.row.col.f32.tf32.tf32.f32",
    types.float16: "m16n8k16.row.col.f32.f16.f16.f32",
    types.bfloat16: "m16n8k16.row.col.f32.bf16.bf16.f32",
}
_HALF_OF_K = "m16n8k8.row.col.f32.f16.f16.f32"  # on sm_75, which has float16 alone
_LOAD = "ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0,$1,$2,$3}}, [$4];"
# A shared array may be written again, or not be written yet: these stay where they are.
_ORDERED = ",~{memory}"
_COPY = "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;"
_COPY_ONE = "cp.async.ca.shared.global [$0], [$1], 4, $2;"


def _places(context, builder, array_type, array, index, count):
    """Pointers to `count` elements of a local array from `index` on."""
    base = arrayobj.make_array(array_type)(context, builder, array).data
    return [builder.gep(base, [builder.add(index, _I64(r))]) for r in range(count)]


def _check_words(array, name):
    if not isinstance(array, types.Array) or array.dtype != types.uint32:
        raise TypeError(f"{name} needs a local array of uint32, not {array}")


def _in_space(builder, pointer, space):
    return builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, space))


def _shared_address(context, builder, array_type, array, index_type, index):
    """The 32-bit address of an element of a shared array."""
    if array_type.ndim != 1 or array_type.layout != "C":
        raise TypeError(f"expected a contiguous one-dimensional array, not {array_type}")
    view = arrayobj.make_array(array_type)(context, builder, array)
    base = builder.trunc(builder.ptrtoint(_in_space(builder, view.data, 3), _I64), _I32)
    index = builder.trunc(context.cast(builder, index, index_type, types.int64), _I32)
    return builder.add(base, builder.mul(index, _I32(_BYTES[array_type.dtype])))


def _several(builder, code, constraints, arguments, result, count, ordered):
    """Inline PTX that gives `count` registers of the type `result`."""
    kind = ir.LiteralStructType([result] * count)
    letter = "=f" if result == _F32 else "=r"
    outputs = ",".join([letter] * count)
    found = builder.asm(
        ir.FunctionType(kind, [argument.type for argument in arguments]), code,
        f"{outputs},{constraints}", arguments, ordered,
    )  # fmt: skip
    found.attributes.add("convergent")
    return [builder.extract_value(found, r) for r in range(count)]


def _product(builder, kind, a, b, sums):
    """sums + A·B, in registers: PTX mma.sync."""
    numbers = itertools.count()
    registers = (
        f"{{{','.join(f'${next(numbers)}' for _ in part)}}}" for part in (sums, a, b, sums)
    )
    code = f"mma.sync.aligned.{kind} {', '.join(registers)};"
    constraints = ",".join(["r"] * (len(a) + len(b)) + ["f"] * len(sums))
    return _several(builder, code, constraints, [*a, *b, *sums], _F32, len(sums), False)


def _trap(builder):
    builder.asm(ir.FunctionType(_NOTHING, []), "trap;", "", [], True)


def _check_product(acc, a, b, name):
    _check_words(a, name)
    _check_words(b, name)
    if not isinstance(acc, types.Array) or acc.dtype != types.float32:
        raise TypeError(f"{name} needs a local array of float32 to add to, not {acc}")


def _multiplying(dtype):
    """Code for acc[c : c+4] += A·B of numbers of a dtype, by the arguments acc, c, a, i, b, j."""

    def codegen(context, builder, sig, args):
        def registers(position, count):
            index = context.cast(builder, args[position + 1], sig.args[position + 1], types.int64)
            return _places(context, builder, sig.args[position], args[position], index, count)

        targets = registers(0, 4)

        def multiply(kind, n_words):  # of B at a time, and twice as many of A
            places = [*registers(2, 4), *registers(4, 2), *targets]
            operands = [builder.load(place) for place in places]
            a, b, sums = operands[:4], operands[4:6], operands[6:]
            for k in range(0, 2, n_words):
                ends = 2 * (k + n_words), k + n_words
                sums = _product(builder, kind, a[2 * k : ends[0]], b[k : ends[1]], sums)
            for place, value in zip(targets, sums, strict=True):
                builder.store(value, place)

        with builder.if_else(_since(builder, 800)) as (then, otherwise):
            with then:
                multiply(_KINDS[dtype], 2)
            with otherwise:
                if dtype == types.float16:
                    multiply(_HALF_OF_K, 1)
                else:
                    _trap(builder)
        return context.get_dummy_value()

    return codegen


@intrinsic
def multiply_add(typingctx, acc, c, a, i, b, j, like):
    _check(like, "multiply_add")
    _check_product(acc, a, b, "multiply_add")
    return types.void(acc, c, a, i, b, j, like), _multiplying(like.dtype)


def _load_codegen(array, trans):
    code = _LOAD.format(trans=trans)

    def codegen(context, builder, sig, args):
        index = context.cast(builder, args[1], sig.args[1], types.int64)
        places = _places(context, builder, sig.args[0], args[0], index, 4)
        address = _shared_address(context, builder, array, args[2], sig.args[3], args[3])
        found = _several(builder, code, f"r{_ORDERED}", [address], _I32, 4, True)
        for place, value in zip(places, found, strict=True):
            builder.store(value, place)
        return context.get_dummy_value()

    return codegen


@intrinsic
def load_matrices(typingctx, target, k, array, i):
    _check(array, "load_matrices")
    _check_words(target, "load_matrices")
    return types.void(target, k, array, i), _load_codegen(array, "")


@intrinsic
def load_matrices_transposed(typingctx, target, k, array, i):
    _check(array, "load_matrices_transposed")
    _check_words(target, "load_matrices_transposed")
    if array.dtype == types.float32:
        raise TypeError(f"load_matrices_transposed takes 16-bit arrays, not {array}")
    return types.void(target, k, array, i), _load_codegen(array, ".trans")


@intrinsic
def load_word(typingctx, array, i):
    if not isinstance(array, types.Array) or array.dtype != types.float32:
        raise TypeError(f"load_word takes an array of float32, not {array}")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        return builder.load(builder.bitcast(pointer, ir.PointerType(_I32)))

    return types.uint32(array, i), codegen


@intrinsic
def round_tf32(typingctx, word):
    def codegen(context, builder, sig, args):
        number = context.cast(builder, args[0], sig.args[0], types.uint32)
        result = cgutils.alloca_once(builder, _I32)

        def convert(rounding):
            kind, code = ir.FunctionType(_I32, [_F32]), f"cvt.{rounding}.tf32.f32 $0, $1;"
            value = builder.bitcast(number, _F32)
            builder.store(builder.asm(kind, code, "=r,f", [value], False), result)

        with builder.if_else(_since(builder, 900)) as (newest, older):
            with newest:
                convert("rn")  # one instruction, where the other way of rounding takes two
            with older, builder.if_else(_since(builder, 800)) as (then, otherwise):
                with then:
                    convert("rna")
                with otherwise:
                    _trap(builder)
                    builder.store(number, result)
        return builder.load(result)

    return types.uint32(word), codegen


@intrinsic
def subtract_words(typingctx, word, other):
    def codegen(context, builder, sig, args):
        numbers = [
            builder.bitcast(context.cast(builder, arg, kind, types.uint32), _F32)
            for arg, kind in zip(args, sig.args, strict=True)
        ]
        return builder.bitcast(builder.fsub(*numbers), _I32)

    return types.uint32(word, other), codegen


def _check_copy(target, source, name):
    _check(target, name)
    if getattr(source, "dtype", None) != target.dtype:
        raise TypeError(f"{name} takes two arrays of one dtype, not {target} and {source}")


def _copy(builder, code, shared, pointer, n_bytes):
    origin = builder.ptrtoint(_in_space(builder, pointer, 1), _I64)
    kind = ir.FunctionType(_NOTHING, [_I32, _I64, _I32])
    builder.asm(kind, code, f"r,l,r{_ORDERED}", [shared, origin, n_bytes], True)


@intrinsic
def copy_part_async(typingctx, target, i, source, j, n):
    _check_copy(target, source, "copy_part_async")
    size = _BYTES[source.dtype]
    word = _I32 if size == 4 else _I16

    def codegen(context, builder, sig, args):
        to = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        origin = _element_pointer(context, builder, sig.args[2], args[2], sig.args[3], args[3])
        count = builder.trunc(context.cast(builder, args[4], sig.args[4], types.int64), _I32)
        with builder.if_else(_since(builder, 800)) as (then, otherwise):
            with then:
                shared = _shared_address(
                    context, builder, sig.args[0], args[0], sig.args[1], args[1]
                )
                _copy(builder, _COPY, shared, origin, builder.mul(count, _I32(size)))
            with otherwise:
                words = ir.PointerType(word)
                for k in range(VECTOR_BYTES // size):
                    place = builder.gep(builder.bitcast(to, words), [_I64(k)])
                    builder.store(word(0), place)
                    with builder.if_then(builder.icmp_signed("<", _I32(k), count)):
                        found = builder.gep(builder.bitcast(origin, words), [_I64(k)])
                        builder.store(builder.load(found), place)
        return context.get_dummy_value()

    return types.void(target, i, source, j, n), codegen


@intrinsic
def copy_one_async(typingctx, target, i, source, j, present):
    _check_copy(target, source, "copy_one_async")
    word = _I32 if source.dtype == types.float32 else _I16

    def codegen(context, builder, sig, args):
        to = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        origin = _element_pointer(context, builder, sig.args[2], args[2], sig.args[3], args[3])
        wanted = context.cast(builder, args[4], sig.args[4], types.boolean)

        def by_register():
            words = ir.PointerType(word)
            place = builder.bitcast(to, words)
            with builder.if_else(wanted) as (some, none):
                with some:
                    builder.store(builder.load(builder.bitcast(origin, words)), place)
                with none:
                    builder.store(word(0), place)

        if word == _I16:
            by_register()
            return context.get_dummy_value()
        with builder.if_else(_since(builder, 800)) as (then, otherwise):
            with then:
                shared = _shared_address(
                    context, builder, sig.args[0], args[0], sig.args[1], args[1]
                )
                n_bytes = builder.select(wanted, _I32(4), _I32(0))
                _copy(builder, _COPY_ONE, shared, origin, n_bytes)
            with otherwise:
                by_register()
        return context.get_dummy_value()

    return types.void(target, i, source, j, present), codegen
