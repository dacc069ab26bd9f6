"""mpi4py's `MPI`, joined to the world that mpirun has started.

    from backstage.mpi import MPI

is `from mpi4py import MPI`, and what goes wrong is one line: mpi4py or the
MPI library is missing, or the library is not the launcher's. The rest of
backstage talks to the other processes by MPI from then on.
"""

from backstage import witness, world
from backstage.errors import UserError, leave, report
from backstage.launchers import join_mpi, name_mpi_ranks


def join():
    """mpi4py's MPI; from now on the other processes are those of MPI."""
    MPI = join_mpi()
    if MPI.COMM_WORLD.size > 1:  # what the flags and errors ask for
        name_mpi_ranks(MPI)
    witness.record_mpi(MPI)
    world.use_group(MPI.COMM_WORLD)
    return MPI


try:
    MPI = join()
except UserError as error:  # no main() has begun that would say it
    leave(report(error))
