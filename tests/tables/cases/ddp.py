"""Scripts for the check of the lesson ddp."""

from cases.case import CLIP, OPTIMIZER, OWN_MEAN, RANKS, right, wrong

SYNC = "with nullcontext() if is_last_microbatch else model.no_sync():"
BACKWARD = "                loss.backward()\n"
UPDATE = "        optimizer.step()\n"
ZERO = "        optimizer.zero_grad()\n"
WRAP = ("    model = DistributedDataParallel("
        "model, gradient_as_bucket_view=True)\n")
BY_HAND = """\
        for w in raw_model.parameters():
            dist.all_reduce(w.grad)
            w.grad /= world_size
"""
LOG = """\
        if rank == 0:
            run.log(step, mean_loss, val_loss, lr, norm, seconds)
"""
SAVE = """\
        if rank == 0 and save:
            run.save(done, raw_model, optimizer)
"""
WORLD = """\
    # the names of srun); without a launcher this is a world of one.
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1",
                          MASTER_ADDR="localhost", MASTER_PORT="0")
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
"""
JOIN = "    dist.init_process_group(backend)\n"
LEAVE = "    run.finish()\n    dist.destroy_process_group()\n"
RESTORE = "    first_step = run.restore(raw_model, optimizer)\n"
SEEK = "    train_data.seek(first_step * S)\n"
OFFSET = "self.offset, self.stride = rank * B, world_size * B"
BEGIN = "self.position = i + self.offset"
MOVE = "self.position += self.stride"
COUNT = "accumulation_steps = S // samples_per_round"
OWN_WORLD = """\
    who = {key: int(os.environ.get(key, default)) for key, default in (
        ("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))}
    rank, local_rank, world_size = who.values()
"""

CASES = (
    # another stage's script
    wrong("the single-device script", "", "std"),
    wrong("the Lightning script", "trainer.fit() is called", "lit"),
    # devices
    wrong("always gloo", "is always 'gloo' (line",
          (JOIN, '    dist.init_process_group("gloo")\n')),
    # rank and world size
    wrong("SLURM's rank with a default", "",
          ('rank = int(os.environ["RANK"])',
           'rank = int(os.environ.get("SLURM_PROCID", 0))')),
    # samples
    wrong("the data not sharded at all",
          "samples of step 0: rank 0 reads 16 of them, not 8",
          ("B, T, rank, world_size):", "B, T):"), (f"        {OFFSET}\n", ""),
          (BEGIN, "self.position = i"), (MOVE, "self.position += self.B"),
          (f"B, T,\n                     {RANKS}", "B, T)\n        for split"),
          (COUNT, "accumulation_steps = S // B")),
    wrong("a part of the dataset for each rank", "samples of step 0: rank 0 "
          "reads 0 to 7, not", (f"        {OFFSET}\n", ""),
          ("T\n        self.seek(0)",
           "T\n        self.offset = rank * (self.num_samples // world_size)\n"
           "        self.stride = B\n        self.seek(0)")),
    wrong("validation not sharded", "the validation loss of step 1 is",
          (RANKS, '*((rank, world_size) if split == "train" else (0, 1)))\n'
           "        for split")),
    # model and optimizer
    wrong("DDP of a deep copy", "optimizer updates another model",
          ("import math\n", "import copy\nimport math\n"),
          ("DistributedDataParallel(model, ",
           "DistributedDataParallel(copy.deepcopy(model), ")),
    wrong("a head left out of the optimizer", "the optimizer does not update",
          (OPTIMIZER, OPTIMIZER
           + "    optimizer.param_groups[1]['params'].pop()\n")),
    # gradients
    wrong("no_sync inverted", "gradients of step 0 differ",
          (SYNC, SYNC.replace("if is", "if not is"))),
    wrong("an update every microbatch", "",
          (BACKWARD, BACKWARD + "                optimizer.step()\n")),
    wrong("the optimizer steps on rank 0 only", "rank 1 makes 0 updates",
          (UPDATE, "        if rank == 0:\n            optimizer.step()\n")),
    # what is logged
    wrong("validation goes on in the data", "the validation loss of step",
          ("    data.seek(0)\n    loss = torch.zeros(",
           "    loss = torch.zeros(")),
    # collectives
    wrong("evaluated on rank 0 only", "",
          ("if last or done % hp.eval_every == 0:",
           "if rank == 0 and (last or done % hp.eval_every == 0):")),
    # resuming and stopping
    wrong("seek left out", "samples of step 3", (SEEK, "")),
    wrong("another optimizer restored", "gradients of step 4",
          (RESTORE, "    first_step = run.restore(raw_model, "
           "raw_model.configure_optimizers(hp))\n")),
    wrong("another model restored",
          "starts from other weights than the checkpoint's",
          (RESTORE, "    other = GPT(config)\n    first_step = "
           "run.restore(other, other.configure_optimizers(hp))\n")),
    wrong("a fresh optimizer saved",
          "the checkpoint's state of the optimizer is off",
          ("run.save(done, raw_model, optimizer)", "run.save(done, "
           "raw_model, raw_model.configure_optimizers(hp))")),
    wrong("a rank that decides by itself to stop", "and a signal to rank 0: "
          "it hangs", ("        mean_loss, stop = (report", "        stop = "
                       "run.stop_requested\n        mean_loss, _ = (report")),
    # files
    wrong("all ranks write a checkpoint of their own", "rank 1 writes my.pt "
          "too", (SAVE, "        if save:\n"
                  "            torch.save(raw_model.state_dict(), run.folder "
                  "/ 'my.pt')\n" + SAVE)),
    # how it ends
    wrong("a segmentation fault", "was ended by SIGSEGV",
          ("        mean_loss = torch.zeros(", "        if step == 2:\n"
           "            import ctypes\n            ctypes.string_at(0)\n"
           "        mean_loss = torch.zeros(")),
    wrong("an endless loop", "it never reaches step 2 but keeps running",
          ("        mean_loss = torch.zeros(", "        while step == 2:\n"
           "            pass\n        mean_loss = torch.zeros(")),
    wrong("prints without end", "it prints without end",
          ("        mean_loss = torch.zeros(", "        while step == 2:\n"
           "            print('x' * 1000)\n        mean_loss = torch.zeros(")),
    right("the solution"),
    right("no no_sync", (SYNC, "with nullcontext():"),
          warns="gradients are reduced 4.0 times a step"),
    right("the group never left", (LEAVE, "    run.finish()\n"),
          warns="the process group is never"),
    right("os._exit at the end", (LEAVE, LEAVE + "    os._exit(0)\n")),
    right("require_backward_grad_sync",
          (SYNC, "model.require_backward_grad_sync = is_last_microbatch\n"
           "            if True:")),
    right("its own sampler arithmetic",
          ("samples = range(self.position, self.position + self.B)",
           "world_size = self.stride // self.B\n"
           "        per = 16 // world_size\n"
           "        done = (self.position - self.offset) // world_size\n"
           "        first = (done // per * 16 + done % per\n"
           "                 + self.offset // self.B * per)\n"
           "        samples = range(first, first + self.B)")),
    right("gradients reduced by hand", (WRAP, ""),
          (SYNC, "with nullcontext():"), (CLIP, BY_HAND + CLIP)),
    right("other print-outs", ("    for step in range(first",
                               "    print('rank', rank, 'is ready')\n"
                               "    for step in range(first")),
    right("a communication hook of its own",
          (WRAP, WRAP + "    from torch.distributed.algorithms.ddp_comm_hooks "
           "import default_hooks\n    model.register_comm_hook(None, "
           "default_hooks.allreduce_hook)\n")),
    right("ZeroRedundancyOptimizer",
          (OPTIMIZER, OPTIMIZER + "    from torch.distributed.optim import "
           "ZeroRedundancyOptimizer\n    groups = [{'params': g['params'], "
           "'weight_decay': g['weight_decay']} for g in "
           "optimizer.param_groups]\n    plain = optimizer\n"
           "    optimizer = ZeroRedundancyOptimizer(groups, "
           "optimizer_class=torch.optim.AdamW, lr=hp.learning_rate, "
           "betas=(0.9, 0.95))\n"),
          (RESTORE, "    first_step = run.restore(raw_model, plain)\n"
           "    if first_step:\n"
           "        optimizer.load_state_dict(plain.state_dict())\n"),
          (SAVE,
           "        if save:\n            optimizer.consolidate_state_dict()\n"
           "        if rank == 0 and save:\n"
           "            plain.load_state_dict(optimizer.state_dict())\n"
           "            run.save(done, raw_model, plain)\n")),
    right("torch.save by name",
          (SAVE, SAVE + "        if rank == 0 and save:\n"
           "            torch.save(obj=step, f=run.folder / 'my.pt')\n")),
    right("a log file a rank",
          (LOG, LOG + "        with open(run.folder / f'rank{rank}.log', 'a') "
           "as file:\n            print(step, file=file)\n")),
    right("activation checkpointing of the model",
          ("        return model(x, y)\n", "        if not "
           "torch.is_grad_enabled():\n            return model(x, y)\n"
           "        from torch.utils.checkpoint import checkpoint\n"
           "        return checkpoint(model, x, y, use_reentrant=False)\n")),
    right("a coding cookie",
          ('"""Train GPT-2 on many devices',
           '# -*- coding: latin-1 -*-\n"""Train GPT-2 on many devices')),
    right("device_ids of the local rank",
          ("model, gradient_as_bucket_view=True",
           "model, device_ids=[local_rank]")),
    right("nccl and set_device",
          (JOIN, "    torch.cuda.set_device(local_rank)\n"
           '    dist.init_process_group("nccl")\n')),
    right("static graph",
          ("gradient_as_bucket_view=True", "static_graph=True"),
          (SYNC, "with nullcontext():"), warns="gradients are reduced"),
    right("an unfused optimizer", (", fused=True)", ")")),
    right("zeroed before the step", (ZERO, ""),
          ("        mean_loss = torch.zeros((), device", ZERO
           + "        mean_loss = torch.zeros((), device")),
    right("fully_shard in DDP's place",
          (OPTIMIZER, "    from torch.distributed.fsdp import fully_shard\n"
           "    for part in (*raw_model.transformer.h, raw_model):\n"
           "        fully_shard(part)\n" + OPTIMIZER),
          (WRAP, ""), (SYNC, "with nullcontext():"),
          ("norm = norm.item()", "norm = norm.full_tensor().item()"),
          (SAVE, SAVE.replace("rank == 0 and ", "")),
          ("    model = compile_model(raw_model, device) if hp.compile else "
           "raw_model\n", "    model = raw_model\n    if hp.compile:\n"
           "        for block in model.transformer.h:\n"
           "            block.compile()\n"),
          warns="gradients are reduced 4.0 times a step"),
    right("a function for the mean over ranks", *OWN_MEAN),
    right("the world in another order", (WORLD, OWN_WORLD), (JOIN, """\
    dist.init_process_group(
        backend, rank=rank, world_size=world_size, init_method="env://"
        if "RANK" in os.environ else "tcp://localhost:0")
"""), (OFFSET,
       "self.offset = B * rank\n        self.stride = B * world_size")),
    right("the wrapper before the run", (WRAP, ""),
          ("    model = compile_model(raw_model, device) if hp.compile else "
           "raw_model\n", ""),
          (RESTORE, RESTORE + "    ready = raw_model\n    if hp.compile:\n"
           "        ready = compile_model(raw_model, device)\n"
           "    model = DistributedDataParallel(module=ready)\n")),
)
