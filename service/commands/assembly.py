"""Puts a served model together: executor, scheduler, engine, and the front side before them."""

import gc
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from graphs.manifest import Manifest, ManifestError
from service.api.frontend import Frontend
from service.api.params import ModelLimits
from service.clock import MonotonicClock
from service.config import ExecutorSettings
from service.core.scheduler import Scheduler
from service.engine.engine import Engine
from service.engine.observer import EngineObserver
from service.engine.prefix_keys import PrefixKeys
from service.engine.scheduling import SchedulingSettings, scheduler_config
from service.engine.settings import EngineSettings
from service.errors import ConfigError, ModelFolderError
from service.executor.factory import create_executor
from service.text.chat import ChatTemplate
from service.text.tokenizer import Tokenizer

SWITCH_INTERVAL_S = 2e-4
CHARS_PER_TOKEN = 64
"""More than prompts have: what waits to be tokenised is bounded by what may wait as tokens."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model. Owns its engine, which runs inside `running`, on the event loop."""

    engine: Engine
    frontend: Frontend

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Warm up; close the engine in the end, however it comes. Raises what the warm-up raised, and ConfigError
        when memory runs out in it.

        What was made before is never looked at by the garbage collector again.
        """
        # The engine thread must get the interpreter back quickly after each forward pass.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        with _memory_that_suffices():
            await self.engine.start()
        try:
            gc.collect()
            gc.freeze()
            yield
        finally:
            await self.engine.close()


def load_model(
    model_dir: Path,
    executor: ExecutorSettings,
    engine: EngineSettings,
    observer: EngineObserver,
    scheduling: SchedulingSettings | None = None,
) -> ServedModel:
    """Check and load a model folder. Raises ModelFolderError for the folder, ConfigError for a setting."""
    try:
        manifest = Manifest.load(model_dir)
    except ManifestError as error:
        raise ModelFolderError(str(error)) from error
    model = manifest.model
    tokenizer = Tokenizer.load(model_dir)
    if tokenizer.vocab_size > model.vocab_size:
        limit = f"the manifest says a vocab_size of {model.vocab_size}"
        raise ModelFolderError(f"{model_dir}: the tokenizer's largest id is {tokenizer.vocab_size - 1}, {limit}")
    chat_template = _chat_template(model_dir, manifest, tokenizer)
    with ExitStack() as undo, _memory_that_suffices():
        loaded = undo.enter_context(closing(create_executor(executor.executor_config(model_dir))))
        scheduler = Scheduler(scheduler_config(loaded.limits, engine, scheduling))
        clock = MonotonicClock()
        served = Engine(
            scheduler,
            loaded,
            engine,
            eos_token_ids=model.eos_token_ids,
            clock=clock,
            observer=observer,
            prefix_keys=prefix_keys(manifest, scheduling or SchedulingSettings()),
        )
        limits = ModelLimits(
            model_name=model.name,
            vocab_size=model.vocab_size,
            max_model_len=loaded.limits.max_model_len,
            max_kv_tokens=(loaded.limits.num_blocks - 1) * loaded.limits.block_size,
        )
        frontend = Frontend(served, tokenizer, chat_template, limits, CHARS_PER_TOKEN * engine.max_waiting_tokens)
        undo.pop_all()  # the executor is the engine's from here on
    return ServedModel(served, frontend)


def _chat_template(model_dir: Path, manifest: Manifest, tokenizer: Tokenizer) -> ChatTemplate:
    """The folder's template, which may name the model's special tokens."""
    model = manifest.model
    tokens = {
        name: None if token_id is None else tokenizer.token(token_id)
        for name, token_id in (("bos_token", model.bos_token_id), ("eos_token", next(iter(model.eos_token_ids), None)))
    }
    return ChatTemplate.load(model_dir, **tokens)


def prefix_keys(manifest: Manifest, scheduling: SchedulingSettings) -> PrefixKeys:
    """The names that prompts have in the prefix cache: blocks of another model, or of other weights, never match."""
    model_hash = ",".join(f"{name}:{record.sha256}" for name, record in sorted(manifest.files.items()))
    return PrefixKeys(model_hash, scheduling.shared_prefix_scope, scheduling.uses_prefix_cache)


@contextmanager
def _memory_that_suffices() -> Iterator[None]:
    """Raise ConfigError for memory that the system refuses."""
    try:
        yield
    except MemoryError as error:
        sizes = "max_num_seqs, max_num_batched_tokens and max_model_len"
        reason = str(error) or "none is left"
        raise ConfigError(f"too little memory for the buffers that {sizes} ask for: {reason}") from error
