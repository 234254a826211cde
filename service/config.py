"""Settings, one frozen model per layer. A value comes from the command line, else from the environment, else from its
default; CHAIRLIFT_KV_MEMORY sets what --kv-memory sets. The only place that reads the environment.
"""

import os
import re
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.api.settings import ServerSettings
from service.engine.scheduling import SchedulingSettings
from service.engine.settings import EngineSettings
from service.errors import ConfigError
from service.executor.config import (
    MAX_BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    MAX_THREADS,
    ExecutorConfig,
)

ENV_PREFIX = "CHAIRLIFT_"
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
_SERVICE_LINK = re.compile(
    rf"{ENV_PREFIX}(\w+_)?(SERVICE_HOST=.*|SERVICE_PORT(_\w+)?=\d+|PORT(_\d+_(TCP|UDP|SCTP))?=\w+://.*"
    r"|PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=.*)"
)


class ExecutorSettings(BaseModel):
    """How the model is run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where the model runs")
    kv_memory: str = Field(default="0.5", description="KV buffer: 512MiB, or a share of free memory, as 0.5")
    kv_prefault: Literal["off", "on"] = Field(
        default="off",
        description="cpu: off: the KV buffer takes memory as it fills; on: all of it at the start, which takes longer",
    )
    host_kv_memory: str = Field(
        default="0", description="cuda: pinned host memory that keeps KV blocks which the KV buffer has no room for"
    )
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"] = Field(
        default="auto",
        description="type of a KV element; cpu: float32, float16, int8; cuda: the weights' float16 or bfloat16, fp8",
    )
    block_size: int = Field(
        default=16, ge=1, le=MAX_BLOCK_SIZE, description="token positions per KV block, a power of two"
    )
    max_num_seqs: int = Field(default=16, ge=1, le=MAX_NUM_SEQS, description="sequences that run at the same time")
    max_num_batched_tokens: int = Field(
        default=512,
        ge=1,
        le=MAX_NUM_BATCHED_TOKENS,
        validate_default=True,
        description="tokens of one step, at least max_num_seqs",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        le=MAX_MODEL_LEN,
        description="tokens of one sequence, prompt and output; unset: the model's context",
    )
    threads: int | None = Field(
        default=None, ge=1, le=MAX_THREADS, description="threads of one step; unset: every usable processor"
    )
    spin: Literal["off", "step"] = Field(
        default="step", description="step: threads wait up to 100 us for a step's next piece before they sleep"
    )

    capture: Literal["eager", "lazy", "off"] = Field(
        default="eager",
        description="cuda: capture decode steps as CUDA graphs at the start, when needed, or never",
    )
    capture_buckets: str = Field(
        default="",
        pattern=r"^(\d{1,5}(,\d{1,5})*)?$",
        description="cuda: numbers of rows to capture, as 1,8,64; unset: a few up to max_num_seqs",
    )
    kernel_cache: str = Field(
        default="~/.cache/chairlift/kernels", min_length=1, description="cuda: folder that keeps compiled kernels"
    )
    deterministic: Literal["off", "on"] = Field(
        default="off",
        description="cuda: off: last bits of prefill and decode depend on what else is in the step; "
        "on: decode is cut by its own length, prefill never",
    )

    @field_validator("max_num_batched_tokens")
    @classmethod
    def _has_room_for_every_sequence(cls, max_num_batched_tokens: int, others: ValidationInfo) -> int:
        max_num_seqs = others.data.get("max_num_seqs", 1)  # missing when it is wrong itself
        if max_num_batched_tokens < max_num_seqs:
            reason = "must be at least max_num_seqs, {max_num_seqs}: every sequence needs its token in a step"
            raise PydanticCustomError("too_few_tokens", reason, {"max_num_seqs": max_num_seqs})
        return max_num_batched_tokens

    def executor_config(self, model_dir: Path) -> ExecutorConfig:
        """The executor's part, for one model folder."""
        return ExecutorConfig(
            model_dir=model_dir,
            device=self.device,
            kv_memory=self.kv_memory,
            kv_prefault=self.kv_prefault,
            host_kv_memory=self.host_kv_memory,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_threads=self.threads,
            spin=self.spin,
            capture=self.capture,
            capture_buckets=tuple(map(int, self.capture_buckets.split(","))) if self.capture_buckets else None,
            kernel_cache=self.kernel_cache,
            deterministic=self.deterministic,
        )


class LogSettings(BaseModel):
    """What is logged, and how."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level to log")
    log_format: Literal["auto", "json", "text"] = Field(
        default="auto", description="auto: text on a terminal, else json"
    )


LAYERS: tuple[type[BaseModel], ...] = (
    ExecutorSettings,
    EngineSettings,
    SchedulingSettings,
    ServerSettings,
    LogSettings,
)

Layer = TypeVar("Layer", bound=BaseModel)


class _Environment(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True)


def add_arguments(parser: ArgumentParser, *layers: type[BaseModel]) -> None:
    """Add a flag for each field of `layers`; what is not given stays out of the namespace."""
    for layer in layers:
        group = parser.add_argument_group((layer.__doc__ or "").rstrip(".").lower())
        for name, field in layer.model_fields.items():
            default = "" if field.default in (None, "") else f" (default {field.default})"
            text = f"{field.description}{default}".replace("%", "%%")
            group.add_argument(f"--{name.replace('_', '-')}", default=SUPPRESS, help=text, **_argument_type(field))


def load(layer: type[Layer], arguments: Namespace | None = None) -> Layer:
    """The settings of one layer. Raises ConfigError naming the first setting that is wrong."""
    given = {name: value for name, value in vars(arguments or Namespace()).items() if name in layer.model_fields}
    for name, field in layer.model_fields.items():
        if _is_service_link(f"{ENV_PREFIX}{name.upper()}"):
            given.setdefault(name, field.default)
    source = type(layer.__name__, (layer, _Environment), {"__module__": __name__, "__doc__": layer.__doc__})
    try:
        return cast(Layer, source(**given))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        flag, variable = f"--{name.replace('_', '-')}", f"{ENV_PREFIX}{name.upper()}"
        raise ConfigError(f"{flag} or {variable}: {first['input']!r}: {first['msg']}") from error


def check_environment() -> None:
    """Raise ConfigError for a CHAIRLIFT_ variable that sets nothing: most likely it is misspelt."""
    known = {f"{ENV_PREFIX}{name.upper()}" for layer in LAYERS for name in layer.model_fields}
    ours = (name for name in os.environ if name.startswith(ENV_PREFIX) and not _is_service_link(name))
    unknown = sorted(name for name in ours if name not in known)
    if unknown:
        raise ConfigError(f"the environment variable {unknown[0]} is no setting of Chairlift")


def _is_service_link(variable: str) -> bool:
    """Whether Kubernetes set `variable`, as it does in every pod beside a Service whose name begins with chairlift."""
    return bool(_SERVICE_LINK.fullmatch(f"{variable}={os.environ.get(variable, '')}"))


def printable(settings: Sequence[BaseModel]) -> dict[str, object]:
    """All settings as one flat mapping, for the line that is logged at the start."""
    return {name: value for part in settings for name, value in part.model_dump(mode="json").items()}


def _argument_type(field: FieldInfo) -> dict[str, Any]:
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return {"choices": get_args(annotation)}
    kinds = {int: "N", float: "X", str: "VALUE"}
    kind = next((kind for kind in (annotation, *get_args(annotation)) if kind in kinds), str)
    return {"metavar": kinds[kind]}
