"""FLOP counts against sums written out by hand, for every mixer, and the peaks of named devices."""

from unittest import mock

import jax
import pytest

from efla_jax.flops import forward_flops_per_token, peak_flops, train_flops_per_token
from efla_jax.layers import MIXERS
from efla_jax.model import LanguageModel

WIDTH, INNER, VOCABULARY, LENGTH = 12, 20, 31, 50
HEAD, MLP = 12 * 31, 3 * 12 * 20


def older(length, slots):
    """Live states beside a token's own, mean over positions: its bits, those from bit slots - 2 on as one."""
    top = slots - 2
    return sum((t % 2**top).bit_count() + (t >= 2**top) for t in range(length)) / length


# Multiply-adds per token of one layer of width 12: projections, taps, then the operator.
LAYERS = {
    # 6 heads of 2, 3 of them with keys and values: q, k, v, o; scores and values over half of 50 keys
    "attention": ({"num_heads": 6, "num_kv_heads": 3}, 12 * 12 + 2 * 12 * 6 + 12 * 12 + 6 * (2 + 2) * 25),
    # 2 heads, K = V = 6: q, k, v, o; beta; 4 taps on q, k and v; erase, write and read
    "delta_net": ({"num_heads": 2}, 4 * 12 * 12 + 12 * 2 + 3 * 4 * 12 + 2 * 3 * 6 * 6),
    # 3 heads, 1 of them with keys: K = 4, V = 8; q, k of 4; v of 24; o; beta; 4 taps
    "efla": (
        {"num_heads": 3, "num_key_heads": 1, "expand_v": 2.0},
        12 * (4 + 4 + 24) + 24 * 12 + 12 * 3 + 4 * (4 + 4 + 24) + 3 * 3 * 4 * 8,
    ),
    # projection and 3 taps
    "gated_conv": ({"num_heads": 2}, 12 * 12 + 3 * 12),
    # 2 heads, K = 6, V = 12: q, k; v, gate, o of 24; a and b; 4 taps
    "gated_delta_net": ({"num_heads": 2}, 12 * (12 + 12 + 24 + 24) + 24 * 12 + 2 * 12 * 2 + 4 * 48 + 2 * 3 * 6 * 12),
    # head width 5 without a convolution: q, k of 10; v, gate, o of 20; a and b
    "gated_efla": (
        {"num_heads": 2, "head_dim": 5, "conv_width": 0},
        12 * (10 + 10 + 20 + 20) + 20 * 12 + 2 * 12 * 2 + 2 * 3 * 5 * 10,
    ),
    # inner 24 in 4 heads of 6, state 7, 2 groups: z, x; B, C; dt; out; 3 taps on x, B and C; write and read
    "mamba2": (
        {"num_heads": 4, "state_dim": 7, "num_groups": 2, "conv_width": 3},
        12 * (24 + 24 + 14 + 14 + 4) + 24 * 12 + 3 * (24 + 14 + 14) + 4 * 2 * 7 * 6,
    ),
    # as above with 5 levels: projection to 4 x 5; write, own read, and a read of each older state that lives
    "log_linear_mamba2": (
        {"num_heads": 4, "state_dim": 7, "num_groups": 2, "conv_width": 3, "levels": 5},
        12 * (24 + 24 + 14 + 14 + 4) + 24 * 12 + 3 * (24 + 14 + 14) + 12 * 4 * 5 + 4 * (2 + older(50, 5)) * 7 * 6,
    ),
    # as above with 4 levels; an MLP of width 3 for each head; write, own read, and erase, step and read of older states
    "log_linear_gated_delta_net": (
        {"num_heads": 2, "levels": 4, "level_kind": "mlp_softmax", "level_hidden": 3},
        12 * (12 + 12 + 24 + 24) + 24 * 12 + 2 * 12 * 2 + 4 * 48 + 12 * 2 * 4 + 2 * (4 * 3 + 3 * 4)
        + 2 * (2 + 3 * older(50, 4)) * 6 * 12,
    ),
    # as gated_delta_net; two weights of each of 4 attention heads, from q; a router of 1 head, once in 16 tokens; 3 + 6
    # channels of each attention head for half the own chunk and half of what is before it
    "nats_l": (
        {"num_heads": 2, "num_routes": 1, "chunk_size": 16},
        12 * (12 + 12 + 24 + 24) + 24 * 12 + 2 * 12 * 2 + 4 * 48 + 2 * 3 * 6 * 12
        + 12 * 4 * 2 + 12 * 2 / 16 + 4 * (3 + 6) * (8 + (50 - 16) / 4),
    ),
    "log_linear_efla": (
        {"num_heads": 2}, 4 * 12 * 12 + 12 * 2 + 3 * 4 * 12 + 12 * 2 * 15 + 2 * (2 + 3 * older(50, 15)) * 6 * 6,
    ),
}  # fmt: skip


def model(*mixers, depth=4, tied=False, mlp="swiglu"):
    options = {name: LAYERS[name][0] for name in mixers}
    return LanguageModel(
        VOCABULARY, WIDTH, depth, mixers, options, mlp=mlp, mlp_width=INNER, tie_embeddings=tied, remat="full"
    )


@pytest.mark.parametrize("name", MIXERS)
def test_a_token_through_every_mixer(name):
    layer = LAYERS[name][1]
    total = pytest.approx(2 * (4 * (layer + MLP) + HEAD), rel=1e-12)
    assert forward_flops_per_token(model(name), LENGTH) == total
    assert train_flops_per_token(model(name), LENGTH) / 3 == total


def test_a_hybrid_without_mlp_and_with_tied_embeddings():
    hybrid = model("efla", "attention", depth=6, tied=True, mlp="none")
    both = LAYERS["efla"][1] + LAYERS["attention"][1]
    assert forward_flops_per_token(hybrid, LENGTH) == 2 * (3 * both + HEAD)


def test_what_grows_with_the_length():
    """From 64 tokens to 128: attention by 32 keys, nats_l by 16, log-linear mixers by half a state; where the last slot
    is in use, by that slot's 8 (or 4) empty positions among 128 instead of 64."""
    grown = {
        name: forward_flops_per_token(model(name), 128) - forward_flops_per_token(model(name), 64) for name in MIXERS
    }
    some = {
        "attention": 6 * 4 * 32,
        "nats_l": 4 * 9 * 16,
        "log_linear_efla": 2 * 3 * 6 * 6 / 2,
        "log_linear_mamba2": 4 * 7 * 6 * 8 / 128,
        "log_linear_gated_delta_net": 2 * 3 * 6 * 12 * 4 / 128,
    }
    assert grown == {name: 2 * 4 * some.get(name, 0) for name in MIXERS}


def test_a_length_without_a_token_is_an_error():
    with pytest.raises(ValueError, match="length: 0 tokens"):
        forward_flops_per_token(model("efla"), 0)


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("Tesla V100-PCIE-32GB", 112.0),
        ("Tesla T4", 65.0),
        ("NVIDIA A10G", None),  # no A10
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("cpu", None),
    ],
)
def test_peaks(kind, teraflops):
    peak = peak_flops(mock.Mock(spec=jax.Device, device_kind=kind))
    assert peak == (None if teraflops is None else pytest.approx(1e12 * teraflops))
