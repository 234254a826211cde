"""What is asked of a simulated deployment: who sends how long a request, and when."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from service.errors import ConfigError
from service.sim.arrivals import Arrivals
from service.sim.lengths import RequestLengths, read_lengths, read_object

NO_PREFIX: Final = -1
MAX_PREFIXES: Final = 1_000_000  # of a tenant
MAX_ARRIVAL_S: Final = 1e9  # 31 years: nanoseconds stay far from what 64 bits hold
_BATCH: Final = 4096
_WINDOW: Final = 1000  # lines of a trace that are sorted at a time


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a workload. Its tokens have no values: prompts are equal as far as they share a prefix."""

    arrival_ns: int  # since the workload's start; the simulation begins with the first one
    tenant: int  # index into the workload's tenants
    prompt_tokens: int  # the shared prefix included
    output_tokens: int
    prefix: int = NO_PREFIX  # which shared prefix the prompt begins with
    prefix_tokens: int = 0  # of that prefix, less than `prompt_tokens`


@dataclass(frozen=True, slots=True)
class Tenant:
    """A sender, with its part of all requests relative to the others' and its weight under a fair policy."""

    name: str
    share: float = 1.0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """`share` of each tenant's requests begin with one of its `count` prefixes of `num_tokens` tokens, chosen alike.

    The prefix comes before the prompt that the lengths give.
    """

    count: int
    num_tokens: int
    share: float = 1.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a number out of range."""
        if self.count < 0 or self.num_tokens < 0 or not 0 <= self.share <= 1:
            raise ConfigError(f"{self}: count and num_tokens must be at least 0, share between 0 and 1")


NO_PREFIXES: Final = SharedPrefixes(0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests drawn from distributions. The same seed draws the same ones."""

    arrivals: Arrivals
    lengths: RequestLengths
    num_requests: int
    tenants: tuple[Tenant, ...] = (Tenant("default"),)
    prefixes: SharedPrefixes = NO_PREFIXES
    seed: int = 0

    def requests(self) -> Iterator[SimRequest]:
        """The requests in the order of their arrival. Holds a few thousand at a time."""
        rng = np.random.default_rng(self.seed)
        times_s = self.arrivals.times_s(np.random.default_rng((self.seed, 1)))
        for start in range(0, self.num_requests, _BATCH):
            yield from self._batch(rng, times_s, min(_BATCH, self.num_requests - start))

    def _batch(self, rng: np.random.Generator, times_s: Iterator[float], count: int) -> Iterator[SimRequest]:
        shares = np.array([tenant.share for tenant in self.tenants])
        tenants = rng.choice(len(shares), count, p=shares / shares.sum())
        prompts, outputs = self.lengths.draw(rng, count)
        prefixes = np.full(count, NO_PREFIX, np.int64)
        if self.prefixes.count:
            has_prefix = rng.random(count) < self.prefixes.share
            chosen = tenants * self.prefixes.count + rng.integers(0, self.prefixes.count, count)
            prefixes[has_prefix] = chosen[has_prefix]
        prefix_tokens = np.where(prefixes == NO_PREFIX, 0, self.prefixes.num_tokens)
        columns = (tenants, prompts + prefix_tokens, outputs, prefixes, prefix_tokens)
        rows = zip(islice(times_s, count), *(column.tolist() for column in columns), strict=True)
        for time_s, tenant, prompt, output, prefix, num_prefix_tokens in rows:
            yield SimRequest(_arrival_ns(time_s), tenant, prompt, output, prefix, num_prefix_tokens)


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests: a JSONL file of `arrival_s`, lengths as `read_lengths` takes them, and perhaps a `tenant`.

    Arrival times are divided by `speed`, so that 2 replays the trace in half the time. Lines may be a little out of
    order, as logs are: none may come more than a thousand lines after one that arrived later.
    """

    path: Path
    tenants: tuple[Tenant, ...]  # whom the lines may name; one without a tenant is the first one's
    num_requests: int | None = None  # at most; None: all
    speed: float = 1.0

    def requests(self) -> Iterator[SimRequest]:
        """The requests in the order of their arrival, `num_requests` at most. Raises ConfigError for a wrong line."""
        window: list[tuple[int, int, SimRequest]] = []
        now_ns = 0  # up to where requests have been given out
        for line_number, request in islice(self._read(), self.num_requests):
            if request.arrival_ns < now_ns:
                limit = f"arrives before one that stands more than {_WINDOW} lines earlier: sort them by arrival_s"
                raise ConfigError(f"{self.path}:{line_number}: the request {limit}")
            heapq.heappush(window, (request.arrival_ns, line_number, request))
            if len(window) > _WINDOW:
                now_ns, _, earliest = heapq.heappop(window)
                yield earliest
        while window:
            yield heapq.heappop(window)[2]

    def _read(self) -> Iterator[tuple[int, SimRequest]]:
        numbers = {tenant.name: index for index, tenant in enumerate(self.tenants)}
        with self.path.open(encoding="utf-8", errors="replace") as lines:
            for line_number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{self.path}:{line_number}"
                    yield line_number, self._request(read_object(line, where), where, numbers)

    def _request(self, fields: dict[str, object], where: str, numbers: dict[str, int]) -> SimRequest:
        arrival_s = fields.get("arrival_s")
        if isinstance(arrival_s, bool) or not isinstance(arrival_s, int | float) or not 0 <= arrival_s < MAX_ARRIVAL_S:
            raise ConfigError(f"{where}: arrival_s is {arrival_s!r}, but must be seconds from the trace's start")
        tenant = fields.get("tenant", self.tenants[0].name)
        if not isinstance(tenant, str) or tenant not in numbers:
            raise ConfigError(f"{where}: tenant {tenant!r} is not one of {', '.join(numbers)}")
        prompt_tokens, output_tokens = read_lengths(fields, where)
        return SimRequest(_arrival_ns(arrival_s / self.speed), numbers[tenant], prompt_tokens, output_tokens)


def _arrival_ns(time_s: float) -> int:
    if not time_s < MAX_ARRIVAL_S:
        limit = f"must arrive within {MAX_ARRIVAL_S:g} s: raise the rate, or ask for fewer"
        raise ConfigError(f"a request arrives after {time_s:.4g} s, but all {limit}")
    return round(time_s * 1e9)


def parse_tenants(text: str) -> tuple[Tenant, ...]:
    """Read `NAME[:SHARE[:WEIGHT]],...`. Raises ConfigError."""
    tenants = []
    for part in text.split(","):
        name, *numbers = part.split(":")
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = [-1.0]
        if not name or len(values) > 2 or not all(0 < value < 1e9 for value in values):
            raise ConfigError(f"tenant {part!r}: must be NAME, NAME:SHARE or NAME:SHARE:WEIGHT, numbers above 0")
        tenants.append(Tenant(name, *values))
    if len({tenant.name for tenant in tenants}) < len(tenants):
        raise ConfigError(f"tenants {text!r}: a name comes twice")
    return tuple(tenants)
