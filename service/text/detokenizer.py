"""Streams the text of one sequence: whole characters only, and nothing that a stop string may yet take back."""

import codecs
from collections.abc import Sequence

import numpy as np

from service.errors import InvalidRequestError
from service.text.tokenizer import TokenIds, Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Tokens in, text out. One owner, one thread; the tokenizer may be shared.

    However the tokens are cut into pushes, the pieces of text add up to the same whole: `tokenizer.decode` of all
    tokens, or its start up to a stop string. (SentencePiece byte tokens that are bad UTF-8 differ: `decode` replaces
    the whole run of byte tokens, here the good characters of the run have been emitted already and stay.)

    A stop string counts as found at the character that completes it; of several completed by one character, the
    longest counts. The cost of a token does not depend on how many came before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        """`include_stop` leaves the stop string in the text. Raises InvalidRequestError when one is empty."""
        if "" in stop_strings:
            raise InvalidRequestError("stop", "", "a stop string must not be empty")
        self._pieces = tokenizer.pieces
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._drops_leading_space = tokenizer.pieces.drops_leading_space
        self._utf8 = _UTF8(errors="replace")
        self._stop_strings = tuple(dict.fromkeys(stop_strings))
        # What a stop string may begin with: text that ends in one of these is held back.
        self._stop_starts = {stop[:size] for stop in self._stop_strings for size in range(1, len(stop))}
        self._max_held = max((len(stop) - 1 for stop in self._stop_strings), default=0)
        self._include_stop = include_stop
        self._held = ""
        self.num_tokens = 0  # pushed, up to and including the one that completed a stop string
        self.stop_string: str | None = None  # the one that was found

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: the text is complete, further tokens are dropped."""
        return self.stop_string is not None

    def push(self, token_ids: Sequence[int] | TokenIds) -> str:
        """Take the sequence's next tokens; returns the text that may be emitted now, possibly none."""
        if self.stopped:
            return ""
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        if not self._stop_strings:
            self.num_tokens += len(ids)
            return self._text_of(b"".join([self._pieces[i] for i in ids if i not in self._skipped]))
        emitted = []
        for token_id in ids:  # one by one, to know the token that completes a stop string
            self.num_tokens += 1
            if token_id not in self._skipped and (text := self._text_of(self._pieces[token_id])):
                emitted.append(self._release(text))
                if self.stopped:
                    break
        return "".join(emitted)

    def finish(self) -> str:
        """The text held back, now that no more tokens come. An unfinished character becomes U+FFFD."""
        if self.stopped:
            return ""
        emitted = self._release(self._text_of(b"", is_final=True))
        rest, self._held = self._held, ""
        return emitted + rest

    def _text_of(self, piece: bytes, *, is_final: bool = False) -> str:
        """The characters that `piece` completes."""
        text = self._utf8.decode(piece, is_final)
        if self._drops_leading_space and text:
            self._drops_leading_space = False
            return text.removeprefix(" ")
        return text

    def _release(self, text: str) -> str:
        """Append `text` to what is held back, look for stop strings, and return what none of them can need."""
        text = self._held + text
        found = [
            (start + len(stop), -len(stop), stop) for stop in self._stop_strings if (start := text.find(stop)) >= 0
        ]
        if found:
            end, negative_size, self.stop_string = min(found)
            self._held = ""
            return text[: end if self._include_stop else end + negative_size]
        for start in range(max(0, len(text) - self._max_held), len(text)):
            if text[start:] in self._stop_starts:
                self._held = text[start:]
                return text[:start]
        self._held = ""
        return text
