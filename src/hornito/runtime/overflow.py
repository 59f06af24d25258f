"""What happens when a sequence outgrows its context.

`error` (the default) raises before anything is evaluated. `truncate` rebuilds the session from its
first `keep_first` and last `keep_last` tokens, at positions from 0 again, so that it equals a fresh
run on those tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hornito.arguments import whole
from hornito.errors import UsageError
from hornito.ops.base import BLOCK_POSITIONS, ceil_div

if TYPE_CHECKING:
    from hornito.runtime.engine import Engine

DEFAULT_MAX_TOKENS = 256
"""New tokens of an answer when nobody says how many."""

POLICIES = ("error", "truncate")


@dataclass(frozen=True, slots=True)
class Overflow:
    """A policy.

    Attributes:
        policy: `error` or `truncate`.
        keep_first: tokens kept from the start (a system prompt).
        keep_last: tokens kept from the end; None keeps half of what is left of the context.

    Raises:
        UsageError: an unknown policy, or a number that is none or too small.
    """

    policy: str = "error"
    keep_first: int = 0
    keep_last: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UsageError(f"overflow must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        whole("keep_first", self.keep_first, 0)
        if self.keep_last is not None:
            whole("keep_last", self.keep_last, 1)

    @classmethod
    def of(cls, value: object) -> Overflow:
        """The policy that an argument means: one, the name of one, or None for the default.

        Raises:
            UsageError: it is none of these.
        """
        if value is None:
            return REFUSE
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(value)
        raise UsageError(
            f"overflow must be an Overflow, or one of {', '.join(POLICIES)}, not {value!r:.80}"
        )

    def check(self, context: int) -> None:
        """Raise UsageError when what is kept leaves no room for a new token."""
        if self.policy == "truncate":
            self.kept(0, context)

    def applies(self, positions: int, context: int) -> bool:
        """Whether a sequence of that many positions is to be rebuilt."""
        return self.policy == "truncate" and positions > context

    def kept(self, length: int, context: int) -> list[int]:
        """Which positions of a sequence that is too long stay, in order.

        Raises:
            UsageError: keep_first and keep_last leave no room for a new token.
        """
        last = self.keep_last
        if last is None:
            last = max(1, (context - self.keep_first) // 2)
        if self.keep_first + last >= context:
            raise UsageError(
                f"keep_first {self.keep_first} and keep_last {last} leave no room in a context of "
                f"{context}"
            )
        if length <= self.keep_first + last:
            return list(range(length))
        return [*range(self.keep_first), *range(length - last, length)]


REFUSE = Overflow()
"""The default policy: an error."""


def room_advice(engine: Engine, needed: int, wanted: int = 0) -> str:
    """How to make room for `needed` positions and, where the model has them, `wanted` more.

    The context that it names is of whole KV blocks, unless the model has fewer positions.
    """
    most = engine.model_context
    if needed <= most:
        blocks = ceil_div(needed + wanted, BLOCK_POSITIONS)
        context = min(blocks * BLOCK_POSITIONS, most)
        return f"Load with a larger context (--context {context}, or context={context})"
    if engine.context < most:
        return f"The model was made for {most} at most (--context {most}, or context={most})"
    return f"The model was made for {most} at most"
