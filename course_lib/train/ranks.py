"""Ranks: processes that train one network together, each on a part of every batch.

`torchrun` starts them; `joined` brings them into PyTorch's process group: NCCL between GPUs, gloo
between CPUs. Whatever trains asks the functions below, which also answer for a process alone: its
count is 1, and nothing is exchanged. A batch is the same, however many ranks share it, and what a
rank adds to the loss is weighted by its samples: gradients are those of the joint batch.

Rank 0 alone writes, prints and holds the run's folder; its running statistics count.
"""

import contextlib
import os
import time

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

SECONDS = 0.5  # from one agreement to the next, about
BUCKET = 25_000_000  # bytes of gradients that are exchanged together, as PyTorch has it


def are_joined():
    """Whether there is a process group, be it of one rank."""
    return distributed.is_available() and distributed.is_initialized()


def count():
    """How many ranks there are."""
    return distributed.get_world_size() if are_joined() else 1


def number():
    """Which of them this process is, from 0."""
    return distributed.get_rank() if are_joined() else 0


def is_first():
    """Whether this is rank 0."""
    return number() == 0


def on_host():
    """How many of them share this host's memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", count())) if are_joined() else 1


def aloud(tell):
    """`tell`; on other ranks than 0, a function that says nothing."""
    return tell if is_first() else lambda line: None


# ---------------------------------------------------------------------------- a batch's parts


def rows(n, parts=1):
    """Which of the `n` samples of a batch are this rank's, int64.

    parts  into which a batch is divided to accumulate gradients: ranks share out each by itself
    """
    each = torch.arange(n).split(-(-n // parts))
    return torch.cat([part.tensor_split(count())[number()] for part in each])


def salt():
    """What to seed with, beside the place in the run, where ranks draw for themselves."""
    return () if is_first() else (number(),)


def share(mine, n):
    """The weight of the mean loss of this rank's samples: `mine` of the batch's `n`.

    The mean of all ranks' weighted losses is the loss of the batch.
    """
    return mine * count() / n


def weighted(loss, mine, n):
    """`loss` times `share`."""
    return loss if mine * count() == n else loss * share(mine, n)


def require_enough(batch_size, parts=1):
    """Raise ValueError for a batch in which a rank has no sample in one of the `parts`."""
    if batch_size < count() * parts:
        each = f" in each of {parts} parts" if parts > 1 else ""
        raise ValueError(
            f"{count()} ranks want a sample each{each}, and a batch has {batch_size}: choose a "
            f"batch_size of {count() * parts} or more, or fewer ranks"
        )


def require_even(batch_size, parts):
    """Raise ValueError where ranks would make different numbers of the `parts` of a batch."""
    if parts > 1 and batch_size % (count() * parts):
        raise ValueError(
            f"sync_batch_norm in {parts} parts wants a batch_size that {count() * parts} divides, "
            f"not {batch_size}: each of {count()} ranks takes part in each"
        )


# --------------------------------------------------------------------------------- exchanges


def wrapped(model, *, flat=False):
    """What to call in place of `model`, whose parameters and buffers become rank 0's.

    It averages gradients over the ranks while the backward pass goes on. With `flat` it is the
    model itself, for `Overlapped` or `summed`.
    """
    if not are_joined():
        return model
    if flat:
        share_tensors([*model.parameters(), *model.buffers()])
        return model
    network = DistributedDataParallel(model, gradient_as_bucket_view=True)
    network.broadcast_buffers = False  # from here on: running statistics differ until they count
    network.is_rehearsed = count() < 3  # of two ranks, sums have no order
    return network


def rehearse(network, backward):
    """Call `backward()`, a forward and a backward pass of `network`, before its first step; of it
    nothing is left.

    After its first pass, PyTorch arranges anew which gradients are exchanged together, and with it
    in which order each is summed. So a run that goes on sums as one that was not stopped.
    """
    if getattr(network, "is_rehearsed", True):
        return
    place = next(network.parameters()).device
    before = [buffer.clone() for buffer in network.buffers()]
    with torch.random.fork_rng([place] if place.type == "cuda" else []):
        backward()
    with torch.no_grad():
        for buffer, kept in zip(network.buffers(), before, strict=True):
            buffer.copy_(kept)
    network.zero_grad()
    network.is_rehearsed = True


def unsynchronised(network, wanted=True):
    """A context in which a backward pass exchanges nothing, if that is `wanted`."""
    if wanted and isinstance(network, DistributedDataParallel):
        return network.no_sync()
    return contextlib.nullcontext()


@torch.no_grad()
def share_tensors(tensors):
    """Let rank 0's values be in `tensors` on every rank."""
    if are_joined():
        for tensor in tensors:
            whole = tensor.contiguous()
            distributed.broadcast(whole, 0)
            tensor.copy_(whole)


@torch.no_grad()
def summed(tensors, divisor=1):
    """Put into each tensor its sum over the ranks, divided by `divisor`, in one exchange a dtype.

    tensors  of PyTorch, or arrays that it shares the memory of
    """
    if not are_joined():
        return
    tensors = [torch.as_tensor(each) for each in tensors]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        these = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in these])
        distributed.all_reduce(flat)
        if divisor != 1:
            flat.div_(divisor)
        parts = flat.split([tensor.numel() for tensor in these])
        torch._foreach_copy_(these, [p.view(t.shape) for p, t in zip(parts, these, strict=True)])


class Overlapped:
    """Averages gradients over the ranks during a backward pass that a CUDA graph may hold.

    ``with overlapped: loss.backward()`` sends a bucket of gradients, on a stream of its own, as
    soon as they and those of the buckets before it are there. The last parameters, whose gradients
    come first, are in the first bucket. Parameters that have no gradient are left out.
    """

    def __init__(self, parameters, n_bytes=BUCKET):
        self.buckets, self.bucket_of, size = [], {}, n_bytes
        for p in reversed(list(parameters)):
            if not p.requires_grad:
                continue
            if size >= n_bytes:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            self.bucket_of[id(p)] = len(self.buckets) - 1
            size += p.numel() * p.element_size()
            p.register_post_accumulate_grad_hook(self._has_come)
        place = next((p.device for bucket in self.buckets for p in bucket), torch.device("cpu"))
        self.stream = torch.cuda.Stream(place) if place.type == "cuda" else None
        self.lacking = None  # how many gradients of each bucket, while a pass is under way

    def __enter__(self):
        self.lacking, self.n_sent = [len(bucket) for bucket in self.buckets], 0

    def __exit__(self, kind, error, where):
        self.lacking = None
        if error is not None:
            return
        while self.n_sent < len(self.buckets):
            self._send()
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def _has_come(self, p):
        if self.lacking is None:
            return
        self.lacking[self.bucket_of[id(p)]] -= 1
        while self.n_sent < len(self.buckets) and self.lacking[self.n_sent] <= 0:
            self._send()

    def _send(self):
        gradients = [p.grad for p in self.buckets[self.n_sent] if p.grad is not None]
        self.n_sent += 1
        if not gradients:
            return
        if self.stream is None:
            summed(gradients, count())
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            summed(gradients, count())


def total(tensor):
    """The sum of the ranks' tensors."""
    tensor = tensor.clone()
    summed([tensor])
    return tensor


def gathered(tensor, n):
    """All `n` rows, of which `tensor` holds those in this rank's `rows`."""
    if not are_joined():
        return tensor
    sizes = [len(part) for part in torch.arange(n).tensor_split(count())]
    mine = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    mine[: len(tensor)] = tensor
    parts = [torch.empty_like(mine) for _ in sizes]
    distributed.all_gather(parts, mine)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def predicted(predict, images):
    """predict(images), a row for each image, of which each rank computes its own."""
    if count() == 1:
        return predict(images)
    mine = rows(len(images)).to(images.device)
    found = predict(images[mine] if len(mine) else images[:1])
    return gathered(found[: len(mine)], len(images))


# --------------------------------------------------------------------------- what all agree on


def first(function):
    """What rank 0 makes of `function()`, on every rank; an exception there is raised on every."""
    if count() == 1:
        return function()
    found = [None, None]
    if is_first():
        try:
            found[0] = function()
        except Exception as error:
            found[1] = error
    distributed.broadcast_object_list(found, 0)
    if found[1] is not None:
        raise found[1]
    return found[0]


def require_same(settings):
    """Raise ValueError, on every rank, where one has other `settings` than rank 0.

    settings  a dict of plain values; that of "images" is a hash of their contents
    """
    if count() == 1:
        return
    each = [None] * count()
    distributed.all_gather_object(each, settings)
    for rank, theirs in enumerate(each):
        names = sorted(each[0].keys() | theirs.keys())
        others = [name for name in names if theirs.get(name) != each[0].get(name)]
        if others == ["images"]:
            raise ValueError(
                f"rank {rank} has read other images than rank 0, in number, names or contents: "
                "let all hosts read the same files"
            )
        told = [
            f"{name} {theirs.get(name)!r}, and rank 0 {each[0].get(name)!r}"
            for name in others
            if name != "images"
        ]
        if told:
            raise ValueError(f"rank {rank} has {'; '.join(told)}: start all with one command")


@contextlib.contextmanager
def in_turn():
    """The first rank of each host comes first, the others when it is through: they find on the disk
    what it has put there."""
    leads = int(os.environ.get("LOCAL_RANK", number())) == 0
    if not leads:
        total(torch.zeros(1))
    yield
    if leads:
        total(torch.zeros(1))


class Agreement:
    """Stop at the same step, though each rank hears of it in its own time.

    ``interrupted, late = agreement(step, interrupted, late, now)`` after each step: whether any
    rank is. Where the ranks do not ask each other, as at most steps, neither is told. `now` is
    whether they must, the same on all ranks.
    """

    def __init__(self):
        self.interval, self.step, self.since = 1, None, None

    def __call__(self, step, interrupted, late, now):
        if count() == 1:
            return interrupted, late
        if self.step is not None and step < self.step + self.interval and not now:
            return False, False
        interval = 1
        if self.step is not None:
            pace = (step - self.step) / max(1e-6, time.monotonic() - self.since)
            interval = min(2 * self.interval, max(1, int(pace * SECONDS)))
        found = torch.tensor([bool(interrupted), bool(late), interval])
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
        interrupted, late, self.interval = found.tolist()
        self.step, self.since = step, time.monotonic()
        return bool(interrupted), bool(late)
