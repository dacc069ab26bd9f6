"""A model's memory, and its processes' traffic, by arithmetic.

The formulas are those that the lessons explain and measure. All is in fp32, as
without autocast; GB are 10**9 bytes. test_traffic.py counts that of real runs;
its table is workshop/lessons/traffic.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from backstage.flops import (
    PEAKS,
    flops_per_token,
    num_parameters,
    padded_vocab_size,
)

ShapeConfig = dict[str, int]  # a GPTConfig's fields
Traffic = dict[str, tuple[int, int]]  # {collective: (calls, bytes)}

FP32 = 4  # bytes
SHARE_OF_PEAK = 0.4  # which a good script reaches on an A100
MINIBATCH_TOKENS = 512 * 1024  # tokens in a step of preset gpt2
LINK = 25e9  # bytes/s between two nodes, with one link of InfiniBand HDR
STATE = {"parameters": 4, "gradients": 4, "moments": 8}  # bytes of each weight
# What FSDP shards while it accumulates without reducing: until the last
# microbatch each rank keeps the gradients of all weights.
ACCUMULATING = ("parameters", "moments")

GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257,
        "block_size": 1024}
XL = {**GPT2, "n_layer": 48, "n_head": 25, "n_embd": 1600}


def is_count(value: object) -> bool:
    """Whether a value is a whole number from 1 to 2**31 - 1."""
    return type(value) is int and 0 < value < 2**31


# -------------------------------------------------------------------- memory


def state(config: ShapeConfig, n: int = 1,
          sharded: Collection[str] = tuple(STATE)) -> float:
    """Bytes that each of n devices keeps of a model's state.

    sharded: the kinds of which each device has 1/n; the others are whole.
    """
    return num_parameters(config) * sum(
        size / n if kind in sharded else size for kind, size in STATE.items())


def block_parameters(width: int, tensor_parallel: int = 1) -> int:
    """How many weights a block has, or a rank of a TP group has of it."""
    divided = 12 * width**2 + 7 * width  # matrices, most of the biases
    return divided // tensor_parallel + 6 * width  # LayerNorms, c_proj's bias


def gathered(config: ShapeConfig) -> int:
    """Bytes that FSDP makes whole at a time: the embeddings and a block.

    What is in no block is one group: it is whole from the forward pass to the
    end of the backward pass.
    """
    block = block_parameters(config["n_embd"])
    return FP32 * (num_parameters(config) - (config["n_layer"] - 1) * block)


def activations(config: ShapeConfig, recompute: bool = False) -> int:
    """Bytes that the backward pass needs of a sample of full length."""
    L, H, C = config["n_layer"], config["n_head"], config["n_embd"]
    T, V = config["block_size"], padded_vocab_size(config["vocab_size"])
    block = FP32 * (16 * T * C + 4 * T + H * T)
    ends = FP32 * (2 * T * C + 2 * T + T * V)
    if recompute:  # the blocks' inputs, and one block at a time
        return L * FP32 * T * C + block + ends
    return L * block + ends


def at_most(config: ShapeConfig, recompute: bool = False) -> int:
    """Return a sample's peak bytes in the backward pass.

    First come the gradients of the logits and of their log-softmax, each as
    large as what is kept of them, while no block is recomputed yet.
    """
    logits = FP32 * config["block_size"] * padded_vocab_size(
        config["vocab_size"])
    kept = activations(config, recompute)
    if not recompute:
        return kept + 2 * logits
    block = activations({**config, "n_layer": 1}) - activations(
        {**config, "n_layer": 0})
    return kept - block + max(2 * logits, block - logits)


# ------------------------------------------------------------------- traffic


def ring(n: int, num_bytes: float) -> float:
    """The bytes that each of n processes sends in a ring all-reduce."""
    return 2 * (n - 1) / n * num_bytes


def hiding_tokens(flops: float, bandwidth: float) -> float:
    """Return the tokens whose backward pass takes as long as DDP's all-reduce.

    Those of a device's microbatch. The backward pass of a model of N weights
    takes 4 N FLOP a token, without attention's. In a ring of many, a device
    sends 2 x 4 N bytes of fp32 gradients. So N does not matter.

    Args:
        flops: FLOP/s that a device reaches.
        bandwidth: bytes/s that it sends in the ring.
    """
    return 2 * flops / bandwidth


def of_step(
        split: str, config: ShapeConfig, mesh: tuple[int, int, int],
        microbatches: int, B: int, T: int) -> list[Traffic] | None:
    """{collective: (calls, bytes)} of a rank in each pipeline stage.

    split: what is split over the devices: "samples" (each has a copy of the
    model, as with DDP), "parameters" (FSDP), "matrices" (tensor parallelism
    and FSDP), "layers" (a pipeline, with both). None for anything else.
    config: a GPTConfig's dictionary. mesh: (pipeline, data, tensor) parallel.
    microbatches: how many a rank takes in a step, of B samples of T tokens.
    The bytes are those that the rank puts in: its input of a reduction, its
    part of what is gathered.

    all_reduce is inside a TP group (and FSDP's norm), and allreduce is any
    other. DDP's calls are those of one bucket: larger models have one for
    every 25 MB.
    """
    pp, dp, tp = mesh
    if pp * dp * tp == 1:
        return [{}]
    if split not in ("samples", "parameters", "matrices", "layers") or (
            split == "layers" and pp == 1):
        return None
    L, C = config["n_layer"] // pp, config["n_embd"]
    table = padded_vocab_size(config["vocab_size"]) * C // tp  # tied, so once
    block = block_parameters(C, tp)
    stages = []
    for number in range(pp):
        first, last = number == 0, number == pp - 1
        is_end = first or last
        outside = (is_end * table + last * 2 * C
                   + first * config["block_size"] * C)
        calls = CollectiveCounts()
        if split == "samples":
            calls.add("allreduce", 1, L * block + outside)
        elif dp > 1:  # FSDP gathers weights, and reduces gradients
            if split == "parameters":  # the norm: one number of each parameter
                calls.add("all_reduce", 1, 12 * L + 4)
            # A block is gathered before each forward and each backward pass,
            # what is in no block once for both. In a pipeline all stays
            # gathered from the first forward to the first backward pass.
            blocks, rest = 2 * microbatches, microbatches
            if split == "layers":
                blocks, rest = microbatches + 1, 1
            calls.add("allgather_base", blocks * L, block // dp)
            calls.add("allgather_base", rest * is_end, outside // dp)
            calls.add("reduce_scatter_base", L, block)
            calls.add("reduce_scatter_base", int(is_end), outside)
        if split in ("matrices", "layers"):
            hidden = B * T * C  # what goes from block to block
            if tp > 1:  # two forward and two backward, and one at each end
                ends = first + last
                calls.add("all_reduce", microbatches * (4 * L + ends), hidden)
            calls.add("all_reduce", last * 3 * microbatches, B * T)  # loss
            for name in ("send", "recv"):
                calls.add(name, microbatches * (2 - first - last), hidden)
            if pp > 1:  # the tied matrix's gradient, and the loss
                calls.add("allreduce", int(is_end), table // dp)
                calls.add("allreduce", 1, 1)
            calls.add("allreduce", 1, 1)  # the norm
        calls.add("allreduce", 1, 2)  # the mean loss, and whether to stop
        stages.append(dict(sorted(calls.items())))
    return stages


class CollectiveCounts(Traffic):
    """{collective: (calls, bytes)}"""

    def add(self, name: str, number: int, elements: int) -> None:
        """Add N calls, each with so many fp32 numbers."""
        if number:
            calls, size = self.get(name, (0, 0))
            self[name] = calls + number, size + number * elements * FP32


# ------------------------------------------------------------------ decisions


def averaging_rules(memory: float = 80e9, nodes: int = 2,
                    gpus: int = 4) -> list[tuple[str, str, str]]:
    """When to divide what: (when, what to take, what that means).

    The numbers are those of GPT-2 XL on these devices.
    """
    n, L, T, C = nodes * gpus, XL["n_layer"], XL["block_size"], XL["n_embd"]
    parameters, free = num_parameters(XL), memory - state(XL)
    groups = [d for d in range(2, XL["n_head"] + 1) if XL["n_head"] % d == 0]
    # a pipeline stage's gradients and, for a while, its parameters are whole
    whole = FP32 * parameters / nodes
    return [
        ("It fits on one GPU", "DDP",
         f"GPT-2: {state(GPT2) / 1e9:.1f} GB of state, and a step all-reduces "
         f"{FP32 * num_parameters(GPT2) / 1e9:.2f} GB"),
        ("The state fits, the activations do not",
         "a smaller microbatch; --recompute",
         f"{activations(XL) / 1e9:.1f} GB a sample, recomputed "
         f"{activations(XL, True) / 1e9:.2f} GB; with the gradients of the "
         f"logits, {free // at_most(XL):.0f} or "
         f"{free // at_most(XL, True):.0f} samples at once"),
        ("The state does not fit, or leaves too little, on one node",
         "FSDP, tensor parallelism or a pipeline",
         f"on GPUs of 24 GB: {state(XL) / 1e9:.1f} GB do not fit on one; "
         f"on a node of {gpus}, each keeps about "
         f"{state(XL, gpus) / 1e9:.1f} GB; a pipeline needs no fast links"),
        ("The same, on several nodes", "FSDP",
         f"on {nodes} such nodes, each of {n} keeps "
         f"{state(XL, n, ACCUMULATING) / 1e9:.1f} GB while it accumulates, "
         f"{state(XL, n) / 1e9:.1f} GB if it reduces in each microbatch; "
         f"{gathered(XL) / 1e9:.2f} GB are gathered at a time"),
        ("A layer is too large, or there are more GPUs than samples",
         "tensor parallelism, inside a node",
         f"{(4 * L + 2) * FP32 * T * C / 1e9:.2f} GB a sample into "
         f"{4 * L + 2} all-reduces; not for this model on a node of {gpus}: "
         f"with {XL['n_head']} heads, only groups of "
         f"{' or '.join(map(str, groups))} are possible"),
        ("FSDP waits for the network between the nodes",
         "hybrid sharding; a pipeline between the nodes",
         f"{2 * FP32 * T * C / 1e6:.0f} MB a sample between two pipeline "
         f"stages of {L // nodes} blocks; with 32 microbatches they wait "
         f"{(nodes - 1) / (32 + nodes - 1):.1%} of the time"),
        ("All of that at once", "3D: (pipeline, FSDP, tensor)",
         f"on {nodes} x {gpus} GPUs: {nodes} pipeline stages x {gpus} shards; "
         f"{(whole + 12 * parameters / n) / 1e9:.1f} GB each while they "
         f"accumulate, and up to {whole / 1e9:.1f} GB are gathered"),
        ("It does not fit even when sharded, or there is only one GPU",
         "offload to CPU or NVMe",
         f"{FP32 * parameters / n / 1e9:.2f} GB down and up in a step: "
         f"{2e3 * FP32 * parameters / n / 25e9:.0f} ms at 25 GB/s"),
    ]


# ---------------------------------------------------------- larger minibatches


def critical_tokens(loss: float) -> float:
    """The critical minibatch of a language model at a loss, in tokens.

    Kaplan et al. (2020), arXiv:2001.08361, equation 1.4: fitted to models
    with a vocabulary of 50,257 tokens, samples of 1,024, on WebText2.
    """
    return 2e8 / loss ** (1 / 0.21)


def cost_rows(
        loss: float, tokens: int = 18_692 * MINIBATCH_TOKENS,
        minibatch: int = MINIBATCH_TOKENS, share: float = SHARE_OF_PEAK,
        B: int = 16,
        gpus: Iterable[int] = (8, 32, 128, 512, 2048),
        ) -> list[tuple[int, str, str, str, str]]:
    """What the same loss costs with more A100s, as rows of a table.

    tokens: what training takes with that minibatch. share: of the peak that
    a GPU reaches. Each GPU has one microbatch of B samples in a step, and the
    time for sending is left out. McCandlish et al. (2018), equation 2.11.
    """
    T, critical = GPT2["block_size"], critical_tokens(loss)
    fewest = tokens / (minibatch + critical)  # steps
    speed = share * PEAKS["A100"][0] * 1e12 / flops_per_token(GPT2, T)
    rows = []
    for n in gpus:
        size = n * B * T
        steps = fewest * (1 + critical / size)
        cost = steps * size / speed / 3600
        rows.append((n, f"{size:,}", f"{steps:,.0f}", f"{60 * cost / n:,.0f}",
                     f"{cost:,.0f}"))
    return rows
