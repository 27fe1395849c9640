"""Where an operator does not keep a promise, and why: see `contract.exceptions`."""

from contract.exceptions import Exception_

EXCEPTIONS = (
    Exception_(
        r"(conv2d_)?batch_norm.*", "mapped", "Batching rule not implemented",
        "its schema says that it may write to running statistics: torch.vmap calls no such operator",
    ),
    Exception_(
        r"(softmax_)?dropout", "mapped", "can't be mapped by torch.vmap",
        "one sample after another, it would pass over vmap's own `randomness`",
    ),
    Exception_(
        "conv2d_batch_norm with relu", "autocast", "Tensor-likes are not close",
        "a sum near zero, rounded to 16 bits, has another sign, and there relu lets nothing through",
    ),
)
