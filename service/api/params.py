"""A generation as a caller asks for it, whatever it came in: protobuf, a line of JSON, or command-line flags."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MESSAGE_CHARS = 32
"""What rendering one message, however short, counts as: templates put markers of about this length around each."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text, continued as it stands."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template."""

    messages: Sequence[tuple[str, str]]  # (role, content), oldest first


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """Unchecked fields; None is unset. Meanings, limits and defaults: `SamplingParams` in inference.proto."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    num_logprobs: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    n: int | None = None
    priority: int | None = None  # this and the next: `GenerateRequest`
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against."""

    model_name: str
    vocab_size: int
    max_model_len: int  # tokens of one sequence, prompt and output
    max_kv_tokens: int  # token positions of the whole KV buffer


def prompt_chars(prompt: Prompt) -> int:
    """About how many characters there are to tokenise, the chat template's own included; a token id counts as one."""
    if isinstance(prompt, TokenPrompt):
        return len(prompt.token_ids)
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    return sum(MESSAGE_CHARS + len(role) + len(content) for role, content in prompt.messages)
