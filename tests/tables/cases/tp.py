"""Scripts for the check of the lesson tp."""

from cases.case import (
    CLIP,
    OPTIMIZER,
    OWN_MEAN,
    TP_ATTENTION,
    TP_LOSS,
    right,
    wrong,
)

ENDS_PLAN = """\
        "transformer.wte": tp.RowwiseParallel(input_layouts=Replicate()),
        "lm_head": tp.ColwiseParallel(use_local_output=False),
"""
BLOCK_PLAN = """\
    "attn.c_attn": tp.ColwiseParallel(),
    "attn.c_proj": tp.RowwiseParallel(),
    "mlp.c_fc": tp.ColwiseParallel(),
    "mlp.c_proj": tp.RowwiseParallel(),
"""
TIE = ("    model.lm_head.weight = model.transformer.wte.weight"
       "  # tied again\n")
TP_CALL = '    split_vocabulary(raw_model, tp_mesh)\n'
BLOCK_CALL = (
    '        tp.parallelize_module(block, tp_mesh, BLOCK_PLAN)\n')
BLOCK_SHARD = """\
        fully_shard(block, mesh=dp_mesh)  # a part goes to each device
"""
TP_CLIP = "        norm = clip_grad_norm(raw_model, 1.0, world_size)\n"
HEADS = """\
        qkv = self.c_attn(x).view(B, T, -1, 3, self.head_size)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each (B, heads, T, head_size)
"""
BY_THREES = """\
        q, k, v = (part.view(B, T, -1, self.head_size).transpose(1, 2)
                   for part in self.c_attn(x).chunk(3, dim=-1))
"""
# the norm by hand: the squares of what a rank has, times a factor
NOT_SUMMED = """\
        def keep(module, inputs):
            inputs[0].requires_grad and inputs[0].register_hook(
                lambda grad: DTensor.from_local(
                    grad.to_local(), grad.device_mesh, [Replicate()]))

        block.attn.c_attn.register_forward_pre_hook(keep)
        block.mlp.c_fc.register_forward_pre_hook(keep)
"""

CASES = (
    # the changes of the lesson, each left out alone
    wrong("not tied again", "", (TIE, "")),
    wrong("sharded before it is split", "",
          (BLOCK_CALL + BLOCK_SHARD, BLOCK_SHARD + BLOCK_CALL)),
    wrong("FSDP's norm", "", (TP_CLIP, CLIP),
          ("norm = norm.item()", "norm = norm.full_tensor().item()")),
    # another stage's script
    wrong("the FSDP script", "", "fsdp"),
    # what runs to the end, and is wrong
    wrong("c_attn in three parts", "gradients of step 0 are off",
          (HEADS, BY_THREES)),
    wrong("the gradient of an input not summed", "gradients of step 0 differ",
          (BLOCK_CALL, BLOCK_CALL + NOT_SUMMED),
          ("tensor import Replicate\n", "tensor import DTensor, Replicate\n")),
    wrong("the optimizer made before", "optimizer updates another model",
          (OPTIMIZER, ""), (TP_CALL, OPTIMIZER + TP_CALL)),
    right("the solution"),
    right("the logits and the embedding whole",
          ('        "transformer.wte": '
           "tp.RowwiseParallel(input_layouts=Replicate()),\n", ""),
          ('        "lm_head": tp.ColwiseParallel(use_local_output=False),\n',
           ""), (TIE, ""), (TP_LOSS, "return loss"),
          ("logits.full_tensor()[:, :", "logits[:, :")),
    right("the MLPs alone", (TP_ATTENTION, ""),
          warns="transformer.h.0.attn.c_attn.weight is not split"),
    right("SequenceParallel", (ENDS_PLAN, """\
        "transformer.wte": tp.RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1)),
        "transformer.wpe": tp.RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(0)),
        "transformer.ln_f": tp.SequenceParallel(),
        "lm_head": tp.ColwiseParallel(
            input_layouts=Shard(1), use_local_output=False),
"""), (BLOCK_PLAN, """\
    "ln_1": tp.SequenceParallel(),
    "attn.c_attn": tp.ColwiseParallel(input_layouts=Shard(1)),
    "attn.c_proj": tp.RowwiseParallel(output_layouts=Shard(1)),
    "ln_2": tp.SequenceParallel(),
    "mlp.c_fc": tp.ColwiseParallel(input_layouts=Shard(1)),
    "mlp.c_proj": tp.RowwiseParallel(output_layouts=Shard(1)),
"""), ("import Replicate\n", "import Replicate, Shard\n"),
          ("logits = self(idx[:, -self.config.block_size:])[:, -1]\n",
           "known = idx[:, -self.config.block_size:]\n"
           "            n = known.shape[1]\n            logits = "
           "self(F.pad(known, (0, -n % 4)))[:, n - 1]\n")),
    right("the loss of gathered logits", (TP_LOSS, "return loss"),
          ("logits.full_tensor()[:, :", "logits[:, :"),
          ("use_local_output=False", "output_layouts=Replicate()")),
    right("a function for the mean over ranks", *OWN_MEAN),
)
