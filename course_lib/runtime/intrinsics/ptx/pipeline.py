"""Machine code of `intrinsics.pipeline`, as `base` has that of `intrinsics` itself."""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from course_lib.runtime.intrinsics.ptx.base import _I32, _since

MOST_GROUPS = 7
_NOTHING = ir.FunctionType(ir.VoidType(), [])


def _asm(builder, instruction):
    builder.asm(_NOTHING, f"{instruction};", "~{memory}", [], True)


@intrinsic
def end_group(typingctx):
    def codegen(context, builder, sig, args):
        with builder.if_then(_since(builder, 800)):
            _asm(builder, "cp.async.commit_group")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def wait_for_groups_but(typingctx, n):
    def codegen(context, builder, sig, args):
        count = context.cast(builder, args[0], sig.args[0], types.int32)
        with builder.if_then(_since(builder, 800)):
            # The instruction wants a constant: one for each that there may be.
            done = builder.append_basic_block("waited")
            most = builder.append_basic_block("most")
            choice = builder.switch(count, most)
            for number in range(MOST_GROUPS):
                block = builder.append_basic_block(f"but_{number}")
                choice.add_case(_I32(number), block)
                builder.position_at_end(block)
                _asm(builder, f"cp.async.wait_group {number}")
                builder.branch(done)
            builder.position_at_end(most)
            _asm(builder, f"cp.async.wait_group {MOST_GROUPS}")
            builder.branch(done)
            builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(n), codegen
