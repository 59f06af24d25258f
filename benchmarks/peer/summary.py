"""What rounds of Hornito and a peer come to: values side by side, ratios, medians."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hornito.errors import UsageError

FACTS = (
    *("model", "device", "weights", "precision", "kv", "context", "steps_per_submission", "runs"),
    *("step_bytes", "load_seconds", "proof", "proof_seconds"),
)
"""What a summary takes from the last round; the last two only where kernels were proved."""

Rows = Mapping[str, Mapping[str, Any]]


def write(folder: Path) -> dict[str, Any]:
    """Make `summary.json` of the rounds in a folder; returns what it holds.

    A work (`works`) has `test` (`pp512`, `tg64@d4096`), `unit` (`ms` of prompts, else `tok/s`),
    `tokens` and `depth`, one value a round in `hornito`, and in `gbps` for decoding; where the peer
    measured it too, also in `peer` and `ratios` (how many times as fast Hornito is). Each of the
    lists has its median beside it, as in `hornito_median`.

    Raises:
        UsageError: the folder holds no rounds.
    """
    count = len(list(folder.glob("hornito-*.json")))
    if not count:
        raise UsageError(f"{folder} holds no rows: no hornito-1.json")
    ours = [_read(folder / f"hornito-{index}.json") for index in range(1, count + 1)]
    theirs = [_read(folder / f"peer-{index}.json") for index in range(1, count + 1)]
    with_peer = all(theirs)
    found = {name: ours[-1][name] for name in FACTS if name in ours[-1]}
    found |= {"rounds": count, "peer": theirs[0]["label"] if with_peer else None}
    rows = [_by_test(report) for report in ours]
    peers = [_by_test(report) for report in theirs] if with_peer else []
    found["works"] = [_work(test, rows, peers) for test in rows[0]]
    (folder / "summary.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _read(path: Path) -> dict[str, Any]:
    """A round's JSON; empty when there is none."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _by_test(report: Mapping[str, Any]) -> Rows:
    return {row["test"]: row for row in report["rows"]}


def _work(test: str, rows: Sequence[Rows], peers: Sequence[Rows]) -> dict[str, Any]:
    """One test of all rounds."""
    decode = test.startswith("tg")
    field = "median" if decode else "median_ms"
    first = rows[0][test]
    work: dict[str, Any] = {
        "test": test,
        "unit": "tok/s" if decode else "ms",
        "tokens": first["tokens"],
        "depth": first["depth"],
    }
    lists = {"hornito": [row[test][field] for row in rows]}
    if decode:
        lists["gbps"] = [row[test]["gbps"] for row in rows]
    if peers and all(test in peer for peer in peers):
        lists["peer"] = [peer[test][field] for peer in peers]
        pairs = zip(lists["hornito"], lists["peer"], strict=True)
        lists["ratios"] = [a / b if decode else b / a for a, b in pairs]
    for name, values in lists.items():
        work[name] = values
        work[f"{name}_median"] = statistics.median(values)
    return work


def title(found: Mapping[str, Any]) -> str:
    """The model and the device in one line."""
    return f"{found['model']}, {found['weights']}, {found['device']}"


def markdown(found: Mapping[str, Any]) -> str:
    """A header line and a table: medians, and the values of the rounds behind them."""
    lines = [
        f"{title(found)}; {found['precision']}, KV {found['kv']}, context {found['context']}; "
        f"a step reads {found['step_bytes'] / 1e6:.1f} MB of weights; medians of "
        f"{found['rounds']} rounds, in parentheses the rounds",
        "",
    ]
    if "proof" in found:
        lines.insert(1, f"kernels: {found['proof']} ({found['proof_seconds']:.1f} s)")
    names = ["work", "Hornito"]
    if found["peer"]:
        names += [found["peer"].replace("|", "/"), "times as fast"]
    names.append("GB/s")
    lines += [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for work in found["works"]:
        digits, unit = (1, " tok/s") if work["unit"] == "tok/s" else (2, " ms")
        cells = [_name(work), _cell(work, "hornito", digits, unit)]
        if found["peer"]:
            cells += [_cell(work, "peer", digits, unit), _cell(work, "ratios", 2, "")]
        cells.append(f"{work['gbps_median']:.0f}" if "gbps" in work else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _name(work: Mapping[str, Any]) -> str:
    if work["unit"] == "ms":
        return f"prompt of {work['tokens']} tokens"
    return f"decode behind {work['depth']} tokens"


def _cell(work: Mapping[str, Any], name: str, digits: int, unit: str) -> str:
    """The median with its unit, and the values of the rounds."""
    if name not in work:
        return "-"
    values = ", ".join(f"{value:.{digits}f}" for value in work[name])
    return f"{work[f'{name}_median']:.{digits}f}{unit} ({values})"


Curves = dict[str, list[tuple[float, float]]]


def curves(found: Mapping[str, Any]) -> tuple[Curves, Curves]:
    """By label: (context, tok/s) of decoding, and (prompt tokens, ms), medians of the rounds."""
    speeds: Curves = {}
    times: Curves = {}
    for field, label in (("hornito", "Hornito"), ("peer", found["peer"])):
        works = [work for work in found["works"] if field in work]
        for unit, place, into in (("tok/s", "depth", speeds), ("ms", "tokens", times)):
            points = [(w[place], w[f"{field}_median"]) for w in works if w["unit"] == unit]
            if points:
                into[label] = points
    return speeds, times
