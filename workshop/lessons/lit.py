"""From the DDP stage to Lightning."""

from workshop.lessons import Change

CHANGES = [
    Change(
        "Say what the script does now",
        "Something small to begin with: save the script, run this diff "
        "again, and the change is gone from the list.",
        ('-"""Train GPT-2 on many devices with DDP: '
         'each has a copy of the model.',
         '+"""Train GPT-2 on many devices with Lightning: '
         'its Trainer has the loop.')),
    Change(
        "Import Lightning, and what stands in for its own ways",
        "The imports of torch.distributed go with what they were for. "
        "workshop.lit holds what this course does not teach: it writes "
        "metrics.csv and the checkpoints, and resumes, as in the other "
        "stages.",
        ("-import atexit", "+import lightning as L")),
    Change(
        "Make the model a LightningModule",
        "A LightningModule is an nn.Module with methods that the Trainer "
        "calls: how to make the optimizer, what to do with a batch. The "
        "layers and their names stay, so any stage's checkpoint fits.",
        ("-class GPT(nn.Module):",)),
    Change(
        "Let the Trainer make the optimizer",
        "The Trainer calls configure_optimizers() itself, without arguments: "
        "so the module keeps the hyperparameters.",
        ("-def configure_optimizers(self, hp):",)),
    Change(
        "Hand over the schedule",
        "LambdaLR multiplies the learning rate by a factor: get_lr over its "
        "maximum, the very schedule of the other stages. OneCycleLR would "
        'bring one of its own, with other shapes and another end. "interval" '
        'is needed: the default is "epoch", and then the rate stays at its '
        "first value for thousands of steps.",
        ("-return optimizer",)),
    Change(
        "Make the training step a method",
        "No device and no autocast: the batch arrives on the right device, "
        "and the Trainer's precision is switched on around the call. The loss "
        "is returned undivided: the Trainer divides it by the accumulation "
        "steps, calls backward, and steps. Lightning sends the call through "
        "the DDP wrapper, so self(...) is right here.",
        ("-def training_step(model, batch, device, precision):",
         "+def training_step(self, batch):")),
    Change(
        "Validate with a method, too",
        "The Trainer runs it on as many microbatches as it is told to, "
        "without gradients. self.log takes their mean; sync_dist takes the "
        "mean over the ranks as well, which evaluate() had to do itself.",
        ("+def validation_step(self, batch):",
         "-@torch.no_grad()")),
    Change(
        "Choose devices and strategy on the command line",
        "--devices lets plain python start several processes on a node; after "
        "torchrun or srun it is not needed. --strategy says what each device "
        "keeps: a copy of the model (ddp), or a shard of it (fsdp2).",
        ("+devices: int = 0",)),
    Change(
        "Let the launcher's variables be read for you",
        "Your data still has to know rank and world size, and the minibatch "
        "still has to divide. Who reads the variables of torchrun or srun no "
        "longer matters here. Plain python in a SLURM job's shell stays one "
        "process, which Lightning by itself gets wrong: it would wait for "
        "others.",
        ('-if "RANK" not in os.environ:',)),
    Change(
        "Leave the process group to Lightning",
        "The strategy joins the others when the Trainer starts, with the "
        "backend that belongs to the device.",
        ("-dist.init_process_group("
         "dist.get_default_backend_for_device(device))",)),
    Change(
        "Just make the model",
        "Moving it to the device, making the optimizer, wrapping it in DDP: "
        "the Trainer does all three, in the order that the strategy asks for. "
        "Resuming goes to LitRun.",
        ("-raw_model = GPT(config).to(device)",)),
    Change(
        "Replace the loop by a Trainer",
        "What the loop said in forty lines the flags say now: precision, "
        "accumulation, clipping, devices, strategy. What stays yours to get "
        "right: accumulate_grad_batches counts microbatches, max_steps "
        "optimizer updates, and left out they are 1 and for ever, silently. "
        "LitRun is a callback: the Trainer calls it at each batch and each "
        "validation, and it logs the mean over the minibatch and all ranks. "
        "The DataLoaders hand on your DataIterators' microbatches as they "
        "are: without a sampler nothing is shuffled, and without workers, "
        "each of which would begin at the same sample, nothing is read "
        "twice.",
        ("-for step in range(first_step, max_steps):",
         "+trainer = L.Trainer(")),
]
