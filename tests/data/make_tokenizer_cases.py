"""Makes tokenizer_cases.json: texts, and the token ids that other tokenizer programs give them.

None of the programs is used by this project: tiktoken (its own byte-pair merging, the reference of the Llama 3, Qwen
and GPT-4o vocabularies), regex (cuts text into words), SentencePiece (the reference of the `llama` vocabularies).
Run once, when the texts change:

    pip install tiktoken regex sentencepiece numpy gguf
    python tests/data/make_tokenizer_cases.py models/SmolLM2-135M-Instruct.Q4_1.gguf
"""

# ruff: noqa: RUF001

import io
import json
import sys
import unicodedata
from pathlib import Path

import gguf
import regex
import sentencepiece
import tiktoken
from tiktoken._educational import bpe_train

TEXTS = [
    "",
    " ",
    "a",
    "Hello, world!",
    "Hello world, it's what they've SAID'LL do: I'm, you're, he'd, we'll, don'T.",
    "The year 2024 had 366 days; pi is 3.14159, 1,000,000 is a million, x² + ¾ = ⅷ.",
    "a  1  22   333    4444 0x1F 1e-5 v2.0.1",
    " leading space",
    "  two leading spaces",
    "trailing space ",
    "trailing spaces   ",
    "tabs\tand\t\ttabs \t mixed",
    "line one\nline two\n\nline four\r\nwindows\r\n\r\nend\n",
    "   \n   indented\n\t\tdeeper  \n",
    'def f(x: int) -> str:\n    return f"{x!r:>10}"  # comment\n\n\nclass A:\n    pass\n',
    'if (a[i] != b[j] && c->d == NULL) { printf("%d\\n", i++); } /* end */',
    "https://example.org/path/to?q=1&r=%20#frag me@mail.example ~/bin/x.sh //",
    "camelCase PascalCase SCREAMING_CASE snake_case HTTPServer iPhone15Pro",
    "!!! ??? ... --- === *** $$$ <<>> {[()]} @#%^&+|\\`~",
    "“quotes” ‘single’ «guillemets» — dash – en … ellipsis",
    "naïve café Zürich Straße ÅÄÖ smörgåsbord çédille",
    "cafe\u0301 decomposed e\u0301 n\u0303 A\u030a",
    "Привет, мир! Как дела? Объявление №5",
    "Γειά σου Κόσμε, τι κάνεις;",
    "مرحبا بالعالم ١٢٣ كيف حالك؟",
    "שלום עולם, מה שלומך?",
    "नमस्ते दुनिया, आप कैसे हैं? १२३",
    "สวัสดีชาวโลก",
    "你好，世界！今天天气怎么样？",
    "こんにちは世界。カタカナとひらがな、漢字123。",
    "안녕하세요 세계, 잘 지내세요?",
    "emoji 😀😃 👍🏽 👩‍👩‍👧‍👦 🇨🇭 ❤️ ☃ end",
    "mixed 中文English混合text日本語です。",
    "nbsp\u00a0here thin\u2009space ideographic\u3000space zero\u200bwidth",
    "math ∑∫√∞ ≤≥≠ α→β ∀x∈ℝ",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "the theme then there these they thermal thesis other mother bother",
    "Once upon a time, in a village at the foot of a mountain, there lived a lift operator who counted every chair.",
    'JSON: {"a": [1, 2.5, null, true], "b": "\\u00e9\\n"}',
    "x" * 30 + " " * 30 + "\n" * 7 + "y",
]

SPECIAL_TEXTS = [
    "<|im_start|>user\nHi<|im_end|>\n",
    "text<|endoftext|>more text",
    "<|im_start|><|im_end|><|im_start|>",
    "not special: <|im_start> |im_end|> <repo_name>x",
]

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
START = r"[^\r\n\p{L}\p{N}]?"
WORDS = {
    "gpt-2": GPT2,
    "llama-bpe": rf"{CONTRACTION}|{START}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}",
    "qwen2": rf"{CONTRACTION}|{START}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}",
    "gpt-4o": rf"{START}{UPPER}*{LOWER}+{CONTRACTION}?|{START}{UPPER}+{LOWER}*{CONTRACTION}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}",
    "tekken": rf"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}",
}
"""The models' published cutting rules, as one expression each; `smollm` isolates digits first."""


def spelling() -> dict[int, str]:
    """GPT-2's character for every byte."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = sorted(set(range(256)) - plain)
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def words(pre: str, text: str) -> list[str]:
    if pre == "qwen2":
        text = unicodedata.normalize("NFC", text)
    if pre != "smollm":
        return regex.findall(WORDS[pre], text)
    pieces = [piece for piece in regex.split(r"(\p{N})", text) if piece]
    return [word for piece in pieces for word in regex.findall(GPT2, piece)]


def smollm2_ids(path: Path) -> dict[str, list[int]]:
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    byte_of = {character: byte for byte, character in spelling().items()}
    normal = [(i, token) for i, token in enumerate(tokens) if types[i] == 1]
    special = {token: i for i, token in enumerate(tokens) if types[i] != 1}
    # tiktoken merges the pair whose result has the lowest id, and these ids are in the order of the merges.
    ranks = {bytes(byte_of[character] for character in token): i for i, token in normal}
    encoding = tiktoken.Encoding("smollm2", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={})
    result = {}
    for text in TEXTS + SPECIAL_TEXTS:
        ids: list[int] = []
        for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
            if part in special:
                ids.append(special[part])
            else:
                ids += [token for word in words("smollm", part) for token in encoding.encode_ordinary(word)]
        result[text] = ids
    return result


def byte_level_cases() -> dict[str, object]:
    """A small vocabulary, trained by tiktoken's own trainer, under each of the cutting rules."""
    corpus = "\n".join(TEXTS)
    ranks = bpe_train(corpus, 700, GPT2, visualise=None)
    characters = spelling()
    tokens = ["".join(characters[byte] for byte in piece) for piece in sorted(ranks, key=ranks.__getitem__)]
    merges = []
    for piece, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(piece) > 1:
            earlier = {other: other_rank for other, other_rank in ranks.items() if other_rank < rank}
            parts = tiktoken.Encoding("part", pat_str=r"[\s\S]+", mergeable_ranks=earlier, special_tokens={})
            left, right = (parts.decode_single_token_bytes(token) for token in parts._encode_single_piece(piece))
            merges.append(" ".join("".join(characters[byte] for byte in half) for half in (left, right)))
    encoding = tiktoken.Encoding("small", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={})
    ids = {
        pre: [[i for word in words(pre, text) for i in encoding.encode_ordinary(word)] for text in TEXTS]
        for pre in (*WORDS, "smollm")
    }
    return {"tokens": tokens, "merges": merges, "ids": ids}


def sentencepiece_cases() -> dict[str, object]:
    """A small SentencePiece BPE model with Llama's training options."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXTS * 3 for line in text.splitlines() if line]),
        model_writer=model,
        model_type="bpe",
        vocab_size=800,
        character_coverage=0.98,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    size = processor.get_piece_size()

    def kind(i: int) -> int:
        kinds = ((processor.is_unknown, 2), (processor.is_control, 3), (processor.is_byte, 6))
        return next((number for test, number in kinds if test(i)), 4 if processor.id_to_piece(i) == "<tool>" else 1)

    return {
        "tokens": [processor.id_to_piece(i) for i in range(size)],
        "scores": [processor.get_score(i) for i in range(size)],
        "token_type": [kind(i) for i in range(size)],
        "ids": [processor.encode(text) for text in TEXTS],
        "texts": [processor.decode(processor.encode(text)) for text in TEXTS],
    }


def main() -> None:
    smollm2 = smollm2_ids(Path(sys.argv[1]))
    document = {
        "about": "Ids by tiktoken and SentencePiece, made by make_tokenizer_cases.py; see there.",
        "texts": TEXTS,
        "smollm2": [{"text": text, "ids": ids} for text, ids in smollm2.items()],
        "byte_level": byte_level_cases(),
        "sentencepiece": sentencepiece_cases(),
    }
    path = Path(__file__).with_name("tokenizer_cases.json")
    path.write_text(json.dumps(document, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
