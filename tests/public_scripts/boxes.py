import numpy as np
from numba import cuda, float32, uint32


@cuda.jit(device=True)
def overlap(a, b):
    width = max(float32(0), min(a[2], b[2]) - max(a[0], b[0]))
    both = width * max(float32(0), min(a[3], b[3]) - max(a[1], b[1]))
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


@cuda.jit
def mark(boxes, limit, masks):
    held = cuda.shared.array((32, 4), float32)
    row = cuda.grid(1)
    for k in range(4):
        held[cuda.threadIdx.x, k] = boxes[row, k]
    cuda.syncthreads()
    bits = uint32(0)
    for k in range(32):
        if k > cuda.threadIdx.x and overlap(boxes[row], held[k]) > limit:
            bits |= uint32(1) << uint32(k)
    masks[row] = bits


corners = np.random.default_rng(0).random((64, 2), np.float32)
boxes = np.hstack([corners, corners + np.float32(0.5)])
masks = np.zeros(64, np.uint32)
mark[2, 32](boxes, np.float32(0.5), masks)
assert masks.any() and masks[31] == masks[63] == 0
