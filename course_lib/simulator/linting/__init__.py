"""What numba's compiler makes of a kernel, told without launching it."""
