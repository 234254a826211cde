"""A served model frees what it holds, whichever step fails."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from service.api.frontend import Frontend
from service.api.params import ModelLimits
from service.clock import MonotonicClock
from service.commands import assembly
from service.commands.assembly import ServedModel, load_model, prefix_keys
from service.config import ExecutorSettings
from service.core.scheduler import Scheduler
from service.core.scheduler_config import BatchingMode
from service.core.types import Request, SamplingParams, StepResult
from service.engine.engine import Engine
from service.engine.health import EngineState
from service.engine.scheduling import SchedulingSettings, scheduler_config
from service.engine.settings import EngineSettings
from service.errors import ConfigError, ModelFolderError
from service.text.chat import ChatTemplate
from tests.doubles import LIMITS, GatedExecutor, NullObserver, run_async, toy_tokenizer
from tests.unit.test_manifest import edit, write_folder
from tests.unit.tiny_export import write_tokenizer_json


def test_executor_is_closed_when_a_later_step_of_loading_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path)
    write_tokenizer_json(tmp_path)
    executor = GatedExecutor(replace(LIMITS, max_num_batched_tokens=LIMITS.max_num_seqs - 1))
    monkeypatch.setattr(assembly, "create_executor", lambda config: executor)
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        load_model(tmp_path, ExecutorSettings(), EngineSettings(), NullObserver())
    assert executor.is_closed


def test_a_tokenizer_with_ids_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    write_tokenizer_json(tmp_path)
    edit(tmp_path, lambda document: document["model"].update(vocab_size=255))  # type: ignore[attr-defined]
    with pytest.raises(ModelFolderError, match="tokenizer's largest id is 255, the manifest says a vocab_size of 255"):
        load_model(tmp_path, ExecutorSettings(), EngineSettings(), NullObserver())


def test_memory_that_the_system_refuses_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(config: object) -> GatedExecutor:
        np.zeros(2**60, np.uint8)
        raise AssertionError("no machine has an exbibyte")

    write_folder(tmp_path)
    write_tokenizer_json(tmp_path)
    monkeypatch.setattr(assembly, "create_executor", refused)
    with pytest.raises(ConfigError, match=r"too little memory .* max_num_seqs.*: Unable to allocate 1\.00 EiB"):
        load_model(tmp_path, ExecutorSettings(), EngineSettings(), NullObserver())


def test_engine_is_closed_when_what_it_runs_for_fails() -> None:
    async def main() -> None:
        settings, executor = EngineSettings(), GatedExecutor()
        scheduler = Scheduler(scheduler_config(LIMITS, settings))
        engine = Engine(
            scheduler, executor, settings, eos_token_ids=(), clock=MonotonicClock(), observer=NullObserver()
        )
        limits = ModelLimits(model_name="toy", vocab_size=1000, max_model_len=128, max_kv_tokens=256)
        frontend = Frontend(engine, toy_tokenizer(), ChatTemplate(None), limits, max_preparing_chars=1)
        model = ServedModel(engine, frontend)
        with pytest.raises(ConfigError, match="no"):
            async with model.running():
                raise ConfigError("no")
        assert (engine.state, executor.is_closed) == (EngineState.STOPPED, True)

    run_async(main())


@pytest.mark.parametrize(("batching", "prefix_cache"), [("static", "on"), ("dynamic", "on"), ("continuous", "off")])
def test_prompts_are_not_hashed_when_no_blocks_are_kept(
    tmp_path: Path, batching: BatchingMode, prefix_cache: Literal["on", "off"]
) -> None:
    scheduling = SchedulingSettings(batching=batching, prefix_cache=prefix_cache)
    _, digests = prefix_keys(write_folder(tmp_path), scheduling).of(np.arange(64, dtype=np.int32), "a", block_size=16)
    assert digests == b""
    assert not scheduler_config(LIMITS, EngineSettings(), scheduling).prefix_cache


@pytest.mark.parametrize(("settings", "chunks"), [({"max_chunk_tokens": 5}, [5, 5, 2]), ({}, [12])])
def test_the_bound_of_chunks_reaches_the_scheduler(settings: dict[str, int], chunks: list[int]) -> None:
    scheduler = Scheduler(scheduler_config(LIMITS, EngineSettings(), SchedulingSettings(**settings)))
    scheduler.add(Request(1, np.arange(12, dtype=np.int32), SamplingParams(1)))
    for num_tokens in chunks:
        plan = scheduler.plan(0)
        assert plan is not None
        assert plan.num_tokens == num_tokens
        scheduler.commit(plan, StepResult(np.zeros(np.count_nonzero(plan.samples), np.int32)))
    assert not scheduler.has_work


def test_host_memory_for_cached_prefixes_needs_the_prefix_cache() -> None:
    limits = replace(LIMITS, num_host_blocks=40, host_block_ns=7000.0)
    config = scheduler_config(limits, EngineSettings())
    assert (config.num_host_blocks, config.host_block_ns) == (40, 7000.0)
    for others in (SchedulingSettings(prefix_cache="off"), SchedulingSettings(batching="static")):
        with pytest.raises(ConfigError, match="host_kv_memory keeps cached prefixes: it needs prefix_cache on"):
            scheduler_config(limits, EngineSettings(), others)
