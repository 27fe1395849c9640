"""Public data sets, fetched from where their authors publish them."""

import hashlib
import http.client
import os
import re
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .files import DataError

PIECE = 1 << 20  # bytes that are read at a time
PATIENCE = 30  # seconds without a byte
PART = ".part"  # after the name of a file that has not come whole yet
CLOTHES = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"


class File(NamedTuple):
    """A file to fetch: its address, its size in bytes, and the MD5 of its content."""

    address: str
    size: int
    md5: str

    @property
    def name(self):
        return self.address.rpartition("/")[2]


@dataclass(frozen=True)
class PublicSet:
    """A data set that anybody may fetch.

    files     what is fetched
    path      its folder, within the folder of all sets
    unpacked  bytes that its one file takes unpacked, which then is an archive of that folder; 0:
              the files are left in the folder as they are
    terms     what its publishers say about its use, and where
    """

    files: tuple[File, ...]
    path: str
    unpacked: int
    terms: str

    @property
    def size(self):
        """Bytes to fetch."""
        return sum(file.size for file in self.files)


SETS = {
    "tiny-imagenet": PublicSet(
        (
            File(
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                248_100_043,
                "90528d7ca1a48142e341f4ef8d21d0de",
            ),
        ),
        "tiny-imagenet-200",
        600_000_000,
        "the publisher states none; the images are ImageNet's, which are for non-commercial "
        "research and education (https://image-net.org/download)",
    ),
    "fashion-mnist": PublicSet(
        (
            File(
                f"{CLOTHES}/train-images-idx3-ubyte.gz",
                26_421_880,
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            ),
            File(
                f"{CLOTHES}/train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe"
            ),
            File(
                f"{CLOTHES}/t10k-images-idx3-ubyte.gz",
                4_422_102,
                "bef4ecab320f06d8554ea6380940ec79",
            ),
            File(f"{CLOTHES}/t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
        "fashion-mnist",
        0,
        "MIT, Zalando SE (https://github.com/zalandoresearch/fashion-mnist)",
    ),
    "cifar100": PublicSet(
        (
            File(
                "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
                169_001_437,
                "eb9058c3a382ffc7106e4002c42a8d85",
            ),
        ),
        "cifar100/cifar-100-python",
        190_000_000,
        "the publisher states none, and asks to cite Krizhevsky, Learning Multiple Layers of "
        "Features from Tiny Images, 2009 (https://www.cs.toronto.edu/~kriz/cifar.html)",
    ),
}


def is_there(public, folder):
    """Whether `folder`, of all sets, holds this one whole."""
    home = folder / public.path
    if public.unpacked:
        return home.is_dir()
    return all(_is_right(home / file.name, file) for file in public.files)


def fetch(public, folder, *, progress=None):
    """Fetch a `PublicSet` into `folder`, or the rest of one of which a part has come.

    progress  called as tqdm is

    Raises DataError, which says what to do, where the network, the disk or the file is at fault.
    What has come stays, except for a whole file that is not the published one.
    """
    home = folder / public.path
    into = home.parent if public.unpacked else home
    into.mkdir(parents=True, exist_ok=True)
    left = public.size + public.unpacked - sum(_come(into / file.name) for file in public.files)
    if (free := shutil.disk_usage(into).free) < left:
        raise DataError(
            f"{into} has room for {free / 1e6:,.0f} MB, and {left / 1e6:,.0f} are needed: make "
            "room, or name another folder."
        )
    for file in public.files:
        if not _is_right(into / file.name, file):
            _download(file, into / file.name, progress)
    if public.unpacked:
        archive = into / public.files[0].name
        _unpack(archive, home)
        archive.unlink()


def _come(path):
    """Bytes that have come of the file at `path`."""
    return next((p.stat().st_size for p in (path, _part(path)) if p.exists()), 0)


def _part(path):
    return path.with_name(path.name + PART)


def _is_right(path, file):
    return path.is_file() and path.stat().st_size == file.size and _md5(path) == file.md5


def _md5(path):
    with open(path, "rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _download(file, path, progress):
    part = _part(path)
    come = _come_of(part, file)
    if come < file.size:
        _receive(file, part, come, progress)
    if (come := part.stat().st_size) < file.size:
        raise DataError(
            f"{file.address} ended after {come:,} of {file.size:,} bytes: the same command goes on."
        )
    if (found := _md5(part)) != file.md5 or come > file.size:
        part.unlink()
        raise DataError(
            f"What {file.address} sends is not what was published: {come:,} bytes with the MD5 "
            f"{found}, not {file.size:,} with {file.md5}. It is deleted. Try again, or fetch the "
            "set elsewhere."
        )
    os.replace(part, path)


def _come_of(part, file):
    """Bytes of `file` that an earlier command has left; a part that is too long is deleted."""
    if part.exists() and part.stat().st_size > file.size:
        part.unlink()
    return part.stat().st_size if part.exists() else 0


def _receive(file, part, come, progress):
    """Append to `part`, which has `come` bytes, what follows; or all, where the server won't."""
    ask = urllib.request.Request(file.address, headers={"Range": f"bytes={come}-"} if come else {})
    bar = None
    try:
        with urllib.request.urlopen(ask, timeout=PATIENCE) as answer:
            follows = re.match(rf"bytes {come}-", answer.headers.get("Content-Range", ""))
            come = come if follows else 0
            if progress is not None:
                bar = progress(total=file.size, initial=come, unit="B", unit_scale=True)
            with open(part, "ab" if follows else "wb") as into:
                # One byte too many is enough to know that it is another file.
                while come <= file.size and (piece := answer.read(PIECE)):
                    _write(into, piece)
                    come += len(piece)
                    if bar is not None:
                        bar.update(len(piece))
    except (http.client.HTTPException, OSError) as error:
        raise DataError(
            f"{file.address} cannot be fetched ({getattr(error, 'reason', None) or error}); what "
            "has come is kept: the same command goes on."
        ) from None
    finally:
        if bar is not None:
            bar.close()


def _write(into, piece):
    try:
        into.write(piece)
        into.flush()
    except OSError as error:
        raise DataError(
            f"{into.name} cannot be written ({error.strerror}): make room, and the same command "
            "goes on; or name another folder."
        ) from None


def _unpack(archive, home):
    """Let `home` be the folder of its name in `archive`: all of it, or nothing."""
    aside = Path(tempfile.mkdtemp(dir=home.parent, prefix=".unpacking-"))
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(aside)
        else:
            with tarfile.open(archive) as opened:
                opened.extractall(aside, filter="data")
        os.replace(aside / home.name, home)
    except OSError as error:
        raise DataError(
            f"{archive} cannot be unpacked ({error.strerror or error}): make room, and the same "
            "command goes on."
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
