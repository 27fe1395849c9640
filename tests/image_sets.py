"""Small sets of images in the layouts that `data.images` reads."""

import numpy as np
from PIL import Image

NUMBERS = ("n01443537", "n01629819", "n01641577")
WORDS = ("goldfish, Carassius auratus", "salamander", "bullfrog")


def picture(path, seed, size=16, mode="RGB"):
    """A picture of one colour with noise; its seed says which."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    colour = np.random.default_rng(seed % 10).integers(40, 215, 3)
    pixels = (colour + random.integers(-30, 30, (size, size, 3))).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def tiny_imagenet(root, train=6, held=2, size=16):
    """Tiny-ImageNet's layout with three classes, each of its own colour."""
    lines = []
    for label, number in enumerate(NUMBERS):
        for i in range(train):
            file = root / "train" / number / "images" / f"{number}_{i}.JPEG"
            picture(file, 10 * i + label, size, "L" if i == 1 and label == 1 else "RGB")
        (root / "train" / number / f"{number}_boxes.txt").write_text("0 0 1 1\n")
        for i in range(held):
            name = f"val_{label * held + i}.JPEG"
            picture(root / "val" / "images" / name, 1000 + 10 * i + label, size)
            lines.append(f"{name}\t{number}\t0\t0\t9\t9\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    words = [f"{number}\t{word}\n" for number, word in zip(NUMBERS, WORDS, strict=True)]
    (root / "words.txt").write_text("n00001740\tentity\n" + "".join(words))
    return root


def class_folders(root, per_class=10, size=16):
    """Two folders of images."""
    for label, name in enumerate(("blue", "red")):
        for i in range(per_class):
            picture(root / name / f"{i}.png", 10 * i + label, size)
    return root
