#!/usr/bin/env bash
# Packs the active environment into an archive, or unpacks one on this node's
# own disk. Forty people then read one large file from the shared disk, not
# the same tens of thousands of small ones.
#
#     environment/archive.sh pack /shared/workshop/venv.tar.gz
#     environment/archive.sh unpack /shared/workshop/venv.tar.gz
#
# unpack prints the folder, which each user has for themselves; if it is there
# already, nothing is unpacked. activate.sh and the jobs call it if the site's
# WORKSHOP_VENV is an archive.
set -euo pipefail
unset CDPATH PYTHONHOME
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
marker=workshop-base # of an environment: build.py writes it
begun=.workshop-unpacking # in a folder into which this script unpacks

say() { echo "activate.sh: $*" >&2; }

fail() {
    say "$*"
    exit 1
}

# The line of some that says most.
reason() {
    # shellcheck disable=SC2016 # the last line
    printf '%s\n' "$1" | sed -nE '1h; /o space|quota|Errno/h; ${x;p;}'
}

pack() {
    local said name names=()
    [ -e "${VIRTUAL_ENV-}/$marker" ] ||
        fail "source activate.sh first: its environment is what is packed"
    [ ! -e "$1" ] || tar -tf "$1" "$marker" >/dev/null 2>&1 ||
        fail "$1 stays as it is, since it is no packed environment: name" \
            "another file"
    cd "$VIRTUAL_ENV"
    folder=$(mktemp -d "${1%/*}/.new-XXXXXX" 2>&1) ||
        fail "cannot pack $VIRTUAL_ENV in $1: $folder"
    trap 'rm -rf "$folder"' EXIT
    new=$folder/${1##*/} # its end says how
    for name in * .[!.]*; do
        [ ! -e "$name" ] || [ "$name" = "$marker" ] || names+=("$name")
    done
    # the marker comes last: an archive without it is not whole
    said=$(tar -caf "$new" "${names[@]}" "$marker" 2>&1) ||
        fail "cannot pack $VIRTUAL_ENV in $1: $(reason "$said")"
    chmod a+r "$new"
    mv "$new" "$1"
}

unpack() {
    local folder place said old
    # a new archive, in the same place, has a folder of its own
    # shellcheck disable=SC2012 # stat has other options on each system
    place=$(TZ=UTC LC_ALL=C ls -lLn "$1" | cksum)
    folder=${TMPDIR:-/tmp}
    folder=${folder%/}/gpt2-workshop-$UID
    place=$folder/${place%% *}
    mkdir -m 700 "$folder" 2>/dev/null || true
    if [ ! -O "$folder" ] || [ ! -w "$folder" ]; then
        fail "$folder cannot be made, or is not yours: let TMPDIR name" \
            "another disk of this node"
    elif [[ ! $place =~ ^[A-Za-z0-9_./+-]{1,100}$ ]]; then
        # the first line of a script, which names its Python
        fail "no environment works in $folder: let TMPDIR be shorter, and" \
            "without spaces or signs"
    fi
    if [ ! -e "$place" ]; then
        lock "$folder/lock"
    fi
    if [ ! -e "$place" ]; then # no other shell has done it meanwhile
        say "unpacking $1 in $place (a minute, once on each node)"
        new=$place.new$$
        trap '[ ! -f "$new/$begun" ] || rm -rf "$new"' EXIT
        said=$({ mkdir "$new" && : >"$new/$begun" &&
            tar -C "$new" --no-same-owner -xf "$1"; } 2>&1) ||
            fail "cannot unpack $1 in $folder: $(reason "$said"): is the" \
                "archive whole, is there room? TMPDIR may name another disk"
        old=$(sed -n 's/^place=//p' "$new/$marker" 2>/dev/null) || true
        [ -n "$old" ] ||
            fail "$1 is not whole, or activate.sh has not made what it holds"
        "$new/bin/python" -c '' 2>/dev/null ||
            fail "the Python of the environment in $1 is not here: load its" \
                "module in site.sh"
        said=$(PYTHONPATH=$here "$new/bin/python" -Bc 'if True:
            import sys, build
            build.correct(*sys.argv[1:])' "$new" "$old" "$place" 2>&1) ||
            fail "cannot unpack $1 in $folder: $(reason "$said")"
        echo "archive=$1" >>"$new/$marker"
        mv "$new" "$place" # after that, the trap does not find it
        rm "$place/$begun"
    fi
    echo "$place"
}

# Held until this process and all that it started have ended. What a killed
# one has left, with its mark, is nobody's then; the mark goes last.
lock() {
    local left
    exec 9>>"$1"
    if command -v flock >/dev/null; then # macOS has none
        flock -w 5 9 || { say "waiting for $1, which $(cat "$1") has locked" &&
            flock 9; }
        echo "process $$ of archive.sh, since $(date +%T)," >"$1"
        for left in "${1%/*}"/*.new*; do
            if [ ! -L "$left" ] && [ -f "$left/$begun" ]; then
                rm -rf "${left:?}"/* && rm -rf "$left"
            fi
        done
    fi
}

if [ "$#" != 2 ] || [[ $1 != *pack ]] || [[ $2 != *.tar && $2 != *.tar.* ]]
then
    fail "archive.sh needs pack or unpack, and the name of an archive such" \
        "as venv.tar.gz"
fi
archive=$(cd -P "$(dirname "$2")" 2>/dev/null && pwd) ||
    fail "there is no folder $(dirname "$2"), where $2 is to be"
archive=$archive/${2##*/}
[ "$1" = pack ] || [ -r "$archive" ] ||
    fail "$2 cannot be read: \`environment/archive.sh pack\` makes it"
"$1" "$archive"
