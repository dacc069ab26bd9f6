#!/usr/bin/env bash
# Sets up your shell for the workshop. Source it, in bash or zsh:
#
#     source activate.sh
#
# The first time it makes a virtual environment (.venv) and the demo dataset
# (fineweb/demo), which takes minutes and a network; later it only looks
# whether they are up to date. What a site needs beside that, such as modules,
# goes into site.sh: see site.example.sh.
#
# Your own shell reads this file: so it exits nothing, sets no option, and its
# one function forgets itself. The work is workshop/setup.sh's, in a process of
# its own.

if [ -z "${BASH_VERSION-}${ZSH_VERSION-}" ]; then
    echo "activate.sh: start bash or zsh first, and source it there" >&2
    return 1
fi
if [ "${BASH_SOURCE[0]-}" = "$0" ] || [ "${ZSH_EVAL_CONTEXT-}" = toplevel ]
then
    echo "activate.sh sets up the shell that reads it: source $0" >&2
    exit 1
fi

_workshop_activate() {
    unset -f _workshop_activate
    # local: what site.sh assigns to these is for this file only
    local WORKSHOP_VENV="${WORKSHOP_VENV-}"
    local WORKSHOP_SITE_PACKAGES="${WORKSHOP_SITE_PACKAGES-}"
    local root="$1" code=code venv entries

    # an environment that is still active would hide the Python of a module
    if [ -n "${VIRTUAL_ENV-}" ] && typeset -f deactivate >/dev/null; then
        deactivate
    fi
    if [ -f "$root/site.sh" ]; then
        # shellcheck disable=SC1091 # each site's own
        if ! . "$root/site.sh"; then
            echo "activate.sh: a command in $root/site.sh failed" >&2
            return 1
        fi
    fi
    venv=${WORKSHOP_VENV:-$root/.venv}

    # First, for with a shared environment it is this clone's `workshop` that
    # has to be imported. Taken out before, so that nothing piles up.
    entries=":${PYTHONPATH-}:"
    entries=${entries//":$root:"/:}
    entries=${entries#:}
    entries=${entries%:}
    export PYTHONPATH="$root${entries:+:$entries}"
    # torchrun's shared store hands a restarted group the addresses of the one
    # before (pytorch issue 135712)
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    export TIKTOKEN_CACHE_DIR="${TIKTOKEN_CACHE_DIR:-$root/fineweb/.cache/tiktoken}"

    bash "$root/workshop/setup.sh" "$venv" "$WORKSHOP_SITE_PACKAGES" || return 1

    entries=":$PATH:"  # a shell inherits the entry, but not `deactivate`
    entries=${entries//":$venv/bin:"/:}
    entries=${entries#:}
    PATH=${entries%:}
    # shellcheck disable=SC1091 # made by Python
    . "$venv/bin/activate"

    echo "The workshop's environment is active: $(python -V), $venv"
    [ "$PWD" -ef "$root" ] || code="$root/code"
    echo "Next: python $code/train_gpt2.py"
}
_workshop_activate "$(
    cd -- "$(dirname -- "${BASH_SOURCE[0]:-$0}")" >/dev/null && pwd -P)"
