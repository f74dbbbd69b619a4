"""The cases of `efla_jax.selfcheck` for softmax attention: over whole rows, plain and block-sparse, with every
gradient; and behind a cache, of several tokens and of one, outputs only.

The reference is "chunked" on the same inputs widened to float32, with products in full precision.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from efla_jax import ops
from efla_jax.ops import pallas_attention, pallas_attention_cache
from efla_jax.ops.segments import segments
from efla_jax.selfcheck_cases import BAR, FLOOR, Case, Sizes, Timed, errors_of, segment_ids

NAMES = ("o", "dq", "dk", "dv", "dselected")
CHUNK = 64
# dselected sums P (dO V - delta) over all later queries: what is left of cancelling terms; delta has the rounding of
# o. Beside float64 the kernels read up to 1.3 times the error of "chunked" (tests/test_kernels_attention.py).
CANCELLED = 2.0


class AttentionCase(NamedTuple):
    """One input: documents as of `Case`; routes: heads of the router, of block-sparse attention; before: tokens that a
    cache holds, 0: no cache."""

    op: str
    sizes: Sizes
    routes: int = 1
    documents: str | None = None
    before: int = 0
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        s = self.sizes
        shape = f"B{s.batch} T{s.time} G{s.key_heads} H{s.heads} K{s.key_dim} V{s.value_dim}"
        notes = [self.documents or "", f"behind {self.before}" if self.before else "", shape, self.dtype]
        return ", ".join([self.op, *filter(None, notes)])


def cases() -> list[AttentionCase]:
    """Rows that fill no tile, documents that begin anywhere, K and V that differ, shared heads, caches cut anywhere."""
    found = []
    for op, routes in (("softmax_attention", 1), ("block_sparse_attention", 2)):
        case = AttentionCase(op, Sizes(2, 330, 2, 4, 64, 128), routes)
        found += [case, case._replace(documents="documents"), case._replace(documents="padding")]
        found += [case._replace(sizes=Sizes(1, 1100, 4, 4, 128, 128), documents="documents")]
        found += [case._replace(sizes=Sizes(1, 40, 2, 2, 128, 64)), case._replace(dtype="float16")]
        found += [case._replace(sizes=case.sizes._replace(key_dim=32))]  # not covered
        found += [case._replace(before=700), case._replace(before=640, documents="documents")]
        found += [case._replace(sizes=case.sizes._replace(time=1), before=before) for before in (37, 1000)]
    return found


def tiny_cases() -> list[AttentionCase]:
    sizes = Sizes(1, 130, 1, 2, 64, 64)
    case = AttentionCase("softmax_attention", sizes, documents="documents")
    return [case, case._replace(sizes=sizes._replace(time=1), documents=None, before=70)]


# What --times measures of attention: bfloat16, half of the chunks selected.
TIMED = (
    AttentionCase("softmax_attention", Sizes(16, 2048, 16, 16, 128, 128)),
    AttentionCase("softmax_attention", Sizes(16, 2048, 16, 16, 128, 128), documents="documents"),
    AttentionCase("softmax_attention", Sizes(1, 32768, 16, 16, 128, 128)),
    AttentionCase("block_sparse_attention", Sizes(1, 32768, 12, 12, 64, 128), 6),
    AttentionCase("softmax_attention", Sizes(1, 512, 16, 16, 64, 64), before=32768),
    AttentionCase("softmax_attention", Sizes(16, 512, 16, 16, 64, 64), before=1536),
    AttentionCase("block_sparse_attention", Sizes(1, 512, 12, 12, 64, 128), 6, before=32768),
    AttentionCase("softmax_attention", Sizes(16, 1, 16, 16, 64, 64), before=2048),
    AttentionCase("softmax_attention", Sizes(1, 1, 16, 16, 64, 64), before=131072),
    AttentionCase("block_sparse_attention", Sizes(1, 1, 12, 12, 64, 128), 6, before=32768),
)


def draw(case: AttentionCase, seed: int = 0) -> tuple[tuple, Any]:
    """((q, k, v, selected), state) in the case's dtype; state: a cache after `before` tokens, or None."""
    s, keys = case.sizes, iter(jax.random.split(jax.random.key(seed), 8))

    def tokens(time: int) -> tuple:
        shapes = (s.heads, s.key_dim), (s.key_heads, s.key_dim), (s.key_heads, s.value_dim)
        q, k, v = (jax.random.normal(next(keys), (s.batch, time, *shape)) for shape in shapes)
        chosen = jax.random.uniform(next(keys), (s.batch, -(-time // CHUNK), case.routes)) < 0.5
        return *(x.astype(case.dtype) for x in (q * 1.5 * s.key_dim**-0.5, k, v)), chosen.astype(jnp.float32)

    call = tokens(s.time)
    return call, state_after(case, tokens(case.before)) if case.before else None


def state_after(case: AttentionCase, call: tuple) -> Any:
    """The cache after a call's tokens, with room for as many more as the case has."""
    s, (q, k, v, chosen) = case.sizes, call
    room = -(-(case.before + s.time) // CHUNK) * CHUNK
    if case.op == "block_sparse_attention":
        run = functools.partial(ops.block_sparse_attention, chunk_size=CHUNK, implementation="chunked")
        state = jax.jit(lambda *tokens: run(*tokens)[1])(q, k, v, chosen)
        return ops.grow_selected_kv(state, room // CHUNK * case.routes)
    fill = ((0, 0), (0, room - case.before), (0, 0), (0, 0))
    return ops.KVCache(jnp.pad(k, fill), jnp.pad(v, fill), jnp.full((s.batch,), case.before, jnp.int32))


def kernel(q, k, v, ids, state: ops.KVCache | None, interpret: Any) -> jax.Array:
    """The kernel of softmax attention alone, in rows without padding; behind a cache that of one token."""
    if state is None:
        return pallas_attention.softmax(q, k, v, None if ids is None else segments(ids).document, interpret=interpret)
    rows, slot = jnp.arange(k.shape[0]), state.length
    k, v = (x.at[rows, slot].set(new[:, 0]) for x, new in ((state.k, k), (state.v, v)))
    return pallas_attention_cache.latest(q, k, v, slot + 1, interpret)


@functools.cache
def program(op: str, implementation: str, gradients: bool, interpret: Any = None) -> Callable:
    """A jitted (arguments, ids, state) -> outputs and gradients of a fixed weighted sum of them, by name."""

    def forward(arguments, ids, state):
        if interpret is not None:
            return kernel(*arguments[:3], ids, state, interpret)
        options = {"initial_state": state, "segment_ids": ids, "implementation": implementation}
        if op == "softmax_attention":
            return ops.softmax_attention(*arguments[:3], **options)[0]
        return ops.block_sparse_attention(*arguments, chunk_size=CHUNK, **options)[0]

    @jax.jit
    def run(arguments, ids, state):
        if not gradients:
            return {"o": forward(arguments, ids, state)}
        o, pull = jax.vjp(lambda *given: forward(given, ids, state), *arguments)
        weights = jnp.sin(7.0 * jnp.arange(o.size)).reshape(o.shape).astype(jnp.bfloat16).astype(o.dtype)
        names = NAMES if op == "block_sparse_attention" else NAMES[:4]
        return dict(zip(names, (o, *pull(weights)), strict=False))

    return run


def arguments_of(case: AttentionCase) -> tuple:
    """(arguments, ids, state); the ids' first document goes on with the state."""
    arguments, state = draw(case)
    return arguments, segment_ids(Case(case.op, "random", case.sizes, case.documents)), state


def run(case: AttentionCase, implementation: str, arguments: tuple, interpret: Any = None) -> dict[str, jax.Array]:
    return program(case.op, implementation, not case.before, interpret)(*arguments)


def wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def truth_of(case: AttentionCase, arguments: tuple) -> dict[str, jax.Array]:
    """ "chunked" on the same inputs, widened."""
    with jax.default_matmul_precision("highest"):
        return run(case, "chunked", wide(arguments))


def beside(case: AttentionCase, arguments: tuple, truth: dict[str, jax.Array]) -> dict[str, float]:
    """Errors of "chunked", which multiplies float16 as the kernels do."""
    return errors_of(run(case, "chunked", arguments), truth)


def bar(case: AttentionCase, name: str, beside: float) -> float:
    times = CANCELLED if name == "dselected" else BAR[case.dtype]
    return max(times * beside, FLOOR[case.dtype])


def timed() -> Iterator[Timed]:
    """ "auto" is cuDNN where that serves."""
    for case in TIMED:
        arguments = arguments_of(case)
        for gradients in (False, True)[: 1 if case.before else 2]:
            name = f"{case.name}, {'forward+backward' if gradients else 'forward'}"
            yield Timed(name, ("pallas", "auto"), functools.partial(implemented, case.op, gradients), arguments)


def implemented(op: str, gradients: bool, implementation: str) -> Callable:
    return program(op, implementation, gradients)
