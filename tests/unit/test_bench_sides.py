"""Settings of two engines that take turns."""

import re
from argparse import ArgumentParser, Namespace

import pytest

from service.commands.bench_offline import add_arguments
from service.commands.bench_sides import sides
from service.errors import ConfigError

FREE_BYTES = 8 << 30


def arguments(*flags: str) -> Namespace:
    parser = ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--model", "none", "--requests", "none", *flags])


def test_second_engine_differs_in_what_is_named() -> None:
    flags = ["--kv-memory", "1MiB", "--spin", "off", "--against", "max-num-seqs = 2", "--against", "policy=fair"]
    first, second = sides(arguments(*flags), FREE_BYTES)
    assert ({}, {"max_num_seqs": "2", "policy": "fair"}) == (first.against, second.against)
    assert first.executor.model_dump() | {"max_num_seqs": 2} == second.executor.model_dump()
    assert first.scheduling.model_dump() | {"policy": "fair"} == second.scheduling.model_dump()


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--against", "batching"], "--against: 'batching' is no NAME=VALUE, as prefix_cache=off"),
        (["--against", "max_waiting_requests=1"], "--against: 'max_waiting_requests' is no setting of an engine"),
        (["--against", "spin=off", "spin=step"], "--against: 'spin' is given twice"),
        (["--against", "kv-dtype=int8", "--against", "kv_dtype=auto"], "--against: 'kv_dtype' is given twice"),
        (["--against", "batching=magic"], "--against: --batching or CHAIRLIFT_BATCHING: 'magic': Input should be"),
        (["--against", "kv_memory=50%"], "--against: kv_memory: '50%' is a share of free memory: each of two engines"),
        (["--against", "spin=off", "--kv-memory", "1"], "kv_memory: '1' is a share of free memory: each of"),
        (["--against", "host_kv_memory=0.1"], "--against: host_kv_memory: '0.1' is a share of free memory"),
        (["--cold", "--shared-prefix-scope", "all"], "shared_prefix_scope: 'all': passes would find each"),
        (["--cold", "--tenant-weights", "a=2"], "tenant_weights: 'a=2': with --cold each pass has tenants of"),
        (["--cold", "--against", "shared_prefix_scope=all"], "--against: shared_prefix_scope: 'all': passes would"),
        (["--cold", "--against", "tenant_weights=a=2"], "--against: tenant_weights: 'a=2': with --cold each pass"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(flags: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(error)}"):
        sides(arguments("--kv-memory", "1MiB", *flags), FREE_BYTES)


def test_cold_passes_refuse_a_shared_scope_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_SHARED_PREFIX_SCOPE", "all")
    with pytest.raises(ConfigError, match=r"^shared_prefix_scope: 'all': passes would find each other's prompts"):
        sides(arguments("--cold"), FREE_BYTES)
    assert "all" == sides(arguments(), FREE_BYTES)[0].scheduling.shared_prefix_scope


def test_two_kv_buffers_fit_free_memory_together() -> None:
    args = arguments("--kv-memory", "3MiB", "--against", "kv_memory=5MiB")
    assert ["3MiB", "5MiB"] == [side.executor.kv_memory for side in sides(args, 8 << 20)]
    with pytest.raises(ConfigError, match=r"^kv_memory: the two engines' 8,388,608 bytes are more than the 8,388,607 "):
        sides(args, (8 << 20) - 1)
    with pytest.raises(ConfigError, match=r"^--against: kv_memory: '5MiB' is more than the 4,194,304 bytes of free"):
        sides(args, 4 << 20)


def test_memory_of_a_gpu_is_not_the_hosts() -> None:
    args = arguments("--device", "cuda", "--kv-memory", "8MiB", "--against", "kv_memory=4MiB", "device=cpu")
    assert ["cuda", "cpu"] == [side.executor.device for side in sides(args, 4 << 20)]
