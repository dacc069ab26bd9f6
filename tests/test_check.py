"""`check ddp`: planted mistakes are named, correct variants pass."""

import pytest
from conftest import edit

from workshop.check import main
from workshop.diff import solution
from workshop.errors import UserError

STEP = """\
            with nullcontext() if reduce else model.no_sync():
                loss = training_step(model, batch, device, hp.precision)
"""
MISTAKES = {
    "forward on the raw model": (
        [("loss = training_step(model, ", "loss = training_step(raw_model, ")],
        "gradients of step 0 differ between rank 0 and rank 1",
        "call the DDP wrapper"),
    "logged loss not reduced": (
        [("        dist.all_reduce(report)  # the sum over all ranks\n", ""),
         ("(report / world_size)", "report")],
        "the logged loss of step 0", "all_reduce it"),
    "logged loss divided but not reduced": (
        [("        dist.all_reduce(report)  # the sum over all ranks\n", "")],
        "the logged loss of step 0", "not summed over ranks"),
    "logged loss summed but not divided": (
        [("(report / world_size)", "report")],
        "the logged loss of step 0", "divide it by the world size"),
    "every rank reads the same samples": (
        [("rank, world_size, vocab_size)\n", "0, 1, vocab_size)\n")],
        "samples of step 0", "read the same samples"),
    "rank offsets that overlap": (
        [("self.position = i + self.rank * self.B",
          "self.position = i + self.rank * self.B // 2"),
         ("self.position += self.world_size * self.B",
          "self.position += self.B")],
        "samples of step 0", "overlap"),
    "accumulation not divided by the world size": (
        [("accumulation_steps = S // (B * world_size)",
          "accumulation_steps = S // B")],
        "samples of step 0", "divided by the world size"),
    "loss divided twice": (
        [("loss = loss / accumulation_steps",
          "loss = loss / accumulation_steps / world_size")],
        "gradients of step 0 are off", "divided by the world size"),
    "no division by the accumulation": (
        [("loss = loss / accumulation_steps", "loss = loss / 1")],
        "gradients of step 0 are off", "not divided by accumulation_steps"),
    "another seed per rank and no broadcast": (
        [("torch.manual_seed(hp.seed)", "torch.manual_seed(hp.seed + rank)"),
         ("gradient_as_bucket_view=True", "init_sync=False")],
        "rank 1 starts from other weights", "the same seed"),
    "all ranks write the checkpoint": (
        [("if rank == 0 and save:", "if save:")],
        "ended with an error", "if rank == 0"),
    "all ranks write a checkpoint of their own": (
        [("        if rank == 0 and save:\n", "        if save:\n"
          "            torch.save(raw_model.state_dict(),"
          " run.folder / 'my.pt')\n"
          "        if rank == 0 and save:\n")],
        "rank 1 writes my.pt too", "if rank == 0"),
    "validation loss not reduced": (
        [("    dist.all_reduce(loss)  # the sum over all ranks\n", "")],
        "the validation loss of step", "evaluate()"),
    "wrapped model saved": (
        [("run.save(step + 1, raw_model,", "run.save(step + 1, model,")],
        "the checkpoint has other names", "raw model"),
    "last microbatch not synchronised": (
        [("reduce = microbatch == accumulation_steps - 1",
          "reduce = microbatch == 0")],
        "gradients of step 0", "no_sync()"),
    "a script that exits early": (
        [("        mean_loss = torch.zeros(",
          "        if step == 2:\n            return\n"
          "        mean_loss = torch.zeros(")],
        "ended after 2 of 6 steps", "early return"),
    "the local rank taken for the rank": (  # it is, on one node
        [('rank = int(os.environ["RANK"])',
          'rank = int(os.environ["LOCAL_RANK"])')],
        "rank 2 called run.log()", "every node has a local rank 0"),
    "stopped without a checkpoint": (
        [("save = last or stop or", "save = last or")],
        "a signal ends it without a checkpoint", "save before"),
    "a signal is not heeded": (
        [("        if stop:\n            break\n", "")],
        "a signal to rank 0 does not end it", "run.stop_requested"),
    "an error in the script": (
        [("local_rank = int(", "local_rang = int(")],
        "NameError", "the first error"),
}


def plant(folder, changes, stage="ddp"):
    """The stage's solution with these changes, [(old, new)], as a script."""
    script = folder / "train_gpt2.py"
    script.write_text(edit(solution(stage).read_text(), *changes))
    return script


def assert_named(stage, mistake, tmp_path, capsys):
    """The first FAIL is the mistake's symptom, and the hint says its cause."""
    changes, symptom, hint = mistake
    script = plant(tmp_path, changes, stage)
    before = script.read_bytes()
    assert not main(stage, script)
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if "  FAIL  " in line)
    assert symptom in lines[first]
    assert hint in lines[first + 1]
    assert script.read_bytes() == before


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_named(name, tmp_path, capsys):
    assert_named("ddp", MISTAKES[name], tmp_path, capsys)


def test_a_collective_that_only_rank_0_calls(tmp_path, capsys):
    """It hangs: the check ends it, and shows where the ranks are."""
    script = plant(tmp_path, [
        ("        if rank == 0:\n            run.log(",
         "        if rank == 0:\n            dist.barrier()\n"
         "            run.log(")])
    assert not main("ddp", script, patience=10)
    out = capsys.readouterr().out
    line = script.read_text().splitlines().index(
        "            dist.barrier()") + 1
    assert f"it hangs: rank 0 waits in line {line} (barrier)" in out
    assert "none inside `if rank == 0:`" in out


def test_a_rank_that_decides_by_itself_to_stop(tmp_path, capsys):
    script = plant(tmp_path, [
        ("        mean_loss, stop = (report",
         "        stop = run.stop_requested\n        mean_loss, _ = (report")])
    assert not main("ddp", script, patience=10)
    out = capsys.readouterr().out
    assert out.count("FAIL") == 1
    assert "a signal to rank 0 does not end them all: it hangs" in out
    assert "-> all ranks have to stop at the same step: all_reduce" in out


def test_a_script_that_is_no_python(tmp_path):
    """One line that says where, before anything is started."""
    script = plant(tmp_path, [("def main():", "def main()")])
    line = script.read_text().splitlines().index("def main()") + 1
    with pytest.raises(UserError, match=f"line {line}: expected ':'"):
        main("ddp", script)
    with pytest.raises(UserError, match="No such file"):
        main("ddp", tmp_path / "moved.py")


def test_a_missing_no_sync_is_a_warning(tmp_path, capsys):
    script = plant(tmp_path, [
        ("nullcontext() if reduce else model.no_sync()", "nullcontext()")])
    assert main("ddp", script)
    out = capsys.readouterr().out
    assert "warn  gradients are reduced 4.0 times a step" in out
    assert "warn  gradients are reduced 2.0 times a step" in out
    assert "Mind the warning" in out


def test_the_same_texts_on_all_ranks_are_a_warning(tmp_path, capsys):
    script = plant(tmp_path, [
        ("seed = hp.seed + 1000 * step + rank", "seed = hp.seed")])
    assert main("ddp", script)
    assert capsys.readouterr().out.count("warn  all ranks write the same") == 2


def test_the_single_device_script_is_not_distributed(tmp_path, capsys):
    assert not main("ddp", solution("std"))
    out = capsys.readouterr().out
    assert "2 processes\n  FAIL" in out
    assert "each process takes itself for the only one" in out


VARIANTS = {
    "the solution": [],
    "renamed variables": [
        ("mean_loss, stop", "average, stop"),
        ("run.check_finite(step, mean_loss", "run.check_finite(step, average"),
        ("run.log(step, mean_loss", "run.log(step, average"),
        ("reduce = microbatch", "last_one = microbatch"),
        ("if reduce else", "if last_one else")],
    "require_backward_grad_sync": [
        (STEP, "            model.require_backward_grad_sync = reduce\n"
         "            if True:\n"
         "                loss = training_step(model, batch, device, "
         "hp.precision)\n")],
    "its own sampler arithmetic": [  # rank r: a block of the minibatch
        ("samples = range(self.position, self.position + self.B)",
         "per = 16 // self.world_size\n"
         "        done = (self.position - self.rank * self.B)"
         " // self.world_size\n"
         "        first = done // per * 16 + self.rank * per + done % per\n"
         "        samples = range(first, first + self.B)")],
    "gradients reduced by hand": [
        ("DistributedDataParallel(raw_model, gradient_as_bucket_view=True)",
         "raw_model"),
        (STEP, "            if True:\n"
         "                loss = training_step(model, batch, device, "
         "hp.precision)\n"),
        ("        norm = nn.utils",
         "        for w in raw_model.parameters():\n"
         "            dist.all_reduce(w.grad)\n"
         "            w.grad /= world_size\n"
         "        norm = nn.utils")],
    "other print-outs, no compile": [
        ("    if hp.compile:\n"
         "        model = compile_model(model, device)\n", ""),
        ("    for step in range(", "    print('rank', rank, 'is ready')\n"
         "    for step in range(")],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_correct_variant_passes(name, tmp_path, capsys):
    assert main("ddp", plant(tmp_path, VARIANTS[name])), (
        capsys.readouterr().out)
    out = capsys.readouterr().out
    assert "FAIL" not in out and "warn" not in out
    assert out.rstrip().endswith("what the single device computes.")
