"""Radar scenes that cannot be used: each is refused in one sentence that names the file."""

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sar_files import SHAPE, arrays, chips, classes, decibels, picture, refused, save, tile_file

from course_lib.data import DataError, sar


@pytest.mark.parametrize("change, words", [
    (lambda root: (root / "labels/b.npy").unlink(), ["images/b.npy", "no label"]),
    (lambda root: (root / "images/b.npy").unlink(), ["labels/b.npy", "no image"]),
    (lambda root: save(root / "images/a.png", np.zeros(SHAPE, np.uint8)), ["a.npy", "a.png"]),
    (lambda root: save(root / "labels/a.npy", classes(0, (12, 11))), ["(2, 12, 10)", "(12, 11)"]),
    (lambda root: save(root / "labels/a.npy", classes(0)[None]), ["labels/a.npy", "(1, 12, 10)"]),
    (lambda root: save(root / "labels/a.npy", classes(0)[0]), ["labels/a.npy", "(10,)"]),
    (lambda root: save(root / "labels/a.npy", classes(0) / 2), ["labels/a.npy", "float64"]),
    (lambda root: save(root / "images/a.npy", decibels(0)[:1]), ["images/b.npy", "1 band", "2"]),
    (lambda root: save(root / "images/b.npy", np.zeros((2, *SHAPE), np.uint8)), ["b.npy", "grey"]),
    (lambda root: save(root / "images/a.npy", decibels(0) * 1j), ["images/a.npy", "complex64"]),
    (lambda root: save(root / "images/a.npy", decibels(0).astype("M8[s]")), ["a.npy", "datetime"]),
    (lambda root: save(root / "images/a.npy", decibels(0).astype(np.int16)), ["int16", "unit"]),
    (lambda root: save(root / "images/a.npy", decibels(0)[0, 0]), ["images/a.npy", "(10,)"]),
    (lambda root: [save(root / "images/a.npy", decibels(0, (2, 0, 3))),
                   save(root / "labels/a.npy", np.zeros((0, 3), int))], ["a.npy", "no pixel"]),
    (lambda root: np.save(root / "images/a.npy", np.array([{}, 1]), allow_pickle=True),
     ["images/a.npy", "pickle"]),
    (lambda root: (root / "images/a.npy").write_bytes(b""), ["images/a.npy", "whole"]),
    (lambda root: tile_file(root / "t.npz").replace(root / "images/a.npy"), ["a.npy", "whole"]),
    (lambda root: [(root / "images/a.npy").unlink(), os.mkfifo(root / "images/a.npy")],
     ["images/a.npy", "no regular file"]),
    (lambda root: [(root / "images/a.npy").unlink(), (root / "images/a.npy").mkdir()],
     ["images/a.npy", "no regular file"]),
    (lambda root: [(root / "images/a.npy").unlink(), (root / "images/a.npy").symlink_to("gone")],
     ["images/a.npy", "not there"]),
    (lambda root: [save(file, np.full(SHAPE, -1)) for file in (root / "labels").iterdir()],
     ["no labelled pixel"]),
    (lambda root: [file.unlink() for file in root.glob("*/*")], ["no scenes", "S1Hand"]),
])
def test_folders_that_cannot_be_used(tmp_path, change, words):
    assert len(sar.load(arrays(tmp_path), image_size=12)) == 2
    change(tmp_path)
    refused(*words, source=tmp_path)


@pytest.mark.parametrize("act, words", [
    ("read_bytes", ["images/a.npy", "cannot be read"]), ("iterdir", ["images", "cannot be listed"]),
])
def test_what_may_not_be_read(tmp_path, monkeypatch, act, words):
    def denied(path):  # the tests may run as a user who may read everything
        raise PermissionError(13, "Permission denied", str(path))

    arrays(tmp_path)
    monkeypatch.setattr(Path, act, denied)
    refused("Permission denied", *words, source=tmp_path)


def test_progress_and_a_home_folder(tmp_path, monkeypatch):
    seen = []

    def progress(scenes, **options):
        seen.append(options)
        for scene in scenes:
            seen.append(scene.name)
            yield scene

    monkeypatch.setenv("HOME", str(arrays(tmp_path / "home").parent / "home"))
    assert len(sar.load("~", image_size=12, progress=progress)) == 2
    assert seen == [{"total": 2, "unit": " scenes", "leave": False}, "a", "b"]


@pytest.mark.parametrize("name", ["absent", "absent.npz", "absent.png"])
def test_sources_that_are_not_there(tmp_path, name):
    refused(tmp_path / name, source=tmp_path / name)


def test_one_file_and_no_label(tmp_path):
    picture(tmp_path)
    refused("bay.png", "labels", source=tmp_path / "bay.png")
    refused("two", source=tmp_path / "bay.png", labels=tmp_path)
    (tmp_path / "notes.txt").write_text("no label")
    refused("notes.txt", "none of", source=tmp_path / "bay.png", labels=tmp_path / "notes.txt")


@pytest.mark.parametrize("changed, words", [
    ({"masks": None}, ["masks"]),
    ({"masks": np.zeros((4, 8, 7), np.int8)}, ["(4, 8, 7)"]),
    ({"masks": np.zeros((4, 8, 8), np.float32)}, ["masks", "float32"]),
    ({"masks": np.full((4, 8, 8), 7, np.int8)}, ["tile 0", "label 7", "row 0, column 0"]),
    ({"s1_db_x100": np.zeros((4, 3, 8, 8), np.int16)}, ["(4, 3, 8, 8)"]),
    ({"s1_db_x100": np.zeros((4, 2, 8, 8), np.float32)}, ["s1_db_x100", "float32"]),
    ({"s1_db_x100": np.zeros((4, 2, 0, 8), int), "masks": np.zeros((4, 0, 8), int)}, ["pixel"]),
    ({"chip": np.array([{}] * 4)}, ["pickle"]),
    ({"rowcol": np.full((4, 2), -1)}, ["rowcol"]),
])
def test_tile_files_that_cannot_be_used(tmp_path, changed, words):
    path = tile_file(tmp_path / "tiles.npz", **changed)
    refused(path, *words, source=path)


def test_chips_of_another_number_of_bands(tmp_path):
    chips(tmp_path)
    save(tmp_path / "S1Hand/Ghana_2_S1Hand.tif", decibels(0, (3, *SHAPE)))
    refused("Ghana_2_S1Hand.tif", "(3, 12, 10)", "VV", source=tmp_path)


@pytest.mark.parametrize("package", ["tifffile", "imagecodecs"])
def test_without_the_extra(tmp_path, monkeypatch, package):
    chips(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    assert importlib.util.find_spec(package) is None
    refused("S1Hand.tif", package, "pip install tifffile imagecodecs", source=tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """{kind: (what to load, the file that is spoilt)}"""
    root = tmp_path_factory.mktemp("whole")
    tiff = chips(root / "tif", names=["a"], compression="zlib")
    flat = chips(root / "flat", names=["a"])
    png = picture(root / "png", (12, 10), labels=1)
    tiles = tile_file(root / "tiles.npz")
    return {
        "npy": (arrays(root / "npy", ["a"]), root / "npy/images/a.npy"),
        "tif": (tiff, tiff / "S1Hand/a_S1Hand.tif"),
        "plain tif": (flat, flat / "S1Hand/a_S1Hand.tif"),
        "png": (png, png / "bay.png"),
        "npz": (tiles, tiles),
    }


@pytest.mark.parametrize("kind", ["npy", "tif", "plain tif", "png", "npz"])
@settings(max_examples=40, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True), flipped=st.booleans(), bit=st.integers(0, 7))
def test_spoilt_files_are_refused_by_name(whole, kind, share, flipped, bit):
    root, path = whole[kind]
    good, before = path.read_bytes(), sar.load(root).digest()
    place = int(share * len(good))
    spoilt = bytearray(good)
    spoilt[place] ^= 1 << bit
    path.write_bytes(bytes(spoilt) if flipped else good[:place])
    try:
        after = sar.load(root).digest()
        # A file cut short is refused, or it lacks nothing but what follows the pixels. Of one with
        # a bit flipped, only a checksum could tell.
        assert flipped or after == before
    except DataError as error:
        assert path.name in str(error) and "\n" not in str(error)
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("options", [
    {"image_size": 0}, {"image_size": 2.5}, {"image_size": True}, {"n_scenes": 0},
    {"num_classes": 1}, {"num_classes": "2"}, {"ignore_label": 0.5}, {"unit": "watts"},
    {"unit": "grey"}, {"labels": "x.png"}, {"label_colours": {}}, {"label_colours": [1]},
    {"label_colours": {"blue": 1}}, {"label_colours": {(0, 0, 256): 1}},
    {"label_colours": {"#0000ff": "1"}}, {"label_colours": {"#0000ff": 0, (0, 0, 255): 1}},
    {"label_colours": {"#0000ff": 5, "#000000": 0}},
])
def test_senseless_options(options):
    with pytest.raises(ValueError, match=next(iter(options))) as caught:
        sar.load(**options)
    assert not isinstance(caught.value, DataError)
