"""What a caller may choose of how matrices are rounded."""

from __future__ import annotations

from dataclasses import dataclass

from hornito.errors import UsageError

DEFAULT_ERROR = 0.25
DEFAULT_SEQUENCES = 8
MOST_SEQUENCES = 4096


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How `int8`, `int4` and `int4m` weights are made. None is the choice's own.

    Attributes:
        group: weights that share a scale: 32, 64 or 128.
        table: storage type of the tables that tokens are looked up in and scored by; `int4` puts
            everything in 4 bits.
        outliers: part of the input columns that are kept in fp16 beside the rest (0.01 is 1 %).
        samples: sequences of 256 tokens that are evaluated on a device, to see what inputs matter;
            0 goes by the weights alone and needs no device. By default 8 for 4 bits, 0 for 8.
        text: what they are taken from; a short text of our own by default.
        error: a matrix whose outputs would be off by more, relatively, stays at more bits.
        target_bytes: most bytes of all weights; what is left over goes to sensitive ones.
        device: where the samples are evaluated, as `load` takes it.

    Raises:
        UsageError: a number is out of range.
    """

    group: int | None = None
    table: str | None = None
    outliers: float | None = None
    samples: int | None = None
    text: str | None = None
    error: float = DEFAULT_ERROR
    target_bytes: int | None = None
    device: str | int | None = None

    def __post_init__(self) -> None:
        if self.samples is not None and not 0 <= self.samples <= MOST_SEQUENCES:
            raise UsageError(f"samples are from 0 to {MOST_SEQUENCES}, not {self.samples}")
        if not 0 < self.error <= 1:
            raise UsageError(f"the error limit lies between 0 and 1, not at {self.error}")
        if self.target_bytes is not None and self.target_bytes < 1:
            raise UsageError(f"a target size is a number of bytes, not {self.target_bytes}")
        if self.text is not None and self.samples == 0:
            raise UsageError("a calibration text is of no use with 0 samples")

    def sequences(self, weights: str) -> int:
        """How many sequences are evaluated for a choice of weights."""
        if self.samples is not None:
            return self.samples
        return DEFAULT_SEQUENCES if self.text or weights in ("int4", "int4m") else 0


DEFAULT_QUANTISATION = Quantisation()
