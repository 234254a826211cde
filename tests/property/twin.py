"""A scheduler's twin, that goes on alone."""

import copy

import numpy as np

from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.core.scheduler import Scheduler


def twin(scheduler: Scheduler, plan: StepPlan | None = None) -> tuple[Scheduler, StepPlan | None]:
    """A deep copy whose columns share memory as the original's do: numpy copies a view to an array of its own.

    With it comes its copy of `plan`, if that is in flight; this one may be committed there, and never aborted.
    """
    other, other_plan = copy.deepcopy((scheduler, plan))
    _link(scheduler.batch, other.batch)
    return other, other_plan


def _link(batch: BatchState, other: BatchState) -> None:
    arrays = {name: array for name, array in vars(batch).items() if isinstance(array, np.ndarray)}
    owners = {id(array): name for name, array in arrays.items() if array.base is None}
    for name, view in arrays.items():
        if view.base is not None:
            owner = owners[id(view.base)]
            start = view.ctypes.data - arrays[owner].ctypes.data
            setattr(other, name, np.ndarray(view.shape, view.dtype, getattr(other, owner), start, view.strides))
