"""The tokenizer of a Hugging Face folder: `tokenizer.json` as it is, and a chat template from where its age put it."""

import json
from pathlib import Path

from graphs.errors import ExportError
from graphs.manifest import CHAT_TEMPLATE_NAME, TOKENIZER_NAME


def read_tokenizer_folder(folder: Path) -> tuple[str, object]:
    """The text of its tokenizer.json, and its chat template if it has one. Raises ExportError."""
    if not (folder / TOKENIZER_NAME).is_file():
        raise ExportError(f"{folder}: no {TOKENIZER_NAME}; a tokenizer in another format cannot be read")
    serialized = _read_text(folder / TOKENIZER_NAME)
    if (folder / CHAT_TEMPLATE_NAME).is_file():
        return serialized, _read_text(folder / CHAT_TEMPLATE_NAME)
    config_path = folder / "tokenizer_config.json"
    if not config_path.is_file():
        return serialized, None
    try:
        config = json.loads(_read_text(config_path))
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{config_path}: not valid JSON: {error}") from error
    template = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(template, list):  # named templates
        named = (item for item in template if isinstance(item, dict) and item.get("name") == "default")
        template = next(named, {}).get("template")
    return serialized, template


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{path}: cannot be read: {error}") from error
