"""One engine: a scheduler and an executor on a thread of their own, and the way to them."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Final

from service.clock import Clock
from service.core.scheduler import Scheduler
from service.core.types import Int32Array, Request, SamplingParams
from service.engine.client import Terms
from service.engine.health import EngineState, Heartbeat
from service.engine.inbox import Inbox
from service.engine.loop import EngineLoop
from service.engine.observer import EngineObserver
from service.engine.prefix_keys import PrefixKeys, PromptKeys
from service.engine.queue_room import QueueRoom
from service.engine.router import OutputRouter
from service.engine.settings import EngineSettings
from service.engine.stream import TokenStream
from service.errors import ChairliftError, DrainingError, EngineDeadError
from service.executor.api import Executor

_WATCH_PERIOD_S: Final = 1.0


class Engine:
    """Owns scheduler, executor and the engine thread; implements EngineClient.

    Made, started and closed on the event loop's thread. `start` warms the executor up on the engine thread, `close`
    ends the thread and frees the executor there.
    """

    def __init__(  # noqa: PLR0913  its parts are made by whoever puts a served model together
        self,
        scheduler: Scheduler,
        executor: Executor,
        settings: EngineSettings,
        *,
        eos_token_ids: tuple[int, ...],
        clock: Clock,
        observer: EngineObserver,
        prefix_keys: PrefixKeys | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._settings = settings
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._observer = observer
        self._prefix_keys = prefix_keys or PrefixKeys()
        self._inbox = Inbox(settings.max_waiting_requests)
        self._heartbeat = Heartbeat()
        self._suspect_ns: int | None = None  # when the step began that the last look found stuck
        self._seq_ids = itertools.count(1)
        self._state = EngineState.STARTING
        self._error: Exception | None = None
        self._is_left_behind = False  # the thread, by `close`
        self._router: OutputRouter
        self._room: QueueRoom
        self._thread: threading.Thread
        self._ended: asyncio.Future[None]

    @property
    def clock(self) -> Clock:
        """The engine's clock."""
        return self._clock

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._state

    @property
    def num_open_streams(self) -> int:
        """Sequences that are still being generated."""
        return self._router.num_open

    @property
    def is_alive(self) -> bool:
        """False when the engine is dead, or one step has taken longer than `stuck_after_s`."""
        is_stuck = self._heartbeat.silence_ns(self._clock.now_ns()) > self._settings.stuck_after_s * 1e9
        return self._state is not EngineState.DEAD and not is_stuck

    async def start(self) -> None:
        """Start the thread and wait until the executor is warm. Raises what the warm-up raised."""
        loop = asyncio.get_running_loop()
        self._router = OutputRouter(loop, self._clock, self._inbox.cancel)
        self._room = QueueRoom(self._settings, self._executor.limits, self._router)
        self._ended = loop.create_future()
        is_warm: asyncio.Future[None] = loop.create_future()

        def report_warm() -> None:
            self._state = EngineState.READY
            is_warm.set_result(None)

        self._thread = threading.Thread(
            target=self._run, args=(loop, lambda: loop.call_soon_threadsafe(report_warm)), name="engine", daemon=True
        )
        self._thread.start()
        try:
            await asyncio.wait({is_warm, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # a thread within a step would abort the process when the interpreter ends
            await self.close()
            raise
        if self._error is not None:
            await self.close()
            raise self._error

    def submit(self, prompt_token_ids: Int32Array, sampling: SamplingParams, terms: Terms | None = None) -> TokenStream:
        """Start a sequence; see EngineClient."""
        return self.submit_samples(prompt_token_ids, [sampling], terms)[0]

    def prompt_keys(self, prompt_token_ids: Int32Array, tenant: str) -> PromptKeys:
        """What the prefix cache calls the tenant's prompt; see EngineClient."""
        return self._prefix_keys.of(prompt_token_ids, tenant, self._executor.limits.block_size)

    def submit_samples(
        self,
        prompt_token_ids: Int32Array,
        samplings: Sequence[SamplingParams],
        terms: Terms | None = None,
        keys: PromptKeys | None = None,
    ) -> list[TokenStream]:
        """Start a sequence for each of `samplings`; see EngineClient."""
        terms = terms or Terms()
        now_ns = self._clock.now_ns()
        self._check_ready()
        self._room.check_prompt(len(prompt_token_ids), samplings)
        root, digests = keys or self.prompt_keys(prompt_token_ids, terms.tenant)
        streams: list[TokenStream] = []
        try:
            for sampling in samplings:
                request = Request(
                    next(self._seq_ids),
                    prompt_token_ids,
                    sampling,
                    self._eos_token_ids,
                    terms.tenant,
                    now_ns,
                    priority=terms.priority,
                    deadline_ns=terms.deadline_ns,
                    cache_root=root,
                    block_digests=digests,
                    fork_of=streams[0].seq_id if streams else None,
                )
                self._inbox.submit(request)
                stream = self._new_stream(request)
                self._router.open(stream)
                streams.append(stream)
        except ChairliftError:
            for stream in streams:
                self.cancel(stream.seq_id)
            raise
        return streams

    def cancel(self, seq_id: int) -> None:
        """Forget the sequence; see EngineClient. Must be called on the loop's thread."""
        if self._router.close(seq_id):
            self._inbox.cancel(seq_id)

    def drain(self) -> None:
        """Take no new sequences; open ones go on."""
        if self._state is EngineState.READY:
            self._state = EngineState.DRAINING

    def abandon_all(self, error: Exception) -> None:
        """End every open stream with `error`; their blocks are free at the next step boundary."""
        self._router.fail_all(error)

    def abandon_if_stuck(self) -> None:
        """Let no stream wait for a step that may never end. Nothing is taken till it does.

        To be called time and again: streams end when the call before found the same step stuck. A process that was
        paused finds every step stuck when it goes on, and the step needs a moment to end.
        """
        suspect_ns = None if self.is_alive else self._heartbeat.last_ns
        if suspect_ns is not None and suspect_ns == self._suspect_ns:
            self.abandon_all(self._stuck_error())
        self._suspect_ns = suspect_ns

    async def wait_ended(self) -> Exception | None:
        """Wait until the engine thread has stopped. Yields the error that stopped it, None after `close`."""
        await asyncio.shield(self._ended)
        return self._error

    async def close(self) -> None:
        """End open streams and the thread, free the executor. Idempotent.

        A thread that is stuck in a step is left behind, and the engine dead.
        """
        self._inbox.close()
        while not self._ended.done():
            await asyncio.wait({self._ended}, timeout=_WATCH_PERIOD_S)
            if not self.is_alive and not self._ended.done():
                self._is_left_behind = True
                self._end(self._stuck_error())
        if not self._is_left_behind:
            self._thread.join()

    def check_room(self, num_samples: int, num_ahead: int = 0) -> None:
        """Raise what can be known without a prompt; see EngineClient."""
        self._check_ready()
        self._room.check(num_samples, num_ahead)

    def _check_ready(self) -> None:
        if self._state is EngineState.DEAD:
            raise EngineDeadError("the engine has stopped after an error") from self._error
        if not self.is_alive:
            raise self._stuck_error()
        if self._state is not EngineState.READY:
            raise DrainingError(f"the engine is {self._state.value}")

    def _stuck_error(self) -> EngineDeadError:
        return EngineDeadError(f"a step has taken longer than {self._settings.stuck_after_s:g} s")

    def _new_stream(self, request: Request) -> TokenStream:
        interval_ns = round(self._settings.stream_interval_ms * 1e6)
        num_prompt_tokens = len(request.prompt_token_ids)
        stream = TokenStream(request.seq_id, num_prompt_tokens, self._settings.max_pending_tokens, interval_ns)
        stream.submitted_ns = request.arrival_ns
        return stream

    def _run(self, loop: asyncio.AbstractEventLoop, report_warm: Callable[[], object]) -> None:
        """The engine thread."""
        error: Exception | None = None
        try:
            with closing(self._executor):
                self._executor.warm_up()
                report_warm()
                steps = EngineLoop(
                    self._scheduler,
                    self._executor,
                    self._inbox,
                    self._router,
                    settings=self._settings,
                    clock=self._clock,
                    heartbeat=self._heartbeat,
                    observer=self._observer,
                )
                steps.run()
        except Exception as fault:
            error = fault
            if not self._is_left_behind:  # else the loop, to which its last tokens were to go, may be closed
                self._observer.on_death(fault)
        finally:
            if not self._is_left_behind:
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: Exception | None) -> None:
        if self._ended.done():  # it was told, and ended after all
            return
        self._error = error
        self._state = EngineState.STOPPED if error is None else EngineState.DEAD
        self._heartbeat.rest()
        ending = DrainingError("the server has stopped") if error is None else EngineDeadError("the engine has stopped")
        self._router.fail_all(ending)
        self._ended.set_result(None)
