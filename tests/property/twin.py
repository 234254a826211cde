"""A scheduler's twin, that goes on alone."""

import copy

import numpy as np

from service.core.batch_state import BatchState
from service.core.scheduler import Scheduler


def twin(scheduler: Scheduler) -> Scheduler:
    """A deep copy whose columns share memory as the original's do: numpy copies a view to an array of its own."""
    other = copy.deepcopy(scheduler)
    _link(scheduler.batch, other.batch)
    return other


def _link(batch: BatchState, other: BatchState) -> None:
    arrays = {name: array for name, array in vars(batch).items() if isinstance(array, np.ndarray)}
    owners = {id(array): name for name, array in arrays.items() if array.base is None}
    for name, view in arrays.items():
        if view.base is not None:
            owner = owners[id(view.base)]
            start = view.ctypes.data - arrays[owner].ctypes.data
            setattr(other, name, np.ndarray(view.shape, view.dtype, getattr(other, owner), start, view.strides))
