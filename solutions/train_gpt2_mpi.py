"""Train GPT-2 on many devices with MPI: gradients are averaged by hand.

What is not taught here is in backstage/: the flags of a run, its folder with
metrics and checkpoints, signals, and readable error messages.
"""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backstage.dataset import vocabulary_size
from backstage.device import compile_model, pin, use_device
from backstage.errors import require, run_main
from backstage.flags import RunFlags, parse
from backstage.mpi import MPI
from backstage.process import prepare_process
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
        # GPT-2 has all queries first, then all keys, then all values; here
        # they are ordered by head, so that stage tp can split them by heads
        qkv = self.c_attn(x).view(B, T, -1, 3, self.head_size)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each (B, heads, T, head_size)
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
    def __init__(self, config, recompute=False):
        super().__init__()
        self.config, self.recompute = config, recompute
        # GPUs multiply faster if the dimensions are multiples of 128
        padded_vocab_size = math.ceil(config.vocab_size / 128) * 128
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(padded_vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            "ln_f": nn.LayerNorm(config.n_embd),
        })
        self.lm_head = nn.Linear(config.n_embd, padded_vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # tied
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif name.endswith("c_proj.weight"):  # onto the residual stream
                std = 0.02 / math.sqrt(2 * config.n_layer)
                nn.init.normal_(weight, std=std)
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, idx, targets=None):
        """The mean loss of idx, int64 (B, T); without targets, the logits."""
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            if self.recompute:  # keep x alone for the backward pass
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        # logits: (B, T, padded_vocab_size)
        logits = self.lm_head(self.transformer.ln_f(x)).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, generator, top_k=50):
        """Continue idx, int64 (B, T): returns (B, T + max_new_tokens)."""
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size:])[:, -1]
            logits = logits[:, : self.config.vocab_size]
            values, tokens = logits.topk(min(top_k, logits.shape[1]))
            choice = torch.multinomial(
                values.softmax(dim=1), 1, generator=generator)
            idx = torch.cat((idx, tokens.gather(1, choice)), dim=1)
        return idx

    def configure_optimizers(self, hp):
        weights = list(self.parameters())
        matrices = [weight for weight in weights if weight.dim() == 2]
        vectors = [weight for weight in weights if weight.dim() < 2]
        groups = [{"params": matrices, "weight_decay": hp.weight_decay},
                  {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            groups, lr=hp.learning_rate, betas=(0.9, 0.95), fused=True)


def training_step(model, batch, device, precision):
    """The mean loss of one microbatch."""
    # from pinned memory it is copied while the program goes on
    x, y = batch.to(device, non_blocking=batch.is_pinned())
    with torch.autocast(device.type, torch.bfloat16, precision == "bf16"):
        return model(x, y)


def average_gradients(model, comm):
    """Give every rank the mean of all ranks' gradients."""
    for weight in model.parameters():
        gradient = weight.grad.cpu().numpy()
        comm.Allreduce(MPI.IN_PLACE, gradient)  # the sum over all ranks
        weight.grad.copy_(torch.from_numpy(gradient) / comm.size)


# --------------------------------------------------------- data


def get_shards(data, split):
    """The files of a split, "train" or "val", in order."""
    return sorted(Path(data).glob(f"*_{split}_*.npy"))


def load_tokens(shard):
    """The token ids of a shard, uint16: memory-mapped, read when used."""
    return np.load(shard, mmap_mode="r")


class DataIterator:
    """This rank's microbatches, for ever: x and y, int64 (2, B, T).

    Sample i is tokens[i*T : i*T + T+1] of the shards laid end to end.
    The ranks take turns: rank r begins at r*B, and moves on by world_size*B.
    """

    def __init__(self, shards, B, T, rank, world_size):
        self.shards = [load_tokens(shard) for shard in shards]
        self.ends = np.cumsum([len(tokens) for tokens in self.shards])
        self.B, self.T = B, T
        self.offset, self.stride = rank * B, world_size * B
        self.num_samples = (int(self.ends[-1]) - 1) // T
        self.seek(0)

    def seek(self, i):
        """Let the ranks continue from sample i."""
        self.position = i + self.offset

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
        self.position += self.stride
        tokens = torch.from_numpy(tokens.astype(np.int64))
        return pin(torch.stack((tokens[:, :-1], tokens[:, 1:])))


# --------------------------------- schedule and hyperparameters


def get_lr(step, max_steps, hp):
    """Linear warm-up, then half a cosine down to a tenth."""
    max_lr, min_lr = hp.learning_rate, 0.1 * hp.learning_rate
    if step < hp.warmup_steps:
        return max_lr * (step + 1) / hp.warmup_steps
    progress = (step - hp.warmup_steps) / (max_steps - hp.warmup_steps)
    coeff = 0.5 * (1 + math.cos(math.pi * progress))  # from 1 to 0
    return min_lr + coeff * (max_lr - min_lr)


@dataclass
class Hyperparameters(RunFlags):
    """Train GPT-2."""

    preset: Literal["tiny", "nano", "gpt2", "gpt2-xl"] = "gpt2"  # the model
    max_steps: int = 0  # steps to train for (0: one epoch)
    minibatch_size: int = 512  # samples in a step
    microbatch_size: int = 0  # samples at once (0: the most that fit)
    sequence_length: int = 1024  # tokens in a sample
    learning_rate: float = 6e-4  # its maximum, after the warm-up
    warmup_steps: int = 715  # steps from 0 to the learning rate
    weight_decay: float = 0.1  # of the matrices
    precision: Literal["bf16", "fp32"] = "bf16"  # bf16 is autocast
    compile: bool = False  # compile the model
    recompute: bool = False  # compute activations twice, keep few
    seed: int = 1337  # of the initial weights and the generated texts
    eval_every: int = 250  # steps from one validation loss to the next
    eval_minibatches: int = 4  # how much of the validation split it reads
    generate_every: int = 1000  # steps from one text to the next
    checkpoint_every: int = 250  # steps from one checkpoint to the next


MODELS = {
    "tiny": GPTConfig(block_size=32, n_layer=4, n_head=4, n_embd=32),
    "nano": GPTConfig(block_size=128, n_layer=2, n_head=3, n_embd=144),
    "gpt2": GPTConfig(),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
}
PRESETS = {
    "tiny": Hyperparameters(  # seconds: for tests
        preset="tiny", max_steps=20, minibatch_size=8, microbatch_size=2,
        sequence_length=32, learning_rate=3e-3, warmup_steps=4, eval_every=10,
        generate_every=20, checkpoint_every=10, precision="fp32"),
    "nano": Hyperparameters(  # minutes on a CPU
        preset="nano", max_steps=2100, minibatch_size=8, sequence_length=128,
        learning_rate=3e-3, warmup_steps=500, eval_every=420,
        eval_minibatches=32, generate_every=1050, checkpoint_every=420),
    "gpt2": Hyperparameters(),
    "gpt2-xl": Hyperparameters(  # 25 GB of state: for several GPUs
        preset="gpt2-xl", microbatch_size=4, learning_rate=2e-4,
        recompute=True),
}

# ------------------------------------------------ training loop


@torch.no_grad()
def evaluate(model, data, num_batches, device, precision):
    """The mean loss of the first num_batches, a float."""
    model.eval()  # dropout, where a model has it, is off
    data.seek(0)
    loss = torch.zeros((), device=device)
    for _ in range(num_batches):
        loss += training_step(model, next(data), device, precision)
    model.train()
    loss = MPI.COMM_WORLD.allreduce(loss.item())  # the sum over all ranks
    return loss / num_batches / MPI.COMM_WORLD.size


def write_texts(model, run, seed):
    """Four continuations of the prompt, in one string."""
    idx = torch.tensor([run.prompt] * 4, device=run.device)
    generator = torch.Generator(run.device).manual_seed(seed)
    idx = model.generate(idx, 32, generator)
    return "\n".join(f"> {run.tokenizer.decode(row)}" for row in idx.tolist())


def main():
    prepare_process()
    hp, config = parse(Hyperparameters, PRESETS, MODELS)
    # mpirun says who we are; without it this is a world of one.
    comm = MPI.COMM_WORLD
    rank, world_size = comm.rank, comm.size
    local_rank = comm.Split_type(MPI.COMM_TYPE_SHARED).rank  # on this node
    device = use_device(hp.device, local_rank)
    if hp.precision == "bf16":  # TF32 for what autocast leaves in fp32
        torch.set_float32_matmul_precision("high")

    B, T, S = hp.microbatch_size, hp.sequence_length, hp.minibatch_size
    samples_per_round = B * world_size  # a microbatch on every rank
    require(S % samples_per_round == 0, f"a minibatch of {S} samples is not "
            f"divisible by {samples_per_round}: every rank has microbatches "
            f"of {B}")
    accumulation_steps = S // samples_per_round

    train_data, val_data = (
        DataIterator(get_shards(hp.data, split), B, T,
                     rank, world_size)
        for split in ("train", "val"))
    max_steps = hp.max_steps or max(train_data.num_samples // S, 1)

    torch.manual_seed(hp.seed)  # the same initial weights each time
    config = replace(config, vocab_size=vocabulary_size(hp.data))
    raw_model = GPT(config, hp.recompute).to(device)
    optimizer = raw_model.configure_optimizers(hp)
    run = Run("mpi", hp, config, max_steps, device)
    first_step = run.restore(raw_model, optimizer)
    train_data.seek(first_step * S)

    model = compile_model(raw_model, device) if hp.compile else raw_model

    run.begin()
    for step in range(first_step, max_steps):
        start_time = time.perf_counter()
        lr = get_lr(step, max_steps, hp)
        for group in optimizer.param_groups:
            group["lr"] = lr

        mean_loss = torch.zeros((), device=device)
        for _ in range(accumulation_steps):
            batch = next(train_data)
            loss = training_step(model, batch, device, hp.precision)
            # backward() adds up gradients: this makes their sum the mean
            loss = loss / accumulation_steps
            loss.backward()
            mean_loss += loss.detach()
        average_gradients(raw_model, comm)  # once a step
        norm = nn.utils.clip_grad_norm_(raw_model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        # a signal may reach only some ranks, but all have to stop together
        report = np.array([mean_loss.item(), run.stop_requested])
        comm.Allreduce(MPI.IN_PLACE, report)  # the sum over all ranks
        mean_loss, stop = (report / world_size).tolist()
        norm = norm.item()
        seconds = time.perf_counter() - start_time
        run.check_finite(step, mean_loss, norm)

        val_loss = None
        done = step + 1  # updates
        last = done == max_steps
        if last or done % hp.eval_every == 0:
            val_loss = evaluate(
                raw_model, val_data, hp.eval_minibatches * accumulation_steps,
                device, hp.precision)
        save = last or stop or done % hp.checkpoint_every == 0
        if rank == 0:
            run.log(step, mean_loss, val_loss, lr, norm, seconds)
        if rank == 0 and save:
            run.save(done, raw_model, optimizer)
        if run.tokenizer and (last or step % hp.generate_every == 0):
            seed = hp.seed + 1000 * step + rank
            texts = comm.gather(write_texts(raw_model, run, seed))
            if rank == 0:
                print(*texts, sep="\n")
        if stop:
            break
    run.finish()


if __name__ == "__main__":
    run_main(main)
