"""Values as Python has them, whatever library they come from: what can be compared, printed and written to any file.

Labels pass through :func:`plain` as they come in, and the constructor arguments of an estimator at the start of a call.
"""

from __future__ import annotations

import copy
from reprlib import Repr
from typing import Any, TypeVar

import numpy as np
from sklearn.base import BaseEstimator
from torch import Tensor

Estimator = TypeVar("Estimator", bound=BaseEstimator)

#: Longest text of an input, and most items of one, that a message quotes.
_MOST, _ITEMS = 300, 20

_repr = Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = _MOST
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxset = _ITEMS


def quoted(value: Any) -> str:
    """``repr`` for a message, its middle left out if it is as long as an encoded picture is."""
    return _repr.repr(value)


def plain(value: Any) -> Any:
    """Return a number or string as Python's own int, float, bool or str; anything else as it is.

    Scalars of NumPy and of tensors on any device become numbers, members of an enumeration of numbers too. A string of
    a class of its own, such as a member of an enumeration of strings, is what it compares equal to, whatever its
    ``__str__`` says. Tuples, lists and dictionaries are made of such values.
    """
    if isinstance(value, np.generic | np.ndarray | Tensor) and value.ndim == 0:
        value = value.item()
    if isinstance(value, str):
        return str.__str__(value)
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list | tuple):
        made = [plain(each) for each in value]
        return made if isinstance(value, list) else tuple(made)
    return {plain(name): plain(each) for name, each in value.items()} if isinstance(value, dict) else value


def snapshot(estimator: Estimator) -> Estimator:
    """Copy an estimator, for one call: no other thread changes the copy, whose constructor arguments are plain."""
    other = copy.copy(estimator)
    for name, value in other.get_params(deep=False).items():
        setattr(other, name, plain(value))
    return other
