"""From one device to many with DDP."""

from workshop.lessons import Change

CHANGES = [
    Change(
        "Say what the script does now",
        "To begin with something small: make the change, save the script, "
        "and run this diff again. The change is gone from the list.",
        ('+"""Train GPT-2 on many devices with DDP: '
         'each has a copy of the model.',)),
    Change(
        "Import what talks to the other processes",
        "torch.distributed sends tensors from process to process, "
        "DistributedDataParallel (DDP) uses it to keep the copies of the "
        "model equal. The others are small tools for the changes below.",
        ("+import atexit",
         "+import torch.distributed as dist")),
    Change(
        "Ask the launcher who this process is",
        "The launcher (torchrun, srun, mpirun) starts the same script several "
        "times and tells each process its rank, its local rank and the world "
        "size in environment variables. Nothing later in the script asks "
        "which launcher it was, or whether there was one.",
        ("-rank, world_size = 0, 1",
         '+if "RANK" not in os.environ:')),
    Change(
        "Give each process its own device",
        "The local rank counts the processes of a node: so process 0 takes "
        "the node's device 0, process 1 its device 1, and none has to share.",
        ("-device = get_device(hp.device)",
         "+device = get_device(hp.device, local_rank)")),
    Change(
        "Join the others, and leave them at the end",
        "All processes meet here, and wait until the last one has come. Each "
        "kind of device has its own way to talk, the backend: NCCL for "
        "NVIDIA's, XCCL for Intel's, Gloo for CPUs. The process group is "
        "destroyed however the script ends.",
        ("+dist.init_process_group("
         "dist.get_default_backend_for_device(device))",)),
    Change(
        "Name the run after its stage",
        "The run's folder and its checkpoints say which stage made them. The "
        "checkpoints of both stages are the same: either resumes the other's.",
        ('+run = Run("ddp", hp, config, max_steps, device)',)),
    Change(
        "Wrap the model in DDP",
        "A backward pass through the wrapper leaves the mean of all ranks' "
        "gradients on every rank, so that all of them make the same update. "
        "It sees only what is called through it: model(x, y), not "
        "raw_model(x, y). The raw model stays for what needs its own methods, "
        "and for checkpoints that do not know of DDP.",
        ("-model = raw_model",)),
    Change(
        "Reduce the gradients once a step",
        "DDP would reduce the gradients after every microbatch, but only "
        "their sum over all of them is needed. no_sync() lets them add up on "
        "each rank; after the last microbatch they are reduced. Without it "
        "the result is the same, for accumulation_steps times the traffic.",
        ("+for microbatch in range(accumulation_steps):",)),
    Change(
        "Average the loss over the ranks",
        "Each rank knows the loss of its own samples, the log wants that of "
        "the minibatch: the sum over all ranks, divided by the world size. "
        "Whether to stop after a signal is decided together in the same "
        "message, for a rank that stopped alone would leave the others "
        "waiting.",
        ("+dist.all_reduce(report)",)),
    Change(
        "Average the validation loss, too",
        "The ranks share the validation samples as they share the others. "
        "Dividing by the world size stands there already.",
        ("+dist.all_reduce(loss)",)),
    Change(
        "Let rank 0 alone log and save",
        "All ranks have the same numbers and the same weights: one line in "
        "the log and one checkpoint are enough, and several processes that "
        "write the same file damage it.",
        ("-run.log(step, mean_loss, val_loss, lr, norm, seconds)",)),
    Change(
        "Gather the texts, and print them on rank 0",
        "Every rank writes texts from a seed of its own. Printed by each they "
        "would end up between one another's lines. All ranks have to call "
        "all_gather_object, and only then may rank 0 go its own way.",
        ("+texts = [None] * world_size",)),
]
