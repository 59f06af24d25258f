"""A pipe that splits lines at odd places: `odd_pipe.py COMMAND ...` runs it in between.

What goes in and what comes out is passed on in pieces of one to five bytes, each flushed, with
`\\r\\n` for `\\n` on the way out, and a greeting before the first line, as `ssh` and `adb` may do.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from typing import IO


def pass_on(source: IO[bytes], target: IO[bytes], *, returns: bool, seed: int) -> None:
    rng = random.Random(seed)
    while data := source.read1(65536):  # type: ignore[attr-defined]
        data = data.replace(b"\n", b"\r\n") if returns else data
        while data:
            size = rng.randint(1, 5)
            target.write(data[:size])
            target.flush()
            data = data[size:]
            time.sleep(0.0002)
    target.close()


def main() -> int:
    print("Welcome to the board 7", flush=True)
    with subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        arguments = (sys.stdin.buffer, process.stdin)
        forward = threading.Thread(
            target=pass_on, args=arguments, kwargs={"returns": False, "seed": 1}, daemon=True
        )
        forward.start()
        pass_on(process.stdout, sys.stdout.buffer, returns=True, seed=2)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
