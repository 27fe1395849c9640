"""How the warps of a block share out its tile of a product, by `mma`."""


from typing import NamedTuple

K_BYTES = 128  # of a tile's row


class Shape(NamedTuple):
    """How a block works: its tile of c, its warps along m and n, its buffers."""

    m: int
    n: int
    warps_m: int
    warps_n: int
    n_stages: int
    min_blocks: int = 1  # on a multiprocessor: what registers are left for each thread

    @property
    def n_threads(self):
        return 32 * self.warps_m * self.warps_n
