"""A tiny random model as a Hugging Face folder with a byte-level tokenizer, ready to be exported."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.unit.tiny_models import hf_tensors, tiny_config, write_hf

VOCAB_SIZE = 256


def write_tokenizer_json(folder: Path) -> None:
    """One token per byte, no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_source(folder: Path, poison: str | None = None, **changes: object) -> Path:
    """Write the model; the tensor `poison`, if given, holds a value that cannot be exported."""
    config = tiny_config(**({"vocab_size": VOCAB_SIZE} | changes))
    tensors = hf_tensors(config)
    if poison is not None:
        tensors[poison].flat[0] = np.nan
    write_hf(folder, config, tensors)
    write_tokenizer_json(folder)
    return folder
