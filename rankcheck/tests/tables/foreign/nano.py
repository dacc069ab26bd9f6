"""
In the style of nanoGPT's train.py: globals, a config that is executed, no
main(). Run as: torchrun --nproc_per_node=2 nano.py
"""
import os
import time
from contextlib import nullcontext

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

max_iters = 100000
eval_interval = 50
eval_iters = 2
log_interval = 10
gradient_accumulation_steps = 2 * 3
batch_size = 4
block_size = 8
backend = 'gloo'
# -----------------------------------------------------------------------------
ddp = int(os.environ.get('RANK', -1)) != -1
if ddp:
    init_process_group(backend=backend)
    ddp_rank = int(os.environ['RANK'])
    ddp_world_size = int(os.environ['WORLD_SIZE'])
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    gradient_accumulation_steps //= min(ddp_world_size, 2)
else:
    master_process = True
    seed_offset = 0
torch.manual_seed(1337 + seed_offset)
data = torch.randint(65, (10000,))

def get_batch(split):
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i:i+block_size] for i in ix])
    y = torch.stack([data[i+1:i+1+block_size] for i in ix])
    return x, y

model = torch.nn.Sequential(
    torch.nn.Embedding(65, 16), torch.nn.Linear(16, 65))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model

@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(eval_iters)
    for k in range(eval_iters):
        X, Y = get_batch('val')
        losses[k] = F.cross_entropy(raw_model(X).flatten(0, 1), Y.flatten())
    model.train()
    return losses.mean()

X, Y = get_batch('train')
t0 = time.time()
iter_num = 0
while True:
    if iter_num % eval_interval == 0 and master_process:
        print(f"step {iter_num}: val loss {estimate_loss():.4f}", flush=True)
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = (
                micro_step == gradient_accumulation_steps - 1)
        with nullcontext():
            logits = model(X)
            loss = F.cross_entropy(logits.flatten(0, 1), Y.flatten())
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch('train')
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    t1 = time.time()
    dt = t1 - t0
    t0 = t1
    if iter_num % log_interval == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {dt*1000:.2f}ms",
              flush=True)
    iter_num += 1
    if iter_num > max_iters:
        break

if ddp:
    destroy_process_group()
