"""What the memory system of a GPU makes of one warp's addresses: sectors, and turns of the banks.

Addresses come as an integer array `(requests, 32)` of bytes, one column for each lane, `IDLE` where
a lane takes no part. `size` is how many bytes each lane asks for.

Sources: NVIDIA's CUDA C++ Programming Guide (global and shared memory of compute capability 5.x and
later) and the metrics of Nsight Compute, with which `course_lib.benchmarks.tracer` compares.
"""

import numpy as np

WARP_SIZE = 32
#: Marks a lane that takes no part in a request.
IDLE = -1
#: Bytes that global memory sends at least.
SECTOR_BYTES = 32
BANKS = 32
BANK_BYTES = 4


def sectors(addresses, size):
    """Distinct 32-byte sectors of each request, as an int array `(requests,)`."""
    first, last = addresses // SECTOR_BYTES, (addresses + size - 1) // SECTOR_BYTES
    touched = first if np.array_equal(first, last) else np.concatenate(
        [first + k for k in range(-(-size // SECTOR_BYTES) + 1)], axis=1)
    if touched is not first:
        last = np.concatenate([last] * (touched.shape[1] // addresses.shape[1]), axis=1)
        touched = np.where(touched <= last, touched, IDLE)
        idle = np.concatenate([addresses < 0] * (touched.shape[1] // addresses.shape[1]), axis=1)
        touched = np.where(idle, IDLE, touched)
    return _distinct(touched)


def atomic_sectors(addresses, size):
    """Sectors of each request of an atomic: one that n lanes want at the same place counts n times.

    The lanes that change one place go one after another, and each turn asks for the sector again.
    """
    turns = np.zeros(len(addresses), int)
    for request, row in enumerate(addresses):
        places, lanes = np.unique(row[row >= 0], return_counts=True)
        _, sector = np.unique(places // SECTOR_BYTES, return_inverse=True)
        most = np.zeros(len(places), int)
        np.maximum.at(most, sector, lanes)
        turns[request] = most.sum()
    return turns


def _distinct(values):
    """How many different numbers >= 0 each line of `values` holds."""
    ordered = np.sort(values, axis=1)
    fresh = np.ones(ordered.shape, bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return (fresh & (ordered >= 0)).sum(axis=1)


def wavefronts(addresses, size):
    """(turns, fewest turns) that the shared memory needs for each request: arrays `(requests,)`.

    In one turn each of the 32 banks gives one 4-byte word, to however many lanes want that word.
    Lanes that want different words of one bank wait for each other. A request of 8 bytes per lane
    is served a half warp at a time, one of 16 bytes a quarter warp at a time; the fewest turns are
    those without a conflict: one for each part in which any lane takes part.
    """
    requests = len(addresses)
    parts = max(1, min(size, 16) // BANK_BYTES)
    words = -(-size // BANK_BYTES)
    lanes = addresses.reshape(requests * parts, WARP_SIZE // parts)
    first = lanes // BANK_BYTES
    wanted = np.concatenate([np.where(lanes < 0, IDLE, first + k) for k in range(words)], axis=1)
    ordered = np.sort(wanted, axis=1)
    fresh = np.ones(ordered.shape, bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    fresh &= ordered >= 0
    row, column = np.nonzero(fresh)
    place = row * BANKS + ordered[row, column] % BANKS
    per_bank = np.bincount(place, minlength=len(lanes) * BANKS).reshape(requests, parts, BANKS)
    turns = per_bank.max(axis=2)
    return turns.sum(axis=1), (turns > 0).sum(axis=1)
