"""Scaled dot-product attention: o = softmax(scale·q·kᵀ + …)·v, and the log-sum-exp of each query.

q is (B, H, T, D), k (B, G, S, D), v (B, G, S, E); G divides H, and H / G query heads share keys and
values (grouped-query and multi-query attention). float32, float16 or bfloat16 in and out, float32
in between; D and E up to 256. Any strides whose last axis has 1, such as (B, T, H, D) transposed.

2·B·H·T·S·(D + E) FLOPs forwards, and 2.5 times as many backwards. q, k, v and o must move; what a
rung moves beside them decides its speed:

============ =============================================== =================================
rung         what it does                                    beyond q, k, v and o it moves
============ =============================================== =================================
`separate`   scores, softmax and product, a kernel each      5 times B·H·T·S scores
`streaming`  a query a warp; keys come by, one by one        k and v, T / 4 times
`tiled`      a tile of queries a block; tiles of keys and    k and v, T / 64 times (T / 32, T / 16)
             values come by in shared memory
`tensor_core` the same with scores and sums in registers,    k and v, T / 128 times (T / 64)
             multiplied by `wgmma` or `mma.sync`, float32
             as three products of TF32 (from compute
             capability 8.0; before it float16 alone)
============ =============================================== =================================

No other than `separate` and `tensor_core/scores` stores a score: they keep a running maximum, a sum
and an output, and scale them down when a larger score comes. The backward pass has `separate`,
`tiled` and `tensor_core`, which compute the weights again from lse; three kernels (delta; dk and
dv; dq), no atomics: two runs agree bit for bit. Asked for by its name, `tensor_core/atomic` adds dq
up by atomics beside dk and dv, 5 products instead of 7 (compute capability 9.0; float16 and
bfloat16; D and E up to 128): it is faster, and two runs may differ in the last bits of dq.
`tensor_core/wide` is made for D and E of 129 to 256, deterministic as well (compute capability 9.0;
float16 and bfloat16). `tensor_core/scores` is `separate` with products by tensor cores, for float32
alone: AUTO takes it for most D or E beyond 64, of which others' tiles leave a multiprocessor few
warps, and where they would have few blocks, while scores take 512 MB at most (`plans.preferred`).
Of 16-bit rows that begin off 16-byte boundaries AUTO makes aligned copies first, where they are
worth it. `tiled` and `tensor_core` need shared memory for D and E beyond 128 (in float32,
backwards, beyond 64), which not every chip has; AUTO takes the next rung there.

Options (`forward`): causal from either corner, sliding window, key lengths, packed sequences,
boolean and additive masks (memory of a mask is quadratic), softcap, ALiBi, dropout. A query that
may look at nothing has o = 0, lse = −inf and gradients of 0. A key that a query may not look at
takes no part in its o, whatever its value is; `separate` alone multiplies it by 0, as PyTorch does.

Milakov, Gimelshein: Online normalizer calculation for softmax (2018); Dao et al.: FlashAttention
(2022) and FlashAttention-2 (2023). Derivation: notebooks 18 to 20.
"""

from course_lib.kernels.attention import (
    aligned_rows,
    launching,
    plans,
    products,
    score_products,
    separate,
    streaming,
    tiled,
)
from course_lib.kernels.attention import tiled_backward as backwards
from course_lib.kernels.attention.aligned_rows import aligned, copy_rows
from course_lib.kernels.attention.options import DTYPES, Request
from course_lib.kernels.attention.problem import Dropping, Look, Place, Shape
from course_lib.kernels.blocks.mma.warpgroup import ONLY
from course_lib.kernels.operation import AUTO, Ladder, Rung, Way
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of

FORWARD = Ladder(
    Rung("separate", ways=(
        Way("products", plans.plan_separate, launching.separate,
            (products.batched_kernel, separate.weights_kernel)),
    )),
    Rung("streaming", launching.streaming, (streaming.streaming_kernel,)),
    Rung("tiled", ways=(
        Way("queries", plans.plan_tiled, launching.tiled, plans.tiled_kernels),
    )),
    Rung("tensor_core", ways=(
        Way("warpgroup", plans.plan_warpgroup, launching.tensor_core,
            lambda: plans.kernels_of("warpgroup"), ONLY),
        Way("mma", plans.plan_mma, launching.tensor_core,
            lambda: plans.kernels_of("mma")),
        Way("split", plans.plan_split, launching.tensor_core,
            lambda: plans.kernels_of("split"), plans.TENSOR_CORES),
        Way("scores", plans.plan_scores, launching.separate,
            lambda: plans.kernels_of_scores(separate.weights_kernel), plans.TENSOR_CORES),
    ), prefer=plans.preferred),
    auto=("tensor_core", "tiled", "streaming"),
)  # fmt: skip
BACKWARD = Ladder(
    Rung("separate", ways=(
        Way("products", plans.plan_separate, launching.separate_backward,
            (products.batched_kernel, separate.gradients_kernel, backwards.delta_kernel,
             separate.mask_gradient_kernel)),
    )),
    Rung("tiled", ways=(
        Way("two_walks", plans.plan_tiled_backward, launching.tiled_backward,
            plans.tiled_backward_kernels),
    )),
    Rung("tensor_core", ways=(
        Way("warpgroup", plans.plan_warpgroup_backward, launching.tensor_core_backward,
            lambda: plans.backward_kernels_of("warpgroup"), ONLY),
        Way("mma", plans.plan_mma_backward, launching.tensor_core_backward,
            lambda: plans.backward_kernels_of("mma")),
        Way("split", plans.plan_split_backward, launching.tensor_core_backward,
            lambda: plans.backward_kernels_of("split"), plans.TENSOR_CORES),
        Way("atomic", plans.plan_atomic_backward, launching.atomic_backward,
            lambda: plans.backward_kernels_of("atomic"), ONLY),
        Way("wide", plans.plan_wide_backward, launching.wide_backward,
            lambda: plans.backward_kernels_of("wide"), ONLY),
        Way("scores", plans.plan_scores, launching.separate_backward,
            lambda: [*plans.kernels_of_scores(separate.gradients_kernel), backwards.delta_kernel,
                     separate.mask_gradient_kernel], plans.TENSOR_CORES),
    ), prefer=plans.preferred_backward),
    auto=("tensor_core", "tiled", "separate"),
)  # fmt: skip


def forward(q, k, v, *, variant=AUTO, out=None, **options):
    """(o, lse) of q (B, H, T, D), k (B, G, S, D) and v (B, G, S, E).

    scale        of q·k; 1 / √D by default
    causal       query i looks at keys up to i; with `lower_right` up to i + S − T, where S is its
                 own of `key_lengths`, if there are some
    window       (left, right): how many keys before and behind its own it looks at; None: all
    mask         broadcast to (B, H, T, S): bool, True where it may look; or of q's dtype, to be
                 added
    softcap      c > 0: scores become c·tanh(score / c), before anything is added to them
    slopes       ALiBi's, float32 (H,) or (B, H): slope·|distance| is subtracted
    key_lengths  int32 (B,): later keys are padding, and are not read
    q_starts, k_starts, max_q, max_k   packed sequences: q is (1, H, rows, D) and k (1, G, rows, D)
                 of all of them, int32 (n + 1,) say where each begins; no sequence is longer than
                 max_q and max_k
    dropout_p, seed, offset   dropout of the weights, element ((b·H + h)·T + i)·S + j of the mask
                 (T and S are max_q and max_k where sequences are packed)

    o is (B, H, T, E) with the dtype of q, and in memory by heads or by rows as q is; `out`, if
    given, receives it. lse is float32 (B, H, T). Raises ArrayError for wrong ranks, shapes, dtypes
    and devices; TypeError or ValueError for options that don't fit, for an unknown variant, and for
    one that can't take the problem.
    """
    request = Request(q, k, v, options)
    request.check_out(out)
    problem, chip = request.problem(out), chip_of(q)
    if variant == AUTO and aligned_rows.are_worth_it(FORWARD, request, problem, chip):
        found, lse = forward(*map(aligned, (q, k, v)), **options | {"scale": request.scale})
        return copy_rows(found, request.outputs(out)[0]), lse
    _, way, plan = FORWARD.choose(variant, problem, chip)
    o, lse = request.outputs(out)
    if request.has_work:
        way.launch(plan, request, (q, k, v), o, lse)
    return o, lse


def backward(do, q, k, v, o, lse, *, dlse=None, mask_gradient=False, variant=AUTO, **options):
    """(dq, dk, dv) from `do`, the gradient of o, and what `forward` was given and gave.

    dlse           the gradient of lse, if it has one
    mask_gradient  append the gradient of an additive mask, float32 of the mask's shape. It takes
                   memory for all B·H·T·S scores

    Gradients lie in memory as their tensors do. Raises as `forward` does.
    """
    request = Request(q, k, v, options)
    request.check_saved(do, o, lse, dlse, mask_gradient)
    problem, chip = request.problem(do=do), chip_of(q)
    if variant == AUTO and aligned_rows.are_worth_it(BACKWARD, request, problem, chip):
        given = options | dict(scale=request.scale, dlse=dlse, mask_gradient=mask_gradient)
        found = backward(*map(aligned, (do, q, k, v, o)), lse, **given)
        own = request.gradients(False)
        return *map(copy_rows, found, own), *found[3:]
    _, way, plan = BACKWARD.choose(variant, problem, chip)
    gradients = request.gradients(mask_gradient)
    if request.has_work:
        launching.launch_backward(way, plan, request, (do, q, k, v, o, lse, dlse), gradients)
    else:
        for each in gradients:
            arrays.fill(each, 0)
    return gradients


def default_choice(ladder, q, k, v, **options):
    """The `Choice` of AUTO for these; arguments as of `forward`."""
    return ladder.choose(AUTO, Request(q, k, v, options).problem(), chip_of(q))


def most_threads(label, chip):
    """Threads of the largest block that the kernel of this label is launched with."""
    if label.startswith("attention batched "):
        return products.N_THREADS
    if label.startswith("attention rows "):
        return 32 * aligned_rows.N_WARPS
    of_tiles = label.startswith(("attention tiled ", "attention dk, dv ", "attention dq "))
    return tiled.N_THREADS if of_tiles else separate.BLOCK_SIZE


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    floats, starts = ("float32", 1), ("int32", 1)
    after = [Look, Dropping]
    for dtype in DTYPES:
        x = (dtype, 1)
        see = [x, ("uint8", 1), floats, starts, starts]
        walk = [x, x, x, *see, x, floats, Shape, *[Place] * 4, *after]
        back = [x, x, x, x, *see, floats, floats]
        of_keys_types = [*back, x, x, Shape, *[Place] * 6, *after]
        of_queries_types = [*back, x, floats, Shape, *[Place] * 5, *after]
        adding_types = [*back, x, x, floats, floats, Shape, *[Place] * 6, *after]
        of_sums_types = [floats, starts, starts, x, Shape, Place, Look]
        yield (
            f"attention delta {dtype}",
            backwards.delta_kernel,
            [x, x, floats, floats, Shape, Place, Place, "int64", "boolean"],
        )
        yield f"attention streaming {dtype}", streaming.streaming_kernel, walk
        for shape in plans.FORWARD_TILES:
            name = "{}x{}, {}".format(*shape)
            yield f"attention tiled {name} {dtype}", tiled.kernel_for(*shape)[0], walk
        for shape in plans.BACKWARD_TILES:
            name = "{}x{}, {}".format(*shape)
            of_keys, of_queries, _ = backwards.kernels_for(*shape)
            yield f"attention dk, dv {name} {dtype}", of_keys, of_keys_types
            yield f"attention dq {name} {dtype}", of_queries, of_queries_types
        for way, label, kernel in plans.tensor_core_kernels():
            if (way == "split") == (dtype == "float32"):
                yield f"attention tensor_core {way} {label} {dtype}", kernel, walk
        for way, label, of_keys, of_queries in plans.tensor_core_backward_kernels():
            if (way == "split") == (dtype == "float32"):
                types = of_keys_types, of_queries_types
                if way == "atomic":
                    types = adding_types, of_sums_types
                label = f"{way} {label} {dtype}"
                yield f"attention tensor_core dk, dv {label}", of_keys, types[0]
                if way != "atomic" or "by element" not in label:  # they share one
                    yield f"attention tensor_core dq {label}", of_queries, types[1]
        if dtype != "float32":
            types = [x, x, *["int64"] * 5, Place, Place]
            yield f"attention rows {dtype}", aligned_rows.copy_rows_kernel, types
        saved, see = [Shape, *after], see[:-1]
        yield (
            f"attention weights, mask {dtype}",
            separate.weights_kernel,
            [floats, *see, floats, *saved, "int64"],
        )
        yield (
            f"attention gradients, mask {dtype}",
            separate.gradients_kernel,
            [floats, floats, *see, *[floats] * 3, *saved, "int64"],
        )
    types = [floats, floats, Shape, *["int64"] * 5]
    yield "attention mask gradient", separate.mask_gradient_kernel, types
    more = *products.specialisations(DTYPES), *score_products.specialisations()
    for label, kernel, types in more:
        yield f"attention {label}", kernel, types
