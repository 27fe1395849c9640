"""What was compiled: the list, PTX and SASS, what is told apart, and what is deleted."""

import hashlib
import json
import os
import re
import shlex
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_compiler import ROOT, run

from course_lib import cli, kernels_command
from course_lib.kernels import activation
from course_lib.kernels.softmax import split
from course_lib.runtime.compile import cache

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed here (macOS)")

COMPILE = """
from course_lib.kernels import activation
from course_lib.runtime.compile import compiler
from course_lib.runtime.host.launch import argument_type
wanted = ("relu.forward naive float32", "sigmoid.forward naive bfloat16",
          "relu.forward vectorised float32")
for label, kernel, parts in activation.specialisations():
    if label in wanted:
        types = [argument_type(p) for p in parts]
        found = compiler.compile_kernel(kernel, types, (9, 0))
        print(label, found.registers, found.shared_bytes)
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder whose cache/ holds three kernels of the course, compiled in another process."""
    folder = tmp_path_factory.mktemp("filled")
    assert len(run(COMPILE, folder).splitlines()) == 3
    return folder


@pytest.fixture
def listed(filled, monkeypatch):
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(filled / "cache"))


@pytest.fixture
def copied(filled, tmp_path, monkeypatch):
    """As `listed`, but in a copy that may be spoilt. Returns the cache's folder."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for path in (filled / "cache").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(folder))
    return folder


def kernels(*arguments):
    return cli.main(["kernels", *arguments])


# ------------------------------------------------------------------------------ the list


def test_the_list_says_what_became_of_each_kernel(listed):
    found = kernels_command.rows()
    assert [(row.operation, row.label, row.signature, row.chip) for row in found] == [
        ("activation", "relu.forward naive", "2 × float32[::1]", "sm_90"),
        ("activation", "sigmoid.forward naive", "2 × bfloat16[::1]", "sm_90"),
        ("activation", "relu.forward vectorised", "2 × float32[::1], 2 × int64", "sm_90"),
    ]
    for row in found:
        assert row.registers > 0 and row.stack_bytes == row.shared_bytes == 0
        assert row.source == kernels_command.CURRENT
        assert row.path.stat().st_size == row.n_bytes and 0 <= time.time() - row.built < 3600


def test_a_kernel_of_several_ways_names_them():
    """Of a rung with ways; what `filled` compiles has none."""
    labels = {label for _, label in kernels_command._kernels(split)}
    assert "softmax.forward split, split/shared, split/cluster" in labels
    assert "softmax.backward split, finish, split/streamed" in labels
    assert "softmax.forward naive" in labels


def test_the_command_prints_it(listed, capsys):
    assert kernels() == 0
    text = capsys.readouterr().out
    assert "activation\n" in text and "relu.forward naive (2 × float32[::1])" in text
    assert "3 compiled kernels, " in text and str(cache.cache_folder()) in text
    assert ".kernel" not in text
    assert kernels("--paths") == 0
    assert len(re.findall(r"/[0-9a-f]{64}\.kernel$", capsys.readouterr().out, re.MULTILINE)) == 3


@pytest.mark.parametrize("word, number", [
    ("SIGMOID", 1), ("vectorised_k", 1), ("float32", 2), ("sm_90", 3), ("as built", 3),
])
def test_a_word_chooses(listed, word, number):
    assert len(kernels_command.rows(word)) == number


def test_nothing_found_is_said(listed, monkeypatch, capsys, tmp_path):
    assert kernels("sm_75") == 0
    assert "has 'sm_75' in its line" in capsys.readouterr().out
    for place in (tmp_path / "nowhere", tmp_path / "file"):
        (tmp_path / "file").write_text("no folder")
        monkeypatch.setenv(cache.CACHE_VARIABLE, str(place))
        for arguments, said in (((), "No compiled kernel in"), (("--clear",), "0 files, 0 bytes")):
            assert kernels(*arguments) == 0
            assert said in capsys.readouterr().out
        assert kernels("--ptx", "naive_kernel") == 2
        assert "which is empty" in capsys.readouterr().err


def test_a_reader_may_have_seen_enough(filled):
    environment = os.environ | {cache.CACHE_VARIABLE: str(filled / "cache")}
    command = f"{shlex.quote(sys.executable)} -m course_lib kernels | true"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], cwd=ROOT, env=environment,
                          capture_output=True, text=True, timeout=250)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("argtypes, text", [
    (["array(float32, 1d, C)"] * 2 + ["int64"], "2 × float32[::1], int64"),
    (["array(float16, 3d, A)", "array(float64, 2d, F)"], "float16[:, :, :], float64[::1, :]"),
    (["array(int32, 1d, C, readonly)", "__nv_bfloat16"], "int32[::1], bfloat16"),
    ([], ""),
])
def test_signatures_are_short(argtypes, text):
    assert kernels_command.short_signature(argtypes) == text


@pytest.mark.parametrize("module, operation", [
    ("course_lib.kernels.activation", "activation"),
    ("course_lib.kernels.softmax.split", "softmax"),
    ("course_lib.kernels.blocks.column_sums", "blocks"),
    ("course_lib.benchmarks.launch", "benchmarks.launch"),
    ("__main__", "notebook or script"),
    ("mine.kernels", "mine.kernels"),
])
def test_modules_are_called_by_their_operation(module, operation):
    assert kernels_command.operation_of(module) == operation


# ------------------------------------------------------------------- what is told apart


def test_a_changed_source_is_seen(listed, monkeypatch):
    monkeypatch.setattr(activation, "ONE", np.float32(2))  # sigmoid's; ReLU has no use for it
    sources = {row.kernel + row.signature: row.source for row in kernels_command.rows()}
    assert sources == {
        "naive_kernel2 × float32[::1]": kernels_command.CURRENT,
        "naive_kernel2 × bfloat16[::1]": kernels_command.CHANGED,
        "vectorised_kernel2 × float32[::1], 2 × int64": kernels_command.CURRENT,
    }
    assert f"  {kernels_command.CHANGED}: the source" in kernels_command.run()


def test_another_version_is_seen(listed, monkeypatch):
    monkeypatch.setattr("course_lib.runtime.compile.compiler._versions", lambda: ["another"])
    assert {row.source for row in kernels_command.rows()} == {kernels_command.CHANGED}


@pytest.mark.parametrize("gone", [
    {"module": "course_lib.kernels.gone"}, {"qualname": "gone_kernel"},
])
def test_a_kernel_that_went_is_seen(copied, gone):
    path = min(copied.iterdir())
    (head, cubin), (_, text) = cache.load(path), cache.machine_code(path)
    cache.save(path, head | gone, cubin, text)
    (row,) = kernels_command.rows(path.stem)
    assert row.source == kernels_command.CHANGED


LEAF = """
import numpy as np
from course_lib import cuda
@cuda.jit(device=True)
def leaf(v):
    return v * np.float32({factor})
"""
MIDDLE = """
from course_lib import cuda
from mine import leaves
@cuda.jit(device=True)
def middle(v):
    return leaves.leaf(v)
"""
TOP = """
from course_lib import cuda
from mine.middles import middle
@cuda.jit
def kernel(x):
    i = cuda.grid(1)
    if i < x.shape[0]:
        x[i] = middle(x[i])
"""
USE = """
import sys
sys.path.insert(0, sys.argv[1])
from course_lib.runtime.compile import cache, compiler
from course_lib.runtime.host.launch import array_type
from mine.tops import kernel
found = compiler.compile_kernel(kernel, [array_type("float32")], (9, 0))
print(found.key, len(cache.entries()))
"""


def test_an_edited_device_function_two_files_away_is_compiled_again(tmp_path, monkeypatch, capsys):
    package = tmp_path / "mine"
    package.mkdir()
    for name, text in (("__init__", ""), ("middles", MIDDLE), ("tops", TOP)):
        (package / f"{name}.py").write_text(text)
    keys = []
    for factor, number in (("3.0", 1), ("5.0", 2), ("3.0", 2)):
        (package / "leaves.py").write_text(LEAF.format(factor=factor))
        key, held = run(USE, tmp_path, tmp_path).split()
        keys.append(key)
        assert int(held) == number
    assert keys[0] == keys[2] != keys[1]
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    old, new = sorted(kernels_command.rows("mine"), key=lambda row: row.built)
    assert (old.key, new.key) == (keys[0], keys[1])
    # It is not imported to be looked at, but of two builds the first is known to be another.
    assert (old.source, new.source) == (kernels_command.CHANGED, kernels_command.UNKNOWN)
    assert "mine" not in sys.modules
    assert kernels("--ptx", "kernel") == 0  # the newer
    text = capsys.readouterr().out
    assert "0f40A00000" in text and "0f40400000" not in text  # 5 and not 3, as float32
    assert kernels("--ptx", old.key[:9]) == 0
    assert "0f40400000" in capsys.readouterr().out


def test_a_damaged_file_is_listed_as_such(copied, capsys):
    path, whole, another = sorted(copied.iterdir())
    path.write_bytes(path.read_bytes()[:-100])
    another.write_bytes(b"")
    sources = [row.source for row in kernels_command.rows()]
    assert sorted(sources) == [kernels_command.CURRENT] + [kernels_command.DAMAGED] * 2
    assert kernels() == 0
    assert f"  {kernels_command.DAMAGED}: " in capsys.readouterr().out
    assert kernels("--ptx", path.stem) == 2
    assert "no key that begins so" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is gone or damaged"):
        cache.machine_code(path)
    run(COMPILE, copied.parent)
    assert {row.source for row in kernels_command.rows()} == {kernels_command.CURRENT}


@pytest.mark.parametrize("head", [
    {"cubin_bytes": 3}, {"module": None}, {"module": 7}, {"file": ["a"]}, {"argtypes": [1]},
    {"compute_capability": [9]}, {"registers": "many"}, {"cubin_bytes": 1 << 40}, None,
])
def test_a_foreign_file_does_not_hide_the_others(copied, head):
    path = min(copied.iterdir())
    known, cubin = cache.load(path)
    foreign = {} if head is None else (head if head.keys() == {"cubin_bytes"} else known | head)
    text = json.dumps(foreign).encode()
    body = struct.pack("<I", len(text)) + text + cubin
    path.write_bytes(hashlib.sha256(body).digest() + body)
    sources = [row.source for row in kernels_command.rows()]
    assert sorted(sources) == [kernels_command.CURRENT] * 2 + [kernels_command.DAMAGED]
    assert cache.load(path) is None


def test_ptx_that_is_none_is_said(copied, capsys):
    path = min(copied.iterdir())
    head, cubin = cache.load(path)
    text = json.dumps(head).encode()
    body = struct.pack("<I", len(text)) + text + cubin + b"not packed"
    path.write_bytes(hashlib.sha256(body).digest() + body)
    assert kernels("--ptx", path.stem) == 2
    assert "is gone or damaged" in capsys.readouterr().err


# ------------------------------------------------------------------- whose folder it is


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_refused(copied, mode, capsys):
    path = min(copied.iterdir())
    head, cubin = cache.load(path)
    copied.chmod(mode)
    for use in (lambda: cache.load(path), lambda: cache.machine_code(path), cache.entries,
                lambda: cache.save(path, head, cubin, "")):  # fmt: skip
        with pytest.raises(cache.CacheError, match=f"others .mode {mode:o}.*kernels --clear"):
            use()
    assert kernels() == 2
    said = capsys.readouterr().err
    assert f"run chmod go-w {copied}, or name another folder in COURSE_LIB_CACHE" in said
    assert kernels("--clear") == 0 and not list(copied.glob("*.kernel"))
    copied.chmod(0o755)
    assert kernels() == 0


def test_a_folder_of_another_users_is_refused(copied, monkeypatch):
    path = min(copied.iterdir())
    if os.geteuid() == 0:
        os.chown(copied, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(cache.CacheError, match="belongs to another user .number "):
        cache.load(path)


def test_a_new_folder_is_the_users_alone(copied, tmp_path):
    path = min(copied.iterdir())
    head, cubin = cache.load(path)
    before = os.umask(0o002)
    try:
        cache.save(tmp_path / "new" / "kernels" / path.name, head, cubin, "")
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "kernels").stat().st_mode & 0o777 == 0o700
    assert cache.load(tmp_path / "new" / "kernels" / path.name) == (head, cubin)


HOMELESS = """
import os, pwd, sys
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
from course_lib import cli
from course_lib.runtime.compile import cache
from course_lib.teach.keeping import record
print(cache.cache_folder())
record.path()
sys.exit(cli.main(["kernels"]))
"""


def test_no_home_is_needed(tmp_path):
    dropped = ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "COURSE_LIB_PROGRESS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment.pop(cache.CACHE_VARIABLE, None)
    environment |= {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", HOMELESS], cwd=ROOT, env=environment,
                          capture_output=True, text=True, timeout=250)  # fmt: skip
    assert done.returncode == 0, done.stderr
    own = tmp_path / f"course_lib-{os.getuid()}"
    assert Path(done.stdout.splitlines()[0]).is_relative_to(own)
    assert f"No compiled kernel in {own}" in done.stdout


# ------------------------------------------------------------------------- PTX and SASS


def test_ptx_is_printed_under_a_heading(listed, capsys):
    assert kernels("--ptx", "vectorised_kernel") == 0
    text = capsys.readouterr().out
    assert text.startswith("// vectorised_kernel of relu.forward vectorised, sm_90: ")
    assert ".visible .entry" in text and "st.global.v4" in text


def test_of_several_one_must_be_named(listed, capsys):
    assert kernels("--ptx", "naive_kernel") == 2
    said = capsys.readouterr().err
    assert "is compiled 2 times; name one by its key" in said
    (row,) = kernels_command.rows("sigmoid")
    assert kernels("--ptx", row.key[: kernels_command.SHOWN]) == 0
    capsys.readouterr()
    assert kernels("--ptx", "nave_kernel") == 2
    assert "there are naive_kernel, vectorised_kernel" in capsys.readouterr().err


def tool(folder, name, text, status=0):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho {text}; echo broken >&2; exit {status}\n")
    path.chmod(0o755)


def test_sass_takes_the_first_disassembler_that_can(listed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernels_command.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path / "path") + ":/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert kernels("--sass", "vectorised_kernel") == 2
    assert "neither is on PATH" in capsys.readouterr().err
    tool(tmp_path / "path", "nvdisasm", "old", status=3)
    assert kernels("--sass", "vectorised_kernel") == 2
    assert re.search("no disassembler could read .*nvdisasm: broken", capsys.readouterr().err, re.S)
    (tmp_path / "toolkit").mkdir()
    tool(tmp_path / "toolkit" / "bin", "cuobjdump", "$1")
    assert kernels("--sass", "vectorised_kernel") == 0
    assert "\n-sass\n" in capsys.readouterr().out


def test_sass_is_printed(listed, capsys):
    if not list(kernels_command.disassemblers()):
        pytest.skip("no nvdisasm and no cuobjdump here")
    assert kernels("--sass", "vectorised_kernel") == 0
    text = capsys.readouterr().out
    assert "STG.E.128" in text and "EXIT" in text  # 16 bytes at a time


# ------------------------------------------------------------------------------- clearing


def test_clear_deletes_what_is_ours_and_nothing_else(copied, tmp_path, capsys):
    name = "0123456789abcdef" * 4
    elsewhere = tmp_path / "elsewhere.kernel"
    elsewhere.write_text("kept")
    (copied / f"{name}.kernel").symlink_to(elsewhere)
    (copied / f"{name[::-1]}.kernel").mkdir()
    for other in ("notes.txt", "mine.kernel", f"{name}.kernel.bak", f"{name}.new.unfinished"):
        (copied / other).write_text("kept")
    abandoned = copied / f"{name}.old.unfinished"
    abandoned.write_bytes(b"x" * 10)
    os.utime(abandoned, (0, 0))
    left = {path.name for path in copied.iterdir()} - {abandoned.name}
    left -= {row.path.name for row in kernels_command.rows()}
    n_bytes = sum(row.n_bytes for row in kernels_command.rows()) + 10
    assert kernels("--clear") == 0
    assert f"4 files, {kernels_command.size(n_bytes)}." in capsys.readouterr().out
    assert {path.name for path in copied.iterdir()} == left and elsewhere.read_text() == "kept"
    assert kernels_command.rows() == []


def test_what_cannot_be_deleted_is_said(copied, monkeypatch, capsys):
    first, *_ = sorted(copied.iterdir())
    unlink = type(first).unlink

    def refuse(path, **options):
        if path == first:
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, **options)

    monkeypatch.setattr(type(first), "unlink", refuse)
    assert kernels("--clear") == 1
    assert f"Permission denied: '{first}'" in capsys.readouterr().err
    assert list(copied.iterdir()) == [first]  # the others went


@pytest.mark.parametrize("arguments", [("--ptx",), ("--ptx", "a", "--clear"), ("a", "b")])
def test_what_makes_no_sense_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        kernels(*arguments)
    assert stopped.value.code == 2
    capsys.readouterr()


BUSY = """
import sys, pathlib
from course_lib import cuda
from course_lib.runtime.compile import cache, compiler
from course_lib.runtime.host.launch import array_type
@cuda.jit
def doubled(x):
    i = cuda.grid(1)
    if i < x.shape[0]:
        x[i] = x[i] + x[i]
told = False
while pathlib.Path(sys.argv[1]).exists():  # until it is told to stop
    found = compiler.compile_kernel(doubled, [array_type("float32")], (9, 0))
    assert found.cubin[:4] == b"\\x7fELF" and found.registers > 0
    told = told or print("compiled", flush=True) is None
"""


def test_processes_share_a_cache_that_is_being_emptied(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    (go := tmp_path / "go").touch()
    environment = os.environ | {"COURSE_LIB_SIMULATOR": "0"}
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    users = [
        subprocess.Popen([sys.executable, script, go], env=environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]  # fmt: skip
    for user in users:
        assert user.stdout.readline() == "compiled\n"
    (entry,) = cache.entries()  # one of them wrote, or both the same
    deleted = 0
    while deleted < 4:  # each time one of them compiles again
        assert [user.poll() for user in users] == [None, None]
        deleted += cache.clear()[0]
        kernels_command.rows()
        time.sleep(0.02)
    go.unlink()
    for user in users:
        _, errors = user.communicate(timeout=250)
        assert (user.returncode, errors) == (0, "")
    assert not list(cache.cache_folder().glob("*.unfinished"))
    assert cache.load(entry.path) is None or cache.load(entry.path)[0]["key"] == entry.key
