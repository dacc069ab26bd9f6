"""What a script for the check is, and the places that several change."""

from dataclasses import dataclass

from workshop.stages import STAGES


@dataclass(frozen=True)
class Case:
    name: str
    stage: str
    changes: tuple  # of pairs (old, new); a name: that whole solution
    says: str = ""  # in the first line of the diagnosis, or of the warning
    right: bool = False
    suite: bool = False  # differs in kind: pytest runs it, too

    def script(self):
        """The text of the script."""
        if isinstance(self.changes, str):
            return STAGES[self.changes].solution.read_text()
        text = STAGES[self.stage].solution.read_text()
        for old, new in self.changes:
            assert text.count(old) == 1, (self.name, text.count(old), old)
            text = text.replace(old, new)
        return text


def wrong(name, stage, changes, says, suite=False):
    return Case(name, stage, changes, says, suite=suite)


def right(name, stage, changes, warns="", suite=False):
    return Case(name, stage, changes, warns, right=True, suite=suite)


# ------------------------------------------------------- parts of the script

CLIP = ("        norm = nn.utils.clip_grad_norm_("
        "raw_model.parameters(), 1.0)\n")
REPORT = """\
        stop = torch.full_like(mean_loss, run.stop_requested)
        report = torch.stack((mean_loss, stop))
        dist.all_reduce(report)  # the sum over all ranks
        mean_loss, stop = (report / world_size).tolist()
"""
OPTIMIZER = "    optimizer = raw_model.configure_optimizers(hp)\n"
# what the lesson says about the data, and how it goes wrong
RANKS = "rank, world_size)\n        for split"
FSDP_SYNC = ("            raw_model.set_requires_gradient_sync("
             "is_last_microbatch)\n")
TP_ATTENTION = """\
        "transformer.h.*.attn.c_attn": tp.ColwiseParallel(),
        "transformer.h.*.attn.c_proj": tp.RowwiseParallel(),
"""
TP_LOSS = "return loss.full_tensor()"
MEAN = """\
def over_ranks(*numbers):
    total = torch.tensor(numbers)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def write_texts("""
OWN_MEAN = ((REPORT, "        mean_loss, stop = over_ranks(mean_loss, "
             "run.stop_requested)\n"), ("def write_texts(", MEAN))
