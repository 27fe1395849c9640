"""Where an operator does not keep a promise, and why: see `contract.exceptions`."""

from contract.exceptions import Exception_

EXCEPTIONS = (
    Exception_(
        r"(conv2d_)?batch_norm( with .*)?", "mapped", "Batching rule not implemented",
        "its schema says that it may write to running statistics: torch.vmap calls none such",
    ),
    Exception_(
        r"(softmax_)?dropout", "mapped", "can't be mapped by torch.vmap",
        "one sample after another, it would pass over vmap's own `randomness`",
    ),
    Exception_(
        "cross_entropy|dice_loss", "direct_calls", "takes logits wider",
        "without weights of classes there may be more: the forms with weights say what there is",
    ),
)
