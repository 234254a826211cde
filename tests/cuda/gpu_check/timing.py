"""How long launches take: medians of a replayed CUDA graph, or of eager calls, between events."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

ROUNDS = {"sim": 1, "cuda": 50}
NUM_SERIES = 2  # that far apart, times can be trusted
WARM_UPS = 3


@dataclass(frozen=True)
class Timing:
    """Medians of series that were measured one after the other."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    def cells(self) -> dict[str, object]:
        """Of a row: the shorter median, and by what part of it the longer one is longer."""
        return {"us": round(1e6 * self.best, 2), "spread": f"{max(self.seconds) / self.best - 1:.1%}"}


def time_graph(device, enqueue: Callable[[int], None], num_calls: int) -> Timing:
    """Of one call: a graph of calls with 0, 1, ... is captured, then replayed again and again."""
    replay = device.capture(enqueue, num_calls)
    return _timing(device, lambda _: replay(), num_calls)


def time_calls(device, enqueue: Callable[[int], None], num_calls: int) -> Timing:
    """Of one call, without a graph: where a call takes less than the host needs for it, the host is timed."""

    def calls(_: int) -> None:
        for call in range(num_calls):
            enqueue(call)

    return _timing(device, calls, num_calls)


def _timing(device, group: Callable[[int], None], num_calls: int) -> Timing:
    device.seconds(group, WARM_UPS if device.name == "cuda" else 1)
    rounds = ROUNDS[device.name]
    series = [median(device.seconds(group, 1) for _ in range(rounds)) for _ in range(NUM_SERIES)]
    return Timing(tuple(each / num_calls for each in series))
