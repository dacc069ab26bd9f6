#!/usr/bin/env bash
# Sets up your shell for the workshop. Source it, in bash or zsh:
#
#     source activate.sh           what runs and lessons need
#     source activate.sh tests     and the tests' packages, for pytest
#
# In place of tests: fineweb (to build datasets), transformers, deepspeed, or
# several of them. CONTRIBUTING.md lists them.
#
# The first time, it creates a virtual environment (.venv) and the demo dataset
# (fineweb/demo), which takes minutes and a network. Later it only checks that
# they are up to date. What a site needs in addition, such as modules, goes
# into site.sh: see site.example.sh.
#
# Your own shell reads this file, so it never exits, leaves the options as they
# were, and removes its one function again. setup.sh makes the environment, in a
# process of its own.

# tcsh runs the next line up to its exit; fish, which its end stops, shows it
test "$?shell" = 1 && echo "start bash or zsh first" && exit 1 && time
if [ -z "${BASH_VERSION-}${ZSH_VERSION-}" ]; then
    echo "activate.sh needs bash or zsh; fix: start one and source it there" \
        >&2
    return 1
fi
if [ "${BASH_SOURCE[0]-}" = "$0" ] || [ "${ZSH_EVAL_CONTEXT-}" = toplevel ]
then
    echo "activate.sh sets up the shell that sources it; fix: source $0" >&2
    exit 1
fi

_workshop_activate() {
    unset -f _workshop_activate
    # local: what site.sh assigns to these is meant for this file only
    local WORKSHOP_VENV="${WORKSHOP_VENV-}"
    local WORKSHOP_SITE_PACKAGES="${WORKSHOP_SITE_PACKAGES-}"
    # site.sh has variables of its own: these names are none of them
    local _workshop_root="$1" _workshop_code=code _workshop_failed=
    local _workshop_venv _workshop_entries _workshop_hook _workshop_option
    local _workshop_source _workshop_words
    local _workshop_options="${SHELLOPTS-}"
    # what site.sh makes of it would stay in your shell; zsh's has a NUL, too
    local IFS=$' \t\n'
    shift
    _workshop_words="$*" # the parts, or words of the script that sources this
    set -- # site.sh, and what that sources, has none of them

    case $_workshop_root in *:*)
        echo "activate.sh: Python cannot import from $_workshop_root, because" \
            "a colon separates the entries of PYTHONPATH; fix: rename the" \
            "folder" >&2
        return 1 ;;
    esac
    # an environment that is still active would hide a module's Python
    if [ -n "${VIRTUAL_ENV-}" ]; then
        if typeset -f deactivate >/dev/null; then
            deactivate
        else # a shell inherits the entry in PATH, but not the function
            _workshop_venv=:$VIRTUAL_ENV/bin: # zsh: no / in what is replaced
            _workshop_entries=":$PATH:"
            _workshop_entries=${_workshop_entries//"$_workshop_venv"/:}
            _workshop_entries=${_workshop_entries#:}
            PATH=${_workshop_entries%:}
            unset VIRTUAL_ENV
        fi
    fi
    if [ -f "$_workshop_root/site.sh" ]; then
        if grep -q $'\r' "$_workshop_root/site.sh"; then
            echo "activate.sh: $_workshop_root/site.sh has Windows line" \
                "endings, which become part of each value; fix: dos2unix" \
                "site.sh" >&2
            return 1
        fi
        # zsh restores its options by itself, when this function returns
        [ -z "${ZSH_VERSION-}" ] || setopt local_options
        # shellcheck disable=SC1091 # each site has its own
        . "$_workshop_root/site.sh" || _workshop_failed=yes
        if [ -n "${BASH_VERSION-}" ]; then
            local IFS=:
            for _workshop_option in $SHELLOPTS; do
                [[ :$_workshop_options: == *":$_workshop_option:"* ]] ||
                    set +o "$_workshop_option"
            done
            for _workshop_option in $_workshop_options; do
                [[ :$SHELLOPTS: == *":$_workshop_option:"* ]] ||
                    set -o "$_workshop_option"
            done
        fi
        if [ -n "$_workshop_failed" ]; then
            echo "activate.sh: a command in $_workshop_root/site.sh failed;" \
                "fix: correct it, or end its line with || true" >&2
            return 1
        fi
    fi

    # This clone comes first: its `workshop` has to be imported even from a
    # shared environment. Old entries are removed: they would pile up, and the
    # hook of `why`, which a job or an earlier version has put there, is only
    # for what jobs start.
    _workshop_source=$_workshop_root/rankcheck/src
    _workshop_entries=":${PYTHONPATH:+$PYTHONPATH:}"
    _workshop_entries=${_workshop_entries//":$_workshop_root:"/:}
    _workshop_entries=${_workshop_entries//":$_workshop_source:"/:}
    for _workshop_hook in "$_workshop_root/rankcheck/why/hook" \
        "$_workshop_source/rankcheck/system/hook"; do
        _workshop_entries=${_workshop_entries//":$_workshop_hook:"/:}
    done
    _workshop_entries=$_workshop_root:$_workshop_source:${_workshop_entries#:}
    export PYTHONPATH="${_workshop_entries%:}"
    export WORKSHOP="$_workshop_root" # the batch files' jobs find it by this
    # torchrun's shared store gives a restarted group the addresses of the
    # previous one (pytorch issue 135712)
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    # torch's threads wait for one another hundreds of times in a step: for a
    # moment they ask again and again, and no longer, since others may need
    # the core, even the thread that they wait for
    export GOMP_SPINCOUNT="${GOMP_SPINCOUNT-10000}"
    : "${TIKTOKEN_CACHE_DIR:=$_workshop_root/fineweb/.cache/tiktoken}"
    export TIKTOKEN_CACHE_DIR

    _workshop_venv=${WORKSHOP_VENV:-.venv}
    case $_workshop_venv in
    /*) ;;
    "~"/*) _workshop_venv=$HOME/${_workshop_venv#"~"/} ;; # it was in quotes
    *) _workshop_venv=$_workshop_root/$_workshop_venv ;;
    esac
    case $_workshop_venv in *.tar | *.tar.*)
        _workshop_venv=$(bash -p "$_workshop_root/setup.sh" unpack \
            "$_workshop_venv") || return 1 ;;
    esac
    # -p: without the functions that this shell has exported, such as a cd
    bash -p "$_workshop_root/setup.sh" make "$_workshop_venv" \
        "$WORKSHOP_SITE_PACKAGES" "$-" "$_workshop_words" || return 1

    # shellcheck disable=SC1091 # Python creates it
    . "$_workshop_venv/bin/activate" || return 1

    echo "The workshop's environment is active: $(python -V)," \
        "${VIRTUAL_ENV-$_workshop_venv}" # the path under which it was made
    [ "$PWD" -ef "$_workshop_root" ] || _workshop_code="$_workshop_root/code"
    echo "Next: python $_workshop_code/train_gpt2.py"
}
_workshop_activate "$(
    CDPATH='' builtin cd -- "$(dirname -- "${BASH_SOURCE[0]:-$0}")" >/dev/null && pwd -P)" "$@"
