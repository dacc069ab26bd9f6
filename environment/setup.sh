#!/usr/bin/env bash
# Does the work of activate.sh: creates the virtual environment, the demo
# dataset and the cache of GPT-2's vocabulary if missing or out of date.
#
#     environment/setup.sh VENV [yes, to build on the site's PyTorch]
set -euo pipefail
unset CDPATH
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
# A module's PYTHONHOME is for another Python, a GIT_DIR for another clone.
for name in $(compgen -e PYTHON) \
    $(git rev-parse --local-env-vars 2>/dev/null); do
    [ "$name" = PYTHONPATH ] || unset "$name"
done
venv=$1
system=$([ "$2" != yes ] || echo --system-site-packages)

say() { echo "activate.sh: $*"; }

fail() {
    say "$*" >&2
    exit 1
}

# An environment has a marker, which build.py writes: the path it was made for,
# the clone that made it, and of what.
field() {
    sed -n "s/^$1=//p" "$venv/workshop-base" 2>/dev/null || true
}

# A folder has many spellings: take the one under which it was made, or the one
# without links and dots.
resolve() {
    local made
    while [[ $venv == ?*/ ]]; do venv=${venv%/}; done
    venv=$(
        cd -P -- "$venv" 2>/dev/null && pwd && exit
        cd -P -- "$(dirname -- "$venv")" 2>/dev/null ||
            { echo "$venv" && exit; }
        echo "$PWD/${venv##*/}"
    )
    made=$(field place)
    if [ "$made" -ef "$venv" ] && [ ! -L "$made" ]; then
        venv=$made # $venv may be a bind mount of it
    fi
    case $venv in *[:\"\`\$\\]*)
        fail "an environment does not work in $venv: its path must not have" \
            "any of : \" \` \$ \\" ;;
    esac
}

# Python's version and $system, on which all packages depend.
base() {
    # shellcheck disable=SC2086 # if empty, it must not become a word
    "$1" -c 'import sys
print(*sys.version_info[:2], *sys.argv[1:])' $system 2>/dev/null
}

requirements() {
    { cat {.,tests,fineweb}/requirements.txt environment/constraints.txt
    sed '/^\[tool.pytest/,$d' pyproject.toml; } | cksum # our own packages
}

# Git in this clone alone: not in a repository around it, nor in one that
# git's variables name, as a hook or somebody's dotfiles set them.
course_git() {
    (
        # shellcheck disable=SC2046 # several names
        unset $(git rev-parse --local-env-vars 2>/dev/null)
        [ "$(git rev-parse --show-toplevel 2>/dev/null)" -ef . ] && git "$@"
    )
}

# The time of this clone's commit.
age() {
    course_git log -1 --format=%ct 2>/dev/null || echo 0
}

# An environment that was moved, or that has another Python, must be recreated.
good_base() {
    [ "$(field place)" -ef "$venv" ] &&
        [ "$(field base)" = "$(base "$venv/bin/python")" ]
}

good_requirements() {
    [ "$(field requirements)" = "$(requirements)" ]
}

usable() {
    local place
    place=$(field place)
    { [ -z "$place" ] || [ "$place" -ef "$venv" ]; } &&
        ! grep -qsx unfinished "$venv/workshop-base" &&
        "$venv/bin/python" -c '' 2>/dev/null
}

# A folder of this user's, in which there is at most what build.py has left.
vacant() {
    [ -d "$venv" ] && [ -r "$venv" ] && [ -O "$venv" ] && [ -z "$(
        find "$venv" -mindepth 1 -maxdepth 1 ! -name '.workshop-*')" ]
}

# build.py was killed between its two renames: the old one has to come back.
lost() {
    [ ! -e "$venv" ] && [ ! -L "$venv" ] && [ -O "$venv.workshop-old" ] &&
        [ -f "$venv.workshop-old/workshop-base" ]
}

# Whether it is in the clone's own place, and no other clone has made it there.
own() {
    local clone
    clone=$(field clone)
    if [ -e "$clone" ] && [ "$(field place)" -ef "$venv" ]; then
        [ "$clone" -ef . ] && [ "$venv" -ef .venv ]
    else # there is none yet, or it has come with the clone from elsewhere
        [ "$venv" = "$PWD/.venv" ]
    fi
}

# Whether this script has to change the environment, and may: the clone's own
# at any time, a shared one if it is empty, or if its owner says so.
must_change() {
    local marked=
    [ ! -f "$venv/workshop-base" ] || marked=yes
    if vacant || lost; then
        return 0
    elif good_base && good_requirements; then
        return 1
    elif own; then
        if [ ! "$marked" ] && { [ -e "$venv" ] || [ -L "$venv" ]; }; then
            fail "$venv stays as it is, since activate.sh has not made it:" \
                "rename it"
        fi
        return 0
    elif [ "${WORKSHOP_INSTALL-}" = yes ]; then
        if [ ! "$marked" ] || [ ! -O "$venv" ]; then
            fail "$venv stays as it is, since you do not own it, or" \
                "activate.sh has not made it: name an empty folder in site.sh"
        elif [ "$(age)" -lt "0$(field age)" ]; then
            fail "$venv stays as it is, since the newer clone" \
                "$(field clone) has made it: update this one (git pull)"
        fi
        return 0
    elif ! usable; then
        fail "the shared environment $venv is not complete, was moved, or" \
            "needs a Python that you may not run: its owner has to create" \
            "an empty folder there and source activate.sh with a Python for" \
            "all, or to run \`WORKSHOP_INSTALL=yes source activate.sh\`"
    elif [ "$marked" ] && ! good_requirements; then
        say "the shared environment $venv was made for other requirements" \
            "than this clone's: if something is missing, ask its owner to" \
            "run \`WORKSHOP_INSTALL=yes source activate.sh\`"
    fi
    return 1
}

not_in_a_job() {
    [ "${WORKSHOP_INSTALL-}" != no ] ||
        fail "$1, and a job installs nothing: run \`source" \
            "$(printf %q "$PWD/activate.sh")\` in a terminal first"
}

# For a newer one, some packages of constraints.txt have no file.
find_python() {
    for python in python3 python3.{14,13,12,11,10} python; do
        if "$python" -c 'import sys
sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null; then
            return
        fi
    done
    fail "there is no Python 3.10 to 3.14 here: install one, or load a" \
        "module for it in site.sh (see site.example.sh)"
}

# The lock is held until this process and all that it started have ended,
# however they end.
lock() {
    local file=$venv.lock
    [ -w "${venv%/*}" ] || file=$venv/.workshop-lock
    { exec 9>>"$file"; } 2>/dev/null ||
        fail "$venv cannot be changed: ${file%/*} is not writable"
    "$python" -c 'if True:
        import fcntl, signal, sys

        def tell(*_):
            with open(sys.argv[1], errors="replace") as file:
                who = file.readline().strip() or "another shell"
            print("activate.sh: waiting for", sys.argv[1] + ", which", who,
                  "has locked", flush=True)

        signal.signal(signal.SIGALRM, tell)
        signal.alarm(5)
        fcntl.flock(9, fcntl.LOCK_EX)' "$file" 2>/dev/null ||
        say "this file system has no locks: source activate.sh in one shell" \
            "at a time"
    # a file of this name may be somebody's
    if [ ! -s "$file" ] || grep -q "^process .* of activate.sh" "$file"; then
        echo "process $$ of activate.sh (${USER-$UID} on $HOSTNAME, since" \
            "$(date +%T))" >"$file"
    fi
}

make_environment() {
    local keep='' made_by
    find_python # $python
    say "setting up $venv"
    lock
    resolve
    ! lost || mv "$venv.workshop-old" "$venv"
    if must_change; then # else the shell that had the lock has done it
        made_by=$python
        if good_base; then
            keep=yes made_by=$venv/bin/python
        fi
        # what its maker has in ~/.local is not there for everybody
        PYTHONNOUSERSITE=1 "$python" environment/build.py "$venv" "$keep" \
            "$system" "base=$(base "$made_by")" \
            "requirements=$(requirements)" "age=$(age)"
        [ "$1" -ef "$venv" ] ||
            fail "$1 was a mount of the old $venv: mount it again"
    fi
}

# Without a network it says nothing: few datasets need this vocabulary.
fetch_vocabulary() {
    local files
    files=$(find "$TIKTOKEN_CACHE_DIR" -type f ! -name '*.tmp' | wc -l) || true
    if ((files < 2)); then
        "$venv/bin/python" -c 'if True:
            import signal
            signal.alarm(20)  # seconds; some firewalls never answer
            import tiktoken
            tiktoken.get_encoding("gpt2")' || true
    fi
}

# Git sees a notebook without its outputs and without what JupyterLab notes of
# the kernel: a lesson that was only run and saved is no difference to it.
filter_notebooks() {
    local filter
    filter="$(printf %q "$venv/bin/nbstripout") --keep-id --extra-keys \
'metadata.language_info.codemirror_mode metadata.language_info.file_extension \
metadata.language_info.mimetype metadata.language_info.nbconvert_exporter \
metadata.language_info.pygments_lexer metadata.language_info.version'"
    if [ -x "$venv/bin/nbstripout" ] &&
        course_git rev-parse 2>/dev/null && # not another user's clone
        [ "$(course_git config filter.nbstripout.clean)" != "$filter" ]; then
        # Git does not trust the times in the index of a new clone, and would
        # filter each notebook for the first status: look without the filter
        course_git -c filter.nbstripout.clean=cat update-index -q --refresh ||
            true
        course_git config filter.nbstripout.clean "$filter"
    fi
}

new=
resolve
if must_change; then
    not_in_a_job "the environment $venv is not up to date"
    make_environment "$1"
    new=yes
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
