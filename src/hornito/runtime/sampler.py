"""How the next token is chosen: parameters, their checks, and what the device is told.

The order is: logit bias, repetition penalty, presence and frequency penalties, temperature, top-k,
top-p, min-p, draw. docs/sampling.md defines each and says where other engines differ.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypedDict

import numpy as np
import numpy.typing as npt

from hornito.arguments import whole
from hornito.errors import UsageError
from hornito.ops.base import MOST_BIASES, MOST_TOP, SAMPLING_BYTES
from hornito.ops.sampling import GREEDY, MASKED, PENALTIES, TOP_K, TOP_P, mask_bytes

GREEDY_BELOW = 1e-4
"""Below this temperature the most likely token is taken, without a draw."""

MOST_TEMPERATURE = 100.0
LEAST_REPETITION = 1e-30
MOST_REPETITION = 100.0
MOST_PENALTY = 2.0
MOST_BIAS = 10000.0
SEED_LIMIT = 1 << 64
IN_PROMPT = 1 << 31
"""Bit of a token count: the id is part of the prompt."""

FULL_WEIGHT = float(1 << 31)


class SamplingKeywords(TypedDict, total=False):
    """The keyword arguments of `generate`, `stream`, `chat` and `stream_chat` that choose tokens.

    Keys:
        temperature: 0 (default) takes the most likely token; 1 draws from the model's distribution.
        top_k: draw from the k most likely tokens; 0 is off.
        top_p: draw from the smallest set of likely tokens with at least this probability; 1 is off.
        min_p: drop tokens less likely than this part of the most likely one's probability; 0 is
            off.
        repetition_penalty: divides the positive, multiplies the negative logits of tokens that
            the prompt or the answer has; 1 is off.
        presence_penalty: taken from the logits of tokens that the answer has; 0 is off.
        frequency_penalty: the same, for each time that the answer has them; 0 is off.
        logit_bias: added to the logits of these token ids.
        seed: of the draws; the same seed, prompt and parameters give the same answer. By default
            a random one, which the result reports.
        logprobs: report the log-probability of each token and of this many most likely ones.
        sampling: `default`, or `model`: what is not given comes from the model's own
            generation_config.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    logprobs: int | None
    sampling: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What chooses the tokens of one answer; see `SamplingKeywords` for the fields.

    Raises:
        UsageError: a value is out of its range; names the parameter and the range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, MOST_TEMPERATURE)
        whole("top_k", self.top_k, 0, (1 << 31) - 1)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, MOST_REPETITION, above=True)
        if self.repetition_penalty < LEAST_REPETITION:
            raise UsageError(
                f"repetition_penalty must be at least {LEAST_REPETITION:g} (logits divided by less "
                f"leave the range of fp32), not {self.repetition_penalty}"
            )
        _number("presence_penalty", self.presence_penalty, -MOST_PENALTY, MOST_PENALTY)
        _number("frequency_penalty", self.frequency_penalty, -MOST_PENALTY, MOST_PENALTY)
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}")
        if len(self.logit_bias) > MOST_BIASES:
            raise UsageError(
                f"logit_bias takes up to {MOST_BIASES} token ids, not {len(self.logit_bias)}"
            )
        for token, value in self.logit_bias.items():
            whole("an id in logit_bias", token, 0, (1 << 31) - 1)
            _number(f"logit_bias of token {token}", value, -MOST_BIAS, MOST_BIAS)
        if self.seed is not None:
            whole("seed", self.seed, 0, SEED_LIMIT - 1)
        if self.logprobs is not None:
            whole("logprobs", self.logprobs, 0, MOST_TOP)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether token counts matter."""
        neutral = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return neutral != (1.0, 0.0, 0.0)

    @property
    def plain(self) -> bool:
        """Whether the largest logit is all that is wanted: the `argmax` tail does."""
        return self.greedy and not self.penalised and not self.logit_bias and not self.logprobs

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raise UsageError for a biased id that the model lacks."""
        for token in self.logit_bias:
            if token >= vocabulary:
                raise UsageError(
                    f"logit_bias names token {token}; the vocabulary has ids 0 to {vocabulary - 1}"
                )


class Constraint(Protocol):
    """Which tokens an answer may go on with; it follows the answer token by token.

    The implementation is `hornito.structured.grammar.GrammarState`.
    """

    @property
    def complete(self) -> bool:
        """Whether nothing but an end token can follow, or one has."""
        ...

    def mask(self) -> bytes:
        """One bit for each id, lowest bit first, in 32-bit words: 1 where it may come next."""
        ...

    def accept(self, token: int) -> None:
        """Take the token that was chosen."""
        ...

    def take_forced(self, most: int) -> list[int]:
        """Up to `most` tokens that can only come next, which count as accepted."""
        ...


@dataclass(frozen=True, slots=True)
class Sampler:
    """Parameters with what belongs to one answer: its seed, and where its prompt ends.

    Attributes:
        params: the parameters.
        seed: the seed, chosen if the caller gave none.
        prompt_tokens: how many ids of the sequence are prompt; those behind are generated.
        constraint: what the answer must match; one answer's own.
    """

    params: SamplingParams
    seed: int
    prompt_tokens: int
    constraint: Constraint | None = None

    @classmethod
    def start(
        cls, params: SamplingParams, prompt_tokens: int, constraint: Constraint | None = None
    ) -> Sampler:
        """The sampler of an answer to a prompt of so many tokens."""
        seed = params.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(4), "little")
        return cls(params, operator.index(seed), prompt_tokens, constraint)

    @property
    def plain(self) -> bool:
        """Whether the largest logit is all that is wanted: the `argmax` tail does."""
        return self.params.plain and self.constraint is None

    @property
    def free(self) -> Sampler | None:
        """The sampler without its constraint, for what outlives the answer; None when plain."""
        return None if self.params.plain else replace(self, constraint=None)

    def record(self) -> bytes:
        """The row's parameters as the kernels read them (kernels/include/sampling.glsl)."""
        q = self.params
        flags = (
            (GREEDY if q.greedy else 0)
            | (PENALTIES if q.penalised else 0)
            | (TOP_K if q.top_k else 0)
            | (TOP_P if q.top_p < 1.0 else 0)
            | (MASKED if self.constraint is not None else 0)
        )
        record = np.zeros(SAMPLING_BYTES // 4, np.uint32)
        floats = record.view(np.float32)
        record[0] = flags
        floats[1] = 0.0 if q.greedy else math.log2(math.e) / q.temperature
        record[2] = q.top_k
        record[3] = min(round(q.top_p * 2**32), (1 << 32) - 1)
        record[4] = max(1, math.ceil(q.min_p * FULL_WEIGHT))
        floats[5:8] = (q.repetition_penalty, q.presence_penalty, q.frequency_penalty)
        record[8], record[9] = self.seed & 0xFFFFFFFF, self.seed >> 32
        record[10], record[11] = len(q.logit_bias), q.logprobs or 0
        return record.tobytes()

    def biases(self) -> bytes:
        """The biased ids in order, id and fp32 bias each."""
        table = np.zeros((len(self.params.logit_bias), 2), np.uint32)
        for row, (token, value) in zip(table, sorted(self.params.logit_bias.items()), strict=True):
            row[0] = token
            row[1:].view(np.float32)[0] = value
        return table.tobytes()

    def counts(self, ids: Sequence[int], pending: int | None, vocabulary: int) -> bytes:
        """What the sequence holds, by id: how often it was generated, and whether it is prompt.

        Args:
            ids: evaluated tokens; those outside the vocabulary (embeddings) don't count.
            pending: the token to come, a part of the answer when there is one.
        """
        return token_counts(ids, pending, self.prompt_tokens, vocabulary).tobytes()


def sampling_updates(
    kind: str, row: int, sampler: Sampler, counted: tuple[int, bytes] | None
) -> list[tuple[str, int, bytes]]:
    """What the host writes for one selected row of a `sample` tail, but for its mask.

    Args:
        counted: the slot and its token counts, when penalties need them.
    """
    updates = [(f"{kind}.sampling", row * SAMPLING_BYTES, sampler.record())]
    if biases := sampler.biases():
        updates.append((f"{kind}.biases", row * MOST_BIASES * 8, biases))
    if counted is not None:
        slot, counts = counted
        updates.append(("counts", slot * len(counts), counts))
    return updates


def mask_update(
    kind: str, row: int, constraint: Constraint, vocabulary: int
) -> tuple[str, int, bytes]:
    """What the host writes before a selected row's next token is chosen.

    Raises:
        HornitoError: the constraint can't say what may come next.
    """
    mask, size = constraint.mask(), mask_bytes(vocabulary)
    if len(mask) != size:
        raise ValueError(f"a mask of {vocabulary} ids has {size} bytes, not {len(mask)}")
    return (f"{kind}.masks", row * size, mask)


def token_counts(
    ids: Sequence[int], pending: int | None, prompt_tokens: int, vocabulary: int
) -> npt.NDArray[np.uint32]:
    """`[V]` words: bit 31 for ids of the prompt, below it how often an id was generated."""
    sequence = np.asarray([*ids, *(() if pending is None else (pending,))], np.int64)
    prompt, generated = sequence[:prompt_tokens], sequence[prompt_tokens:]
    generated = generated[(generated >= 0) & (generated < vocabulary)]
    counts = np.bincount(generated, minlength=vocabulary).astype(np.uint32)
    counts[prompt[(prompt >= 0) & (prompt < vocabulary)]] |= IN_PROMPT
    return counts


def sampling_params(
    keywords: SamplingKeywords, generation_config: Mapping[str, Any]
) -> SamplingParams:
    """The parameters that a caller asked for, with the model's own behind them when wanted.

    Args:
        keywords: what was given.
        generation_config: the model's; read only with `sampling="model"`, and then as Hugging
            Face does: without `do_sample` the answer is greedy, and top_k is 50 unless it says.

    Raises:
        UsageError: a value is out of range, or a filter was given without a temperature.
    """
    given = dict(keywords)
    known = [*(f.name for f in fields(SamplingParams)), "sampling"]
    for name in given:
        if name not in known:
            raise UsageError(
                f"no sampling parameter is called {name!r}; there are {', '.join(known)}"
            )
    source = given.pop("sampling", "default")
    if source not in ("default", "model"):
        raise UsageError(f"sampling must be 'default' or 'model', not {source!r}")
    base = SamplingParams()
    if source == "model":
        base = model_params(generation_config)
    elif "temperature" not in given:
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if given.get(name, off) != off:
                raise UsageError(
                    f"{name} needs a temperature: the default is 0 (greedy), where {name} changes "
                    "nothing; give temperature=1.0"
                )
    return replace(base, **given)  # type: ignore[arg-type]


def model_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """The parameters that a generation_config.json stands for.

    Raises:
        UsageError: one of its values is out of range.
    """
    found = {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if (value := generation_config.get(name)) is not None
    }
    if not generation_config.get("do_sample", False):
        penalty = found.get("repetition_penalty", 1.0)
        return SamplingParams(repetition_penalty=penalty)
    return SamplingParams(**{"temperature": 1.0, "top_k": 50, **found})


def _number(name: str, value: object, least: float, most: float, *, above: bool = False) -> None:
    """Check a real number; `above` leaves `least` itself out."""
    allowed = f"above {least:g} and at most {most:g}" if above else f"from {least:g} to {most:g}"
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise UsageError(f"{name} must be a number {allowed}, not {value!r}")
    # Compared as it is: an integer may be too large for a float.
    if not least <= value <= most or (above and value == least):
        raise UsageError(f"{name} must be {allowed}, not {value}")
