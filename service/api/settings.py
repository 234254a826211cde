"""The gRPC server's own settings."""

from pydantic import BaseModel, ConfigDict, Field

MAX_INT32 = 2**31 - 1  # the largest channel argument that gRPC takes


class ServerSettings(BaseModel):
    """Where the server listens, how it treats connections, how it stops."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field(default="127.0.0.1", description="address to listen on, in plaintext")
    port: int = Field(default=50051, ge=0, le=65535, description="port to listen on; 0 takes any free one")
    drain_delay_s: float = Field(
        default=0.0, ge=0, le=86_400, description="seconds after SIGTERM that take new requests"
    )
    drain_grace_s: float = Field(
        default=30.0, ge=0, le=86_400, description="seconds that running streams then have to finish"
    )
    max_receive_bytes: int = Field(default=4 << 20, ge=1024, le=MAX_INT32, description="largest request message")
    max_connection_age_s: int = Field(
        default=600, ge=1, le=MAX_INT32 // 1000, description="seconds until clients must connect again"
    )
    max_connection_grace_s: int = Field(
        default=3600,
        ge=1,
        le=MAX_INT32 // 1000,
        description="seconds that streams then have to finish, also those of clients that do not read",
    )
