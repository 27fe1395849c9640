"""Softmax and log-softmax without an axis, and as modules."""

import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from tensors import close, randn

from course_lib import nn, ops

NAMES = ("softmax", "log_softmax")
every_operator = pytest.mark.parametrize("name", NAMES)


@every_operator
@pytest.mark.parametrize("n_dims", range(5))
def test_without_an_axis_it_is_that_of_torch_nn_functional(name, n_dims):
    x = randn(tuple(range(2, 2 + n_dims)))
    with pytest.warns(UserWarning, match=f"Implicit dimension choice for {name}") as told:
        y = getattr(ops, name)(x, None)
    assert [warning.filename for warning in told] == [__file__]
    with pytest.warns(UserWarning, match="Implicit dimension"):
        close(y, getattr(F, name)(x))


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_modules_are_drop_in(name, dim):
    ours, theirs = getattr(nn, name)(dim), getattr(torch.nn, name)(dim)
    assert repr(ours) == repr(theirs) and ours.dim == dim and not ours.state_dict()
    assert isinstance(ours, getattr(torch.nn, name))
    assert repr(pickle.loads(pickle.dumps(ours))) == repr(theirs)
    for shape in ((), (3,), (3, 4), (2, 3, 4), (2, 3, 4, 5)):
        x = randn(shape)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            close(ours(x), theirs(x))
        assert len(caught) == (2 if dim is None else 0)
        if caught:
            assert caught[0].category is caught[1].category
            assert str(caught[0].message) == str(caught[1].message)
            assert caught[0].filename == __file__


@pytest.mark.parametrize("dim", [1.0, "1", True])
def test_modules_refuse_what_is_no_axis(dim):
    with pytest.raises(TypeError):  # some versions of PyTorch look when it is made
        nn.Softmax(dim)(randn(2, 3))
    with pytest.raises(TypeError):
        ops.softmax(randn(2, 3), dim)
