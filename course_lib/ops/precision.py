"""How float32 may be rounded, as PyTorch has been told for its own operators; read at each call."""

import torch

_get = torch._C._get_fp32_precision_getter


def of_convolutions():
    """ "tf32" where ``torch.backends.cudnn.conv`` allows it, else "float32"."""
    return "tf32" if _get("cuda", "conv") == "tf32" else "float32"


def of_products():
    """ "tf32" where ``torch.backends.cuda.matmul`` allows it, else "float32"."""
    return "tf32" if _get("cuda", "matmul") == "tf32" else "float32"
