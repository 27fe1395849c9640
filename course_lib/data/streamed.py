"""Images that memory does not hold: processes decode them each time they are needed."""

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from .files import DataError, zipped

SHARE = 0.75  # of the memory that is free, for decoded images
SHARED = "/dev/shm"  # through which processes hand tensors over
# What PyTorch's error says, or where its own handler of signals finds it first.
ENDED = re.compile("DataLoader worker .* (exited unexpectedly|is killed by signal)")
MEMINFO, OWN, CGROUP = map(Path, ("/proc/meminfo", "/proc/self/cgroup", "/sys/fs/cgroup"))


class Streamed(Dataset):
    """The images of files, uint8 (N, 3, image_size, image_size), decoded when they are asked for.

    It has what is asked of a tensor of images: `shape`, `dtype`, `device`, `nbytes` (decoded),
    `len`, `images[i]`, `images[some]` (streamed as well) and `split`.

    read     read(file, image_size) decodes one
    workers  processes that decode; 0: the caller's own
    ahead    batches that each of them makes ahead, or fewer, so that all fit into `limit`
    limit    bytes that decoded images may take
    """

    dtype, device = torch.uint8, torch.device("cpu")

    def __init__(self, files, image_size, read, *, workers, ahead, limit):
        self.files, self.image_size, self.read = _packed(files), image_size, read
        forks = multiprocessing.get_context().get_start_method() == "fork"
        if not forks and len(files) and zipped(files[0]):
            workers = 0  # which cannot be handed an open zip
        self.workers, self.ahead, self.limit = workers, ahead, limit
        self.shape = torch.Size((len(files), 3, image_size, image_size))
        self.nbytes = self.shape.numel()

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        if isinstance(index, (slice, torch.Tensor)):
            files = [self.files[i] for i in torch.arange(len(self))[index].tolist()]
            given = dict(workers=self.workers, ahead=self.ahead, limit=self.limit)
            return Streamed(files, self.image_size, self.read, **given)
        return self.read(self.files[index], self.image_size)

    def __getitems__(self, indices):
        """A batch, as DataLoader asks for it; or what is wrong with an image, as a sentence."""
        images = torch.empty((len(indices), *self.shape[1:]), dtype=self.dtype)
        try:
            for place, index in zip(images, indices, strict=True):
                place.copy_(self[index])
        except DataError as error:
            return str(error)
        return images

    def processes(self, n):
        """(how many decode batches of `n` images, how many batches each makes ahead), by `limit`.

        Raises DataError where it is too small.
        """
        # Four batches are with the caller and on their way to it, and there may be two who read.
        slots = (self.limit // self._size(n) - 4) // 2
        if slots < 1:
            raise DataError(
                f"Six batches of {n} images take {told(6 * self._size(n))}, and decoded images may "
                f"take {told(self.limit)}: choose a smaller batch_size or image_size, or a higher "
                "memory_limit."
            )
        workers = min(self.workers, slots)
        return workers, min(self.ahead, slots // max(1, workers))

    def fitting(self, most):
        """How many images a batch may have, `most` at most, for six of it to fit into `limit`."""
        return max(1, min(most, self.limit // (6 * self._size(1))))

    def _size(self, n):
        """Bytes of a batch of `n` images."""
        return n * self.shape[1:].numel()

    def split(self, n):
        """Yield all images in order, `n` at a time."""
        return self.batches(torch.arange(len(self)).split(n), n)

    def batches(self, rows, n, pinned=False):
        """Yield the images of each of `rows`, tensors of at most `n` numbers, on the host.

        pinned  they lie in pinned memory, for a GPU

        Raises DataError for images that cannot be decoded, ChildProcessError where a process has
        been ended, and what `processes` raises.
        """
        workers, ahead = self.processes(n)
        options = {}
        if workers:
            options = {"prefetch_factor": ahead, "worker_init_fn": _begin_work}
            if not _is_shared(2 * workers * ahead * self._size(n)):
                options["collate_fn"] = _through_pipe
            import torchvision.transforms.v2  # noqa: F401  once: processes that are forked have it
        loader = DataLoader(
            self,
            batch_sampler=(each.tolist() for each in rows),
            num_workers=workers,
            pin_memory=pinned,
            generator=torch.Generator(),
            **{"collate_fn": _as_it_is} | options,
        )
        for found in _received(loader):
            if isinstance(found, str):
                raise DataError(found)
            yield torch.from_numpy(found) if isinstance(found, np.ndarray) else found


def _received(loader):
    """Yield what `loader` makes; ChildProcessError where one of its processes is no more."""
    with _calm():
        coming = iter(loader)
    while True:
        try:
            found = next(coming, None)
        except (OSError, EOFError, RuntimeError) as error:
            # It may end while a batch is handed over. What is wrong with an image is a DataError.
            if isinstance(error, RuntimeError) and not ENDED.search(str(error)):
                raise
            raise ChildProcessError(
                "A process that decodes images was ended, as happens where memory runs out: choose "
                "fewer num_workers or a smaller memory_limit, and go on from the last checkpoint."
            ) from None
        if found is None:
            return
        yield found


@contextlib.contextmanager
def _calm():
    """Keep PyTorch from raising an error wherever the program is when a process of its ends.

    Without that, the loader raises the error where the next batch is asked for.
    """
    number = getattr(signal, "SIGCHLD", None)  # which Windows lacks
    before = number and signal.getsignal(number)
    yield
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(number, before)


def _begin_work(_worker):
    # Ctrl-C goes to all processes, and the run still needs the batch in hand: it ends these.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    files = torch.utils.data.get_worker_info().dataset.files
    if len(files) and zipped(files[0]):  # of which each needs a place of its own to read at
        files[0].root.fp = open(files[0].root.filename, "rb")


def _as_it_is(batch):
    return batch


def _through_pipe(batch):
    return batch if isinstance(batch, str) else batch.numpy()


def _is_shared(n_bytes):
    """Whether processes can hand `n_bytes` over as tensors: containers have little such memory."""
    return not Path(SHARED).exists() or shutil.disk_usage(SHARED).free > n_bytes


class _Paths:
    """Paths in one buffer: as objects, millions take gigabytes, in each process that reads them."""

    def __init__(self, paths):
        encoded = [os.fsencode(path) for path in paths]
        self.ends = np.cumsum([0, *map(len, encoded)])
        self.text = np.frombuffer(b"".join(encoded), np.uint8)

    def __len__(self):
        return len(self.ends) - 1

    def __getitem__(self, index):
        part = self.text[self.ends[index] : self.ends[index + 1]]
        return Path(os.fsdecode(part.tobytes()))


def _packed(files):
    return _Paths(files) if all(isinstance(file, Path) for file in files) else list(files)


# ---------------------------------------------------------------------------- how much memory


def limit_of(text):
    """(bytes that decoded images may take, where that number comes from in words).

    text  such as "8GB", "500 MiB" or "2e9"; None: three quarters of what is free. ValueError for
          another text
    """
    if text is None:
        return int(SHARE * free()), f"{SHARE:.0%} of what is free; --memory-limit sets another"
    found = re.fullmatch(r"([\d.]+(?:E\d+)?) *([KMGT]I?)?B?", str(text).strip().upper())
    try:
        base = 1024 if (found[2] or "").endswith("I") else 1000
        number = float(found[1]) * base ** " KMGT".index((found[2] or " ")[0])
        if not 1 <= number < 1e18:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"memory_limit must be such as 8GB or 500MiB, not {text!r}") from None
    return int(number), "as memory_limit says"


def free():
    """Bytes of memory that a program may take here without others' being put on disk."""
    return min(_available(), *_left_in_cgroup(), memory())


def _available():
    try:
        text = MEMINFO.read_text()
        return int(re.search(r"^MemAvailable: +(\d+) kB", text, re.M)[1]) * 1024
    except (OSError, TypeError):
        return memory()  # of a system that does not tell


def _left_in_cgroup():
    """What the limits of a container or of a cluster's job leave; what can be given up is free."""
    try:
        own = re.search("^0::/(.*)$", OWN.read_text(), re.M)[1]
    except (OSError, TypeError):
        own = ""
    of_v1 = CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
    groups = [CGROUP / own, *(CGROUP / own).parents]
    of_v2 = [(each, "memory.max", "memory.current", "") for each in groups]
    for group, limit, used, prefix in (of_v1, *of_v2):
        try:
            told = (group / "memory.stat").read_text()
            kept = re.search(rf"^{prefix}inactive_file (\d+)", told, re.M)
            limit, used = (int((group / name).read_text()) for name in (limit, used))
            yield max(0, limit - used + int(kept[1]))
        except (OSError, TypeError, ValueError):  # none, or "max"
            continue


def memory():
    """Bytes of memory that this machine has; more than any has where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 1 << 60


def told(n_bytes):
    """A number of bytes in words."""
    if n_bytes < 1e6:
        return f"{n_bytes:,} bytes"
    unit, size = ("GB", 1e9) if n_bytes >= 1e9 else ("MB", 1e6)
    return f"{n_bytes / size:,.1f} {unit}"
