"""Products on tensor cores, from tiles in shared memory to sums in registers and on to the result.

================ ==================================================================================
file             what it holds
================ ==================================================================================
`shape`          how the warps of a block share out its tile of the product
`tiles`          how tiles of a matrix get to shared memory by asynchronous copies
`fragments`      how a warp's share of a tile gets to its registers
`mainloop`       how warps multiply tile after tile, by `mma`; float32 in several modes
`results`        how the sums get from registers to the result
`epilogue`       what is done to a sum before it is stored
`warpgroup`      Hopper's `wgmma` in place of `fragments` and `mainloop`; its tiles are `swizzled`,
                 and `warpgroup_sums` stores the sums
================ ==================================================================================
"""
