"""What a script for the check is, and the places that several change."""

from dataclasses import dataclass

from conftest import edit

from workshop.stages import STAGES


@dataclass(frozen=True)
class Case:
    name: str
    says: str  # in the first line of the diagnosis, or of the warning
    changes: tuple  # pairs (old, new), or the name of another's solution
    right: bool
    stage: str = ""  # as its module is called

    def script(self):
        """The text of the script."""
        whole = [name for name in self.changes if isinstance(name, str)]
        text = STAGES[(*whole, self.stage)[0]].solution.read_text()
        return edit(text, *self.changes[len(whole):])


def wrong(name, says, *changes):
    return Case(name, says, changes, False)


def right(name, *changes, warns=""):
    return Case(name, warns, changes, True)


# ------------------------------------------------------- parts of the script

CLIP = ("        norm = nn.utils.clip_grad_norm_("
        "raw_model.parameters(), 1.0)\n")
REPORT = """\
        # a signal may reach only some ranks, but all have to stop together
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
    "attn.c_attn": tp.ColwiseParallel(),
    "attn.c_proj": tp.RowwiseParallel(),
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
