#!/usr/bin/env bash
# Sets up, then checks everything; arguments go to pytest:
#
#   bash scripts/test.sh [pytest arguments]
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

set_up dev
if [ $# -eq 0 ]; then
    printf 'test: format, lint, types and all tests take %s; some of them: bash scripts/test.sh tests/core\n' \
        "$(cat "$root/.venv/.duration" 2>/dev/null || printf 'about ten minutes, more on a busy machine')"
fi
PYTHON=$python exec bash "$root/scripts/check" "$@"
