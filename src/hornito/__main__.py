"""`python -m hornito` is the `hornito` command."""

from __future__ import annotations

import sys

from hornito.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
