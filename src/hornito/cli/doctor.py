"""`hornito doctor`: is everything there, does the device compute right, and what to do next."""

from __future__ import annotations

import argparse

from hornito.cli.options import add_json
from hornito.cli.output import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; 0 all is well, 1 a device computes wrong, 4 no device."""
    from hornito.diag.doctor import examine, judge, to_dict, to_text

    facts = examine()
    verdict = judge(facts)
    if arguments.json:
        print_json(to_dict(facts, verdict))
    else:
        print(to_text(facts, verdict))
    return verdict.exit_code
