# Sourced by the scripts beside it: makes .venv, once, and again when what it is made
# from has changed. Usage: environment EXTRAS, such as `environment train,dev`.

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root" || exit 1

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

# Print the first Python that is new enough.
find_python() {
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
            >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or newer as python3: install it, or name one with PYTHON="
}

environment() {
    extras=$1
    python=.venv/bin/python
    # The place counts: an editable install and its scripts hold absolute paths.
    made_from=$(cat pyproject.toml lab/pyproject.toml constraints.txt scripts/environment.sh &&
        printf '%s %s\n' "$root" "$extras")
    stamp=.venv/made-from-$(printf '%s' "$extras" | tr ',' '-')
    if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$made_from" ]; then
        return
    fi
    printf 'installing spottrain[%s] into .venv (torch is large; this takes minutes the first time)\n' \
        "$extras" >&2
    if ! "$python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' \
        >/dev/null 2>&1; then
        found=$(find_python) || exit 1
        "$found" -m venv --clear .venv ||
            fail "$found cannot make a virtual environment: install its venv package"
    fi
    "$python" -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable ".[$extras]" --editable lab ||
        fail "pip could not install what constraints.txt names: see its message above"
    printf '%s\n' "$made_from" >"$stamp"
}
