"""Every error that Chairlift raises on purpose, one tree.

ChairliftError
├── ConfigError              the process refuses to start; one line on stderr, exit code 2
│   └── ModelFolderError     a model folder, or the file an export reads, cannot be used
├── InvalidRequestError      the caller's request breaks a documented limit
├── UnknownModelError        the caller means a model that this server does not hold
├── OverloadedError          the queue is full; try again after `retry_after_s`
├── SlowConsumerError        a client reads its stream too slowly
├── UnserviceableError       the request can never fit this deployment's KV buffer
├── DeadlineExceededError    the request's deadline passed, or cannot be met
├── DrainingError            the server is shutting down and takes no new requests
└── ExecutorError            a step failed
    └── EngineDeadError      the engine thread has stopped, or is stuck in a step; the process must restart

`api/status.py` maps each to a gRPC status, once. `graphs.errors` holds the exporter's own error, since `graphs`
never imports `service`.
"""


class ChairliftError(Exception):
    """Base of the tree; never raised itself."""


class ConfigError(ChairliftError):
    """A setting, file or machine property that keeps the process from starting."""


class ModelFolderError(ConfigError):
    """A model folder is incomplete, damaged, or written by a newer exporter."""


class InvalidRequestError(ChairliftError):
    """A request field breaks its limit. Names the field, the value and the limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}: {value!r} is not allowed: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class UnknownModelError(ChairliftError):
    """The caller means `model`, and this server holds another one."""

    def __init__(self, model: str, served: str) -> None:
        super().__init__(f"model {model!r} is not here; this server holds {served!r}")
        self.model = model


class OverloadedError(ChairliftError):
    """The queue is full. `retry_after_s` estimates, in seconds, when a retry may succeed."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SlowConsumerError(ChairliftError):
    """The reader of a stream lags beyond what the server holds for it."""


class UnserviceableError(ChairliftError):
    """The request needs more KV blocks than this deployment has."""


class DeadlineExceededError(ChairliftError):
    """The request's deadline passed before it was finished."""


class DrainingError(ChairliftError):
    """The server is shutting down."""


class ExecutorError(ChairliftError):
    """A step failed. `is_transient` says whether the same step may succeed when tried again."""

    def __init__(self, message: str, *, is_transient: bool = False) -> None:
        super().__init__(message)
        self.is_transient = is_transient


class EngineDeadError(ExecutorError):
    """The engine thread has stopped after an error it could not recover from, or its step seems never to end."""
