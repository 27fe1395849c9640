"""How a process that `torchrun` has started joins the others, and how it ends when one is lost."""

import contextlib
import datetime
import gc
import os
import re
import signal
import sys
import threading

import torch
from torch import distributed

from course_lib import device

from . import ranks
from .memory import TrainingError

#: What torchrun tells each process in its environment.
VARIABLES = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
TIMEOUT = 1800  # seconds
GO_ON = "If a checkpoint is there, it is whole: start the same command again with --resume."


def is_started():
    """Whether a launcher has started this process as one of several ranks, or of one."""
    return all(name in os.environ for name in VARIABLES)


@contextlib.contextmanager
def joined(name=None, timeout=TIMEOUT):
    """Join the other ranks, where a launcher has started any; yields the device that is this one's.

    name     the device that was asked for: None, "auto", "cuda" or "cpu"; without a launcher, any
    timeout  seconds that ranks wait for one that does not answer

    Where a rank is lost, this one raises TrainingError; where the launcher ends it meanwhile by
    SIGTERM, it says so and exits. Raises ValueError for a device that ranks cannot have.
    """
    if not is_started():
        yield name
        return
    if distributed.is_initialized():
        raise RuntimeError("this process has joined a process group already")
    place = place_of(name)
    backend = "gloo"
    if place != "cpu":
        torch.cuda.set_device(place)
        backend = "cpu:gloo,cuda:nccl"
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        distributed.init_process_group(
            backend, store=_store(timeout, is_master=rank == 0 and not _has_agent()), rank=rank,
            world_size=n, timeout=datetime.timedelta(seconds=timeout),
        )  # fmt: skip
    except RuntimeError as error:
        raise TrainingError(
            f"rank {rank} of {n} does not find the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} ({_first_line(error)})"
        ) from error
    with _ended_aloud():
        try:
            yield place
        except RuntimeError as error:
            if not _is_of_exchange(error):
                raise
            raise TrainingError(
                f"rank {ranks.number()} of {ranks.count()} has lost another "
                f"({_first_line(error)}). {GO_ON}"
            ) from error
        gc.collect()  # NCCL waits for the graphs that hold its kernels
        distributed.destroy_process_group()


def place_of(name):
    """The device of this rank; ValueError where it can have none."""
    n, here = int(os.environ["LOCAL_WORLD_SIZE"]), device.count()
    if name == "cpu" or name in (None, "auto") and here == 0:
        return "cpu"
    if name not in (None, "auto", "cuda"):
        raise ValueError(
            f"ranks compute on cpu, or on a GPU each, as their numbers are; not on {name!r}: "
            "leave the device out, or name cpu or cuda"
        )
    if n > here:
        raise ValueError(
            f"{n} ranks on this host want a GPU each, and it has {here}: choose "
            f"--nproc-per-node {here}, or the device cpu"
            if here
            else f"there is no cuda here for {n} ranks: choose the device cpu"
        )
    return f"cuda:{os.environ['LOCAL_RANK']}"


def is_news():
    """Whether no other rank has told yet why the run ends. Each rank may ask once."""
    if not (is_started() and _has_agent()):
        return True  # better twice than not at all
    try:
        return _store(5).add("told", 1) == 1
    except RuntimeError:
        return True


def is_restarted():
    """Whether torchrun has started the ranks anew, after one had failed (--max-restarts)."""
    return is_started() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _has_agent():
    """Whether torchrun keeps the store by which ranks find each other; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(timeout, is_master=False):
    """The ranks' store. No other process may have its port, which PyTorch's own way allows."""
    store = distributed.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=is_master,
        timeout=datetime.timedelta(seconds=timeout), wait_for_workers=False,
    )  # fmt: skip
    run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"course_lib/{run}", store)


def _is_of_exchange(error):
    told = str(error)
    return isinstance(error, distributed.DistError) or "gloo" in told or "NCCL" in told


def _first_line(error):
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if found := re.search("message: (.*)", lines[0]):  # the system's own words
        return found[1]
    return lines[0].rsplit("] ", 1)[-1].split(". ")[0].rstrip(".")


_reading = None  # the end of a pipe at which a thread waits for SIGTERM


@contextlib.contextmanager
def _ended_aloud():
    """SIGTERM ends this process at once, and with a sentence, whatever it waits for in PyTorch.

    torchrun sends it when another rank has failed. Python calls handlers only between two of its
    own instructions, so that it is a thread that acts, told by the interpreter's wake-up pipe.
    """
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return
    global _reading
    _reading, writing = os.pipe()
    os.set_blocking(writing, False)
    threading.Thread(target=_wait, args=(_reading,), daemon=True).start()
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGTERM, handler)
        os.close(writing)  # which ends the thread
        _reading = None


def _wait(reading):
    while heard := os.read(reading, 1):
        if heard[0] == signal.SIGTERM:
            if is_news():
                rank = os.environ["RANK"]
                told = f"rank {rank} was ended from outside: another has failed. {GO_ON}"
                os.write(2, f"python -m course_lib train: {told}\n".encode())
            os._exit(128 + signal.SIGTERM)
    os.close(reading)


def _before_fork():
    if _reading is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _in_parent():
    if _reading is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _in_child():
    """In a forked process, such as one that decodes images, SIGTERM does what it always does."""
    if _reading is not None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _in_parent()


if sys.platform != "win32":
    os.register_at_fork(
        before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child
    )
