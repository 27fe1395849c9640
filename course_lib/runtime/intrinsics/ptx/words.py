"""Machine code of `intrinsics.words`, as `base` has that of `intrinsics` itself."""

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import _Intrinsic, intrinsic

from course_lib.runtime.intrinsics.ptx.base import (
    _BYTES,
    _F32,
    _I16,
    _I32,
    _I64,
    _check,
    _check_local,
    _element_pointer,
    _from_bits,
    _pack,
    _since,
    _to_bits,
    arrayobj,
)

_SUFFIX = {types.float32: "f32", types.float16: "f16x2", types.bfloat16: "bf16x2"}
_LOWEST = {types.float32: 0xFF800000, types.float16: 0xFC00FC00, types.bfloat16: 0xFF80FF80}
_SIZES = {**_BYTES, types.uint8: 1}


def _of_literals(definition):
    """As `intrinsic`, which forgets its option `prefer_literal` (numba-cuda 0.30)."""
    made = _Intrinsic(definition.__name__, definition, prefer_literal=True)
    made._register()
    return made


def _check_access(array, n, name):
    """The bytes of an access to n elements of `array`, n a literal."""
    if not isinstance(array, types.Array) or array.dtype not in _SIZES:
        raise TypeError(f"{name} takes arrays of float32, float16, bfloat16 or uint8, not {array}")
    if not isinstance(n, types.IntegerLiteral):
        raise TypeError(f"{name} needs a constant number of elements, not {n}")
    n_bytes = n.literal_value * _SIZES[array.dtype]
    if n_bytes not in (1, 2, 4, 8) and (n_bytes % 16 or not n_bytes):
        raise TypeError(f"{name} moves 1, 2, 4, 8 or a multiple of 16 bytes, not {n_bytes}")
    return n_bytes


def _check_words(array, name):
    if not isinstance(array, types.Array) or array.dtype != types.uint32:
        raise TypeError(f"{name} needs a local array of uint32, not {array}")


def _local(context, builder, array_type, array, index_type, index):
    """Places of a local array from `index` on: a function of the distance."""
    data = arrayobj.make_array(array_type)(context, builder, array).data
    index = context.cast(builder, index, index_type, types.int64)
    return lambda k: builder.gep(data, [builder.add(index, _I64(k))])


def _pieces(builder, pointer, n_bytes):
    """A pointer to each access of up to 16 bytes, as (its words' places, pointer to its type)."""
    pointer = builder.bitcast(pointer, ir.PointerType(ir.IntType(8)))
    word = ir.IntType(8 * n_bytes) if n_bytes < 4 else ir.VectorType(_I32, min(n_bytes, 16) // 4)
    for start in range(0, n_bytes, 16):
        places = range(start // 4, start // 4 + (word.count if n_bytes >= 4 else 1))
        at = builder.gep(pointer, [_I64(start)])
        yield places, builder.bitcast(at, ir.PointerType(word))


def _read(builder, pointer, n_bytes):
    """Words from memory; fewer than 4 bytes are the low part of one."""
    words = []
    for places, at in _pieces(builder, pointer, n_bytes):
        found = builder.load(at, align=min(n_bytes, 16))
        if n_bytes < 4:
            return [builder.zext(found, _I32)]
        words += [builder.extract_element(found, _I32(k)) for k in range(len(places))]
    return words


def _write(builder, pointer, words, n_bytes):
    for places, at in _pieces(builder, pointer, n_bytes):
        kind = at.type.pointee
        if n_bytes < 4:
            whole = builder.trunc(words[0], kind)
        else:
            whole = ir.Constant(kind, ir.Undefined)
            for k, place in enumerate(places):
                whole = builder.insert_element(whole, words[place], _I32(k))
        builder.store(whole, at, align=min(n_bytes, 16))


@intrinsic
def lanes(typingctx, array):
    _check(array, "lanes")
    n = 4 // _BYTES[array.dtype]
    return types.int64(array), lambda context, builder, sig, args: _I64(n)


@intrinsic
def lowest_word(typingctx, array):
    _check(array, "lowest_word")
    word = _I32(_LOWEST[array.dtype])
    return types.uint32(array), lambda context, builder, sig, args: word


@_of_literals
def load_words(typingctx, target, k, array, i, n):
    n_bytes = _check_access(array, n, "load_words")
    _check_words(target, "load_words")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[2], args[2], sig.args[3], args[3])
        place = _local(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        words = _read(builder, pointer, n_bytes)
        if n_bytes == 2 and array.dtype != types.uint8:
            words = [builder.or_(words[0], builder.shl(words[0], _I32(16)))]
        for number, word in enumerate(words):
            builder.store(word, place(number))
        return context.get_dummy_value()

    return types.void(target, k, array, i, n), codegen


@_of_literals
def store_words(typingctx, array, i, source, n):
    n_bytes = _check_access(array, n, "store_words")
    _check_words(source, "store_words")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        place = _local(context, builder, sig.args[2], args[2], types.int64, _I64(0))
        words = [builder.load(place(k)) for k in range(-(-n_bytes // 4))]
        _write(builder, pointer, words, n_bytes)
        return context.get_dummy_value()

    return types.void(array, i, source, n), codegen


@_of_literals
def store_floats(typingctx, array, i, source, k, n):
    _check(array, "store_floats")
    _check_local(source, "store_floats")
    n_bytes = _check_access(array, n, "store_floats")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        place = _local(context, builder, sig.args[2], args[2], sig.args[3], args[3])
        values = [builder.load(place(number)) for number in range(n.literal_value)]
        if n_bytes == 2:
            words = [builder.zext(_to_bits(builder, array.dtype, values[0]), _I32)]
        else:
            words = _pack(builder, array.dtype, values)
        _write(builder, pointer, words, n_bytes)
        return context.get_dummy_value()

    return types.void(array, i, source, k, n), codegen


def _values(builder, dtype, word):
    """The lanes of a word as float32."""
    if dtype == types.float32:
        return [builder.bitcast(word, _F32)]
    if dtype == types.bfloat16:
        high = builder.and_(word, _I32(0xFFFF0000))
        return [builder.bitcast(w, _F32) for w in (builder.shl(word, _I32(16)), high)]
    halves = (builder.trunc(builder.lshr(word, _I32(shift)), _I16) for shift in (0, 16))
    return [_from_bits(builder, dtype, half) for half in halves]


@intrinsic
def as_float(typingctx, array, a, k):
    _check(array, "as_float")

    def codegen(context, builder, sig, args):
        word = context.cast(builder, args[1], sig.args[1], types.uint32)
        values = _values(builder, array.dtype, word)
        first = builder.icmp_signed("==", context.cast(builder, args[2], sig.args[2], types.int64),
                                    _I64(0))  # fmt: skip
        return builder.select(first, values[0], values[-1])

    return types.float32(array, a, k), codegen


@intrinsic
def as_word(typingctx, array, source, k):
    _check(array, "as_word")
    _check_local(source, "as_word")

    def codegen(context, builder, sig, args):
        place = _local(context, builder, sig.args[1], args[1], sig.args[2], args[2])
        n_lanes = 4 // _BYTES[array.dtype]
        return _pack(builder, array.dtype, [builder.load(place(n)) for n in range(n_lanes)])[0]

    return types.uint32(array, source, k), codegen


def _by_lanes(builder, dtype, a, b, choose, words):
    """What `choose(x, y, k)` gives for the lanes x, y of a and b: whether the first of `words`."""
    bits = 32 if dtype == types.float32 else 16
    yes, no = words
    result = _I32(0)
    pairs = zip(_values(builder, dtype, a), _values(builder, dtype, b), strict=True)
    for k, (x, y) in enumerate(pairs):
        chosen = builder.select(choose(x, y), yes, no)
        mask = ((1 << bits) - 1) << (bits * k)
        result = builder.or_(result, builder.and_(chosen, _I32(mask)))
    return result


def _since_or_else(builder, arch, fast, slow):
    """The word that `fast()` makes on chips of `arch` on, and `slow()` before."""
    result = cgutils.alloca_once(builder, _I32)
    with builder.if_else(_since(builder, arch)) as (then, otherwise):
        with then:
            builder.store(fast(), result)
        with otherwise:
            builder.store(slow(), result)
    return builder.load(result)


def _two_words(builder, code, a, b):
    kind = ir.FunctionType(_I32, [_I32, _I32])
    return builder.asm(kind, f"{code} $0, $1, $2;", "=r,r,r", [a, b], False)


@intrinsic
def largest(typingctx, array, a, b):
    _check(array, "largest")

    def larger(builder, x, y):
        above = builder.fcmp_ordered(">", x, y)
        return builder.or_(above, builder.fcmp_unordered("uno", x, x))

    def codegen(context, builder, sig, args):
        a, b = (context.cast(builder, args[k], sig.args[k], types.uint32) for k in (1, 2))
        return _since_or_else(
            builder,
            800,
            lambda: _two_words(builder, f"max.NaN.{_SUFFIX[array.dtype]}", a, b),
            lambda: _by_lanes(
                builder, array.dtype, a, b, lambda x, y: larger(builder, x, y), (a, b)
            ),
        )

    return types.uint32(array, a, b), codegen


def _mask(builder, dtype, comparison, a, b):
    """All bits of a lane where the comparison holds."""
    operator = {"eq": "==", "gt": ">"}[comparison]

    def slow():
        def holds(x, y):
            return builder.fcmp_ordered(operator, x, y)

        return _by_lanes(builder, dtype, a, b, holds, (_I32(0xFFFFFFFF), _I32(0)))

    if dtype == types.float32:
        return slow()
    code = f"set.{comparison}.u32.{_SUFFIX[dtype]}"
    return _since_or_else(builder, 900, lambda: _two_words(builder, code, a, b), slow)


@intrinsic
def where_equal(typingctx, array, a, b, yes, no):
    _check(array, "where_equal")

    def codegen(context, builder, sig, args):
        a, b, yes, no = (
            context.cast(builder, args[k], sig.args[k], types.uint32) for k in range(1, 5)
        )
        if array.dtype == types.float32:
            same = builder.fcmp_ordered("==", builder.bitcast(a, _F32), builder.bitcast(b, _F32))
            return builder.select(same, yes, no)
        mask = _mask(builder, array.dtype, "eq", a, b)
        return builder.or_(builder.and_(mask, yes), builder.and_(builder.not_(mask), no))

    return types.uint32(array, a, b, yes, no), codegen


@intrinsic
def ordinary(typingctx, array, a):
    _check(array, "ordinary")

    def codegen(context, builder, sig, args):
        word = context.cast(builder, args[1], sig.args[1], types.uint32)
        lowest = _I32(_LOWEST[array.dtype])
        if array.dtype == types.float32:
            return builder.fcmp_ordered(
                ">", builder.bitcast(word, _F32), builder.bitcast(lowest, _F32)
            )
        mask = _mask(builder, array.dtype, "gt", word, lowest)
        return builder.icmp_unsigned("==", mask, _I32(0xFFFFFFFF))

    return types.boolean(array, a), codegen


@intrinsic
def select_bytes(typingctx, a, b, selector):
    def codegen(context, builder, sig, args):
        words = [
            context.cast(builder, arg, kind, types.uint32)
            for arg, kind in zip(args, sig.args, strict=True)
        ]
        kind = ir.FunctionType(_I32, [_I32] * 3)
        return builder.asm(kind, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", words, False)

    return types.uint32(a, b, selector), codegen
