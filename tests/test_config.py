"""Settings from a YAML file: what is wrong is told with its line, and nothing is guessed."""

from pathlib import Path

import pytest

from course_lib.train import config
from course_lib.train.config import ConfigError
from course_lib.train.sar import SarSettings


def read(tmp_path, text):
    path = tmp_path / "sar.yaml"
    path.write_text(text, encoding="utf-8")
    return config.read(path, SarSettings)


def test_every_key_is_read(tmp_path):
    found = read(tmp_path, """
# a comment
use_cuda: null
in_channels: 3
num_classes: 5
depth: 3
initial_channels: 16
use_batchnorm: false
num_epochs: 2
batch_size: 4
learning_rate: 1e-3
loss_function: focal
image_size: 64
train_ratio: 0.75
augment: false
normalize: false
data_dir: some/where
unit: power
use_synthetic_data: false
num_synthetic_samples: 8
ignore_label: 0
label_colours: {"#0000ff": 1, "#00ff00": 0}
precision: float32
checkpoint_dir: runs/one
seed: 7
""")  # fmt: skip
    assert found == SarSettings(
        None, 3, 5, 3, 16, False, 2, 4, 0.001, "focal", 64, 0.75, False, False,
        Path("some/where"), "power", False, 8, 0, {"#0000ff": 1, "#00ff00": 0}, "float32",
        Path("runs/one"), 7,
    )  # fmt: skip
    assert isinstance(found.learning_rate, float)


def test_an_empty_file_asks_for_nothing(tmp_path):
    assert read(tmp_path, "# nothing\n") == SarSettings()


@pytest.mark.parametrize("text, words", [
    ("depth: 3\nlearning_rte: 0.1", r"line 2: unknown key 'learning_rte'; there are use_cuda, .*"),
    ("depth: 3\n\ndepth: 4", "line 3: depth is given twice"),
    ("depth: three", "line 1: depth must be a whole number, not 'three'"),
    ("depth: 2.5", "line 1: depth must be a whole number, not 2.5"),
    ("depth: true", "line 1: depth must be a whole number, not True"),
    ("depth: 1", "line 1: depth must be 2 or more, not 1"),
    ("num_epochs: 0", "num_epochs must be 1 or more"),
    ("learning_rate: fast", "learning_rate must be a number, not 'fast'"),
    ("learning_rate: true", "learning_rate must be a number"),
    ("learning_rate: -1", "learning_rate must be 0 or more"),
    ("use_cuda: maybe", "use_cuda must be true or false or null, not 'maybe'"),
    ("use_batchnorm: null", "use_batchnorm must be true or false, not None"),
    ("loss_function: hinge", r"must be dice \| cross_entropy \| combined \| focal, not 'hinge'"),
    ("ignore_label: x", "ignore_label must be a whole number or null"),
    ("label_colours: 3", "label_colours must be lines of `key: value` or null"),
    ("data_dir: 3", "data_dir must be a path or null"),
    ("- depth", "line 1: expected lines of"),
    ("depth: [1,", "line 1: this is no YAML"),
    ("depth: 3\n  seed: 4", "line 2: this is no YAML"),
    ("depth: !!python/object:os.system 3", "line 1: .*python/object"),
])
def test_what_is_wrong_is_told_with_its_line(tmp_path, text, words):
    with pytest.raises(ConfigError, match=f"sar.yaml.*{words}"):
        read(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.yaml cannot be read"):
        config.read(tmp_path / "nowhere.yaml", SarSettings)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00depth")
    with pytest.raises(ConfigError, match="bytes.yaml"):
        config.read(tmp_path / "bytes.yaml", SarSettings)
    with pytest.raises(ConfigError, match="cannot be read"):
        config.read(tmp_path, SarSettings)
