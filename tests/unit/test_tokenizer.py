"""Tokenizers: rebuilt from GGUF metadata, copied from a folder, loaded by the service.

The expected ids in tokenizer_cases.json come from tiktoken and SentencePiece (see data/make_tokenizer_cases.py).
"""

import json
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from graphs.errors import ExportError
from graphs.gguf_tokenizer import build_tokenizer, write_tokenizer
from service.errors import ConfigError, InvalidRequestError
from service.text.tokenizer import Tokenizer

CASES = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_cases.json").read_text("utf-8"))
TEXTS: list[str] = CASES["texts"]
SENTENCEPIECES = len(CASES["sentencepiece"]["tokens"])
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def byte_level(pre: str | None = "gpt-2", **extra: Any) -> dict[str, Any]:
    """GGUF metadata of the small byte-level vocabulary, with `<|s|>` and `<think>` added: ids 700 and 701."""
    tokens = [*CASES["byte_level"]["tokens"], "<|s|>", "<think>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": CASES["byte_level"]["merges"],
        "tokenizer.ggml.token_type": [NORMAL] * (len(tokens) - 2) + [CONTROL, USER_DEFINED],
        "tokenizer.ggml.bos_token_id": 700,
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata | {f"tokenizer.{key}": value for key, value in extra.items()}


def sentencepiece(**extra: Any) -> dict[str, Any]:
    """GGUF metadata of the small SentencePiece vocabulary; 1 is `<s>`, 3 the user-defined `<tool>`."""
    metadata = {f"tokenizer.ggml.{key}": CASES["sentencepiece"][key] for key in ("tokens", "scores", "token_type")}
    metadata |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | {f"tokenizer.{key}": value for key, value in extra.items()}


def plain_ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


class TestByteLevel:
    @pytest.mark.parametrize("pre", sorted(CASES["byte_level"]["ids"]))
    def test_ids_equal_tiktokens(self, pre: str) -> None:
        tokenizer = build_tokenizer(byte_level(pre))
        assert [plain_ids(tokenizer, text) for text in TEXTS] == CASES["byte_level"]["ids"][pre]

    @pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "gpt-4o", "tekken", "deepseek-coder", "default"])
    def test_text_survives_the_round_trip(self, pre: str) -> None:
        tokenizer = build_tokenizer(byte_level(pre))
        assert [tokenizer.decode(plain_ids(tokenizer, text)) for text in TEXTS] == TEXTS

    def test_a_file_without_pre_is_cut_by_the_default_rules(self) -> None:
        old, default = build_tokenizer(byte_level(None)), build_tokenizer(byte_level("default"))
        assert [plain_ids(old, text) for text in TEXTS] == [plain_ids(default, text) for text in TEXTS]

    @pytest.mark.parametrize(
        ("pre", "text", "words"),
        [
            ("default", "it's 12345+x", ["it", "'", "s", " ", "123", "45", "+", "x"]),
            ("gpt-4o", "aB;\n/b", ["a", "B", ";\n/", "b"]),
            ("tekken", "aB;\n/b", ["a", "B", ";\n/", "b"]),
            ("llama-bpe", "aB;\n/b", ["aB", ";\n", "/b"]),
            ("deepseek-coder", "ab 12\n\n中文x", ["ab", " ", "1", "2", "\n", "\n", "中文", "x"]),
        ],
    )
    def test_text_is_cut_into_words(self, pre: str, text: str, words: list[str]) -> None:
        pieces = build_tokenizer(byte_level(pre)).pre_tokenizer.pre_tokenize_str(text)
        assert words == [text[start:end] for _, (start, end) in pieces]

    @pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", [3]), ("gpt-2", [0, 1, 2])])
    def test_a_word_that_is_a_token_stays_whole_only_where_merges_are_ignored(
        self, pre: str, expected: list[int]
    ) -> None:
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": ["a", "b", "c", "abc"],
            "tokenizer.ggml.merges": [],
        }
        assert expected == plain_ids(build_tokenizer(metadata), "abc")

    def test_bytes_outside_the_vocabulary_are_dropped(self) -> None:
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": ["a", "b"],
            "tokenizer.ggml.merges": [],
        }
        assert plain_ids(build_tokenizer(metadata), "a?b") == [0, 1]

    def test_control_and_user_defined_tokens_are_matched_whole(self) -> None:
        tokenizer = build_tokenizer(byte_level())
        assert [700, *plain_ids(tokenizer, "a"), 701, *plain_ids(tokenizer, " b")] == plain_ids(
            tokenizer, "<|s|>a<think> b"
        )
        assert tokenizer.decode(plain_ids(tokenizer, "<|s|>a<think> b"), skip_special_tokens=True) == "a<think> b"

    @pytest.mark.parametrize(
        ("pre", "extra", "has_bos"),
        [
            ("gpt-2", {}, False),
            ("gpt-2", {"ggml.add_bos_token": True}, True),
            ("llama-bpe", {}, True),
            ("llama-bpe", {"ggml.add_bos_token": False}, False),
        ],
    )
    def test_bos_is_added_where_the_file_or_its_family_says_so(
        self, pre: str, extra: dict[str, Any], has_bos: bool
    ) -> None:
        tokenizer = build_tokenizer(byte_level(pre, **extra))
        assert [700] * has_bos + plain_ids(tokenizer, "Hello") == tokenizer.encode("Hello").ids


class TestSentencePiece:
    def test_ids_equal_sentencepieces(self) -> None:
        tokenizer = build_tokenizer(sentencepiece())
        assert [plain_ids(tokenizer, text) for text in TEXTS] == CASES["sentencepiece"]["ids"]

    def test_text_equals_sentencepieces(self) -> None:
        tokenizer = build_tokenizer(sentencepiece())
        assert [tokenizer.decode(ids) for ids in CASES["sentencepiece"]["ids"]] == CASES["sentencepiece"]["texts"]

    def test_a_character_outside_the_vocabulary_becomes_its_bytes(self) -> None:
        tokenizer = build_tokenizer(sentencepiece())
        assert tokenizer.encode("ℵ", add_special_tokens=False).tokens == ["▁", "<0xE2>", "<0x84>", "<0xB5>"]

    def test_bos_comes_first_unless_the_file_says_otherwise(self) -> None:
        assert build_tokenizer(sentencepiece()).encode("a").ids[0] == 1
        without = build_tokenizer(sentencepiece(**{"ggml.add_bos_token": False}))
        assert plain_ids(without, "a") == without.encode("a").ids

    def test_eos_comes_last_if_the_file_says_so(self) -> None:
        tokenizer = build_tokenizer(sentencepiece(**{"ggml.add_eos_token": True}))
        assert [1, *plain_ids(tokenizer, "a"), 2] == tokenizer.encode("a").ids

    def test_no_space_is_prepended_if_the_file_says_so(self) -> None:
        tokenizer = build_tokenizer(sentencepiece(**{"ggml.add_space_prefix": False}))
        assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]
        assert tokenizer.decode(plain_ids(tokenizer, " a")) == " a"

    def test_user_defined_piece_is_matched_whole_and_never_merged(self) -> None:
        tokens = build_tokenizer(sentencepiece()).encode("a<tool>b", add_special_tokens=False).tokens
        assert "<tool>" in tokens


class TestBadMetadata:
    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            (byte_level("klingon"), r"tokenizer\.ggml\.pre: 'klingon' is not one of .*smollm"),
            (byte_level(**{"ggml.model": "t5"}), r"tokenizer\.ggml\.model: 't5' is not supported"),
            ({"general.name": "x"}, r"no tokenizer: tokenizer\.ggml\.model is missing"),
            ({"tokenizer.ggml.model": "gpt2"}, r"no tokenizer: tokenizer\.ggml\.tokens is missing"),
            (byte_level(**{"ggml.tokens": ["a", "b", "a"]}), r"tokens: 'a' has two ids, 0 and 2"),
            (byte_level(**{"ggml.tokens": [1, 2]}), r"tokens: is not a list of strings"),
            (byte_level(**{"ggml.token_type": [1]}), r"token_type: has 1 entries for 702 tokens"),
            (byte_level(**{"ggml.token_type": [float("nan")] * 702}), r"token_type: is not a list of finite numbers"),
            (byte_level(**{"ggml.token_type": [1.5] * 702}), r"token_type: 1.5 is not an integer"),
            (byte_level(**{"ggml.merges": ["ab"]}), r"merges: 'ab' is not two tokens"),
            (byte_level(**{"ggml.merges": ["a zzzz"]}), r"zzzz"),
            (
                byte_level(**{"ggml.add_bos_token": True, "ggml.bos_token_id": 702}),
                r"bos_token_id: 702 is not a token id",
            ),
            (
                sentencepiece(**{"ggml.scores": [float("nan")] * SENTENCEPIECES}),
                r"scores: is not a list of finite numbers",
            ),
            (sentencepiece(**{"ggml.scores": None}), r"tokenizer\.ggml\.scores: is missing"),
        ],
    )
    def test_error_names_the_key(self, metadata: dict[str, Any], message: str) -> None:
        with pytest.raises(ExportError, match=f"^some.gguf: .*{message}"):
            build_tokenizer(metadata, "some.gguf")

    def test_padding_tokens_without_spelling_keep_their_ids(self) -> None:
        metadata = byte_level(**{"ggml.tokens": ["a", "", "", "b"], "ggml.token_type": [1, 5, 5, 1], "ggml.merges": []})
        metadata["tokenizer.ggml.bos_token_id"] = 0
        assert plain_ids(build_tokenizer(metadata), "ab") == [0, 3]


class TestWriteTokenizer:
    def test_gguf_file_yields_tokenizer_and_template(self, tmp_path: Path) -> None:
        template = "{% for m in messages %}\r\n{{ m.content }}{% endfor %}"
        source = write_gguf(tmp_path / "m.gguf", byte_level("llama-bpe", chat_template=template))
        (tmp_path / "out").mkdir()
        files = write_tokenizer(source, tmp_path / "out")
        assert tmp_path / "out" / "tokenizer.json" == files.tokenizer
        assert (files.vocab_size, files.add_bos) == (702, True)
        assert files.chat_template is not None
        assert template.encode() == files.chat_template.read_bytes()
        loaded = tokenizers.Tokenizer.from_file(str(files.tokenizer))
        assert [plain_ids(loaded, text) for text in TEXTS] == CASES["byte_level"]["ids"]["llama-bpe"]

    def test_gguf_file_without_template_yields_none(self, tmp_path: Path) -> None:
        source = write_gguf(tmp_path / "m.gguf", byte_level())
        (tmp_path / "out").mkdir()
        files = write_tokenizer(source, tmp_path / "out")
        assert (files.chat_template, files.add_bos) == (None, False)
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer.json"]

    @pytest.mark.parametrize("content", [b"", b"GGUF", b"not a GGUF file, whatever its name says" * 9])
    def test_a_file_that_is_no_gguf_is_refused(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(ExportError, match=r"m\.gguf: (not a GGUF file|truncated or damaged)"):
            write_tokenizer(tmp_path / "m.gguf", tmp_path)

    @pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.99])
    def test_a_truncated_gguf_is_refused(self, tmp_path: Path, kept: float) -> None:
        source = write_gguf(tmp_path / "m.gguf", byte_level())
        whole = source.read_bytes()
        source.write_bytes(whole[: int(len(whole) * kept)])
        with pytest.raises(ExportError, match=r"m\.gguf: "):
            write_tokenizer(source, tmp_path)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ExportError, match=r"m\.gguf: cannot be read: No such file"):
            write_tokenizer(tmp_path / "m.gguf", tmp_path)

    def folder(self, tmp_path: Path, **files: str) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        (tmp_path / "out").mkdir()
        (folder / "tokenizer.json").write_text(build_tokenizer(byte_level()).to_str(), "utf-8")
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text, "utf-8")
        return folder

    @pytest.mark.parametrize(
        ("files", "template"),
        [
            ({}, None),
            ({"tokenizer_config__json": "{}"}, None),
            ({"tokenizer_config__json": '{"chat_template": "A"}'}, "A"),
            ({"tokenizer_config__json": '{"chat_template": "A"}', "chat_template__jinja": "B"}, "B"),
            (
                {
                    "tokenizer_config__json": '{"chat_template": [{"name": "tool_use", "template": "T"},'
                    ' {"name": "default", "template": "D"}]}'
                },
                "D",
            ),
            ({"tokenizer_config__json": '{"chat_template": [{"name": ["x"], "template": "T"}]}'}, None),
        ],
    )
    def test_folder_is_copied_with_its_template(
        self, tmp_path: Path, files: dict[str, str], template: str | None
    ) -> None:
        folder = self.folder(tmp_path, **files)
        written = write_tokenizer(folder, tmp_path / "out")
        assert (folder / "tokenizer.json").read_bytes() == written.tokenizer.read_bytes()
        assert template == (written.chat_template.read_text("utf-8") if written.chat_template else None)

    def test_folder_without_tokenizer_is_refused(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path)
        (folder / "tokenizer.json").unlink()
        with pytest.raises(ExportError, match=r"model: no tokenizer\.json"):
            write_tokenizer(folder, tmp_path / "out")

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({"tokenizer__json": '{"version": "1.0"'}, r"tokenizer\.json: damaged"),
            ({"tokenizer_config__json": "{"}, r"tokenizer_config\.json: not valid JSON"),
            ({"tokenizer_config__json": "[" * 100_000}, r"tokenizer_config\.json: not valid JSON"),
            ({"tokenizer_config__json": "1" * 5000}, r"tokenizer_config\.json: not valid JSON"),
        ],
    )
    def test_damaged_folder_is_refused(self, tmp_path: Path, files: dict[str, str], message: str) -> None:
        with pytest.raises(ExportError, match=message):
            write_tokenizer(self.folder(tmp_path, **files), tmp_path / "out")


class TestService:
    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(build_tokenizer(byte_level("llama-bpe")))

    def test_encode_yields_int32_ids_with_and_without_bos(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("Hello, world!", add_special_tokens=False)
        assert np.int32 == ids.dtype
        assert CASES["byte_level"]["ids"]["llama-bpe"][TEXTS.index("Hello, world!")] == ids.tolist()
        assert [700, *ids.tolist()] == tokenizer.encode("Hello, world!").tolist()

    def test_empty_text_has_no_ids(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.encode("", add_special_tokens=False).shape == (0,)

    def test_batch_equals_one_by_one(self, tokenizer: Tokenizer) -> None:
        expected = [tokenizer.encode(text).tolist() for text in TEXTS]
        assert expected == [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)]

    def test_vocabulary_facts(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.vocab_size == 702
        assert frozenset({700}) == tokenizer.special_token_ids
        assert (tokenizer.token(700), tokenizer.token(702)) == ("<|s|>", None)
        assert (tokenizer.token_id("<think>"), tokenizer.token_id("<none>")) == (701, None)

    def test_decode_skips_special_tokens_unless_told_otherwise(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("Hi there")
        assert tokenizer.decode(ids) == "Hi there"
        assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == "<|s|>Hi there"

    def test_ids_outside_the_vocabulary_have_no_text(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.decode([702, *tokenizer.encode("a"), 1 << 30]) == "a"

    def test_half_a_surrogate_pair_is_refused(self, tokenizer: Tokenizer) -> None:
        with pytest.raises(InvalidRequestError, match=r"^prompt: '\\ud83d' is not allowed"):
            tokenizer.encode("x\ud83d")

    def test_threads_share_one_tokenizer(self, tokenizer: Tokenizer) -> None:
        expected = [tokenizer.encode(text).tolist() for text in TEXTS]
        results: list[list[list[int]]] = []

        def encode_all() -> None:
            results.extend([tokenizer.encode(text).tolist() for text in TEXTS] for _ in range(20))

        threads = [threading.Thread(target=encode_all) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [expected] * 80 == results

    def test_truncation_and_padding_of_the_file_are_not_applied(self, tmp_path: Path) -> None:
        original = build_tokenizer(byte_level())
        original.enable_truncation(4)
        original.enable_padding(length=64)
        original.save(str(tmp_path / "tokenizer.json"))
        assert (
            plain_ids(build_tokenizer(byte_level()), "a b c d e f g")
            == Tokenizer.load(tmp_path).encode("a b c d e f g").tolist()
        )

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
            Tokenizer.load(tmp_path)

    def test_a_damaged_file_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
        with pytest.raises(ConfigError, match=r"tokenizer\.json: damaged"):
            Tokenizer.load(tmp_path)

    def test_a_decoder_that_cannot_be_streamed_is_refused(self, tmp_path: Path) -> None:
        tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ConfigError, match="decoder step 'WordPiece' does not work token by token"):
            Tokenizer.load(tmp_path)
