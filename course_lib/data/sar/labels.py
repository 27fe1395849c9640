"""What a label file holds, as classes 0, 1, … and −1 where there is no data."""

import re
from collections.abc import Mapping

import numpy as np

from ..layouts import DataError
from .scenes import NO_DATA


class LabelCode:
    """How labels are written, and which class each is.

    num_classes    how many classes there are. None: 2, or as many as `label_colours` tells of
    ignore_label   the label that means no data, besides −1, which always does
    label_colours  {colour: label} where labels are colours: each "#rrggbb" or (red, green, blue)

    Classes are the labels 0, 1, … in their order, `ignore_label` left out: where that is 0, five
    classes are written 1 to 5.
    """

    def __init__(self, num_classes=None, ignore_label=None, label_colours=None):
        if ignore_label is not None and not _is_whole(ignore_label):
            raise ValueError(f"ignore_label must be a whole number, not {ignore_label!r}")
        self.no_data = {NO_DATA, ignore_label} - {None}
        self.colours = None if label_colours is None else _colours(label_colours)
        if num_classes is None:
            num_classes = 2 if self.colours is None else self._n_coloured()
        if not _is_whole(num_classes) or num_classes < 2:
            raise ValueError(f"num_classes must be a whole number, 2 or more; not {num_classes!r}")
        left_out = sorted(label for label in self.no_data if 0 <= label < num_classes)
        last = num_classes + len(left_out)
        #: The label of each class.
        self.labels = tuple(label for label in range(last) if label not in left_out)
        self.allowed = (
            f"{self.labels[0]} to {self.labels[-1]} for {num_classes} classes, and "
            f"{' and '.join(str(label) for label in sorted(self.no_data))} for no data"
        )
        for colour, label in (self.colours or {}).items():
            if label not in self.no_data and label not in self.labels:
                raise ValueError(
                    f"label_colours gives {_written(colour)} the label {label}; expected "
                    f"{self.allowed}"
                )

    def _n_coloured(self):
        return len(set(self.colours.values()) - self.no_data)

    def read(self, label, name):
        """int64 (H, W): the class of each pixel of `label`, as it was read from the file `name`."""
        if self.colours is not None:
            label = self._from_colours(label, name)
        elif label.ndim == 3:
            raise DataError(
                f"{name} has the shape {label.shape}, as a coloured image has: expected (H, W), or "
                "label_colours that tell which label each colour is."
            )
        if label.dtype.kind not in "iub":
            raise DataError(f"{name} holds {label.dtype}: labels are whole numbers.")
        if label.ndim != 2:
            raise DataError(f"{name} has the shape {label.shape}: expected (H, W).")
        if label.dtype == bool:
            label = label.astype(np.uint8)
        missing = np.logical_or.reduce([label == number for number in self.no_data])
        wrong = ~missing & ((label < 0) | (label > self.labels[-1]))
        if wrong.any():
            row, column = np.unravel_index(wrong.argmax(), wrong.shape)
            raise DataError(
                f"{name} holds the label {label[row, column]}, first at row {row}, column "
                f"{column}: expected {self.allowed}."
            )
        known = np.where(missing, 0, label).astype(np.int64)
        return np.where(missing, NO_DATA, np.searchsorted(self.labels, known))

    def _from_colours(self, label, name):
        if label.ndim != 3 or label.shape[2] != 3 or label.dtype != np.uint8:
            raise DataError(
                f"{name} holds {label.dtype} of shape {label.shape}: expected the colours that "
                "label_colours asks for, uint8 (H, W, 3)."
            )
        red, green, blue = np.moveaxis(label.astype(np.uint32), 2, 0)
        pixels = red << 16 | green << 8 | blue
        known = np.array(sorted(self.colours), np.uint32)
        place = np.searchsorted(known, pixels).clip(max=len(known) - 1)
        wrong = known[place] != pixels
        if wrong.any():
            row, column = np.unravel_index(wrong.argmax(), wrong.shape)
            raise DataError(
                f"{name} has the colour {_written(pixels[row, column])}, first at row {row}, "
                f"column {column}, which label_colours does not name."
            )
        return np.array([self.colours[colour] for colour in known.tolist()])[place]


def _is_whole(number):
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def _colours(table):
    """{colour as one number: label}"""
    if not isinstance(table, Mapping) or not table:
        raise ValueError(f"label_colours must be {{colour: label}}, not empty; not {table!r}")
    found = {}
    for written, label in table.items():
        if isinstance(written, str) and re.fullmatch("#[0-9a-fA-F]{6}", written):
            colour = int(written[1:], 16)
        elif isinstance(written, tuple) and len(written) == 3 and all(
            _is_whole(part) and 0 <= part < 256 for part in written
        ):
            colour = int(written[0]) << 16 | int(written[1]) << 8 | int(written[2])
        else:
            raise ValueError(
                f"label_colours has {written!r}: expected '#rrggbb' or three numbers 0 to 255"
            )
        if not _is_whole(label):
            raise ValueError(f"label_colours gives {written!r} the label {label!r}: no number")
        if colour in found:
            raise ValueError(f"label_colours names {_written(colour)} twice")
        found[colour] = int(label)
    return found


def _written(colour):
    return f"#{int(colour):06x}"
