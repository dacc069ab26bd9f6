"""Records steps for --profile N, with torch.profiler.

Each rank writes what its operators and kernels did in N steps to
RUN/profile/<date>-trace/rank<r>.json.gz. These traces open in
https://ui.perfetto.dev, and `python -m workshop profile RUN` makes a table of
where the time goes.
"""

import os

from torch import profiler

from backstage.errors import warn
from backstage.files import new_folder
from backstage.world import call_on_rank_0, get_rank_and_size

# Steps that do not count: those that allocate and compile, one in which the
# profiler warms up, and the first that it records, which starts late.
BEFORE = 5


class Recorder:
    """Records so many steps, or none. All ranks."""

    def __init__(self, steps, folder, device):
        self.profiler = None
        if not steps:
            return
        self.rank, _ = get_rank_and_size()
        folder = call_on_rank_0(
            lambda: str(new_folder(folder / "profile", "trace")))
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints
        activities = {profiler.ProfilerActivity.CPU}
        if device.type != "cpu":
            activities = profiler.supported_activities()
        self.profiler = profiler.profile(
            activities=activities, schedule=profiler.schedule(
                skip_first=BEFORE - 2, wait=0, warmup=1, active=steps + 1,
                repeat=1),
            on_trace_ready=lambda recorded: recorded.export_chrome_trace(
                f"{folder}/rank{self.rank}.json.gz"))
        self.profiler.start()

    def step_ended(self, step):
        """Called where the time of each step is taken."""
        if self.profiler:
            with profiler.record_function(f"end of step {step}"):
                pass  # a mark for those who read the trace
            self.profiler.step()

    def finish(self):
        """The run has ended, maybe before all steps were recorded."""
        if self.profiler:
            self.profiler.stop()
            if self.rank == 0 and self.profiler.step_num <= BEFORE:
                warn("--profile has recorded nothing: the run ended in its "
                     f"first {BEFORE} steps, which do not count")
