"""The tokenizer and template rebuilt from the demo model's GGUF file give the original's ids and texts."""

import json
from pathlib import Path
from typing import Any

import pytest

from graphs.gguf_tokenizer import TokenizerFiles, write_tokenizer
from service.text.chat import ChatTemplate
from service.text.detokenizer import Detokenizer
from service.text.tokenizer import Tokenizer

GOLDEN = json.loads(Path(__file__).with_name("smollm2_greedy.json").read_text("utf-8"))["cases"]
TIKTOKEN = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_cases.json").read_text("utf-8"))["smollm2"]


@pytest.fixture(scope="module")
def written(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    return write_tokenizer(smollm2_gguf, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def tokenizer(written: TokenizerFiles) -> Tokenizer:
    return Tokenizer.load(written.tokenizer.parent)


@pytest.fixture(scope="module")
def template(written: TokenizerFiles, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate.load(written.tokenizer.parent, bos_token=tokenizer.token(1), eos_token=tokenizer.token(2))


def test_vocabulary_is_the_models(written: TokenizerFiles, tokenizer: Tokenizer) -> None:
    assert (written.vocab_size, written.add_bos) == (49152, False)
    assert tokenizer.vocab_size == 49152
    assert frozenset(range(17)) == tokenizer.special_token_ids
    assert (tokenizer.token(1), tokenizer.token(2)) == ("<|im_start|>", "<|im_end|>")


def test_every_case_has_the_references_prompt_ids(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    def prompt(case: dict[str, Any]) -> str:
        return template.render([("user", case["text"])]) if case["kind"] == "chat" else case["text"]

    assert [case.get("rendered", case["text"]) for case in GOLDEN] == [prompt(case) for case in GOLDEN]
    ids = [tokenizer.encode(prompt(case), add_special_tokens=case["kind"] != "chat").tolist() for case in GOLDEN]
    assert [case["prompt_token_ids"] for case in GOLDEN] == ids


def test_every_case_streams_the_references_text(tokenizer: Tokenizer) -> None:
    def streamed(ids: list[int]) -> str:
        detokenizer = Detokenizer(tokenizer)
        return "".join([detokenizer.push([token_id]) for token_id in ids]) + detokenizer.finish()

    assert [case["output_text"] for case in GOLDEN] == [tokenizer.decode(case["output_token_ids"]) for case in GOLDEN]
    assert [case["output_text"] for case in GOLDEN] == [streamed(case["output_token_ids"]) for case in GOLDEN]


def test_ids_of_all_kinds_of_text_equal_tiktokens(tokenizer: Tokenizer) -> None:
    assert [case["ids"] for case in TIKTOKEN] == [tokenizer.encode(case["text"]).tolist() for case in TIKTOKEN]


def test_every_token_decodes_to_the_bytes_it_streams(tokenizer: Tokenizer) -> None:
    decoded = [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.vocab_size)]
    streamed = [tokenizer.pieces[i].decode("utf-8", "replace") for i in range(tokenizer.vocab_size)]
    assert decoded == streamed
