"""Where cached blocks go that the device gives up: host memory below the prefix cache."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from service.core.block_hash import DIGEST_BYTES
from service.core.copy_budget import CopyBudget
from service.core.eviction_queue import EvictionQueue
from service.core.plan import NO_COPIES
from service.core.scheduler_config import SchedulerConfig
from service.core.step_time import StepTimeModel
from service.core.types import NO_BLOCKS, NO_DIGEST, Int32Array, Int64Array, ObjectArray
from service.core.undo_log import UndoLog


@dataclass(slots=True)
class _OpenPlan:
    """What a plan in flight does with host memory."""

    mark: int  # where the queue ended when it began
    copies_out: list[Int32Array] = field(default_factory=list)  # [n, 2] (device block, host block)
    copies_in: list[Int32Array] = field(default_factory=list)  # [n, 2] (host block, device block)
    written: set[int] = field(default_factory=set)  # host blocks that it copies to


class BlockNames(Protocol):
    """The digests of the device's cached blocks, which may not have been computed yet."""

    def known(self, blocks: Int32Array) -> list[bytes]:
        """Those of `blocks` that are known; empty ones for the others."""
        ...

    def all(self, blocks: Int32Array) -> list[bytes]:
        """Those of `blocks`."""
        ...


class HostSnapshot(NamedTuple):
    """What later plans depend on."""

    free_blocks: tuple[int, ...] = ()  # in stack order
    queue: tuple[int, ...] = ()  # the other blocks, the next one to be overwritten first
    digests: tuple[bytes, ...] = ()  # [num_host_blocks] of what each holds; empty: nothing
    budget: tuple[float, bool] = (0.0, False)


class HostTier:
    """Digest -> host block, for blocks that the device has evicted. Part of the BlockPool, which undoes its changes.

    A plan copies out what it evicts, and in what its admissions find here. What it writes to is found by later plans
    only; what it reads, or evicts while it is here still, goes to the end of the queue, and no plan in flight takes
    from there: so none overwrites what it reads. An entry stays when it is copied in, and to give the block up once
    more costs no copy.

    The queue is the device's: least recently used first, and of blocks that come together a child before its parent. A
    parent may be on the device alone; an entry whose ancestors are nowhere is found once they are computed again, or
    goes in its turn.

    A block is worth its copy, out or in, when that takes less time than computing its tokens; and as long as too few
    steps were measured to know. Copies out have a budget beside that, which copies in pay for.
    """

    def __init__(self, config: SchedulerConfig, step_time: StepTimeModel) -> None:
        num_blocks = config.num_host_blocks
        self.log = UndoLog()  # of the pool, too
        self.num_copied_out = 0  # blocks, by committed plans
        self._block_size = config.block_size
        self._block_copy_ns = config.host_block_ns
        self._step_time = step_time
        self._budget = CopyBudget(num_blocks, config.host_block_ns, self.log)
        self._blocks: dict[bytes, int] = {}  # by digest
        self._digests: ObjectArray = np.full(num_blocks, NO_DIGEST, np.object_)  # [num_blocks] bytes
        self._queue = EvictionQueue(num_blocks, self.log)
        self._free = list(range(num_blocks))[::-1]  # the last one is the next to be taken
        self._open: deque[_OpenPlan] = deque()

    @property
    def num_used(self) -> int:
        """Blocks that hold something."""
        return len(self._blocks)

    @property
    def copies(self) -> tuple[Int32Array, Int32Array]:
        """`offload` and `restore` of the latest plan, so far."""
        plan = self._open[-1]
        out, in_ = plan.copies_out, plan.copies_in
        return np.concatenate(out) if out else NO_COPIES, np.concatenate(in_) if in_ else NO_COPIES

    def find(self, digests: bytes, start: int, end: int) -> Int32Array:
        """The host blocks of a chain's blocks from number `start` on, before `end`, as far as they are here.

        None of them when to compute their tokens takes less time. int32[num_found].
        """
        written = set().union(*(plan.written for plan in self._open))
        blocks: list[int] = []
        for offset in range(start * DIGEST_BYTES, end * DIGEST_BYTES, DIGEST_BYTES):
            block = self._blocks.get(digests[offset : offset + DIGEST_BYTES])
            if block is None or block in written:
                break
            blocks.append(block)
        if not blocks or not self._is_worth_copying(len(blocks), start):
            return NO_BLOCKS
        return np.array(blocks, np.int32)

    def begin(self) -> None:
        """A plan begins."""
        if not self._open:
            self._queue.compact()
        self._open.append(_OpenPlan(self._queue.end))

    def accept(self) -> None:
        """The earliest plan is committed."""
        self.num_copied_out += len(self._open.popleft().written)

    def roll_back(self) -> None:
        """The latest plan is taken back, with all else that was logged."""
        self._open.pop()

    def use(self, host_blocks: Int32Array) -> None:
        """Let what a chain's blocks hold be the most recently used, its last block the least so."""
        self._queue.remove(host_blocks)
        self._queue.push(host_blocks[::-1])

    def copy_in(self, host_blocks: Int32Array, blocks: Int32Array, start: int) -> Int32Array:
        """Copy host blocks that are used to `blocks` of the device, for a chain's blocks from number `start` on.

        Returns `blocks` in the order that makes runs of both.
        """
        targets = np.empty_like(blocks)
        targets[np.argsort(host_blocks)] = np.sort(blocks)
        self._budget.earn(max(0.0, self._computing_ns(len(blocks), start) - self._copy_ns(len(blocks))))
        self._open[-1].copies_in.append(np.stack([host_blocks, targets], axis=1))
        return targets

    def offload(self, blocks: Int32Array, names: BlockNames) -> None:
        """The device evicts `blocks`, a child before its parent: copy out what is not here, and is worth it.

        When they do not all find room, the last ones do. Blocks without a digest are taken for ones that are not here:
        to name them takes far longer than all else, so that is done only for what may be copied.
        """
        host_blocks = self._take_from_queue(names.known(blocks))
        new = self._last_with_room(host_blocks)
        if len(new) and self._is_worth_copying(1, 0) and self._budget.spend(len(new)):
            digests = names.all(blocks[new])
            host_blocks[new] = self._take_from_queue(digests)
            copied = self._last_with_room(host_blocks[new])
            self._budget.earn((len(new) - len(copied)) * self._block_copy_ns)  # what was here without our knowing
            targets = self._copy_out(blocks[new[copied]], [digests[index] for index in copied.tolist()])
            host_blocks[new[copied]] = targets
        self._queue.push(host_blocks[host_blocks >= 0])

    def holding(self, digests: list[bytes]) -> Int32Array:
        """The host blocks of those digests that are here."""
        return np.array([self._blocks[digest] for digest in digests if digest in self._blocks], np.int32)

    def lose(self, host_blocks: Int32Array) -> None:
        """Forget what these hold, or may hold no more: after a roll back, or with no plan open."""
        lost = host_blocks[self._queue.contains(host_blocks)]
        self._queue.remove(lost)
        digests = self._digests[lost].tolist()
        self._forget(lost)
        self.log.add(lambda: self._remember(lost, digests))
        num_free = len(self._free)
        self._free += lost.tolist()
        self.log.add(lambda: self._free.__delitem__(slice(num_free, None)))

    def snapshot(self) -> HostSnapshot:
        """A copy of the state."""
        queue, digests = tuple(self._queue.in_order().tolist()), tuple(self._digests.tolist())
        return HostSnapshot(tuple(self._free), queue, digests, self._budget.state)

    def _take_from_queue(self, digests: list[bytes]) -> Int32Array:
        """The host blocks of `digests`, no longer in the queue; -1 for one that is not here. int32[num_digests]."""
        host_blocks = np.array([self._blocks.get(digest, -1) if digest else -1 for digest in digests], np.int32)
        self._queue.remove(host_blocks[host_blocks >= 0])
        return host_blocks

    def _last_with_room(self, host_blocks: Int32Array) -> Int64Array:
        """The places of the last -1 in `host_blocks`, for as many as can be written to."""
        missing = np.flatnonzero(host_blocks < 0)
        num_room = len(self._free) + self._queue.num_before(self._open[0].mark)
        return missing[len(missing) - min(len(missing), num_room) :]

    def _copy_out(self, blocks: Int32Array, digests: list[bytes]) -> Int32Array:
        """Copy `blocks` of the device to host blocks, which there must be, in an order that makes runs."""
        targets = np.empty_like(blocks)
        targets[np.argsort(blocks)] = np.sort(self._take(len(blocks)))
        plan, target_list = self._open[-1], targets.tolist()
        plan.copies_out.append(np.stack([blocks, targets], axis=1))
        plan.written.update(target_list)
        self._remember(targets, digests)
        self.log.add(lambda: self._forget(targets))
        return targets

    def _is_worth_copying(self, num_blocks: int, start: int) -> bool:
        computing_ns = self._computing_ns(num_blocks, start)
        return computing_ns == 0 or self._copy_ns(num_blocks) < computing_ns

    def _computing_ns(self, num_blocks: int, start: int) -> float:
        """The time that the tokens of blocks take behind `start` others; 0 when not known."""
        return self._step_time.prompt_ns(num_blocks * self._block_size, start * self._block_size)

    def _copy_ns(self, num_blocks: int) -> float:
        return num_blocks * self._block_copy_ns

    def _take(self, count: int) -> Int32Array:
        """Take out `count` blocks: free ones, then the least recently used."""
        num_free = min(count, len(self._free))
        taken = self._free[len(self._free) - num_free :]
        del self._free[len(self._free) - num_free :]
        self.log.add(lambda: self._free.extend(taken))
        evicted = self._queue.pop(count - num_free)
        old = self._digests[evicted].tolist()
        self._forget(evicted)
        self.log.add(lambda: self._remember(evicted, old))
        return np.concatenate([np.array(taken, np.int32), evicted])

    def _remember(self, host_blocks: Int32Array, digests: list[bytes]) -> None:
        self._digests[host_blocks] = digests
        self._blocks.update(zip(digests, host_blocks.tolist(), strict=True))

    def _forget(self, host_blocks: Int32Array) -> None:
        for digest in self._digests[host_blocks].tolist():
            del self._blocks[digest]
        self._digests[host_blocks] = NO_DIGEST
