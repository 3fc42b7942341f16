"""Copies of models with another chat template or other tokens."""

from __future__ import annotations

import json
from pathlib import Path


def with_template(folder: Path, target: Path, template: str) -> Path:
    """A copy of a model with another chat template, in the folder `target`."""
    target.mkdir()
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (target / file.name).symlink_to(file)
    (target / "chat_template.jinja").write_text(template)
    return target


def with_context(folder: Path, target: Path, tokens: int, vocabulary: int) -> Path:
    """A copy of the demo model with another context and vocabulary, in the folder `target`."""
    copy = with_template(folder, target, (folder / "chat_template.jinja").read_text())
    config = json.loads((copy / "config.json").read_text())
    config["text_config"] |= {"max_position_embeddings": tokens, "vocab_size": vocabulary}
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def with_tokens(folder: Path, *tokens: str, special: bool) -> None:
    """Rename the first tokens of the tokenizer in a folder of links, and mark them as special or not."""
    renamed = dict(zip(["<|endoftext|>", "<|im_start|>"], tokens, strict=True))
    for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        text = file.read_text()
        for old, new in renamed.items():
            text = text.replace(json.dumps(old), json.dumps(new))
        settings = json.loads(text)
        for added in settings.get("added_tokens", ()):
            if added["content"] in tokens:
                added["special"] = special
        file.unlink()
        file.write_text(json.dumps(settings))
