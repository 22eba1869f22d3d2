"""What the software does with the hardware: which kernels, which precisions, what it overlaps. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stack:
    """One training software. Bytes are those of its 16-bit recipe; a float32 or float64 run has one size throughout."""

    name: str
    stream_bytes: int  # an element of the residual stream
    gradient_bytes: int  # an element of the gradients that data ranks add up
    optimizer_bytes: int  # moved for each parameter by the optimizer's step, AdamW, clipping included
    weight_copies: bool  # float32 weights are cast to 16 bits for every micro-batch (autocast)
    fused_attention: bool  # scores never leave the chip (arXiv 2205.14135), the half above the diagonal is skipped
    attention_dropout: bool  # dropout on the scores too
    split_messages: bool  # each tensor rank sends its part of a stage's output (arXiv 2104.04473, section 4.1)
    update_kernels: int = 0  # of norm, clipping and update, for each parameter
    # fitted to published step times, three numbers
    elementwise: float = 1.0  # bytes that element-wise kernels move / those of perfectly fused ones
    action_overhead_s: float = 0.0  # of the host, for each forward or backward of a micro-batch
    exposed_reduction: float = 1.0  # part of the data-parallel communication that no computation hides


# 16-bit weights and gradients, float32 master weights and states. optimizer_bytes: read gradient 2, master 4, moments
# 8; write 2, 4, 8; two more passes over the gradients for the norm and the scale (2 + 4).
_MEGATRON = dict(
    stream_bytes=2,
    gradient_bytes=2,
    optimizer_bytes=34,
    weight_copies=False,
    fused_attention=False,
    attention_dropout=True,
    split_messages=True,
)

STACKS = {
    # This project: autocast with float32 weights. optimizer_bytes: read gradient, weight, moments (16), write weight,
    # moments (12); norm (4) and clipping (8). update_kernels: counted in training/optimizer.py. exposed_reduction is 1
    # by construction: data ranks reduce after the flush. action_overhead_s: 0.65 to 1.4 ms of a processor's time
    # (message of 512 B, of 256 KiB), measured through pipeline/engines/torch_runtime.py and gloo on a Xeon that was
    # busy with other work; not known on GPUs. elementwise is not known: Megatron-LM's of 2021, whose kernels are as
    # little fused as eager torch's; on CPU the calibration takes up what it is wrong by (planning/calibrate.py).
    "torch": Stack(
        "torch",
        stream_bytes=4,
        gradient_bytes=4,
        optimizer_bytes=40,
        weight_copies=True,
        fused_attention=True,
        attention_dropout=False,
        split_messages=False,
        update_kernels=10,
        elementwise=1.5,
        action_overhead_s=1e-3,
    ),
    "megatron": Stack(
        "megatron", **_MEGATRON, elementwise=1.53, action_overhead_s=0.0013, exposed_reduction=0.88
    ),  # Megatron-LM of 2021 (arXiv 2104.04473)
    "megatron_2022": Stack(
        "megatron_2022", **_MEGATRON, elementwise=1.22, action_overhead_s=0.0005, exposed_reduction=0.71
    ),  # of 2022 (arXiv 2205.05198)
    "megatron_deepspeed": Stack(
        "megatron_deepspeed", **_MEGATRON, elementwise=1.03, action_overhead_s=0.00095, exposed_reduction=1
    ),  # as in arXiv 2312.12391
}


def get_stack(name: str) -> Stack:
    """ValueError, listing the known, for an unknown name."""
    if name not in STACKS:
        raise ValueError(f"stack={name} is unknown; known are {', '.join(STACKS)}")
    return STACKS[name]
