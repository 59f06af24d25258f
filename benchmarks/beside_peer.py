"""Measures a shape with Hornito and with llama.cpp in turn, both loaded once, and keeps every row.

python benchmarks/beside_peer.py 0.5b int4 OUT --peer BIN_DIR --rounds 3

BIN_DIR is what `benchmarks/peer/fetch_llamacpp.sh` packs; without it only Hornito is measured. Both
stay loaded while rounds alternate: all cases of the peer, then all of ours. OUT holds the models,
which have random weights and are made when they are missing. OUT/SHAPE-WEIGHTS gets the rows of
each round (`peer-N.json`, `hornito-N.json`, as `hornito bench -o json` prints them) and, renewed
after every round, `summary.json`. The summary is printed as a table as well.

Other options are those with which `hornito bench` loads a model, such as --tune fast or
--disable-feature NAME.

--make measures nothing: it makes the models that are missing, and proves the package's kernels.
--draw needs no GPU: it makes summary, table and picture again from the rows that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peer import summary as summaries
from peer.bench_llamacpp import Server, as_json, cases_of, measure

from hornito.api import LLM
from hornito.cli.model import add_model, load_model
from hornito.cli.options import Parser, positive_int, whole_numbers
from hornito.diag.bench import bench, tests_of, warm_seconds
from hornito.diag.bench_plot import check_matplotlib, draw
from hornito.diag.random_model import SHAPES, write_random_model
from hornito.errors import HornitoError, UsageError
from hornito.progress import NullProgress

HERE = Path(__file__).resolve().parent
TYPES = {"fp16": "f16", "int8": "q8", "int4": "q4"}
"""Hornito's storage type, and the peer's of about the same size."""

PEER_RUNS = 2
CONTEXT = 8192
LABEL = "llama.cpp Vulkan"


def note(text: str) -> None:
    """A line on stderr, at once."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say how long something took."""
    began = time.perf_counter()
    yield
    note(f"{what}: {time.perf_counter() - began:.2f} s")


def models(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """The package and the peer's file, made when they are not there."""
    shape, weights, out = arguments.shape, arguments.weights, arguments.out
    package = out / f"{shape}-{weights}.vxm"
    gguf = arguments.gguf or out / f"{shape}-{TYPES[weights]}.gguf"
    if arguments.gguf and not gguf.exists():
        raise UsageError(f"--gguf {gguf}: no such file")
    if not package.exists():
        with told(f"made {package}"):
            write_random_model(shape, package, weights=weights, context=CONTEXT)
    if arguments.peer and not gguf.exists():
        with told(f"made {gguf}"):  # in a process of its own, which gives its memory back
            command = [HERE / "peer" / "random_gguf.py", gguf, TYPES[weights], shape]
            subprocess.run([sys.executable, *map(str, command)], check=True)
    return package, gguf


@contextmanager
def serving(
    arguments: argparse.Namespace, gguf: Path, context: int, log: Path
) -> Iterator[Server | None]:
    """The peer's server while it starts and later, when there is a peer."""
    if not arguments.peer:
        yield None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    try:
        server = Server(arguments.peer, gguf, port, log, context=context)
    except OSError as error:
        raise HornitoError(f"llama-server does not start: {error}") from error
    try:
        yield server
    finally:
        server.stop()


def run(arguments: argparse.Namespace, more: list[str]) -> None:
    """Load both, and measure in rounds. Earlier rows stay until both are loaded."""
    folder = arguments.out / f"{arguments.shape}-{arguments.weights}"
    folder.mkdir(parents=True, exist_ok=True)
    if 0 in arguments.p:
        raise UsageError("-p: a prompt has at least 1 token")
    cases = []
    if arguments.peer:
        try:
            cases = cases_of(arguments.p, arguments.n, arguments.d)
        except ValueError as error:
            raise UsageError(f"-p and -d with --peer: {error}") from error
        program = arguments.peer / "llama-server"
        if not os.access(program, os.X_OK) or not program.is_file():
            raise UsageError(
                f"--peer {arguments.peer}: no program llama-server there; "
                "benchmarks/peer/fetch_llamacpp.sh packs such a folder"
            )
    package, gguf = models(arguments)
    options = loading(package, more)
    most = max(*arguments.p, *(max(1, depth) + arguments.n for depth in arguments.d))
    if most > options.context:
        raise UsageError(f"the longest row needs {most} positions; --context {options.context}")
    with serving(arguments, gguf, options.context, folder / "peer.log") as server:
        if server is not None and options.tune:  # kernels are timed: nobody else may load
            wait_for(server)
        began = time.perf_counter()
        with load_model(options, NullProgress()) as llm:
            facts: dict[str, Any] = {"load_seconds": time.perf_counter() - began}
            note(f"loaded {package}: {facts['load_seconds']:.2f} s; {llm.device_line}")
            if not arguments.no_prove:
                facts |= proved(llm)
            if server is not None:
                with told("waited for the peer"):
                    wait_for(server)
            forget(folder)  # only now that both can be measured
            for index in range(1, arguments.rounds + 1):
                if server is not None:
                    with told(f"round {index}, peer"):
                        rows = measure(server, cases, PEER_RUNS, warm_seconds(llm), seed=index)
                    path = folder / f"peer-{index}.json"
                    path.write_text(as_json(LABEL, rows), encoding="utf-8")
                with told(f"round {index}, Hornito"):
                    report = ours(arguments, llm, package.name, facts)
                path = folder / f"hornito-{index}.json"
                path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                summaries.write(folder)


def make(arguments: argparse.Namespace, more: list[str]) -> None:
    """Only make what is missing, and prove the kernels, so that measuring begins at once."""
    package, _ = models(arguments)
    with load_model(loading(package, more), NullProgress()) as llm:
        proved(llm)


def loading(package: Path, more: list[str]) -> argparse.Namespace:
    """The options with which the package is loaded."""
    parser = Parser(prog="beside_peer.py", description="")
    add_model(parser)
    return parser.parse_args([str(package), "--context", str(CONTEXT), *more])


def wait_for(server: Server) -> None:
    """Until the peer is ready.

    Raises:
        HornitoError: it ended, or takes too long.
    """
    try:
        server.wait_until_ready()
    except RuntimeError as error:
        raise HornitoError(str(error)) from error


def forget(folder: Path) -> None:
    """Delete the rows of an earlier run."""
    for pattern in ("peer-*.json", "hornito-*.json"):
        for old in folder.glob(pattern):
            old.unlink()


def proved(llm: LLM) -> dict[str, Any]:
    """Test every kernel that has no verdict yet; says what is known and how long it took."""
    began = time.perf_counter()
    line = llm.prove()
    seconds = time.perf_counter() - began
    note(f"proved in {seconds:.2f} s: {line}")
    return {"proof": line, "proof_seconds": seconds}


def ours(
    arguments: argparse.Namespace, llm: LLM, model: str, facts: dict[str, Any]
) -> dict[str, Any]:
    """One round of ours, as `hornito bench -o json` prints it, and what is known of its kernels."""
    tests = [*tests_of(arguments.p, [], [0]), *tests_of([], [arguments.n], arguments.d)]
    report = bench(
        llm,
        model=model,
        load_seconds=facts["load_seconds"],
        tests=tests,
        runs=arguments.r,
        progress=NullProgress(),
    )
    return report.to_dict() | facts


def show(arguments: argparse.Namespace) -> None:
    """Print the table, and draw the picture where that is possible."""
    folder = arguments.out / f"{arguments.shape}-{arguments.weights}"
    found = summaries.write(folder)
    print(summaries.markdown(found))
    path = arguments.plot or (folder / "speed.png" if arguments.draw else None)
    if path is None:
        return
    try:
        check_matplotlib()
    except UsageError as error:
        note(f"{path} is not drawn: {error}; --draw makes it later, from {folder}")
        return
    draw(path, summaries.title(found), *summaries.curves(found))
    note(f"drew {path}")


def main() -> int:
    """Make the models, measure in rounds, show the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("weights", choices=sorted(TYPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--peer", type=Path, help="folder with llama-server and its libraries")
    parser.add_argument("--gguf", type=Path, help="the peer's model; made in OUT when not given")
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("-p", type=whole_numbers, default=[32, 512, 2048], help="prompt lengths")
    parser.add_argument("-n", type=positive_int, default=64, help="tokens to generate (64)")
    parser.add_argument("-d", type=whole_numbers, default=[32, 4096], help="context before them")
    parser.add_argument("-r", type=positive_int, default=3, help="runs of each row of ours (3)")
    parser.add_argument("--no-prove", action="store_true", help="use the kernels that are trusted")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw both curves")
    parser.add_argument("--draw", action="store_true", help="measure nothing; see above")
    parser.add_argument("--make", action="store_true", help="measure nothing; see above")
    arguments, more = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends as well
    try:
        if arguments.make:
            make(arguments, more)
            return 0
        if not arguments.draw:
            run(arguments, more)
        elif more:
            raise UsageError(f"--draw loads no model: {' '.join(more)}")
        show(arguments)
    except HornitoError as error:
        note(f"beside_peer.py: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
