"""Programs compiled for an H200 where there is none: their memory, and that whole layers compile with their kernels.

Slow, and only where CUDA's compiler is (see tests/ptxas.py): a layer takes XLA half a minute."""

import re

import jax
import jax.numpy as jnp
import pytest

from efla_jax import LanguageModel, layers, ops
from efla_jax.generate import Sampling, decode_block
from tests import ptxas
from tests.compiling import compile_h200

pytestmark = [
    pytest.mark.slow,
    # needs jax's CUDA plugin unpacked and a CUDA toolkit, which no test environment installs
    pytest.mark.skipif(ptxas.missing() is not None, reason=str(ptxas.missing())),
]
GIB = 2**30
# Of each operator with levels, the flat one and how much more memory it may need. 1.6 is the aim for both.
FLAT = {"log_linear_attention": ("linear_attention", 1.6), "log_linear_delta_rule": ("delta_rule", 1.85)}


def inputs(op: str, time: int) -> list[jax.ShapeDtypeStruct]:
    """Of the sizes that are measured: 16 heads of 128, or Mamba-2's 48 heads of 64 with one key head of 128."""
    delta = "delta" in op
    heads, key_heads, value_dim = (16, 16, 128) if delta else (48, 1, 64)
    shapes = [(1, time, key_heads, 128)] * 2 + [(1, time, heads, value_dim)]
    found = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    found += [jax.ShapeDtypeStruct((1, time, heads), jnp.float32)] * (1 + delta)
    levels = time.bit_length()
    return found + [jax.ShapeDtypeStruct((1, time, heads, levels), jnp.float32)] * (op in FLAT)


def gigabytes(op: str, time: int) -> float:
    """Arguments, results and temporaries of the gradients of every argument."""
    arguments = inputs(op, time)

    def loss(*arguments):
        return jnp.sum(getattr(ops, op)(*arguments, implementation="pallas")[0].astype(jnp.float32))

    memory = compile_h200(jax.grad(loss, range(len(arguments))), *arguments).memory_analysis()
    return (memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes) / GIB


def test_the_delta_rule_at_32768_tokens_fits_into_what_its_best_peer_takes():
    assert gigabytes("delta_rule", 32768) <= 1.5


@pytest.mark.parametrize("op", FLAT)
def test_levels_cost_little_memory(op):
    flat, ratio = FLAT[op]
    assert gigabytes(op, 32768) <= ratio * gigabytes(flat, 32768)


@pytest.mark.parametrize("given", ("segment_ids", "initial_state"))
@pytest.mark.parametrize("op", ("delta_rule", "delta_flow", "linear_attention", "log_linear_attention", "causal_conv"))
def test_a_single_row_compiles(op, given):
    """XLA has programs of its own for one row, as a kernel's output is then a piece of memory in one."""
    time, width = 2048, 256
    if op == "causal_conv":
        arguments = [((1, time, width), "bfloat16"), ((4, width), "float32"), ((width,), "float32")]
        arguments, options = [jax.ShapeDtypeStruct(*x) for x in arguments], {}
    else:
        arguments, options = inputs(op, time), {"implementation": "pallas"}
    state = jax.eval_shape(getattr(ops, op), *arguments)[1]
    extra = {"segment_ids": jax.ShapeDtypeStruct((1, time), jnp.int32), "initial_state": state}[given]

    def loss(arguments, extra):
        return jnp.sum(getattr(ops, op)(*arguments, **{given: extra}, **options)[0].astype(jnp.float32))

    assert "mosaic_gpu" in compile_h200(jax.grad(loss), arguments, extra).as_text()


@pytest.mark.parametrize("time", (1, 65))
@pytest.mark.parametrize("op", ("delta_rule", "delta_flow", "linear_attention", *FLAT))
def test_the_last_token_may_be_alone_without_kernels(op, time):
    """What is left behind whole chunks; XLA's compiler once failed there."""

    def loss(*arguments):
        o, state = getattr(ops, op)(*arguments, implementation="chunked")
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves((o, state)))

    arguments = inputs(op, time)
    compile_h200(jax.grad(loss, range(len(arguments))), *arguments)


@pytest.mark.parametrize("name", ("delta_net", "efla", "gated_delta_net", "gated_efla", "mamba2", "nats_l"))
def test_a_layers_gradient_compiles_with_kernels(name):
    """Documents and padding included, as training has them; nothing of [T, T]."""
    time, width = 2048, 256
    mixer = layers.MIXERS[name](width=width, num_heads=2, dtype="bfloat16")
    x, ids = jnp.zeros((1, time, width), jnp.bfloat16), jnp.ones((1, time), jnp.int32)
    params = jax.eval_shape(lambda: mixer.init(jax.random.key(0), x[:, :8]))

    def loss(params, x, ids):
        return jnp.sum(mixer.apply(params, x, segment_ids=ids)[0].astype(jnp.float32))

    text = compile_h200(jax.grad(loss, (0, 1)), params, x, ids).as_text()
    assert "mosaic_gpu" in text
    assert f"{time},{time}]" not in text


def programs_of_a_token(depth: int) -> list[str]:
    """What the loop over tokens of one row runs on the GPU, in the text of XLA."""
    model = LanguageModel(
        vocab_size=512, width=256, depth=depth, dtype="bfloat16",
        mixers=("gated_delta_net",), mixer_options={"gated_delta_net": {"num_heads": 2}},
    )  # fmt: skip
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    cache = jax.eval_shape(lambda: model.init_cache(1))
    number, logits = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((1, 512), jnp.float32)

    def block(params, logits, cache, number):
        how = Sampling(jnp.float32(1), number, jnp.float32(1))
        given = logits, cache, jnp.ones(1, bool), None, how, jnp.array([-1]), number, number, number
        return decode_block.__wrapped__(model, params, *given, block=8, greedy=True)

    text = compile_h200(jax.jit(block, donate_argnums=(1, 2)), params, logits, cache, number).as_text()
    (body,) = set(re.findall(r" while\(.*body=%([\w.\-]+)", text))
    lines = re.search(rf"\n%{re.escape(body)} \(.*?\n}}\n", text, re.S)[0].splitlines()
    return [line for line in lines if re.search(r" (fusion|copy|custom-call|while|conditional)\(", line)]


def test_a_token_of_one_row_takes_few_programs():
    """18 a layer with jax 0.11.2; one more may come with another. Shifting the inputs of three convolutions would be 6,
    and writing the document's id again one. None copies a cache, and one writes the inputs of all layers."""
    few, many = programs_of_a_token(2), programs_of_a_token(4)
    assert len(many) - len(few) <= 2 * 19
    assert not [line for line in many if " copy(" in line]
    assert sum("dynamic_update_slice_fusion" in line.split("=")[0] and "[4,1,3," in line for line in many) == 1
