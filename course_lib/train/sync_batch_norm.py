"""Batch norms whose statistics are those of the joint batch of all ranks, on CPUs too."""

import torch
from torch import distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

from course_lib.nn import BatchNorm2d

KNOWN = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, BatchNorm2d


def synchronised(model):
    """`model`, whose batch norms, ours and PyTorch's, take the joint batch's statistics.

    They become PyTorch's `SyncBatchNorm`, which is for GPUs, or on a CPU `SyncBatchNorm` of this
    file. Raises ValueError for a batch norm that does more, such as timm's with an activation.
    """
    norms = {k: m for k, m in model.named_modules() if isinstance(m, _BatchNorm)}
    for name, layer in norms.items():
        if type(layer) not in KNOWN:
            raise ValueError(
                f"{name} is a {type(layer).__name__}, which cannot be synchronised: leave "
                "sync_batch_norm out, or choose another network"
            )
    if next(model.parameters()).is_cuda:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for layer in norms.values():
        layer.__class__ = SyncBatchNorm
    return model


class SyncBatchNorm(_BatchNorm):
    """As PyTorch's, on a CPU, by two sums over the ranks."""

    def _check_input_dim(self, input):
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, not {input.dim()}")

    def forward(self, input):
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        dims = [d for d in range(input.dim()) if d != 1]
        shape = [-1 if d == 1 else 1 for d in range(input.dim())]
        x = input if input.dtype == torch.float64 else input.float()
        n = x.new_tensor([x.numel() // x.shape[1]])
        n, total = _Summed.apply(torch.cat([n, x.sum(dims)])).split([1, x.shape[1]])
        mean = total / n
        centred = x - mean.view(shape)
        variance = _Summed.apply(centred.square().sum(dims)) / n
        self._move(mean.detach(), (variance * n / (n - 1).clamp(min=1)).detach())
        y = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(input.dtype)

    @torch.no_grad()
    def _move(self, mean, variance):
        """Move the running statistics towards those of the batch."""
        if not self.track_running_stats:
            return
        self.num_batches_tracked.add_(1)
        step = self.momentum if self.momentum is not None else 1 / self.num_batches_tracked.item()
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), step)
        self.running_var.lerp_(variance.to(self.running_var.dtype), step)


class _Summed(torch.autograd.Function):
    """The sum over all ranks, of whose losses the gradient is that of their sum."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        return _Summed.forward(ctx, dy.contiguous())
