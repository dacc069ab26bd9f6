"""Train GPT-2 on many devices: tensor parallel in rows, FSDP between them.

What is not taught here is in backstage/: the flags, the run's folder with its
metrics and checkpoints, signals, and readable error messages.
"""

import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backstage import vocabulary
from backstage.device import compile_blocks, pin, use_device
from backstage.errors import UserError, require, run_main
from backstage.flags import parse
from backstage.norm import clip_grad_norm
from backstage.run import Run

# -------------------------------------------------------- model


@dataclass
class GPTConfig:
    block_size: int = 1024  # the longest sequence
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_size = config.n_embd // config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        B, T, _ = x.shape
        # query, key and value head by head: a slice holds whole heads
        qkv = self.c_attn(x).view(B, T, -1, 3, self.head_size)
        if torch.is_autocast_enabled("cpu"):  # fp32 is faster, if T is short
            qkv = qkv.float()
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each (B, heads, T, head_size)
        with torch.autocast("cpu", enabled=False):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        # GPUs multiply matrices faster when their sides divide by 128
        padded_vocab_size = math.ceil(config.vocab_size / 128) * 128
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(padded_vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            "ln_f": nn.LayerNorm(config.n_embd),
        })
        self.lm_head = nn.Linear(config.n_embd, padded_vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # tied
        self.recompute = False
        self.bf16_residual = False
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif name.endswith("c_proj.weight"):  # onto the residual stream
                std = 0.02 / math.sqrt(2 * config.n_layer)
                nn.init.normal_(weight, std=std)
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, idx, targets=None):
        """The mean loss where there are targets, else the logits.

        idx, targets: int64 (B, T); logits: (B, T, padded_vocab_size).
        """
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)
        if self.bf16_residual and torch.is_autocast_enabled(x.device.type):
            x = x.bfloat16()  # the residual stream
        for block in self.transformer.h:
            if self.recompute:  # in the backward pass, from x alone
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        # the weights are fp32 even under autocast: so is the softmax
        logits = self.lm_head(self.transformer.ln_f(x))
        logits = logits.to(self.lm_head.weight.dtype)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, generator, top_k=50):
        """Continue idx, int64 (B, T): returns (B, T + max_new_tokens)."""
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size:])[:, -1]
            logits = logits.full_tensor()[:, : self.config.vocab_size]
            values, tokens = logits.topk(min(top_k, logits.shape[1]))
            choice = torch.multinomial(
                values.softmax(dim=1), 1, generator=generator)
            idx = torch.cat((idx, tokens.gather(1, choice)), dim=1)
        return idx

    def configure_optimizers(self, hp):
        decayed, others = [], []  # biases and LayerNorms are not decayed
        for name, weight in self.named_parameters():
            is_matrix = not name.endswith("bias") and "ln_" not in name
            (decayed if is_matrix else others).append(weight)
        groups = [{"params": decayed, "weight_decay": hp.weight_decay},
                  {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(
            groups, lr=hp.learning_rate, betas=(0.9, 0.95), fused=True)
        return optimizer


def parallelize(model, mesh):
    """Split heads, MLPs and the vocabulary over the ranks of the mesh."""
    parallelize_module(model, mesh, {
        "transformer.wte": RowwiseParallel(input_layouts=Replicate()),
        "transformer.h.*.attn.c_attn": ColwiseParallel(),
        "transformer.h.*.attn.c_proj": RowwiseParallel(),
        "transformer.h.*.mlp.c_fc": ColwiseParallel(),
        "transformer.h.*.mlp.c_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(use_local_output=False),
    })
    model.lm_head.weight = model.transformer.wte.weight  # tied again


def training_step(model, batch, device, precision):
    """The mean loss of one microbatch."""
    # from pinned memory it is copied while the program goes on
    x, y = batch.to(device, non_blocking=batch.is_pinned())
    with torch.autocast(device.type, torch.bfloat16, precision == "bf16"):
        return model(x, y).full_tensor()


# --------------------------------------------------------- data


def get_shards(data, split):
    """The files of a split, "train" or "val", in order."""
    shards = sorted(Path(data).glob(f"*_{split}_*.npy"))
    require(shards, f"{data}: no shard *_{split}_*.npy is there: see --data")
    return shards


def load_tokens(shard):
    """The token ids of a shard, uint16: memory-mapped, read when used."""
    try:
        tokens = np.load(shard, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{shard}: not a whole shard, make it again "
                        f"({error})") from error
    require(tokens.dtype == np.uint16 and tokens.ndim == 1,
            f"{shard}: {tokens.dtype} {tokens.shape}, not a list of uint16")
    return tokens


class DataIterator:
    """This rank's microbatches, for ever: x and y, int64 (2, B, T).

    Sample i is tokens[i*T : i*T + T+1] of the shards laid end to end.
    The ranks take turns: rank r starts at sample r*B, reads B samples, and
    then moves on by world_size * B samples.
    """

    def __init__(self, shards, B, T, rank, world_size, vocab_size):
        self.shards = [load_tokens(shard) for shard in shards]
        self.ends = np.cumsum([len(tokens) for tokens in self.shards])
        self.B, self.T, self.vocab_size = B, T, vocab_size
        self.rank, self.world_size = rank, world_size
        self.num_samples = (int(self.ends[-1]) - 1) // T
        require(self.num_samples > 0, f"{shards[0].parent}: {self.ends[-1]} "
                f"tokens are too few for one sample of {T} and its targets")
        self.seek(0)

    def seek(self, i):
        """Let the ranks continue from sample i."""
        self.position = i + self.rank * self.B

    def sample(self, i):
        """Sample i and its last target, uint16 (T + 1,)."""
        begin = i % self.num_samples * self.T
        end = begin + self.T + 1
        parts = []
        while begin < end:  # a sample may continue in the next shard
            k = np.searchsorted(self.ends, begin, side="right")
            tokens = self.shards[k]
            first = begin - self.ends[k] + len(tokens)
            parts.append(tokens[first : first + end - begin])
            begin += len(parts[-1])
        return np.concatenate(parts)

    def __iter__(self):
        return self

    def __next__(self):
        samples = range(self.position, self.position + self.B)
        tokens = np.stack([self.sample(i) for i in samples])
        require(tokens.max() < self.vocab_size, f"token {tokens.max()} of the "
                f"data is not in the vocabulary of {self.vocab_size}")
        self.position += self.world_size * self.B
        tokens = torch.from_numpy(tokens.astype(np.int64))
        return pin(torch.stack((tokens[:, :-1], tokens[:, 1:])))


# --------------------------------- schedule and hyperparameters


def get_lr(step, max_steps, hp):
    """Linear warm-up, then half a cosine down to a tenth."""
    if step < hp.warmup_steps:
        return hp.learning_rate * (step + 1) / hp.warmup_steps
    progress = (step - hp.warmup_steps) / (max_steps - hp.warmup_steps)
    return hp.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


@dataclass
class Hyperparameters:
    """Train GPT-2."""

    preset: Literal["tiny", "nano", "gpt2", "gpt2-xl"] = "gpt2"  # the model
    data: str = ""  # folder of the shards
    run: str = ""  # folder of the run (default: runs/<date>-<time>-<stage>)
    resume: bool = False  # continue from the last checkpoint in --run
    init: str = ""  # start from the weights in this checkpoint
    max_steps: int = 0  # steps to train for (0: one epoch)
    minibatch_size: int = 512  # samples in a step
    microbatch_size: int = 0  # samples at once (0: the most that fit)
    sequence_length: int = 1024  # tokens in a sample
    learning_rate: float = 6e-4  # its maximum, after the warm-up
    warmup_steps: int = 715  # steps from 0 to the learning rate
    weight_decay: float = 0.1  # of the matrices
    precision: Literal["bf16", "fp32"] = "bf16"  # bf16 is autocast
    tensor_parallel: int = 1  # processes that share each matrix
    compile: bool = False  # compile the model
    recompute: bool = False  # compute activations twice, keep few
    bf16_residual: bool = False  # the residual stream in bf16, too
    device: str = "auto"  # cpu, cuda, xpu, mps (auto: an accelerator, if any)
    seed: int = 1337  # of the initial weights and the generated texts
    eval_every: int = 250  # steps from one validation loss to the next
    eval_minibatches: int = 4  # how much of the validation split it reads
    generate_every: int = 1000  # steps from one text to the next
    checkpoint_every: int = 250  # steps from one checkpoint to the next
    track: Literal["no", "tensorboard", "wandb"] = "no"  # metrics for it, too
    profile: int = 0  # steps to record: where does their time go?


MODELS = {
    "tiny": GPTConfig(block_size=32, n_layer=4, n_head=4, n_embd=32),
    "nano": GPTConfig(block_size=128, n_layer=4, n_head=3, n_embd=192),
    "gpt2": GPTConfig(),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
}
PRESETS = {
    "tiny": Hyperparameters(  # seconds: for tests
        "tiny", max_steps=20, minibatch_size=8, microbatch_size=2,
        sequence_length=32, learning_rate=3e-3, warmup_steps=4,
        precision="fp32", eval_every=10, generate_every=20,
        checkpoint_every=10),
    "nano": Hyperparameters(  # minutes on a CPU
        "nano", max_steps=2000, minibatch_size=8, sequence_length=128,
        learning_rate=2e-3, warmup_steps=800, eval_every=400,
        eval_minibatches=32, generate_every=1000, checkpoint_every=400),
    "gpt2": Hyperparameters(),
    "gpt2-xl": Hyperparameters(  # 25 GB of state: for several GPUs
        "gpt2-xl", microbatch_size=4, learning_rate=2e-4, recompute=True),
}

# ------------------------------------------------ training loop


@torch.no_grad()
def evaluate(model, data, num_microbatches, device, precision):
    """The mean loss of the first num_microbatches, a float."""
    data.seek(0)
    loss = torch.zeros((), device=device)
    for _ in range(num_microbatches):
        loss += training_step(model, next(data), device, precision)
    dist.all_reduce(loss)  # the sum over all ranks
    return (loss / num_microbatches / dist.get_world_size()).item()


def write_texts(model, encoding, device, seed):
    """Four continuations of a prompt, in one string."""
    prompt = encoding.encode("Hello, I'm a language model,")
    idx = torch.tensor([prompt] * 4, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    idx = model.generate(idx, 32, generator)
    return "\n".join(f"> {encoding.decode(row)}" for row in idx.tolist())


@loss_parallel()  # of logits that are split over the vocabulary
def main():
    hp = parse(Hyperparameters, PRESETS, MODELS)
    # The launcher says who we are (parse() translates the names of srun);
    # without a launcher this is a world of one.
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1",
                          MASTER_ADDR="localhost", MASTER_PORT="0")
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    device = use_device(hp.device, local_rank)
    dist.init_process_group(dist.get_default_backend_for_device(device),
                            device_id=None if device.type == "cpu" else device)
    if hp.precision == "bf16":  # TF32 for what autocast leaves in fp32
        torch.set_float32_matmul_precision("high")

    # the ranks of a row share each matrix, and read the same samples
    tp_size = hp.tensor_parallel
    dp_size = world_size // tp_size
    mesh = dist.init_device_mesh(
        device.type, (dp_size, tp_size), mesh_dim_names=("dp", "tp"))
    dp_rank = mesh.get_local_rank("dp")

    B, T, S = hp.microbatch_size, hp.sequence_length, hp.minibatch_size
    require(S % (B * dp_size) == 0, f"a minibatch of {S} samples does not "
            f"divide into microbatches of {B} on {dp_size} row(s) of the mesh")
    accumulation_steps = S // (B * dp_size)

    vocab_size = vocabulary.size(hp.data)
    train_data, val_data = (
        DataIterator(get_shards(hp.data, split), B, T,
                     dp_rank, dp_size, vocab_size)
        for split in ("train", "val"))
    max_steps = hp.max_steps or max(train_data.num_samples // S, 1)

    torch.manual_seed(hp.seed)  # the same initial weights everywhere
    config = replace(MODELS[hp.preset], vocab_size=vocab_size)
    raw_model = GPT(config).to(device)
    raw_model.recompute = hp.recompute
    raw_model.bf16_residual = hp.bf16_residual
    parallelize(raw_model, mesh["tp"])
    if hp.compile:  # the whole model cannot be compiled with DTensors in it
        compile_blocks(raw_model.transformer.h, device)
    # each rank keeps a part of each block, and of all that is in no block
    for module in (*raw_model.transformer.h, raw_model):
        fully_shard(module, mesh=mesh["dp"])
    optimizer = raw_model.configure_optimizers(hp)
    run = Run("tp", hp, config, max_steps, device)
    first_step = run.restore(raw_model, optimizer)
    train_data.seek(first_step * S)

    model = raw_model

    for step in range(first_step, max_steps):
        start_time = time.perf_counter()
        lr = get_lr(step, max_steps, hp)
        for group in optimizer.param_groups:
            group["lr"] = lr

        mean_loss = torch.zeros((), device=device)
        for microbatch in range(accumulation_steps):
            batch = next(train_data)
            # gradients are reduced once a step, after its last microbatch
            reduce = microbatch == accumulation_steps - 1
            raw_model.set_requires_gradient_sync(reduce)
            loss = training_step(model, batch, device, hp.precision)
            # backward() adds up gradients: this makes their sum the mean
            loss = loss / accumulation_steps
            loss.backward()
            mean_loss += loss.detach()
        norm = clip_grad_norm(raw_model.parameters(), 1.0, world_size)
        optimizer.step()
        optimizer.zero_grad()

        report = torch.tensor([mean_loss, run.stop_requested], device=device)
        dist.all_reduce(report)  # the sum over all ranks
        mean_loss, stop = (report / world_size).tolist()
        seconds = time.perf_counter() - start_time
        run.check_finite(step, mean_loss, norm)

        val_loss = None
        last = step + 1 == max_steps
        if last or (step + 1) % hp.eval_every == 0:
            val_loss = evaluate(
                raw_model, val_data, hp.eval_minibatches * accumulation_steps,
                device, hp.precision)
        save = last or stop or (step + 1) % hp.checkpoint_every == 0
        if rank == 0:
            run.log(step, mean_loss, val_loss, lr, norm, seconds)
        if save:  # all ranks
            run.save(step + 1, raw_model, optimizer)
        if run.encoding and (last or (step + 1) % hp.generate_every == 0):
            seed = hp.seed + 1000 * step + dp_rank
            texts = [None] * world_size
            dist.all_gather_object(
                texts, write_texts(raw_model, run.encoding, device, seed))
            if rank == 0:
                print(*texts[::tp_size], sep="\n")  # one of each row
        if stop:
            break
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_main(main)
