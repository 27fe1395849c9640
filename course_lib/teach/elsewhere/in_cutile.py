"""The online softmax in cuTile: a block for each row, which works on tiles of it."""

import cuda.tile as ct
import torch

TILE = 512  # columns that a block holds at a time: a power of two


@ct.kernel
def softmax_online(x, y, TILE: ct.Constant[int]):
    """Write the softmax of each row of x to y; both float32 of (rows, columns)."""
    row = ct.bid(0)
    m = ct.full((1, 1), float("-inf"), ct.float32)
    s = ct.full((1, 1), 0.0, ct.float32)
    for j in range(ct.num_tiles(x, 1, (1, TILE))):
        tile = ct.load(x, (row, j), (1, TILE), padding_mode=ct.PaddingMode.NEG_INF)
        largest = ct.maximum(m, ct.max(tile, 1, keepdims=True))
        shift = ct.where(largest == float("-inf"), 0.0, largest)
        s = s * ct.exp(m - shift) + ct.sum(ct.exp(tile - shift), 1, keepdims=True)
        m = largest
    for j in range(ct.num_tiles(x, 1, (1, TILE))):
        tile = ct.load(x, (row, j), (1, TILE))
        ct.store(y, (row, j), ct.exp(tile - m) / s)


def softmax(x):
    """Return the softmax of each row of x, a NumPy array of float32 (rows, columns), as another."""
    there = torch.tensor(x, device="cuda")
    y = torch.empty_like(there)
    stream = torch.cuda.current_stream()
    ct.launch(stream, (len(x), 1, 1), softmax_online, (there, y, TILE))
    return y.cpu().numpy()


def cubin(cc):
    """Return what the kernel becomes for a compute capability such as (9, 0), as bytes."""
    import io

    from cuda.tile import compilation

    rows = compilation.ArrayConstraint(
        ct.float32,
        2,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=(None, 1),
    )
    convention = compilation.CallingConvention.cutile_python_v2()
    signature = compilation.KernelSignature([rows, rows, TILE], convention, "softmax_online")
    file = io.BytesIO()
    target = "sm_{}{}".format(*cc)
    compilation.export_kernel(
        softmax_online, [signature], file, gpu_code=target, output_format="cubin"
    )
    return file.getvalue()
