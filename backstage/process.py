"""What a process does before anything else: its names, cores and memory."""

import torch

from backstage import witness
from backstage.cores import use_cores
from backstage.device import keep_memory
from backstage.launchers import count_processes, name_ranks
from backstage.spinning import share_cores


def prepare_process():
    """Prepare this process for its work; a script's first line. All ranks.

    Names: under srun, too, RANK, LOCAL_RANK, WORLD_SIZE and the like are in
    the environment, as torchrun sets them. Threads: as many as this process
    has cores, of which it gives way to others. Memory: where there is no
    accelerator, it is kept for the next tensors. Evidence: where the job's
    environment names a folder for it, this process writes what it does.
    """
    name_ranks()
    witness.start()
    on_node, _ = count_processes()
    use_cores(on_node)
    if not torch.accelerator.is_available():
        share_cores()
        keep_memory()
