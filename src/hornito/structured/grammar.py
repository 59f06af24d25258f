"""Grammars over token ids, with the package llguidance: which token may come next.

llguidance (https://github.com/guidance-ai/llguidance) runs a lexer of derivatives and an Earley
parser over the trie of the vocabulary, which takes tens of microseconds to a millisecond a token.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from hornito.errors import HornitoError, UsageError
from hornito.ops.sampling import mask_bytes
from hornito.structured.formats import ResponseFormat
from hornito.text.tool_calls import CALL_MARKS

if TYPE_CHECKING:
    import llguidance

    from hornito.text.tokenizer import Tokenizer

T = TypeVar("T")

_stack_lock = threading.Lock()

MOST_KEPT = 32
"""Compiled grammars that are kept for the next answer of the same form."""

MOST_BYTES = 256 << 10
MOST_LINES = 4096
STACK_BYTES = 256 << 20
"""llguidance follows references by recursion, some 4 KB of stack for each of a chain. Where a stack
ends the process ends; so compilation has one that the longest chain of a form of MOST_BYTES and
MOST_LINES leaves unfilled. Only what is used of it is memory."""

#: Spaces as `json.dumps` puts them. Free space would let an answer go on with it for ever.
JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


_DEAD_END = "no token of the vocabulary can go on the answer in its grammar"


class GrammarState:
    """The place of one answer in its grammar; a `hornito.runtime.sampler.Constraint`."""

    def __init__(self, matcher: llguidance.LLMatcher, mask_size: int) -> None:
        self._matcher = matcher
        self._mask_size = mask_size

    @property
    def complete(self) -> bool:
        """Whether the text is whole and nothing but an end token can follow, or one has."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> bytes:
        """One bit for each id, lowest bit first, in 32-bit words: 1 where it may come next.

        Raises:
            HornitoError: the grammar outgrew llguidance's limits, or no token can go on.
        """
        mask = bytes(self._matcher.compute_bitmask()[: self._mask_size])  # a word more at times
        self._check()
        if not mask.strip(b"\0"):
            raise HornitoError(_DEAD_END)
        return mask

    def accept(self, token: int) -> None:
        """Take the token that was chosen.

        Raises:
            HornitoError: it can't stand here, or the grammar outgrew llguidance's limits.
        """
        self._matcher.consume_token(token)
        self._check()

    def take_forced(self, most: int) -> list[int]:
        """Up to `most` tokens that spell what can only come next; they count as accepted."""
        forced = list(self._matcher.compute_ff_tokens()[: max(0, most)])
        if forced:
            self._matcher.consume_tokens(forced)
        self._check()
        return forced

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n<state>")[0].strip()
            if reason.startswith("NoExtension"):
                raise HornitoError(_DEAD_END)
            raise HornitoError(f"the answer's grammar failed: {reason:.500}")


class Grammars:
    """The grammars of one model; safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int]) -> None:
        """Read the vocabulary; takes a second for 50,000 tokens.

        Args:
            tokenizer: the model's.
            vocabulary: ids of the head, which may be more or fewer than the tokenizer has.
            ends: ids that end an answer.

        Raises:
            UsageError: the package llguidance is not installed.
        """
        llguidance = _llguidance()
        if not ends:
            raise UsageError("an answer of a given form needs an end token, which this model lacks")
        words = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocabulary, ends))
        self._tokenizer = llguidance.LLTokenizer(words, n_vocab=vocabulary, eos_token=list(ends))
        self._mask_size = mask_bytes(vocabulary)
        self._kept: OrderedDict[ResponseFormat, Any] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, form: ResponseFormat) -> GrammarState:
        """The beginning of an answer of this form.

        Raises:
            UsageError: the form is not valid, or uses what llguidance does not know; says where.
        """
        with self._lock:
            matcher = self._kept.get(form)
            if matcher is None:
                matcher = _on_a_large_stack(lambda: self._compiled(form))
                self._kept[form] = matcher
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(form)
            return GrammarState(matcher.deep_copy(), self._mask_size)

    def _compiled(self, form: ResponseFormat) -> llguidance.LLMatcher:
        llguidance = _llguidance()
        what = {"json_schema": "JSON schema", "regex": "regular expression"}.get(
            form.kind, "grammar"
        )
        size, lines = len(form.text), form.text.count("\n") + 1
        if size > MOST_BYTES or lines > MOST_LINES:
            raise UsageError(
                f"the {what} has {size} characters in {lines} lines; the most are {MOST_BYTES} "
                f"characters and {MOST_LINES} lines"
            )
        try:
            text = _grammar_text(form)
        except ValueError as error:
            raise UsageError(f"the {what} is not valid: {error}") from error
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().partition("\n<state>")[0].strip()
            raise UsageError(f"the {what} is not valid or not supported: {reason:.500}")
        try:
            # Forms that nothing matches, or that are too large, show where an answer would begin.
            first = GrammarState(matcher.deep_copy(), self._mask_size)
            first.mask()
            first.take_forced(1)
        except HornitoError as error:
            raise UsageError(f"no answer can have this {what}: {error}") from error
        return matcher


def _on_a_large_stack(make: Callable[[], T]) -> T:
    """The result of a call in a thread with STACK_BYTES, or what it raised."""
    with ThreadPoolExecutor(1) as pool, _stack_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            future = pool.submit(make)  # starts the thread
        finally:
            threading.stack_size(before)
    return future.result()


def _grammar_text(form: ResponseFormat) -> str:
    """The form as llguidance reads it; ValueError when it can't be brought to that."""
    llguidance = _llguidance()
    if form.kind == "json_schema":
        schema = llguidance.LLMatcher.grammar_from_json_schema(form.text, overrides=JSON_OPTIONS)
        return str(schema)
    if form.kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(form.text))
    return str(llguidance.grammar_from("grammar", form.text))


def inline_schema(schema: Any) -> str:
    """A JSON schema as a terminal of a Lark grammar, in the spelling of `JSON_OPTIONS`."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": JSON_OPTIONS}
    return f"%json {json.dumps(schema)}"


class _Vocabulary:
    """What llguidance asks of a tokenizer.

    Attributes:
        tokens: the bytes of every id; none where the tokenizer has no text.
        special_token_ids: control tokens, which text can't spell; not those that mark calls.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = ends[0]
        self.bos_token_id = tokenizer.bos_id
        control = {text: i for text, i in tokenizer.special_tokens.items() if i < vocabulary}
        self._marks = {text: control[text] for text in CALL_MARKS if text in control}
        special = {*control.values(), *ends} - {*self._marks.values()}
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocabulary)]
        self.special_token_ids = sorted(special)
        # Some vocabularies put a space before the first word, which text in the middle hasn't: a
        # character that no token spells goes first, and its own ids are dropped.
        self._lead = "\x02" if tokenizer.strips_first_space else ""
        self._lead_ids = self._encode(self._lead) if self._lead else []

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_bos=False)

    def __call__(self, text: str) -> list[int]:
        """Ids of text that stands behind other text."""
        if not isinstance(text, str):
            raise TypeError("the vocabulary encodes text")
        if not self._marks:
            return self._behind(text)
        ids: list[int] = []
        for piece in re.split(f"({'|'.join(map(re.escape, self._marks))})", text):
            ids += [self._marks[piece]] if piece in self._marks else self._behind(piece)
        return ids

    def _behind(self, text: str) -> list[int]:
        ids = self._encode(self._lead + text)
        cut = len(self._lead_ids)
        if ids[:cut] != self._lead_ids:
            return self._encode(text)
        return ids[cut:]


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UsageError(
            "answers of a given form need the package llguidance: pip install 'hornito[structured]'"
        ) from error
    return llguidance
