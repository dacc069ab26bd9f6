#!/usr/bin/env bash
# Does the work of activate.sh: creates the virtual environment, the demo
# dataset and the cache of GPT-2's vocabulary if missing or out of date.
#
#     environment/setup.sh VENV [yes, to build on the site's PyTorch]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$1
system=$([ "$2" != yes ] || echo --system-site-packages)

# This script keeps two files in an environment: what it is based on (which is
# "unfinished" until it is complete), and what is installed in it.
base=$venv/workshop-base
installed=$venv/workshop-requirements

say() { echo "activate.sh: $*"; }

fail() {
    say "$*" >&2
    exit 1
}

holds() {
    [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]
}

# An environment that was moved, or that has another Python, must be recreated.
current_base() {
    "$venv/bin/python" -c 'import sys; print(*sys.version_info[:2])' \
        2>/dev/null && echo "$venv $system"
}

requirements() {
    cat requirements.txt constraints.txt {tests,fineweb}/requirements.txt |
        cksum
}

up_to_date() {
    holds "$base" "$(current_base)" && holds "$installed" "$(requirements)"
}

find_python() {
    local name
    for name in python3 python3.{13,12,11,10} python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
            2>/dev/null; then
            echo "$name"
            return
        fi
    done
    fail "there is no Python 3.10 or newer here: install one, or load a" \
        "module for it in site.sh (see site.example.sh)"
}

# The lock is held until this process and all that it started have ended,
# however they end.
lock() {
    exec 9>>"$venv.lock"
    "$1" -c '
import fcntl
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("activate.sh: waiting for another shell that sets it up", flush=True)
    fcntl.flock(9, fcntl.LOCK_EX)' 2>/dev/null ||
        say "this file system has no locks: source activate.sh in one shell" \
            "at a time"
}

make_environment() {
    local python
    python=$(find_python)
    say "setting up $venv"
    lock "$python"
    if up_to_date; then # the shell that had the lock has done it
        return
    fi
    if ! holds "$base" "$(current_base)"; then
        mkdir -p "$venv"
        echo unfinished >"$base"
        find "$venv/" -mindepth 1 ! -name workshop-base -delete
        # shellcheck disable=SC2086 # if empty, it must not become a word
        "$python" -m venv --prompt workshop $system "$venv" ||
            fail "$(command -v "$python") cannot make a virtual environment" \
                "(on Debian and Ubuntu: apt install python3-venv)"
        current_base >"$base"
    fi
    install_requirements
}

install_requirements() {
    local pins=constraints.txt log=$venv/install.log status=0
    if [ -n "$system" ]; then
        pins=$venv/site-torch.txt
        "$venv/bin/python" -c 'if True:
            from importlib.metadata import version
            print("torch==" + version("torch"))' >"$pins" 2>/dev/null ||
            fail "the site's Python has no PyTorch: load its module in site.sh"
    fi
    say "installing requirements.txt (takes minutes the first time)"
    echo unfinished >"$base"
    "$venv/bin/python" -u -m pip install --no-input -c "$pins" -e . \
        -r requirements.txt -r tests/requirements.txt 2>&1 |
        tee "$log" | sed -n '/^ *Downloading/p' || status=$?
    ((status > 1)) || current_base >"$base" # 1: pip has undone everything
    if ((status)); then
        fail "pip failed ($(grep -m 1 ERROR "$log" || tail -n 1 "$log")):" \
            "check the network, or name a mirror in site.sh; full log: $log"
    fi
    requirements >"$installed"
}

# Without a network it says nothing: few datasets need this vocabulary.
fetch_vocabulary() {
    local files
    files=$(find "$TIKTOKEN_CACHE_DIR" -type f ! -name '*.tmp' | wc -l) || true
    if ((files < 2)); then
        "$venv/bin/python" -c 'if True:
            import signal
            signal.alarm(20)  # seconds; some firewalls never answer
            from backstage.vocabulary import gpt2
            gpt2(download=True)' || true
    fi
}

# Git sees a notebook without its outputs and without what JupyterLab notes of
# the kernel: a lesson that was only run and saved is no difference to it.
filter_notebooks() {
    local filter="'$venv/bin/nbstripout' --keep-id --extra-keys \
'metadata.language_info.codemirror_mode metadata.language_info.file_extension \
metadata.language_info.mimetype metadata.language_info.nbconvert_exporter \
metadata.language_info.pygments_lexer metadata.language_info.version'"
    if [ -e .git ] && [ -x "$venv/bin/nbstripout" ] &&
        [ "$(git config filter.nbstripout.clean)" != "$filter" ]; then
        git config filter.nbstripout.clean "$filter"
    fi
}

# Whether this script may change the environment: it is the clone's own, or a
# shared one that this user owns and that is empty or was made by this script.
ours() {
    [ "$venv" = "$PWD/.venv" ] || {
        [ -O "$venv" ] && { [ -f "$base" ] || [ -z "$(ls -A "$venv")" ]; }
    }
}

not_in_a_job() {
    [ "${WORKSHOP_INSTALL-}" != no ] ||
        fail "$1, and a job installs nothing: run \`source" \
            "$PWD/activate.sh\` in a terminal first"
}

new=
if ours; then
    if ! up_to_date; then
        not_in_a_job "the environment $venv is not up to date"
        make_environment
        new=yes
    fi
elif holds "$base" unfinished || ! "$venv/bin/python" -c '' 2>/dev/null; then
    fail "the shared environment $venv is not complete: its owner has to" \
        "create an empty folder there and source activate.sh"
elif [ -f "$installed" ] && ! holds "$installed" "$(requirements)"; then
    say "the shared environment $venv was made for other requirements than" \
        "this clone's: if something is missing, ask its owner to update it"
fi
if [ ! -e fineweb/demo/manifest.json ]; then
    not_in_a_job "there is no demo dataset"
    "$venv/bin/python" fineweb/demo.py || fail "there is no demo dataset"
    new=yes
fi
[ "${WORKSHOP_INSTALL-}" != no ] || exit 0
filter_notebooks || true # a clone without git is one without this, too
# A shell that is already set up does not wait for this.
fetch_vocabulary >/dev/null 2>&1 &
[ -z "$new" ] || wait
