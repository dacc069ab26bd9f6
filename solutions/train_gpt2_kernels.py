"""Train GPT-2 on one device, with kernels of our own in Triton.

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
from torch.utils.checkpoint import checkpoint

from backstage.dataset import vocabulary_size
from backstage.device import compile_model, pin, use_device
from backstage.errors import require, run_main
from backstage.flags import RunFlags, parse
from backstage.process import prepare_process
from backstage.run import Run
from backstage.triton import INTERPRETED, tl, triton

# ------------------------------------------------------ kernels

# Many programs of a kernel run at once, each on its own tiles: pieces of a
# matrix whose dimensions are powers of two. What is beyond the matrix is
# masked: neither read nor written. Without a GPU an interpreter runs one
# program after the other, and there a few large tiles are faster.
TILE = 2**15 if INTERPRETED else 2**12  # the numbers in a tile
BLOCK = 256 if INTERPRETED else 64  # attention: queries, or keys, of a tile
ROWS, COLUMNS = TILE // 1024, 1024  # of a tile of logits


@triton.jit
def gelu_forward(x, y, N, TILE: tl.constexpr):
    """y = gelu(x), both of N numbers."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tile = tl.load(x + i, i < N, other=0.0).to(tl.float32)
    # (1 + tanh(u)) / 2 is sigmoid(2u)
    u = 0.7978845608 * (tile + 0.044715 * tile * tile * tile)
    tl.store(y + i, tile * tl.sigmoid(2 * u), i < N)


@triton.jit
def gelu_backward(x, dy, dx, N, TILE: tl.constexpr):
    """dx = dy * gelu'(x)."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tile = tl.load(x + i, i < N, other=0.0).to(tl.float32)
    u = 0.7978845608 * (tile + 0.044715 * tile * tile * tile)
    gate = tl.sigmoid(2 * u)
    slope = 0.7978845608 * (1 + 3 * 0.044715 * tile * tile)
    dgate = 2 * gate * (1 - gate) * slope
    dtile = tl.load(dy + i, i < N, other=0.0) * (gate + tile * dgate)
    tl.store(dx + i, dtile, i < N)


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        N = x.numel()
        gelu_forward[(triton.cdiv(N, TILE),)](x, y, N, TILE)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, = ctx.saved_tensors
        dx = torch.empty_like(x)
        N = x.numel()
        gelu_backward[(triton.cdiv(N, TILE),)](
            x, dy.contiguous(), dx, N, TILE)
        return dx


gelu = Gelu.apply


@triton.jit
def load(x, rows, columns, M, N):
    """These rows and columns of x, (M, N); zeros beyond it."""
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    # 64 bits: a batch's logits are more than 2**31 numbers
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    return tl.load(x + at, inside, other=0.0)


@triton.jit
def store(x, tile, rows, columns, M, N):
    """Write a tile to these rows and columns of x, (M, N)."""
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(x + at, tile, inside)


@triton.jit
def normalise(x, rows, columns, M, N):
    """These rows of x with mean 0 and variance 1, and by what factor."""
    tile = load(x, rows, columns, M, N).to(tl.float32)
    mean = tl.sum(tile, 1) / N
    # the zeros beyond N must not become -mean
    tile = tl.where((columns < N)[None, :], tile - mean[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(tile * tile, 1) / N + 1e-5)
    return tile * factor[:, None], factor


@triton.jit
def layer_norm_forward(x, w, b, y, M, N, ROWS: tl.constexpr,
                       COLUMNS: tl.constexpr):
    """y = normalised x * w + b; x, y: (M, N); w, b: (N,)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    tile, _ = normalise(x, rows, columns, M, N)
    w = tl.load(w + columns, columns < N, other=0.0)
    b = tl.load(b + columns, columns < N, other=0.0)
    store(y, tile * w[None, :] + b[None, :], rows, columns, M, N)


@triton.jit
def layer_norm_backward(x, w, dy, dx, dw, db, M, N, ROWS: tl.constexpr,
                        COLUMNS: tl.constexpr):
    """dx, and the sums of this program's rows: dw, db: (programs, N)."""
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    tile, factor = normalise(x, rows, columns, M, N)
    dy = load(dy, rows, columns, M, N)
    w = tl.load(w + columns, columns < N, other=0.0)
    dtile = dy * w[None, :]
    # what would change the mean or the variance has no effect
    dmean = tl.sum(dtile, 1) / N
    dvariance = tl.sum(dtile * tile, 1) / N
    dtile = dtile - dmean[:, None] - tile * dvariance[:, None]
    store(dx, dtile * factor[:, None], rows, columns, M, N)
    at = program * N + columns
    tl.store(dw + at, tl.sum(dy * tile, 0), columns < N)
    tl.store(db + at, tl.sum(dy, 0), columns < N)


class LayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        x = x.contiguous()
        ctx.save_for_backward(x, w)
        y = torch.empty_like(x)
        M, N, rows, columns = layer_norm_shape(x)
        layer_norm_forward[(triton.cdiv(M, rows),)](
            x, w, b, y, M, N, rows, columns)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = torch.empty_like(x)
        M, N, rows, columns = layer_norm_shape(x)
        programs = triton.cdiv(M, rows)
        # programs that run at once must not write to the same place
        dw, db = torch.empty(2, programs, N, device=x.device)
        layer_norm_backward[(programs,)](
            x, w, dy.contiguous(), dx, dw, db, M, N, rows, columns)
        return dx, dw.sum(0), db.sum(0)


def layer_norm_shape(x):
    """M, N, and the rows and columns of a tile, which has whole rows."""
    columns = triton.next_power_of_2(x.shape[-1])
    return (x.numel() // x.shape[-1], x.shape[-1],
            max(TILE // columns, 1), columns)


layer_norm = LayerNormFunction.apply


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return layer_norm(x, self.weight, self.bias)


@triton.jit
def cross_entropy_forward(logits, targets, losses, sums, M, N,
                          ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The loss of each row, and log(sum(exp(row))); logits: (M, N)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)  # of exp(logit - largest)
    for first in range(0, N, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        tile = load(logits, rows, columns, M, N)
        tile = tl.where((columns < N)[None, :], tile, float("-inf"))
        larger = tl.maximum(largest, tl.max(tile, 1))
        total *= tl.exp(largest - larger)  # as if it had been there before
        total += tl.sum(tl.exp(tile - larger[:, None]), 1)
        largest = larger
    target = tl.load(targets + rows, rows < M, other=0)
    chosen = tl.load(logits + rows.to(tl.int64) * N + target, rows < M)
    tl.store(sums + rows, largest + tl.log(total), rows < M)
    tl.store(losses + rows, largest + tl.log(total) - chosen, rows < M)


@triton.jit
def cross_entropy_backward(logits, targets, sums, dloss, M, N,
                           ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The gradient of the mean loss takes the place of the logits."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    target = tl.load(targets + rows, rows < M, other=0)
    total = tl.load(sums + rows, rows < M, other=0.0)
    tile = load(logits, rows, columns, M, N)
    p = tl.exp(tile - total[:, None])
    p -= (columns[None, :] == target[:, None]).to(tl.float32)
    store(logits, p * tl.load(dloss) / M, rows, columns, M, N)


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        M, N = logits.shape
        losses, sums = torch.empty(2, M, device=logits.device)
        cross_entropy_forward[(triton.cdiv(M, ROWS),)](
            logits, targets, losses, sums, M, N, ROWS, COLUMNS)
        ctx.save_for_backward(logits, targets, sums)
        return losses.mean()

    @staticmethod
    def backward(ctx, dloss):
        logits, targets, sums = ctx.saved_tensors
        M, N = logits.shape
        cross_entropy_backward[
            (triton.cdiv(M, ROWS), triton.cdiv(N, COLUMNS))](
            logits, targets, sums, dloss, M, N, ROWS, COLUMNS)
        return logits, None


cross_entropy = CrossEntropy.apply


@triton.jit
def product(a, b):
    return tl.dot(a, b, input_precision="ieee")  # fp32, not TF32


@triton.jit
def get_scores(q, k, queries, keys, T, scale):
    """The scores of a tile of queries and one of keys."""
    scores = product(q, tl.trans(k)) * scale
    # a query sees no later key, and none of another head
    seen = (queries[:, None] >= keys[None, :]) & (
        (queries // T)[:, None] == (keys // T)[None, :])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def attention_forward(q, k, v, y, sums, M, T, D, scale, BLOCK: tl.constexpr,
                      COLUMNS: tl.constexpr):
    """A tile of y, and log(sum(exp(scores))) of its queries.

    q, k, v, y: (M, D), with T rows of each head; sums: (M,).
    """
    first_query = tl.program_id(0) * BLOCK
    queries, d = first_query + tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    q_tile = load(q, queries, d, M, D)
    # not -inf: a query may see no key of a tile
    largest = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    y_tile = tl.zeros((BLOCK, COLUMNS), tl.float32)
    first_key = first_query // T * T  # of the head
    for first in range(first_key, first_query + BLOCK, BLOCK):
        keys = first + tl.arange(0, BLOCK)
        k_tile = load(k, keys, d, M, D)
        v_tile = load(v, keys, d, M, D)
        scores = get_scores(q_tile, k_tile, queries, keys, T, scale)
        larger = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - larger)
        p = tl.exp(scores - larger[:, None])
        total = total * shrink + tl.sum(p, 1)
        y_tile *= shrink[:, None]
        y_tile += product(p.to(v_tile.dtype), v_tile)
        largest = larger
    store(y, y_tile / total[:, None], queries, d, M, D)
    tl.store(sums + queries, largest + tl.log(total), queries < M)


@triton.jit
def get_ds(q, k, v, dy, sums, delta, queries, keys, M, T, scale):
    """The probabilities of a tile of scores, and the scores' gradient."""
    scores = get_scores(q, k, queries, keys, T, scale)
    total = tl.load(sums + queries, queries < M, other=0.0)
    mean = tl.load(delta + queries, queries < M, other=0.0)
    p = tl.exp(scores - total[:, None])
    return p, p * (product(dy, tl.trans(v)) - mean[:, None])


@triton.jit
def attention_backward_kv(q, k, v, dy, sums, delta, dk, dv, M, T, D, scale,
                          BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of dk and of dv: the sum over the queries that see it."""
    first_key = tl.program_id(0) * BLOCK
    keys, d = first_key + tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    k_tile = load(k, keys, d, M, D)
    v_tile = load(v, keys, d, M, D)
    dk_tile = tl.zeros((BLOCK, COLUMNS), tl.float32)
    dv_tile = tl.zeros((BLOCK, COLUMNS), tl.float32)
    last_key = tl.minimum(first_key + BLOCK, M) - 1
    end = (last_key // T + 1) * T  # of its head
    for first in range(first_key, end, BLOCK):
        queries = first + tl.arange(0, BLOCK)
        q_tile = load(q, queries, d, M, D)
        dy_tile = load(dy, queries, d, M, D)
        p, ds = get_ds(q_tile, k_tile, v_tile, dy_tile, sums, delta, queries,
                       keys, M, T, scale)
        dv_tile += product(tl.trans(p.to(dy_tile.dtype)), dy_tile)
        dk_tile += product(tl.trans(ds.to(q_tile.dtype)), q_tile)
    store(dk, dk_tile * scale, keys, d, M, D)
    store(dv, dv_tile, keys, d, M, D)


@triton.jit
def attention_backward_q(q, k, v, dy, sums, delta, dq, M, T, D, scale,
                         BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of dq: the sum over the keys that it sees."""
    first_query = tl.program_id(0) * BLOCK
    queries, d = first_query + tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    q_tile = load(q, queries, d, M, D)
    dy_tile = load(dy, queries, d, M, D)
    dq_tile = tl.zeros((BLOCK, COLUMNS), tl.float32)
    first_key = first_query // T * T
    for first in range(first_key, first_query + BLOCK, BLOCK):
        keys = first + tl.arange(0, BLOCK)
        k_tile = load(k, keys, d, M, D)
        v_tile = load(v, keys, d, M, D)
        _, ds = get_ds(q_tile, k_tile, v_tile, dy_tile, sums, delta, queries,
                       keys, M, T, scale)
        dq_tile += product(ds.to(k_tile.dtype), k_tile)
    store(dq, dq_tile * scale, queries, d, M, D)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        programs, shape = attention_shape(q)
        y = torch.empty_like(q)
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        attention_forward[(programs,)](q, k, v, y, sums, *shape)
        ctx.save_for_backward(q, k, v, y, sums)
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, y, sums = ctx.saved_tensors
        programs, shape = attention_shape(q)
        dy = dy.contiguous()
        delta = (dy.float() * y).sum(-1)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        attention_backward_kv[(programs,)](
            q, k, v, dy, sums, delta, dk, dv, *shape)
        attention_backward_q[(programs,)](
            q, k, v, dy, sums, delta, dq, *shape)
        return dq, dk, dv


def attention_shape(q):
    """The programs for q, (B, heads, T, D), and a kernel's last arguments.

    A product takes tiles of 16 columns at least.
    """
    T, D = q.shape[-2:]
    M = q.numel() // D
    columns = max(triton.next_power_of_2(D), 16)
    return triton.cdiv(M, BLOCK), (
        M, T, D, 1 / math.sqrt(D), BLOCK, columns)


attention = Attention.apply


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
        y = attention(q, k, v)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd)
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
            "ln_f": LayerNorm(config.n_embd),
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
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

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


# --------------------------------------------------------- data


def get_shards(data, split):
    """The files of a split, "train" or "val", in order."""
    return sorted(Path(data).glob(f"*_{split}_*.npy"))


def load_tokens(shard):
    """The token ids of a shard, uint16: memory-mapped, read when used."""
    return np.load(shard, mmap_mode="r")


class DataIterator:
    """Microbatches, for ever: x and y, int64 (2, B, T).

    Sample i is tokens[i*T : i*T + T+1] of the shards laid end to end.
    """

    def __init__(self, shards, B, T):
        self.shards = [load_tokens(shard) for shard in shards]
        self.ends = np.cumsum([len(tokens) for tokens in self.shards])
        self.B, self.T = B, T
        self.num_samples = (int(self.ends[-1]) - 1) // T
        self.seek(0)

    def seek(self, i):
        """Continue from sample i."""
        self.position = i

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
        self.position += self.B
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
    return (loss / num_batches).item()


def write_texts(model, run, seed):
    """Four continuations of the prompt, in one string."""
    idx = torch.tensor([run.prompt] * 4, device=run.device)
    generator = torch.Generator(run.device).manual_seed(seed)
    idx = model.generate(idx, 32, generator)
    return "\n".join(f"> {run.tokenizer.decode(row)}" for row in idx.tolist())


def main():
    prepare_process()
    hp, config = parse(Hyperparameters, PRESETS, MODELS)
    device = use_device(hp.device)
    if hp.precision == "bf16":  # TF32 for what autocast leaves in fp32
        torch.set_float32_matmul_precision("high")

    B, T, S = hp.microbatch_size, hp.sequence_length, hp.minibatch_size
    require(S % B == 0, f"a minibatch of {S} samples is not divisible by "
            f"microbatches of {B}")
    accumulation_steps = S // B

    train_data, val_data = (
        DataIterator(get_shards(hp.data, split), B, T)
        for split in ("train", "val"))
    max_steps = hp.max_steps or max(train_data.num_samples // S, 1)

    torch.manual_seed(hp.seed)  # the same initial weights each time
    config = replace(config, vocab_size=vocabulary_size(hp.data))
    raw_model = GPT(config, hp.recompute).to(device)
    optimizer = raw_model.configure_optimizers(hp)
    run = Run("kernels", hp, config, max_steps, device)
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
        norm = nn.utils.clip_grad_norm_(raw_model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        mean_loss = mean_loss.item()
        stop = run.stop_requested
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
        run.log(step, mean_loss, val_loss, lr, norm, seconds)
        if save:
            run.save(done, raw_model, optimizer)
        if run.tokenizer and (last or step % hp.generate_every == 0):
            seed = hp.seed + 1000 * step
            print(write_texts(raw_model, run, seed))
        if stop:
            break
    run.finish()


if __name__ == "__main__":
    run_main(main)
