"""Stand-ins for a model: a toy tokenizer, executors that tests steer, and a whole served model on top of them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import grpc
import numpy as np
import tokenizers
from chairlift.inference.v1 import inference_pb2 as pb
from chairlift.inference.v1 import inference_pb2_grpc as pb_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import models, pre_tokenizers

from service.api.frontend import Frontend
from service.api.params import ModelLimits
from service.api.server import Server
from service.api.settings import ServerSettings
from service.clock import Clock, MonotonicClock
from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.core.scheduler import Scheduler
from service.core.types import StepDelta, StepResult
from service.engine.engine import Engine
from service.engine.observer import StepTimes
from service.engine.scheduling import SchedulingSettings, scheduler_config
from service.engine.settings import EngineSettings
from service.executor.api import ExecutorLimits, StepHandle
from service.executor.simulated import SimulatedExecutor, toy_tokens
from service.text.chat import ChatTemplate
from service.text.tokenizer import Tokenizer

VOCAB_SIZE = 1000
MODEL_NAME = "toy"
EOS_TOKEN_ID = 999
PROMPT = [5, 17, 333]
DEADLINE_S = 20.0
GATE_DEADLINE_S = 200.0  # longer than that of any test, whose end opens the gate
LIMITS = ExecutorLimits(num_blocks=65, block_size=4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=128)

T = TypeVar("T")


def run_async(main: Coroutine[object, object, T], deadline_s: float = DEADLINE_S) -> T:
    """Run a test's coroutine; a test that hangs fails."""
    return asyncio.run(asyncio.wait_for(main, deadline_s))


async def eventually(is_true: Callable[[], bool]) -> None:
    """Let the loop run until another thread or task has made it so. The deadline is `run_async`'s."""
    while not is_true():  # noqa: ASYNC110 the state belongs to the engine thread, which sets no event
        await asyncio.sleep(0)


def toy_tokenizer() -> Tokenizer:
    """Token n is the word `wn`; words are separated by one space."""
    vocabulary = {f"w{token_id}": token_id for token_id in range(VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(tokenizer)


def toy_text(token_ids: Sequence[int]) -> str:
    return " ".join(f"w{token_id}" for token_id in token_ids)


def toy_output(prompt_token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """What the toy model generates: each token follows from the one before and its position."""
    tokens = list(prompt_token_ids)
    for _ in range(num_tokens):
        tokens.append(int(toy_tokens([tokens[-1]], [len(tokens)], VOCAB_SIZE)[0]))
    return tokens[len(prompt_token_ids) :]


def request_for(prompt: Sequence[int] = PROMPT, **sampling: object) -> pb.GenerateRequest:
    """A greedy request for six tokens, unless `sampling` says otherwise."""
    fields: dict[str, object] = {"max_tokens": 6, "temperature": 0.0} | sampling
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=pb.SamplingParams(**fields))


class ManualClock:
    """Time that tests set."""

    def __init__(self) -> None:
        self.time_ns = 1

    def now_ns(self) -> int:
        return self.time_ns


class NullObserver:
    """Observes nothing."""

    def on_step(self, plan: StepPlan, delta: StepDelta, times: StepTimes) -> None:
        """Drop the event."""

    def on_step_failed(self, step_id: int, error: Exception, *, will_retry: bool) -> None:
        """Drop the event."""

    def on_death(self, error: Exception) -> None:
        """Drop the event."""


class GatedExecutor:
    """A SimulatedExecutor whose steps wait for the test, and raise what the test asks for."""

    def __init__(self, limits: ExecutorLimits = LIMITS) -> None:
        self.limits = limits
        self.errors: list[Exception] = []  # raised by the next steps, first one first
        self.failing_seq_ids: list[int] = []  # sequences whose logits cannot be sampled from
        self.num_arrived = 0  # steps that have come to the gate
        self.num_steps = 0  # those that have passed it
        self.warm_up_error: Exception | None = None
        self.close_error: Exception | None = None
        self.is_closed = False
        self._inner = SimulatedExecutor(limits, VOCAB_SIZE)
        self._gate = threading.Condition()
        self._num_allowed: float = float("inf")

    def close_gate(self) -> None:
        """Let no further step begin."""
        with self._gate:
            self._num_allowed = self.num_steps

    def allow(self, num_steps: float) -> None:
        """Let so many further steps begin."""
        with self._gate:
            self._num_allowed += num_steps
            self._gate.notify_all()

    def warm_up(self) -> None:
        if self.warm_up_error is not None:
            raise self.warm_up_error

    def dispatch(self, plan: StepPlan, batch: BatchState) -> StepHandle:
        return GatedStep(self, plan, batch)

    def run(self, plan: StepPlan, batch: BatchState) -> StepResult:
        with self._gate:
            self.num_arrived += 1
            assert self._gate.wait_for(lambda: self.num_steps < self._num_allowed, GATE_DEADLINE_S), (
                "the gate stayed shut"
            )
            self.num_steps += 1
        if self.errors:
            raise self.errors.pop(0)
        result = self._inner.dispatch(plan, batch).wait()
        is_failed = np.isin(batch.seq_ids[plan.rows[plan.samples]], self.failing_seq_ids)
        return replace(result, failed=np.flatnonzero(is_failed))

    def close(self) -> None:
        self.is_closed = True
        if self.close_error is not None:
            raise self.close_error


@dataclass(frozen=True)
class GatedStep:
    """A step that stands at the gate, or is to go there."""

    executor: GatedExecutor
    plan: StepPlan
    batch: BatchState
    can_continue: Final = False

    def wait(self) -> StepResult:
        return self.executor.run(self.plan, self.batch)


@dataclass
class Served:
    """An engine with a gated executor, and the front side before it."""

    executor: GatedExecutor
    scheduler: Scheduler
    engine: Engine
    frontend: Frontend

    @property
    def has_all_blocks_free(self) -> bool:
        return self.scheduler.counters.num_free_blocks == self.executor.limits.num_blocks - 1


@asynccontextmanager
async def served_toy(
    limits: ExecutorLimits = LIMITS,
    settings: EngineSettings | None = None,
    scheduling: SchedulingSettings | None = None,
    template: str | None = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}",
    clock: Clock | None = None,
    max_preparing_chars: int = 1 << 26,
) -> AsyncIterator[Served]:
    """A running toy model; closed at the end."""
    settings = settings or EngineSettings(retry_pause_s=0.0)
    executor = GatedExecutor(limits)
    scheduler = Scheduler(scheduler_config(limits, settings, scheduling))
    clock, eos_token_ids = clock or MonotonicClock(), (EOS_TOKEN_ID,)
    engine = Engine(scheduler, executor, settings, eos_token_ids=eos_token_ids, clock=clock, observer=NullObserver())
    model_limits = ModelLimits(
        model_name=MODEL_NAME,
        vocab_size=VOCAB_SIZE,
        max_model_len=limits.max_model_len,
        max_kv_tokens=(limits.num_blocks - 1) * limits.block_size,
    )
    tokenizer, chat_template = toy_tokenizer(), ChatTemplate(template)
    frontend = Frontend(engine, tokenizer, chat_template, model_limits, max_preparing_chars)
    await engine.start()
    try:
        yield Served(executor, scheduler, engine, frontend)
    finally:
        executor.allow(float("inf"))
        await engine.close()


@dataclass
class Connected:
    """A toy model behind a real port, and a client's channel to it."""

    served: Served
    server: Server
    port: int
    channel: grpc.aio.Channel
    hurry: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def stub(self) -> pb_grpc.InferenceServiceStub:
        return pb_grpc.InferenceServiceStub(self.channel)

    async def health(self, service: str) -> int:
        """The health status of a name."""
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await health_pb2_grpc.HealthStub(self.channel).Check(request)).status)

    def new_channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")


@asynccontextmanager
async def connected_toy(
    limits: ExecutorLimits = LIMITS,
    settings: EngineSettings | None = None,
    server_settings: ServerSettings | None = None,
    scheduling: SchedulingSettings | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[Connected]:
    """A toy model served on a free port of loopback; drained at the end."""
    server = Server(server_settings or ServerSettings(port=0), watch_period_s=0.01)
    port = server.bind()
    async with served_toy(limits, settings, scheduling, clock=clock) as served:
        await server.start(served.engine, served.frontend)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            connected = Connected(served, server, port, channel)
            try:
                yield connected
            finally:
                served.executor.allow(float("inf"))
                connected.hurry.set()
                await server.drain(connected.hurry)
