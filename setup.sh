#!/usr/bin/env bash
# The environment, by uv; activate.sh calls this in a process of its own.
#
#     setup.sh make VENV SITE OPTIONS PART...
#         makes it, with these parts; SITE=yes: on the site's own PyTorch;
#         OPTIONS: the shell's, as in $-
#     setup.sh pack venv.tar.gz    packs the active one into one large file
#     setup.sh unpack venv.tar.gz  on this node's disk, once for each user
#
# Its marker says which clone made it and, once it is whole, of what and with
# which parts. All paths in it are relative. Nothing is removed that no mark of
# ours names.
set -euo pipefail
unset CDPATH PYTHONHOME TAR_OPTIONS
# shellcheck disable=SC2046 # several names
unset $(git rev-parse --local-env-vars 2>/dev/null)
marker=workshop-base demo=workshop-demo
# what can be added: a folder's requirements.txt, or in pyproject.toml
parts="tests fineweb transformers deepspeed"

say() { echo "activate.sh: $*" >&2; }
fail() { say "$*" && exit 1; }
field() { sed -n "s/^$1=//p" "$venv/$marker" 2>/dev/null || true; }
reason() { # the line that says most
    grep -vE '^ *(hint|\[|$)|^tar: Exit' | tail -n 1 |
        sed -E 's/^ *(error|cause|Caused by): //'
}
lock() { # a file, until this process and all that it started have ended
    { exec 9>>"$1"; } 2>/dev/null ||
        fail "${1%/*} is not writable; fix: name another folder in site.sh"
    ! command -v flock >/dev/null || flock -n 9 2>/dev/null || { # no macOS
        # after a second the other has written who it is
        say "waiting for $(sleep 1; grep . "$1" || echo another process)," \
            "which holds the lock $1"
        flock 9 2>/dev/null || say "this file system does not support" \
            "locks; fix: use one shell at a time"
    }
    echo "process $$ of ${USER-$UID} on $HOSTNAME" >"$1"
}

# --- make

requirements() {
    cat {.,tests,fineweb}/requirements.txt constraints.txt pyproject.toml |
        cksum # the last one says which packages are ours
}
base() { # Python's version, and whether it sees the site's packages
    "$1" -c 'import sys; print(*sys.version_info[:2], *sys.argv[1:])' \
        ${system:+"$system"} 2>/dev/null
}
age() { # of this clone's commit, not of a repository around it
    [ ! "$(git rev-parse --show-toplevel 2>/dev/null)" -ef . ] ||
        git log -1 --no-show-signature --format=%ct 2>/dev/null || true
}

# Without words of its own, activate.sh sees those of the script or function
# that sources it, such as a job's flags: these are none of ours.
choose_parts() { # $chosen, of these words
    local words word
    chosen=''
    [ "${WORKSHOP_INSTALL-}" != no ] || return 0
    read -r -a words <<<"$*"
    for word in ${words[@]+"${words[@]}"}; do
        case " $parts " in
        *" $word "*) chosen="$chosen${chosen:+ }$word" ;;
        *)
            chosen=''
            [[ $options != *i* ]] ||
                say "no such part: $word; fix: choose from ${parts// /, }"
            return 0
            ;;
        esac
    done
}

meets() { # whether what these parts require is installed
    local isolated=-I # no package of a module or of the user's home counts
    [ ! "$system" ] || isolated=-s
    "$venv/bin/python" "$isolated" workshop/jobs/requirements.py \
        ${own:+--own} unmet "$@" >/dev/null 2>&1
}

is_current() { # by its marks, or by the packages that are installed
    local part missing=''
    [ "$whole" ] || return 1
    [ "$(field base)" = "$(base "$venv/bin/python")" ] || return 1
    if [ "$(field requirements)" = "$(requirements)" ]; then
        for part in $chosen; do
            [[ " $(field parts) " == *" $part "* ]] ||
                missing="$missing $part"
        done
    else
        missing="course $chosen"
    fi
    [ "$missing" ] || return 0
    [ "${WORKSHOP_INSTALL-}" != yes ] || return 1
    # shellcheck disable=SC2086 # several words
    meets $missing
}

must_change() { # whether the environment has to be changed, and may be
    local clone marked='' own='' mine='' whole=''
    local again="WORKSHOP_INSTALL=yes source activate.sh${chosen:+ $chosen}"
    clone=$(field clone)
    [ ! -f "$venv/$marker" ] || marked=yes
    [ -z "$(field requirements)" ] || whole=yes
    if [ "$venv" -ef .venv ] || [ "$venv" = "$PWD/.venv" ]; then own=yes; fi
    if [ "$clone" -ef . ] || { [ "$own" ] && [ "$marked" ] &&
        [ ! -e "$clone" ]; }; then mine=yes; fi # it has moved with the clone
    if is_current; then
        return 1
    elif { [ "$own" ] && [ ! -e "$venv" ] && [ ! -L .venv ]; } ||
        { [ "$mine" ] && { [ "$own" ] || [ ! "$whole" ]; }; } ||
        { [ -O "$venv" ] && [ -z "$(find "$venv/" -mindepth 1 \
            ! -name .workshop-lock 2>&1)" ]; }; then
        return 0 # new, this clone's, or an empty folder of this user's
    elif [ "${WORKSHOP_INSTALL-}" = yes ] && [ "$marked" ] && [ -O "$venv" ]
    then
        [ "0$(age)" -ge "0$(field age)" ] || fail "$venv is unchanged: the" \
            "newer clone $clone made it; fix: update this one (git pull)"
        return 0
    elif [ "$marked" != "$whole" ] || [ "${WORKSHOP_INSTALL-}" = yes ] ||
        ! "$venv/bin/python" -c '' 2>/dev/null ||
        { [ "$own" ] && [ ! "$marked" ]; }; then
        fail "$venv is unchanged: it is incomplete, activate.sh did not" \
            "make it, or you may not change it or run its Python; fix:" \
            "rename it, name an empty folder in site.sh, or ask its owner" \
            "to run, with a Python that all may use, \`$again\`"
    elif [ "$marked" ]; then
        echo "activate.sh: the shared environment $venv was made for other" \
            "requirements than this clone's; fix: if something is missing," \
            "ask its owner to run \`$again\`"
    elif [ "$chosen" ]; then
        echo "activate.sh: $venv is unchanged, because activate.sh did not" \
            "make it; fix: install there yourself what these parts need:" \
            "$chosen"
    fi
    return 1
}

find_python() { # for a newer one, some of constraints.txt have no file
    for python in python3 python3.{14,13,12,11,10} python; do
        ! "$python" -c 'import sys
sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null || return 0
    done
    fail "no Python 3.10 to 3.14 was found; fix: install one, or load a" \
        "module for it in site.sh (see site.example.sh)"
}

# pip's settings of where packages come from, as commands for pip and uv: any
# other, such as prefix, user or dry-run, would put them elsewhere
settings() {
    env -u PIP_PYTHON "$venv/bin/python" -m pip config list -vvv |
        "$venv/bin/python" -c '
import ast, os, re, shlex, sys
listed, found = sys.stdin.read(), {}
for section in "global", "install", ":env:":  # the later ones win
    found |= re.findall(
        rf"(?m)^{section}\.(?:default-)?(\S+)=(.{{3,}})", listed)
for name, *others in (words.split("=") for words in sys.argv[1:]):
    values = [value for value in ast.literal_eval(found.get(name, repr("")
              )).split() if value[0] != "/" or os.path.exists(value)]
    for variable in ["PIP_" + name.upper().replace("-", "_"), *others]:
        if {*values} - {"0", "no", "false"}:
            print(f"export {variable}=" + shlex.quote(
                (" ", ",")[variable == "UV_FIND_LINKS"].join(values)))' \
        index-url=UV_DEFAULT_INDEX extra-index-url=UV_INDEX no-index \
        find-links=UV_FIND_LINKS constraint=UV_CONSTRAINT only-binary \
        no-binary proxy=HTTP_PROXY=HTTPS_PROXY trusted-host=UV_INSECURE_HOST \
        cert=SSL_CERT_FILE client-cert=SSL_CLIENT_CERT \
        timeout=UV_HTTP_TIMEOUT retries=UV_HTTP_RETRIES keyring-provider
}

# The same of uv's settings, where pip has none: of the user's and the system's
# file, or the one that UV_CONFIG_FILE names. Those of the folders above this
# clone belong to somebody else's project.
# shellcheck disable=SC2016 # Python's
uv_settings() {
    "$venv/bin/python" -c '
import os, shlex
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
system = os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg"
folders = [config, *system.split(":"), "/etc"]
files = [os.path.join(folder, "uv/uv.toml") for folder in folders]
if os.environ.get("UV_NO_CONFIG", "0") not in ("", "0", "false"):
    files = []
if os.environ.get("UV_CONFIG_FILE"):
    files = [os.environ["UV_CONFIG_FILE"]]
found = {}
for name in files:  # the first one that says something wins
    try:
        with open(name, "rb") as file:
            top = tomllib.load(file)
    except (OSError, ValueError):
        continue
    merged = {**top.get("pip", {}), **top}
    extra = list(merged.get("extra-index-url", []))
    for index in merged.get("index", []):
        if index.get("default"):
            found.setdefault("UV_DEFAULT_INDEX", index["url"])
        elif not index.get("explicit"):
            extra.append(index["url"])
    values = {
        "UV_DEFAULT_INDEX": merged.get("index-url", ""),
        "UV_INDEX": " ".join(extra),
        "UV_FIND_LINKS": ",".join(merged.get("find-links", [])),
        "UV_INSECURE_HOST": " ".join(merged.get("allow-insecure-host", [])),
        "UV_KEYRING_PROVIDER": merged.get("keyring-provider", ""),
        "UV_NATIVE_TLS": str(merged.get("native-tls", "")).lower(),
        "PIP_NO_INDEX": "1" if merged.get("no-index") else ""}
    for variable, value in values.items():
        if value:
            found.setdefault(variable, value)
older = {"UV_DEFAULT_INDEX": "UV_INDEX_URL", "UV_INDEX": "UV_EXTRA_INDEX_URL"}
for variable, value in found.items():
    if not {variable, older.get(variable)} & {*os.environ}:
        print(f"export {variable}={shlex.quote(value)}")'
}

# Of uv's variables, those of where packages come from stay: others would put
# them elsewhere, leave some out, or link them from a cache that is removed.
keep_uv_variables() {
    local name
    for name in "${!UV_@}"; do
        case $name in
        UV_*INDEX* | UV_FIND_LINKS | UV_CONSTRAINT | UV_TORCH_BACKEND) ;;
        UV_INSECURE_HOST | UV_NATIVE_TLS | UV_SYSTEM_CERTS | UV_OFFLINE) ;;
        UV_HTTP_* | UV_REQUEST_TIMEOUT | UV_CONCURRENT_*) ;;
        UV_KEYRING_PROVIDER | UV_CREDENTIALS_DIR | UV_CACHE_DIR) ;;
        *) unset "$name" ;;
        esac
    done
    export UV_NO_CONFIG=1 UV_NO_SOURCES=1
}

run() { # show an installer's progress or, in one line, why it failed
    local log why advice='check the network, or name a mirror in site.sh'
    log=$(mktemp "${TMPDIR:-/tmp}/workshop-XXXXXX")
    if COLUMNS=9999 "$@" 2>&1 | tee "$log" | {
        grep --line-buffered -E 'Downloading|^Prepared|^Installed|Retrying' ||
            true # it fails where it finds nothing
    }; then
        rm "$log"
        return
    fi
    why=$(reason <"$log")
    case $why in
    *ertificate*) advice='name yours in site.sh (export PIP_CERT=FILE)' ;;
    *"o space"* | *quota*) advice='free some disk space' ;;
    esac
    if [ ! "$reinstall" ] &&
        ! grep -qE '^Prepared|Failed to .*install' "$log"; then
        rm -rf "${venv:?}/$cache"
        mv "$venv/$marker~" "$venv/$marker" # it is as it was
    fi
    fail "cannot set up $venv ($why); fix: $advice; the whole log: $log"
}

list_requirements() { # $wanted: those of the course and of the parts, for uv
    local part listed line
    wanted=(-r requirements.txt)
    for part in $installed; do
        if [ -f "$part/requirements.txt" ]; then
            wanted+=(-r "$part/requirements.txt")
            continue
        fi
        listed=$("$venv/bin/python" -I workshop/jobs/requirements.py list \
            "$part" 2>&1) || fail "pyproject.toml cannot be read: $listed"
        while read -r line; do
            wanted+=("$line")
        done <<<"$listed"
    done
}

fill() { # what another attempt has left is completed
    local cache uv made='' pins=constraints.txt wanted
    local reinstall=--reinstall # what an interruption has left in part
    local part installed
    # those of before stay up to date
    installed=$(field parts)
    for part in $chosen; do
        [[ " $installed " == *" $part "* ]] ||
            installed="$installed${installed:+ }$part"
    done
    cache=$(field cache)
    cache=${cache:-.workshop-$$-$RANDOM}
    if grep -qs relocatable "$venv/pyvenv.cfg" &&
        [ "$(field requirements)" ] &&
        [ "$(field base)" = "$(base "$venv/bin/python")" ]; then
        reinstall=''
        cp "$venv/$marker" "$venv/$marker~"
    fi
    printf '%s\n' "clone=$PWD" "cache=$cache" "parts=$installed" \
        >"$venv/$marker"
    [ ! "$reinstall" ] || made=$(rm -rf "${venv:?}"/bin/python{,3,3.*} \
        "$venv"/lib/python*/site-packages/pip{,-*} && # else in part
        "$python" -m venv ${system:+"$system"} "$venv" 2>&1) ||
        fail "$python cannot make a virtual environment" \
            "(${made##*$'\n'}); fix: on Debian and Ubuntu, apt install" \
            "python3-venv"
    made=$(settings 2>/dev/null) ||
        fail "pip cannot read its settings; fix: see pip config list"
    unset "${!PIP_@}"
    eval "$made"
    made=$(uv_settings) || fail "uv's settings cannot be read; fix: see uv.toml"
    keep_uv_variables
    eval "$made"
    # on the same disk, it is linked from there; no home's quota is filled
    export UV_CACHE_DIR=${UV_CACHE_DIR:-$venv/$cache} PIP_CONFIG_FILE=/dev/null
    export UV_INDEX_STRATEGY=unsafe-best-match PYTHONNOUSERSITE=1 # as pip
    echo "activate.sh: installing requirements.txt" \
        "${installed:+and those of $installed }(minutes, the first time)"
    uv=$(type -P uv) && "$uv" --version >/dev/null 2>&1 || uv=$venv/bin/uv
    "$uv" --version >/dev/null 2>&1 || run "$venv/bin/python" -m pip install \
        -c "$pins" uv
    [ ! "$reinstall" ] || run "$uv" venv -q --relocatable --allow-existing \
        --python "$(type -P "$python")" --prompt workshop \
        ${system:+"$system"} "$venv"
    list_requirements
    if [ "$system" ]; then # uv does not see what the site has: pip chooses
        pins=$venv/$cache/torch.txt
        "$venv/bin/python" -c 'from importlib.metadata import version
print("torch==" + version("torch"))' >"$pins" 2>/dev/null ||
            fail "the site's Python has no PyTorch; fix: load its module in" \
                "site.sh"
        made=$venv/bin/python # the site's does not see what is here in part
        [ ! "$reinstall" ] || made=$(type -P "$python")
        run "$venv/bin/python" -m pip --python "$made" install -q --dry-run \
            -c "$pins" --report "$venv/$cache/report" "${wanted[@]}"
        made=$("$venv/bin/python" -c 'import json, sys
for package in json.load(open(sys.argv[1]))["install"]:
    print("{name}=={version}".format(**package["metadata"]))
' "$venv/$cache/report")
        read -rd '' -a wanted <<<"--no-deps $made" || true
    fi
    # pip, since the one that Python has made cannot be moved
    run "$uv" pip install --python "$venv/bin/python" -c "$pins" \
        ${PIP_NO_INDEX:+--no-index} ${reinstall:+"$reinstall"} \
        ${PIP_ONLY_BINARY:+--only-binary="$PIP_ONLY_BINARY"} \
        ${PIP_NO_BINARY:+--no-binary="$PIP_NO_BINARY"} -e . pip "${wanted[@]}"
    made=$("$venv/bin/python" -c 'import importlib.util
if importlib.util.find_spec("torch"): import torch' 2>&1) ||
        say "PyTorch is installed, but cannot be loaded here" \
            "(${made##*$'\n'}); fix: check the modules that site.sh loads:" \
            "one may be missing, or in conflict with it"
    rm -rf "${venv:?}/$cache" "$venv/$marker~"
    printf '%s\n' "clone=$PWD" "base=$(base "$venv/bin/python")" \
        "age=$(age)" "parts=$installed" "requirements=$(requirements)" \
        >"$venv/$marker"
}

# Git sees a notebook without its outputs and without what JupyterLab notes of
# the kernel: a lesson that was only run and saved is no difference to it.
filter_notebooks() {
    local file=workshop/jobs/notebook_filter.py filter
    # an older commit may have none: then git sees what is there. -IS: no
    # package and no variable of a user's can be in the way of a quick start
    filter="test ! -e $file || exec $(printf %q "$venv/bin/python") -IS $file
exec cat"
    if [ "$(git rev-parse --show-toplevel)" -ef . ] &&
        [ "$(git config filter.nbstripout.clean)" != "$filter" ]; then
        # Git does not trust the times in the index of a new clone, and would
        # filter each notebook for the first status: look without the filter
        git -c filter.nbstripout.clean=cat update-index -q --refresh || true
        git config filter.nbstripout.clean "$filter"
    fi
}

# A shared or packed environment has the demo dataset, too, which takes a minute
# to build: the clone that has made the environment puts it there.
share_demo() {
    if [ ! -e "$venv/$demo/manifest.json" ] && [ "$(field clone)" -ef . ] &&
        [ -w "$venv" ]; then
        "$venv/bin/python" fineweb/demo.py --out "$venv/$demo" \
            --copy-from fineweb/demo
    fi
}

# A job only uses what a terminal has set up.
in_terminal() {
    [ "${WORKSHOP_INSTALL-}" != no ] || fail "$1, and a job installs nothing;" \
        "fix: run \`source $(printf %q "$PWD/activate.sh")\` in a terminal"
}

suggest_tests() { # in a line what pytest needs, if the packages are not here
    local own='' place
    if [[ " $chosen " == *" tests "* ]] || meets tests; then
        return 0
    fi
    place=$(field archive)
    if [ ! -f "$venv/$marker" ]; then
        echo "For pytest: pip install -r tests/requirements.txt"
    elif [ "$venv" -ef .venv ]; then
        echo "For pytest: source activate.sh tests"
    else
        echo "For pytest, the owner of ${place:-$venv} runs:" \
            "WORKSHOP_INSTALL=yes source activate.sh tests"
    fi
}

make() {
    local chosen options=$3
    cd -P "$(dirname "${BASH_SOURCE[0]}")"
    choose_parts "${@:4}"
    while [[ $venv == ?*/ ]]; do venv=${venv%/}; done
    venv=$(cd -P -- "$venv" 2>/dev/null && pwd && exit
        cd -P -- "${venv%/*}" 2>/dev/null || { echo "$venv" && exit; }
        echo "$PWD/${venv##*/}")
    if must_change; then
        in_terminal "the environment $venv is not up to date"
        find_python # $python
        echo "activate.sh: setting up $venv"
        mkdir -p "$venv"
        lock "$venv/.workshop-lock"
        ! must_change || fill # else the shell that had the lock has done it
    fi
    if [ ! -e fineweb/demo/manifest.json ]; then
        in_terminal "the demo dataset is missing"
        "$venv/bin/python" fineweb/demo.py --copy-from "$venv/$demo" ||
            fail "the demo dataset could not be built"
    fi
    [ "${WORKSHOP_INSTALL-}" != no ] || exit 0
    share_demo >/dev/null 2>&1 || true
    filter_notebooks 2>/dev/null || true
    suggest_tests
    # GPT-2's vocabulary, quietly; only a shell that sets it up waits for it
    { [ -n "$(find "$TIKTOKEN_CACHE_DIR" -type f ! -name '*.tmp' |
        sed -n 2p)" ] || "$venv/bin/python" -c 'import signal
signal.alarm(20)  # seconds; some firewalls never answer
import tiktoken
tiktoken.get_encoding("gpt2")'; } >/dev/null 2>&1 &
    [ -z "${python-}" ] || wait
}

# --- an archive

pack() {
    local said
    cd "${VIRTUAL_ENV-/}"
    { [ -e "$marker" ] && grep -q relocatable pyvenv.cfg; } || fail "no" \
        "environment that activate.sh has made is active; fix: source" \
        "activate.sh first"
    [ ! -e "$1" ] || tar -tf "$1" "./$marker" >/dev/null 2>&1 ||
        fail "$1 is unchanged, because it is not a packed environment; fix:" \
            "choose another name"
    new=$(mktemp -d "${1%/*}/.new-XXXXXX")
    trap 'rm -rf "$new"' EXIT
    # the marker comes last: an archive without it is not whole
    said=$({ find . -mindepth 1 -maxdepth 1 ! -name "$marker" -print0 &&
        printf '%s\0' "./$marker"; } | tar --null -T - -caf "$new/${1##*/}" \
        2>&1) || fail "cannot pack it in $1: $(echo "$said" | reason)"
    chmod a+r "$new/${1##*/}"
    mv "$new/${1##*/}" "$1"
}

unpack() {
    local folder=${TMPDIR:-/tmp} said
    folder=${folder%/}/gpt2-workshop-$UID
    # a new archive has a folder of its own
    # shellcheck disable=SC2012 # stat has other options on each system
    venv=$folder/$(TZ=UTC LC_ALL=C ls -lLn "$1" | cksum | cut -d ' ' -f 1)
    new=$venv.new
    mkdir -m 700 "$folder" 2>/dev/null || true
    { [ -O "$folder" ] && [ -w "$folder" ]; } || fail "$folder cannot be" \
        "made, or is not yours; fix: set TMPDIR to another disk of this node"
    clear_away() { # only ours, its mark last, or what is empty
        rmdir "$new" 2>/dev/null || [ ! -f "$new/.begun" ] ||
            { rm -rf "${new:?}"/* && rm -r "$new"; }
    }
    [ -e "$venv" ] || lock "$folder/lock"
    if [ ! -e "$venv" ]; then # no other shell has done it meanwhile
        say "unpacking $1 into $venv (a minute, once on each node)"
        clear_away # what a killed one has left
        trap clear_away EXIT
        said=$({ mkdir "$new" && : >"$new/.begun" &&
            tar -C "$new" --no-same-owner -xf "$1" &&
            ls "$new/$marker"; } 2>&1) || fail "cannot unpack $1 in $folder" \
            "($(echo "$said" | reason)); fix: check that it is complete, and" \
            "that there is space, or set TMPDIR to another disk"
        echo "archive=$1" >>"$new/$marker"
        mv "$new" "$venv"
        rm "$venv/.begun"
    fi
    echo "$venv"
}

venv=${2-} system=$([ "${3-}" != yes ] || echo --system-site-packages)
if [ "${1-}" != make ]; then
    [[ ${1-} =~ ^(un)?pack$ && $venv == *.tar* ]] ||
        fail "invalid arguments; fix: setup.sh pack venv.tar.gz, or unpack"
    venv=$(cd -P "$(dirname "$2")" 2>/dev/null && pwd)/${2##*/} ||
        fail "no such folder: $(dirname "$2"); fix: make it, or choose" \
            "another for $2"
    [ "$1" = pack ] || [ -r "$venv" ] ||
        fail "$2 cannot be read; fix: make it with \`setup.sh pack\`"
fi
"$1" "$venv" "${@:3}"
