"""What `numba.cuda` means in the simulator: its names, arrays, arithmetic and devices."""
