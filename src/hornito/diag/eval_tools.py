"""Tool calls behind a shared catalogue: how often they are right, and what each costs.

The catalogue is evaluated once. Each utterance restores it, evaluates its own few tokens, and is
answered greedily until the first JSON object of the answer is whole.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hornito.errors import FormatError, UsageError
from hornito.progress import Progress

if TYPE_CHECKING:
    from hornito.api import LLM

FORMAT = "hornito-tool-calls"
VERSION = 1
BUILTIN = "builtin"
MAX_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Case:
    """An utterance and the call that it asks for."""

    utterance: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Suite:
    """A catalogue and its cases.

    Attributes:
        system: the system message: instructions, and the tools one a line as JSON.
        names: of the tools.
    """

    system: str
    names: frozenset[str]
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True)
class CallResult:
    """What became of one case.

    Attributes:
        call: the first JSON object of the answer that names a tool, or None.
        exact: whether it is the expected call.
        seconds: restoring the catalogue, evaluating the utterance and decoding.
        evaluated: prompt tokens that were evaluated.
        token_ids: of the answer, up to the end of the call.
    """

    utterance: str
    text: str
    call: dict[str, Any] | None
    expected: dict[str, Any]
    exact: bool
    seconds: float
    evaluated: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Identity:
    """Agreement with the reference's tokens.

    Attributes:
        answers: the part of answers whose tokens are all the same.
        tokens: the part of the reference's tokens that come before the first difference.
    """

    answers: float
    tokens: float


@dataclass(frozen=True, slots=True)
class ToolReport:
    """All cases, and their sums; rates are from 0 to 1."""

    model: str
    device: str
    precision: str
    catalogue_tokens: int
    complete: float
    exact: float
    identity: Identity | None
    p50_seconds: float
    max_seconds: float
    results: tuple[CallResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


def read_suite(path: str) -> Suite:
    """The suite of a file, or the one that comes along (`builtin`).

    Raises:
        FormatError: the file is no suite; says which part is wrong.
    """
    try:
        if path == BUILTIN:
            text = (resources.files("hornito") / "data" / "tool_calls.json").read_text("utf-8")
        else:
            text = Path(path).read_text("utf-8")
        data: Any = json.loads(text)
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {path}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is no JSON file: {error}") from error
    if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        raise FormatError(f"{path}: format and version must be {FORMAT!r} and {VERSION}")
    tools, cases, system = _objects(data, "tools"), _objects(data, "cases"), data.get("system")
    if not isinstance(system, str) or not tools or not cases:
        raise FormatError(f"{path}: 'system' must be text, 'tools' and 'cases' lists of objects")
    names = [name for tool in tools if isinstance(name := tool.get("name"), str)]
    if len(set(names)) != len(tools):
        raise FormatError(f"{path}: every tool needs a name of its own")
    lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    return Suite(
        "\n".join([system, *lines]),
        frozenset(names),
        tuple(_case(path, i, case, names) for i, case in enumerate(cases)),
    )


def _objects(data: dict[str, Any], key: str) -> list[dict[str, Any]]:
    value = data.get(key)
    right = isinstance(value, list) and all(isinstance(one, dict) for one in value)
    return value if isinstance(value, list) and right else []


def _case(path: str, index: int, data: dict[str, Any], names: Sequence[str]) -> Case:
    utterance, call = data.get("utterance"), data.get("call")
    if (
        not isinstance(utterance, str)
        or not isinstance(call, dict)
        or call.get("name") not in names
        or not isinstance(call.get("arguments"), dict)
    ):
        raise FormatError(
            f"{path}: case {index} needs an utterance and a call of a tool with arguments"
        )
    return Case(utterance, call["name"], call["arguments"])


def find_call(text: str, names: frozenset[str]) -> dict[str, Any] | None:
    """The first whole JSON object in a text, if it is a call of one of the tools."""
    start = text.find("{")
    if start < 0:
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(text[start:])
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("arguments"), dict):
        return None
    name = value.get("name")
    return value if isinstance(name, str) and name in names else None


def whole_object(text: str) -> bool:
    """Whether a text holds a whole JSON object."""
    start = text.find("{")
    if start < 0:
        return False
    try:
        json.JSONDecoder().raw_decode(text[start:])
    except (ValueError, RecursionError):
        return False
    return True


def run_suite(
    llm: LLM, suite: Suite, progress: Progress, *, max_tokens: int = MAX_TOKENS
) -> tuple[int, list[CallResult]]:
    """Answer every case; returns the catalogue's tokens and the results.

    A first, uncounted answer records command buffers and, on software drivers, compiles.

    Raises:
        UsageError: the model has no tokenizer.
        ContextOverflowError: the catalogue and an answer do not fit the context.
    """
    if not llm.has_tokenizer:
        raise UsageError("tool calls are text; this package has no tokenizer")
    system = [{"role": "system", "content": suite.system}]
    chat = llm.has_chat_template
    progress.start("answering", len(suite.cases) + 1)
    with llm.prefill_chat(system) if chat else llm.prefill(suite.system) as catalogue:
        results = []
        for case in (suite.cases[0], *suite.cases):
            if chat:
                ids = llm.chat_ids([*system, {"role": "user", "content": case.utterance}])
            else:
                text = f"\n\nRequest: {case.utterance}\nCall: "
                ids = [*catalogue.ids, *llm.tokenizer.encode(text, add_bos=False)]
            results.append(_answer(llm, suite, case, ids, max_tokens))
            progress.advance(1)
        progress.finish()
        return catalogue.position, results[1:]


def _answer(llm: LLM, suite: Suite, case: Case, ids: list[int], max_tokens: int) -> CallResult:
    counters = llm.engine.counters
    before, began = counters.evaluated_tokens, time.perf_counter()
    text, tokens = "", list[int]()
    for chunk in llm.stream(ids, max_tokens=max_tokens, continuation=False):
        text += chunk.text
        tokens += chunk.token_ids
        if whole_object(text):
            break
    seconds = time.perf_counter() - began
    call = find_call(text, suite.names)
    expected = {"name": case.name, "arguments": case.arguments}
    return CallResult(
        case.utterance,
        text,
        call,
        expected,
        call == expected,
        seconds,
        counters.evaluated_tokens - before,
        tuple(tokens),
    )


def compare(results: Sequence[CallResult], reference: Sequence[CallResult]) -> Identity:
    """How far the tokens of two runs of a suite agree."""
    same = total = answers = 0
    for mine, other in zip(results, reference, strict=True):
        pairs = zip(mine.token_ids, other.token_ids, strict=False)
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        shorter = min(len(mine.token_ids), len(other.token_ids))
        same += shorter if equal is None else equal
        total += len(other.token_ids)
        answers += mine.token_ids == other.token_ids
    return Identity(answers / len(results), same / max(1, total))


def report(
    llm_facts: tuple[str, str, str],
    catalogue_tokens: int,
    results: Sequence[CallResult],
    reference: Sequence[CallResult] | None,
) -> ToolReport:
    """Sums of a run.

    Args:
        llm_facts: model, device and precision.
        reference: the same suite at fp32, where it was run.
    """
    count = len(results)
    seconds = [result.seconds for result in results]
    return ToolReport(
        *llm_facts,
        catalogue_tokens=catalogue_tokens,
        complete=sum(result.call is not None for result in results) / count,
        exact=sum(result.exact for result in results) / count,
        identity=None if reference is None else compare(results, reference),
        p50_seconds=statistics.median(seconds),
        max_seconds=max(seconds),
        results=tuple(results),
    )
