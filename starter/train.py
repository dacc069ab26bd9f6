"""Train a model on many devices: one file to begin your own training with.

    python train.py                           # one process
    torchrun --nproc-per-node 4 -- train.py   # four; under SLURM: batch.sh

Replace `Rings` by your data and `Model` by your model. What a step computes
does not depend on the number of processes. A run is a folder with metrics.csv
and the newest two checkpoints; when killed, it goes on with --resume.
"""

import argparse
import math
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.utils.data import DataLoader, Dataset


class Rings(Dataset):
    """Points in the plane, and in which of three rings each one is."""

    def __init__(self, num_samples, seed):
        random = torch.Generator().manual_seed(seed)
        self.points = torch.randn(num_samples, 2, generator=random)
        self.rings = self.points.norm(dim=1).long().clamp(max=2)

    def __len__(self):
        return len(self.rings)

    def __getitem__(self, i):  # what is random here has to follow from i
        return self.points[i], self.rings[i]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 64), nn.GELU(), nn.Dropout(0.0), nn.Linear(64, 3))

    def forward(self, x, y):  # the mean loss
        return nn.functional.cross_entropy(self.layers(x).float(), y)


def shard(num_samples, steps, S, B, rank, world_size, seed):
    """This rank's microbatches of the given steps: lists of sample numbers.

    Step s trains on samples s*S to (s+1)*S - 1 of the shuffled epochs laid
    end to end, of which each leaves out what does not fill a minibatch of S
    samples. The ranks take turns, B samples at a time.
    """
    shuffled = None
    for step in steps:
        epoch, i = divmod(step, num_samples // S)
        if epoch != shuffled:
            random = torch.Generator().manual_seed(seed + epoch)
            order = torch.randperm(num_samples, generator=random)
            shuffled = epoch
        minibatch = order[i * S : (i + 1) * S].tolist()
        for begin in range(rank * B, S, world_size * B):
            yield minibatch[begin : begin + B]


def get_lr(step, args):
    """Linear warm-up, then half a cosine down to a tenth."""
    highest, warmup = args.learning_rate, args.warmup_steps
    if step < warmup:
        return highest * (step + 1) / warmup
    progress = (step - warmup) / (args.max_steps - warmup)
    return highest * (0.55 + 0.45 * math.cos(math.pi * progress))


def handle_signals(worker, handler=signal.SIG_IGN):  # of a worker
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, handler)


def open_run(folder, fixed, resume):
    """(problem, the checkpoint to go on from), or None for either."""
    if not resume and (folder / "metrics.csv").exists():
        return f"{folder} exists: add --resume, or name another --run", None
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "finished").unlink(missing_ok=True)
    files = sorted(folder.glob("checkpoints/step_*.pt"), reverse=True)
    for file in files:
        try:
            before = torch.load(file, weights_only=True)["fixed"]
            if before == fixed:  # else other samples would follow
                return None, file
            return f"{folder} was started with {before}", None
        except Exception as error:  # a damaged file raises many kinds
            print(f"warning: {file} is damaged: {type(error).__name__}")
    return f"{folder} is damaged: start another" if files else None, None


@contextmanager
def written(file):
    """Opens a file to be written as a whole, or else left as it is."""
    with open(file.with_suffix(".part"), "wb") as part:
        yield part
        part.flush()
        os.fsync(part.fileno())
    os.replace(part.name, file)


def open_metrics(file, first_step):
    """metrics.csv, cut back to the rows before the first step."""
    columns = "step,loss,val_loss,lr,norm,seconds,samples_per_second"
    rows = file.read_text().splitlines() if first_step else [columns]
    with written(file) as part:
        part.writelines(f"{row}\n".encode() for row in rows[: first_step + 1])
    return open(file, "a")


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fp32", action="store_true", help="not bf16")
    for name, value in {
            "run": "run", "max-steps": 500, "warmup-steps": 20, "seed": 1337,
            "minibatch-size": 96, "microbatch-size": 8, "learning-rate": 3e-3,
            "workers": 0, "eval-every": 50, "checkpoint-every": 50}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


def main():
    args, stops, env = parse(), [], os.environ
    if "RANK" not in env and int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        env.update(RANK=env["SLURM_PROCID"], LOCAL_RANK=env["SLURM_LOCALID"],
                   WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"])  # and see batch.sh
    elif "RANK" not in env:  # no launcher: one process
        env.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1",
                   MASTER_ADDR="localhost", MASTER_PORT="0")
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    device = torch.accelerator.current_accelerator(check_available=True)
    if device:
        device = torch.device(device.type, int(env["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    backend = dist.get_default_backend_for_device(device or "cpu")
    dist.init_process_group(backend, device_id=device)
    device = device or torch.device("cpu")
    def require(condition, problem):  # all ranks: rank 0 says the problem
        if not condition:
            os.write(2, f"error: {problem}\n".encode() * (rank == 0))
            os._exit(1)
    S, B = args.minibatch_size, args.microbatch_size
    round_size = B * world_size  # a microbatch on every rank
    require(S % round_size == 0, f"a minibatch of {S} samples is not "
            f"divisible by {round_size}: change --microbatch-size, or "
            "--minibatch-size")
    train_data, val_data = Rings(10_000, seed=0), Rings(1_000, seed=1)
    require(S <= min(len(train_data), len(val_data)),
            f"one split has less than a minibatch of {S} samples")
    torch.manual_seed(args.seed)  # the same initial weights on all ranks
    model = Model().to(device)
    model = nn.parallel.DistributedDataParallel(model)
    # FSDP: [fully_shard(part) for part in (*model.layers, model)]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    folder, fixed = Path(args.run), {"minibatch_size": S, "seed": args.seed}
    message = [open_run(folder, fixed, args.resume) if rank == 0 else None]
    dist.broadcast_object_list(message)  # all go on from the same file
    (problem, file), first_step = message[0], 0
    require(not problem, problem)
    whole = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    if file:
        saved = torch.load(file, weights_only=True)
        first_step = saved["step"]
        names = state_dict.get_model_state_dict(model).keys()
        require(names == saved["model"].keys(),
                f"{file} is of another model: name another --run")
        state_dict.set_model_state_dict(model, saved["model"], options=whole)
        whole.strict = False  # who had no gradient yet has no state
        if saved["optimizer"]["state"]:  # plain SGD has none at all
            state_dict.set_optimizer_state_dict(
                model, optimizer, saved["optimizer"], options=whole)
    if rank == 0:
        metrics = open_metrics(folder / "metrics.csv", first_step)
    def load(data, steps):
        return DataLoader(
            data, num_workers=args.workers, worker_init_fn=handle_signals,
            pin_memory=device.type == "cuda", batch_sampler=shard(
                len(data), steps, S, B, rank, world_size, args.seed))
    def compute_loss(batch):
        x, y = (part.to(device, non_blocking=True) for part in batch)
        with torch.autocast(device.type, torch.bfloat16, not args.fp32):
            return model(x, y)  # the wrapper, which reduces the gradients
    @torch.no_grad()
    def evaluate(batches):  # all ranks, each with as many microbatches
        model.eval()
        loss = torch.stack([compute_loss(batch) for batch in batches]).mean()
        dist.all_reduce(loss)  # the sum over all ranks
        model.train()
        return loss.item() / world_size
    handle_signals(None, lambda number, frame: stops.append(number))
    steps = range(first_step, args.max_steps)
    batches = iter(load(train_data, steps))
    for step in steps:
        start_time = time.perf_counter()
        torch.manual_seed(hash((args.seed, step, rank)))  # for dropout
        for group in optimizer.param_groups:  # all at one rate
            group["lr"] = lr = get_lr(step, args)
        report = torch.tensor([0.0, len(stops)], device=device)
        for begin in range(0, S, round_size):
            # gradients are reduced once a step, as with no_sync()
            model.require_backward_grad_sync = begin + round_size == S
            # FSDP: model.set_requires_gradient_sync(begin + round_size == S)
            loss = compute_loss(next(batches)) * round_size / S
            loss.backward()  # adds up gradients: of means over the minibatch
            report[0] += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # FSDP: norm = norm.full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(report)  # the sum over all ranks
        (loss, stop), norm = (report / world_size).tolist(), norm.item()
        seconds = time.perf_counter() - start_time
        require(math.isfinite(loss + norm), f"step {step}: the loss is {loss}"
                f" and the norm {norm}: try a lower --learning-rate")
        last, val_loss = step + 1 == args.max_steps, ""
        if last or (step + 1) % args.eval_every == 0:
            val_loss = evaluate(load(val_data, range(len(val_data) // S)))
        if rank == 0:
            with suppress(BrokenPipeError):  # Ctrl-C ends `| tee log`, too
                print(f"| step {step:4d}/{args.max_steps} | loss {loss:.6f} | "
                      f"lr: {lr:.4e} | norm: {norm:.4f} | dt: "
                      f"{1000 * seconds:6.1f} ms | samples/s: "
                      f"{S / seconds:,.0f} |"
                      + " stopped by a signal" * bool(stop), flush=True)
            print(step, loss, val_loss, lr, norm, seconds, S / seconds,
                  sep=",", file=metrics, flush=True)
        if last or stop or (step + 1) % args.checkpoint_every == 0:
            weights, optim_state = state_dict.get_state_dict(  # all ranks
                model, optimizer, options=whole)
            if rank == 0:
                os.fsync(metrics.fileno())  # its rows are there before
                file = folder / f"checkpoints/step_{step + 1:08d}.pt"
                with written(file) as part:
                    torch.save({"step": step + 1, "fixed": fixed, "model":
                                weights, "optimizer": optim_state}, part)
                for old in sorted(folder.glob("checkpoints/*.pt"))[:-2]:
                    old.unlink()
        if stop:
            break
    else:
        (folder / "finished").touch()  # for batch.sh
    dist.barrier()  # who leaves early can make another abort


if __name__ == "__main__":
    status = 1
    try:
        main()
        status = 0
    except Exception:
        sys.excepthook(*sys.exc_info())
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(status)  # Python's own clean-up may wait for a worker, or gloo
