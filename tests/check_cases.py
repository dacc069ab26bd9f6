"""Scripts for the check: wrong ones with what it is to say, and right ones.

    python tests/check_cases.py              all of them, in some minutes
    python tests/check_cases.py ddp no_sync  those of a stage, or so called

Each is the stage's solution with changes, pairs of an old text that is there
once and a new one. A wrong script has to get one diagnosis, whose first line
holds the given words; a right one passes, with these words in its warning if
there are any. To extend the table, add an entry. What came of the last run of
all of a stage stands in check_cases_<stage>.txt. Slips of one line are not
here but in mutants.py, which makes them itself.
"""

import contextlib
import io
import platform
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from workshop.stages import STAGES

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Case:
    name: str
    stage: str
    changes: tuple  # of pairs (old, new); a name: that whole solution
    says: str = ""  # in the first line of the diagnosis, or of the warning
    right: bool = False
    suite: bool = False  # differs in kind: pytest runs it, too
    names: str = ""  # pairs of a variable's name and another one for it

    def script(self):
        """The text of the script."""
        if isinstance(self.changes, str):
            return STAGES[self.changes].solution.read_text()
        text = STAGES[self.stage].solution.read_text()
        for old, new in self.changes:
            assert text.count(old) == 1, (self.name, text.count(old), old)
            text = text.replace(old, new)
        for old, new in map(str.split, self.names.splitlines()):
            text = re.sub(rf"(?<![.\w'\"-]){old}\b(?!['\"=])(?! =)"
                          rf"|(?<![.\w(]){old}(?= =)", new, text)
        return text


def wrong(name, stage, changes, says, suite=False):
    return Case(name, stage, changes, says, suite=suite)


def right(name, stage, changes, warns="", suite=False, names=""):
    return Case(name, stage, changes, warns, right=True, suite=suite,
                names=names)


def outcome(case):
    """(whether it passed, its first FAIL or warning, all that was said)."""
    from backstage.errors import UserError
    from workshop.check.command import main

    out = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="case-") as folder:
        script = Path(folder, "train_gpt2.py")
        script.write_text(case.script())
        with contextlib.redirect_stdout(out):
            try:
                passed = main(case.stage, script)
            except UserError as error:
                passed = False
                print(f"  FAIL  {error}")
    lines = [line.strip() for line in out.getvalue().splitlines()]
    first = next((i for i, line in enumerate(lines)
                  if line.startswith(("FAIL", "warn"))), None)
    says = lines[first] if first is not None else ""
    return passed, says, out.getvalue()


def problem(case, passed, says):
    """What is not as the case says, "" where all is."""
    if passed != case.right:
        return "passed" if passed else "refused"
    if case.right and bool(says) != bool(case.says):
        return "another warning"
    return "" if case.says in says else "another first line"


def run(words):
    """Try the scripts so called; whether all came out as expected."""
    chosen = [case for case in CASES if all(
        word == case.stage if word in STAGES else word in case.name
        for word in words)]
    assert chosen, f"no script is so called: {' '.join(words)}"
    good = True
    for stage in dict.fromkeys(case.stage for case in chosen):
        cases = [case for case in chosen if case.stage == stage]
        good &= run_stage(stage, cases, complete=len(cases) == sum(
            case.stage == stage for case in CASES))
    return good


def run_stage(stage, cases, complete):
    begin, bad, report = time.time(), 0, []
    for case in cases:
        start = time.time()
        passed, says, _ = outcome(case)
        odd = problem(case, passed, says)
        bad += bool(odd)
        lines = [f"{'NO ' if odd else 'yes'} "
                 f"{'right' if case.right else 'wrong'}: {case.name}"
                 f" ({time.time() - start:.0f} s)"]
        lines += [f"      {says}"] if says else []
        if odd:
            lines += [f"      -- {odd}; expected: {case.says}"]
        report += lines
        print(*lines, sep="\n", flush=True)
    right = sum(case.right for case in cases)
    summary = (f"{stage}, {time.strftime('%Y-%m-%d')}: {len(cases) - bad} of "
               f"{len(cases)} as expected ({len(cases) - right} wrong, "
               f"{right} right), {(time.time() - begin) / 60:.0f} minutes, "
               f"Python {platform.python_version()}")
    print(summary)
    if complete:
        (HERE / f"check_cases_{stage}.txt").write_text(
            "\n".join([summary, *report]) + "\n")
    return bad == 0


# ------------------------------------------------------- parts of the script

SYNC = "with nullcontext() if is_last_microbatch else model.no_sync():"
LAST = "is_last_microbatch = microbatch == accumulation_steps - 1"
BACKWARD = "                loss.backward()\n"
CLIP = ("        norm = nn.utils.clip_grad_norm_("
        "raw_model.parameters(), 1.0)\n")
UPDATE = "        optimizer.step()\n"
ZERO = "        optimizer.zero_grad()\n"
WRAP = ("    model = DistributedDataParallel("
        "model, gradient_as_bucket_view=True)\n")
BY_HAND = """\
        for w in raw_model.parameters():
            dist.all_reduce(w.grad)
            w.grad /= world_size
"""
REPORT = """\
        stop = torch.full_like(mean_loss, run.stop_requested)
        report = torch.stack((mean_loss, stop))
        dist.all_reduce(report)  # the sum over all ranks
        mean_loss, stop = (report / world_size).tolist()
"""
SUM = "        dist.all_reduce(report)  # the sum over all ranks\n"
EVALUATE = """\
            val_loss = evaluate(
                raw_model, val_data, hp.eval_minibatches * accumulation_steps,
                device, hp.precision)
"""
LOG = """\
        if rank == 0:
            run.log(step, mean_loss, val_loss, lr, norm, seconds)
"""
SAVE = """\
        if rank == 0 and save:
            run.save(step + 1, raw_model, optimizer)
"""
TEXTS = """\
            texts = [None] * world_size
            dist.all_gather_object(
                texts, write_texts(raw_model, run.tokenizer, device, seed))
            if rank == 0:
                print(*texts, sep="\\n")
"""
WORLD = """\
    # The launcher says who this process is (prepare_process() translates
    # the names of srun); without a launcher this is a world of one.
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1",
                          MASTER_ADDR="localhost", MASTER_PORT="0")
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
"""
JOIN = ("    dist.init_process_group("
        "dist.get_default_backend_for_device(device),\n"
        '                            device_id=None if device.type == "cpu" '
        "else device)\n")
LEAVE = "    run.finish()\n    dist.destroy_process_group()\n"
RESTORE = "    first_step = run.restore(raw_model, optimizer)\n"
SEEK = "    train_data.seek(first_step * S)\n"
SEED = ("    torch.manual_seed(hp.seed)  "
        "# the same initial weights each time\n")
VALIDATION = "(loss / num_batches / dist.get_world_size())"
OPTIMIZER = "    optimizer = raw_model.configure_optimizers(hp)\n"
DEVICE = "device = use_device(hp.device, local_rank)"
DIVIDE = "loss = loss / accumulation_steps"
SWAPPED = ('"params": matrices, "weight_decay": hp.weight_decay},\n'
           '                  {"params": vectors, "weight_decay": 0.0}',
           '"params": matrices, "weight_decay": 0.0},\n'
           '                  {"params": vectors, "weight_decay": '
           'hp.weight_decay}')
SCORES = "betas=(0.9, 0.95), fused=True)"

# what the lesson says about the data, and how it goes wrong
RANKS = "rank, world_size)\n        for split"
OFFSET = "self.offset, self.stride = rank * B, world_size * B"
BEGIN = "self.position = i + self.offset"
MOVE = "self.position += self.stride"
COUNT = "accumulation_steps = S // round_size"
UNSHARDED = "every rank reads samples {}: the data is not sharded"
SHARING = (  # name, changes, the first line
    ("the data not sharded at all",
     (("B, T, rank, world_size):", "B, T):"), (f"        {OFFSET}\n", ""),
      (BEGIN, "self.position = i"), (MOVE, "self.position += self.B"),
      (f"B, T,\n                     {RANKS}", "B, T)\n        for split"),
      (COUNT, "accumulation_steps = S // B")),
     UNSHARDED.format("0 to 15")),
    ("no stride", ((MOVE, "self.position += self.B"),),
     "rank 0 moves on from sample 0 to 2, not to 4: its stride is B, not "
     "world_size * B"),
    ("no offset", ((BEGIN, "self.position = i"),),
     "rank 1 begins at sample 0, not at sample 2: its offset is 0, not "
     "rank * B"),
    ("an offset of one sample a rank",
     ((OFFSET, OFFSET.replace("rank * B,", "rank,")),),
     "rank 1 begins at sample 1, not at sample 2: its offset is rank, not "
     "rank * B"),
    ("an offset in tokens",
     ((OFFSET, OFFSET.replace("rank * B,", "rank * B * T,")),),
     "rank 1 begins at sample 24, not at sample 2: its offset is "
     "rank * B * T, not rank * B"),
    ("a stride in tokens",
     ((OFFSET, OFFSET + " * T"),),
     "rank 0 moves on from sample 0 to 24, not to 2: its stride is B * T, "
     "not world_size * B"),
    ("every rank reads the same samples",
     ((RANKS, "0, 1)\n        for split"),), UNSHARDED.format("0 to 7")),
    ("every rank in the place of rank 0",
     ((RANKS, "0, world_size)\n        for split"),),
     "rank 1 begins at sample 0, not at sample 2: its offset is 0, not "
     "rank * B"),
    ("rank and world size swapped",
     ((RANKS, "world_size, rank)\n        for split"),),
     "rank and world_size are swapped"),
    ("a part of the dataset for each rank",
     ((f"        {OFFSET}\n", ""), ("T\n        self.seek(0)",
       "T\n        self.offset = rank * (self.num_samples // world_size)\n"
       "        self.stride = B\n        self.seek(0)")),
     "rank 1 begins at sample 20, not at sample 2"),
    ("accumulation not divided by the world size",
     ((COUNT, "accumulation_steps = S // B"),),
     "a rank reads 16 of them, not 8: accumulation_steps is S // B, not "
     "S // (world_size * B)"),
    ("accumulation divided twice",
     ((COUNT, COUNT + " // world_size"),),
     "a rank reads 4 of them, not 8"),
    ("validation not sharded",
     ((RANKS, "*((rank, world_size) if split == \"train\" else (0, 1)))\n"
       "        for split"),),
     "validation after step 2: " + UNSHARDED.format("0 to 15")),
)


def sharing(stage):
    """The mistakes with the data, in the stage's script."""
    return tuple(wrong(name, stage, changes, says if "after step" in says else
                       "samples of step 0: " + says, suite=True)
                 for name, changes, says in SHARING)


DDP_WRONG = (
    # the changes of the lesson, each left out alone
    wrong("the imports left out", "ddp",
          (("import os\n", ""), ("import torch.distributed as dist\n", "")),
          "NameError: name 'os' is not defined"),
    wrong("the launcher is not asked", "ddp",
          ((WORLD, "    rank, world_size = 0, 1\n"),),
          "NameError: name 'local_rank'"),
    wrong("the local rank left out of the device", "ddp",
          (("use_device(hp.device, local_rank)", "use_device(hp.device)"),),
          "rank 1 takes device 0, but it has local rank 1", suite=True),
    wrong("not wrapped, but no_sync", "ddp",
          ((WRAP, "    model = raw_model\n"),),
          "has no attribute 'no_sync'"),
    wrong("the validation loss not reduced", "ddp",
          (("    dist.all_reduce(loss)  # the sum over all ranks\n", ""),),
          "the validation loss of step"),
    wrong("all ranks log", "ddp",
          ((LOG, "        run.log(step, mean_loss, val_loss, lr, norm, "
            "seconds)\n"),),
          "called run.log()"),
    wrong("all ranks print their texts", "ddp",
          ((TEXTS, "            print(write_texts(raw_model, run.tokenizer, "
            "device, seed))\n"),),
          "rank 1 prints its texts itself"),
    # another stage's script
    wrong("the single-device script", "ddp", "std",
          "every process thinks it is rank 0: change"),
    wrong("every change but the launcher's", "ddp",
          ((WORLD, "    rank, local_rank, world_size = 0, 0, 1\n"),),
          "every process thinks it is rank 0: change"),
    wrong("the Lightning script", "ddp", "lit", "it trains with Lightning"),
    # devices
    wrong("always the CPU", "ddp",
          ((DEVICE, 'device = use_device("cpu", local_rank)'),),
          'the device is always "cpu"'),
    wrong("torch.device of the CPU", "ddp",
          ((DEVICE, 'device = torch.device("cpu")'),),
          'the device is always "cpu"'),
    wrong("no minibatch is refused", "ddp",
          (("require(S % round_size == 0", "require(S % B == 0"),),
          "which 2 ranks with microbatches of 2 cannot share, it trains all "
          "the same", suite=True),
    wrong("always gloo", "ddp",
          ((JOIN, '    dist.init_process_group("gloo")\n'),),
          'the backend is always "gloo"'),
    wrong("set_device of the rank", "ddp",
          ((JOIN, JOIN + "    torch.cuda.set_device(rank)\n"),),
          "rank 2 takes device 2"),
    wrong("device_ids of the rank", "ddp",
          (("model, gradient_as_bucket_view=True",
            "model, device_ids=[rank]"),),
          "rank 2 takes device 2"),
    # rank and world size
    wrong("the local world size", "ddp",
          (('int(os.environ["WORLD_SIZE"])',
            'int(os.environ.get("LOCAL_WORLD_SIZE", 1))'),),
          ""),
    wrong("SLURM's rank with a default", "ddp",
          (('rank = int(os.environ["RANK"])',
            'rank = int(os.environ.get("SLURM_PROCID", 0))'),),
          ""),
    wrong("the launcher's variables without a default", "ddp",
          (('    if "RANK" not in os.environ:\n'
            '        os.environ.update(RANK="0", LOCAL_RANK="0", '
            'WORLD_SIZE="1",\n                          '
            'MASTER_ADDR="localhost", MASTER_PORT="0")\n', ""),),
          "KeyError: 'RANK'"),
    # samples
    *sharing("ddp"),
    wrong("offsets that overlap, without a stride", "ddp",
          ((OFFSET, "self.offset, self.stride = rank * B // 2, B"),),
          "samples of step 0: rank 1 begins at sample 1"),
    # model and optimizer
    wrong("another seed per rank and no broadcast", "ddp",
          (("torch.manual_seed(hp.seed)  #",
            "torch.manual_seed(hp.seed + rank)  #"),
           ("gradient_as_bucket_view=True", "init_sync=False")),
          "rank 1 starts from other weights"),
    wrong("no seed", "ddp", ((SEED, ""),), "it starts from other weights"),
    wrong("swapped decay groups", "ddp",
          (SWAPPED,),
          "has a weight decay of"),
    wrong("everything is decayed", "ddp",
          (('"weight_decay": 0.0}', '"weight_decay": hp.weight_decay}'),),
          "has a weight decay of 0.1, not 0.0"),
    wrong("default betas", "ddp", ((SCORES, "fused=True)"),),
          "the optimizer's betas are (0.9, 0.999), not (0.9, 0.95)"),
    wrong("bf16 always", "ddp",
          (('precision == "bf16"):', "True):"),),
          "with --precision fp32 it trains in bf16"),
    wrong("DDP of a deep copy", "ddp",
          (("import math\n", "import copy\nimport math\n"),
           ("DistributedDataParallel(model, ",
            "DistributedDataParallel(copy.deepcopy(model), ")),
          "optimizer updates another model"),
    wrong("an optimizer of a deep copy", "ddp",
          (("import math\n", "import copy\nimport math\n"),
           (OPTIMIZER, "    optimizer = copy.deepcopy(raw_model)"
            ".configure_optimizers(hp)\n")),
          "optimizer updates another model"),
    wrong("the learning rate times the world size", "ddp",
          (('group["lr"] = lr', 'group["lr"] = lr * world_size'),),
          "the learning rate of step 0"),
    wrong("a schedule in microbatches", "ddp",
          (("lr = get_lr(step, max_steps, hp)",
            "lr = get_lr(step * accumulation_steps, max_steps, hp)"),),
          ""),
    wrong("a head left out of the optimizer", "ddp",
          ((OPTIMIZER, OPTIMIZER +
            "    optimizer.param_groups[1]['params'].pop()\n"),),
          "the optimizer does not update"),
    # gradients
    wrong("forward on the raw model", "ddp",
          (("loss = training_step(model, ", "loss = training_step(raw_model, "
            ),), "gradients of step 0 differ between rank 0 and rank 1",
          suite=True),
    wrong("not wrapped", "ddp",
          ((WRAP, "    model = raw_model\n"), (SYNC, "with nullcontext():")),
          "gradients of step 0 differ"),
    wrong("only the first is reduced", "ddp",
          ((LAST, "is_last_microbatch = microbatch == 0"),),
          "gradients of step 0 differ"),
    wrong("no_sync inverted", "ddp",
          ((SYNC, SYNC.replace("if is", "if not is")),),
          "gradients of step 0 differ", suite=True),
    wrong("loss divided by the world size, too", "ddp",
          ((DIVIDE, DIVIDE + " / world_size"),),
          "the gradient norm of step 0"),
    wrong("no division by the accumulation", "ddp",
          ((DIVIDE, "loss = loss / 1"),),
          "the gradient norm of step 0"),
    wrong("divided by the accumulation twice", "ddp",
          ((DIVIDE, DIVIDE + " / accumulation_steps"),),
          "of step 0"),
    wrong("summed by hand over ranks", "ddp",
          ((WRAP, "    model = raw_model\n"), (SYNC, "with nullcontext():"),
           (CLIP, BY_HAND.replace("            w.grad /= world_size\n", "")
            + CLIP)),
          "the gradient norm of step 0"),
    wrong("not clipped", "ddp",
          (("raw_model.parameters(), 1.0)", "raw_model.parameters(), 1e9)"),),
          "gradients of step 0 are off"),
    wrong("a norm without clipping", "ddp",
          ((CLIP, "        norm = torch.stack([w.grad.norm() for w in "
            "raw_model.parameters()]).norm()\n"),),
          "gradients of step 0 are off"),
    wrong("clipped after the update", "ddp",
          ((CLIP + UPDATE, UPDATE + CLIP),),
          "gradients of step 0 are off"),
    wrong("clipped before the reduction", "ddp",
          ((WRAP, "    model = raw_model\n"), (SYNC, "with nullcontext():"),
           (CLIP, CLIP + BY_HAND)),
          "gradients of step 0 are off"),
    wrong("every microbatch clipped", "ddp",
          ((BACKWARD, BACKWARD + "                nn.utils.clip_grad_norm_("
            "raw_model.parameters(), 1.0)\n"),),
          "gradients of step 0 are off"),
    wrong("gradients never zeroed", "ddp", ((ZERO, ""),),
          "gradients of step 1 are off"),
    wrong("zeroed at every microbatch", "ddp",
          ((DIVIDE, "optimizer.zero_grad()\n                " + DIVIDE),),
          "gradients of step 0"),
    wrong("an update every microbatch", "ddp",
          ((BACKWARD, BACKWARD + "                optimizer.step()\n"),),
          ""),
    wrong("the optimizer steps on rank 0 only", "ddp",
          ((UPDATE, "        if rank == 0:\n            optimizer.step()\n"),
           ), "rank 1 makes 0 updates",
          suite=True),
    # what is logged
    wrong("logged loss divided but not reduced", "ddp", ((SUM, ""),),
          "the logged loss of step 0"),
    wrong("the last microbatch's loss logged", "ddp",
          (("mean_loss += loss.detach()",
            "mean_loss = loss.detach() * accumulation_steps"),),
          "the logged loss of step 0"),
    wrong("the norm after clipping", "ddp",
          ((CLIP, CLIP + "        norm = norm.clamp(max=1.0)\n"),),
          "the gradient norm of step 0"),
    wrong("validation goes on in the data", "ddp",
          (("    data.seek(0)\n    loss = torch.zeros(",
            "    loss = torch.zeros("),),
          "the validation loss of step"),
    wrong("never evaluated", "ddp",
          (("if last or (step + 1) % hp.eval_every == 0:", "if False:"),),
          "there is no validation loss at step"),
    # collectives
    wrong("evaluated on rank 0 only", "ddp",
          (("if last or (step + 1) % hp.eval_every == 0:",
            "if rank == 0 and (last or (step + 1) % hp.eval_every == 0):"),),
          "", suite=True),
    wrong("a barrier on rank 0 only", "ddp",
          (("        if rank == 0:\n            run.log(",
            "        if rank == 0:\n            dist.barrier()\n"
            "            run.log("),),
          "it hangs: rank 0 waits in line"),
    wrong("texts gathered on rank 0 only", "ddp",
          (("        if run.tokenizer and (last",
            "        if rank == 0 and run.tokenizer and (last"),),
          ""),
    # resuming and stopping
    wrong("seek left out", "ddp", ((SEEK, ""),), "samples of step 3"),
    wrong("seek divided by the world size", "ddp",
          ((SEEK, "    train_data.seek(first_step * S // world_size)\n"),),
          "samples of step 3"),
    wrong("restored on rank 0 only", "ddp",
          ((RESTORE, "    first_step = run.restore(raw_model, optimizer) "
            "if rank == 0 else 0\n"),), ""),
    wrong("another optimizer restored", "ddp",
          ((RESTORE, "    first_step = run.restore(raw_model, "
            "raw_model.configure_optimizers(hp))\n"),),
          "gradients of step 4", suite=True),
    wrong("another model restored", "ddp",
          ((RESTORE, "    other = GPT(config)\n    first_step = run.restore("
            "other, other.configure_optimizers(hp))\n"),),
          "does not go on from the checkpoint"),
    wrong("a fresh optimizer saved", "ddp",
          (("run.save(step + 1, raw_model, optimizer)",
            "run.save(step + 1, raw_model, "
            "raw_model.configure_optimizers(hp))"),),
          "the checkpoint's state of the optimizer is off"),
    wrong("the first weights saved", "ddp",
          (("import math\n", "import copy\nimport math\n"),
           (OPTIMIZER, "    first = copy.deepcopy(raw_model)\n" + OPTIMIZER),
           ("run.save(step + 1, raw_model, optimizer)",
            "first_optimizer = first.configure_optimizers(hp)\n"
            "            first_optimizer.load_state_dict("
            "optimizer.state_dict())\n"
            "            run.save(step + 1, first, first_optimizer)")),
          "the checkpoint's weights are off"
          ),
    wrong("saved without the last step", "ddp",
          (("save = last or stop or", "save = stop or step == 0 or not last "
            "and"),), "the last checkpoint is of step 3"),
    wrong("stopped without a checkpoint", "ddp",
          (("save = last or stop or", "save = last or"),),
          "a signal ends it without a checkpoint"),
    wrong("a signal is not heeded", "ddp",
          (("        if stop:\n            break\n", ""),),
          "a signal to rank 0 does not end it"),
    wrong("a rank that decides by itself to stop", "ddp",
          (("        mean_loss, stop = (report",
            "        stop = run.stop_requested\n        mean_loss, _ = "
            "(report"),),
          "a signal to rank 0 does not end them all",
          suite=True),
    # files
    wrong("all ranks write a checkpoint of their own", "ddp",
          ((SAVE, "        if save:\n            torch.save(raw_model."
            "state_dict(), run.folder / 'my.pt')\n" + SAVE),),
          "rank 1 writes my.pt too"),
    wrong("all ranks print the log line", "ddp",
          ((LOG, LOG + "        print(f'| step {step} | {mean_loss}')\n"),),
          "rank 1 prints the log line too"),
    # how it ends
    wrong("an early return", "ddp",
          (("        mean_loss = torch.zeros(", "        if step == 2:\n"
            "            return\n        mean_loss = torch.zeros("),),
          "ended after 2 of 6 steps"),
    wrong("an error in the script", "ddp",
          (("local_rank = int(", "local_rang = int("),),
          "NameError: name 'local_rank'"),
    wrong("the wrapper asked for the optimizer", "ddp",
          ((OPTIMIZER, "    raw_model = DistributedDataParallel(raw_model)\n"
            + OPTIMIZER),), "object has no attribute 'configure_optimizers'"),
    wrong("a segmentation fault", "ddp",
          (("        mean_loss = torch.zeros(", "        if step == 2:\n"
            "            import ctypes\n            ctypes.string_at(0)\n"
            "        mean_loss = torch.zeros("),),
          "was ended by SIGSEGV", suite=True),
    wrong("a killed rank", "ddp",
          (("        mean_loss = torch.zeros(", "        if step == rank == 1"
            ":\n            os.kill(os.getpid(), 9)\n"
            "        mean_loss = torch.zeros("),),
          "rank 1 was ended by SIGKILL"),
    wrong("an endless loop", "ddp",
          (("        mean_loss = torch.zeros(", "        while step == 2:\n"
            "            pass\n        mean_loss = torch.zeros("),),
          "it never reaches step 2 but keeps running", suite=True),
    wrong("prints without end", "ddp",
          (("        mean_loss = torch.zeros(", "        while step == 2:\n"
            "            print('x' * 1000)\n"
            "        mean_loss = torch.zeros("),),
          "it prints without end"),
    wrong("steps without end", "ddp",
          (("    for step in range(first_step, max_steps):",
            "    import itertools\n    for step in itertools.count("
            "first_step):"),), ""),
    wrong("no Python", "ddp", (("def main():", "def main()"),),
          "expected ':'", suite=True),
    wrong("a null byte", "ddp", (("def main():", "def main():\0"),),
          "null bytes"),
)

DDP_RIGHT = (
    right("the solution", "ddp", (), suite=True),
    right("the docstring as it was", "ddp",
          (("Train GPT-2 on many devices with DDP: each has a copy of the "
            "model.", "Train GPT-2 on one device."),)),
    right("no no_sync", "ddp", ((SYNC, "with nullcontext():"),),
          "gradients are reduced 4.0 times a step"),
    right("the group never left", "ddp",
          ((LEAVE, "    run.finish()\n"),), "the process group is never"),
    right("the group left at exit", "ddp",
          ((LEAVE, "    run.finish()\n"), (JOIN, JOIN + "    import atexit\n"
            "    atexit.register(dist.destroy_process_group)\n"))),
    right("os._exit at the end", "ddp",
          ((LEAVE, LEAVE + "    os._exit(0)\n"),)),
    right("renamed variables", "ddp",
          (("mean_loss, stop = (", "average, stop = ("),
           ("run.check_finite(step, mean_loss",
            "run.check_finite(step, average"),
           ("run.log(step, mean_loss", "run.log(step, average"),
           (LAST, LAST.replace("is_last_microbatch", "last_one")),
           ("if is_last_microbatch else", "if last_one else"))),
    right("require_backward_grad_sync", "ddp",
          ((SYNC, "model.require_backward_grad_sync = is_last_microbatch\n"
            "            if True:"),)),
    right("its own sampler arithmetic", "ddp",
          (("samples = range(self.position, self.position + self.B)",
            "world_size = self.stride // self.B\n"
            "        per = 16 // world_size\n"
            "        done = (self.position - self.offset) // world_size\n"
            "        first = (done // per * 16 + done % per\n"
            "                 + self.offset // self.B * per)\n"
            "        samples = range(first, first + self.B)"),)),
    right("gradients reduced by hand", "ddp",
          ((WRAP, ""), (SYNC, "with nullcontext():"),
           (CLIP, BY_HAND + CLIP))),
    right("other print-outs", "ddp",
          (("    for step in range(first", "    print('rank', "
            "rank, 'is ready')\n    for step in range(first"),)),
    right("a communication hook of its own", "ddp",
          ((WRAP, WRAP + "    from torch.distributed.algorithms."
            "ddp_comm_hooks import default_hooks\n    model."
            "register_comm_hook(None, default_hooks.allreduce_hook)\n"),)),
    right("ZeroRedundancyOptimizer", "ddp",
          ((OPTIMIZER, OPTIMIZER + "    from torch.distributed.optim import "
            "ZeroRedundancyOptimizer\n    groups = [{'params': g['params'], "
            "'weight_decay': g['weight_decay']} for g in "
            "optimizer.param_groups]\n    plain = optimizer\n"
            "    optimizer = ZeroRedundancyOptimizer(groups, "
            "optimizer_class=torch.optim.AdamW, lr=hp.learning_rate, "
            "betas=(0.9, 0.95))\n"),
           (RESTORE, "    first_step = run.restore(raw_model, plain)\n"
            "    if first_step:\n"
            "        optimizer.load_state_dict(plain.state_dict())\n"),
           (SAVE, "        if save:\n            optimizer."
            "consolidate_state_dict()\n        if rank == 0 and save:\n"
            "            plain.load_state_dict(optimizer.state_dict())\n"
            "            run.save(step + 1, raw_model, plain)\n")),
          suite=True),
    right("torch.save by name", "ddp",
          ((SAVE, SAVE + "        if rank == 0 and save:\n            torch."
            "save(obj=step, f=run.folder / 'my.pt')\n"),)),
    right("a log file a rank", "ddp",
          ((LOG, LOG + "        with open(run.folder / f'rank{rank}.log', "
            "'a') as file:\n            print(step, file=file)\n"),)),
    right("activation checkpointing of the model", "ddp",
          (("        return model(x, y)\n",
            "        if not torch.is_grad_enabled():\n"
            "            return model(x, y)\n"
            "        from torch.utils.checkpoint import checkpoint\n"
            "        return checkpoint(model, x, y, use_reentrant=False)\n"),
           )),
    right("activation checkpointing of blocks", "ddp",
          (("            x = block(x)\n", "            x = checkpoint("
            "block, x, use_reentrant=False)\n"),)),
    right("GPT renamed", "ddp",
          (("class GPT(nn.Module)", "class Transformer(nn.Module)"),
           ("raw_model = GPT(", "raw_model = Transformer("))),
    right("GPT subclassed", "ddp",
          (("raw_model = GPT(", "raw_model = MyGPT("),
           ("def training_step(", "class MyGPT(GPT):\n    pass\n\n\ndef "
            "training_step("))),
    right("a coding cookie", "ddp",
          (('"""Train GPT-2 on many devices', '# -*- coding: latin-1 -*-\n'
            '"""Train GPT-2 on many devices'),)),
    right("device_ids of the local rank", "ddp",
          (("model, gradient_as_bucket_view=True",
            "model, device_ids=[local_rank]"),)),
    right("nccl and set_device", "ddp",
          ((JOIN, '    torch.cuda.set_device(local_rank)\n'
            '    dist.init_process_group("nccl")\n'),)),
    right("the backend left to PyTorch", "ddp",
          ((JOIN, "    dist.init_process_group()\n"),)),
    right("the device given to the group", "ddp",
          ((JOIN, "    dist.init_process_group(dist.get_default_backend_for_"
            "device(device), device_id=device)\n"),)),
    right("no buckets as views", "ddp",
          ((", gradient_as_bucket_view=True", ""),)),
    right("small buckets", "ddp",
          (("gradient_as_bucket_view=True", "bucket_cap_mb=0.01"),)),
    right("static graph", "ddp",
          (("gradient_as_bucket_view=True", "static_graph=True"),
           (SYNC, "with nullcontext():")),
          "gradients are reduced"),
    right("an unfused optimizer", "ddp",
          ((", fused=True)", ")"),)),
    right("zeroed before the step", "ddp",
          ((ZERO, ""), ("        mean_loss = torch.zeros((), device",
                        ZERO + "        mean_loss = torch.zeros((), device")
           )),
    right("fully_shard in DDP's place", "ddp",
          ((OPTIMIZER, "    from torch.distributed.fsdp import fully_shard\n"
            "    for part in (*raw_model.transformer.h, raw_model):\n"
            "        fully_shard(part)\n" + OPTIMIZER),
           (WRAP, "    model = raw_model\n"), (SYNC, "with nullcontext():"),
           ("norm = norm.item()", "norm = norm.full_tensor().item()"),
           (SAVE, SAVE.replace("rank == 0 and ", ""))),
          "gradients are reduced 4.0 times a step"),
    right("the loss averaged by PyTorch", "ddp",
          (("dist.all_reduce(report)  # the sum over all ranks",
            "dist.all_reduce(report)"),)),
)

# ------------------------------------------- the same of the Lightning script

LOADER = "DataLoader(lit.Microbatches(data), batch_size=None)"
TRAINER = "    trainer = L.Trainer(\n"
PRECISION = ('precision="bf16-mixed" if hp.precision == "bf16" else '
             '"32-true",')
VALIDATE = ("    def validation_step(self, batch):\n"
            '        self.log("val_loss", self(*batch), sync_dist=True)\n')
LOSS = "return self(*batch)"


def with_callback(body):
    """Changes that put methods of a subclass in the callback's place."""
    return ((TRAINER, f"    class Own(lit.LitRun):\n{body}\n" + TRAINER),
            ("callbacks=[lit.LitRun(", "callbacks=[Own("))


LIT_WRONG = (
    wrong("a second writer of checkpoints", "lit",
          (("enable_checkpointing=False", "enable_checkpointing=True"),),
          "the Trainer writes, too: ModelCheckpoint", suite=True),
    wrong("configure_model shards nothing", "lit",
          (("            for module in (*self.transformer.h, self):\n",
            "            for module in ():\n"),),
          "with --strategy fsdp2 every rank keeps the whole model",
          suite=True),
    wrong("the DDP script", "lit", "ddp", "it does not train with Lightning"),
    wrong("the single-device script", "lit", "std",
          "it does not train with Lightning"),
    # the Trainer's arguments, each left out alone
    wrong("no accelerator but the CPU", "lit",
          (("accelerator=device.type", 'accelerator="cpu"'),),
          "the Trainer always takes the CPU"),
    wrong("max_steps in microbatches", "lit",
          ((" max_steps=max_steps,",
            " max_steps=max_steps * accumulation_steps,"),),
          ""),
    wrong("max_steps too few", "lit",
          ((" max_steps=max_steps,", " max_steps=max_steps // 2,"),), ""),
    wrong("max_epochs in its place", "lit",
          ((" max_steps=max_steps,", " max_epochs=1,"),), ""),
    wrong("accumulation missing", "lit",
          (("accumulate_grad_batches=accumulation_steps,", ""),),
          "", suite=True),
    wrong("accumulation by the minibatch", "lit",
          (("accumulate_grad_batches=accumulation_steps",
            "accumulate_grad_batches=S // B"),),
          "samples of step 0"),
    wrong("bf16 always", "lit", ((PRECISION, 'precision="bf16-mixed",'),),
          "with --precision fp32 it trains in bf16"),
    wrong("one device a node", "lit",
          (("devices=world_size // num_nodes", "devices=1"),), ""),
    # loss and schedule
    wrong("loss divided twice", "lit",
          ((LOSS, LOSS + " / self.trainer.accumulate_grad_batches"),),
          "gradients of step 0 are off"),
    wrong("loss divided by the world size", "lit",
          ((LOSS, LOSS + " / self.trainer.world_size"),),
          "the gradient norm of step 0"),
    wrong("loss multiplied by the accumulation", "lit",
          ((LOSS, LOSS + " * self.trainer.accumulate_grad_batches"),),
          "the gradient norm of step 0"),
    wrong("no schedule", "lit",
          (('return [optimizer], [{"scheduler": schedule, '
            '"interval": "step"}]', "return optimizer"),),
          "the learning rate of step 1"),
    wrong("swapped decay groups", "lit",
          (SWAPPED,),
          "has a weight decay of"),
    wrong("no seed", "lit", ((SEED, ""),), "it starts from other weights"),
    # data
    wrong("every rank reads the same samples", "lit",
          ((RANKS, "0, 1)\n        for split"),),
          UNSHARDED.format("0 to 7")),
    wrong("two workers read the same", "lit",
          (("batch_size=None", "batch_size=None, num_workers=2"),),
          "samples of step 0", suite=True),
    wrong("batches of batches", "lit", (("batch_size=None", "batch_size=2"),
                                        ), ""),
    wrong("accumulation not divided by the world size", "lit",
          ((COUNT, "accumulation_steps = S // B"),), "samples of step 0"),
    wrong("the loader of a list, shuffled", "lit",
          ((LOADER, "DataLoader([next(data) for _ in range(48)], "
            "batch_size=None, shuffle=data is train_data)"),),
          "samples of step 0"),
    wrong("no validation loader", "lit",
          (("in (train_data, val_data)", "in (train_data,)"),),
          "steps without an error"),
    # validation
    wrong("no validation step", "lit", ((VALIDATE, ""),),
          "steps without an error", suite=True),
    wrong("validation summed over ranks", "lit",
          (("sync_dist=True", 'sync_dist=True, reduce_fx="sum"'),),
          "the validation loss of step"),
    # logging
    wrong("logged loss of the last microbatch only", "lit", with_callback(
        "        def on_train_batch_end(self, trainer, module, outputs, "
        "*batch):\n            self.mean_loss.zero_()\n            loss = "
        'outputs["loss"] * trainer.accumulate_grad_batches\n            '
        "super().on_train_batch_end(\n                trainer, module, "
        '{"loss": loss}, *batch)\n'),
        "the logged loss of step 0"),
    wrong("never fitted", "lit", (("    trainer.fit(", "    str("),),
          ""),
    wrong("an error in the script", "lit",
          (("def training_step(self, batch):", "def train_step(self, batch):"
            ),), "training_step"),
)

LIT_RIGHT = (
    right("the solution", "lit", (), suite=True),
    right("device given to the Trainer by auto", "lit",
          (("accelerator=device.type", 'accelerator="auto"'),)),
    right("precision of an own name", "lit",
          ((PRECISION, 'precision=("32-true", "bf16-mixed")'
            '[hp.precision == "bf16"],'),)),
    right("the class renamed", "lit",
          (("class GPT(L.LightningModule)", "class LitGPT(L.LightningModule)"
            ), ("model = GPT(", "model = LitGPT("))),
    right("the class subclassed", "lit",
          (("model = GPT(", "model = LitGPT("),
           ("def get_shards(", "class LitGPT(GPT):\n    pass\n\n\n"
            "def get_shards("))),
    right("a batch index", "lit",
          (("def training_step(self, batch):",
            "def training_step(self, batch, batch_idx):"),)),
    right("a dictionary for the loss", "lit",
          ((LOSS, 'return {"loss": self(*batch)}'),)),
    right("one more callback", "lit",
          (("callbacks=[", "callbacks=[L.Callback(), "),)),
    right("a logged training loss", "lit",
          ((LOSS, "loss = self(*batch)\n        self.log("
            '"train_loss", loss)\n        return loss'),)),
    right("an unfused optimizer", "lit", ((", fused=True)", ")"),)),
    right("a dictionary of the optimizer", "lit",
          (('return [optimizer], [{"scheduler": schedule, '
            '"interval": "step"}]', 'return {"optimizer": optimizer, '
            '"lr_scheduler": {"scheduler": schedule, "interval": "step"}}'),
           )),
    right("activation checkpointing of blocks", "lit",
          (("            x = block(x)\n", "            x = checkpoint("
            "block, x, use_reentrant=False)\n"),)),
    right("no validation of its own name", "lit",
          (("def validation_step(self, batch):",
            "def validation_step(self, batch, batch_idx=0):"),)),
    right("a coding cookie", "lit",
          (('"""Train GPT-2 on many devices', '# -*- coding: latin-1 -*-\n'
            '"""Train GPT-2 on many devices'),)),
    right("the strategy fsdp2", "lit",
          (('"fsdp2"] = "ddp"', '"fsdp2"] = "fsdp2"'),),
          "gradients are reduced"),
    right("a module that holds the model", "lit",
          (("class GPT(L.LightningModule)", "class GPT(nn.Module)"),
           ("    def configure_optimizers(self):\n"
            "        hp, max_steps = self.hp, self.trainer.max_steps\n",
            "    def optimizers(self, hp, max_steps):\n"),
           ("    def training_step(self, batch):",
            "\nclass Lit(L.LightningModule):\n"
            "    def __init__(self, config, hp):\n"
            "        super().__init__()\n"
            "        self.config, self.hp = config, hp\n"
            "        self.model = GPT(config, hp)\n\n"
            "    def configure_model(self):\n"
            "        if self.device_mesh and not isinstance(\n"
            "                self, FSDPModule):\n"
            "            for module in (*self.model.transformer.h, self):\n"
            "                fully_shard(module, mesh=self.device_mesh[\n"
            "                    'data_parallel'])\n\n"
            "    def configure_optimizers(self):\n"
            "        return self.model.optimizers(\n"
            "            self.hp, self.trainer.max_steps)\n\n"
            "    def forward(self, *batch):\n"
            "        return self.model(*batch)\n\n"
            "    def generate(self, *args):\n"
            "        return GPT.generate(self, *args)\n\n"
            "    def training_step(self, batch):"),
           ("raw_model = GPT(", "raw_model = Lit("),
            ("model = compile_model(\n        raw_model, device, each_block="
             "hp.strategy == \"fsdp2\"\n    ) if hp.compile else raw_model",
             "if hp.compile:\n        raw_model.model = compile_model("
             "raw_model.model, device, hp.strategy == \"fsdp2\")\n"
             "    model = raw_model")),
          "the checkpoint's names begin with model.", suite=True),
    right("one worker", "lit",
          (("batch_size=None", "batch_size=None, num_workers=1"),)),
    right("more print-outs", "lit",
          ((TRAINER, "    print('rank', rank, 'is ready')\n" + TRAINER),)),
)

FSDP_MESH = "    mesh = dist.init_device_mesh(device.type, (world_size,))\n"
FSDP_LOOP = "for module in (*raw_model.transformer.h.children(), raw_model):"
FSDP_CALL = "fully_shard(module, mesh=mesh)"
FSDP_DRAW = "        draw_weights(raw_model, module)\n"
FSDP_SHARD = f"{FSDP_MESH}    {FSDP_LOOP}\n{FSDP_DRAW}        {FSDP_CALL}\n"
FSDP_WHOLE = "    draw_weights(raw_model, raw_model)\n"
ON_THE_CPU = (("make_shapes(GPT, config,", "GPT(config,"), (FSDP_DRAW, ""))
FSDP_SYNC = ("            raw_model.set_requires_gradient_sync("
             "is_last_microbatch)\n")
SAVE_ALL = "        if save:  # all ranks\n"
PARTS = "[w.grad.to_local() for w in raw_model.parameters()]"

FSDP_WRONG = (
    # the changes of the lesson, each left out alone
    wrong("the import left out", "fsdp",
          (("from torch.distributed.fsdp import fully_shard\n", ""),),
          "NameError: name 'fully_shard' is not defined"),
    wrong("not sharded", "fsdp", ((FSDP_SHARD, FSDP_WHOLE),),
          "has no attribute 'set_requires_gradient_sync'", suite=True),
    wrong("neither sharded nor reduced", "fsdp",
          ((FSDP_SHARD, FSDP_WHOLE), (FSDP_SYNC, ""),
           ("norm.full_tensor().item()", "norm.item()"),
           (SAVE_ALL, "        if rank == 0 and save:\n")),
          "every rank keeps the whole model"),
    wrong("no_sync as for DDP", "fsdp",
          ((FSDP_SYNC, "            raw_model.no_sync()\n"),),
          "has no attribute 'no_sync'"),
    wrong("rank 0 alone saves", "fsdp",
          ((SAVE_ALL, "        if rank == 0 and save:\n"),),
          "save", suite=True),
    # another stage's script
    wrong("the DDP script", "fsdp", "ddp", "the model is wrapped in DDP"),
    # sharding
    wrong("the optimizer made before", "fsdp",
          ((FSDP_SHARD + OPTIMIZER, OPTIMIZER + FSDP_SHARD),
           *ON_THE_CPU),
          "optimizer updates another model",
          suite=True),
    wrong("the blocks alone", "fsdp",
          ((FSDP_LOOP, "for module in raw_model.transformer.h:"),
           *ON_THE_CPU,
           (FSDP_SYNC, "            for block in raw_model.transformer.h:\n"
            "                block.set_requires_gradient_sync("
            "is_last_microbatch)\n")),
          ""),
    wrong("another seed per rank", "fsdp",
          (("torch.manual_seed(hp.seed)  #",
            "torch.manual_seed(hp.seed + rank)  #"),),
          "it starts from other weights"),
    wrong("bf16 by a policy, always", "fsdp",
          ((FSDP_CALL, "fully_shard(module, mesh=mesh, mp_policy="
            "MixedPrecisionPolicy(torch.bfloat16))"),
           ("import fully_shard\n",
            "import MixedPrecisionPolicy, fully_shard\n")),
          "with --precision fp32 it trains in"),
    wrong("the weights not drawn", "fsdp", ((FSDP_DRAW, ""),), ""),
    # the gradients
    wrong("reduced on all but the last microbatch", "fsdp",
          ((FSDP_SYNC, FSDP_SYNC.replace("(is", "(not is")),),
          "gradients of step 0 are off",
          suite=True),
    wrong("never reduced", "fsdp",
          ((FSDP_SYNC, FSDP_SYNC.replace("is_last_microbatch", "False")),),
          ""),
    wrong("the loss not divided", "fsdp", ((DIVIDE, "loss = loss * 1"),),
          "the gradient norm of step 0 is"),
    wrong("divided by the world size", "fsdp",
          ((DIVIDE, "loss = loss / accumulation_steps / world_size"),),
          "the gradient norm of step 0 is"),
    wrong("not clipped", "fsdp", ((
        "raw_model.parameters(), 1.0)", 'raw_model.parameters(), 1e9)'),),
          "gradients of step 0 are off"),
    wrong("the norm of the part alone, for the log", "fsdp",
          ((CLIP, f"        part = nn.utils.get_total_norm({PARTS})\n"
            + CLIP), ("norm.full_tensor().item()", "part.item()")),
          "the gradient norm of step 0"),
    wrong("clipped by the norm of the part", "fsdp",
          ((CLIP, f"        norm = nn.utils.get_total_norm({PARTS})\n"
            "        for w in raw_model.parameters():\n"
            "            w.grad *= min(1.0, 1 / norm.item())\n"),
           ("norm.full_tensor().item()", "norm.item()")),
          "gradients of step 0 are off"),
    # the samples, and what is told of the losses
    wrong("every rank reads the same samples", "fsdp",
          ((RANKS, "0, 1)\n        for split"),),
          UNSHARDED.format("0 to 7")),
    wrong("the loss not averaged over ranks", "fsdp", ((SUM, ""),),
          "the logged loss of step 0"),
    wrong("the validation loss not reduced", "fsdp",
          (("    dist.all_reduce(loss)  # the sum over all ranks\n", ""),),
          "the validation loss of step"),
    wrong("rank 0 alone evaluates", "fsdp",
          (("if last or (step + 1) % hp.eval_every == 0:",
            "if rank == 0 and (last or (step + 1) % hp.eval_every == 0):"),),
          ""),
    wrong("rank 0 alone writes texts", "fsdp",
          ((TEXTS, "            if rank == 0:\n                print("
            "write_texts(raw_model, run.tokenizer, device, seed))\n"),),
          ""),
    wrong("stopped by rank 0 alone", "fsdp",
          (("        if stop:\n", "        if run.stop_requested:\n"),),
          "a signal to rank 0"),
)

FSDP_RIGHT = (
    right("the solution", "fsdp", (), suite=True),
    right("gathered weights kept for the backward pass", "fsdp",
          ((FSDP_CALL, "fully_shard(module, mesh=mesh, "
            "reshard_after_forward=False)"),)),
    right("gathered weights kept for the step", "fsdp",
          ((FSDP_CALL, "fully_shard(module, mesh=mesh, "
            "reshard_after_forward=False)"),
           (FSDP_SYNC, FSDP_SYNC + "            raw_model."
            "set_reshard_after_backward(is_last_microbatch)\n"))),
    right("FSDP's own mesh", "fsdp",
          ((FSDP_MESH, ""), (FSDP_CALL, "fully_shard(module)"))),
    right("blocks in another order", "fsdp",
          ((FSDP_LOOP,
            "for module in (*reversed(raw_model.transformer.h), raw_model):"),
           )),
    right("blocks by twos", "fsdp",
          ((FSDP_LOOP, "blocks = list(raw_model.transformer.h)\n    for "
            "module in (blocks[:2], blocks[2:], raw_model):"), *ON_THE_CPU)),
    right("all of it made on the CPU", "fsdp", ON_THE_CPU),
    right("all of it moved to the device", "fsdp",
          (*ON_THE_CPU, ("hp.recompute)\n", "hp.recompute).to(device)\n")),
          "every device has the whole model before it is sharded"),
    right("attention and MLP by themselves", "fsdp",
          ((FSDP_LOOP, "parts = [part for block in raw_model.transformer.h "
            "for part in (block.attn, block.mlp)]\n    for module in (*parts, "
            "raw_model):"),)),
    right("the model as one piece", "fsdp",
          ((FSDP_LOOP, "for module in (raw_model,):"),),
          "all weights are gathered at once"),
    right("no set_requires_gradient_sync", "fsdp", ((FSDP_SYNC, ""),),
          "gradients are reduced 4.0 times a step"),
    right("the norm by item()", "fsdp",
          (("norm.full_tensor().item()", "norm.item()"),)),
    right("a policy that changes nothing", "fsdp",
          ((FSDP_CALL, "fully_shard(module, mesh=mesh, mp_policy="
            "MixedPrecisionPolicy())"),
           ("import fully_shard\n",
            "import MixedPrecisionPolicy, fully_shard\n"))),
    right("an unfused optimizer", "fsdp", ((", fused=True)", ")"),)),
)

MPI_AVERAGE = "        average_gradients(raw_model, comm)  # once a step\n"
MPI_REDUCE = ("        comm.Allreduce(MPI.IN_PLACE, gradient)  "
              "# the sum over all ranks\n")
MPI_MEAN = "torch.from_numpy(gradient) / comm.size)"
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
MPI_EVALUATE = ("    loss = MPI.COMM_WORLD.allreduce(loss.item())  "
                "# the sum over all ranks\n")
MPI_TEXTS = """\
            texts = comm.gather(
                write_texts(raw_model, run.tokenizer, device, seed))
            if rank == 0:
"""

MPI_WRONG = (
    wrong("the single-device script", "mpi", "std",
          "it sends nothing by MPI"),
    # the gradients
    wrong("a sum, not divided", "mpi",
          ((MPI_MEAN, "torch.from_numpy(gradient))"),),
          "the gradient norm of step 0 is", suite=True),
    wrong("divided twice", "mpi",
          ((MPI_MEAN, "torch.from_numpy(gradient) / comm.size ** 2)"),),
          "the gradient norm of step 0 is"),
    wrong("Reduce for Allreduce", "mpi",
          ((MPI_REDUCE, """\
        comm.Reduce(MPI.IN_PLACE if comm.rank == 0 else gradient, gradient)
"""),), "gradients of step 0 differ",
          suite=True),
    wrong("averaged after clipping", "mpi",
          ((MPI_AVERAGE, ""), (CLIP, CLIP + MPI_AVERAGE)),
          "gradients of step 0 are off",
          suite=True),
    wrong("rank 0 alone averages", "mpi",
          ((MPI_AVERAGE, "        if rank == 0:\n            "
            "average_gradients(raw_model, comm)\n"),),
          "it hangs"),
    wrong("sent to rank 0, not back", "mpi",
          ((MPI_LOOP, """\
    for weight in model.parameters():
        parts = comm.gather(weight.grad)
        if comm.rank == 0:
            weight.grad.copy_(sum(parts) / comm.size)
"""),), "gradients of step 0 differ"),
    wrong("a blocking ring", "mpi",
          ((MPI_LOOP, MPI_RING.replace(
              "EXCHANGE", f"comm.Send(parts[-1], {NEXT})\n            "
              f"comm.Recv(part, {BEFORE})")),),
          "it hangs"),
    # the others
    wrong("Bcast inside if rank == 0", "mpi",
          (("    first_step = run.restore", """\
    if rank == 0:
        for weight in raw_model.parameters():
            comm.Bcast(weight.detach().numpy())
    first_step = run.restore"""),),
          "it hangs"),
    wrong("the rank for the local rank", "mpi",
          (("comm.Split_type(MPI.COMM_TYPE_SHARED).rank", "comm.rank"),),
          "takes device 2, but it has local rank 0",
          suite=True),
    *sharing("mpi"),
    wrong("the loss not averaged", "mpi",
          (("        comm.Allreduce(MPI.IN_PLACE, report)  "
            "# the sum over all ranks\n", ""),),
          "the logged loss of step 0"),
    wrong("rank 0 alone evaluates", "mpi",
          (("if last or (step + 1) % hp.eval_every == 0:",
            "if rank == 0 and (last or (step + 1) % hp.eval_every == 0):"),),
          "it hangs"),
    wrong("all ranks print their texts", "mpi",
          ((MPI_TEXTS, """\
            texts = [write_texts(raw_model, run.tokenizer, device, seed)]
            if True:
"""),), "rank 1 prints its texts itself"),
    wrong("another seed per rank", "mpi",
          (("torch.manual_seed(hp.seed)  #",
            "torch.manual_seed(hp.seed + rank)  #"),),
          "starts from other weights"),
    wrong("stopped by rank 0 alone", "mpi",
          (("        if stop:\n", "        if run.stop_requested:\n"),),
          "a signal to rank 0"),
)

MPI_RIGHT = (
    right("the solution", "mpi", (), suite=True),
    right("one flat buffer", "mpi", ((MPI_LOOP, MPI_FLAT),), suite=True),
    right("allreduce in lower case", "mpi",
          ((MPI_LOOP, """\
    for weight in model.parameters():
        total = comm.allreduce(weight.grad.cpu().numpy())
        weight.grad.copy_(torch.from_numpy(total) / comm.size)
"""),)),
    right("non-blocking Iallreduce", "mpi", ((MPI_LOOP, MPI_BEGUN),)),
    right("averaged at every microbatch", "mpi",
          ((MPI_AVERAGE, ""), ("            mean_loss += loss.detach()\n",
           "            mean_loss += loss.detach()\n"
           "            average_gradients(raw_model, comm)\n")),
          "gradients are reduced 4.0 times a step"),
    right("a ring of Isend and Recv", "mpi",
          ((MPI_LOOP, MPI_RING.replace(
              "EXCHANGE", f"sent = comm.Isend(parts[-1], {NEXT})\n"
              f"            comm.Recv(part, {BEFORE})\n"
              "            sent.Wait()")),)),
    right("a ring of Sendrecv", "mpi",
          ((MPI_LOOP, MPI_RING.replace(
              "EXCHANGE", f"comm.Sendrecv(parts[-1], {NEXT}, recvbuf=part, "
              f"source={BEFORE})")),)),
    right("the weights sent by rank 0", "mpi",
          (("    first_step = run.restore", """\
    for weight in raw_model.parameters():
        comm.Bcast(weight.detach().numpy())
    first_step = run.restore"""),)),
    right("mpi4py by its own name, too", "mpi",
          (("import torch\nfrom torch import nn\n", "import torch\n"
            "from mpi4py import MPI as theirs\nfrom torch import nn\n"),)),
)

# ----------------------------------------------- of tensor parallelism

TP_PLAN = """\
    tp.parallelize_module(model, mesh, {
        "transformer.wte": tp.RowwiseParallel(input_layouts=Replicate()),
        "transformer.h.*.attn.c_attn": tp.ColwiseParallel(),
        "transformer.h.*.attn.c_proj": tp.RowwiseParallel(),
        "transformer.h.*.mlp.c_fc": tp.ColwiseParallel(),
        "transformer.h.*.mlp.c_proj": tp.RowwiseParallel(),
        "lm_head": tp.ColwiseParallel(use_local_output=False),
    })
"""
TP_ATTENTION = """\
        "transformer.h.*.attn.c_attn": tp.ColwiseParallel(),
        "transformer.h.*.attn.c_proj": tp.RowwiseParallel(),
"""
TIE = ("    model.lm_head.weight = model.transformer.wte.weight"
       "  # tied again\n")
TP_CALL = '    parallelize(raw_model, mesh["tp"])\n'
MESH_SHARD = """\
    # a part of each block goes to each device, and of what is in no block
    for module in (*raw_model.transformer.h.children(), raw_model):
        draw_weights(raw_model, module)
        fully_shard(module, mesh=mesh["dp"])
"""
TP_CLIP = "        norm = clip_grad_norm(raw_model, 1.0, world_size)\n"
TP_LOSS = "return loss.full_tensor()"
GROUPS = RANKS.replace("rank, world_size", "dp_rank, dp_size")
HEADS = """\
        qkv = self.c_attn(x).view(B, T, -1, 3, self.head_size)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each (B, heads, T, head_size)
"""
BY_THREES = """\
        q, k, v = (part.view(B, T, -1, self.head_size).transpose(1, 2)
                   for part in self.c_attn(x).chunk(3, dim=-1))
"""
# the norm by hand: the squares of what a rank has, times a factor
BY_SQUARES = """\
        weights = list(raw_model.parameters())
        square = sum(w.grad.to_local().square().sum() for w in weights)
{reduce}        norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(weights, 1.0, norm, foreach=False)
"""
ADD_UP = "        dist.all_reduce(square)\n"
NOT_SUMMED = """\
    def keep(module, inputs):
        inputs[0].requires_grad and inputs[0].register_hook(
            lambda grad: DTensor.from_local(
                grad.to_local(), grad.device_mesh, [Replicate()]))

    for block in model.transformer.h:
        block.attn.c_attn.register_forward_pre_hook(keep)
        block.mlp.c_fc.register_forward_pre_hook(keep)
"""

TP_WRONG = (
    # the changes of the lesson, each left out alone
    wrong("the plan's names not imported", "tp",
          (("from torch.distributed.tensor import Replicate\n", ""),),
          "NameError: name 'Replicate' is not defined"),
    wrong("tp not imported", "tp",
          (("from torch.distributed.tensor import parallel as tp\n", ""),),
          "NameError: name 'tp' is not defined"),
    wrong("no plan", "tp", ((TP_PLAN + TIE, "    pass\n"),),
          ""),
    wrong("not tied again", "tp", ((TIE, ""),),
          "",
          suite=True),
    wrong("validation by TP groups", "tp",
          ((VALIDATION, "(loss / num_batches / (data.stride // data.B))"),),
          "the validation loss of step 2"),
    wrong("no mesh", "tp",
          (("    mesh = dist.init_device_mesh(\n        device.type, "
            "(dp_size, tp_size), mesh_dim_names=(\"dp\", \"tp\"))\n", ""),),
          "NameError: name 'mesh' is not defined"),
    wrong("not parallelized", "tp", ((TP_CALL, ""),), ""),
    wrong("sharded over all ranks", "tp",
          (('fully_shard(module, mesh=mesh["dp"])',
            "fully_shard(module, mesh=dist.init_device_mesh("
            "device.type, (world_size,)))"),), ""),
    wrong("sharded before it is split", "tp",
          ((TP_CALL, ""), (MESH_SHARD, MESH_SHARD + TP_CALL)), ""),
    wrong("FSDP's norm", "tp",
          ((TP_CLIP, CLIP),
           ("norm = norm.item()", "norm = norm.full_tensor().item()")),
          ""),
    # another stage's script
    wrong("the FSDP script", "tp", "fsdp", "it has no --tensor-parallel"),
    # what runs to the end, and is wrong
    wrong("c_attn in three parts", "tp", ((HEADS, BY_THREES),),
          "gradients of step 0 are off"),
    wrong("the gradient of an input not summed", "tp",
          ((TIE, NOT_SUMMED + TIE),
           ("tensor import Replicate\n", "tensor import DTensor, Replicate\n"
            )), "gradients of step 0 differ"),
    wrong("another seed a rank", "tp",
          (("torch.manual_seed(hp.seed)  #",
            "torch.manual_seed(hp.seed + rank)  #"),),
          "rank 1 starts from other weights"),
    wrong("all TP groups read the same samples", "tp",
          ((GROUPS, "0, 1)\n        for split"),),
          UNSHARDED.format("0 to 7")),
    wrong("the norm of the part", "tp",
          ((TP_CLIP, BY_SQUARES.format(reduce="")),),
          "gradients of step 0"),
    wrong("the norm counts copies", "tp",
          ((TP_CLIP, BY_SQUARES.format(reduce=ADD_UP)),),
          "gradients of step 0 are off"),
    wrong("not clipped", "tp",
          (("(raw_model, 1.0, w", "(raw_model, 1e9, w"),),
          "gradients of step 0 are off"),
    wrong("the loss not divided", "tp", ((DIVIDE, "loss = loss * 1"),),
          "the gradient norm of step 0 is"),
    wrong("the loss divided by TP groups", "tp",
          (("(report / world_size)", "(report / dp_size)"),),
          "the logged loss of step 0"),
    wrong("the loss not added up", "tp", ((SUM, ""),),
          "the logged loss of step 0"),
    wrong("reduced on all but the last microbatch", "tp",
          ((FSDP_SYNC, FSDP_SYNC.replace("(is", "(not is")),),
          "gradients of step 0"),
    wrong("rank 0 alone saves", "tp",
          ((SAVE_ALL, "        if rank == 0 and save:\n"),),
          ""),
    wrong("the optimizer made before", "tp",
          ((OPTIMIZER, ""), (TP_CALL, OPTIMIZER + TP_CALL)),
          "optimizer updates another model"),
)

TP_RIGHT = (
    right("the solution", "tp", (), suite=True),
    right("the logits and the embedding whole", "tp",
          (('        "transformer.wte": tp.RowwiseParallel('
            "input_layouts=Replicate()),\n", ""),
           ('        "lm_head": tp.ColwiseParallel(use_local_output=False),\n',
            ""), (TIE, ""), (TP_LOSS, "return loss"),
           ("logits.full_tensor()[:, :", "logits[:, :"))),
    right("the MLPs alone", "tp",
          ((TP_ATTENTION, ""),)),
    right("SequenceParallel", "tp",
          ((TP_PLAN, """\
    parts = Shard(1)
    tp.parallelize_module(model, mesh, {
        "transformer.wte": tp.RowwiseParallel(
            input_layouts=Replicate(), output_layouts=parts),
        "transformer.wpe": tp.RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(0)),
        "transformer.h.*.ln_1": tp.SequenceParallel(),
        "transformer.h.*.attn.c_attn": tp.ColwiseParallel(
            input_layouts=parts),
        "transformer.h.*.attn.c_proj": tp.RowwiseParallel(
            output_layouts=parts),
        "transformer.h.*.ln_2": tp.SequenceParallel(),
        "transformer.h.*.mlp.c_fc": tp.ColwiseParallel(input_layouts=parts),
        "transformer.h.*.mlp.c_proj": tp.RowwiseParallel(
            output_layouts=parts),
        "transformer.ln_f": tp.SequenceParallel(),
        "lm_head": tp.ColwiseParallel(
            input_layouts=parts, use_local_output=False),
    })
"""), ("import Replicate\n", "import Replicate, Shard\n"),
           ("logits = self(idx[:, -self.config.block_size:])[:, -1]\n",
            "known = idx[:, -self.config.block_size:]\n"
            "            n = known.shape[1]\n"
            "            logits = self(F.pad(known, (0, -n % 4)))[:, n - 1]\n"
            ))),
    right("the loss of gathered logits", "tp",
          ((TP_LOSS, "return loss"),
           ("logits.full_tensor()[:, :", "logits[:, :"),
           ("use_local_output=False", "output_layouts=Replicate()"))),
)

# ------------------------------------------------------ of three dimensions

D3_CUT = '    cut(raw_model, mesh["pp"])\n'
D3_PLACE = "if i * num_stages // model.config.n_layer == stage})"
D3_SUM = """\
        if ends:  # each end has a part of the tied matrix's gradient
            dist.all_reduce(tied.weight.grad.to_local(), group=ends)
"""
D3_CLIP = ("        norm = clip_grad_norm("
           "raw_model, 1.0, world_size // pp_size)\n")
D3_SCHEDULE = "self.schedule = Schedule1F1B("
D3_LOSS = "lambda loss, target: loss)"
D3_PIPELINE = "Pipeline(model, accumulation_steps,"
D3_READ = "S // dp_size, T,\n"
D3_JOIN = """\
        dist.all_reduce(loss, group=self.group)  # the other stages add 0
"""
D3_ENDS = "    ends = join_tied_ends(mesh) if pp_size > 1 else None\n"
D3_WRONG = (
    # the changes of the lesson, each left out alone
    wrong("every pipeline stage embeds", "3d",
          (("        x = idx  # or (B, T, n_embd), from the pipeline stage "
            "before\n        if self.transformer.wte:\n",
            "        if True:\n"),),
          ""),
    wrong("the loss left a DTensor", "3d", ((TP_LOSS, "return loss"),), ""),
    wrong("evaluated with the gradients", "3d",
          (("self.schedule.step if self.training else self.schedule.eval",
            "self.schedule.step"),), ""),
    wrong("validation by microbatches", "3d",
          (("val_data, hp.eval_minibatches,",
            "val_data, hp.eval_minibatches * accumulation_steps,"),),
          "the validation loss of step 2"),
    wrong("the pipeline's loss not joined", "3d", ((D3_JOIN, ""),),
          "the logged loss of step 0", suite=True),
    wrong("a mesh of two dimensions", "3d",
          (("device.type, (pp_size, dp_size, tp_size),\n"
            '        mesh_dim_names=("pp", "dp", "tp"))',
            "device.type, (dp_size, tp_size),\n"
            '        mesh_dim_names=("dp", "tp"))'),), ""),
    wrong("the ends not joined", "3d", ((D3_ENDS, ""),),
          "NameError: name 'ends'"),
    wrong("the weights not drawn", "3d",
          (("        draw_weights(raw_model, module)\n",
            ""),), ""),
    # another stage's script
    wrong("the script of tp", "3d", "tp", "it has no --pipeline-parallel"),
    # what runs to the end, and is wrong
    wrong("the tied gradient not summed", "3d", ((D3_SUM, ""),),
          "gradients of step 0 differ between", suite=True),
    wrong("the tied gradient averaged", "3d",
          ((D3_SUM, D3_SUM
            + "            tied.weight.grad.to_local().div_(2)\n"),),
          "gradients of step 0 are off"),
    wrong("the tied gradient summed after clipping", "3d",
          ((D3_SUM + D3_CLIP, D3_CLIP + D3_SUM),),
          "gradients of step 0 are off"),
    wrong("the norm of the part", "3d",
          ((D3_CLIP, BY_SQUARES.format(reduce="")),),
          "gradients of step 0"),
    wrong("data by the global rank", "3d",
          ((GROUPS, RANKS),),
          "in step 0 the first pipeline stage reads samples"),
    wrong("all TP groups read the same samples", "3d",
          ((GROUPS, "0, 1)\n        for split"),),
          "its offset is 0, not dp_rank * B"),
    wrong("a block left out", "3d",
          ((D3_PLACE, D3_PLACE[:-2]
            + "\n        and not 0 < stage == i - 1})"),),
          "no pipeline stage has transformer.h.2"),
    wrong("a block held twice", "3d",
          ((D3_PLACE, D3_PLACE[:-2] + " or i == 1})"),),
          "two pipeline stages have transformer.h.1"),
    wrong("gradients not divided by the schedule", "3d",
          ((D3_LOSS, D3_LOSS[:-1] + ", scale_grads=False)"),),
          "the gradient norm of step 0"),
    wrong("the loss divided, too", "3d",
          ((D3_LOSS, "lambda loss, target: loss / num_microbatches)"),), ""),
    wrong("the loss not added up", "3d", ((SUM, ""),),
          "the logged loss of step 0"),
    wrong("gradients never zeroed", "3d", ((ZERO, ""),),
          "gradients of step 1 are off"),
    wrong("fewer microbatches than pipeline stages", "3d",
          ((D3_PIPELINE, "Pipeline(model, 1,"),), ""),
    wrong("rank 0 alone saves", "3d",
          ((SAVE_ALL, "        if rank == 0 and save:\n"),),
          ""),
)

D3_RIGHT = (
    right("the solution", "3d", ()),  # the suite checks it in a browser
    right("GPipe", "3d",
          (("import PipelineStage, Schedule1F1B",
            "import PipelineStage, ScheduleGPipe"),
           (D3_SCHEDULE, "self.schedule = ScheduleGPipe("))),
    right("Interleaved1F1B with one chunk", "3d",
          (("import PipelineStage, Schedule1F1B",
            "import PipelineStage, ScheduleInterleaved1F1B"),
           (D3_SCHEDULE, "self.schedule = ScheduleInterleaved1F1B("),
           ("        stage, num_micro", "        [stage], num_micro"))),
    right("another plan", "3d",
          ((TP_ATTENTION, ""),)),
    right("blocks cut unevenly", "3d",
          ((D3_PLACE, "if min(num_stages - 1, (i == 1)\n"
            "               + i * num_stages // model.config.n_layer) == "
            "stage})"),)),
)

OWN_NAMES = """\
rank me
local_rank my_gpu
world_size ranks
round_size at_once
accumulation_steps turns
is_last_microbatch done
microbatch i
report both
texts written
"""
MESH_NAMES = OWN_NAMES + """\
dp_rank team
dp_size teams
tp_size team_size
mesh grid
"""
MEAN = """\
def over_ranks(*numbers):
    total = torch.tensor(numbers)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def write_texts("""
OWN_MEAN = ((REPORT, "        mean_loss, stop = over_ranks(mean_loss, "
             "run.stop_requested)\n"), ("def write_texts(", MEAN))
OWN_WORLD = """\
    who = {key: int(os.environ.get(key, default)) for key, default in (
        ("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))}
    rank, local_rank, world_size = who.values()
"""
OWN_STYLE = (
    right("names of one's own", "ddp", (), names=OWN_NAMES),
    right("a function for the mean over ranks", "ddp", OWN_MEAN),
    right("the world in another order", "ddp",
          ((WORLD, OWN_WORLD), (JOIN, """\
    dist.init_process_group(
        dist.get_default_backend_for_device(device), rank=rank,
        world_size=world_size, init_method="env://" if "RANK" in os.environ
        else "tcp://localhost:0")
"""), (OFFSET, "self.offset = B * rank\n"
               "        self.stride = B * world_size"))),
    right("the wrapper before the run", "ddp",
          ((WRAP, ""), ("    model = compile_model(raw_model, device) if "
                        "hp.compile else raw_model\n", ""), (RESTORE, RESTORE
            + "    ready = raw_model\n    if hp.compile:\n        ready = "
            "compile_model(raw_model, device)\n    model = "
            "DistributedDataParallel(module=ready)\n"))),
    right("names of one's own", "mpi", (), names=OWN_NAMES),
    right("two sums in place of one", "mpi",
          (("        report = np.array([mean_loss.item(), "
            "run.stop_requested])\n", ""), (MPI_SUM + " over all ranks\n", ""),
           ("mean_loss, stop = (report / world_size).tolist()",
            "stop = comm.allreduce(run.stop_requested, op=MPI.MAX)\n"
            "        mean_loss = comm.allreduce(mean_loss.item()) / "
            "world_size"))),
    right("names of one's own", "lit", (), names=OWN_NAMES),
    right("names of one's own", "fsdp", (), names=OWN_NAMES + "mesh grid\n"),
    right("a function for the mean over ranks", "fsdp", OWN_MEAN),
    right("names of one's own", "tp", (), names=MESH_NAMES),
    right("a function for the mean over ranks", "tp", OWN_MEAN),
    right("names of one's own", "3d", (), names=MESH_NAMES + "pp_size depth\n"
          ),
)

CASES = [*DDP_WRONG, *DDP_RIGHT, *LIT_WRONG, *LIT_RIGHT, *FSDP_WRONG,
         *FSDP_RIGHT, *MPI_WRONG, *MPI_RIGHT, *TP_WRONG, *TP_RIGHT, *D3_WRONG,
         *D3_RIGHT, *OWN_STYLE]

if __name__ == "__main__":
    sys.exit(0 if run(sys.argv[1:]) else 1)
