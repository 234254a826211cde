"""The fair policy: tenants take turns by the tokens they were served."""

from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt

from service.core.batch_state import BatchState, Rows
from service.core.rank_queue import RankQueue
from service.core.scheduler_config import OrderingConfig
from service.core.sequence import Sequence, SequenceStatus
from service.core.types import Int32Array, Int64Array, Request

_ADMISSIONS_PER_OLDEST: Final = 16
_MOST_VIRTUAL_TIME: Final = 1024.0  # where floats are 2^-42 apart: less than a token of any weight and cost adds


class FairShare:
    """Virtual token counters: of the tenants that wait, the one that was served least goes next.

    From Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2, with weights. A counter
    grows by the prompt's tokens that are not cached at admission and by `output_token_cost` for each token generated,
    both divided by the tenant's weight. A tenant that comes back is lifted to the virtual time, so that it cannot
    save up what it did not use: that is the counter of the least served tenant that waits or, when nobody waits, of
    the last one admitted. What a preemption makes compute again is charged to nobody.

    Every sixteenth admission goes to the oldest request, whoever's it is, and is charged like any other: so a request
    with n older ones is admitted after about 16 (n + 1) admissions at most, however many tenants are made up meanwhile;
    those that pass a head which does not fit come on top, within their own bound.

    Counters of tenants without a request are kept for the `max_idle_tenants` latest of them. An older one is as if
    new: it loses, at most, the debt that its counter was ahead of the virtual time.

    Only differences count. When the virtual time has grown large it is taken off all counters, so that those which
    decide stay small, and a token of the largest weight shows in them beside those of the smallest.
    """

    def __init__(self, config: OrderingConfig) -> None:
        self._weights = dict(config.tenant_weights)
        self._output_token_cost = config.output_token_cost
        self._max_idle_tenants = config.max_idle_tenants
        self._num_ranked = 0
        self._slots: dict[str, int] = {}
        self._names: list[str] = []  # by slot, like the following; an entry is overwritten when its slot is given anew
        self._num_live: list[int] = []  # sequences that have not ended
        self._cost_factors: npt.NDArray[np.float64] = np.ones(0)  # 1 / weight
        self._served: npt.NDArray[np.float64] = np.zeros(0)  # the virtual token counters
        # What the choice is made by, of tenants that wait: the counter with the plan in flight, and the first rank.
        self._turns: npt.NDArray[np.float64] = np.zeros(0)  # infinite for the others
        self._first_ranks: Int64Array = np.zeros(0, np.int64)
        self._free_slots: list[int] = []
        self._idle: OrderedDict[str, None] = OrderedDict()  # longest idle first
        self._virtual_time = 0.0
        self._num_admissions = 0
        self._waiting: dict[int, RankQueue] = {}  # by slot; without the empty ones
        self._all_waiting = RankQueue()
        self._least: int | None = None  # the slot that goes next, once it was looked for and until anything changes
        # What the plan in flight has admitted: charge by slot, and the counters that were chosen as the least.
        self._charges: dict[int, float] = {}
        self._chosen: list[float] = []
        self._admitted: set[int] = set()  # slots
        self._num_planned = 0

    def enter(self, request: Request) -> tuple[int, int]:
        """The next rank, which orders a tenant's own requests, and the tenant's slot."""
        slot = self._slot_of(request.tenant)
        self._num_live[slot] += 1
        self._idle.pop(request.tenant, None)
        if slot not in self._waiting and slot not in self._admitted:  # it comes back
            self._served[slot] = max(self._served[slot], self._virtual_time)
        self._num_ranked += 1
        return self._num_ranked - 1, slot

    def leave(self, sequence: Sequence) -> None:
        """The tenant may be idle now."""
        self._num_live[sequence.tenant_slot] -= 1
        if self._num_live[sequence.tenant_slot]:
            return
        self._idle[self._names[sequence.tenant_slot]] = None
        if len(self._idle) > self._max_idle_tenants:
            name, _ = self._idle.popitem(last=False)
            self._free_slots.append(self._slots.pop(name))

    def push(self, sequence: Sequence) -> None:
        """Wait among the tenant's own."""
        self._waiting.setdefault(sequence.tenant_slot, RankQueue()).push(sequence)
        self._all_waiting.push(sequence)
        self._note_turn(sequence.tenant_slot)

    def remove(self, sequence: Sequence) -> None:
        """Wait no more."""
        waiting = self._waiting[sequence.tenant_slot]
        waiting.remove(sequence.seq_id)
        if not waiting:
            del self._waiting[sequence.tenant_slot]
        self._all_waiting.remove(sequence.seq_id)
        self._note_turn(sequence.tenant_slot)

    def head(self) -> Sequence | None:
        """The first one of the least served tenant; the oldest of all, at its turn."""
        if self._is_turn_of_oldest() or not self._waiting:
            return self._all_waiting.head()
        return self._waiting[self._least_served()].head()

    def first(self, count: int) -> list[Sequence]:
        """Those of the least served tenant by rank, then those of the next; before them the oldest, at its turn."""
        found = self._all_waiting.first(1) if self._is_turn_of_oldest() else []
        if len(found) == count or not self._waiting:
            return found
        for slot in self._by_turn(count + 1):
            found += [sequence for sequence in self._waiting[slot].first(count) if sequence not in found[:1]]
            if len(found) >= count:
                break
        return found[:count]

    def num_tokens_before(self, request: Request, longest: int | None = None) -> int:
        """What the tenant itself has waiting."""
        slot = self._slots.get(request.tenant)
        return self._waiting[slot].num_tokens_of(longest) if slot in self._waiting else 0

    def standing(self, batch: BatchState, rows: Int32Array) -> Int64Array:
        """Rows of the least served tenant first, a tenant's own by rank."""
        return np.lexsort((batch.rank[rows], self._served[batch.tenant_slot[rows]]))

    def admit(self, sequence: Sequence, num_new_tokens: int) -> None:
        """Charge what must be computed of the prompt, the first time."""
        slot = sequence.tenant_slot
        if not self._is_turn_of_oldest() and slot == self._least_served():
            self._chosen.append(self._counter(slot))
        self._num_planned += 1
        self._admitted.add(slot)
        if sequence.status is SequenceStatus.WAITING:
            charge = num_new_tokens * float(self._cost_factors[slot])
            self._charges[slot] = self._charges.get(slot, 0.0) + charge

    def commit(self, batch: BatchState, sampled_rows: Rows) -> None:
        """Charge what was admitted and generated, and move the virtual time on."""
        counts = np.bincount(batch.tenant_slot[sampled_rows], minlength=len(self._served))
        self._served += counts * self._cost_factors * self._output_token_cost
        for slot, charge in self._charges.items():
            self._served[slot] += charge
        self._num_admissions += self._num_planned
        self._turns = self._turns_as_served()
        if self._waiting:
            self._chosen.append(float(self._turns.min()))
        self._virtual_time = max(self._virtual_time, *self._chosen, 0.0)
        if self._virtual_time > _MOST_VIRTUAL_TIME:
            self._served -= self._virtual_time
            self._turns -= self._virtual_time
            self._virtual_time = 0.0
        self._forget_plan()

    def abort(self) -> None:
        """Charge nothing."""
        self._turns = self._turns_as_served()
        self._forget_plan()

    def counters(self) -> tuple[tuple[str, float], ...]:
        """Every tenant's counter, in the order of their names, then what is counted of no tenant."""
        tenants = [(name, float(self._served[slot])) for name, slot in sorted(self._slots.items())]
        return (*tenants, ("virtual time", self._virtual_time), ("admissions", float(self._num_admissions)))

    def _counter(self, slot: int) -> float:
        """What the tenant was served, the plan in flight included."""
        return float(self._served[slot]) + self._charges.get(slot, 0.0)

    def _forget_plan(self) -> None:
        self._charges.clear()
        self._chosen.clear()
        self._admitted.clear()
        self._num_planned = 0
        self._least = None

    def _note_turn(self, slot: int) -> None:
        """What says when it is the turn of the tenant has changed."""
        self._least = None
        waiting = self._waiting.get(slot)
        self._turns[slot] = np.inf if waiting is None else self._counter(slot)
        first = None if waiting is None else waiting.head()
        if first is not None:
            self._first_ranks[slot] = first.rank

    def _turns_as_served(self) -> npt.NDArray[np.float64]:
        """The turns without the plan in flight: float64[number of slots]."""
        return np.where(self._turns < np.inf, self._served, np.inf)

    def _least_served(self) -> int:
        """The tenant that goes next of those that wait: the least served one, of several the first by rank."""
        if self._least is None:
            (least,) = np.nonzero(self._turns == self._turns.min())
            self._least = int(least[self._first_ranks[least].argmin()])
        return self._least

    def _by_turn(self, count: int) -> list[int]:
        """Up to `count` tenants that wait, the next one first."""
        slots = np.lexsort((self._first_ranks, self._turns))[: min(count, len(self._waiting))]
        return slots.tolist()  # type: ignore[no-any-return]

    def _is_turn_of_oldest(self) -> bool:
        return (self._num_admissions + self._num_planned + 1) % _ADMISSIONS_PER_OLDEST == 0

    def _slot_of(self, tenant: str) -> int:
        if tenant in self._slots:
            return self._slots[tenant]
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = len(self._names)
            self._names.append(tenant)
            self._num_live.append(0)
            if slot == len(self._served):
                num_more = max(8, slot)
                self._served = np.append(self._served, np.zeros(num_more))
                self._cost_factors = np.append(self._cost_factors, np.ones(num_more))
                self._turns = np.append(self._turns, np.full(num_more, np.inf))
                self._first_ranks = np.append(self._first_ranks, np.zeros(num_more, np.int64))
        self._slots[tenant], self._names[slot] = slot, tenant
        self._served[slot] = self._virtual_time
        self._cost_factors[slot] = 1.0 / self._weights.get(tenant, 1.0)
        return slot
