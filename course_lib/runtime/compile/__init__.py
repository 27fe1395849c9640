"""From a kernel to machine code, and back to it from the disk."""
