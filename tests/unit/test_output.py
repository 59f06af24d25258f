"""How verbs print tables. No device."""

from __future__ import annotations

import argparse

import pytest

from hornito.cli import devices
from hornito.cli.output import print_table
from hornito.vk import device as device_module
from hornito.vk.probe import DeviceInfo

ROWS = [("llama", "a long path of a source"), ("qwen", "another")]


def test_a_narrow_terminal_gets_records(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a wide one and in a pipe columns stay columns."""
    table = "name   source\nllama  a long path of a source\nqwen   another\n"
    records = "name    llama\nsource  a long path of a source\n\nname    qwen\nsource  another\n"
    for columns, terminal, asked, expected in (
        ("29", True, True, records),
        ("30", True, True, table),
        ("29", False, True, table),
        ("29", True, False, table),
    ):
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setattr("sys.stdout.isatty", lambda found=terminal: found)
        print_table(("name", "source"), ROWS, records=asked)
        assert capsys.readouterr().out == expected


def test_devices_fit_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = DeviceInfo(
        0,
        "A long name of a GPU",
        1,
        2,
        "discrete",
        "0" * 32,
        None,
        "driver",
        "info",
        1,
        1,
        True,
        "",
    )
    monkeypatch.setattr(device_module, "list_devices", lambda: [found])
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert devices.run(argparse.Namespace(json=False)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "name    A long name of a GPU" in lines and max(map(len, lines)) <= 50
