"""How evenly tenants are served while they wait."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from service.sim.workload import Tenant

_WINDOW_NS: Final = 10_000_000_000


def jain_index(shares: npt.NDArray[np.float64]) -> float:
    """(sum x)^2 / (n sum x^2): 1 when all are equal, 1 / n when one has everything; 1 when nobody has anything."""
    squares = float(shares @ shares)
    return float(shares.sum()) ** 2 / (len(shares) * squares) if squares else 1.0


class ServiceShares:
    """Tokens computed for each tenant, and Jain's index over the tenants that are backlogged.

    Time is cut into windows, each of which lasts until the first step that ends when the next full ten seconds have
    come. A tenant is backlogged in a window when one of its requests was waiting at every moment of it; windows with
    fewer than two such tenants say nothing. Tokens count divided by weight.
    """

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self._weights = np.array([tenant.weight for tenant in tenants])
        self.totals: npt.NDArray[np.float64] = np.zeros(len(tenants))  # [num_tenants] tokens
        self._in_window: npt.NDArray[np.float64] = np.zeros(len(tenants))
        self._waiting = [0] * len(tenants)
        self._least_waiting = [0] * len(tenants)
        self._window_end_ns = _WINDOW_NS
        self._sum_of_indices = 0.0
        self.num_windows = 0  # that had at least two backlogged tenants

    @property
    def index(self) -> float | None:
        """Mean of the windows' Jain indices; None when no window counts."""
        return self._sum_of_indices / self.num_windows if self.num_windows else None

    def on_waiting(self, tenant: int, change: int) -> None:
        """One more (1) or one fewer (-1) of the tenant's requests is waiting."""
        count = self._waiting[tenant] + change
        self._waiting[tenant] = count
        self._least_waiting[tenant] = min(self._least_waiting[tenant], count)

    def on_step(self, end_ns: int, tenants: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int32]) -> None:
        """A step ended: its row i computed `num_tokens[i]` for `tenants[i]`."""
        served = np.bincount(tenants, num_tokens, len(self.totals))
        self.totals += served
        self._in_window += served
        if end_ns >= self._window_end_ns:
            self._close_window(end_ns)

    def _close_window(self, now_ns: int) -> None:
        backlogged = np.array(self._least_waiting) > 0
        if np.count_nonzero(backlogged) >= 2:
            self._sum_of_indices += jain_index((self._in_window / self._weights)[backlogged])
            self.num_windows += 1
        self._in_window[:] = 0.0
        self._least_waiting = self._waiting.copy()
        self._window_end_ns = (now_ns // _WINDOW_NS + 1) * _WINDOW_NS
