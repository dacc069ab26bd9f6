#!/usr/bin/env bash
# Sets up your shell for the workshop. Source it, in bash or zsh:
#
#     source activate.sh
#
# The first time, it creates a virtual environment (.venv) and the demo dataset
# (fineweb/demo), which takes minutes and a network. Later it only checks that
# they are up to date. What a site needs in addition, such as modules, goes
# into site.sh: see site.example.sh.
#
# Your own shell reads this file, so it never exits, sets no options, and
# removes its one function again. environment/setup.sh does the work, in a
# process of its own.

if [ -z "${BASH_VERSION-}${ZSH_VERSION-}" ]; then
    echo "activate.sh: start bash or zsh first, and source it there" >&2
    return 1
fi
if [ "${BASH_SOURCE[0]-}" = "$0" ] || [ "${ZSH_EVAL_CONTEXT-}" = toplevel ]
then
    echo "activate.sh sets up the shell that reads it: run source $0" >&2
    exit 1
fi

_workshop_activate() {
    unset -f _workshop_activate
    # local: what site.sh assigns to these is meant for this file only
    local WORKSHOP_VENV="${WORKSHOP_VENV-}"
    local WORKSHOP_SITE_PACKAGES="${WORKSHOP_SITE_PACKAGES-}"
    local root="$1" code=code venv entries

    # an environment that is still active would hide a module's Python
    if [ -n "${VIRTUAL_ENV-}" ] && typeset -f deactivate >/dev/null; then
        deactivate
    fi
    if [ -f "$root/site.sh" ]; then
        # shellcheck disable=SC1091 # each site has its own
        if ! . "$root/site.sh"; then
            echo "activate.sh: a command in $root/site.sh failed" >&2
            return 1
        fi
    fi
    venv=${WORKSHOP_VENV:-$root/.venv}

    # This clone comes first: its `workshop` has to be imported even from a
    # shared environment. An old entry is removed, so that they do not pile up.
    entries=":${PYTHONPATH-}:"
    entries=${entries//":$root:"/:}
    entries=${entries#:}
    entries=${entries%:}
    export PYTHONPATH="$root${entries:+:$entries}"
    # torchrun's shared store gives a restarted group the addresses of the
    # previous one (pytorch issue 135712)
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    export TIKTOKEN_CACHE_DIR="${TIKTOKEN_CACHE_DIR:-$root/fineweb/.cache/tiktoken}"

    bash "$root/environment/setup.sh" "$venv" "$WORKSHOP_SITE_PACKAGES" ||
        return 1

    entries=":$PATH:"  # a shell inherits the entry, but not `deactivate`
    entries=${entries//":$venv/bin:"/:}
    entries=${entries#:}
    PATH=${entries%:}
    # shellcheck disable=SC1091 # Python creates it
    . "$venv/bin/activate"

    echo "The workshop's environment is active: $(python -V), $venv"
    [ "$PWD" -ef "$root" ] || code="$root/code"
    echo "Next: python $code/train_gpt2.py"
}
_workshop_activate "$(
    cd -- "$(dirname -- "${BASH_SOURCE[0]:-$0}")" >/dev/null && pwd -P)"
