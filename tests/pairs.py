"""Ranks for tests: processes of one gloo group, without a second import of torch."""

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import traceback

import torch
from torch import distributed

from course_lib.train import joining

SECONDS = 120  # that ranks may take; a test with one that hangs fails


def in_ranks(n, function, *, join=True):
    """What `function()` returns, or raises, on each of `n` ranks; of one, in this process.

    join  False: the ranks find in their environment what a launcher tells them, and join by
          themselves; of one that ends without a word, its exit status
    """
    if n == 1 and join:
        return [function()]
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{folder}/store" if join else str(free_port())
        ends = [fork.Pipe(duplex=False) for _ in range(n)]
        processes = [
            fork.Process(target=_run, args=(rank, n, join, meet, function, ends[rank][1]))
            for rank in range(n)
        ]
        for process, (_, sender) in zip(processes, ends, strict=True):
            process.start()
            sender.close()
        try:
            return [_received(*each) for each in zip(processes, ends, strict=True)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def free_port():
    """A port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def _received(process, ends):
    assert ends[0].poll(SECONDS), "a rank hangs"
    try:
        found, told = pickle.loads(ends[0].recv_bytes())
    except EOFError:
        process.join()
        return process.exitcode
    if isinstance(found, BaseException):
        print(told, file=sys.stderr)
    return found


def _run(rank, n, join, meet, function, sender):
    torch.set_num_threads(1)
    if join:
        distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=n)
    else:
        told = rank, n, rank, n, "localhost", meet
        os.environ |= dict(zip(joining.VARIABLES, map(str, told), strict=True))
    told = None
    try:
        found = function()
    except BaseException as error:
        found, told = error.with_traceback(None), traceback.format_exc()
    sender.send_bytes(pickle.dumps((found, told)))  # plainly: PyTorch would share memory
    os._exit(0)
