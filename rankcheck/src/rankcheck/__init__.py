"""Check any distributed training script, and explain why a job hangs."""

from __future__ import annotations

from rankcheck.engine.findings import Finding, Report
from rankcheck.system.errors import UserError
from rankcheck.system.version import __version__

__all__ = ["Finding", "Report", "UserError", "__version__", "verify"]


def verify(program: list[str], n: int = 2, steps: int = 4,
           resume_with: str | None = None, device: str = "cpu",
           patience: float = 120.0,
           allow_uncompared: bool = False) -> Report:
    """Compare a training script on N processes with one; print nothing.

    On Ctrl-C the program ends, and with it all that it has started.

    Args:
        program: the script, or -m and a module, and its flags, in which {n}
            is the number of processes, {rank} the rank, and {run} the name of
            a run.
        n: the number of processes, 2 to 64.
        steps: how many optimizer steps are watched.
        resume_with: flags, in one string, that resume a run.
        device: "cpu", or "gpu", which takes one of this machine for each
            process.
        patience: seconds without an optimizer step before it gives up.
        allow_uncompared: whether the report is `ok` although nothing could be
            compared with one process, or gradients were not seen to be
            reduced.

    Returns:
        A `Report`, which is `ok` only if the script was compared and nothing
        is wrong. A script that ends with an error is a failure in it.

    Raises:
        UserError: the script could not be run.
    """
    from rankcheck.engine.report import Quiet
    from rankcheck.verification.command import examine

    return examine(program, n, steps, resume_with, device, patience,
                   allow_uncompared, out=Quiet())
