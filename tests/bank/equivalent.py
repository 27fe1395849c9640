"""Mutants that are right as well, each with the reason. They must pass the check."""

_ZERO = "both formulas give 1/2 at 0"
_SAME_SUM = "several threads write the result, all of them the same one: harmless"
_MORE_SHARED = "shared memory that nobody uses does no harm"
_WHOLE_WARPS = "blocks are whole warps, so both have the same remainder by 32"
_MAX_TWICE = "some elements are compared twice, which changes no maximum"
_SAME_WARPS = "a block has few warps, and they are whole: both divisions count as many"
_BY_ZERO = "v is 0 or 1, and a whole number divided by 0 is 0 in a kernel"
_ANY_LANE = "all 32 lanes have the sum, or have been waited for, so any one of them may do it"
_OTHER_BUTTERFLY = "2, 3, 5, 9 and 17 bring every lane to every other one exactly once as well"
_MORE_THREADS = "the kernels that it launches have a guard, so that more threads do no harm"
_ZEROS = "a round without any term adds zeros"
_CHANGED_OVER = "as many threads in other blocks: right, and slower on a GPU"
_OTHER_THREADS = "rows and columns of threads changed over: right, with worse access"
_ZEROED = "more is set to 0 than is used, which does no harm"

#: (exercise, name of the mutant): why it is right.
EQUIVALENT = {
    ("sigmoid", "relax: x[i] >= 0 → x[i] > 0"): _ZERO,
    ("swish_backward", "relax: x[i] >= 0 → x[i] > 0"): _ZERO,
    ("histogram_shared", "change constant: 256 → 257"): _MORE_SHARED,
    ("block_sum", "change constant: 256 → 257"): _MORE_SHARED,
    ("histogram_shared", "change range: range(cuda.threadIdx.x, 256, cuda.blockDim.x) → "
     "range(cuda.threadIdx.x, 256, 1)"): (
        "several threads set a counter to 0 before the barrier: harmless"
    ),
    ("block_sum", "drop guard: if t == 0"): _SAME_SUM,
    ("block_sum", "negate: if t == 0"): _SAME_SUM,
    ("global_avg_pool", "drop guard: if t == 0"): _SAME_SUM,
    ("global_avg_pool", "negate: if t == 0"): _SAME_SUM,
    ("block_sum", "change constant: 0 → 1, again, again"): (
        "after the last barrier any one thread may write the result, and thread 1 always exists"
    ),
    ("warp_sum", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("warp_sum", "change shuffle: cuda.shfl_down_sync(4294967295, total, step) → "
     "cuda.shfl_xor_sync(4294967295, total, step)"): (
        "the butterfly: every lane gets the sum, lane 0 too"
    ),
    ("global_avg_pool", "change constant: 256 → 257"): _MORE_SHARED,
    ("global_avg_pool", "change constant: 0 → 1, again, again"): (
        "after the last barrier any one thread may write the result, and thread 1 always exists"
    ),
    ("softmax_shared", "change constant: 256 → 257"): _MORE_SHARED,
    ("softmax_shared", "change range: range(t, n_cols, cuda.blockDim.x) → "
     "range(t, n_cols, 1)"): _MAX_TWICE,
    ("softmax_shared", "assume launch: cuda.blockDim.x → 32"): _MAX_TWICE,
    ("softmax_warp", "change range: range(lane, x.shape[1], 32) → "
     "range(lane, x.shape[1], 1)"): _MAX_TWICE,
    ("softmax_warp", "change constant: 32 → 31, again, again"): _MAX_TWICE,
    ("softmax_warp", "change range: range(5) → range(0, 6, 1)"): _MAX_TWICE,
    ("softmax_warp", "change constant: 5 → 6"): _MAX_TWICE,
    ("softmax_warp", "change shuffle: cuda.shfl_xor_sync(4294967295, largest, 1 << k) → "
     "cuda.shfl_xor_sync(4294967295, largest, (1 << k) + 1)"): _OTHER_BUTTERFLY,
    ("softmax_warp", "change shuffle: cuda.shfl_xor_sync(4294967295, total, 1 << k) → "
     "cuda.shfl_xor_sync(4294967295, total, (1 << k) + 1)"): _OTHER_BUTTERFLY,
    ("softmax_warp", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("softmax_online", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("blocks_per_multiprocessor", "change constant: 16384 → 16385"): (
        "a warp's registers are a multiple of 256, which goes into both as often"
    ),
    ("softmax_registers", "change operator: 32 * v → 32 // v"): _BY_ZERO,
    ("softmax_registers", "change operator: 32 * v → 32 // v, again"): _BY_ZERO,
    ("softmax_registers", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("softmax_teams", "assume launch: cuda.grid(1) → cuda.threadIdx.x, again"): (
        "a block is whole warps, so it begins with the first lane of a team"
    ),
    ("softmax_teams", "change constant: 0 → -1, again"): (
        "no column is below 0, nor below -1"
    ),
    ("softmax_teams", "change range: range(SLOTS) → range(0, SLOTS + 1, 1), again, again"): (
        "no row is long enough for a ninth number per lane"
    ),
    ("softmax_backward", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("cross_entropy", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("cross_entropy", "change constant: 0 → 1"): (
        "after the butterfly every lane has the result, so lane 1 may write it"
    ),
    ("cross_entropy_backward", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("bn_relu_softmax", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("bn_relu_softmax", "change range: range(SLOTS) → range(0, SLOTS + 1, 1), again, again"): (
        "no row is long enough for a fifth number per lane"
    ),
    ("softmax_dropout_backward", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("squeeze", "change constant: 8 → 9"): _MORE_SHARED,
    ("squeeze", "change constant: 32 → 33"): _MORE_SHARED,
    ("squeeze", "assume launch: cuda.threadIdx.x → cuda.grid(1), again"): _WHOLE_WARPS,
    ("squeeze", "assume launch: cuda.blockDim.x → 32"): (
        "the first warp reads all pixels, and only its sum is used: the others work in vain"
    ),
    ("squeeze", "change constant: 32 → 31, again, again, again"): _SAME_WARPS,
    ("squeeze_excite_fused", "change constant: 0 → 1"): _ANY_LANE,
    ("squeeze_excite_fused", "change constant: 0 → 1, again"): _ANY_LANE,
    ("squeeze_excite_backward", "change constant: 0 → 1"): _ANY_LANE,
    ("squeeze_excite_backward", "assume launch: cuda.threadIdx.x → cuda.grid(1), again"): (
        _WHOLE_WARPS
    ),
    ("squeeze_excite_backward", "change constant: 32 → 31, again, again"): _SAME_WARPS,
    ("squeeze_excite_backward", "change constant: 32 → 31, again, again, again"): _SAME_WARPS,
    ("hard_gate_backward", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("hard_gate_backward", "change constant: 0 → 1"): (
        "after the butterfly every lane has the sum, so lane 1 may write it"
    ),
    ("conv2d_tiled", "swap indices: row, col = (t // TILE, t % TILE) → "
     "col, row = (t // TILE, t % TILE)"): _OTHER_THREADS,
    ("conv2d_tiled", "drop operand: TILE * TILE → TILE"): (
        "several threads fetch the same pixel, and write the same number: harmless"
    ),
    ("implicit_gemm", "swap indices: row, col, total = (cuda.threadIdx.x // TILE, "
     "cuda.threadIdx.x % TILE, ZERO) → col, row, total = (cuda.threadIdx.x // TILE, "
     "cuda.threadIdx.x % TILE, ZERO)"): _OTHER_THREADS,
    ("implicit_gemm", "assume launch: cuda.threadIdx.x → cuda.grid(1), again"): (
        "blocks have 64 threads, so both have the same remainder by 8"
    ),
    ("implicit_gemm", "change range: range(0, n_terms, TILE) → range(0, n_terms + 1, TILE)"): (
        _ZEROS
    ),
    ("conv2d_dweight", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("conv2d_dweight", "change constant: 0 → 1, again, again"): _ANY_LANE,
    ("conv2d_dbias", "change constant: 8 → 9"): _MORE_SHARED,
    ("conv2d_dbias", "drop guard: if t % 32 == 0"): _ANY_LANE,
    ("conv2d_dbias", "negate: if t % 32 == 0"): _ANY_LANE,
    ("conv2d_dbias", "change constant: 32 → 33"): _ANY_LANE,
    ("conv2d_dbias", "change constant: 32 → 31"): _ANY_LANE,
    ("conv2d_dbias", "change constant: 0 → 1"): _ANY_LANE,
    ("conv2d_dbias", "change constant: 32 → 31, again"): _SAME_WARPS,
    ("conv2d_dbias", "change constant: 0 → 1, again"): (
        "after the barrier any one thread may add up, and thread 1 always exists"
    ),
    ("conv2d_dbias", "change constant: 32 → 31, again, again"): _SAME_WARPS,
    ("transposed_by_dx", "shift index: conv2d_dx[blocks(y.size), BLOCK] → "
     "conv2d_dx[blocks(y.size) + 1, BLOCK]"): _MORE_THREADS,
    ("transposed_by_dx", "shift index: conv2d_dx[blocks(y.size), BLOCK] → "
     "conv2d_dx[blocks(y.size), BLOCK + 1]"): _MORE_THREADS,
    ("transposed_by_dx", "swap indices: conv2d_dx[blocks(y.size), BLOCK] → "
     "conv2d_dx[BLOCK, blocks(y.size)]"): _CHANGED_OVER,
    ("transposed_backward", "shift index: conv2d_direct[blocks(dx.size), BLOCK] → "
     "conv2d_direct[blocks(dx.size) + 1, BLOCK]"): _MORE_THREADS,
    ("transposed_backward", "shift index: conv2d_direct[blocks(dx.size), BLOCK] → "
     "conv2d_direct[blocks(dx.size), BLOCK + 1]"): _MORE_THREADS,
    ("transposed_backward", "swap indices: conv2d_direct[blocks(dx.size), BLOCK] → "
     "conv2d_direct[BLOCK, blocks(dx.size)]"): _CHANGED_OVER,
    ("transposed_backward", "shift index: conv2d_dweight[blocks(32 * dweight.size), BLOCK] → "
     "conv2d_dweight[blocks(32 * dweight.size) + 1, BLOCK]"): _MORE_THREADS,
    ("transposed_backward", "change constant: 32 → 33"): _MORE_THREADS,
    ("attention_scores", "swap indices: tx, ty, total = (cuda.threadIdx.x, cuda.threadIdx.y, "
     "ZERO) → ty, tx, total = (cuda.threadIdx.x, cuda.threadIdx.y, ZERO)"): _OTHER_THREADS,
    ("attention_scores", "change range: range(0, D, TILE) → range(0, D + 1, TILE)"): _ZEROS,
    ("attention_output", "swap indices: tx, ty, total = (cuda.threadIdx.x, cuda.threadIdx.y, "
     "ZERO) → ty, tx, total = (cuda.threadIdx.x, cuda.threadIdx.y, ZERO)"): _OTHER_THREADS,
    ("attention_output", "change range: range(0, S, TILE) → range(0, S + 1, TILE)"): _ZEROS,
    ("scaled_softmax", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("scaled_softmax", "change constant: 0 → 1"): _ANY_LANE,
    ("scaled_softmax_backward", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("attention", "swap indices: scores, weights = np.empty((2, B, H, T, S), np.float32) → "
     "weights, scores = np.empty((2, B, H, T, S), np.float32)"): (
        "two arrays of one shape, of which it does not matter which comes first"
    ),
    ("attention", "drop operand: -B * H * T * 32 // BLOCK → -B * H * T * 32"): _MORE_THREADS,
    ("attention", "change constant: 32 → 33"): _MORE_THREADS,
    (
        "attention",
        "shift index: scaled_softmax[n_blocks, BLOCK] → scaled_softmax[n_blocks + 1, BLOCK]",
    ): _MORE_THREADS,
    ("attention_streaming", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("attention_streaming", "change range: range(lane, D, 32) → range(lane, D, 1)"): _ZEROED,
    ("attention_streaming", "change range: range(lane, D, 32) → range(0, D, 32)"): _ZEROED,
    ("attention_streaming", "change shuffle: cuda.shfl_xor_sync(ALL, score, 1 << step) → "
     "cuda.shfl_xor_sync(ALL, score, (1 << step) + 1)"): _OTHER_BUTTERFLY,
    ("attention_streaming", "change constant: 0 → 1"): _ANY_LANE,
    **{(name, mutant): reason for name in ("flash_attention", "flash_attention_causal")
       for mutant, reason in {
        "assume launch: cuda.threadIdx.x → cuda.grid(1), again": (
            "blocks have 64 threads, so both have the same remainder by 8"
        ),
        "change range: range(col, D, TILE) → range(col, D, 1)": (
            "threads of a row write the same numbers of q, and set more to 0: harmless"
        ),
        "change constant: 0 → 1": "all 8 threads of a row have m and the sum: any may write",
    }.items()},
    ("flash_attention", "change range: range(0, S, TILE) → range(0, S + 1, TILE)"): (
        "a round without any key has weights of 0"
    ),
    ("flash_attention_causal", "drop operand: min(S, TILE * (cuda.blockIdx.x + 1) + S - T) → "
     "TILE * (cuda.blockIdx.x + 1) + S - T"): (
        "a round behind the last key has weights of 0 in every row that is written"
    ),
    ("attention_delta", "assume launch: cuda.threadIdx.x → cuda.grid(1)"): _WHOLE_WARPS,
    ("attention_delta", "change shuffle: cuda.shfl_xor_sync(ALL, total, 1 << step) → "
     "cuda.shfl_down_sync(ALL, total, 1 << step)"): "lane 0, which writes, gets the sum this way",
    ("attention_delta", "change shuffle: cuda.shfl_xor_sync(ALL, total, 1 << step) → "
     "cuda.shfl_xor_sync(ALL, total, (1 << step) + 1)"): _OTHER_BUTTERFLY,
    ("attention_delta", "change constant: 0 → 1"): _ANY_LANE,
    **{(name, mutant): reason for name in ("flash_attention_dkdv", "flash_attention_dq")
       for mutant, reason in {
        "swap indices: n, row, col = (cuda.blockIdx.y, cuda.threadIdx.x // TILE, "
        "cuda.threadIdx.x % TILE) → n, col, row = (cuda.blockIdx.y, cuda.threadIdx.x // TILE, "
        "cuda.threadIdx.x % TILE)": _OTHER_THREADS,
        "assume launch: cuda.threadIdx.x → cuda.grid(1), again": (
            "blocks have 64 threads, so both have the same remainder by 8"
        ),
        "change range: range(col, D, TILE) → range(col, D, 1)": _ZEROED,
        "change range: range(col, D, TILE) → range(0, D, TILE)": _ZEROED,
    }.items()},
    ("flash_attention_dkdv", "change range: range(max(0, top + T - S) // TILE * TILE, T, TILE) → "
     "range(max(0, top + T - S) // TILE * TILE, T + 1, TILE)"): (
        "a round without any query has weights of 0"
    ),
    ("flash_attention_dkdv", "swap indices: i, weight, dscore = (first + col, ZERO, ZERO) → "
     "i, dscore, weight = (first + col, ZERO, ZERO)"): "both are 0",
    ("flash_attention_dkdv", "change constant: 0 → 1"): "1, rounded down to a tile, is 0",
    ("flash_attention_dq", "drop operand: min(S, top + TILE + S - T) → top + TILE + S - T"): (
        "a round behind the last key has dscores of 0 in every row that is written"
    ),
    ("ring_reduce_scatter", "swap dimension: x.shape[0] → x.shape[1]"): (
        "there are as many pieces as devices"
    ),
    ("ring_reduce_scatter", "swap dimension: x.shape[2] → x.shape[-1]"): "x has three axes",
    **{("ring_reduce_scatter", mutant): "a flag that is told once more than anybody waits for"
       for mutant in (
        "relax: step < ranks - 1 → step <= ranks - 1, again",
        "drop operand: ranks - 1 → ranks, again",
        "change operator: ranks - 1 → ranks + 1, again",
        "change constant: 1 → 0, again, again, again, again",
    )},
}  # fmt: skip
