"""When to divide what: the numbers of the decision table, by arithmetic.

The formulas are those that the lesson sharding measures. All is in fp32, as
without autocast; GB are 10**9 bytes.
"""

from backstage.flops import num_parameters

GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257,
        "block_size": 1024}
XL = {**GPT2, "n_layer": 48, "n_head": 25, "n_embd": 1600}


def state(config):
    """Bytes of the parameters, their gradients, and two moments."""
    return 16 * num_parameters(config)


def activations(config, recompute=False):
    """Bytes that the backward pass needs of a sample of full length."""
    L, H, C = config["n_layer"], config["n_head"], config["n_embd"]
    T, V = config["block_size"], -(-config["vocab_size"] // 128) * 128
    block = 4 * (16 * T * C + 4 * T + H * T)
    ends = 4 * (2 * T * C + 2 * T + T * V)
    if recompute:  # the blocks' inputs, and one block at a time
        return L * 4 * T * C + block + ends
    return L * block + ends


def rows(memory=80e9, nodes=2, gpus=4):
    """(when, what to take, what that means) for GPT-2 XL on these devices."""
    n, L, T, C = nodes * gpus, XL["n_layer"], XL["block_size"], XL["n_embd"]
    free = memory - state(XL)
    heads = [d for d in range(2, XL["n_head"] + 1) if XL["n_head"] % d == 0]
    small = num_parameters(GPT2)
    return [
        ("It fits on one GPU", "DDP",
         f"GPT-2: {state(GPT2) / 1e9:.1f} GB of state, and a step all-reduces "
         f"{4 * small / 1e9:.2f} GB"),
        ("The state fits, the activations do not",
         "a smaller microbatch; --recompute",
         f"{activations(XL) / 1e9:.1f} GB a sample, recomputed "
         f"{activations(XL, True) / 1e9:.2f} GB: {free // activations(XL):.0f}"
         f" or {free // activations(XL, True):.0f} samples at once"),
        ("The state does not fit, or leaves too little", "FSDP",
         f"{state(XL) / 1e9:.1f} GB is too much for a GPU of 24 GB; on {n} "
         f"it is {state(XL) / n / 1e9:.1f} GB each"),
        ("It does not even fit in parts, or there is one GPU",
         "FSDP with offload to the CPU",
         f"{4 * num_parameters(XL) / n / 1e9:.2f} GB down and up in a step; "
         "at 25 GB/s that is "
         f"{8e3 * num_parameters(XL) / n / 25e9:.0f} ms"),
        ("A layer is too large, or there are more GPUs than samples",
         "tensor parallelism, inside a node",
         f"{(4 * L + 2) * 4 * T * C / 1e9:.2f} GB a sample into "
         f"{4 * L + 2} all-reduces; not this model, whose "
         f"{XL['n_head']} heads divide by {' and '.join(map(str, heads))} "
         f"and not by {gpus}"),
        ("It does not fit in a node, or the network is slow",
         "a pipeline between the nodes",
         f"{2 * 4 * T * C / 1e6:.0f} MB a sample between two stages of "
         f"{L // nodes} blocks; with 32 microbatches they wait "
         f"{(nodes - 1) / (32 + nodes - 1):.1%}"),
        ("All of that at once", "3D: (pipeline, FSDP, tensor)",
         f"on {nodes} x {gpus} GPUs: 2 stages x {gpus} parts, "
         f"{state(XL) / n / 1e9:.1f} GB each"),
    ]
