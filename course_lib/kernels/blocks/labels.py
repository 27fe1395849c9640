"""Class numbers as targets: which of them count."""

from course_lib import cuda

IGNORED, INVALID = -1, -2  # in place of a label


@cuda.jit(device=True)
def index_label(target, row, n_classes, ignore_index):
    label = target[row]
    if label == ignore_index:
        return IGNORED
    if label < 0 or label >= n_classes:
        return INVALID
    return label
