"""The settings of a chat by name, for `/set`."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from hornito.cli.options import SAMPLING, positive_int
from hornito.errors import UsageError

if TYPE_CHECKING:
    from hornito.dialogue import ChatSettings
    from hornito.runtime.sampler import SamplingKeywords


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"'{text}' is neither on nor off")
    return text == "on"


def _stops(text: str) -> tuple[str, ...]:
    return () if text == "-" else (text,)


#: Name, field of ChatSettings, how a value is read.
SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "max-tokens": ("max_tokens", positive_int),
    "stop": ("stop", _stops),
    "ignore-eos": ("ignore_eos", _switch),
}

#: Name, sampling keyword, how a value is read.
_SAMPLING = {flag.removeprefix("--"): (key, convert) for flag, key, convert, *_ in SAMPLING}


#: The Python interface's names of the same.
_ALIASES = {key.replace("_", "-"): name for name, (key, _) in _SAMPLING.items()}


def setting_named(name: str) -> str | None:
    """The setting of a name, in whatever spelling; None when there is none."""
    name = name.removeprefix("--").replace("_", "-")
    name = _ALIASES.get(name, name)
    return name if name in SETTINGS or name in _SAMPLING else None


def set_setting(settings: ChatSettings, name: str, text: str, only: Sequence[str] = ()) -> None:
    """Change one setting.

    Args:
        only: the settings that count; none are all.

    Raises:
        UsageError: no such setting, or a value that it does not take.
    """
    found = setting_named(name)
    if found is None:
        there = list(only or [*SETTINGS, *_SAMPLING])
        close = difflib.get_close_matches(name, [*there, *([] if only else _ALIASES)], 1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise UsageError(f"no setting is called '{name}'{hint}; there are {', '.join(there)}")
    name = found
    if only and name not in only:
        raise UsageError(
            f"{name} is the runner's: give it in the command of --via. Here there are "
            f"{', '.join(only)}"
        )
    if not text:
        raise UsageError(f"/set {name} needs a value")
    try:
        if name in _SAMPLING:
            _set_sampling(settings, *_SAMPLING[name], text)
        else:
            attribute, convert = SETTINGS[name]
            setattr(settings, attribute, convert(text))
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise UsageError(f"/set {name}: {error}") from error


def _set_sampling(
    settings: ChatSettings, key: str, convert: Callable[[str], Any], text: str
) -> None:
    from hornito.runtime.sampler import sampling_params

    changed = cast("SamplingKeywords", {**settings.sampling, key: convert(text)})
    sampling_params(changed, {})
    settings.sampling = changed


def describe_settings(settings: ChatSettings, only: Sequence[str] = ()) -> list[str]:
    """One 'name value' line for each setting, given or not; `only` as for `set_setting`."""
    from hornito.runtime.sampler import SamplingParams

    lines = []
    for name, (attribute, _) in SETTINGS.items():
        if only and name not in only:
            continue
        value = getattr(settings, attribute)
        if isinstance(value, bool):
            value = "on" if value else "off"
        if isinstance(value, tuple):
            value = ", ".join(map(repr, value)) or "-"
        lines.append(f"{name} {value}")
    if only:
        return lines
    given: dict[str, Any] = {**settings.sampling}
    usual = {"seed": "random", "sampling": "default"}
    whose = "of the model, if it has one" if given.get("sampling") == "model" else "default"
    for name, (key, _) in _SAMPLING.items():
        if key in given:
            lines.append(f"{name} {given[key]}")
        else:
            value = usual.get(key) or f"{getattr(SamplingParams(), key):g}"
            lines.append(f"{name} {value} ({'default' if key in usual else whose})")
    return lines
