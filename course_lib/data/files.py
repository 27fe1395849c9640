"""Files and folders of images, on a disk or in a zip: what every layout is made of."""

import zipfile
import zlib

#: What torchvision takes for images, too.
IMAGE_FILES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
#: What classes are called that go by WordNet's numbers, such as n01443537: of Tiny-ImageNet, of
#: Kaggle's ImageNet-1K and of Caffe's.
WORDS = "words.txt", "LOC_synset_mapping.txt", "synset_words.txt"
DEVKIT, KAGGLE = "devkit", "Data/CLS-LOC"  # in the names of ImageNet-1K's folders
LARGEST = 1 << 28  # bytes of one file: no photograph has as many


class DataError(ValueError):
    """A data set that cannot be used; the message names the file and what to do."""


def content(file):
    """The bytes of `file`, one of those that `find` returns."""
    size = file.root.getinfo(file.at).file_size if zipped(file) else file.stat().st_size
    if size > LARGEST:
        raise DataError(f"{file} has {size:,} bytes, more than any image: remove it.")
    try:
        return file.read_bytes()
    except (NotImplementedError, RuntimeError) as error:  # Deflate64 and the like; encrypted
        raise DataError(
            f"{file} cannot be unpacked here ({error}): unpack the zip, and name the folder."
        ) from None


def zipped(file):
    return isinstance(file, zipfile.Path)


def folders_in(folder):
    """Its folders by name, without hidden ones and those that macOS adds to a zip."""
    inside = (item for item in folder.iterdir() if item.is_dir())
    wanted = (item for item in inside if not item.name.startswith((".", "__")))
    return sorted(wanted, key=lambda item: item.name)


def images_below(folder, prefix, seen):
    """(name, file) of every image in `folder` and the folders in it.

    seen  the real paths of folders that are looked through: links may lead to one again, and round
    """
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.name.startswith("."):
            continue
        if item.is_dir():
            if (real := real_path(item)) not in seen:
                seen.add(real)
                yield from images_below(item, f"{prefix}/{item.name}", seen)
        elif item.name.lower().endswith(IMAGE_FILES):
            if not item.is_file():
                raise DataError(f"{item} is no file, or a link to none: remove it.")
            yield f"{prefix}/{item.name}", item


def real_path(folder):
    return str(folder if zipped(folder) else folder.resolve())


def around(top):
    """The folders where a set's lists may be: its own, its devkit's, and the top of Kaggle's."""
    found = [top, *(each / "data" for each in folders_in(top) if DEVKIT in each.name.lower())]
    return [*found, top.parent.parent.parent] if top.name == KAGGLE.split("/")[-1] else found


def in_words(top, numbers):
    """What the classes are called, by one of `WORDS` where one is there."""
    words = {}
    for folder in around(top):
        for name in WORDS:
            words = words or words_of(folder / name)
    classes = [words.get(number, number) for number in numbers]
    if len(set(classes)) == len(classes):
        return classes
    twice = {name for name in classes if classes.count(name) > 1}  # two kinds of crane
    return [
        f"{name} ({number})" if name in twice else name
        for name, number in zip(classes, numbers, strict=True)
    ]


def words_of(file):
    """{WordNet's number: the first of its words}, empty where the file is not there."""
    if not file.is_file():
        return {}
    pairs = (line.split(None, 1) for line in text_of(file).splitlines())
    return {pair[0]: pair[1].split(",")[0].strip() for pair in pairs if len(pair) == 2}


def by_classes(folders, seen):
    """(name, label, file) of the images in `folders`, one for each class."""
    for folder in folders:
        if (real := real_path(folder)) in seen:
            raise DataError(f"{folder} leads to a folder that is in the set already: remove it.")
        seen.add(real)
    found = {  # by their names: a zip may have several members of one
        name: (name, label, file)
        for label, folder in enumerate(folders)
        for name, file in images_below(folder, folder.name, seen)
    }
    return found.values()


def text_of(file):
    try:
        return content(file).decode("utf-8-sig")
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"{file} is damaged ({error}): put back a good copy.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text ({error}): save it as UTF-8.") from None
