#!/usr/bin/env bash
# Sets up, then checks everything; arguments go to pytest:
#
#   bash scripts/test.sh [pytest arguments]
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

set_up dev
PYTHON=$python exec bash "$root/scripts/check" "$@"
