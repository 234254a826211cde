"""Text to token ids and back, by the model folder's tokenizer.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import tokenizers

from service.errors import InvalidRequestError, ModelFolderError
from service.text.token_pieces import TokenPieces, UnsupportedDecoderError
from service.text.token_span import TokenSpan

TOKENIZER_FILE: Final = "tokenizer.json"

TokenIds = npt.NDArray[np.int32]
"""[num_tokens] token ids."""


class Tokenizer:
    """A loaded tokenizer. Never changes, so any number of threads may use it; long texts leave the GIL to others."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Wrap `tokenizer` and own it from now on. Raises UnsupportedDecoderError (see TokenPieces)."""
        # Files made for training may carry these; a server that silently shortens a prompt would be wrong.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.pieces = TokenPieces(tokenizer)
        self.span = TokenSpan.of(tokenizer)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `folder`'s tokenizer.json. Raises ModelFolderError when it is missing, damaged or cannot be streamed."""
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise ModelFolderError(f"{folder}: {TOKENIZER_FILE} is missing")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except UnsupportedDecoderError as error:
            raise ModelFolderError(f"{path}: {error}") from error
        except Exception as error:  # the library raises bare Exception
            raise ModelFolderError(f"{path}: damaged, or of an unknown kind: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """int32[num_tokens] of `text`. Special tokens that are spelled out in the text are recognised.

        `add_special_tokens` adds what the model puts around a plain text (bos, for some); rendered chats have it.
        Raises InvalidRequestError naming `prompt` when the text holds half a surrogate pair.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[TokenIds]:
        """`encode` of every text, on all cores."""
        for text in texts:
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                surrogate = text[error.start : error.start + 1]
                raise InvalidRequestError("prompt", surrogate, "half a surrogate pair is no text") from error
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, token_ids: Sequence[int] | TokenIds, *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`, none negative. Ids that the tokenizer lacks have no text; bad UTF-8 is U+FFFD."""
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """How the vocabulary spells `token_id`; None when it has no such id."""
        return self._tokenizer.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of the token that the vocabulary spells `token`; None when there is none."""
        return self._tokenizer.token_to_id(token)
