"""The finished kernels, one file per operation, each a ladder from naive to the chip's limit."""
