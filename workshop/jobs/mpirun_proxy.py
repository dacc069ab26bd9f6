"""A proxy that mpirun starts for a rank, which is forked elsewhere.

    mpirun -n N python workshop/jobs/mpirun_proxy.py FOLDER

rankcheck's fork_server.py forks the ranks from a server that has imported
torch. A rank joins MPI with what mpirun gives to the process that it
starts: variables, and with MPICH an open connection. This hands both to the
rank of its number, by a socket in FOLDER, and ends as the rank does. If
mpirun ends this, the rank is killed. Only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time

# connections to a proxy that knows of the end
PARTED: list[socket.socket] = []


def main() -> None:
    """In the process that mpirun has started."""
    variables = dict(os.environ)
    rank = variables.get("OMPI_COMM_WORLD_RANK") or variables["PMI_RANK"]
    handles = [int(variables["PMI_FD"])] if "PMI_FD" in variables else []
    link = socket.socket(socket.AF_UNIX)
    while link.connect_ex(os.path.join(sys.argv[1], f"{rank}.proxy")):
        if not os.path.isdir(sys.argv[1]):  # nobody wants the ranks any more
            sys.exit(1)
        time.sleep(0.01)  # the rank is not there yet
    data = "\0".join(f"{key}={value}" for key, value in variables.items())
    socket.send_fds(link, [len(data.encode()).to_bytes(8, "big")], handles)
    link.sendall(data.encode())
    status = link.recv(1)
    if not status:  # the rank was killed
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(status[0])


def meet(address: str) -> tuple[socket.socket, dict[str, str]]:
    """In the rank: wait for the proxy; (the connection, variables)."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen(1)
        link, _ = door.accept()
    os.unlink(address)  # they have met
    size, handles, _, _ = socket.recv_fds(link, 8, 1)
    with link.makefile("rb") as file:
        data = file.read(int.from_bytes(size, "big"))
    if not size or len(data) < int.from_bytes(size, "big"):
        os.kill(os.getpid(), signal.SIGKILL)  # mpirun has ended it meanwhile
    variables = dict(pair.split("=", 1) for pair in data.decode().split("\0"))
    if handles:
        variables["PMI_FD"] = str(handles[0])
    return link, variables


def follow(link: socket.socket) -> None:
    """In a thread of the rank: end as soon as the proxy does."""
    if not link.recv(1) and link not in PARTED:
        os.kill(os.getpid(), signal.SIGKILL)


def part(link: socket.socket, status: int) -> None:
    """In the rank, at its end: let the proxy end with the same status."""
    PARTED.append(link)
    with contextlib.suppress(OSError):
        link.sendall(bytes([status & 255]))


if __name__ == "__main__":
    main()
