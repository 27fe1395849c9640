"""The same numbers elsewhere in memory, results fenced by canaries, and bits compared."""

import math

import torch

CANARY = 97  # a number that every dtype has
FENCE = 16  # elements before and after


def bits(x):
    """The elements of `x`, in its own order, as integers: NaN is equal to NaN of the same bits."""
    x = x.detach().contiguous()
    if not x.is_floating_point():
        return x
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def strange(x, fill=None):
    """What surrounds a view: NaN, or a number that is no index."""
    if fill is not None:
        return fill
    return math.nan if x.is_floating_point() else CANARY


def transposed(x):
    """The elements of `x` with its first axis last in memory."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0) if x.ndim > 1 else sliced(x)


def sliced(x):
    """Every second element of wider rows, from their second on, in memory full of NaN."""
    if not x.ndim:
        return x
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 3), strange(x))
    wide[..., 1 : 2 * x.shape[-1] + 1 : 2] = x
    return wide[..., 1 : 2 * x.shape[-1] + 1 : 2]


def shifted(x):
    """Contiguous, from the second element of its memory on: on no boundary of vectors."""
    memory = x.new_full((x.numel() + 1,), strange(x))
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)


def expanded(x):
    """The first row of `x` for all its rows: one place in memory for many elements."""
    return x[:1].expand(x.shape) if x.ndim else x


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


class Fenced:
    """Memory for a result, full of NaN, with canaries before and after.

    like    a tensor: dtype, device and the layout of the result
    spread  the last axis takes every second place; canaries lie between
    start   elements by which the result begins off any boundary
    """

    def __init__(self, like, spread=False, start=0):
        n = like.numel() * (2 if spread else 1)
        self.memory = like.new_full((2 * FENCE + start + n,), CANARY)
        inner = self.memory[FENCE + start :][:n]
        if spread:
            self.out = inner.view(*like.shape, 2)[..., 0] if like.ndim else inner[:1].view(())
        else:
            self.out = inner.as_strided(like.shape, like.stride(), inner.storage_offset())
        self.out.fill_(math.nan)
        self.written = torch.zeros_like(self.memory, dtype=torch.bool)
        self.written.as_strided(self.out.shape, self.out.stride(), self.out.storage_offset()).fill_(
            True
        )
        self.before = self.memory.clone()

    @property
    def intact(self):
        """Whether no canary was touched."""
        return bool((self.memory == CANARY)[~self.written].all())

    @property
    def untouched(self):
        """Whether nothing was written at all."""
        return same_bits(self.memory, self.before)
