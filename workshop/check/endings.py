"""How a trial ended, where it did not end well: what happened, and why."""

import ast
import re
import signal

from workshop.check.causes import asks_the_launcher, thinks_it_is_rank_0
from workshop.check.findings import fail
from workshop.check.trial import STEPS
from workshop.stages import STAGES

TO_ONE = ("send", "ssend", "isend", "issend", "recv", "irecv")
# What an error says -> what to do; \1 is what the pattern has found.
HINTS = (
    (r"name 'MPI' is not defined",
     "it is imported at the top: from backstage.mpi import MPI"),
    (r"'DistributedDataParallel' object has no attribute '(\w+)'",
     r"\1 is the raw model's: raw_model.\1, the wrapper has only forward"),
    (r"'FSDP\w+' object has no attribute 'no_sync'",
     "a sharded model has another switch: "
     "raw_model.set_requires_gradient_sync(is_last_microbatch)"),
    (r"has no attribute 'set_requires_gradient_sync'",
     "it is a method of what is sharded: fully_shard(raw_model, mesh=mesh) "
     "changes the raw model in place, a wrapper has not got it"),
    (r"'Tensor' object has no attribute 'full_tensor'",
     "the gradients are no DTensors: is the model sharded, and does the last "
     "microbatch of a step reduce them?"),
    (r"got mixed torch.Tensor and DTensor",
     "some of it is sharded and some is not: fully_shard for each block and "
     "for the model, and the optimizer after that"),
    (r"has no attribute '(no_sync|require_backward_grad_sync)'",
     r"\1 is the wrapper's: model = DistributedDataParallel(raw_model)"),
    (r"float\(\) argument must be .* not 'NoneType'", "the Trainer hands "
     "over its gradient_clip_val, None by default: gradient_clip_val=1.0"),
    (r"Default process group has not been initialized",
     "the processes have not met yet: dist.init_process_group("
     "dist.get_default_backend_for_device(device)) comes before"),
    (r"NameError: name '(rank|local_rank|world_size)'",
     "the launcher says it in an environment variable: RANK, LOCAL_RANK, "
     "WORLD_SIZE"),
    (r"NameError: name '(\w+)'", r"\1 is not defined there: is an import or "
     "another change missing? The diff shows what is left"),
    (r"KeyError: '(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE)'",
     r"plain python sets no \1: give it a value where there is no launcher"),
    (r"MASTER_(ADDR|PORT) expected, but not set",
     "without a launcher this is a world of one: set RANK, LOCAL_RANK, "
     "WORLD_SIZE, MASTER_ADDR and MASTER_PORT where RANK is not there"),
    (r"rank [1-9]\d* called run\.\w+\(\)|rank 0 alone",
     "guard it with `if rank == 0:`"),
    (r"(?i)(cuda|nccl|xpu|hip)\b.*(driver|available|compiled|support|found"
     r"|GPU)|Torch not compiled",
     "the check runs on the CPU, without a GPU: use_device(hp.device, "
     "local_rank) and what depends on `device` work on both"),
    (r"No space left|could not be written", "make room on the disk"),
)

# The same of scripts with a mesh of devices, with the function that the error
# comes from: in another one the same words mean something else.
DTENSORS = r"got mixed torch.Tensor and DTensor"
MESH_HINTS = (
    (r"has no attribute '((?:tensor|pipeline)_parallel)'", "",
     r"add the flag to Hyperparameters: \1: int = 1"),
    (r"'ModuleList' object has no attribute 'values'", "", "the blocks are "
     'in a ModuleDict after cut(raw_model, mesh["pp"])'),
    (r"Number of microbatches .* must be", "", "PyTorch's schedule wants at "
     "least as many microbatches as pipeline stages: Pipeline(model, "
     "accumulation_steps, ...)"),
    (r"arg_mbs|num_chunks", "", "the schedule cuts a "
     "batch into accumulation_steps microbatches: the batch has S // dp_size "
     "samples"),
    (DTENSORS, "generate", "each rank has the logits of its own tokens: "
     "logits.full_tensor() puts them together"),
    (DTENSORS, "forward", "the loss of split logits needs "
     "@tp.loss_parallel() around main(), the backward pass included"),
    (r"AssertionError|not allocated yet|sharding strategy|" + DTENSORS,
     "main|evaluate|training_step|forward", "the loss of split logits is a "
     "DTensor: loss.full_tensor() is the plain one"),
    (r"'Tensor' object has no attribute 'full_tensor'",
     "forward|generate", "logits and loss are DTensors "
     'where the model is split: parallelize(raw_model, mesh["tp"])'),
    (r"'NoneType' object is not callable", "forward",
     "a pipeline stage has its own modules alone: `if self.transformer.wte:` "
     "before the blocks, and `if not self.lm_head: return x` after them"),
    (r"Please call eval\(\) instead", "",
     "without gradients the schedule only evaluates: self.schedule.eval, "
     "unless self.training"),
    (r"implicitly created only for scalar outputs", "",
     "the last pipeline stage returns the loss where it gets the targets: "
     "run(x, targets=y, target=y, ...)"),
    (r"value was None when it should not be", "main", "FSDP shards over "
     'another dimension of the mesh that the plan splits over: mesh["dp"]'),
    (r"Cannot distribute a DTensor with device mesh", "", "split first, then "
     "shard what is left to each rank: parallelize() before fully_shard()"),
    (r"must have the same mesh", "", "PyTorch's norm takes parameters of one "
     "mesh: clip_grad_norm(raw_model, 1.0, world_size) takes these"),
    (r"mesh_dim_names \('(\w+)',\)", "",
     r'the mesh has a dimension for each kind of parallelism, with "\1" '
     "among its mesh_dim_names"),
    (r"Mesh should not be bigger than", "", "the sides of the mesh multiply "
     "to the world size: dp_size = world_size // tp_size // pp_size"),
)


def explain(trial):
    """A `Finding` where it failed or hangs, None where it came to its end."""
    if trial.gave_up == "flood":
        return fail("it prints without end", f"{where(trial, 0)}: is a print "
                    "inside a loop that does not end?")
    if trial.gave_up == "endless":
        return fail(f"it continues after step {STEPS - 1}, the last step",
                    "max_steps is the number of updates: the loop, or the "
                    "Trainer, ends after so many")
    if trial.gave_up == "busy":
        return fail(f"it never reaches step {steps_done(trial)} but keeps "
                    f"running: {where(trial, 0)}", "a loop does not end "
                    "there: is something waited for that no rank does?")
    if trial.gave_up == "asleep":
        return hangs(trial)
    killed = [r for r, rank in enumerate(trial.ranks)
              if (rank.status or 0) < 0]
    failed = [r for r, rank in enumerate(trial.ranks) if rank.status
              and rank.status > 0]
    if killed and not (trial.by_mpi and failed):  # by whom, if not by mpirun
        rank = killed[0]
        aborted = trial.ranks[rank].status == -signal.SIGABRT
        apart = part_ways(trial) if aborted else None
        if apart:  # gloo does so where two collectives do not fit
            return apart
        return fail(f"rank {rank} was ended by "
                    f"{signal_name(trial.ranks[rank].status)}, "
                    f"{where(trial, rank)}", "not by an error of Python: "
                    "SIGKILL is what a full memory brings, SIGSEGV and "
                    "SIGABRT come from a library")
    bad = (failed if trial.by_mpi else
           [r for r, rank in enumerate(trial.ranks) if rank.status != 0])
    if not bad:
        return None
    said = {r: last_words(trial, r) for r in bad}
    # that a connection was lost is what the others saw of an error
    rank = min(bad, key=lambda r: is_effect(said[r]))
    if is_effect(said[rank]):
        apart = part_ways(trial)
        if apart:
            return apart
    unasked = ("holds a run already|another process trains in this run|"
               "(RANK|ADDR) expected|called run")
    if (re.search(unasked, said[rank])
            and STAGES[trial.stage].launcher == "torchrun"
            and not asks_the_launcher(trial)):
        return thinks_it_is_rank_0(trial)
    hint = (wrong_variable(trial) or mesh_hint(trial, said[rank])
            or next((re.sub(f"(?s).*?(?:{pattern}).*", words, said[rank])
                     for pattern, words in HINTS
                     if re.search(pattern, said[rank])), ""))
    return fail(f"rank {rank} ended with an error: {said[rank]}",
                hint or "the first error is the one to fix")


def mesh_hint(trial, said):
    """What to do about an error of a script with a mesh, or ""."""
    if not trial.flags:
        return ""
    line = re.search(r"\(line (\d+)\)$", said)
    function = function_at(trial, int(line[1])) if line else ""
    for pattern, functions, words in MESH_HINTS:
        if re.search(pattern, said) and (
                not functions or re.fullmatch(functions, function)):
            return re.sub(f"(?s).*?(?:{pattern}).*", words, said)
    return ""


def function_at(trial, line):
    """The name of the innermost function that a line belongs to."""
    inside = [node for node in ast.walk(trial.tree())
              if isinstance(node, (ast.FunctionDef, ast.Lambda))
              and node.lineno <= line <= node.end_lineno]
    last = max(inside, key=lambda node: node.lineno, default=None)
    return getattr(last, "name", "<lambda>") if last else ""


def signal_name(status):
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def is_effect(words):
    """Whether it says that another rank did something."""
    return bool(re.search(r"lost the other|onnection|gloo|Broken pipe|"
                          r"Unpickling|pickle|preamble|Timed out", words))


def last_words(trial, rank):
    """The line of an error output that says what happened, and where."""
    lines = [line for line in trial.ranks[rank].err.splitlines()
             if line.strip()]
    ours = [line for line in lines if line.startswith("error")]
    if ours:
        return ours[-1].split(": ", 1)[1]
    script = [line for line in lines if re.match(
        rf'  File "[^"]*{re.escape(trial.script.name)}"', line)]
    found = re.search(r"line \d+", script[-1]) if script else None
    errors = [line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception"
                                                 r"|Exit|Interrupt)\b", line)]
    words = (errors or lines or ["no message"])[-1].strip()
    if words.endswith("Error:"):  # the cause has the message
        words = errors[0]
    if len(words) > 200:
        words = words[:200] + " ..."
    return f"{words} ({found[0]})" if found else words


def where(trial, rank):
    """Where a rank is or was last, as far as its stack and record say."""
    stack = re.findall(r'File "(.*)", line (\d+) in (\S+)',
                       trial.ranks[rank].err)
    for file, line, name in stack:
        if file.endswith("/" + trial.script.name):
            return f"rank {rank} in line {line} ({name})"
    calls = trial.calls(rank)
    if calls and calls[-1]["lines"]:
        return f"rank {rank} after line {calls[-1]['lines'][0][0]}"
    return f"rank {rank} after {trial.updates(rank)} steps"


def steps_done(trial):
    return trial.first_step + min(
        trial.updates(rank) for rank in range(trial.mesh.size))


# ------------------------------------------------------------------- hanging


def hangs(trial):
    late = [r for r, rank in enumerate(trial.ranks) if rank.status is None]
    texts = []
    for r, rank in enumerate(trial.ranks):
        if r not in late:
            texts.append(f"rank {r} has ended")
            continue
        stack = re.findall(r'File "(.*)", line (\d+) in (\S+)', rank.err)
        inside = next((name for file, _, name in stack
                       if file.endswith("distributed_c10d.py")
                       and name != "wrapper"), stack[0][2] if stack else "?")
        inside = ([inside] + [  # the last one is MPI's
            name for file, _, name in stack
            if file.endswith("sleeping_mpi.py")])[-1]
        lines = [line for file, line, _ in stack
                 if file.endswith("/" + trial.script.name)]
        texts.append(f"rank {r} waits" + (f" in line {lines[0]}" if lines
                                          else "") + f" ({inside})")
    failed = [r for r, rank in enumerate(trial.ranks) if rank.status]
    if failed:
        return fail(f"rank {failed[0]} ended with an error: "
                    f"{last_words(trial, failed[0])}",
                    "the others wait for it: " + ", ".join(texts))
    apart = part_ways(trial)
    return fail(f"it hangs: {', '.join(texts)}",
                wrong_variable(trial) or all_send(trial, late) or
                (apart.hint if apart else "") or
                "all ranks have to call a collective (all_reduce, barrier, "
                "...) as often and in the same order: none inside `if rank "
                "== 0:`")


def all_send(trial, late):
    """A hint where each rank waits until another one receives."""
    last = [(trial.calls(rank) or [{"call": ""}])[-1]["call"]
            for rank in late]
    if not last or not set(last) <= {"send", "ssend"}:
        return ""
    return ("each waits in Send until the other receives, and none does: "
            "Isend and Irecv start both and wait afterwards, or Sendrecv "
            "does both at once")


def part_ways(trial):
    """Where the ranks first call different collectives: a `Finding`.

    Those of all ranks: what pipeline stages send each other is none.
    """
    calls = [[call for call in trial.calls(rank) if not call["group"]
              or len(call["group"]) == trial.mesh.size
              if call["call"] not in TO_ONE]
             for rank in range(trial.mesh.size)]
    for index in range(max(map(len, calls))):
        row = [one[index] if index < len(one) else None for one in calls]
        kinds = [call and (call["call"], call["elements"], place(call))
                 for call in row]
        first = kinds[0]
        other = next((r for r, kind in enumerate(kinds) if kind != first),
                     None)
        if other is None:
            continue
        said = [describe(rank, row[rank]) for rank in (0, other)]
        hint = ""
        for rank in (0, other):
            hint = hint or guard_hint(trial, row[rank])
        return fail(
            f"the ranks part ways: {said[0]}, but {said[1]}",
            hint or "all ranks have to call the same collectives in the same "
            "order")
    return None


def place(call):
    return tuple(map(tuple, call["lines"][:1]))


def describe(rank, call):
    if call is None:
        return f"rank {rank} calls nothing more"
    if not call["lines"]:
        return f"rank {rank} calls {call['call']}"
    line, _, called = call["lines"][0]
    if called == "_wrapped_call_impl":  # of torch.nn.Module
        called = "a module"
    return f"rank {rank} calls {called or call['call']} in line {line}"


def guard_hint(trial, call):
    """A hint where the call stands under a condition on the rank."""
    if call is None:
        return ""
    for line, _, called in call["lines"]:
        test = rank_test(trial, line)
        if test:
            name = called or call["call"]
            return (f"{name}() in line {line} is a collective, which all "
                    f"ranks have to call: move it out of `{test}`")
    return ""


def rank_test(trial, line):
    """The innermost condition on a rank that a line stands under, or ""."""
    found = ""
    for node in ast.walk(trial.tree()):
        if isinstance(node, (ast.If, ast.IfExp)):
            test = ast.unparse(node.test)
            body = node.body if isinstance(node.body, list) else [node.body]
            if "rank" in test and body[0].lineno <= line <= (
                    body[-1].end_lineno):
                found = f"if {test}:"
    return found


def wrong_variable(trial):
    """A hint where rank or world size come from another variable."""
    expected = {"rank": "RANK", "local_rank": "LOCAL_RANK",
                "world_size": "WORLD_SIZE"}
    for node in ast.walk(trial.tree()):
        if not isinstance(node, ast.Assign):
            continue
        pairs = [(node.targets[0], node.value)]
        if isinstance(node.targets[0], ast.Tuple) and isinstance(
                node.value, ast.Tuple):
            pairs = list(zip(node.targets[0].elts, node.value.elts,
                             strict=False))
        for target, value in pairs:
            name = getattr(target, "id", "")
            names = [part.value for part in ast.walk(value)
                     if isinstance(part, ast.Constant)
                     and isinstance(part.value, str)
                     and re.fullmatch(r"[A-Z][A-Z_]+", part.value)]
            if name in expected and names and names[0] != expected[name]:
                return (f"{name} comes from {expected[name]}, which every "
                        f"launcher sets here, not from {names[0]} "
                        f"(line {node.lineno})")
    return ""


# ----------------------------------------------------------- ending too soon


def why_early(trial):
    """Why there are not all rows, though it ended without an error."""
    if trial.by_trainer and trial.asked("Trainer"):
        return why_lightning_early(trial)
    if trial.updates(0) >= STEPS:
        return ("all updates were made, but not all logged: run.log(...) "
                "once a step, on rank 0")
    return "look for an early return, break or exit"


def why_lightning_early(trial):
    asked = trial.asked("Trainer")[-1]
    if "callbacks" not in asked:
        return ("LitRun logs and saves: the Trainer needs it, "
                "callbacks=[lit.LitRun(...)]")
    functions = {node.name for node in ast.walk(trial.tree())
                 if isinstance(node, ast.FunctionDef)}
    if trial.updates(0) >= STEPS or len(trial.rows) < trial.updates(0):
        if "validation_step" not in functions:
            return ("without a validation_step() Lightning does not "
                    "evaluate, and the steps with a validation loss are "
                    "missing")
        if trial.asked("fit")[-1] < 2:
            return ("fit() needs the loader of the validation split too: "
                    "the steps with a validation loss are missing")
        return "not all updates are logged: is LitRun among the callbacks?"
    if "max_epochs" in asked:
        return ("max_epochs ends it after a sweep over the data: leave it "
                "out, max_steps counts")
    if asked.get("max_steps") != STEPS:
        return (f"the Trainer makes {asked.get('max_steps')} updates: "
                "max_steps=max_steps")
    return ("the data ended before the last step: an iterator that goes on "
            "for ever, or max_epochs=-1")


def why_no_update(trial):
    """Why a rank makes fewer updates than there are steps."""
    if trial.by_trainer:
        asked = (trial.asked("Trainer") or [{}])[-1]
        if "accumulate_grad_batches" not in asked:
            return ("the Trainer does not know how many microbatches a step "
                    "has: accumulate_grad_batches=accumulation_steps")
        return "look at max_steps and accumulate_grad_batches"
    tests = [rank_test(trial, node.lineno) for node in ast.walk(trial.tree())
             if isinstance(node, ast.Call)
             and ast.unparse(node.func) == "optimizer.step"]
    guard = next(filter(None, tests), "")
    return ("every rank makes the same updates: optimizer.step() on all of "
            "them" + (f", outside of `{guard}`" if guard else ""))


