"""python -m workshop cluster up | status | down: a SLURM on this machine."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace

from backstage.errors import require
from rankcheck.engine.findings import count_of
from workshop.cluster.config import make_environment
from workshop.cluster.control import Cluster
from workshop.cluster.settings import (
    MOST_GPUS,
    MOST_NODES,
    ClusterSettings,
    find_cluster_folder,
)

NAME = "main"
ACTIONS = """\
up: start a cluster, or its parts that are not running. status: list its parts.
down: end it with all its jobs, and remove its folder. kill NODE: crash a node.
start NODE: start it again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", help=ACTIONS, choices=[
        "up", "status", "down", "kill", "start"])
    parser.add_argument("node", nargs="?", default="",
                        help="for kill and start, such as node2")
    parser.add_argument("--name", default=NAME, help="of the cluster, if you "
                        f"want several ({NAME})")
    parser.add_argument("--nodes", type=int, metavar="N",
                        help=f"1 to {MOST_NODES} ({ClusterSettings.nodes})")
    parser.add_argument("--gpus", type=int, metavar="N", help="simulated GPUs "
                        f"of each node, 1 to {MOST_GPUS} "
                        f"({ClusterSettings.gpus})")


def main(args: argparse.Namespace) -> int:
    """Do what the command line says; return the exit status."""
    action = args.action
    if action in ("kill", "start"):
        require(args.node, f"cluster {action} needs a node; fix: name one, "
                "such as node2")
    else:
        require(not args.node, f"cluster {action} takes no node; fix: leave "
                f"{args.node} out")
    cluster = Cluster(find_cluster_folder(args.name))
    if action == "up":
        return start_cluster(cluster, args)
    if action == "status":
        return show_status(cluster)
    if action == "down":
        return end_cluster(cluster, args.name)
    if action == "kill":
        cluster.kill_node(args.node)
        print_err(f"{args.node} has crashed; to start it again: python -m "
                  f"workshop cluster start {args.node}")
        return 0
    cluster.start_part(args.node)
    print_err(f"{args.node} is up")
    return 0


def print_err(text: str) -> None:
    """Print a line to stderr, which a shell does not evaluate."""
    print(text, file=sys.stderr, flush=True)


def end_cluster(cluster: Cluster, name: str) -> int:
    """End a cluster; say what remains in the shell that used it."""
    if not cluster.down():
        print_err(f"no cluster {name} is up")
        return 0
    print_err(f"cluster {name} is down")
    if os.environ.get("SLURM_CONF") == str(cluster.place.config):
        print_err("this shell's SLURM commands still look for it; for another "
                  "SLURM, open a new shell")
    return 0


def choose_settings(cluster: Cluster, args: argparse.Namespace
                    ) -> ClusterSettings | None:
    """Return the settings that the command line asks for, if any."""
    nodes, gpus = args.nodes, args.gpus
    require(nodes is None or 1 <= nodes <= MOST_NODES,
            f"--nodes must be from 1 to {MOST_NODES}")
    require(gpus is None or 1 <= gpus <= MOST_GPUS,
            f"--gpus must be from 1 to {MOST_GPUS}")
    if nodes is None and gpus is None:
        return None
    known = cluster.settings() or ClusterSettings()
    return replace(known, nodes=nodes or known.nodes, gpus=gpus or known.gpus)


def start_cluster(cluster: Cluster, args: argparse.Namespace) -> int:
    """Start a cluster, and print how a shell uses it.

    A shell that evaluates the output, as in eval "$(...)", gets the lines
    themselves; a person gets the command to type.
    """
    settings, begin = choose_settings(cluster, args), time.monotonic()
    cluster.up(settings)
    known = cluster.settings() or ClusterSettings()
    print_err(f"cluster {args.name} is up: {count_of(known.nodes, 'node')} "
              f"with {count_of(known.gpus, 'simulated GPU')} each "
              f"({time.monotonic() - begin:.0f} s)")
    if sys.stdout.isatty():
        print("Type in each shell that is to use it:\n"
              f"    source {cluster.place.environment}")
    else:
        print(make_environment(cluster.place), end="")
    return 0


def show_status(cluster: Cluster) -> int:
    """Print a line for each part; return 1 if one does not run."""
    parts = cluster.parts()
    if not parts:
        print(f"no cluster in {cluster.place.folder}; fix: python -m "
              "workshop cluster up")
        return 1
    states = cluster.ask_states()
    broken = [part for part in parts if not part.runs]
    is_up = cluster.is_up()
    for part in parts:
        state = states.get(part.name, "")
        detail = f": {state}" if state else ""
        if part.runs:
            print(f"ok    {part.name}{detail}")
        else:
            print(f"FAIL  {part.name} is not running")
    if not broken and not is_up:
        print("FAIL  its start is unfinished")
    if broken or not is_up:
        print("      fix: python -m workshop cluster up")
    else:
        print(f"to use it: source {cluster.place.environment}")
    return int(bool(broken) or not is_up)
