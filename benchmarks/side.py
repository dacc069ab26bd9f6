"""One side of a benchmark: a process that trains and says how much it needs.

    python benchmarks/side.py SCRIPT FLAGS          a stage of the course
    python benchmarks/side.py nanogpt FLAGS         nanoGPT's model and loop
    python benchmarks/side.py transformers FLAGS    what one would write first
    python benchmarks/side.py matmul PRECISION DEVICE    products of matrices

The two loops take a stage's flags, and begin with the weights of the stages.
They read the same samples in the same order and print the same lines.
"""

import math
import os
import resource
import runpy
import sys
import time
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from backstage import ROOT, dataset, flags, process
from backstage.device import use_device
from backstage.errors import run_main
from backstage.process import use_cores
from backstage.run import format_line

# ------------------------------------- nanoGPT, from its published description


class NanoBlock(nn.Module):
    """A block of github.com/karpathy/nanoGPT; GELU is GPT-2's own."""

    def __init__(self, config):
        super().__init__()
        width = config.n_embd
        self.n_head = config.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.c_attn = nn.Linear(width, 3 * width)
        self.attn.c_proj = nn.Linear(width, width)
        self.mlp.c_fc = nn.Linear(width, 4 * width)
        self.mlp.c_proj = nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2)
                   for part in self.attn.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        x = x + self.attn.c_proj(y)
        y = F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh")
        return x + self.mlp.c_proj(y)


class NanoGPT(nn.Module):
    """Its model, with the vocabulary padded as it is there."""

    def __init__(self, config):
        super().__init__()
        vocab_size = math.ceil(config.vocab_size / 128) * 128
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "h": nn.ModuleList(
                NanoBlock(config) for _ in range(config.n_layer)),
            "ln_f": nn.LayerNorm(config.n_embd)})
        self.lm_head = nn.Linear(config.n_embd, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, x, y):
        positions = torch.arange(0, x.shape[1], device=x.device)
        z = self.transformer.wte(x) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            z = block(z)
        logits = self.lm_head(self.transformer.ln_f(z))
        return F.cross_entropy(
            logits.view(-1, logits.shape[-1]), y.view(-1), ignore_index=-1)


def nanogpt(config, weights, hp, device):
    """The model, its optimizer, how to compute a loss; and the schedule."""
    model = NanoGPT(config)
    model.load_state_dict(weights)
    model.to(device)
    parameters = [*model.parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in parameters if p.dim() >= 2],
          "weight_decay": hp.weight_decay},
         {"params": [p for p in parameters if p.dim() < 2],
          "weight_decay": 0.0}],
        lr=hp.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    compiled, context = model, nullcontext()
    if device.type == "cuda":  # as its train.py does; not on a CPU
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        compiled = torch.compile(model)
        context = torch.autocast(
            "cuda", torch.bfloat16, hp.precision == "bf16")

    def loss(x, y):
        with context:
            return compiled(x, y)

    return model, optimizer, loss, True


def transformers(config, weights, hp, device):
    """The same for transformers' GPT-2: fp32, AdamW, nothing else."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.block_size,
        n_embd=config.n_embd, n_layer=config.n_layer, n_head=config.n_head,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    model.load_state_dict({  # Conv1D has these transposed, nothing is padded
        name: weight.t() if ".c_" in name and name.endswith("weight")
        else weight[:config.vocab_size] if name.endswith((
            "wte.weight", "lm_head.weight")) else weight
        for name, weight in weights.items()})
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=hp.learning_rate)
    return model, optimizer, lambda x, y: model(input_ids=x, labels=x).loss, (
        False)


# ------------------------------------------------------------------- the loop


def leave_as_it_is():
    """Let memory be given back, as torch has it."""
    process.keep_memory = lambda: None


def train(make):
    """Train as the stage std does, with the model that `make` returns."""
    sys.path.insert(0, str(ROOT / "solutions"))
    import train_gpt2_std as std

    leave_as_it_is()  # as where nothing of ours is imported
    process.prepare_process()
    hp, config = flags.parse(std.Hyperparameters, std.PRESETS, std.MODELS)
    device = use_device(hp.device)
    torch.manual_seed(hp.seed)
    config = replace(config, vocab_size=dataset.vocabulary_size(hp.data))
    weights = std.GPT(config).state_dict()
    for name, weight in weights.items():  # the stages have it head by head
        if ".c_attn." in name:
            weights[name] = weight.unflatten(
                0, (config.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
    model, optimizer, get_loss, scheduled = make(config, weights, hp, device)
    del weights
    data = std.DataIterator(
        std.get_shards(hp.data, "train"), hp.microbatch_size,
        hp.sequence_length)
    accumulation_steps = hp.minibatch_size // hp.microbatch_size
    tokens = hp.minibatch_size * hp.sequence_length
    for step in range(hp.max_steps):
        begin = time.perf_counter()
        if scheduled:
            for group in optimizer.param_groups:
                group["lr"] = std.get_lr(step, hp.max_steps, hp)
        mean_loss = torch.zeros((), device=device)
        for _ in range(accumulation_steps):
            x, y = next(data).to(device, non_blocking=scheduled)
            loss = get_loss(x, y) / accumulation_steps
            loss.backward()
            mean_loss += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean_loss = mean_loss.item()
        seconds = time.perf_counter() - begin
        speed = tokens / seconds
        print(format_line({
            "step": step, "loss": mean_loss, "norm": norm,
            "lr": optimizer.param_groups[0]["lr"], "seconds": seconds,
            "tokens_per_second": speed, "tokens_per_second_per_device": speed,
            "mfu": None, "val_loss": None}, hp.max_steps), flush=True)


def matmul(precision, name):
    """Print how many FLOP/s products of large matrices reach: the most."""
    device = use_device(name)
    use_cores()
    size = 1536 if device.type == "cpu" else 8192
    a, b = torch.randn(2, size, size, device=device, dtype={
        "bf16": torch.bfloat16, "fp32": torch.float32}[precision])
    best, end = 0.0, time.perf_counter() + 2
    while time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(4):
            a @ b
        if device.type != "cpu":
            torch.accelerator.synchronize()
        best = max(best, 8 * size**3 / (time.perf_counter() - begin))
    print(f"flops {best}")


def say_peak():
    """Print the most memory that this process had, a GPU's or its own, and how
    many graphs it has compiled.
    """
    if torch.cuda.is_initialized():
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    dynamo = sys.modules.get("torch._dynamo.utils")
    graphs = dynamo.counters["stats"]["unique_graphs"] if dynamo else 0
    # at once: other ranks print, too
    sys.stdout.write(f"memory {peak}\ngraphs {graphs}\n")
    sys.stdout.flush()


def main():
    name = sys.argv.pop(1)
    if "BENCHMARK_SHARES_GPU" in os.environ and "RANK" in os.environ:
        # NCCL refuses two ranks on a host: each says that it has its own
        os.environ.update(NCCL_HOSTID=os.environ["RANK"], LOCAL_RANK="0",
                          LOCAL_WORLD_SIZE="1")
    if name == "matmul":
        matmul(*sys.argv[1:])
    elif name in ("nanogpt", "transformers"):
        train({"nanogpt": nanogpt, "transformers": transformers}[name])
    else:
        if os.environ.get("BENCHMARK_DEFAULT"):
            leave_as_it_is()
        sys.argv[0] = name
        kind = os.environ.get("BENCHMARK_ATTENTION")
        with sdpa_kernel(getattr(SDPBackend, kind)) if kind else nullcontext():
            runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    import atexit

    atexit.register(say_peak)  # the stages leave by themselves
    run_main(main)
