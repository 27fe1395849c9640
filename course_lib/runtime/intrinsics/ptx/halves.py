"""Machine code of `intrinsics.halves`, as `base` has that of `intrinsics` itself."""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from course_lib.runtime.intrinsics.ptx.base import _F32, _bfloat16_pair, _since
from course_lib.runtime.intrinsics.ptx.matrix import (
    _KINDS,
    _MULTIPLY,
    _check_words,
    _places,
    _several,
    _trap,
)


@intrinsic
def pack_halves(typingctx, low, high):
    def codegen(context, builder, sig, args):
        numbers = [
            builder.bitcast(context.cast(builder, arg, kind, types.uint32), _F32)
            for arg, kind in zip(args, sig.args, strict=True)
        ]
        return _bfloat16_pair(builder, *numbers)

    return types.uint32(low, high), codegen


@intrinsic
def multiply_add_halves(typingctx, acc, c, a, i, b, j):
    _check_words(a, "multiply_add_halves")
    _check_words(b, "multiply_add_halves")
    if not isinstance(acc, types.Array) or acc.dtype != types.float32:
        raise TypeError(f"multiply_add_halves needs a local array of float32, not {acc}")
    code = _MULTIPLY.format(kind=_KINDS[types.bfloat16])

    def codegen(context, builder, sig, args):
        def registers(position, count):
            index = context.cast(builder, args[position + 1], sig.args[position + 1], types.int64)
            return _places(context, builder, sig.args[position], args[position], index, count)

        targets = registers(0, 4)
        with builder.if_else(_since(builder, 800)) as (then, otherwise):
            with then:
                places = [*registers(2, 4), *registers(4, 2), *targets]
                operands = [builder.load(place) for place in places]
                constraints = ",".join(["r"] * 6 + ["f"] * 4)
                found = _several(builder, code, constraints, operands, _F32, 4, False)
                for place, value in zip(targets, found, strict=True):
                    builder.store(value, place)
            with otherwise:
                _trap(builder)
        return context.get_dummy_value()

    return types.void(acc, c, a, i, b, j), codegen
