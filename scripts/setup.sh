# Sourced by demo.sh and test.sh: makes .venv and installs the runner into it, once.
#
#   set_up        what runs need
#   set_up dev    also what the checks need
#
# Afterwards $root is the repository and $python the interpreter in .venv.
# $PYTHON, if set, is the interpreter that .venv is made from. pip's own settings hold (PIP_INDEX_URL,
# PIP_EXTRA_INDEX_URL, …, pip.conf): they decide where packages come from, so also which torch.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 1
python=$root/.venv/bin/python

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 2
}

# Its version (3.12), if this interpreter starts and is one that we support.
# Finding it on the PATH is not enough: version managers leave launchers for versions that are off.
supported() {
    "$1" -c 'import sys; v = sys.version_info[:2]
print(*v, sep="."); sys.exit(not (3, 11) <= v < (3, 14))' 2>/dev/null
}

find_python() {
    local candidate found
    for candidate in ${PYTHON:+"$PYTHON"} python3.13 python3.12 python3.11 python3 python; do
        supported "$candidate" >/dev/null && printf '%s' "$candidate" && return
    done
    found=$(supported python3)
    fail "needs Python 3.11, 3.12 or 3.13 (hydra 1.3 cannot start on 3.14), and python3 is" \
        "${found:-not there}. Install one of them, or name it: PYTHON=/path/to/python3.12"
}

make_venv() {
    local base
    base=$(find_python) || exit 2
    printf 'setup: making .venv with %s (Python %s)\n' "$base" "$(supported "$base")"
    if "$base" -c 'import ensurepip' 2>/dev/null; then
        "$base" -m venv "$root/.venv"
    else # Debian keeps ensurepip in a package of its own; a pip outside can put one inside
        "$base" -m venv --without-pip "$root/.venv" &&
            "$base" -m pip --python "$python" install --quiet pip
    fi || {
        rm -rf "$root/.venv"
        fail "could not make .venv; on Debian and Ubuntu: apt-get install python3-venv python3-pip"
    }
}

# Before gigabytes are fetched for a GPU that is not there; nothing where pip has an index of its own.
say_torch_build() {
    [ "$(uname -s)" = Linux ] && ! [ -e /proc/driver/nvidia ] || return 0
    "$python" -c 'import torch' 2>/dev/null && return
    "$python" -m pip config list 2>/dev/null | grep -Eq 'index|find-links' && return
    printf 'setup: no NVIDIA GPU here, and pip takes the CUDA build of torch (several GB); for the\n'
    printf '       CPU build stop this, and start again with pip looking at the index of PyTorch:\n'
    printf '       export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu\n'
}

# What pip says when it is not at a terminal, as a line a stage: packages of a size that takes time,
# with their size, then how many packages are unpacked.
summarise_pip() {
    local line names
    while IFS= read -r line; do
        case $line in
        *Downloading*MB\)*) printf 'setup: downloading %s\n' "${line##*Downloading }" ;;
        *"Using cached"*MB\)*) printf 'setup: taking from the cache %s\n' "${line##*Using cached }" ;;
        "Installing collected packages: "*)
            names=${line//[^,]/}
            printf 'setup: unpacking %d packages, about a minute\n' $((${#names} + 1))
            ;;
        esac
    done
}

install_packages() {
    local status
    set -- -m pip install --disable-pip-version-check --no-compile \
        -c "$root/constraints.txt" -e "$root${1:+[$1]}"
    if [ -t 1 ]; then # where pip draws its own progress
        "$python" "$@"
        status=$?
    else
        "$python" "$@" | summarise_pip
        status=${PIPESTATUS[0]}
    fi
    # by all cores, where pip takes one; some files of packages are templates that do not compile
    [ "$status" -ne 0 ] || "$python" -m compileall -q -j 0 "$root/.venv/lib" >/dev/null 2>&1
    return "$status"
}

set_up() {
    local extra=${1:-} version stamp key
    if command -v flock >/dev/null; then # two set-ups at once would trip over each other
        exec 9>"$root/.venv.lock"
        flock 9
    fi
    [ -e "$root/.venv" ] || make_venv
    version=$(supported "$python") ||
        fail "the interpreter in $root/.venv is ${version:-broken}; remove that folder and start again"

    # A checkout that was moved, or whose requirements changed, is installed again.
    key=$(printf '%s\n' "$root" "$version" | cat - "$root/pyproject.toml" "$root/constraints.txt" | cksum)
    stamp=$root/.venv/.installed${extra:+-$extra}
    if [ "$(cat "$stamp" 2>/dev/null)" != "$key" ]; then
        printf 'setup: installing into .venv (takes a few minutes the first time)\n'
        say_torch_build
        printf 'setup: choosing versions of the packages\n'
        install_packages "$extra" ||
            fail "the installation failed; try again, if need be after removing $root/.venv"
        "$python" -c 'from importlib.metadata import version
print("setup: installed torch", version("torch"))'
        printf '%s\n' "$key" >"$root/.venv/.installed" # dev holds what runs need, too
        printf '%s\n' "$key" >"$stamp"
    fi
    exec 9>&-
}
