"""Launchers name the ranks each in their own way; the stages read one."""

import os
import re

from workshop.errors import check


def name_ranks(env=os.environ):
    """Set RANK, LOCAL_RANK and WORLD_SIZE, torchrun's names, for the others.

    Without a launcher they stay unset: plain python is one process, inside a
    SLURM allocation as well, whose shells have SLURM_PROCID and SLURM_NTASKS
    too. What srun has started is told by SLURM_STEP_NUM_TASKS.
    """
    if "RANK" in env:
        return
    if "LOCAL_RANK" in env and "NODE_RANK" in env:  # started by Lightning
        env["RANK"] = env["LOCAL_RANK"]
    elif int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        tasks = env["SLURM_STEP_TASKS_PER_NODE"]  # "4", "4(x2)" or "2,1"
        check(re.fullmatch(r"\d+(\(x\d+\))?", tasks), "srun started "
              f"{tasks} tasks on the nodes: start as many on each, with "
              "--ntasks-per-node")
        # of "gpu[03-04,07]" and "gpu03,gpu04" the first
        node = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", env["SLURM_STEP_NODELIST"])
        job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
        env.update(
            RANK=env["SLURM_PROCID"], LOCAL_RANK=env["SLURM_LOCALID"],
            WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"],
            LOCAL_WORLD_SIZE=tasks.split("(")[0])
        env.setdefault("MASTER_ADDR", node.split(",")[0])
        env.setdefault("MASTER_PORT", str(20000 + (job + step) % 10000))
