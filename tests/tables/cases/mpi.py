"""Scripts for the check of the lesson mpi."""

from cases.case import right, wrong

MPI_AVERAGE = "        average_gradients(raw_model, comm)  # once a step\n"
MPI_REDUCE = ("        comm.Allreduce(MPI.IN_PLACE, gradient)  "
              "# the sum over all ranks\n")
MPI_SUM = "        comm.Allreduce(MPI.IN_PLACE, report)  # the sum"
MPI_LOOP = """\
    for weight in model.parameters():
        gradient = weight.grad.cpu().numpy()
        comm.Allreduce(MPI.IN_PLACE, gradient)  # the sum over all ranks
        weight.grad.copy_(torch.from_numpy(gradient) / comm.size)
"""
MPI_FLAT = """\
    gradients = [weight.grad for weight in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients]).numpy()
    comm.Allreduce(MPI.IN_PLACE, flat)
    parts = torch.from_numpy(flat / comm.size).split(
        [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts):
        gradient.copy_(part.view_as(gradient))
"""
MPI_BEGUN = """\
    gradients = [weight.grad.numpy() for weight in model.parameters()]
    MPI.Request.Waitall([comm.Iallreduce(MPI.IN_PLACE, gradient)
                         for gradient in gradients])
    for weight in model.parameters():
        weight.grad /= comm.size
"""
MPI_RING = """\
    for weight in model.parameters():
        gradient = weight.grad.numpy()
        parts = [gradient]
        for _ in range(comm.size - 1):
            part = np.empty_like(gradient)
            EXCHANGE
            parts.append(part)
        in_order = [parts[(comm.rank - rank) % comm.size]
                    for rank in range(comm.size)]  # the same sum everywhere
        weight.grad.copy_(torch.from_numpy(sum(in_order)) / comm.size)
"""
NEXT = "(comm.rank + 1) % comm.size"
BEFORE = "(comm.rank - 1) % comm.size"

CASES = (
    wrong("the single-device script", "", "std"),
    # the gradients
    wrong("Reduce for Allreduce", "gradients of step 0 differ",
          (MPI_REDUCE, """\
        comm.Reduce(MPI.IN_PLACE if comm.rank == 0 else gradient, gradient)
""")),
    wrong("a blocking ring", "it hangs", (MPI_LOOP, MPI_RING.replace(
        "EXCHANGE", f"comm.Send(parts[-1], {NEXT})\n            "
        f"comm.Recv(part, {BEFORE})"))),
    # the others
    wrong("Bcast inside if rank == 0", "it hangs",
          ("    first_step = run.restore", """\
    if rank == 0:
        for weight in raw_model.parameters():
            comm.Bcast(weight.detach().numpy())
    first_step = run.restore""")),
    wrong("the rank for the local rank",
          "takes device 2, but it has local rank 0",
          ("comm.Split_type(MPI.COMM_TYPE_SHARED).rank", "comm.rank")),
    right("the solution"),
    right("one flat buffer", (MPI_LOOP, MPI_FLAT)),
    right("allreduce in lower case", (MPI_LOOP, """\
    for weight in model.parameters():
        total = comm.allreduce(weight.grad.cpu().numpy())
        weight.grad.copy_(torch.from_numpy(total) / comm.size)
""")),
    right("non-blocking Iallreduce", (MPI_LOOP, MPI_BEGUN)),
    right("averaged at every microbatch", (MPI_AVERAGE, ""),
          ("            mean_loss += loss.detach()\n",
           "            mean_loss += loss.detach()\n"
           "            average_gradients(raw_model, comm)\n"),
          warns="gradients are reduced 4.0 times a step"),
    right("a ring of Isend and Recv", (MPI_LOOP, MPI_RING.replace(
        "EXCHANGE", f"sent = comm.Isend(parts[-1], {NEXT})\n"
        f"            comm.Recv(part, {BEFORE})\n"
        "            sent.Wait()"))),
    right("a ring of Sendrecv", (MPI_LOOP, MPI_RING.replace(
        "EXCHANGE", f"comm.Sendrecv(parts[-1], {NEXT}, recvbuf=part, "
        f"source={BEFORE})"))),
    right("the weights sent by rank 0", ("    first_step = run.restore", """\
    for weight in raw_model.parameters():
        comm.Bcast(weight.detach().numpy())
    first_step = run.restore""")),
    right("mpi4py by its own name, too",
          ("import torch\nfrom torch import nn\n", "import torch\n"
           "from mpi4py import MPI as theirs\nfrom torch import nn\n")),
    right("two sums in place of one",
          ("        report = np.array([mean_loss.item(), "
           "run.stop_requested])\n", ""), (MPI_SUM + " over all ranks\n", ""),
          ("mean_loss, stop = (report / world_size).tolist()", "stop = "
           "comm.allreduce(run.stop_requested, op=MPI.MAX)\n        mean_loss "
           "= comm.allreduce(mean_loss.item()) / world_size")),
)
