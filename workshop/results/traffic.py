"""What the processes send to each other in a step, by arithmetic.

tests/test_traffic.py counts it in real runs, and the two are equal; its table
is workshop/lessons/traffic.md. Only the standard library, from Python 3.9 on.
"""

FP32 = 4  # bytes: weights, gradients and activations are sent in fp32


def of_step(divided, config, mesh, microbatches, B, T):
    """{collective: (calls, bytes)} of a rank in each stage of the pipeline.

    divided: what the devices share: "samples" (each has a copy of the model,
    as with DDP), "parameters" (FSDP), "matrices" (tensor parallelism and
    FSDP), "layers" (a pipeline, with both). None for anything else.
    config: a GPTConfig's dictionary. mesh: (pipeline, data, tensor) parallel.
    microbatches: how many a rank takes in a step, of B samples of T tokens.
    The bytes are those that the rank puts in: its input of a reduction, its
    part of what is gathered.

    all_reduce is inside a row of tensor parallelism (and FSDP's norm), and
    allreduce is any other. DDP's calls are those of one bucket: larger models
    have one for every 25 MB.
    """
    pp, dp, tp = mesh
    if pp * dp * tp == 1:
        return [{}]
    if divided not in ("samples", "parameters", "matrices", "layers") or (
            divided == "layers" and pp == 1):
        return None
    L, C = config["n_layer"] // pp, config["n_embd"]
    table = -(-config["vocab_size"] // 128) * 128 * C // tp  # tied, so once
    # what a rank of a row has: matrices and biases in part, the rest whole
    block = (12 * C**2 + 7 * C) // tp + 6 * C
    stages = []
    for number in range(pp):
        first, last = number == 0, number == pp - 1
        outside = ((first or last) * table + last * 2 * C
                   + first * config["block_size"] * C)
        calls = Calls()
        if divided == "samples":
            calls.add("allreduce", 1, L * block + outside)
        elif dp > 1:
            share(calls, divided, dp, microbatches, L, block, outside,
                  first or last)
        if divided in ("matrices", "layers"):
            activations = B * T * C
            if tp > 1:  # two forward and two backward, and one at each end
                ends = first + last
                calls.add("all_reduce", microbatches * (4 * L + ends),
                          activations)
            calls.add("all_reduce", last * 3 * microbatches, B * T)  # loss
            for name in ("send", "recv"):
                calls.add(name, microbatches * (2 - first - last),
                          activations)
            if pp > 1:  # the tied matrix's gradient
                calls.add("allreduce", int(first or last), table // dp)
            calls.add("allreduce", 1, 1)  # the norm
        calls.add("allreduce", 1, 2)  # the loss, and whether to stop
        stages.append(dict(sorted(calls.items())))
    return stages


class Calls(dict):
    """{collective: (calls, bytes)}"""

    def add(self, name, number, elements):
        """So many calls, each of which puts in so many fp32 numbers."""
        if number:
            calls, size = self.get(name, (0, 0))
            self[name] = calls + number, size + number * elements * FP32


def share(calls, divided, dp, microbatches, L, block, outside, is_end):
    """Add what FSDP sends: it gathers weights, and reduces gradients.

    A block is gathered before each forward and each backward pass, what is in
    no block once for both. In a pipeline a block stays gathered from its first
    forward pass to its first backward pass.
    """
    if divided == "parameters":  # the norm: one number of each parameter
        calls.add("all_reduce", 1, 12 * L + 4)
    blocks, rest = 2 * microbatches, microbatches
    if divided == "layers":
        blocks, rest = microbatches + 1, 1
    calls.add("allgather_base", blocks * L, block // dp)
    calls.add("allgather_base", rest * is_end, outside // dp)
    calls.add("reduce_scatter_base", L, block)
    calls.add("reduce_scatter_base", int(is_end), outside)
