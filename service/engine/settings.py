"""The engine's own settings."""

from pydantic import BaseModel, ConfigDict, Field


class EngineSettings(BaseModel):
    """Limits of the queue, of a stream's backlog and pace, and of retries."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_waiting_requests: int = Field(
        default=1024, ge=1, le=1 << 30, description="samples that may wait for their first token"
    )
    max_waiting_tokens: int = Field(
        default=1 << 20, ge=1, le=1 << 50, description="prompt tokens of waiting requests, together"
    )
    max_pending_tokens: int = Field(
        default=4096, ge=1, le=1 << 30, description="tokens held for a client that reads too slowly"
    )
    stream_interval_ms: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="least time between messages of one stream, whose tokens gather; 0: every token at once",
    )
    max_step_retries: int = Field(
        default=3, ge=0, le=16, description="retries in a row of a step after a transient error"
    )
    retry_pause_s: float = Field(
        default=0.05, ge=0, le=3600, description="seconds before the first retry; doubles with each"
    )
    stuck_after_s: float = Field(
        default=120.0,
        gt=0,
        le=1e6,
        description="seconds after which one step counts as stuck: streams end, requests are refused till it is over",
    )
