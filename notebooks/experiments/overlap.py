"""A backward pass that notes what is computed and sent, and when.

For the cells of notebooks/collectives.ipynb, in each rank. The times are real:
two processes that share the machine's cores, and gloo's own threads.
"""

import time

import torch
import torch.distributed as dist
from torch import nn


class Traced:
    """Some layers, whose gradients can be sent at any time.

    events: ["F", microbatch, begin, end] and ["B", layer, begin, end] for what
    is computed, and ["A", message, begin, end] for each all-reduce, from its
    call or from when the one before it has ended.
    """

    def __init__(self, layers=6, width=600):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(
            nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.weights = [*self.model.parameters()]
        self.x = torch.randn(256, width)
        self.events, self.sent, self.bytes = [], [], 0
        for number, weight in enumerate(self.weights):
            weight.register_post_accumulate_grad_hook(
                lambda _, number=number: self.computed(number))
        dist.all_reduce(torch.ones(1))  # all are connected
        dist.barrier()
        self.begin = time.perf_counter()
        self.before = self.free = 0

    def now(self):
        return time.perf_counter() - self.begin

    def computed(self, number):
        now = self.now()
        self.events.append(["B", number, self.before, now])
        self.before = now

    def backward(self):
        """A microbatch, forward pass included."""
        begin, number = self.now(), sum(it[0] == "F" for it in self.events)
        loss = self.model(self.x).square().mean()
        self.before = self.now()
        self.events.append(["F", number, begin, self.before])
        loss.backward()

    def send(self, gradient):
        """Begin an all-reduce of it, and go on."""
        number, called = len(self.sent), self.now()

        def end(_):
            now = self.now()
            self.events.append(["A", number, max(called, self.free), now])
            self.free = now

        work = dist.all_reduce(gradient, async_op=True)
        self.bytes += gradient.nbytes
        self.sent.append(work.get_future().then(end))

    def wait(self):
        """Wait for all of them; print how long that took."""
        computed = self.before
        for future in self.sent:
            future.wait()
        after = max(0, self.now() - computed)
        self.events.sort(key=lambda event: event[2])
        if dist.get_rank() == 0:
            print(f"{len(self.sent)} messages with {self.bytes / 1e6:.1f} MB; "
                  f"{1e3 * after:.0f} of {1e3 * self.now():.0f} ms come after "
                  "the backward pass")
