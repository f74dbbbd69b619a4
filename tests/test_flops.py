"""FLOP counts against sums written out by hand, for every mixer, and the peaks of named devices."""

from unittest import mock

import jax
import pytest

from efla_jax.flops import forward_flops_per_token, peak_flops, train_flops_per_token
from efla_jax.layers import MIXERS
from efla_jax.model import LanguageModel

WIDTH, INNER, VOCABULARY, LENGTH = 12, 20, 31, 50
HEAD, MLP = 12 * 31, 3 * 12 * 20
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
}


def model(*mixers, depth=4, tied=False, mlp="swiglu"):
    options = {name: LAYERS[name][0] for name in mixers}
    return LanguageModel(
        VOCABULARY, WIDTH, depth, mixers, options, mlp=mlp, mlp_width=INNER, tie_embeddings=tied, remat="full"
    )


@pytest.mark.parametrize("name", MIXERS)
def test_a_token_through_every_mixer(name):
    layer = LAYERS[name][1]
    assert forward_flops_per_token(model(name), LENGTH) == 2 * (4 * (layer + MLP) + HEAD)
    assert train_flops_per_token(model(name), LENGTH) == 3 * 2 * (4 * (layer + MLP) + HEAD)


def test_a_hybrid_without_mlp_and_with_tied_embeddings():
    hybrid = model("efla", "attention", depth=6, tied=True, mlp="none")
    both = LAYERS["efla"][1] + LAYERS["attention"][1]
    assert forward_flops_per_token(hybrid, LENGTH) == 2 * (3 * both + HEAD)


def test_only_attention_grows_with_the_length():
    longer = {name: forward_flops_per_token(model(name), 2 * LENGTH) for name in MIXERS}
    grown = {name: flops - forward_flops_per_token(model(name), LENGTH) for name, flops in longer.items()}
    assert grown == {name: 2 * 4 * 6 * 4 * 25 if name == "attention" else 0 for name in MIXERS}


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
