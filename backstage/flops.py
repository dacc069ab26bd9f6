"""Floating-point operations: how many a model needs, a device's peak."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from backstage.interfaces import ModelConfig

if TYPE_CHECKING:
    import torch

# Dense TFLOP/s of one device: (bf16, fp32 without TF32), by words in the name
# that the driver gives it; the first match counts. None: not known. Source:
# the vendors' data sheets (sparse figures halved; those of boards with eight
# GPUs divided by eight).
PEAKS: dict[str, tuple[float, float | None]] = {
    "A100": (312, 19.5), "A30": (165, 10.3), "A10": (125, 31.2),
    "A10G": (70, 31.2), "A40": (149.7, 37.4), "A6000": (154.8, 38.7),
    "H100 PCIe": (756, 51), "H100 NVL": (835, 60), "H100": (989, 67),
    "GH200": (989, 67), "H200": (989, 67), "H20": (148, 44),
    "B200": (2250, 75), "B300": (2250, 75),
    "GB200": (2500, None),  # NVIDIA published 90 for fp32, and later 80
    "L40S": (362, 91.6), "L4": (121, 30.3),
    # its tensor cores have no bf16: that is computed as fp32 is
    "V100-PCIE": (14, 14), "V100": (15.7, 15.7),
    "MI300X": (1307, 163.4), "MI300A": (981, 122.6), "MI325X": (1307, 163.4),
    "MI350X": (2307, 144.2), "MI355X": (2517, 157.3),
    "MI250X": (191.5, 47.9),  # for one of its two dies, which is one device
}


def padded_vocab_size(vocab_size: int) -> int:
    """The rows of the embedding: GPUs multiply faster by multiples of 128."""
    return -(-vocab_size // 128) * 128


def num_parameters(config: ModelConfig | dict[str, int],
                   positions: bool = True) -> int:
    """How many weights a model has; config: a GPTConfig or its dictionary."""
    fields = to_dictionary(config)
    width, layers = fields["n_embd"], fields["n_layer"]
    rows = padded_vocab_size(fields["vocab_size"])
    if positions:
        rows += fields["block_size"]
    block = 12 * width**2 + 13 * width  # matrices; biases and LayerNorms
    return rows * width + layers * block + 2 * width


def to_dictionary(config: ModelConfig | dict[str, int]) -> dict[str, int]:
    """Return the fields of a GPTConfig, or its dictionary as it is."""
    return config if isinstance(config, dict) else vars(config)


def flops_per_token(config: ModelConfig | dict[str, int],
                    sequence_length: int) -> int:
    """FLOP to train on one token, forward and backward: 6 N + 12 L H Q T.

    This is the formula of the PaLM paper (arXiv:2204.02311, appendix B). N is
    the number of parameters without the position embeddings.
    """
    parameters = num_parameters(config, positions=False)
    fields = to_dictionary(config)
    attention = 12 * fields["n_layer"] * fields["n_embd"] * sequence_length
    return 6 * parameters + attention


def peak_flops(device: torch.device, precision: str) -> float | None:
    """FLOP/s that the device could reach, or None if that is not known."""
    import torch

    if device.type not in ("cuda", "xpu"):
        return None
    name = getattr(torch, device.type).get_device_name(device)
    if "MIG" in name:  # a slice of an A100 is not an A100
        return None
    if "Max 1550" in name and precision == "bf16":
        # A device may be the card or one of its two tiles. A compute unit does
        # 512 bf16 multiplications and additions per clock, at 1.3 GHz
        # sustained (Intel's oneAPI GPU optimization guide; torchtitan).
        units = torch.xpu.get_device_properties(device).max_compute_units
        return 512 * units * 1.3e9
    column = ("bf16", "fp32").index(precision)
    for part, peaks in PEAKS.items():
        peak = peaks[column]
        if re.search(rf"\b{part}\b", name) and peak:
            return peak * 1e12
    return None
