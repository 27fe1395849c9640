"""Batches on their way from the host to the device that trains on them."""

from course_lib.data import streamed
from course_lib.runtime.host import crossing as host

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
    """Yield each of `batches`, tensors on the host, on the device `place`, the next one on its way
    to a GPU meanwhile."""
    for (batch,) in host.crossing(([batch] for batch in batches), place):
        yield batch
