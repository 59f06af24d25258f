"""The records of a device on disk: several writers, and files that are damaged."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hornito.plan.records import GOOD, WRONG, DeviceRecords, Verdict, Winner

GOOD_ONE = Verdict("linear/a.f32", "shape", GOOD, "", 20, 0.0)
BAD_ONE = Verdict("linear/b.f32", "shape", WRONG, "by a mile", 20, 9.0)
WINNER = Winner("wide", 10.0, 20.0)


def read(path: Path) -> DeviceRecords:
    records = DeviceRecords(path)
    records._read()
    return records


def test_what_others_wrote_meanwhile_stays(tmp_path: Path) -> None:
    """A server proves kernels while `hornito tune` measures them."""
    path = tmp_path / "kernels.json"
    first = read(path)
    first.verdicts |= {"old": GOOD_ONE, "failed": BAD_ONE}
    first.strikes |= {"well": 1, "ill": 1}
    first.save()
    server, tune = read(path), read(path)
    tune.winners["site"] = WINNER
    tune.strike("ill")
    tune.save()
    server.verdicts["new"] = GOOD_ONE
    server.forget_failures()
    assert server.forgive(["well"])
    server.save()
    after = read(path)
    assert after.verdicts == server.verdicts == {"old": GOOD_ONE, "new": GOOD_ONE}
    assert after.winners == server.winners == {"site": WINNER}
    assert after.strikes == server.strikes == {"ill": 2}
    # What someone removed does not come back with what is written next.
    path.unlink()
    server.verdicts["last"] = BAD_ONE
    server.save()
    assert read(path).verdicts == {"last": BAD_ONE}


def test_nothing_is_lost_among_many_writers(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"

    def write(writer: int) -> None:
        records = read(path)
        for count in range(20):
            records.verdicts[f"{writer} {count}"] = GOOD_ONE
            records.save()

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read(path).verdicts) == 80
    assert [file.name for file in tmp_path.glob("[!.]*")] == ["kernels.json"]


@pytest.mark.parametrize(
    "damage",
    [
        {"strikes": []},
        {"strikes": 5},
        {"strikes": {"a": "x"}},
        {"strikes": {"a": float("inf")}},
        {"strikes": {"a": float("nan")}},
        {"verdicts": []},
        {"verdicts": {"a": {}}},
        {"verdicts": {"a": {**asdict(BAD_ONE), "kernel": []}}},
        {"verdicts": {"a": {**asdict(BAD_ONE), "runs": None}}},
        {"winners": {"a": {**asdict(WINNER), "nanoseconds": "x"}}},
        {"winners": {"a": 1}},
    ],
)
def test_damaged_entries(
    tmp_path: Path, damage: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kernels.json"
    good = {"format": 1, "verdicts": {"g": asdict(GOOD_ONE)}, "winners": {}, "strikes": {"s": 1}}
    path.write_text(json.dumps(good))
    assert read(path).strikes == {"s": 1} and not caplog.messages
    path.write_text(json.dumps({**good, **damage}))
    check_damaged(path, caplog)


@pytest.mark.parametrize("text", ["[" * 100_000, "null", "", "{", '{"format":1,"strikes":1e999}'])
def test_damaged_files(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(text)
    check_damaged(path, caplog)


def check_damaged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It counts as empty, with a warning, and the next save replaces it."""
    records = read(path)
    assert (records.verdicts, records.winners, records.strikes) == ({}, {}, {})
    assert "damaged and ignored" in caplog.text
    records.winners["site"] = WINNER
    records.save()
    assert read(path).winners == {"site": WINNER} and read(path).verdicts == {}
