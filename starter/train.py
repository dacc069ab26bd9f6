"""Train a model on many devices: one file to begin your own training with.

    python train.py                           # one process
    torchrun --nproc-per-node 4 train.py      # four; under SLURM: batch.sh

Replace `Rings` with your data and `Model` with your model. What a step
computes does not depend on the number of processes. A run is a folder with
metrics.csv and the newest two checkpoints; when killed, it goes on with
--resume.
"""

import argparse
import fcntl
import math
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.utils.data import DataLoader, Dataset

COLUMNS = "step,loss,val_loss,lr,norm,seconds,samples_per_second"


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


def compute_loss(model, batch, device, args):
    x, y = (part.to(device, non_blocking=True) for part in batch)
    with torch.autocast(device.type, torch.bfloat16, not args.fp32):
        return model(x, y)  # the wrapper, which reduces the gradients


def shard(num_samples, steps, S, B, rank, world_size, seed):
    """This rank's microbatches of the given steps: lists of sample numbers.

    Step s trains on samples s*S to (s+1)*S - 1 of the shuffled epochs, each
    without an incomplete minibatch. The ranks take turns, B samples at a time.
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


def load(data, steps, args, device):
    """A loader of this rank's microbatches of the given steps."""
    return DataLoader(
        data, num_workers=args.workers, worker_init_fn=handle_signals,
        pin_memory=device.type == "cuda", batch_sampler=shard(
            len(data), steps, args.minibatch_size, args.microbatch_size,
            dist.get_rank(), dist.get_world_size(), args.seed))


def require(condition, problem):
    """End all ranks, rank 0 with a line, unless the condition holds."""
    if not condition:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"error: {problem}", file=sys.stderr, flush=True)
        os._exit(1)


def join(env=os.environ):
    """Join the processes that a launcher has started; returns the device."""
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE"
    launched = env.keys() & {*names}
    if not launched and env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        env.update({name: env.get(f"SLURM_{theirs}", "") for name, theirs in (
            ("RANK", "PROCID"), ("LOCAL_RANK", "LOCALID"),
            ("WORLD_SIZE", "STEP_NUM_TASKS"))})  # and see batch.sh
    elif not launched:  # one process
        env.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1",
                   MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    numbers = [env.get(name, "") for name in (*names, "MASTER_PORT")]
    require(all(number.isdecimal() and len(number) < 10 for number in numbers)
            and env.get("MASTER_ADDR") and int(numbers[0]) < int(numbers[2]),
            "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is not "
            "set, or wrong; fix: start this with torchrun, or unset them all")
    if env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]:  # on one node
        env["MASTER_ADDR"] = "127.0.0.1"  # its name may lead nowhere
    device = torch.accelerator.current_accelerator(check_available=True)
    if device:
        device = torch.device(device.type, int(env["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    backend = dist.get_default_backend_for_device(device or "cpu")
    dist.init_process_group(backend, device_id=device)
    dist.barrier()  # one that ends now, for a wrong flag, disturbs none
    return device or torch.device("cpu")


def handle_signals(worker, handler=signal.SIG_IGN):  # of a worker
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT,
                   signal.SIGXCPU):  # of `ulimit -t`
        signal.signal(number, handler)


def open_run(folder, fixed, resume):
    """The run's checkpoints, oldest first, and a problem. Rank 0 alone."""
    metrics, checkpoints = folder / "metrics.csv", folder / "checkpoints"
    try:
        if not resume and (metrics.exists() or checkpoints.exists()):
            return [], (f"{folder} exists; fix: add --resume, or choose "
                        "another --run-dir")
        ours = metrics.exists() or any(checkpoints.glob("step_????????.pt"))
        for name in "finished", "metrics.part", "checkpoints/unfinished":
            if (folder / name).exists() and not ours:
                return [], f"{folder / name} belongs to another program"
        checkpoints.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:  # until this process ends; its workers do not have the lock
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return [], f"{folder}: another process is training in this run"
        except OSError:  # this file system has no locks
            pass
        os.listdir(checkpoints)  # an error, where glob would find nothing
        metrics.touch()
        if metrics.read_bytes()[: len(COLUMNS)] not in (b"", COLUMNS.encode()):
            return [], f"{metrics} belongs to another program"
    except OSError as error:
        return [], f"{error.filename}: {error.strerror}"
    files, ours = sorted(checkpoints.glob("step_????????.pt")), []
    for file in files:
        try:
            before = torch.load(file, weights_only=True)["fixed"]
            ours.append(file)
        except Exception as error:  # a damaged file raises many kinds
            print(f"warning: {file} is corrupt: {type(error).__name__}")
    if files and not ours:
        return [], f"{folder} is corrupt; fix: choose another --run-dir"
    if ours and before != fixed:  # else other samples would follow
        return [], f"{folder} was started with {before}"
    (folder / "finished").unlink(missing_ok=True)
    return ours, None


def restore(file, model, optimizer):
    """Load a checkpoint; returns the number of its step. All ranks."""
    saved = torch.load(file, weights_only=True)
    names = state_dict.get_model_state_dict(model).keys()
    require(names == saved["model"].keys(),
            f"{file} is of a different model; fix: choose another --run-dir")
    whole = state_dict.StateDictOptions(full_state_dict=True)
    state_dict.set_model_state_dict(model, saved["model"], options=whole)
    whole.strict = False  # a parameter without a gradient yet has no state
    if saved["optimizer"]["state"]:  # plain SGD has none at all
        state_dict.set_optimizer_state_dict(
            model, optimizer, saved["optimizer"], options=whole)
    return saved["step"]


def save(folder, step, fixed, model, optimizer, files):
    """Write a checkpoint, and keep the newest two of `files`. All ranks."""
    weights, optim_state = state_dict.get_state_dict(  # whole, also with FSDP
        model, optimizer, options=state_dict.StateDictOptions(
            full_state_dict=True, cpu_offload=True))
    files.append(folder / f"checkpoints/step_{step:08d}.pt")
    if dist.get_rank() == 0:
        with open(folder / "checkpoints/unfinished", "wb") as part:
            torch.save({"step": step, "fixed": fixed, "model": weights,
                        "optimizer": optim_state}, part)
            part.flush()
            os.fsync(part.fileno())
        os.replace(part.name, files[-1])  # a file is there as a whole, or not
        for old in files[:-2]:
            old.unlink(missing_ok=True)
    del files[:-2]


def open_metrics(file, first_step):
    """Open metrics.csv, cut back to the rows before the first step.

    If that drops any, a copy of the file is kept, with the date in its name.
    Of rows that are not there it warns.
    """
    header, *lines = file.read_bytes().splitlines() or [COLUMNS.encode()]
    rows = {line.split(b",")[0]: line for line in lines}
    steps = [b"%d" % step for step in range(first_step)]
    kept = [rows[step] for step in steps if step in rows]
    if lost := first_step - len(kept):
        print(f"warning: {file} lacks {lost} of the steps 0 to "
              f"{first_step - 1}", flush=True)
    if kept != lines:
        while (copy := file.with_name(time.strftime(
                "metrics.%Y%m%d-%H%M%S.csv"))).exists():
            time.sleep(0.1)  # until the next second
        copy.write_bytes(file.read_bytes())
        print(f"continuing at step {first_step}" if first_step else
              f"warning: no step_*.pt in {file.parent}/checkpoints, starting "
              "at step 0", f"the previous {file.name} is {copy.name}",
              sep="; ", flush=True)
    with open(file.with_suffix(".part"), "wb") as part:
        part.write(b"\n".join([header, *kept, b""]))
        part.flush()
        os.fsync(part.fileno())
    os.replace(part.name, file)
    return open(file, "a")


def get_lr(step, args):
    """Linear warm-up, then half a cosine down to a tenth."""
    highest, warmup = args.learning_rate, args.warmup_steps
    if step < warmup:
        return highest * (step + 1) / warmup
    progress = (step - warmup) / (args.max_steps - warmup)
    return highest * (0.55 + 0.45 * math.cos(math.pi * progress))


def train_step(model, optimizer, batches, args, device):
    """Make one update; returns this rank's mean loss, and the norm."""
    S = args.minibatch_size
    round_size = args.microbatch_size * dist.get_world_size()
    total = torch.zeros((), device=device)
    for begin in range(0, S, round_size):
        # gradients are reduced once a step, as with no_sync()
        model.require_backward_grad_sync = begin + round_size == S
        # FSDP: model.set_requires_gradient_sync(begin + round_size == S)
        loss = compute_loss(model, next(batches), device, args)
        loss = loss * round_size / S  # gradients of the minibatch's mean
        loss.backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    # FSDP: norm = norm.full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    return total, norm.item()


@torch.no_grad()
def evaluate(model, data, args, device):
    """The mean loss of the data's whole minibatches. All ranks."""
    model.eval()
    steps = range(len(data) // args.minibatch_size)
    losses = [compute_loss(model, batch, device, args)
              for batch in load(data, steps, args, device)]
    model.train()
    loss = torch.stack(losses).mean()
    dist.all_reduce(loss)  # the sum over all ranks
    return loss.item() / dist.get_world_size()


def log(metrics, args, step, loss, val_loss, lr, norm, seconds, stop):
    """Print a line, and add a row to metrics.csv. Rank 0 alone."""
    speed = args.minibatch_size / seconds
    ending = " stopped by a signal" if stop else ""
    with suppress(OSError):  # Ctrl-C ends `| tee log`, too; or it is full
        print(f"| step {step:4d}/{args.max_steps} | loss {loss:.6f} | "
              f"lr: {lr:.4e} | norm: {norm:.4f} | dt: {1000 * seconds:6.1f} "
              f"ms | samples/s: {speed:,.0f} |{ending}", flush=True)
    print(step, loss, val_loss, lr, norm, seconds, speed, sep=",",
          file=metrics, flush=True)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fp32", action="store_true", help="not bf16")
    for name, value in {
            "run-dir": "run", "max-steps": 500, "warmup-steps": 20,
            "minibatch-size": 96, "microbatch-size": 8, "learning-rate": 3e-3,
            "workers": 0, "eval-every": 50, "checkpoint-every": 50,
            "seed": 1337}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.error = lambda problem: require(
        False, f"{problem}; fix: see --help")
    return parser.parse_args()


def check(args, smallest):
    """Name a flag that does not fit. smallest: of the splits. All ranks."""
    for name, value in vars(args).items():
        if type(value) in (int, float):
            least = name not in (
                "seed", "workers", "warmup_steps", "learning_rate")
            require(least <= value < 2**31, f"--{name.replace('_', '-')} must "
                    f"be {least:d} or more, and less than 2**31")
    S = args.minibatch_size
    round_size = args.microbatch_size * dist.get_world_size()
    require(S % round_size == 0, f"{S} is not divisible by {round_size}; fix: "
            "change --microbatch-size or --minibatch-size")
    require(S <= smallest, f"one split has fewer than {S} samples")


def main():
    device, args = join(), parse()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_data, val_data = Rings(10_000, seed=0), Rings(1_000, seed=1)
    check(args, min(len(train_data), len(val_data)))

    torch.manual_seed(args.seed)  # the same initial weights on all ranks
    model = Model().to(device)
    model = nn.parallel.DistributedDataParallel(model)
    # FSDP: [fully_shard(part) for part in (*model.layers, model)]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)

    folder = Path(args.run_dir).expanduser()
    fixed = {"minibatch_size": args.minibatch_size, "seed": args.seed}
    found = [open_run(folder, fixed, args.resume) if rank == 0 else None]
    dist.broadcast_object_list(found)  # all go on from the same file
    files, problem = found[0]
    require(problem is None, problem)
    first_step = restore(files[-1], model, optimizer) if files else 0
    if rank == 0:
        metrics = open_metrics(folder / "metrics.csv", first_step)

    signals = []
    handle_signals(None, lambda number, frame: signals.append(number))
    steps = range(first_step, args.max_steps)
    batches = iter(load(train_data, steps, args, device))
    for step in steps:
        start_time = time.perf_counter()
        torch.manual_seed(hash((args.seed, step, rank)))  # for dropout
        lr = get_lr(step, args)
        for group in optimizer.param_groups:  # all at one rate
            group["lr"] = lr
        loss, norm = train_step(model, optimizer, batches, args, device)
        report = torch.stack([loss, torch.full_like(loss, len(signals))])
        dist.all_reduce(report)  # the sum over all ranks
        loss, stop = (report / world_size).tolist()
        seconds = time.perf_counter() - start_time
        require(math.isfinite(loss) and math.isfinite(norm),
                f"step {step}: the loss is {loss} and the norm {norm}; fix: "
                "use a lower --learning-rate")

        done = step + 1
        last, val_loss = done == args.max_steps, ""
        if last or done % args.eval_every == 0:
            val_loss = evaluate(model, val_data, args, device)
        if rank == 0:
            (folder / "training").touch()  # for batch.sh
            log(metrics, args, step, loss, val_loss, lr, norm, seconds, stop)
        if last or stop or done % args.checkpoint_every == 0:
            if rank == 0:
                os.fsync(metrics.fileno())  # its rows are there before
            save(folder, done, fixed, model, optimizer, files)
        if stop:
            break
    else:
        (folder / "finished").touch()  # for batch.sh
    dist.barrier()  # who leaves early can make another abort


if __name__ == "__main__":
    sys.stdout = sys.stdout or open(os.devnull, "w")  # cron may close it
    status = 1
    try:
        main()
        status = 0
    except Exception:
        sys.excepthook(*sys.exc_info())
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(status)  # Python's own clean-up may wait for a worker, or gloo
