r"""Pre-tokenizers of byte-level BPE vocabularies, by the name that GGUF files give them.

The patterns are those of the published tokenizer.json files, as pipelines of the `tokenizers`
library: patterns are applied in turn, each inside the pieces that the one before left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a byte-level BPE vocabulary prepares text.

    Attributes:
        patterns: regular expressions whose matches become pieces, applied in turn.
        digits: whether each digit is a piece of its own before everything else.
        ignore_merges: whether a piece that is a token is taken whole, whatever the merges.
        add_bos: whether text starts with BOS unless the file says otherwise.
        normalizer: a normaliser of the `tokenizers` library, or None.
    """

    patterns: tuple[str, ...] = (_GPT2,)
    digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    normalizer: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The `pre_tokenizer` entry of a tokenizer.json."""
        steps: list[dict[str, Any]] = []
        if self.digits:
            steps.append({"type": "Digits", "individual_digits": True})
        plain = self.patterns == (_GPT2,)
        if not plain:
            steps += [
                {
                    "type": "Split",
                    "pattern": {"Regex": pattern},
                    "behavior": "Isolated",
                    "invert": False,
                }
                for pattern in self.patterns
            ]
        # `use_regex` is GPT-2's own pattern.
        steps.append(
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": plain,
            }
        )
        return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


_plain = PreTokenizer()
_digits = PreTokenizer(digits=True)
_llama3 = PreTokenizer(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True)
_qwen2 = PreTokenizer(patterns=(_QWEN2,), normalizer={"type": "NFC"})
_default = PreTokenizer(
    patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
)

PRETOKENIZERS: dict[str, PreTokenizer] = {
    "default": _default,
    "gpt-2": _plain,
    "phi-2": _plain,
    "smollm": _digits,
    "starcoder": _digits,
    "refact": _digits,
    "command-r": _digits,
    "codeshell": _digits,
    "mpt": _plain,
    "olmo": _plain,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "llama-bpe": _llama3,
    "falcon3": _llama3,
    "pixtral": _llama3,
    "smaug-bpe": PreTokenizer(patterns=(_LLAMA3,)),
    "dbrx": PreTokenizer(patterns=(_LLAMA3,)),
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "deepseek-coder": PreTokenizer(patterns=_DEEPSEEK_CODER),
    "tekken": PreTokenizer(patterns=(_TEKKEN,), ignore_merges=True, add_bos=True),
}
