"""The least number of tokens, never above the true one."""

import json
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from service.text.token_span import TokenSpan

CASES = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_cases.json").read_text("utf-8"))
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(characters: list[str]) -> tokenizers.Tokenizer:
    """One token per character, one for two of them, and an added one of seven bytes."""
    vocabulary = {token: token_id for token_id, token in enumerate([*characters, "ab"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def byte_tokens() -> tokenizers.Tokenizer:
    """SentencePiece's manner: a few tokens, and one for each byte besides."""
    tokens = ["<unk>", "▁", "a", "b", "ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    bpe = models.BPE(vocabulary, [("a", "b")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "max_bytes", "lost_bytes"),
    [
        (byte_level(BYTES), 7, b""),
        (byte_level([c for c in BYTES if c not in "éĄ"]), 7, b"\x04\xe9"),
        (byte_tokens(), 6, b""),
    ],
    ids=["byte-level", "byte-level with bytes lost", "byte tokens"],
)
def test_no_text_has_fewer_tokens(tokenizer: tokenizers.Tokenizer, max_bytes: int, lost_bytes: bytes) -> None:
    span = TokenSpan.of(tokenizer)
    assert span is not None and (max_bytes, lost_bytes) == (span.max_bytes, bytes(sorted(span.lost_bytes)))
    rng = random.Random(0)
    made = ["".join(rng.choices(["a", "b", " ", "▁", "<|end|>", "\x04", "語", "😀"], k=50)) for _ in range(50)]
    for text in [*CASES["texts"], *made, "<|end|>" * 9, "ab" * 9]:
        assert span.min_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert span.min_tokens("😀" * 7) == -(-28 // max_bytes)


def stripping() -> tokenizers.Tokenizer:
    tokenizer = byte_level(BYTES)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def composing() -> tokenizers.Tokenizer:
    tokenizer = byte_level(BYTES)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [stripping(), composing(), tokenizers.Tokenizer(models.WordLevel({"w": 0}, unk_token="w"))],
    ids=["swallows spaces", "composes characters", "any word is one token"],
)
def test_tokens_that_shorten_text_have_no_span(tokenizer: tokenizers.Tokenizer) -> None:
    assert TokenSpan.of(tokenizer) is None
