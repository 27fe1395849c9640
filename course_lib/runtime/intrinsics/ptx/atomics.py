"""Machine code of `intrinsics.atomics`, as `base` has that of `intrinsics` itself."""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from course_lib.runtime.intrinsics.ptx.base import (
    _F32,
    _I64,
    _check_local,
    _element_pointer,
    _since,
)
from course_lib.runtime.intrinsics.ptx.words import _local

_FOUR = (
    "{ .reg .u64 a; cvta.to.global.u64 a, $0; red.global.add.v4.f32 [a], {$1, $2, $3, $4}; }"
)
_ONE = "{ .reg .u64 a; cvta.to.global.u64 a, $0; red.global.add.f32 [a], $1; }"


@intrinsic
def add_four(typingctx, array, i, source, k):
    if not isinstance(array, types.Array) or array.dtype != types.float32:
        raise TypeError(f"add_four adds to an array of float32, not {array}")
    _check_local(source, "add_four")

    def codegen(context, builder, sig, args):
        pointer = _element_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        place = _local(context, builder, sig.args[2], args[2], sig.args[3], args[3])
        values = [builder.load(place(number)) for number in range(4)]

        def add(code, at, *numbers):
            at = builder.ptrtoint(at, _I64)
            kind = ir.FunctionType(ir.VoidType(), [_I64, *[_F32] * len(numbers)])
            operands = ",".join(["l", *"f" * len(numbers), "~{memory}"])
            builder.asm(kind, code, operands, [at, *numbers], True)

        with builder.if_else(_since(builder, 900)) as (then, otherwise):
            with then:
                add(_FOUR, pointer, *values)
            with otherwise:
                for number, value in enumerate(values):
                    add(_ONE, builder.gep(pointer, [_I64(number)]), value)
        return context.get_dummy_value()

    return types.void(array, i, source, k), codegen
