"""Renders chat messages into the prompt text that a model was trained on, by the model's own Jinja template.

A template is code that came with a model. It runs in Jinja's immutable sandbox: no access to Python's internals, no
changes to what it is given, no calls that reach outside. Its size, the prompt it puts out, and its ranges, products and
powers are bounded; its run time is not.
"""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from service.errors import InvalidRequestError, ModelFolderError

CHAT_TEMPLATE_FILE: Final = "chat_template.jinja"
MAX_TEMPLATE_CHARS: Final = 1 << 18
MAX_RENDERED_CHARS: Final = 1 << 24

_MAX_SHOWN_ROLES = 8
_MAX_SHOWN_CHARS = 200


class ChatTemplate:
    """A compiled chat template. Never changes, so any number of threads may render with it."""

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        max_rendered_chars: int = MAX_RENDERED_CHARS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile `source`; None for a model without a template, whose `render` always raises.

        `bos_token` and `eos_token` are the spellings that the template may put in; `now` is what it takes for the time.
        Raises ModelFolderError when the template is too long or not valid Jinja.
        """
        self._max_rendered_chars = max_rendered_chars
        self._template: jinja2.Template | None = None
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        # Templates ask `tools is none`: both names are always given, as the reference renderer does.
        self._context: dict[str, object] = {"tools": None, "documents": None}
        self._context |= {name: token for name, token in tokens.items() if token is not None}
        if source is None:
            return
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelFolderError(f"chat template: {len(source)} characters, more than {MAX_TEMPLATE_CHARS}")
        try:
            self._template = _environment(max_rendered_chars, now).from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelFolderError(f"chat template: {error}") from error

    @classmethod
    def load(cls, folder: Path, *, bos_token: str | None = None, eos_token: str | None = None) -> "ChatTemplate":
        """Read `folder`'s chat_template.jinja, if it has one. Raises ModelFolderError as the constructor does."""
        path = folder / CHAT_TEMPLATE_FILE
        try:
            source = path.read_text("utf-8") if path.is_file() else None
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFolderError(f"{path}: cannot be read: {error}") from error
        return cls(source, bos_token=bos_token, eos_token=eos_token)

    @property
    def is_available(self) -> bool:
        """Whether the model has a template."""
        return self._template is not None

    def render(self, messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text for `messages`, (role, content) each, up to where the assistant's answer starts.

        It holds the special tokens already: encode it with `add_special_tokens=False`. Raises InvalidRequestError
        naming `messages` when there are none, when the model has no template, or when the template refuses them.
        """
        if self._template is None:
            raise InvalidRequestError("messages", _shown(messages), "the model has no chat template")
        if not messages:
            raise InvalidRequestError("messages", [], "at least one message is needed")
        items = [{"role": role, "content": content} for role, content in messages]
        context = self._context | {"messages": items, "add_generation_prompt": add_generation_prompt}
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(context):
                num_chars += len(piece)
                if num_chars > self._max_rendered_chars:
                    raise jinja2.TemplateRuntimeError(f"more than {self._max_rendered_chars} characters of prompt")
                pieces.append(piece)
        except Exception as error:  # a template can raise whatever its expressions do
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, jinja2.TemplateError) else str(error)
            limit = f"the model's chat template refuses them: {reason[:_MAX_SHOWN_CHARS]}"
            raise InvalidRequestError("messages", _shown(messages), limit) from error
        return "".join(pieces)


def _shown(messages: Sequence[tuple[str, str]]) -> list[str]:
    """What an error may show of `messages`: roles, never content."""
    return [role[:16] for role, _ in messages[:_MAX_SHOWN_ROLES]]


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with products and powers kept from filling the memory before any text comes out."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, max_chars: int) -> None:
        extensions = ["jinja2.ext.loopcontrols", _GenerationBlock]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._max_chars = max_chars

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                    self._check_size(len(sequence) * count)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._check_size(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)

    def _check_size(self, size: int) -> None:
        if size > self._max_chars:
            raise SecurityError(f"a value of size {size} is more than {self._max_chars}")


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's part for training; rendering sees through it."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(max_chars: int, now: Callable[[], datetime]) -> jinja2.Environment:
    """What the reference renderer of chat templates offers to them."""
    environment = _BoundedEnvironment(max_chars)
    del environment.globals["lipsum"]  # makes text of any length
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
