"""The doctor's questions to all ranks: python -m workshop doctor --ranks

Under any launcher: who each rank is, whether they train one model together,
how fast they reach each other, and over which network.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from backstage.device import device_name, use_device
from backstage.errors import warn
from backstage.files import write_atomically
from backstage.world import keep_group, on_every_rank
from rankcheck.engine import scratch
from workshop.why import NETWORK_FILE

DDP_STEPS = 10  # of training
INSIDE_NODES, BETWEEN_NODES = "in the nodes", "between nodes"


def ask_ranks() -> int:
    """Ask all ranks; rank 0 prints a line for each answer. All ranks.

    The result, an exit status, is 1 if anything is to be done.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    device = use_device("auto", local_rank)
    backend = dist.get_default_backend_for_device(device)
    log = None
    if backend == "nccl" and "NCCL_DEBUG" not in os.environ:
        log = scratch.make_folder() / "nccl.txt"
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET",
                          NCCL_DEBUG_FILE=str(log))
    dist.init_process_group(
        backend, device_id=None if device.type == "cpu" else device,
        timeout=datetime.timedelta(minutes=2))
    keep_group()
    host = socket.gethostname()
    for rank, (its_host, its_local, its_device) in enumerate(on_every_rank(
            (host, local_rank, device_name(device)))):
        print_result(f"rank {rank}: local rank {its_local} on {its_host}, "
                     f"{its_device}")
    right = train_with_ddp(device)
    right &= time_all_reduces(device, on_every_rank(host))
    for line in sorted(set(on_every_rank(
            f"{host} communicates over {name_network(log)}"))):
        print_result(line)
    if log:
        scratch.remove(log.parent)
    return int(not right)


def print_result(answer: str, right: bool = True) -> None:
    if dist.get_rank() == 0:
        print(f"{'ok' if right else 'FAIL':5}  {answer}", flush=True)


def train_with_ddp(device: torch.device) -> bool:
    """Train a tiny model with DDP; whether all ranks have the same weights.

    Every rank has its own samples of one rule, so the loss falls. All ranks.
    """
    torch.manual_seed(dist.get_rank())  # DDP copies rank 0's weights
    raw_model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    model = DistributedDataParallel(raw_model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(256, 64, device=device)
    losses = []
    for _ in range(DDP_STEPS):
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, True) / 8)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach())
        losses.append(total.item() / dist.get_world_size())
    weights = on_every_rank(
        sum(weight.double().sum().item() for weight in model.parameters()))
    same = len(set(weights)) == 1
    right = same and losses[-1] < losses[0]
    print_result(f"training: {DDP_STEPS} steps of a tiny model, loss "
                 f"{losses[0]:.3f} -> {losses[-1]:.3f}, "
                 f"{'the same' if same else 'different'} weights on all ranks",
                 right)
    return right


def time_all_reduces(device: torch.device, hosts: list[str]) -> bool:
    """Time an all-reduce over all ranks, in each node, and between nodes.

    hosts: each rank's. Returns whether all sums were right. All ranks.
    """
    nodes = [[rank for rank, host in enumerate(hosts) if host == node]
             for node in dict.fromkeys(hosts)]
    right, speed = time_all_reduce(
        device, [[*range(len(hosts))]], "all-reduce")
    speeds = {INSIDE_NODES if len(nodes) == 1 else BETWEEN_NODES: speed}
    if 1 < len(nodes) < len(hosts):
        # one rank of each node: they share the network with nobody
        for name, groups in ((INSIDE_NODES, nodes),
                             (BETWEEN_NODES, [[ranks[0] for ranks in nodes]])):
            same, speeds[name] = time_all_reduce(device, groups, name)
            right &= same
    if dist.get_rank() == 0:
        try:
            NETWORK_FILE.parent.mkdir(exist_ok=True)
            write_atomically(NETWORK_FILE, json.dumps(speeds).encode())
        except OSError as error:
            warn(f"these speeds are not recorded for `why`: {error}")
    return right


def time_all_reduce(device: torch.device, groups: list[list[int]],
                    name: str) -> tuple[bool, float]:
    """Time one in each of the groups, lists of ranks, at the same time.

    Returns whether its sums were right, and gigabytes per second. All ranks.
    """
    mine, _ = dist.new_subgroups_by_enumeration(groups)
    # on a GPU as many as GPT-2 has gradients, on a CPU fewer
    numel = 2**20 if device.type == "cpu" else 124 * 10**6
    megabytes = numel * 4 / 1e6
    answer = None
    if mine:
        ranks = dist.get_process_group_ranks(mine)
        values = torch.empty(numel, device=device)
        seconds = []
        for _ in range(6):
            values.fill_(dist.get_rank() + 1)
            dist.barrier(mine)
            begin = time.perf_counter()
            dist.all_reduce(values, group=mine)
            values[-1].item()  # waits for the device
            seconds.append(time.perf_counter() - begin)
        # the first one also connects
        answer = (min(seconds[1:]),
                  bool((values == sum(ranks) + len(ranks)).all()))
    answers = [answer for answer in on_every_rank(answer) if answer]
    slowest = max(best for best, _ in answers)
    right = all(right for _, right in answers)
    size = max(len(group) for group in groups)
    # the least that each rank has to send (and receive)
    speed = 2 * (size - 1) / size * megabytes / 1e3 / slowest
    print_result(f"{name}: {size} ranks over {dist.get_backend()}, "
                 f"{megabytes:,.0f} MB in {1e3 * slowest:.1f} ms: "
                 f"{speed:.2f} GB/s per rank"
                 + ("" if right else ", but the sum is wrong"), right)
    return right, speed


# ----------------------------------------------------------- which network


def name_network(log: Path | None) -> str:
    """What this rank talks over, such as "eth0, not InfiniBand".

    log: the file that NCCL writes, or None.
    """
    if log and log.exists():
        return read_nccl_log(log.read_text(errors="replace"))
    names = set(find_interfaces()) or {"no network"}
    return " and ".join(sorted(describe_interface(name) for name in names))


def read_nccl_log(text: str) -> str:
    """The network that NCCL says it uses between nodes, in its own words."""
    # NET/IB : Using [0]mlx5_0:1/IB ..., or NET/Socket : Using [0]eth0:10.0...
    used = re.findall(r"NET/(\S+) : Using (?:\[\d+\])?([^\s:/]+)", text)
    # the one that it chose in the end, which may be a plugin's
    chosen = re.findall(r"Using network (.+)", text)
    if chosen:
        kind = chosen[-1].strip()
        used = [pair for pair in used if pair[0] == kind]
    if chosen and not used:
        # NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)
        found = re.findall(r"(?i)selected provider is ([^\s,]+)", text)
        provider = f" ({found[-1]})" if found else ""
        return f"{kind}{provider}, by NCCL between the nodes"
    if not used:
        return "NCCL, whose log names no network"
    kind, name = used[-1]
    if kind == "IB":
        return f"{name}, InfiniBand or RoCE, by NCCL between the nodes"
    return f"{describe_interface(name)}, by NCCL between the nodes"


def find_interfaces() -> Iterator[str]:
    """The network interfaces of this process's connections to other ranks.

    The connection to the store, at MASTER_PORT, is none.
    """
    store = int(os.environ["MASTER_PORT"])
    names = {end.address: name for name, ends in psutil.net_if_addrs().items()
             for end in ends}
    for link in psutil.Process().net_connections():
        if link.raddr and store not in (link.laddr.port, link.raddr.port):
            here = link.laddr.ip.removeprefix("::ffff:")  # IPv4 in IPv6
            loopback = here.startswith("127.") or here == "::1"
            yield "lo" if loopback else names.get(here, here)


def describe_interface(interface: str,
                       sys_folder: Path = Path("/sys/class")) -> str:
    if interface == "lo":
        return "lo, inside the node"
    try:
        kind = (sys_folder / "net" / interface / "type").read_text().strip()
    except OSError:
        return interface
    if kind == "32":  # ARPHRD_INFINIBAND
        return f"{interface}, InfiniBand by TCP"
    cards = sorted(path.name for path in sys_folder.glob("infiniband/*"))
    if cards:
        return (f"{interface}, not InfiniBand, although this node has "
                f"{', '.join(cards)}")
    return f"{interface}, not InfiniBand, which this node does not have"
