"""`python -m course_lib data`: what is told, asked and fetched, from a server on this machine."""

import dataclasses
import errno
import hashlib
import http.server
import io
import shutil
import tarfile
import threading
import zipfile

import pytest

from course_lib import cli
from course_lib.data import fetching

CONTENT = bytes(range(256)) * 4000


class Server(http.server.BaseHTTPRequestHandler):
    """Sends `served`; of a request only `most` bytes, and from the start where `whole` is set."""

    served, most, whole, asked = {}, None, False, []

    def do_GET(self):
        content, span = self.served.get(self.path), self.headers.get("Range")
        self.asked.append((self.path, span))
        if content is None:
            self.send_error(404)
            return
        start = int(span.removeprefix("bytes=").removesuffix("-")) if span else 0
        start = 0 if self.whole else start
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:][: self.most])

    def log_message(self, *given):
        pass


@pytest.fixture(scope="module")
def address():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def packed(name):
    """An archive, zip or tar by its name, with the folder of Tiny-ImageNet or of CIFAR-100."""
    into = io.BytesIO()
    if name.endswith("zip"):
        with zipfile.ZipFile(into, "w") as archive:
            archive.writestr("tiny-imagenet-200/words.txt", CONTENT)
    else:
        with tarfile.open(fileobj=into, mode="w:gz") as archive:
            member = tarfile.TarInfo("cifar-100-python/train")
            member.size = len(CONTENT)
            archive.addfile(member, io.BytesIO(CONTENT))
    return into.getvalue()


@pytest.fixture
def server(address, monkeypatch):
    """The sets as they are, but for their content, which comes from here."""
    for key, value in (("served", {}), ("asked", []), ("most", None), ("whole", False)):
        monkeypatch.setattr(Server, key, value)
    for name, public in list(fetching.SETS.items()):
        files = []
        for file in public.files:
            content = packed(file.name) if public.unpacked else file.name.encode() + CONTENT
            Server.served[f"/{file.name}"] = content
            md5 = hashlib.md5(content).hexdigest()
            files.append(fetching.File(f"{address}/{file.name}", len(content), md5))
        small = dataclasses.replace(public, files=files, unpacked=bool(public.unpacked))
        monkeypatch.setitem(fetching.SETS, name, small)
    return Server


def command(*words):
    return cli.main(["data", *map(str, words)])


@pytest.mark.parametrize("name, path, size", [
    ("tiny-imagenet", "tiny-imagenet-200/words.txt", "248,100,043"),
    ("cifar100", "cifar100/cifar-100-python/train", "169,001,437"),
    ("fashion-mnist", "fashion-mnist/t10k-labels-idx1-ubyte.gz", "26,421,880"),
])
def test_a_set_is_told_then_fetched_once(request, tmp_path, capsys, name, path, size):
    assert command(name, tmp_path) == 2  # nobody is there to agree
    said = capsys.readouterr()
    public = fetching.SETS[name]
    for word in (*public.files[0], public.terms, tmp_path):
        assert (f"{word:,}" if isinstance(word, int) else str(word)) in said.out
    assert size in said.out and "add --yes to agree" in said.err
    server = request.getfixturevalue("server")
    assert command(name, tmp_path, "--yes") == 0
    assert (tmp_path / path).read_bytes().endswith(CONTENT)
    whole = [file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()]
    assert len(whole) == len(server.asked) == len(fetching.SETS[name].files)
    assert "python -m course_lib train" in capsys.readouterr().out.splitlines()[-1]
    assert command(name, tmp_path) == 0 and len(server.asked) == len(whole)
    assert "is there. To train on it: python -m course_lib" in capsys.readouterr().out


@pytest.mark.parametrize("whole", [False, True])
def test_a_broken_download_goes_on(server, tmp_path, capsys, whole):
    server.most, server.whole = 1000, whole
    assert command("tiny-imagenet", tmp_path, "--yes") == 1
    said = capsys.readouterr().err
    assert "the same command goes on" in said and "Traceback" not in said
    server.most = None
    assert command("tiny-imagenet", tmp_path, "--yes") == 0
    assert [span for _, span in server.asked] == [None, "bytes=1000-"]
    assert (tmp_path / "tiny-imagenet-200" / "words.txt").read_bytes() == CONTENT
    assert [file.name for file in tmp_path.iterdir()] == ["tiny-imagenet-200"]


def test_ctrl_c_keeps_what_has_come(server, tmp_path, monkeypatch, capsys):
    def interrupted(into, piece):
        into.write(piece[:500])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetching, "_write", interrupted)
        assert command("cifar100", tmp_path, "--yes") == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert command("cifar100", tmp_path, "--yes") == 0
    assert server.asked[-1][1] == "bytes=500-"


@pytest.mark.parametrize("kept", [slice(-1), slice(None)])  # as long, and longer
def test_what_was_not_published_is_refused(server, tmp_path, capsys, kept):
    path = "/tiny-imagenet-200.zip"
    server.served[path] = server.served[path][kept] + b"?"
    assert command("tiny-imagenet", tmp_path, "--yes") == 1
    assert "is not what was published" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_stands_in_the_way_is_one_sentence(server, tmp_path, monkeypatch, capsys):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    class Full(io.FileIO):
        write = full

    (tmp_path / "file").write_text("")
    usage = shutil.disk_usage(tmp_path)
    for where, patched, words in (
        ("a", (shutil, "disk_usage", lambda path: usage._replace(free=10)), "has room for 0 MB"),
        ("b", (fetching, "open", lambda path, mode: Full(path, mode)), "(No space left on device)"),
        ("c", (zipfile.ZipFile, "extractall", full), "cannot be unpacked (No space left"),
        ("d", (server, "served", {}), "cannot be fetched (Not Found)"),
        ("file", (server, "most", 1), "cannot be written to"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(*patched, raising=False)
            assert command("tiny-imagenet", tmp_path / where, "--yes") == 1
        said = capsys.readouterr().err
        assert words in said and "Traceback" not in said and said.count("\n") == 1
        assert not (tmp_path / where / "tiny-imagenet-200").exists()
        if where == "c":  # the archive is whole: nothing is fetched again
            n = len(server.asked)
            assert command("tiny-imagenet", tmp_path / where, "--yes") == 0
            assert len(server.asked) == n


def test_who_is_asked_may_refuse(server, tmp_path, monkeypatch):
    from course_lib.train import data_command

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, status in (("", 2), ("no", 2), (" Y ", 0)):
        assert data_command.run("cifar100", tmp_path, ask=lambda _, a=answer: a) == status
    assert len(server.asked) == 1
