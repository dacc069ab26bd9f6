"""Does a script compute what the single-device stage computes?

`python -m workshop check ddp` runs the script on the desk as 1, 2 and 4
processes (four as if on two nodes) for a few steps of preset tiny, in fp32 on
the CPU, and compares with `solutions/train_gpt2_std.py`: contract 1 of the
course. Then it sends a signal, as SLURM does. The script needs nothing for
it: its processes are watched from outside, by an `Observer`.
"""

import ast
import csv
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from workshop import ROOT, vocabulary
from workshop.errors import UserError
from workshop.ranks import Launch

DESK = ROOT / "code" / "train_gpt2.py"
STEPS, MINIBATCH, B, T = 6, 16, 2, 32
SAMPLES = 40  # in the dataset: an epoch ends within step 2
LOSS, NORM, GRADIENT = 1e-5, 1e-4, 1e-3  # relative
LEARNING_RATE = 3e-3  # its maximum; weights agree to 0.02 of it, absolutely
FLAGS = ("--preset", "tiny", "--device", "cpu", "--precision", "fp32",
         "--no-compile", "--max-steps", STEPS, "--minibatch-size", MINIBATCH,
         "--microbatch-size", B, "--sequence-length", T,
         "--learning-rate", LEARNING_RATE, "--eval-every", 3,
         "--eval-minibatches", 2, "--generate-every", STEPS,
         "--checkpoint-every", 3)


# ------------------------------------------------------- watching a process


class Observer:
    """Records what a process of a stage does, through global hooks of torch.

    At its end there is `folder/<rank>.pt`, a dictionary with

        start      the weights before the first update, float32 (P,)
        weights    after the last, float32 (P,)
        gradients  at each update (clipped), list of float32 (P,)
        samples    that went through the model before each update, list of
                   lists of their first tokens, which are their numbers
        reduced    elements that were all-reduced in all
        precision  "bf16" under autocast, "fp32" without
        written    files in the run's folder that it opened to write them,
                   and files of torch.save anywhere

    terminated: the rank, if any, that gets a SIGTERM in its second step.
    """

    def __init__(self, folder, run, terminated=None):
        self.folder, self.run = str(folder), str(run)
        self.terminated = terminated

    def __call__(self, rank):
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self.rank, self.model, self.pending = rank, None, []
        self.seen = {"start": None, "weights": None, "gradients": [],
                     "samples": [], "reduced": 0, "written": []}
        register_module_forward_pre_hook(self.on_forward)
        register_optimizer_step_pre_hook(self.before_update)
        register_optimizer_step_post_hook(self.after_update)
        self.watch_reductions()
        sys.addaudithook(self.on_event)
        save = torch.save

        def visible_save(state, file, *args, **kwargs):
            if isinstance(file, (str, Path)):  # not opened by Python
                self.seen["written"].append(str(file))
            save(state, file, *args, **kwargs)

        def finish():
            save(self.seen, f"{self.folder}/{rank}.pt")

        torch.save = visible_save
        return finish

    def on_forward(self, module, inputs):
        if type(module).__name__ == "GPT" and self.model is None:
            self.model = module
            self.seen["start"] = self.flat("data")
        tokens = inputs[0] if inputs else None
        if (isinstance(module, torch.nn.Embedding) and tokens.dim() == 2
                and torch.is_grad_enabled()):
            self.pending += tokens[:, 0].tolist()
            self.seen["precision"] = (
                "bf16" if torch.is_autocast_enabled("cpu") else
                "fp32" if module.weight.dtype == torch.float32 else
                f"weights of {module.weight.dtype}")

    def before_update(self, optimizer, args, kwargs):
        closure = kwargs.get("closure") or (args[1] if args[1:] else None)
        if closure is None:
            self.record()
            return None

        def visible_closure():  # Lightning's: it computes the gradients
            loss = closure()
            self.record()
            return loss

        return args[:1], {"closure": visible_closure}

    def record(self):
        self.seen["gradients"].append(self.flat("grad"))
        self.seen["samples"].append(self.pending)
        self.pending = []

    def after_update(self, optimizer, args, kwargs):
        self.seen["weights"] = self.flat("data")
        if self.rank == self.terminated and len(self.seen["samples"]) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def flat(self, name):
        """The model's weights ("data") or gradients ("grad") as one vector."""
        if self.model is None:
            return torch.zeros(0)
        parts = []
        for weight in self.model.parameters():
            part = getattr(weight, name)
            part = torch.zeros_like(weight) if part is None else part
            parts.append(part.detach().float().flatten())
        return torch.cat(parts)

    def watch_reductions(self):
        """Count what DDP reduces, and what the script reduces itself."""
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.nn.parallel import DistributedDataParallel

        init, all_reduce = DistributedDataParallel.__init__, dist.all_reduce

        def visible_init(ddp, *args, **kwargs):
            init(ddp, *args, **kwargs)  # whose own reduction is not Python's
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)

        def counting_all_reduce(tensor, *args, **kwargs):
            self.seen["reduced"] += tensor.numel()
            return all_reduce(tensor, *args, **kwargs)

        DistributedDataParallel.__init__ = visible_init
        dist.all_reduce = counting_all_reduce

    def on_event(self, event, args):
        if event == "open" and isinstance(args[0], str):
            path, flags = args[0], args[2] or 0
            if flags & (os.O_WRONLY | os.O_RDWR) and self.run in path:
                self.seen["written"].append(path)


@dataclass
class Trial:
    """What came of one start of a script as `world_size` processes."""

    world_size: int
    ranks: list  # of workshop.ranks.Rank
    seen: list  # of an Observer's dictionaries, None where there is none
    rows: list = field(default_factory=list)  # of metrics.csv
    state: dict | None = None  # the last checkpoint
    seconds: float = 0.0

    @property
    def accumulation(self):
        return MINIBATCH // (B * self.world_size)


def make_dataset(folder):
    """40 samples of 32 tokens, the first of each being its number."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(SAMPLES, 128, SAMPLES * T + 1)
    tokens[:-1:T] = np.arange(SAMPLES)
    tokens[1::2] = tokens[0:-1:2] % (128 - SAMPLES) + SAMPLES  # to be learnt
    np.save(folder / "check_train_000001.npy", tokens.astype(np.uint16))
    np.save(folder / "check_val_000000.npy", tokens[::-1].astype(np.uint16))
    import tiktoken

    vocabulary.save(tiktoken.Encoding(
        "check", pat_str=r"[\s\S]",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={vocabulary.END_OF_TEXT: 256}), folder)


def try_out(name, script, folder, world_size, timeout, *flags, plain=False,
            terminated=None):
    """Run a script under observation, with more flags: a `Trial`."""
    run, observed = folder / name, folder / f"{name}-seen"
    observed.mkdir()
    begin = time.monotonic()
    launch = Launch(
        script, *FLAGS, "--data", folder / "data", "--run", run,
        *flags, world_size=None if plain else world_size,
        nodes=2 if world_size == 4 else 1,
        observe=Observer(observed, run, terminated), env=quiet_environment())
    trial = Trial(world_size, launch.wait(timeout), [])
    trial.seconds = time.monotonic() - begin
    for rank in range(world_size):
        file = observed / f"{rank}.pt"
        trial.seen.append(torch.load(file) if file.exists() else None)
    if (run / "metrics.csv").exists():
        with open(run / "metrics.csv", newline="") as file:
            trial.rows = list(csv.DictReader(file))
    files = sorted(run.glob("checkpoints/step_*.pt"))
    if files:
        trial.state = torch.load(files[-1], weights_only=True)
    return trial


def quiet_environment():
    """The environment, without a launcher's variables and the GPUs."""
    hidden = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE",
              "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in os.environ.items()
            if key not in hidden} | {"CUDA_VISIBLE_DEVICES": ""}


# ----------------------------------------------------------------- judging


@dataclass
class Finding:
    """The answer to one question: verdict is "ok", "warn" or "FAIL"."""

    verdict: str
    text: str
    hint: str = ""


def judge(trial, reference):
    """The findings about a trial, causes before their effects."""
    findings = []
    for question in (how_it_ended, samples, first_weights, rates, gradients,
                     norms, reductions, losses, validation, weights, writers,
                     texts, checkpoint):
        finding = question(trial, reference)
        if finding:
            findings.append(finding)
        if question is how_it_ended and finding.verdict == "FAIL":
            break
    return findings


def ok(text):
    return Finding("ok", text)


def fail(text, hint=""):
    return Finding("FAIL", text, hint)


def how_it_ended(trial, reference):
    late = [r for r, rank in enumerate(trial.ranks) if rank.status is None]
    bad = [r for r, rank in enumerate(trial.ranks) if rank.status]
    if bad:
        # the last line of an exception or of our own error; a lost connection
        # is what the other ranks saw of it
        lines = {r: last_words(trial.ranks[r].err) for r in bad}
        rank = min(lines, key=lambda r: "lost the other" in lines[r])
        hint = "the first error is the one to mend"
        if "holds a run already" in lines[rank]:
            hint = ("each process takes itself for the only one: "
                    "`python -m workshop diff` shows what is left to change")
        if "collective" in lines[rank] or "rank 0 alone" in lines[rank]:
            hint = "guard it with `if rank == 0:`"
            if trial.world_size == 4 and rank == 2:  # of the second node
                hint += ", by RANK: every node has a local rank 0"
        return fail(f"rank {rank} ended with an error: {lines[rank]}", hint)
    if late:
        return fail(
            f"it hangs: {places(trial, late)}",
            "all ranks have to call a collective (all_reduce, barrier, ...) "
            "as often and in the same order: none inside `if rank == 0:`")
    if len(trial.rows) < STEPS:
        return fail(f"it ended after {len(trial.rows)} of {STEPS} steps "
                    "without an error", "look for an early return or exit")
    return ok(f"it runs to its end ({trial.seconds:.0f} s)")


def last_words(err):
    """The line of an error output that says what happened."""
    lines = [line for line in err.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("error")]
    if ours:
        return ours[-1].split(": ", 1)[1]
    script = [line for line in lines if re.match(r'  File ".*train_', line)]
    where = re.search(r"line \d+", script[-1]) if script else None
    words = lines[-1] if lines else "no message"
    return f"{words} ({where[0]})" if where else words


def places(trial, late):
    """Where the ranks are, from the stacks that they left."""
    texts = []
    for r, rank in enumerate(trial.ranks):
        if r not in late:
            texts.append(f"rank {r} has ended")
            continue
        stack = re.findall(r'File "(.*)", line (\d+) in (\w+)', rank.err)
        inside = stack[0][2] if stack else "?"
        lines = [line for file, line, _ in stack
                 if Path(file).name.startswith("train_")]
        inside = next((name for file, _, name in stack
                       if file.endswith("distributed_c10d.py")
                       and name not in ("wrapper",)), inside)
        line = f" in line {lines[0]}" if lines else ""
        texts.append(f"rank {r} waits{line} ({inside})")
    return ", ".join(texts)


def samples(trial, reference):
    """Each step reads its minibatch, each sample once."""
    for step in range(STEPS):
        expected = reference.seen[0]["samples"][step]
        read = [seen["samples"][step] for seen in trial.seen]
        together = sorted(i for part in read for i in part)
        if together == sorted(expected):
            continue
        said = "; ".join(f"rank {r}: {shorten(part)}"
                         for r, part in enumerate(read))
        text = (f"samples of step {step} are not {min(expected)} to "
                f"{max(expected)}, each once ({said})")
        if len(together) > len(expected) * 1.5:
            hint = ("more samples than a minibatch: accumulation_steps has "
                    "to be divided by the world size")
        elif len(together) < len(expected):
            hint = ("fewer samples than a minibatch: is accumulation_steps "
                    "divided by the world size twice, or not given to the "
                    "Trainer as accumulate_grad_batches?")
        elif len(read) > 1 and all(part == read[0] for part in read):
            hint = ("all ranks read the same samples: pass this process's "
                    "rank and the world size to DataIterator")
        elif len(set(together)) < len(together):
            hint = ("the ranks' samples overlap: rank r starts at r * B and "
                    "goes on world_size * B further")
        else:
            hint = ("these are another step's samples: look where each rank "
                    "starts, and how far it goes on")
        return fail(text, hint)
    return ok("each step reads its minibatch, each sample once")


def shorten(numbers):
    shown = ", ".join(map(str, numbers[:8]))
    return shown + (", ..." if len(numbers) > 8 else "")


def first_weights(trial, reference):
    for r, seen in enumerate(trial.seen):
        if not torch.equal(seen["start"], reference.seen[0]["start"]):
            return fail(
                f"rank {r} starts from other weights",
                "the ranks have to start from the same weights: the same "
                "seed on every rank, and DDP's broadcast left on")
    return ok("every rank starts from the same weights")


def gradients(trial, reference):
    """Equal on all ranks, and the reference's, at every step."""
    for step in range(STEPS):
        parts = [seen["gradients"][step] for seen in trial.seen]
        for r, part in enumerate(parts[1:], 1):
            if relative(part, parts[0]) > 1e-6:
                return fail(
                    f"gradients of step {step} differ between rank 0 and "
                    f"rank {r}", unsynchronised(trial))
        error = relative(parts[0], reference.seen[0]["gradients"][step])
        if error > GRADIENT:
            return fail(
                f"gradients of step {step} are off by {error:.0%}",
                wrong_scale(trial, reference) or "gradients have to be the "
                "mean over the minibatch: look at what the loss is divided "
                "by, and when gradients are reduced and zeroed")
    return ok("gradients are the single device's, on every rank")


def unsynchronised(trial):
    if trial.seen[0]["reduced"] < len(trial.seen[0]["start"]):
        return ("gradients are never reduced: call the DDP wrapper "
                "(`model`), not the raw model, for the loss")
    return ("gradients are reduced, but not all of them: the last "
            "microbatch must be outside no_sync()")


def relative(a, b):
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


def wrong_scale(trial, reference):
    """A hint where all norms are too large or small by one whole factor."""
    ratios = [number(row, "norm") / number(good, "norm") for row, good in
              zip(trial.rows[:1], reference.rows[:1], strict=True)]
    ratio = ratios[0]
    A, W = trial.accumulation, trial.world_size
    causes = {  # of equal factors the last counts
        1 / (A * W): "the loss is divided by accumulation_steps and by the "
                     "world size once too often",
        1 / A: "the loss is divided by accumulation_steps twice",
        A: "the loss is not divided by accumulation_steps",
        1 / W: "the loss is divided by the world size, though DDP takes the "
               "mean over ranks itself",
        W: "gradients are summed over ranks: they have to be averaged",
    }
    for factor, cause in causes.items():
        if factor != 1 and abs(ratio / factor - 1) < 0.01:
            return f"{cause} (norm is {ratio:.3g} times what it should be)"
    return ""


def number(row, column):
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError):
        return float("nan")


def agree(trial, reference, column, tolerance):
    """The first step at which a column differs, and the largest difference.
    """
    first, largest = None, 0.0
    for step in range(STEPS):
        good = number(reference.rows[step], column)
        value = number(trial.rows[step], column)
        if np.isnan(good) and np.isnan(value):
            continue
        error = abs(value - good) / abs(good)
        largest = max(largest, error)
        if not error <= tolerance and first is None:
            first = step
    return first, largest


def norms(trial, reference):
    step, largest = agree(trial, reference, "norm", NORM)
    if step is None:
        return ok(f"gradient norms agree (to {largest:.0e})")
    return fail(
        f"the gradient norm of step {step} is "
        f"{number(trial.rows[step], 'norm'):.4f}, not "
        f"{number(reference.rows[step], 'norm'):.4f}",
        wrong_scale(trial, reference) or "it is to be the norm of the "
        "reduced gradient, before clipping")


def reductions(trial, reference):
    """How often each gradient is all-reduced in a step."""
    if trial.world_size == 1:
        return None
    parameters = len(reference.seen[0]["start"])
    times = max(seen["reduced"] for seen in trial.seen) / parameters / STEPS
    if times < 1.5:
        return ok(f"gradients are reduced {times:.1f} times a step")
    return Finding(
        "warn", f"gradients are reduced {times:.1f} times a step: right, but "
        f"{times:.0f} times the communication",
        "once is enough: all microbatches but the last under "
        "`model.no_sync()`")


def losses(trial, reference):
    step, largest = agree(trial, reference, "loss", LOSS)
    if step is None:
        return ok(f"losses agree at every step (to {largest:.0e})")
    value = number(trial.rows[step], "loss")
    good = number(reference.rows[step], "loss")
    text = f"the logged loss of step {step} is {value:.6f}, not {good:.6f}"
    W = trial.world_size
    if step == 0 and W > 1:
        for factor, cause in (
                (1 / W, "divided by the world size, but not summed over "
                        "ranks: all_reduce it"),
                (W, "summed over ranks: divide it by the world size")):
            if abs(value / good / factor - 1) < 0.05:
                return fail(text, f"it is {cause}")
    if step == 0 and abs(value / good - 1) < 0.2:
        return fail(text, "it is rank 0's own loss, or one microbatch's: "
                    "the mean over the whole minibatch and all ranks has to "
                    "be logged" + (" (all_reduce it)" if W > 1 else ""))
    return fail(text, "the loss is the mean over the whole minibatch and "
                "all ranks, before the update")


def validation(trial, reference):
    step, largest = agree(trial, reference, "val_loss", LOSS)
    if step is None:
        return ok(f"validation losses agree (to {largest:.0e})")
    return fail(
        f"the validation loss of step {step} is "
        f"{number(trial.rows[step], 'val_loss'):.6f}, not "
        f"{number(reference.rows[step], 'val_loss'):.6f}",
        "it too is a mean over all ranks: all_reduce it in evaluate()")


def rates(trial, reference):
    step, _ = agree(trial, reference, "lr", 1e-6)
    if step is None:
        return ok("learning rates agree")
    return fail(f"the learning rate of step {step} is "
                f"{number(trial.rows[step], 'lr'):.3e}, not "
                f"{number(reference.rows[step], 'lr'):.3e}",
                "it changes once a step, by get_lr (in Lightning with "
                '"interval": "step")')


def weights(trial, reference):
    good, bound = reference.seen[0]["weights"], 0.02 * LEARNING_RATE
    for r, seen in enumerate(trial.seen):
        if not torch.equal(seen["weights"], trial.seen[0]["weights"]):
            return fail(f"the final weights of rank {r} are not rank 0's",
                        "every rank has to make the same updates")
        error = (seen["weights"] - good).abs().max().item()
        if not error <= bound:
            return fail(f"the final weights of rank {r} are off by up to "
                        f"{error:.1e} ({bound:.0e} is allowed)",
                        "some update was not the single device's")
    return ok("final weights are the single device's, on every rank")


def stopping(trial):
    """Whether a signal to rank 0 alone ends all of them, and loses nothing.
    """
    steps = len(trial.rows)
    same = ("all ranks have to stop at the same step: all_reduce "
            "run.stop_requested, and act on the sum")
    if any(rank.status != 0 for rank in trial.ranks):
        return fail("a signal to rank 0 does not end them all: "
                    + how_it_ended(trial, None).text, same)
    if steps == STEPS:
        return fail("a signal to rank 0 does not end it", same)
    if trial.state is None or trial.state["step"] != steps:
        return fail("a signal ends it without a checkpoint",
                    "save before the loop ends where a stop is requested")
    return ok("a signal to rank 0 ends them all, after a checkpoint")


def precision(trial):
    """Whether --precision bf16 is what the script trains with."""
    finding = how_it_ended(trial, None)
    if finding.verdict == "FAIL":
        return finding
    used = trial.seen[0]["precision"]
    if used == "bf16":
        return ok("--precision bf16 trains in bf16")
    return fail(f"with --precision bf16 it trains in {used}",
                "tell the Trainer: precision=\"bf16-mixed\" is autocast, the "
                "default is fp32")


def writers(trial, reference):
    if trial.world_size == 1:
        return None
    for r, seen in enumerate(trial.seen[1:], 1):
        if seen["written"]:
            name = Path(seen["written"][0]).name
            return fail(f"rank {r} writes {name} too",
                        "rank 0 alone logs and saves: `if rank == 0:`")
        if "| step" in trial.ranks[r].out:
            return fail(f"rank {r} prints the log line too",
                        "rank 0 alone logs and saves: `if rank == 0:`")
    return ok("rank 0 alone logs and saves")


def texts(trial, reference):
    """Whether each rank wrote its own, as far as they are printed."""
    out = "".join(rank.out for rank in trial.ranks)
    written = out.split("> Hello, I'm a language model,")[1:]
    if trial.world_size == 1 or len(written) != 4 * trial.world_size:
        return None
    if len({text[:20] for text in written}) > 4:
        return ok("every rank writes texts of its own")
    return Finding("warn", "all ranks write the same texts",
                   "add the rank to the seed of the generation")


def checkpoint(trial, reference):
    if trial.state is None:
        return fail("there is no checkpoint", "rank 0 saves at the end")
    good = reference.state
    keys = trial.state["model"].keys()
    if keys != good["model"].keys():
        odd = sorted(keys ^ good["model"].keys())[0]
        return fail(f"the checkpoint has other names ({odd})",
                    "save the raw model, not its wrapper")
    if trial.state["step"] != STEPS:
        return fail(f"the last checkpoint is of step {trial.state['step']}",
                    "save at the end as well")
    return ok("its checkpoints are like the single device's")


# ------------------------------------------------------------ the command


def main(stage, script=DESK, patience=20):
    """Check a script; returns whether it is right. Prints as it goes.

    patience: seconds after which a script that has not ended hangs; more on
    a machine that takes long for the single-device stage.
    """
    script = Path(script)
    try:
        ast.parse(script.read_text(encoding="utf-8"), script.name)
    except OSError as error:
        raise UserError(f"{script}: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{script}: line {getattr(error, 'lineno', '?')}: "
                        f"{getattr(error, 'msg', error)}") from error
    folder = Path(tempfile.mkdtemp(prefix="check-"))
    try:
        (folder / "data").mkdir()
        make_dataset(folder / "data")
        return compare(stage, script, folder, patience)
    finally:
        shutil.rmtree(folder)


def compare(stage, script, folder, patience):
    print(f"{script.name} against the single-device stage: preset tiny, "
          f"fp32, {STEPS} steps", flush=True)
    reference = try_out(
        "reference", ROOT / "solutions" / "train_gpt2_std.py", folder, 1, 120,
        plain=True)
    if not reference.rows:
        raise UserError("the single-device stage does not run here: "
                        f"{last_words(reference.ranks[0].err)}")
    timeout = max(patience, 8 * reference.seconds)
    warned = False
    for world_size in (1, 2, 4):
        kind = {1: " (plain python)", 2: "es", 4: "es, as on 2 nodes"}
        print(f"\n{world_size} process{kind[world_size]}", flush=True)
        trial = try_out(f"world-{world_size}", script, folder, world_size,
                        timeout, plain=world_size == 1)
        findings = judge(trial, reference)
        if not passes(findings):
            print("\nNot yet. Begin with the first FAIL: it may be the "
                  "cause of the others.")
            return False
        warned |= any(f.verdict == "warn" for f in findings)
    print("\n2 processes, stopped early", flush=True)
    trial = try_out("stopped", script, folder, 2, timeout, terminated=0)
    if not passes([stopping(trial)]):
        return False
    if stage == "lit":  # the Trainer has to be told
        print("\n1 process, --precision bf16", flush=True)
        trial = try_out("bf16", script, folder, 1, timeout, "--precision",
                        "bf16", plain=True)
        if not passes([precision(trial)]):
            return False
    print("\nRight: 1, 2 and 4 processes compute what the single device "
          "computes." + (" Mind the warning." if warned else ""))
    return True


def passes(findings):
    """Print findings; returns whether there is no FAIL among them."""
    for finding in findings:
        print(f"  {finding.verdict:4}  {finding.text}", flush=True)
        if finding.hint:
            print(f"        -> {finding.hint}")
    return all(finding.verdict != "FAIL" for finding in findings)
