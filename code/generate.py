"""Let a trained model write: continuations of a prompt.

    python code/generate.py --run-dir runs/20261121-120000-std --prompt A
    torchrun --standalone --nproc-per-node 4 code/generate.py
    mpirun -n 4 python -m workshop.as_torchrun code/generate.py

It reads the checkpoints of every stage. Several processes share the
continuations. With the key-value cache (the default) each step computes the
keys and values of the newest token only, and keeps those of the tokens before
it. Without the cache it computes all of them again.
"""

import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F

from backstage import dataset
from backstage.device import use_device
from backstage.errors import parse_flags, require, run_main
from backstage.process import name_ranks, use_cores
from backstage.world import call_on_rank_0, get_rank_and_size, on_every_rank
from workshop.trained import find_checkpoint, load_trained


@dataclass
class Flags:
    """Write continuations of a prompt."""

    run_dir: str = ""  # folder of a run, or a checkpoint (default: newest run)
    prompt: str = "Hello, I'm a language model,"  # the text to continue
    num_sequences: int = 4  # how many continuations
    max_new_tokens: int = 64  # tokens in each
    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 50  # choose among this many tokens (0: among all)
    seed: int = 1337  # of the first text; each of the others has the next
    device: str = "auto"  # cpu, cuda, xpu, mps (auto: an accelerator if any)
    cache: bool = True  # keep keys and values from step to step


def forward(model, idx, cache):
    """Logits after the last token of idx, int64 (B, T): (B, vocab_size).

    cache: a list with the keys and values of every block, each (B, heads,
    time, head_size), for the tokens before idx; those of idx are added to it.
    """
    past = cache[0][0].shape[2] if cache else 0
    positions = torch.arange(past, past + idx.shape[1], device=idx.device)
    parts = model.transformer
    x = parts.wte(idx) + parts.wpe(positions)
    for i, block in enumerate(parts.h):
        B, T, _ = x.shape
        qkv = block.attn.c_attn(block.ln_1(x))
        qkv = qkv.view(B, T, -1, 3, block.attn.head_size)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each (B, heads, T, head_size)
        if past:
            k = torch.cat((cache[i][0], k), dim=2)
            v = torch.cat((cache[i][1], v), dim=2)
            cache[i] = k, v
        else:
            cache.append((k, v))
        # one new token may look at everything before it
        y = F.scaled_dot_product_attention(q, k, v, is_causal=not past)
        x = x + block.attn.c_proj(y.transpose(1, 2).reshape(B, T, -1))
        x = x + block.mlp(block.ln_2(x))
    return model.lm_head(parts.ln_f(x[:, -1]))[:, :model.config.vocab_size]


def draw(seeds, number):
    """That many random numbers from 0 to 1 for each seed: (seeds, number).

    A text has a seed of its own, so it does not depend on what other texts
    this process writes.
    """
    return torch.stack([
        torch.rand(number, generator=torch.Generator().manual_seed(seed))
        for seed in seeds])


def choose(logits, temperature, top_k, random):
    """A token for each row of logits (B, vocab_size): int64 (B, 1).

    random: a number from 0 to 1 for each row, (B, 1). The likely tokens take
    up more of the way from 0 to 1, and so more numbers fall on them.
    """
    if temperature == 0:
        return logits.argmax(dim=1, keepdim=True)
    values, tokens = logits.topk(min(top_k or logits.shape[1],
                                     logits.shape[1]))
    ends = (values / temperature).softmax(dim=1).cumsum(dim=1)
    choice = torch.searchsorted(ends, random * ends[:, -1:], right=True)
    return tokens.gather(1, choice.clamp(max=tokens.shape[1] - 1))


@torch.no_grad()
def generate(model, idx, flags, random):
    """Continue idx, int64 (B, T): (B, T + max_new_tokens).

    random: a number from 0 to 1 for each new token, (B, max_new_tokens).
    """
    block_size, cache, new = model.config.block_size, [], idx
    for i in range(flags.max_new_tokens):
        # Beyond the block size the window moves: then every token has a new
        # position, and the cache is useless.
        if not flags.cache or idx.shape[1] > block_size:
            cache, new = [], idx[:, -block_size:]
        logits = forward(model, new, cache)
        new = choose(logits, flags.temperature, flags.top_k,
                     random[:, i:i + 1])
        idx = torch.cat((idx, new), dim=1)
    return idx


def join_others():
    """Join the other processes, if a launcher has started several."""
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    use_cores(on_node)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")  # only texts are sent
    return get_rank_and_size()


def main():
    name_ranks()
    flags = parse_flags(Flags)
    require(flags.num_sequences > 0, "--num-sequences must be 1 or more")
    require(flags.max_new_tokens > 0, "--max-new-tokens must be 1 or more")
    require(flags.temperature >= 0, "--temperature must not be negative")
    require(flags.top_k >= 0, "--top-k must be 0 (all tokens) or more")
    rank, world_size = join_others()
    file = call_on_rank_0(lambda: find_checkpoint(flags.run_dir))
    device = use_device(flags.device, int(os.environ.get("LOCAL_RANK", 0)))
    state, model = load_trained(file)
    model.to(device)
    tokenizer = dataset.load_vocabulary(state["hyperparameters"]["data"])
    require(tokenizer.n_vocab == model.config.vocab_size,
            f"{state['hyperparameters']['data']} now has another vocabulary: "
            "restore the dataset that the run was trained on")
    if rank == 0:
        print(f"{file} ({state['stage']}, {state['step']} steps)")

    prompt = tokenizer.encode(flags.prompt, allowed_special="all")
    prompt = prompt or [tokenizer.eot_token]
    first, end = (flags.num_sequences * r // world_size
                  for r in (rank, rank + 1))  # this rank's share, or none
    rows, seconds = [], 0.0
    if first < end:
        idx = torch.tensor([prompt] * (end - first), device=device)
        seeds = range(flags.seed + first, flags.seed + end)
        random = draw(seeds, flags.max_new_tokens).to(device)
        start_time = time.perf_counter()
        rows = generate(model, idx, flags, random).tolist()
        seconds = time.perf_counter() - start_time
    shares = on_every_rank((rows, seconds))  # in rank order
    if rank == 0:
        for row in (row for rows, _ in shares for row in rows):
            print(">", tokenizer.decode(row))
        tokens = flags.num_sequences * flags.max_new_tokens
        seconds = max(seconds for _, seconds in shares)
        print(f"{tokens} tokens in {seconds:.2f} s: "
              f"{tokens / seconds:,.0f} tok/s "
              f"({'with' if flags.cache else 'without'} key-value cache"
              + (f", {world_size} processes)" if world_size > 1 else ")"))
    on_every_rank(None)  # who leaves early can make another abort


if __name__ == "__main__":
    run_main(main)
