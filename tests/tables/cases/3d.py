"""Scripts for the check of the lesson 3d."""

from cases.case import RANKS, TP_ATTENTION, right, wrong

GROUPS = RANKS.replace("rank, world_size", "dp_rank, dp_size")
D3_PLACE = "if i * num_stages // model.config.n_layer == stage})"
D3_SUM = """\
        if ends:  # each end has a part of the tied matrix's gradient
            dist.all_reduce(tied.weight.grad.to_local(), group=ends)
"""
D3_CLIP = ("        norm = clip_grad_norm("
           "raw_model, 1.0, world_size // pp_size)\n")
D3_SCHEDULE = "self.schedule = Schedule1F1B("
D3_LOSS = "lambda loss, target: loss)"
D3_JOIN = """\
        dist.all_reduce(loss, group=self.group)  # the other stages add 0
"""

CASES = (
    # the changes of the lesson, each left out alone
    wrong("the pipeline's loss not joined", "the logged loss of step 0",
          (D3_JOIN, "")),
    # another stage's script
    wrong("the script of tp", "", "tp"),
    # what runs to the end, and is wrong
    wrong("the tied gradient summed after clipping",
          "gradients of step 0 are off", (D3_SUM + D3_CLIP, D3_CLIP + D3_SUM)),
    wrong("data by the global rank", "samples of step 1: rank 0 reads 32",
          (GROUPS, RANKS)),
    wrong("a block left out", "no rank has transformer.h.2",
          (D3_PLACE, D3_PLACE[:-2]
           + "\n        and not 0 < stage == i - 1})")),
    wrong("the loss divided, too", "",
          (D3_LOSS, "lambda loss, target: loss / num_microbatches)")),
    right("the solution"),
    right("GPipe", ("import PipelineStage, Schedule1F1B",
                    "import PipelineStage, ScheduleGPipe"),
          (D3_SCHEDULE, "self.schedule = ScheduleGPipe(")),
    right("Interleaved1F1B with one chunk",
          ("import PipelineStage, Schedule1F1B",
           "import PipelineStage, ScheduleInterleaved1F1B"),
          (D3_SCHEDULE, "self.schedule = ScheduleInterleaved1F1B("),
          ("        stage, num_micro", "        [stage], num_micro")),
    right("another plan", (TP_ATTENTION, ""),
          warns="transformer.h.0.attn.c_attn.weight is not split"),
    right("blocks cut unevenly",
          (D3_PLACE, "if (i + (i == 1 and num_stages == 2)) * num_stages\n"
           "               // model.config.n_layer == stage})")),
)
