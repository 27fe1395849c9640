"""Ranks for tests: processes of one gloo group, without a second import of torch."""

import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback

import torch
from torch import distributed

SECONDS = 120  # that ranks may take; a test with one that hangs fails


def in_ranks(n, function):
    """What `function()` returns, or raises, on each of `n` ranks; of one, in this process."""
    if n == 1:
        return [function()]
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends = [fork.Pipe(duplex=False) for _ in range(n)]
        processes = [
            fork.Process(target=_run, args=(rank, n, f"{folder}/store", function, ends[rank][1]))
            for rank in range(n)
        ]
        for process in processes:
            process.start()
        try:
            return [_received(receiver) for receiver, _ in ends]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _received(receiver):
    assert receiver.poll(SECONDS), "a rank hangs"
    found, told = pickle.loads(receiver.recv_bytes())
    if isinstance(found, BaseException):
        print(told, file=sys.stderr)
    return found


def _run(rank, n, store, function, sender):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n)
    told = None
    try:
        found = function()
    except BaseException as error:
        found, told = error.with_traceback(None), traceback.format_exc()
    sender.send_bytes(pickle.dumps((found, told)))  # plainly: PyTorch would share memory
    os._exit(0)  # the others may still need what this one has to say: it is with the kernel
