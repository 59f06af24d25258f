"""A runner without a model: each turn is answered with its ids plus one, ending in 2.

`stand_in.py HOW`: `well`; `die` in the middle of the second answer; `cut` a line; `noise` that is
no line of the protocol; `slow` tokens; `refuse` the second turn; `mute`: not one word; `flood`:
lines that never end to be a greeting; `endless`: one such line; `foreign`: ids that no vocabulary
has. It is of an older version: it knows no `MODEL`.
"""

from __future__ import annotations

import sys
import time


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> int:
    how = sys.argv[1]
    print("stand-in: ready", file=sys.stderr, flush=True)
    if how == "mute":
        return 7
    while how in ("flood", "endless"):
        say("\x1b[2Jwelcome" + "\n" * (how == "flood"))
    turn = -1
    for line in sys.stdin:
        if line.startswith("REWIND"):
            say("END\n")
            continue
        if line.startswith("MODEL"):
            say("ERR a turn takes whole numbers, not 'MODEL'\nEND\n")
            continue
        turn += 1
        if turn and how == "refuse":
            say("9\nERR too many   tokens\nEND\n")
            how = "well"
            continue
        ids = [int(word) for word in line.split()]
        for place, token in enumerate([*(i + 1 for i in ids if 4 < i < 500), 2]):
            if turn and place == 1 and how == "die":
                print("stand-in: out of power", file=sys.stderr, flush=True)
                return 3
            if turn and place == 1 and how == "cut":
                say("12")
                return 0
            if turn and place == 1 and how == "noise":
                say("Segmentation fault\n")
                return 139
            if how == "foreign":
                token = 99_999
            if how == "slow":
                time.sleep(0.05)
            say(f"{token}\n")
        say("END\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
