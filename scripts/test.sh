#!/usr/bin/env bash
# Sets up, then checks everything; arguments go to pytest:
#
#   bash scripts/test.sh [pytest arguments]
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

set_up dev
if [ $# -eq 0 ]; then
    printf 'test: all tests take about ten minutes on four cores; to run some: bash scripts/test.sh tests/core\n'
fi
PYTHON=$python exec bash "$root/scripts/check" "$@"
