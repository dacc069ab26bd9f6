"""Scripts for the check of the lesson fsdp."""

from cases.case import (
    CLIP,
    FSDP_SYNC,
    OPTIMIZER,
    OWN_MEAN,
    right,
    wrong,
)

FSDP_MESH = "    mesh = dist.init_device_mesh(device.type, (world_size,))\n"
FSDP_LOOP = "for module in (*raw_model.transformer.h.children(), raw_model):"
FSDP_CALL = "fully_shard(module, mesh=mesh)"
FSDP_DRAW = "        draw_weights(raw_model, module)\n"
FSDP_SHARD = f"{FSDP_MESH}    {FSDP_LOOP}\n{FSDP_DRAW}        {FSDP_CALL}\n"
ON_THE_CPU = (("make_shapes(GPT, config,", "GPT(config,"), (FSDP_DRAW, ""))
SAVE_ALL = "        if save:  # all ranks\n"
PARTS = "[w.grad.to_local() for w in raw_model.parameters()]"

CASES = (
    # another stage's script
    wrong("the DDP script", "fsdp", "ddp", "rank 0 keeps all of transf"),
    # sharding
    wrong("the optimizer made before", "fsdp",
          ((FSDP_SHARD + OPTIMIZER, OPTIMIZER + FSDP_SHARD),
           *ON_THE_CPU),
          "optimizer updates another model"),
    wrong("the blocks alone", "fsdp",
          ((FSDP_LOOP, "for module in raw_model.transformer.h:"),
           *ON_THE_CPU,
           (FSDP_SYNC, "            for block in raw_model.transformer.h:\n"
            "                block.set_requires_gradient_sync("
            "is_last_microbatch)\n")),
          ""),
    wrong("bf16 by a policy, always", "fsdp",
          ((FSDP_CALL, "fully_shard(module, mesh=mesh, mp_policy="
            "MixedPrecisionPolicy(torch.bfloat16))"),
           ("import fully_shard\n",
            "import MixedPrecisionPolicy, fully_shard\n")),
          "with --precision fp32 it trains in"),
    # the gradients
    wrong("the norm of the part alone, for the log", "fsdp",
          ((CLIP, f"        part = nn.utils.get_total_norm({PARTS})\n"
            + CLIP), ("norm.full_tensor().item()", "part.item()")),
          "the gradient norm of step 0"),
    wrong("clipped by the norm of the part", "fsdp",
          ((CLIP, f"        norm = nn.utils.get_total_norm({PARTS})\n"
            "        for w in raw_model.parameters():\n"
            "            w.grad *= min(1.0, 1 / norm.item())\n"),
           ("norm.full_tensor().item()", "norm.item()")),
          "gradients of step 0 are off"),
    # the samples, and what is told of the losses
    right("the solution", "fsdp", (), suite=True),
    right("gathered weights kept for the backward pass", "fsdp",
          ((FSDP_CALL, "fully_shard(module, mesh=mesh, "
            "reshard_after_forward=False)"),)),
    right("blocks in another order", "fsdp",
          ((FSDP_LOOP,
            "for module in (*reversed(raw_model.transformer.h), raw_model):"),
           )),
    right("blocks by twos", "fsdp",
          ((FSDP_LOOP, "blocks = list(raw_model.transformer.h)\n    for "
            "module in (blocks[:2], blocks[2:], raw_model):"), *ON_THE_CPU)),
    right("all of it made on the CPU", "fsdp", ON_THE_CPU),
    right("all of it moved to the device", "fsdp",
          (*ON_THE_CPU, ("hp.recompute)\n", "hp.recompute).to(device)\n")),
          "every device has the whole model before it is sharded"),
    right("attention and MLP by themselves", "fsdp",
          ((FSDP_LOOP, "parts = [part for block in raw_model.transformer.h "
            "for part in (block.attn, block.mlp)]\n    for module in (*parts, "
            "raw_model):"),)),
    right("the model as one piece", "fsdp",
          ((FSDP_LOOP, "for module in (raw_model,):"),),
          "all weights are gathered at once"),
    right("no set_requires_gradient_sync", "fsdp", ((FSDP_SYNC, ""),),
          "gradients are reduced 4.0 times a step"),
    right("a function for the mean over ranks", "fsdp", OWN_MEAN),
)
