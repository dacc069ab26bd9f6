"""Let a trained model write: continuations of a prompt.

    python code/generate.py --run-dir runs/20261121-120000-std --prompt A
    torchrun --standalone --nproc-per-node 4 code/generate.py
    mpirun -n 4 python -m workshop.as_torchrun code/generate.py

It reads the checkpoints of every stage. Several processes share the
continuations. With the key-value cache (the default) each step computes the
keys and values of the newest token only, and keeps those of the tokens before
them. Without the cache it computes all of them again. With `--assistant` a
smaller model proposes tokens, and the large one checks several in one call.
"""

import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F
from trained import find_checkpoint, load_trained

from backstage import dataset
from backstage.device import use_device
from backstage.errors import parse_flags, require, run_main, visible
from backstage.process import name_ranks, use_cores
from backstage.world import call_on_rank_0, get_rank_and_size, on_every_rank

PROPOSED = 4  # tokens by the assistant, before the large model is called


@dataclass
class Flags:
    """Write continuations of a prompt."""

    run_dir: str = ""  # folder of a run, or a checkpoint (empty: newest run)
    prompt: str = "Hello, I'm a language model,"  # the text to continue
    num_sequences: int = 4  # how many continuations
    max_new_tokens: int = 64  # tokens in each
    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 50  # choose among this many tokens (0: among all)
    seed: int = 1337  # of the first text; each of the others has the next
    device: str = "auto"  # cpu, cuda, xpu, mps (auto: an accelerator if any)
    cache: bool = True  # keep keys and values from step to step
    assistant: str = ""  # run of a smaller model that proposes tokens


def forward(model, idx, cache, last=1):
    """Logits after each of the last tokens of idx, int64 (B, T): (B, last,
    vocab_size).

    cache: a list with the keys and values of every block, each (B, heads,
    time, head_size), for the tokens before idx; those of idx are added to it.
    """
    past = cache[0][0].shape[2] if cache else 0
    positions = torch.arange(past, past + idx.shape[1], device=idx.device)
    parts = model.transformer
    x = parts.wte(idx) + parts.wpe(positions)
    mask = None  # one new token may look at everything before it
    if past and len(positions) > 1:  # several may not look at later ones
        mask = torch.ones(len(positions), past + len(positions),
                          dtype=torch.bool, device=idx.device).tril(past)
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
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not past)
        x = x + block.attn.c_proj(y.transpose(1, 2).reshape(B, T, -1))
        x = x + block.mlp(block.ln_2(x))
    logits = model.lm_head(parts.ln_f(x[:, -last:]))
    return logits[:, :, :model.config.vocab_size]


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
    """Continue idx, int64 (B, T): (B, T + new tokens).

    random: a number from 0 to 1 for each new token, (B, new tokens).
    """
    block_size, cache, new = model.config.block_size, [], idx
    for i in range(random.shape[1]):
        # Beyond the block size the window moves: then every token has a new
        # position, and the cache is useless.
        if not flags.cache or idx.shape[1] > block_size:
            cache, new = [], idx[:, -block_size:]
        logits = forward(model, new, cache)[:, -1]
        new = choose(logits, flags.temperature, flags.top_k,
                     random[:, i:i + 1])
        idx = torch.cat((idx, new), dim=1)
    return idx


@torch.no_grad()
def generate_assisted(model, assistant, idx, flags, random):
    """What `generate` writes at temperature 0, and the calls of the model.

    In one call the model computes which token it would write after each of
    the proposed ones. It keeps those that it would have written itself, and
    then writes one of its own. Where the window has to move, nobody helps.
    """
    start, end, calls = idx.shape[1], idx.shape[1] + random.shape[1], 0
    most = min(model.config.block_size, assistant.config.block_size)
    caches = [], []
    while (T := idx.shape[1]) < end and T + PROPOSED <= most:
        known, checked = (cache[0][0].shape[2] if cache else 0
                          for cache in caches)
        for _ in range(PROPOSED):
            logits = forward(assistant, idx[:, known:], caches[0])
            known, new = idx.shape[1], logits.argmax(dim=2)
            idx = torch.cat((idx, new), dim=1)
        logits = forward(model, idx[:, checked:], caches[1], PROPOSED + 1)
        calls, best = calls + 1, logits.argmax(dim=2)  # (B, PROPOSED + 1)
        same = (idx[:, T:] == best[:, :-1]).all(dim=0)  # in every text
        n = int(same.cumprod(dim=0).sum())  # up to the first other token
        idx = torch.cat((idx[:, :T + n], best[:, n:n + 1]), dim=1)
        for cache in caches:
            cache[:] = [(k[:, :, :T + n], v[:, :, :T + n]) for k, v in cache]
    idx = idx[:, :end]
    rest = random[:, idx.shape[1] - start:]
    return generate(model, idx, flags, rest), calls + rest.shape[1]


def join_others():
    """Join the other processes, if a launcher has started several."""
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    use_cores(on_node)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")  # only texts are sent
    return get_rank_and_size()


def load(run_dir, device):
    """Join the others: (rank, world size, device, model, tokenizer)."""
    rank, world_size = join_others()
    file = call_on_rank_0(lambda: find_checkpoint(run_dir))
    device = use_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    state, model = load_trained(file)
    model.to(device)
    tokenizer = dataset.load_vocabulary(state["hyperparameters"]["data"])
    require(tokenizer.n_vocab == model.config.vocab_size,
            f"{state['hyperparameters']['data']} now has another vocabulary; "
            "fix: restore the dataset that the run was trained on")
    if rank == 0:
        print(visible(f"{file} ({state['stage']}, {state['step']} steps)"))
    return rank, world_size, device, model, tokenizer


def main():
    name_ranks()
    flags = parse_flags(Flags, num_sequences=1, max_new_tokens=1)
    require(not flags.assistant or (flags.temperature == 0 and flags.cache),
            "--assistant needs greedy decoding and the cache; fix: add "
            "--temperature 0 --cache")
    rank, world_size, device, model, tokenizer = load(
        flags.run_dir, flags.device)
    if flags.assistant:
        _, assistant = load_trained(call_on_rank_0(
            lambda: find_checkpoint(flags.assistant)))
        require(assistant.config.vocab_size == tokenizer.n_vocab,
                f"{flags.assistant}: the assistant has a different vocabulary")
        assistant.to(device)
    prompt = tokenizer.encode(flags.prompt, allowed_special="all")
    prompt = prompt or [tokenizer.eot_token]
    first, end = (flags.num_sequences * r // world_size
                  for r in (rank, rank + 1))  # this rank's share, or none
    rows, seconds, calls = [], 0.0, flags.max_new_tokens
    if first < end:
        idx = torch.tensor([prompt] * (end - first), device=device)
        seeds = range(flags.seed + first, flags.seed + end)
        random = draw(seeds, flags.max_new_tokens).to(device)
        start_time = time.perf_counter()
        if flags.assistant:
            idx, calls = generate_assisted(
                model, assistant, idx, flags, random)
        else:
            idx = generate(model, idx, flags, random)
        rows = idx.tolist()
        seconds = time.perf_counter() - start_time
    shares = on_every_rank((rows, seconds, calls))  # in rank order
    if rank == 0:
        for row in (row for rows, *_ in shares for row in rows):
            print(">", visible(tokenizer.decode(row)))
        tokens = flags.num_sequences * flags.max_new_tokens
        seconds = max(seconds for _, seconds, _ in shares)
        print(f"{tokens} tokens in {seconds:.2f} s: "
              f"{tokens / seconds:,.0f} tok/s "
              f"({'with' if flags.cache else 'without'} key-value cache"
              + (f", {min(calls for *_, calls in shares)} calls of the large "
                 "model for each text" if flags.assistant else "")
              + (f", {world_size} processes)" if world_size > 1 else ")"))
    on_every_rank(None)  # who leaves early can make another abort


if __name__ == "__main__":
    run_main(main)
