"""Batches on their way from the host to the device that trains on them."""

import torch

from course_lib.data import streamed

from . import ranks


def streaming(training, validation, batch_size, allowed):
    """How two parts of a set whose images are `Streamed` are streamed, in a sentence or two.

    allowed  bytes that decoded images may take, and where that number comes from
    """
    mine = ranks.rows(min(batch_size, len(training)))
    processes, _ = training.images.processes(len(mine))
    whole = streamed.told(training.images.nbytes + validation.images.nbytes)
    return (
        f"Streamed: as bytes of shape {tuple(training.images.shape[1:])} they would take {whole}, "
        f"and may take {streamed.told(allowed[0])} ({allowed[1]}). Each epoch decodes them anew"
        + (f", by {processes} processes." if processes > 1 else ".")
    )


def crossing(batches, place):
    """Yield each of `batches`, tensors on the host, on the device `place`.

    On a GPU the next batch crosses over on a stream of its own, from pinned memory, while the
    caller computes with this one.
    """
    if place.type != "cuda":
        for batch in batches:
            yield batch.to(place)
        return
    copies, here = torch.cuda.Stream(place), None
    for batch in batches:
        pinned = batch if batch.is_pinned() else batch.pin_memory()
        with torch.cuda.stream(copies):
            coming = pinned.to(place, non_blocking=True)
            arrived = copies.record_event()
        if here is not None:
            yield _received(*here)
        here = coming, arrived
    if here is not None:
        yield _received(*here)


def _received(batch, arrived):
    stream = torch.cuda.current_stream(batch.device)
    stream.wait_event(arrived)
    batch.record_stream(stream)  # or its memory might be given away while it is read
    return batch
