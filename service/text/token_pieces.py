"""What each token contributes to the text, as bytes.

A tokenizer's decoder turns a list of tokens into text. For the decoders that language models use, the text is the UTF-8
decoding of the tokens' bytes, one after the other, so a stream can be decoded token by token:

- byte-level: every character of a token stands for one byte; an added token that is spelled otherwise, for itself.
- SentencePiece: `▁` stands for a space, `<0xE2>` for one byte; one space at the start of the text is dropped.
- none at all: the tokens, separated by spaces.
"""

import json
import re
from collections.abc import Mapping

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>")


class UnsupportedDecoderError(ValueError):
    """The decoder does not work token by token. Names its type."""


class TokenPieces:
    """Bytes of tokens by id, found out on first use and kept. Safe to use from several threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Raises UnsupportedDecoderError when `tokenizer`'s decoder is of a kind not listed above."""
        self._tokenizer = tokenizer
        self._pieces: dict[int, bytes] = {}
        self._is_byte_level = False
        self._replacements: list[tuple[str, str]] = []
        self._has_byte_tokens = False
        self._separator = ""
        self.drops_leading_space = False
        if tokenizer.decoder is None:
            self._separator, self.drops_leading_space = " ", True
        else:
            self._read_decoder(_state_of(tokenizer.decoder))

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of `token_id`, not always whole characters. Ids that the tokenizer lacks have none."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._tokenizer.id_to_token(token_id)
            piece = self._pieces[token_id] = b"" if token is None else self._bytes_of(token)
        return piece

    def _bytes_of(self, token: str) -> bytes:
        if self._is_byte_level:
            try:
                return bytes([BYTE_OF_CHARACTER[character] for character in token])
            except KeyError:
                return token.encode("utf-8")
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return (self._separator + token).encode("utf-8")

    def _read_decoder(self, state: Mapping[str, object]) -> None:
        listed = state.get("decoders")
        steps = listed if isinstance(listed, list) else [state]
        is_fused = False
        for step in steps:
            match step:
                case {"type": "ByteLevel"} if len(steps) == 1:
                    self._is_byte_level = True
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not is_fused:
                    self._replacements.append((old, new))
                case {"type": "ByteFallback"} if not is_fused:
                    self._has_byte_tokens = True
                case {"type": "Fuse"}:
                    is_fused = True
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if is_fused:
                    self.drops_leading_space = True
                case _:
                    raise UnsupportedDecoderError(f"decoder step {step.get('type')!r} does not work token by token")


def _state_of(decoder: tokenizers.decoders.Decoder) -> dict[str, object]:
    """The decoder's own entry of tokenizer.json."""
    state = decoder.__getstate__()
    if not isinstance(state, bytes):
        raise UnsupportedDecoderError(f"decoder {decoder!r} cannot be read")
    parsed = json.loads(state)
    if not isinstance(parsed, dict):
        raise UnsupportedDecoderError(f"decoder {decoder!r} cannot be read")
    return parsed


def _byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 characters stand for themselves, the others for 256 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()
"""The byte that each character of a byte-level token stands for."""
