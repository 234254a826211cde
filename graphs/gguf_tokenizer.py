"""Writes `tokenizer.json` and `chat_template.jinja` for a model folder.

A Hugging Face folder has both already: they are checked and copied. A GGUF file keeps the tokenizer as metadata, and
the original is rebuilt from it so that every text gets the original's ids:

- `gpt2`: byte-level BPE. The file lists vocabulary and merges; `tokenizer.ggml.pre` names how text is cut before
  merging (`bpe_rules`).
- `llama`: SentencePiece BPE. The file lists pieces with scores; the merges follow from them, as in the published
  `tokenizer.json` of such models: the piece with the highest score is merged first, unknown characters fall back to
  bytes.

Control tokens become special added tokens, user-defined ones plain added tokens: both are matched whole in the text.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from graphs.bpe_rules import BPE_RULES
from graphs.errors import ExportError
from graphs.gguf_source import open_gguf
from graphs.hf_tokenizer import read_tokenizer_folder
from graphs.manifest import CHAT_TEMPLATE_NAME, TOKENIZER_NAME

Metadata = Mapping[str, object]
"""GGUF key-value pairs, values as Python objects: str, int, float, bool, or a list of these."""

_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
_TOKENS, _TYPES, _SCORES, _MERGES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges"))
_TEMPLATE: Final = "tokenizer.chat_template"
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6  # GGUF token types
_SPACE: Final = "▁"  # how SentencePiece spells a space


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What `write_tokenizer` wrote."""

    tokenizer: Path
    chat_template: Path | None
    vocab_size: int  # the largest id that the tokenizer knows, of added tokens too, plus 1
    add_bos: bool  # the tokenizer itself puts its bos token in front of a plain text prompt


def write_tokenizer(source: Path, out_dir: Path) -> TokenizerFiles:
    """Write `source`'s tokenizer.json, and its chat template if it has one, into `out_dir`.

    `source` is a GGUF file or a Hugging Face folder. Raises ExportError when it has no tokenizer, when the tokenizer is
    damaged, or when it is of a kind that cannot be rebuilt.
    """
    if source.is_dir():
        serialized, template = read_tokenizer_folder(source)
    else:
        metadata = read_tokenizer_metadata(source)
        serialized, template = build_tokenizer(metadata, str(source)).to_str(), metadata.get(_TEMPLATE)
    try:
        tokenizer = Tokenizer.from_str(serialized)
    except Exception as error:  # the library raises bare Exception
        raise ExportError(f"{source}: {TOKENIZER_NAME}: damaged or of an unknown kind: {error}") from error
    tokenizer_path, template_path = out_dir / TOKENIZER_NAME, out_dir / CHAT_TEMPLATE_NAME
    tokenizer_path.write_text(serialized, "utf-8", newline="")
    if has_template := isinstance(template, str) and bool(template.strip()):
        template_path.write_text(str(template), "utf-8", newline="")
    framed, plain = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
    return TokenizerFiles(
        tokenizer_path,
        template_path if has_template else None,
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        add_bos=framed[: len(plain)] != plain,
    )


def read_tokenizer_metadata(path: Path) -> Metadata:
    """The `tokenizer.` entries of a GGUF file. Raises ExportError when it is missing, damaged or not a GGUF file."""
    fields = open_gguf(path).fields
    try:
        return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}
    except (ValueError, IndexError) as error:
        raise ExportError(f"{path}: tokenizer metadata is damaged: {error}") from error


def build_tokenizer(metadata: Metadata, origin: str = "GGUF metadata") -> Tokenizer:
    """The tokenizer that GGUF `metadata` describes. Raises ExportError, its message starting with `origin`."""
    model = metadata.get(_MODEL)
    if model is None or _TOKENS not in metadata:
        raise ExportError(f"{origin}: no tokenizer: {_MODEL if model is None else _TOKENS} is missing")
    if model not in ("gpt2", "llama"):
        raise ExportError(f"{origin}: {_MODEL}: {model!r} is not supported, only 'gpt2' and 'llama'")
    vocabulary = _Vocabulary(metadata, origin)
    try:
        tokenizer = _byte_level_bpe(vocabulary) if model == "gpt2" else _sentencepiece_bpe(vocabulary)
        tokenizer.add_special_tokens(vocabulary.added_tokens(_CONTROL))
        tokenizer.add_tokens(vocabulary.added_tokens(_USER_DEFINED))
    except ExportError:
        raise
    except Exception as error:  # the library raises bare Exception, for a merge outside the vocabulary for example
        raise ExportError(f"{origin}: tokenizer: {error}") from error
    return tokenizer


class _Vocabulary:
    """Checked access to a tokenizer's metadata. Every method raises ExportError naming the key that is wrong."""

    def __init__(self, metadata: Metadata, origin: str) -> None:
        self._metadata = metadata
        self._origin = origin
        # Padding rows of some vocabularies are spelled as empty strings; ids need distinct spellings.
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(self.strings(_TOKENS))]
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        for i, token in enumerate(self.tokens):
            if self.ids[token] != i:
                raise self.error(_TOKENS, f"{token!r} has two ids, {i} and {self.ids[token]}")
        types = self.numbers(_TYPES) if _TYPES in metadata else [_NORMAL] * len(self.tokens)
        for kind in types:
            if not isinstance(kind, int):
                raise self.error(_TYPES, f"{kind!r} is not an integer")
        self.types = types

    def error(self, key: str, problem: str) -> ExportError:
        return ExportError(f"{self._origin}: {key}: {problem}")

    def strings(self, key: str) -> list[str]:
        value = self._metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "is missing" if value is None else "is not a list of strings")
        return value

    def numbers(self, key: str) -> list[float]:
        """One finite number per token."""
        value = self._metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in value):
            raise self.error(key, "is missing" if value is None else "is not a list of finite numbers")
        if len(value) != len(self.tokens):
            raise self.error(key, f"has {len(value)} entries for {len(self.tokens)} tokens")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._metadata.get(f"tokenizer.ggml.{name}", default))

    def pre(self) -> str:
        return str(self._metadata.get(_PRE, "default"))

    def special(self, name: str) -> str | None:
        """The token that `tokenizer.ggml.{name}_token_id` points to."""
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = self._metadata.get(key)
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise self.error(key, f"{token_id!r} is not a token id below {len(self.tokens)}")
        return self.tokens[token_id]

    def added_tokens(self, kind: int) -> list[AddedToken]:
        return [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, token_kind in zip(self.tokens, self.types, strict=True)
            if token_kind == kind
        ]


def _byte_level_bpe(vocabulary: _Vocabulary) -> Tokenizer:
    rules = BPE_RULES.get(vocabulary.pre())
    if rules is None:
        raise vocabulary.error(_PRE, f"{vocabulary.pre()!r} is not one of {', '.join(sorted(BPE_RULES))}")
    merges: list[tuple[str, str]] = []
    for merge in vocabulary.strings(_MERGES):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise vocabulary.error(_MERGES, f"{merge!r} is not two tokens")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=rules.ignore_merges))
    if rules.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rules.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    _add_framing(tokenizer, vocabulary, rules.add_bos)
    return tokenizer


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> Tokenizer:
    has_bytes = _BYTE in vocabulary.types
    unknown = vocabulary.special("unknown") or vocabulary.tokens[0]
    merges = _merges_from_scores(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes))
    spaces = normalizers.Replace(" ", _SPACE)
    decoding: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(decoding)
    _add_framing(tokenizer, vocabulary, True)
    return tokenizer


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to put a normal piece together from two, the best-scored piece first.

    Splits of one piece: the longest left part first. Only normal pieces take part, as in SentencePiece itself.
    """
    scores = vocabulary.numbers(_SCORES)
    normal = {token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _NORMAL}
    ranked = [
        (-scores[vocabulary.ids[piece]], vocabulary.ids[piece], -cut)
        for piece in normal
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    ranked.sort()
    return [(vocabulary.tokens[i][:-cut], vocabulary.tokens[i][-cut:]) for _, i, cut in ranked]


def _add_framing(tokenizer: Tokenizer, vocabulary: _Vocabulary, add_bos: bool) -> None:
    """Let the tokenizer put bos in front of a text and eos behind it, where the file asks for it."""
    bos = vocabulary.special("bos") if vocabulary.flag("add_bos_token", add_bos) else None
    eos = vocabulary.special("eos") if vocabulary.flag("add_eos_token", False) else None
    if bos is None and eos is None:
        return
    template = [piece for piece in (bos, "$A", eos) if piece is not None]
    specials = {token: vocabulary.ids[token] for token in (bos, eos) if token is not None}
    tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=list(specials.items()))
