import numpy as np
from numba import cuda, float32, uint32


@cuda.jit(device=True)
def overlap(a, b):
    width = max(float32(0), min(a[2], b[2]) - max(a[0], b[0]))
    height = max(float32(0), min(a[3], b[3]) - max(a[1], b[1]))
    both = width * height
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


@cuda.jit
def mark(boxes, limit, masks):
    held = cuda.shared.array((32, 4), float32)
    tid, row = cuda.threadIdx.x, cuda.blockIdx.x * 32 + cuda.threadIdx.x
    first = cuda.blockIdx.y * 32
    if first + tid < boxes.shape[0]:
        for k in range(4):
            held[tid, k] = boxes[first + tid, k]
    cuda.syncthreads()
    if row < boxes.shape[0]:
        bits = uint32(0)
        for k in range(min(32, boxes.shape[0] - first)):
            if first + k > row and overlap(boxes[row], held[k]) > limit:
                bits |= uint32(1) << uint32(k)
        masks[row, cuda.blockIdx.y] = bits


rng = np.random.default_rng(0)
corners = rng.random((40, 2), np.float32)
boxes = np.hstack([corners, corners + np.float32(0.5)])
masks = np.zeros((40, 2), np.uint32)
mark[(2, 2), 32](boxes, np.float32(0.5), masks)
kept, gone = [], [0, 0]
for i in range(40):
    if not gone[i // 32] >> i % 32 & 1:
        kept.append(i)
        gone = [gone[part] | int(masks[i, part]) for part in range(2)]
assert 1 < len(kept) < 40
