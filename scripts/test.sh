#!/usr/bin/env bash
# Everything that must hold: format, lint, types, kernels, tests. Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

ensure_vulkan test
ensure_browser
install_project dev

say "ruff and mypy"
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy

say "Kernels"
.venv/bin/python tools/build_kernels.py

HORNITO_TEST_SMOLLM2=${HORNITO_TEST_SMOLLM2:-$(
  fetch_smollm2 "${HORNITO_TEST_MODELS:-$HOME/.cache/hornito/test-models}"
)}
export HORNITO_TEST_SMOLLM2
# A machine without a device must not pass by skipping.
export HORNITO_REQUIRE_DEVICE=1

say "Tests"
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
