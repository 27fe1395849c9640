"""Where an operator does not keep a promise, and why: see `contract.exceptions`."""

from contract.exceptions import Exception_

from course_lib import SIMULATED

#: Forms whose peer is the attention that PyTorch composes: every one on a GPU.
COMPOSED = "scaled_dot_product_attention" if SIMULATED else r"(scaled_dot_product_)?attention.*"

EXCEPTIONS = (
    Exception_(
        r"(conv2d_)?batch_norm( with .*)?", "mapped", "Batching rule not implemented",
        "its schema says that it may write to running statistics: torch.vmap calls none such",
    ),
    Exception_(
        "relu6.*", "writable", "modified by an inplace operation",
        "its gradient is computed from y, where PyTorch's hardtanh keeps x",
    ),
    Exception_(
        COMPOSED, "writable", "modified by an inplace operation",
        "its gradient is computed from o, as PyTorch's fused ones; the composed one keeps weights",
    ),
    Exception_(
        "scaled_softmax", "writable", "modified by an inplace operation",
        "its gradient is computed from y, as PyTorch's softmax has it; the chain ends in a fill",
    ),
    Exception_(
        "scaled_dot_product_attention with a mask", "alone", "launched: ",
        "the mask's gradient is summed from scores that begin as zeros",
    ),
    Exception_(
        "layer_norm|cross_entropy with weights", "writable", "a view",
        "the operator's rows are given another shape, which operations in place take",
    ),
    Exception_(
        r"(softmax_)?dropout", "mapped", "can't be mapped by torch.vmap",
        "one sample after another, it would pass over vmap's own `randomness`",
    ),
    Exception_(
        "softmax_dropout", "captured", "can't be captured in a CUDA graph",
        "each replay would drop the same elements",
    ),
    Exception_(
        "batch_norm in inference", "alone", "launched: ",
        "1 / sqrt(variance + eps), a number for each channel, is PyTorch's in the gradient",
    ),
    Exception_("dropout", "captured", "other bits", "each replay of a graph draws anew"),
    Exception_(
        "cross_entropy|dice_loss", "direct_calls", "takes logits",
        "without weights of classes there may be more, of any type: see the forms with weights",
    ),
)
