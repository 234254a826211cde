"""Streaming detokenisation against the whole text, decoded at once by the tokenizers library."""

import codecs
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from graphs.gguf_tokenizer import build_tokenizer
from service.errors import InvalidRequestError
from service.text.detokenizer import Detokenizer
from service.text.tokenizer import Tokenizer

CASES = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_cases.json").read_text("utf-8"))
STEADY = settings(deadline=None, derandomize=True)
SPECIAL, ADDED = 700, 701  # of the byte-level vocabulary, spelled as they read


def make_byte_level() -> Tokenizer:
    tokens = [*CASES["byte_level"]["tokens"], "<|s|>", "<é漢>"]
    return Tokenizer(
        build_tokenizer(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "gpt-2",
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.merges": CASES["byte_level"]["merges"],
                "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
            }
        )
    )


def make_sentencepiece() -> Tokenizer:
    metadata = {f"tokenizer.ggml.{key}": CASES["sentencepiece"][key] for key in ("tokens", "scores", "token_type")}
    return Tokenizer(build_tokenizer(metadata | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": 1}))


BYTE_LEVEL, SENTENCEPIECE = make_byte_level(), make_sentencepiece()

# Any ids at all: characters cut by tokens, bytes that are no UTF-8, special tokens in the middle, ids without a token.
ANY_IDS = st.lists(st.integers(0, 703) | st.integers(0, 255) | st.sampled_from((SPECIAL, ADDED)), max_size=60)
TEXT = st.text(st.sampled_from("ab \n.漢字é😀👍🏽👩‍👧"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("ab \n.漢é😀"), min_size=1, max_size=4), max_size=4)
# Normal pieces, and characters spelled as a run of bytes: what an undisturbed SentencePiece model puts out.
PIECES = st.lists(
    st.sampled_from([[i] for i, kind in enumerate(CASES["sentencepiece"]["token_type"]) if kind != 6])
    | st.sampled_from("漢é😀 a").map(lambda c: [SENTENCEPIECE.token_id(f"<0x{byte:02X}>") for byte in c.encode()]),
    max_size=30,
).map(lambda runs: [token_id for run in runs for token_id in run])


def cut(ids: Sequence[int], seed: int) -> list[list[int]]:
    """`ids` in pushes of random sizes, empty ones among them."""
    rng, pushes, start = random.Random(seed), [], 0
    while start < len(ids):
        size = rng.choice((0, 1, 1, 2, 3, 7, 50))
        pushes.append(list(ids[start : start + size]))
        start += size
    return pushes


def streamed(detokenizer: Detokenizer, pushes: Sequence[Sequence[int]]) -> str:
    return "".join([detokenizer.push(push) for push in pushes]) + detokenizer.finish()


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """By definition: try every end, shortest first, and every start, longest first."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return start, end
    return None


def text_so_far(ids: Sequence[int]) -> str:
    """The characters that are complete after `ids`, whatever follows."""
    known = [i for i in ids if i not in BYTE_LEVEL.special_token_ids]
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(BYTE_LEVEL.pieces[i] for i in known))


class TestWithoutStop:
    @STEADY
    @given(ids=ANY_IDS, seed=st.integers(0, 99), skip=st.booleans())
    def test_byte_level_stream_adds_up_to_the_decoded_whole(self, ids: list[int], seed: int, skip: bool) -> None:
        detokenizer = Detokenizer(BYTE_LEVEL, skip_special_tokens=skip)
        assert BYTE_LEVEL.decode(ids, skip_special_tokens=skip) == streamed(detokenizer, cut(ids, seed))
        assert (len(ids), False) == (detokenizer.num_tokens, detokenizer.stopped)

    @STEADY
    @given(text=TEXT, seed=st.integers(0, 99))
    def test_byte_level_stream_of_encoded_text_is_the_text(self, text: str, seed: int) -> None:
        ids = BYTE_LEVEL.encode(text).tolist()
        assert text == streamed(Detokenizer(BYTE_LEVEL), cut(ids, seed))

    @STEADY
    @given(ids=PIECES, seed=st.integers(0, 99), skip=st.booleans())
    def test_sentencepiece_stream_adds_up_to_the_decoded_whole(self, ids: list[int], seed: int, skip: bool) -> None:
        detokenizer = Detokenizer(SENTENCEPIECE, skip_special_tokens=skip)
        assert SENTENCEPIECE.decode(ids, skip_special_tokens=skip) == streamed(detokenizer, cut(ids, seed))

    @STEADY
    @given(text=TEXT, seed=st.integers(0, 99))
    def test_sentencepiece_stream_of_encoded_text_is_the_text(self, text: str, seed: int) -> None:
        ids = SENTENCEPIECE.encode(text).tolist()
        assert text == streamed(Detokenizer(SENTENCEPIECE), cut(ids, seed))

    @STEADY
    @given(ids=st.lists(st.integers(0, 5), max_size=12))
    def test_tokenizer_without_decoder_separates_tokens_by_spaces(self, ids: list[int]) -> None:
        words = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "": 2, "é": 3}, unk_token="a")))
        assert words.decode(ids) == streamed(Detokenizer(words), [[i] for i in ids])

    @STEADY
    @given(ids=ANY_IDS)
    def test_every_push_releases_all_complete_characters(self, ids: list[int]) -> None:
        detokenizer, emitted = Detokenizer(BYTE_LEVEL), ""
        for count, token_id in enumerate(ids, 1):
            emitted += detokenizer.push([token_id])
            assert text_so_far(ids[:count]) == emitted

    def test_an_emoji_comes_out_with_its_last_byte(self) -> None:
        ids = [SENTENCEPIECE.token_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
        detokenizer = Detokenizer(SENTENCEPIECE)
        assert [detokenizer.push([token_id]) for token_id in ids] == ["", "", "", "😀"]

    def test_an_unfinished_character_becomes_a_replacement_mark_at_the_end(self) -> None:
        ids = [SENTENCEPIECE.token_id(f"<0x{byte:02X}>") for byte in "é漢".encode()[:-1]]
        detokenizer = Detokenizer(SENTENCEPIECE)
        assert (detokenizer.push(ids), detokenizer.finish()) == ("é", "�")

    def test_only_the_first_space_of_a_sentencepiece_text_is_dropped(self) -> None:
        space, word = SENTENCEPIECE.token_id("▁"), SENTENCEPIECE.token_id("▁t")
        detokenizer = Detokenizer(SENTENCEPIECE)
        assert [detokenizer.push([i]) for i in (1, space, space, word, word)] == ["", "", " ", " t", " t"]

    def test_arrays_of_ids_are_taken_too(self) -> None:
        ids = BYTE_LEVEL.encode("Hello, world!")
        assert np.int32 == ids.dtype
        assert Detokenizer(BYTE_LEVEL).push(ids) == "Hello, world!"
        assert Detokenizer(BYTE_LEVEL, ["xyz"]).push(ids) == "Hello, world!"


class TestStopStrings:
    @STEADY
    @given(text=TEXT, stops=STOPS, seed=st.integers(0, 99), include=st.booleans())
    def test_text_ends_before_the_first_completed_stop_string(
        self, text: str, stops: list[str], seed: int, include: bool
    ) -> None:
        ids = BYTE_LEVEL.encode(text).tolist()
        detokenizer = Detokenizer(BYTE_LEVEL, stops, include_stop=include)
        out = streamed(detokenizer, cut(ids, seed))
        found = first_stop(text, stops)
        if found is None:
            assert (text, False, None, len(ids)) == (
                out,
                detokenizer.stopped,
                detokenizer.stop_string,
                detokenizer.num_tokens,
            )
            return
        start, end = found
        assert (text[: end if include else start], True) == (out, detokenizer.stopped)
        assert text[start:end] == detokenizer.stop_string
        used = detokenizer.num_tokens
        assert first_stop(text_so_far(ids[:used]), stops) is not None
        assert first_stop(text_so_far(ids[: used - 1]), stops) is None

    @STEADY
    @given(text=TEXT, stops=STOPS)
    def test_exactly_what_may_become_a_stop_string_is_held_back(self, text: str, stops: list[str]) -> None:
        ids = BYTE_LEVEL.encode(text).tolist()
        detokenizer, emitted = Detokenizer(BYTE_LEVEL, stops), ""
        for count, token_id in enumerate(ids, 1):
            emitted += detokenizer.push([token_id])
            so_far = text_so_far(ids[:count])
            if first_stop(so_far, stops):
                break
            held = max((n for stop in stops for n in range(len(stop)) if so_far.endswith(stop[:n])), default=0)
            assert so_far[: len(so_far) - held] == emitted

    @STEADY
    @given(ids=ANY_IDS, stops=STOPS, seed=st.integers(0, 99))
    def test_any_tokens_in_any_pushes_give_the_same_text(self, ids: list[int], stops: list[str], seed: int) -> None:
        one_by_one = streamed(Detokenizer(BYTE_LEVEL, stops), [[i] for i in ids])
        assert one_by_one == streamed(Detokenizer(BYTE_LEVEL, stops), cut(ids, seed))
        whole = BYTE_LEVEL.decode(ids)
        found = first_stop(whole, stops)
        assert (whole if found is None else whole[: found[0]]) == one_by_one

    @pytest.mark.parametrize(
        ("stops", "text", "expected"),
        [
            (["END"], "start END more", "start "),
            (["END"], "EN EN E", "EN EN E"),
            (["aab"], "aaab", "a"),  # the held "aa" must give up its first letter only
            (["abcabd"], "abcabcabd!", "abc"),
            (["abcd", "bc"], "xabcd", "xa"),  # "bc" is complete first
            (["bc", "abc"], "xabc", "x"),  # complete together: the longest
            (["\n\n", "\nUser:"], "hi\nUser: x", "hi"),
            (["😀"], "ok😀", "ok"),
            (["�"], "a", "a"),
        ],
    )
    def test_overlapping_and_repeated_starts(self, stops: list[str], text: str, expected: str) -> None:
        ids = [i for character in text for i in BYTE_LEVEL.encode(character).tolist()]
        assert expected == streamed(Detokenizer(BYTE_LEVEL, stops), [[i] for i in ids])
        assert expected == streamed(Detokenizer(BYTE_LEVEL, stops), [ids])

    def test_tokens_after_a_stop_string_are_dropped(self) -> None:
        detokenizer = Detokenizer(BYTE_LEVEL, ["."])
        ids = BYTE_LEVEL.encode("a. b").tolist()
        assert detokenizer.push(ids) == "a"
        assert (detokenizer.num_tokens, detokenizer.stop_string) == (2, ".")
        assert (detokenizer.push(ids), detokenizer.finish()) == ("", "")
        assert detokenizer.num_tokens == 2

    def test_a_stop_string_may_be_completed_by_the_flush(self) -> None:
        detokenizer = Detokenizer(BYTE_LEVEL, ["a�"])
        ids = BYTE_LEVEL.encode("xa漢").tolist()[:-1]
        assert (detokenizer.push(ids), detokenizer.finish()) == ("x", "")
        assert detokenizer.stopped

    def test_an_empty_stop_string_is_refused(self) -> None:
        with pytest.raises(InvalidRequestError, match=r"^stop: '' is not allowed"):
            Detokenizer(BYTE_LEVEL, ["a", ""])
