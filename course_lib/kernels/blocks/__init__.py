"""What the kernels of two operations or more are made of: device code, and what launches it.

An operation imports blocks and what another operation's package gives out, never a file inside
another operation. Blocks import no operation.

================== ================================================================================
file               what it holds
================== ================================================================================
`rows`             a row in registers: how threads load, reduce and store it
`shifted_rows`     the same of rows that begin between two 16-byte boundaries
`gapped_rows`      elementwise work on rows with gaps between them
`row_plan`         how many threads share a row, and how much of it each holds
`row_teams`        kernels whose rows belong to a team of lanes or to a block
`softmax_formulas` what sets softmax and log-softmax apart
`softmax_steps`    maximum, sum of exponentials and gradient of the numbers that a thread holds
`columns`          numbers along an axis that is not the last
`column_sums`      the sum of each column of a matrix: the gradient of a bias
`sums`, `moments`  sums, means and variances that keep their digits
`normal`           the normal distribution
`labels`           class numbers as targets
`dropout_mask`     which elements dropout keeps
`indexing`         where an element of an image lies, in either memory format
`memory_format`    arrays in the memory format of a problem; `transpose` has the kernels
`work_queue`       blocks that take tasks by a ticket, and wait for earlier ones
`mma`              products on tensor cores
`score_mask`       masks of attention scores, boolean or additive, and their strides
`options`          options of launchers, checked
`constants`        numbers that most kernels need
================== ================================================================================
"""
