"""Scripts for the check of the lesson fsdp."""

from cases.case import CLIP, FSDP_SYNC, OPTIMIZER, OWN_MEAN, right, wrong

FSDP_MESH = "    mesh = dist.init_device_mesh(device.type, (world_size,))\n"
FSDP_LOOP = "for block in raw_model.transformer.h.children():"
FSDP_BLOCK = "fully_shard(block, mesh=mesh)"
FSDP_MODEL = "fully_shard(raw_model, mesh=mesh)"
FSDP_REST = f"    {FSDP_MODEL}  # what is in no block\n"
FSDP_SHARD = (f"{FSDP_MESH}    {FSDP_LOOP}\n        {FSDP_BLOCK}"
              f"  # a part goes to each device\n{FSDP_REST}")
ON_THE_DEVICE = ("hp.recompute)  # on the CPU", "hp.recompute).to(device)")
PARTS = "[w.grad.to_local() for w in raw_model.parameters()]"

CASES = (
    # another stage's script
    wrong("the DDP script", "rank 0 keeps all of transf", "ddp"),
    # sharding
    wrong("the optimizer made before", "optimizer updates another model",
          (FSDP_SHARD + OPTIMIZER, OPTIMIZER + FSDP_SHARD)),
    wrong("the blocks alone", "", (FSDP_REST, ""),
          (FSDP_SYNC, "            for block in raw_model.transformer.h:\n"
           "                "
           "block.set_requires_gradient_sync(is_last_microbatch)\n")),
    # the gradients
    wrong("the norm of the part alone, for the log", "the gradient norm of "
          "step 0", (CLIP, f"        part = nn.utils.get_total_norm({PARTS})\n"
                     + CLIP), ("norm.full_tensor().item()", "part.item()")),
    right("the solution"),
    right("gathered weights kept for the backward pass",
          (FSDP_BLOCK, FSDP_BLOCK[:-1] + ", reshard_after_forward=False)")),
    right("blocks in another order",
          (FSDP_LOOP, "for block in reversed(raw_model.transformer.h):")),
    right("blocks by twos",
          (FSDP_LOOP, "blocks = list(raw_model.transformer.h)\n    for block "
           "in (blocks[:2], blocks[2:]):")),
    right("all of it moved to the device", ON_THE_DEVICE,
          warns="every device has the whole model before it is sharded"),
    right("attention and MLP by themselves",
          (FSDP_LOOP, "parts = [part for block in raw_model.transformer.h for "
           "part in (block.attn, block.mlp)]\n"
           "    for block in parts:")),
    right("the model as one piece", (FSDP_LOOP, "for block in ():"),
          warns="all weights are gathered at once"),
    right("no set_requires_gradient_sync", (FSDP_SYNC, ""),
          warns="gradients are reduced 4.0 times a step"),
    right("a function for the mean over ranks", *OWN_MEAN),
)
