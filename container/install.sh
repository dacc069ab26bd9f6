#!/usr/bin/env bash
# What the container of the course has; Dockerfile and course.def run this as
# root, in a Debian or Ubuntu in which there is a copy of the course.
#     install.sh packages      SLURM, and what the lessons use of the system
#     install.sh published     JupyterLab listens where Docker forwards a port
#     install.sh environment   Python's packages, in /opt/gpt2-workshop
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=/opt/gpt2-workshop

case ${1-} in
packages)
    export DEBIAN_FRONTEND=noninteractive
    # SLURM and its network; MPI for the stage mpi, a compiler for kernels
    apt-get update -q
    apt-get install -qy --no-install-recommends \
        ca-certificates g++ git iproute2 libc6-dev mount munge openmpi-bin \
        procps python3-dev python3-venv slurm-wlm util-linux
    rm -rf /var/lib/apt/lists/*
    # munge starts with each cluster, with a key of its own
    rm -f /etc/munge/munge.key
    ;;
published)
    # on the container's own addresses, not on its localhost; with a token
    mkdir -p /etc/jupyter
    echo '{"ServerApp": {"ip": "0.0.0.0", "open_browser": false}}' \
        >/etc/jupyter/jupyter_server_config.json
    ;;
environment)
    mkdir -p "$venv"
    # an empty folder that is ours: activate.sh sets it up for everybody
    WORKSHOP_VENV=$venv bash -c 'source activate.sh'
    chmod -R a+rX "$venv"
    ;;
*)
    echo "usage: install.sh packages | published | environment" >&2
    exit 2
    ;;
esac
