"""Settings from flags, environment and defaults, in this order."""

from argparse import ArgumentParser
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from service import config
from service.api.settings import ServerSettings
from service.engine.scheduling import SchedulingSettings
from service.engine.settings import EngineSettings
from service.errors import ConfigError


def parsed(*flags: str):
    parser = ArgumentParser()
    config.add_arguments(parser, *config.LAYERS)
    return parser.parse_args(flags)


def test_flag_wins_over_environment_and_environment_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.load(ServerSettings, parsed()).port == 50051
    monkeypatch.setenv("CHAIRLIFT_PORT", "7001")
    assert config.load(ServerSettings, parsed()).port == 7001
    assert config.load(ServerSettings, parsed("--port", "7002")).port == 7002
    assert config.load(ServerSettings).port == 7001


def test_each_layer_takes_its_own_flags_only() -> None:
    args = parsed("--port", "1", "--max-num-seqs", "3", "--max-step-retries", "0")
    assert config.load(config.ExecutorSettings, args).max_num_seqs == 3
    assert config.load(EngineSettings, args).max_step_retries == 0
    assert config.load(ServerSettings, args).port == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--port", "65536"], "--port"),
        (["--block-size", "x"], "--block-size"),
        (["--max-receive-bytes", str(2**31)], "--max-receive-bytes"),
        (["--max-connection-age-s", "2147484"], "--max-connection-age-s"),
    ],
)
def test_bad_value_is_a_config_error_that_names_flag_and_value(flags: list[str], named: str) -> None:
    layer = config.ExecutorSettings if named == "--block-size" else ServerSettings
    with pytest.raises(ConfigError, match=named) as caught:
        config.load(layer, parsed(*flags))
    assert repr(flags[1]) in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "limit"), [("--threads", 1024), ("--max-num-seqs", 65536), ("--max-num-batched-tokens", 1048576)]
)
def test_count_is_accepted_at_its_limit_and_refused_beyond(flag: str, limit: int) -> None:
    budget = () if flag == "--max-num-batched-tokens" else ("--max-num-batched-tokens", "1048576")
    config.load(config.ExecutorSettings, parsed(*budget, flag, str(limit)))
    with pytest.raises(ConfigError, match=f"{flag} or .*'{limit + 1}'.* {limit}"):
        config.load(config.ExecutorSettings, parsed(*budget, flag, str(limit + 1)))


def test_bad_environment_value_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_KV_DTYPE", "float7")
    with pytest.raises(ConfigError, match="CHAIRLIFT_KV_DTYPE: 'float7'"):
        config.load(config.ExecutorSettings, parsed())


def test_unknown_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config.check_environment()
    monkeypatch.setenv("CHAIRLIFT_PROT", "1")
    with pytest.raises(ConfigError, match="CHAIRLIFT_PROT"):
        config.check_environment()


def test_what_kubernetes_sets_beside_a_service_of_that_name_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {
        "SERVICE_HOST": "10.0.0.11",
        "SERVICE_PORT": "50051",
        "SERVICE_PORT_GRPC": "50051",
        "PORT": "tcp://10.0.0.11:50051",
        "PORT_50051_TCP": "tcp://10.0.0.11:50051",
        "PORT_50051_TCP_PROTO": "tcp",
        "PORT_50051_TCP_PORT": "50051",
        "PORT_50051_TCP_ADDR": "10.0.0.11",
        "CANARY_SERVICE_HOST": "10.0.0.12",  # of chairlift-canary
        "CANARY_PORT": "tcp://10.0.0.12:50051",
    }
    for name, value in links.items():
        monkeypatch.setenv(f"CHAIRLIFT_{name}", value)
    config.check_environment()
    assert config.load(ServerSettings, parsed()).port == ServerSettings().port
    assert config.load(ServerSettings, parsed("--port", "7")).port == 7
    monkeypatch.setenv("CHAIRLIFT_PORT", "1234")
    assert config.load(ServerSettings, parsed()).port == 1234
    monkeypatch.setenv("CHAIRLIFT_SERVICE", "x")
    with pytest.raises(ConfigError, match="CHAIRLIFT_SERVICE is no setting"):
        config.check_environment()


def test_unknown_key_is_refused() -> None:
    with pytest.raises(ValidationError):
        EngineSettings(prot=1)  # type: ignore[call-arg]


def test_settings_are_frozen() -> None:
    settings = config.load(ServerSettings)
    with pytest.raises(ValidationError):
        settings.port = 1


def test_every_field_has_a_flag_with_help_and_appears_once() -> None:
    names = [name for layer in config.LAYERS for name in layer.model_fields]
    assert len(names) == len(set(names))
    assert all(field.description for layer in config.LAYERS for field in layer.model_fields.values())


def test_executor_gets_its_own_part() -> None:
    settings = config.load(
        config.ExecutorSettings, parsed("--max-num-seqs", "512", "--threads", "3", "--kv-prefault", "on")
    )
    executor = settings.executor_config(Path("m"))
    assert (executor.max_num_seqs, executor.max_num_batched_tokens) == (512, 512)
    assert (executor.num_threads, executor.spin, executor.kv_prefault, executor.model_dir) == (
        3,
        "step",
        "on",
        Path("m"),
    )


def test_executor_gets_what_concerns_gpus() -> None:
    executor = config.load(config.ExecutorSettings, parsed()).executor_config(Path("m"))
    assert ("cpu", "eager", None, "off") == (
        executor.device,
        executor.capture,
        executor.capture_buckets,
        executor.deterministic,
    )
    flags = ("--device", "cuda", "--capture", "lazy", "--capture-buckets", "1,8,64", "--deterministic", "on")
    executor = config.load(config.ExecutorSettings, parsed(*flags)).executor_config(Path("m"))
    assert ("cuda", "lazy", (1, 8, 64)) == (executor.device, executor.capture, executor.capture_buckets)
    for wrong in ("1,", "x", "1;8", "-1", "123456"):
        with pytest.raises(ConfigError, match="--capture-buckets"):
            config.load(config.ExecutorSettings, parsed(f"--capture-buckets={wrong}"))


@pytest.mark.parametrize("flags", [["--max-num-seqs", "513"], ["--max-num-batched-tokens", "15"]])
def test_step_without_room_for_every_sequence_is_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens .*: must be at least max_num_seqs, (513|16)"):
        config.load(config.ExecutorSettings, parsed(*flags))


def test_all_settings_print_as_one_flat_mapping() -> None:
    settings = [config.load(layer) for layer in config.LAYERS]
    printed = config.printable(settings)
    assert printed["port"] == 50051
    assert set(printed) == {name for layer in config.LAYERS for name in layer.model_fields}


def test_tenant_weights_are_read_from_one_flag() -> None:
    args = parsed("--policy", "fair", "--tenant-weights", "a=3,b.c=0.5", "--priority-aging-s", "1.5")
    ordering = config.load(SchedulingSettings, args).ordering()
    assert (ordering.policy, ordering.tenant_weights) == ("fair", (("a", 3.0), ("b.c", 0.5)))
    assert ordering.aging_ns == 1_500_000_000


@pytest.mark.parametrize(
    "weights",
    [
        "a",
        "a=",
        "=1",
        "a=0",
        "a=9e-7",
        "a=1000001",
        "a=-1",
        "a=nan",
        "a=inf",
        "a=1,a=2",
        "a=1, b=2",
        "ü=1",
        f"{65 * 't'}=1",
    ],
)
def test_tenant_weights_that_are_none_are_refused(weights: str) -> None:
    with pytest.raises(ConfigError, match="--tenant-weights"):
        config.load(SchedulingSettings, parsed("--tenant-weights", weights))


@pytest.mark.parametrize("weights", ["a=1, b=2", "ü=1", 65 * "t" + "=1"])
def test_weights_of_tenants_that_no_caller_can_be_are_refused(weights: str) -> None:
    with pytest.raises(ConfigError, match="1 to 64 visible ASCII characters"):
        config.load(SchedulingSettings, parsed("--tenant-weights", weights))


NUMBERS = [
    (layer, f"--{name.replace('_', '-')}")
    for layer in config.LAYERS
    for name, field in layer.model_fields.items()
    if {int, float} & {field.annotation, *get_args(field.annotation)}
]


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "1e305", str(2**63)])
@pytest.mark.parametrize(("layer", "flag"), NUMBERS)
def test_every_number_has_limits(layer: type[BaseModel], flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} or .*{value}"):
        config.load(layer, parsed(f"{flag}={value}"))
