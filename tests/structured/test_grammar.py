"""Grammars over the ids of a vocabulary, without a device."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from hornito.errors import HornitoError, UsageError
from hornito.ops.sampling import mask_bytes
from hornito.structured.formats import ResponseFormat, json_schema
from hornito.structured.grammar import Grammars, GrammarState
from hornito.text.tokenizer import Tokenizer
from structured.schemas import random_schema
from text_model import tokenizer_json

pytest.importorskip("llguidance", reason="llguidance is not installed (extra 'structured')")

VOCABULARY = 520
"""A head with eight ids more than the tokenizer."""


def byte_tokenizer() -> Tokenizer:
    pytest.importorskip("gguf")
    return Tokenizer(tokenizer_json(), bos_id=1, eos_ids=[2, 0])


def sentencepiece() -> Tokenizer:
    """A vocabulary that puts a space before the first word."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces = ["\u2581", "a", "b", "ab", "\u2581a", "\u2581ab", '"', "{", "}", ":", "\u2581true"]
    data = {
        "type": "hornito-sentencepiece-bpe",
        "tokens": tokens + pieces,
        "types": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "add_space_prefix": True,
        "unk_id": 0,
    }
    return Tokenizer(json.dumps(data).encode(), add_bos=True, bos_id=1, eos_ids=[2])


@pytest.mark.parametrize("vocabulary", (511, 512, 513, 544))
def test_masks_have_a_bit_for_every_id_of_the_head(vocabulary: int) -> None:
    """Whole words, no more; a head may have fewer ids than the tokenizer, or more."""
    grammars = Grammars(byte_tokenizer(), vocabulary, [2, 0])
    state = grammars.start(json_schema({"type": "string"}))
    state.accept(byte_tokenizer().encode('"')[0])
    ids = allowed(state, vocabulary)
    assert max(ids) == min(vocabulary, byte_tokenizer().vocab_size) - 1


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(byte_tokenizer(), VOCABULARY, [2, 0])


def allowed(state: GrammarState, vocabulary: int = VOCABULARY) -> set[int]:
    mask = state.mask()
    assert len(mask) == mask_bytes(vocabulary)
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    assert not bits[vocabulary:].any()
    return set(np.flatnonzero(bits).tolist())


def random_answer(state: GrammarState, rng: random.Random, *, force: bool = True) -> list[int]:
    """Ids of a random walk to the end of the grammar."""
    ids: list[int] = []
    while not state.complete:
        forced = state.take_forced(99) if force else []
        if forced:
            ids += forced
            continue
        token = rng.choice(sorted(allowed(state)))
        state.accept(token)
        ids.append(token)
        assert len(ids) < 600
    return ids


@pytest.mark.parametrize("force", (True, False))
def test_random_walks_through_random_schemas_are_valid(grammars: Grammars, force: bool) -> None:
    """Whatever a model chooses within the masks, the text is JSON of the schema."""
    jsonschema = pytest.importorskip("jsonschema")
    tokenizer = byte_tokenizer()
    for seed in range(25):
        schema = random_schema(seed)
        state = grammars.start(json_schema(schema))
        ids = random_answer(state, random.Random(seed), force=force)
        text = tokenizer.decode([i for i in ids if i not in (0, 2)], skip_special=False)
        jsonschema.validate(json.loads(text), schema)


def test_forced_tokens_are_the_canonical_ones(grammars: Grammars) -> None:
    """They are what the tokenizer makes of the text, and no longer than asked for."""
    tokenizer = byte_tokenizer()
    form = ResponseFormat("regex", "hello world!(a|b)")
    whole = tokenizer.encode("hello world!")
    state = grammars.start(form)
    assert state.take_forced(99) == whole
    assert state.take_forced(99) == []
    assert allowed(state) == {tokenizer.encode("a")[0], tokenizer.encode("b")[0]}
    state = grammars.start(form)
    assert state.take_forced(1) == whole[:1]
    assert state.take_forced(0) == [] and state.take_forced(-3) == []
    assert state.take_forced(99) == whole[1:]


def test_forced_tokens_of_a_vocabulary_with_a_leading_space() -> None:
    """Inside an answer no space goes before a word, as it would at a text's start."""
    tokenizer = sentencepiece()
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [2])
    state = grammars.start(ResponseFormat("regex", "ab(a|b)x*"))
    ids = state.take_forced(9)
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"ab"
    assert tokenizer.token_bytes(ids[0]) == b"ab"


def test_control_tokens_are_no_text(grammars: Grammars) -> None:
    """A string may hold any text, but no id that is an end or a turn of the conversation."""
    state = grammars.start(json_schema({"type": "string"}))
    first = byte_tokenizer().encode('"')
    state.accept(first[0])
    ids = allowed(state)
    assert len(ids) > 300 and not ids & {0, 1, 2}
    assert max(ids) < byte_tokenizer().vocab_size  # ids beyond the tokenizer stay out of it


def test_every_end_token_ends(grammars: Grammars) -> None:
    for end in (0, 2):
        state = grammars.start(ResponseFormat("regex", "a+"))
        state.accept(byte_tokenizer().encode("a")[0])
        assert not state.complete and {0, 2} <= allowed(state)
        state.accept(end)
        assert state.complete


def test_answers_of_one_form_do_not_share_a_place(grammars: Grammars) -> None:
    """The compiled form is kept; each answer walks through it alone."""
    form = ResponseFormat("regex", "ab")
    a, b = byte_tokenizer().encode("a")[0], byte_tokenizer().encode("b")[0]
    one, two = grammars.start(form), grammars.start(form)
    one.accept(a)
    assert allowed(one) == {b} and a in allowed(two)
    with pytest.raises(HornitoError, match=r"grammar failed.*satisfy the grammar"):
        two.accept(b)
    one.accept(b)
    assert one.complete and a in allowed(grammars.start(form))


def test_grammars_of_both_spellings(grammars: Grammars) -> None:
    tokenizer = byte_tokenizer()
    for text in ('start: "yes" | "no"', 'root ::= "yes" | "no"'):
        walk = random_answer(grammars.start(ResponseFormat("grammar", text)), random.Random(1))
        assert tokenizer.decode(walk) in ("yes", "no")


@pytest.mark.parametrize(
    ("form", "said"),
    (
        (json_schema({"type": "strin"}), "JSON schema .*strin"),
        (json_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (ResponseFormat("regex", "(["), "regular expression .*"),
        (ResponseFormat("grammar", 'start: "a" b'), 'unknown name: "b"'),
        (ResponseFormat("grammar", "no grammar"), "grammar is not valid"),
        (json_schema({"$ref": "#"}), "no answer can have this JSON schema: no token"),
        (ResponseFormat("grammar", "start: start"), "no answer can have this grammar: no token"),
        (ResponseFormat("regex", r"[^\x00-\x{10ffff}]"), "this regular expression: no token"),
        (ResponseFormat("regex", "a" * 300_000), "has 300000 characters"),
        (ResponseFormat("grammar", 'start: "a"' + "\n" * 5000), "in 5001 lines"),
    ),
)
def test_what_is_wrong_with_a_form_is_said(
    grammars: Grammars, form: ResponseFormat, said: str
) -> None:
    with pytest.raises(UsageError, match=f"(?s){said}"):
        grammars.start(form)


@pytest.mark.parametrize("kind", ("json_schema", "grammar"))
def test_long_chains_of_references_do_not_end_the_process(grammars: Grammars, kind: str) -> None:
    """They are followed by recursion, which an ordinary stack has no room for."""
    if kind == "json_schema":
        count = 6000
        chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}
        schema = {"$defs": {**chain, f"a{count}": {"enum": ["x"]}}, "$ref": "#/$defs/a0"}
        form, said = json_schema(schema), '"x"'
    else:
        count = 4000
        rules = [f"a{i}: a{i + 1}" for i in range(count)]
        form = ResponseFormat("grammar", "\n".join(["start: a0", *rules, f'a{count}: "x"']))
        said = "x"
    walk = random_answer(grammars.start(form), random.Random(1))
    assert byte_tokenizer().decode(walk) == said


def test_a_model_without_an_end_token_has_no_forms() -> None:
    pytest.importorskip("gguf")
    with pytest.raises(UsageError, match="end token"):
        Grammars(Tokenizer(tokenizer_json()), VOCABULARY, [])


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UsageError, match=r"hornito\[structured\]"):
        Grammars(byte_tokenizer(), VOCABULARY, [2, 0])
