"""How long compiling a source takes, and how much memory that is not a mapped file.

Usage: compile_memory.py SOURCE [OUT.vxm] [--weights TYPE]

`hornito compile` runs as a process of its own, whose RssAnon is read every few milliseconds
(/proc, so on Linux only). Prints seconds, the peak in MB, and its ratio to the bytes of the
weights in the source's files. An ONNX file that holds its weights may be given a twin with
external data by `--external DIR` (needs the onnx package), which is measured after it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WEIGHTS = (".onnx", ".onnx_data", ".data", ".safetensors", ".gguf", ".bin")
INTERVAL_S = 0.004
_RSS_ANON = re.compile(r"^RssAnon:\s+(\d+) kB", re.MULTILINE)


def source_bytes(source: Path) -> int:
    """Bytes of the files that hold the weights of a source."""
    if source.is_file() and source.suffix != ".onnx":
        return source.stat().st_size
    folder = source if source.is_dir() else source.parent
    return sum(f.stat().st_size for f in folder.iterdir() if f.suffix in WEIGHTS)


def peak_anonymous(command: list[str]) -> tuple[float, int]:
    """Seconds that a command takes, and the largest RssAnon of its process in bytes.

    Raises:
        SystemExit: the command failed.
    """
    began, peak = time.monotonic(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            found = _RSS_ANON.search(status.read_text())
            peak = max(peak, int(found[1]) * 1024 if found else 0)
            time.sleep(INTERVAL_S)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}")
    return time.monotonic() - began, peak


def measure(source: Path, out: Path, weights: str) -> None:
    """Compile one source and print its row."""
    command = [sys.executable, "-m", "hornito", "compile", str(source), str(out)]
    seconds, peak = peak_anonymous([*command, "--weights", weights])
    held = source_bytes(source)
    print(
        f"{source.name}: {seconds:.1f} s, weights {held / 1e6:.1f} MB, peak anonymous memory "
        f"{peak / 1e6:.1f} MB, {peak / held:.2f} x the weights"
    )


def externalised(source: Path, folder: Path) -> Path:
    """The ONNX file with its weights in a file beside it."""
    import onnx

    folder.mkdir(parents=True, exist_ok=True)
    target = folder / source.name
    onnx.save(
        onnx.load(str(source)),
        str(target),
        save_as_external_data=True,
        location=f"{source.name}_data",
        size_threshold=100,
    )
    return target


def main() -> None:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path, nargs="?", help="default: a file that is deleted")
    parser.add_argument("--weights", default="fp16")
    parser.add_argument(
        "--external", type=Path, metavar="DIR", help="also measure a twin made here"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as spare:
        out = arguments.out or Path(spare) / "model.vxm"
        measure(arguments.source, out, arguments.weights)
        if arguments.external:
            twin = externalised(arguments.source, arguments.external)
            measure(twin, out, arguments.weights)


if __name__ == "__main__":
    main()
