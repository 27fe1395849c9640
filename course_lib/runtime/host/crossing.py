"""Batches on their way from the host to a GPU, one ahead of who computes with them."""

from concurrent.futures import ThreadPoolExecutor

import torch


def crossing(batches, place):
    """Yield each of `batches`, a list of tensors on the host, as a list of tensors on `place`.

    On a GPU the next batch crosses over while the caller computes with this one: a thread copies it
    to pinned memory, unless it is there already, and from there to the GPU on a stream of its own.
    The caller's thread could not launch kernels meanwhile. The batches themselves are made in the
    caller's thread.
    """
    if place.type != "cuda":
        for batch in batches:
            yield [tensor.to(place) for tensor in batch]
        return
    copies = torch.cuda.Stream(place)

    def copied(batch):
        with torch.cuda.stream(copies):
            pinned = [tensor if tensor.is_pinned() else tensor.pin_memory() for tensor in batch]
            found = [tensor.to(place, non_blocking=True) for tensor in pinned]
        copies.synchronize()
        return found

    batches = iter(batches)
    with ThreadPoolExecutor(1, "crossing") as thread:
        coming = _submitted(thread, copied, batches)
        while coming is not None:
            here = coming.result()  # before the next is made, which may lie where this one lay
            coming = _submitted(thread, copied, batches)
            for tensor in here:
                # Or its memory, of the other stream, might be given away while it is read.
                tensor.record_stream(torch.cuda.current_stream(place))
            yield here


def _submitted(thread, function, batches):
    """What will be `function` of the next batch; None where there is none."""
    for batch in batches:
        return thread.submit(function, batch)
    return None
