"""Watches the steps of optimizers."""

import sys

from torch.optim import optimizer as optimizers


class Updates:
    """Tells when an optimizer has its gradients, and when it has updated."""

    def __call__(self, log):
        self.log, self.depth = log, 0
        log.calls = 0  # of optimizers that have not left their update out
        optimizers.register_optimizer_step_pre_hook(self.before)
        optimizers.register_optimizer_step_post_hook(self.after)

    def before(self, optimizer, args, kwargs):
        self.depth += 1  # an optimizer may have another in it
        # a fused one leaves the update out itself, if a GradScaler says so
        skips = getattr(optimizer, "found_inf", None)
        self.log.calls += not skips
        closure = kwargs.get("closure") or (args[1] if args[1:] else None)
        if self.depth == 1:  # a closure may be where the model is first used
            self.counts = not makes_state() and not skips and (
                self.log.begun or closure is not None)
        if self.depth > 1 or not self.counts:
            return None
        if closure is None:
            self.log.tell("gradients", optimizer)
            return None

        def visible_closure():  # Lightning's: it computes the gradients
            loss = closure()
            self.log.tell("gradients", optimizer)
            return loss

        return args[:1], {"closure": visible_closure}

    def after(self, optimizer, args, kwargs):
        self.depth -= 1
        if not self.depth and self.counts:
            self.log.updates += 1
            self.log.say(update=self.log.updates)
            self.log.tell("updated", optimizer)


def makes_state():
    """Whether PyTorch initialises an optimizer's state with zero gradients."""
    frame = sys._getframe(2)
    while frame and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None
