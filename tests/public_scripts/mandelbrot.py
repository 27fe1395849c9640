import sys

import numpy as np
from numba import cuda


@cuda.jit(device=True)
def escape(c, most):
    z = c
    for n in range(most):
        if z.real * z.real + z.imag * z.imag > 4:
            return n
        z = z * z + c
    return most


@cuda.jit
def draw(picture, left, top, size):
    row, col = cuda.grid(2)
    if row < picture.shape[0] and col < picture.shape[1]:
        picture[row, col] = escape(complex(left + col * size, top - row * size), 20)


def main(arguments):
    height = int(arguments[0]) if arguments else 20
    picture = np.zeros((height, 30), np.uint8)
    draw[(3, 4), (8, 8)](picture, -2.0, 1.0, 0.1)
    assert picture[10, 20] == 20 and picture[0, 0] == 0


if __name__ == "__main__":
    main(sys.argv[1:])
