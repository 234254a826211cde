"""How byte-level BPE vocabularies cut text into words before merging, by the name that GGUF files give the rules."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, pre_tokenizers

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAMEL = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS, _MARKS_OR_SLASHES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}", rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


@dataclass(frozen=True, slots=True)
class BpeRules:
    """How one family of byte-level vocabularies treats text before merging."""

    splits: tuple[str, ...] = ()  # applied one after the other, matches and gaps stand alone; none: GPT-2's own
    individual_digits: bool = False  # every digit stands alone, before the splits
    ignore_merges: bool = False  # a word that is a token is never cut
    is_nfc: bool = False  # text is brought to Unicode normalisation form C first
    add_bos: bool = False  # unless the file says otherwise

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Cuts text into words and spells their bytes as the vocabulary does."""
        steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(True)] if self.individual_digits else []
        steps += [pre_tokenizers.Split(Regex(split), "isolated") for split in self.splits]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.splits))
        return pre_tokenizers.Sequence(steps)


_GPT2 = BpeRules()
_DIGITS_THEN_GPT2 = BpeRules(individual_digits=True)
_LLAMA3 = BpeRules((rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}",), ignore_merges=True, add_bos=True)
_QWEN2 = BpeRules((rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_MARKS}",), is_nfc=True)
_TEKKEN = BpeRules((rf"{_CAMEL % ('', '')}|\p{{N}}|{_MARKS_OR_SLASHES}",), ignore_merges=True, add_bos=True)
_GPT4O = BpeRules((rf"{_CAMEL % ((f'{_CONTRACTION}?',) * 2)}|\p{{N}}{{1,3}}|{_MARKS_OR_SLASHES}",))
_DEEPSEEK_CODER = BpeRules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"))
_DEFAULT = BpeRules((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"))

BPE_RULES: Final[Mapping[str, BpeRules]] = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), _DIGITS_THEN_GPT2),
    **dict.fromkeys(("gpt-2", "phi-2"), _GPT2),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
    "deepseek-coder": _DEEPSEEK_CODER,
    "default": _DEFAULT,  # also for files too old to name one, as llama.cpp does
}
"""By the value of `tokenizer.ggml.pre`. The expressions are those of the models' own files, "default" llama.cpp's."""
