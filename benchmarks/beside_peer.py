"""Measures a shape with Hornito and with llama.cpp in turn, and keeps every figure.

python benchmarks/beside_peer.py 0.5b int4 OUT --peer BIN_DIR --rounds 3

BIN_DIR is what `benchmarks/peer/fetch_llamacpp.sh` packs. A round is one run of the peer and two of
`hornito bench` on the same shape with random weights; its files in OUT are `peer-N.json`,
`hornito-prompts-N.json` and `hornito-decode-N.json`, after the first round also `speed.md` and
`speed.png` (where matplotlib is installed). Without --peer only Hornito is measured. Models are
made once, in OUT.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TYPES = {"fp16": "f16", "int8": "q8", "int4": "q4"}
"""Hornito's storage type, and the peer's of about the same size."""

PROMPTS = "32,512,2048"
DEPTHS = "32,4096"


def run(*command: str | Path) -> str:
    """The output of a command; its errors go to the terminal, and end this program."""
    words = [str(word) for word in command]
    print("$", " ".join(words), file=sys.stderr, flush=True)
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def models(shape: str, weights: str, out: Path, *, peer: bool) -> tuple[Path, Path]:
    """The package and the peer's file, made when they are not there."""
    package, gguf = out / f"{shape}-{weights}.vxm", out / f"{shape}-{TYPES[weights]}.gguf"
    if not package.exists():
        run(sys.executable, HERE / "random_model.py", shape, package, "--weights", weights)
    if peer and not gguf.exists():
        run(sys.executable, HERE / "peer" / "random_gguf.py", gguf, TYPES[weights], shape)
    return package, gguf


def measure(package: Path, out: Path, index: int, peer: Path | None, more: list[str]) -> None:
    """One run of `hornito bench` for prompts, and one for decoding, as JSON and as text."""
    hornito = [
        sys.executable,
        "-m",
        "hornito",
        "bench",
        str(package),
        "--context",
        "8192",
        "-r",
        "4",
    ]
    beside = ["--compare", str(peer)] if peer else []
    kinds = {"prompts": ["-p", PROMPTS, "-n", "0", "-d", "0"], "decode": ["-p", "0", "-d", DEPTHS]}
    for kind, rows in kinds.items():
        starts = [] if kind == "prompts" else ["--no-start"]
        json_text = run(*hornito, *rows, *beside, *starts, *more, "-o", "json")
        (out / f"hornito-{kind}-{index}.json").write_text(json_text, encoding="utf-8")
        print(json_text)
    if index == 1 and importlib.util.find_spec("matplotlib"):
        picture = ["--plot", str(out / "speed.png"), "--no-start"]
        (out / "speed.md").write_text(run(*hornito, *picture, *beside, *more), encoding="utf-8")


def main() -> None:
    """Make the models, then measure in rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=("0.5b", "1.5b", "7b"))
    parser.add_argument("weights", choices=sorted(TYPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--peer", type=Path, help="folder with llama-server and its libraries")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("more", nargs="*", help="more options of hornito bench, after --")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    given = arguments.peer is not None
    package, gguf = models(arguments.shape, arguments.weights, out, peer=given)
    for index in range(1, arguments.rounds + 1):
        peer = None
        if given:
            peer = out / f"peer-{index}.json"
            script = HERE / "peer" / "bench_llamacpp.py"
            run(sys.executable, script, arguments.peer, gguf, "llama.cpp Vulkan", "-o", peer)
        measure(package, out, index, peer, arguments.more)


if __name__ == "__main__":
    main()
