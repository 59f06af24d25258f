"""The text side of a model alone: tokenizer and chat template, without its weights."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hornito.errors import UsageError
from hornito.text.template import ChatTemplate
from hornito.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextSide:
    """What turns a conversation into token ids, and ids into text.

    Attributes:
        name: what it was opened as.
        eos_ids: ids that end an answer.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    eos_ids: tuple[int, ...]


def open_text_side(model: str | os.PathLike[str]) -> TextSide:
    """The text side of what `hornito.load` takes; sources are not compiled for it.

    Raises:
        UsageError, UnsupportedError, FormatError: there is no such model, it can't be read, or it
            has no tokenizer or chat template.
    """
    from hornito.cache import resolve_model
    from hornito.package import is_package, open_package

    path = resolve_model(model)
    if is_package(path):
        with open_package(path) as package:
            facts = package.manifest.facts
            found = [
                bytes(package.blob(name)) if name in package.blobs else None
                for name in ("tokenizer.json", "chat_template.jinja")
            ]
            add_bos, bos_id = facts["add_bos"], facts["bos_id"]
            ends, strings = facts["eos_ids"], facts["token_strings"]
        raw, template = found[0], None if found[1] is None else found[1].decode()
    else:
        from hornito.importers import open_source

        source = open_source(path)
        raw, template = source.tokenizer_json, source.chat_template
        add_bos, bos_id = source.add_bos, source.bos_id
        ends, strings = source.eos_ids, source.token_strings
    if raw is None or template is None:
        what = "tokenizer" if raw is None else "chat template"
        raise UsageError(f"{model} has no {what}, so it can't chat")
    tokenizer = Tokenizer(raw, add_bos=add_bos, bos_id=bos_id, eos_ids=ends)
    return TextSide(os.fspath(model), tokenizer, ChatTemplate(template, strings), tuple(ends))
