#!/usr/bin/env bash
# Sets up, trains on real data, and says how to look at it:
#
#   bash scripts/demo.sh [overrides]     e.g. bash scripts/demo.sh data=cancer model=mlp
#
# Works from any folder; results, and paths in overrides, are relative to the repository.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

here=$PWD
set_up
cd "$root" || exit 1
touch .venv/.started
"$python" -m runner "$@"
status=$?
# Only after a run, whose table ends with the command for TensorBoard.
if [ -n "$(find outputs -name summary.json -newer .venv/.started -print -quit 2>/dev/null)" ]; then
    if [ "$here" != "$root" ]; then prefix=$root/; fi
    printf '\nTo use python -m runner in this shell, run\n\n    . %s.venv/bin/activate\n\n' \
        "${prefix:-}"
fi
exit "$status"
