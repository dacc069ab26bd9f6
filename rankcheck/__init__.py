"""Starts, watches and judges anybody's training script."""


def verify(program, n=2, steps=4, resume_with=None, device="cpu",
           patience=120.0):
    """What `rankcheck verify` finds, printing nothing: `Finding`s, causes
    first, whose `verdict` is "ok", "warn" or "FAIL", and `text` a sentence.

    program: the script, or -m and a module, and its flags, in which {n} is the
    number of processes, n, {rank} the rank, and {run} the name of a run.
    steps: how many updates are watched. resume_with: flags, in one string,
    that resume a run. device: "gpu" takes one of this machine for each
    process. patience: seconds without an update before it gives up. What
    could not be run or compared is a `rankcheck.errors.UserError`. On Ctrl-C
    the program ends, and with it all that it has started.
    """
    from rankcheck.report import Quiet
    from rankcheck.verification.command import examine

    return examine(program, n, steps, resume_with, device, patience,
                   out=Quiet())[0]
