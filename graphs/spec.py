"""ModelSpec: all that the graph builder must know of a model besides its weights."""

import math
from dataclasses import dataclass

from graphs.errors import ExportError
from graphs.manifest import MAX_DIMENSION
from graphs.rope import RopeSpec

MAX_HEAD_DIM = 256  # the widest head that the attention kernels hold
MAX_CONTEXT_LENGTH = 2**24  # positions up to here are exact in float32
MAX_LAYERS = 4096  # the graphs name every layer's tensors one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Dimensions and details of a decoder-only transformer. Raises ExportError when a value is outside its limit.

    `has_qk_norm` and `softcap` no file format here says yet: graphs, kernels and the reference know them, for the
    families that have them.
    """

    name: str
    architecture: str  # the family, for example "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int  # in tokens
    norm_epsilon: float
    rope: RopeSpec
    tie_word_embeddings: bool  # the head is the embedding
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_qk_norm: bool = False  # RMSNorm over each query and key head before RoPE
    activation: str = "silu"
    sliding_window: int | None = None  # a token attends to itself and the sliding_window - 1 tokens before it
    softcap: float = 0.0  # attention scores become softcap * tanh(score / softcap); 0: none
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        """The factor on query-key products."""
        return 1.0 / math.sqrt(self.head_dim)

    def __post_init__(self) -> None:
        """Check every value."""
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads"):
            _require_between(field, getattr(self, field), MAX_DIMENSION)
        _require_between("num_layers", self.num_layers, MAX_LAYERS)
        _require_between("head_dim", self.head_dim, MAX_HEAD_DIM)
        _require_between("context_length", self.context_length, MAX_CONTEXT_LENGTH)
        if self.sliding_window is not None:
            _require_between("sliding_window", self.sliding_window, MAX_DIMENSION)
        if self.num_heads % self.num_kv_heads:
            raise _refusal("num_kv_heads", self.num_kv_heads, f"a divisor of num_heads ({self.num_heads})")
        if self.rope.rotary_dim > self.head_dim:
            raise _refusal("rope rotary_dim", self.rope.rotary_dim, f"at most head_dim ({self.head_dim})")
        if not 0 < self.norm_epsilon < 1:
            raise _refusal("norm_epsilon", self.norm_epsilon, "above 0 and below 1")
        if not 0 <= self.softcap < math.inf:
            raise _refusal("softcap", self.softcap, "a finite number, at least 0")
        if self.activation != "silu":
            raise _refusal("activation", self.activation, "'silu' is the only one known")
        self._check_token_ids()

    def _check_token_ids(self) -> None:
        limit = f"0 to {self.vocab_size - 1} (vocab_size - 1)"
        if self.bos_token_id is not None and not 0 <= self.bos_token_id < self.vocab_size:
            raise _refusal("bos_token_id", self.bos_token_id, limit)
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise _refusal("eos_token_ids", token_id, limit)


def _refusal(field: str, value: object, limit: str) -> ExportError:
    return ExportError(f"{field}: {value!r} is not allowed: {limit}")


def _require_between(field: str, value: int, maximum: int) -> None:
    if not 1 <= value <= maximum:
        raise _refusal(field, value, f"1 to {maximum}")
