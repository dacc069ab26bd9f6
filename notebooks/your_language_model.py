"""Trains a language model of Hugging Face's, sharded: FSDP2.

    torchrun --nproc-per-node 2 notebooks/your_language_model.py

The model is made from a configuration, so nothing is downloaded.
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM


class Counting(Dataset):
    """Sample i counts from i in steps of 1 to 4: 32 tokens of 100."""

    def __len__(self):
        return 400

    def __getitem__(self, i):
        return (i + (1 + i // 100) * torch.arange(32)) % 100


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--padded", action="store_true",
                        help="what is below 30 is padding")
    parser.add_argument("--save", help="a folder for from_pretrained")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert args.batch_size % world_size == 0
    data = Counting()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, args.batch_size // world_size,
                        sampler=sampler, drop_last=True)

    torch.manual_seed(1337)  # the same initial weights on all ranks
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        "gpt2", n_layer=2, n_head=2, n_embd=64, vocab_size=100,
        n_positions=32, bos_token_id=0, eos_token_id=0)).train()
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)  # what is in no block: embeddings, last layer norm
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for tokens in loader:
            tokens = tokens.to(device)
            labels = tokens
            if args.padded:  # the loss leaves it out
                labels = tokens.masked_fill(tokens < 30, -100)
            loss = model(input_ids=tokens, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss / world_size:.4f}")

    if args.save:
        model.eval()
        tokens = data[0][None].to(device)
        with torch.no_grad():
            logits = model(input_ids=tokens).logits  # all ranks
        whole = get_model_state_dict(model, options=StateDictOptions(
            full_state_dict=True, cpu_offload=True))  # all ranks
        if rank == 0:
            model.save_pretrained(args.save, state_dict=whole)
            again = AutoModelForCausalLM.from_pretrained(args.save).to(device)
            with torch.no_grad():
                off = (again(tokens).logits - logits).abs().max()
            print(f"{args.save} is written: read again, its logits differ "
                  f"by {off:.0e} at most")
    dist.barrier()  # a rank that leaves early can make another abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
