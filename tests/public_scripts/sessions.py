import numpy as np
from numba import cuda

GAP = 3600


@cuda.jit
def sessionize(user, seconds, session):
    i = cuda.grid(1)
    grid = cuda.cg.this_grid()
    begins = False
    if i < user.size:
        begins = i == 0 or user[i] != user[i - 1] or seconds[i] - seconds[i - 1] > GAP
        session[i] = i if begins else -1
    grid.sync()
    if begins:
        j = i + 1
        while j < user.size and session[j] == -1:
            j += 1
        length = j - i
        for j in range(i + 1, i + length):
            session[j] = i


user = np.array([1, 1, 1, 2, 2, 2, 3, 3], np.int32)
seconds = np.array([0, 10, 9000, 9000, 9100, 9200, 0, 99999], np.int32)
session = cuda.to_device(np.zeros(8, np.int32))
sessionize[2, 4](user, seconds, session)
assert session.copy_to_host().tolist() == [0, 0, 2, 3, 3, 3, 6, 7]
