"""How much text one token can stand for: a text's length in bytes then tells how many tokens it has at least."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers import models

from service.text.token_pieces import BYTE_OF_CHARACTER

# UTF-8 never holds 0xC0, 0xC1 and what follows 0xF4.
_TEXT_BYTES = (*range(0xC0), *range(0xC2, 0xF5))


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """The bytes of UTF-8 text that one token stands for, at most, not counting `lost_bytes`, which become no token."""

    max_bytes: int
    lost_bytes: bytes

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> "TokenSpan | None":
        """The span of `tokenizer`'s tokens. None when nothing bounds it: some drop or shorten text, or have one token
        for any unknown word. Byte-level BPE and BPE with byte tokens are bounded, behind steps that keep every byte.
        """
        model = tokenizer.model
        added = tokenizer.get_added_tokens_decoder().values()
        if not isinstance(model, models.BPE) or any(token.lstrip or token.rstrip for token in added):
            return None
        steps = [*_steps(tokenizer.normalizer, "normalizers"), *_steps(tokenizer.pre_tokenizer, "pretokenizers")]
        if not all(_keeps_every_byte(step) for step in steps):
            return None
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        longest_added = max((len(token.content.encode("utf-8")) for token in added), default=1)
        if any(step["type"] == "ByteLevel" for step in steps):  # one character of a token for each byte
            lost = bytes(byte for character, byte in BYTE_OF_CHARACTER.items() if character not in vocabulary)
            return cls(max(longest_added, *map(len, vocabulary)), lost)
        if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in _TEXT_BYTES):
            return cls(max(longest_added, *(len(token.encode("utf-8")) for token in vocabulary)), b"")
        return None

    def min_tokens(self, text: str) -> int:
        """How many tokens `text` has at least."""
        kept = text.encode("utf-8", "surrogatepass").translate(None, self.lost_bytes)
        return -(-len(kept) // self.max_bytes)


def _steps(part: object, key: str) -> Iterator[Mapping[str, object]]:
    """The entries of tokenizer.json that make up a normalizer or a pre-tokenizer."""
    if part is None:
        return
    try:
        state = json.loads(part.__getstate__())  # type: ignore[arg-type]
    except TypeError:  # one that was written in Python has no entry
        state = {"type": "unknown"}
    listed = state.get(key)
    yield from (listed if state["type"] == "Sequence" and isinstance(listed, list) else [state])


def _keeps_every_byte(step: Mapping[str, object]) -> bool:
    """Whether a step's output, bytes for bytes, is no shorter than its input."""
    match step:
        case {"type": "ByteLevel" | "Digits" | "Metaspace" | "Prepend"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return behavior != "Removed"
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(new.encode("utf-8")) >= len(old.encode("utf-8"))
        case _:
            return False
