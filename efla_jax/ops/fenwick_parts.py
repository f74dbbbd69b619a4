"""Fenwick recurrences over a mesh that splits the time: every device works on its part, and only states travel.

Parts of 2^p tokens stand in the tree of positions like tokens: all of an earlier part reaches all queries of part r at
one level, p + bit_length(r xor earlier). So a device runs its part from position 0, where levels are the same, and
reads what came before from one state for each level of parts, made of the (M, S) that all hand round (see `sharded`):

    o_t = (own part) + sum over j of w_t[p + j] (M_t^T q_t)^T X_j
    X_j = sum over the parts m that part r sees at j of M_(r-1) .. M_(m+1) S_m
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from efla_jax.ops.arguments import Recurrence
from efla_jax.ops.chunked import product
from efla_jax.ops.fenwick import Fenwick, FenwickState, fenwick_level
from efla_jax.ops.sharded import known, repeat_key_heads, sharded
from efla_jax.sharding import auto_mesh

Flat = Callable[[Recurrence], tuple[jax.Array, jax.Array]]


# Of a Fenwick whose time is split; of whole rows see `fenwick_over_mesh`.
LEGENDS = ("BTGK", "BTGK", "BTHV", "BTH", "BTH", "BHKV", "BT", "BTHL", "BHLKV", "BT", "B", "BT")


def fenwick_over_mesh(run, flat, f: Fenwick) -> tuple[jax.Array, FenwickState]:
    """run(f) -> (outputs, states), on every device with its rows and heads, and with its part of the time where
    `fits` says so, else with whole rows of fewer heads; flat(x): the operator with one state."""
    time, slots = f.level_weights.shape[1], f.level_weights.shape[3]
    used = slots if f.states is not None else min(slots, time.bit_length() + 1)  # T tokens reach no level beyond

    mesh = auto_mesh()
    splits = mesh is not None and fits(f, mesh.shape["context"])
    letters = {} if splits else {"T": "S", "G": "X", "H": "Y"}
    legends = tuple("".join(letters.get(letter, letter) for letter in legend) for legend in LEGENDS)
    q, k = repeat_key_heads(f.x.u.shape[2], f.x.q, f.x.k, whole_rows=not splits)

    def local(context, *arrays):
        f = Fenwick(Recurrence(*arrays[:7]), *arrays[7:])
        return run(f) if context is None else over_parts(run, flat, f, context)

    f = f._replace(x=f.x._replace(q=q, k=k), level_weights=f.level_weights[..., :used])
    o, states = sharded(local, (*f.x, *f[1:]), legends, (legends[2], legends[8]))
    states = jnp.pad(states, ((0, 0), (0, 0), (0, slots - used), (0, 0), (0, 0)))
    return o, FenwickState(states, f.position[:, -1] + 1 if f.position.shape[1] else f.start)


def fits(f: Fenwick, parts: int) -> bool:
    """Whether the rows can be cut in so many parts: whole documents from 0 on, and parts of a power of two."""
    time, rest = divmod(f.level_weights.shape[1], parts)
    return parts > 1 and f.states is None and f.real is None and rest == 0 and time > 0 and time & (time - 1) == 0


def over_parts(run: Callable, flat: Flat, f: Fenwick, context: str) -> tuple[jax.Array, jax.Array]:
    """A part's outputs and the states [B, H, L, K, V] behind the last part, from run(part of f), an implementation, and
    flat(x), the operator with one state."""
    x, (batch, time, heads, slots) = f.x, f.level_weights.shape
    count, own, bits = lax.axis_size(context), lax.axis_index(context), time.bit_length() - 1
    position = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32), (batch, time))
    inside = f.level_weights[..., : min(slots, bits + 2)]  # a part's own levels, and its end's
    o, states = run(f._replace(level_weights=inside, position=position))
    reader, transition = (through, product_with) if x.erase is not None else (faded, scaled_by)
    moved, read = reader(x, flat)
    gathered = jax.tree.map(
        lambda a: lax.all_gather(a[None], context, tiled=True), (moved, jnp.sum(states, axis=2))
    )  # tiled, as in `handed_over`
    before = joined(transition, gathered, own, (count - 1).bit_length())
    total = o.astype(jnp.float32)
    for j in range(before.shape[0]):
        weight = f.level_weights[..., min(bits + 1 + j, slots - 1)]
        total += weight[..., None] * read(before[j])
    last = joined(transition, gathered, jnp.int32(count), count.bit_length())
    final = jnp.zeros((batch, heads, slots, *last.shape[3:]), jnp.float32)
    for j in range(last.shape[0]):
        final = final.at[:, :, min(bits + 1 + j, slots - 1)].add(last[j])
    return total.astype(o.dtype), final


def joined(transition: Callable, gathered: tuple, own: jax.Array, levels: int) -> jax.Array:
    """[J, B, H, K, V]: for each level of parts the state in front of part `own` of the parts that it sees there."""
    moved, states = gathered
    places = jnp.arange(1, levels + 1)

    def step(found, part):
        index, moved, state = part
        here = (fenwick_level(own, index) == places).reshape(-1, *(1,) * state.ndim)
        after = transition(moved, found) + jnp.where(here, state, 0.0)
        return jnp.where(index < own, after, found), None

    begin = jnp.zeros((levels, *states.shape[1:]), jnp.float32)
    return lax.scan(step, begin, (jnp.arange(states.shape[0]), moved, states))[0]


def faded(x: Recurrence, _flat: Flat) -> tuple[jax.Array, Callable]:
    """(M, state -> M_t^T q_t read from it) of linear attention, whose transitions are the decays."""
    reach = jnp.exp(jnp.cumsum(x.log_decay, axis=1))

    def read(state: jax.Array) -> jax.Array:
        group = state.reshape(state.shape[0], x.q.shape[2], -1, *state.shape[2:])
        return reach[..., None] * known(x, "btgk,bgrkv->btgrv", x.q, group).reshape(x.u.shape)

    return reach[:, -1], read


def scaled_by(decay: jax.Array, states: jax.Array) -> jax.Array:
    return decay[..., None, None] * states


def through(x: Recurrence, flat: Flat) -> tuple[jax.Array, Callable]:
    """As `faded`, of a delta rule: M is where the identity goes when nothing is written; its outputs are M_t^T q_t."""
    batch, time, heads, _ = x.u.shape
    key_dim = x.k.shape[3]
    identity = jnp.broadcast_to(jnp.eye(key_dim, dtype=jnp.float32), (batch, heads, key_dim, key_dim))
    nothing = jnp.zeros((batch, time, heads, key_dim), x.u.dtype)
    queries, transition = flat(x._replace(u=nothing, initial_state=identity))
    return transition, lambda state: known(x, "bthk,bhkv->bthv", queries, state)


def product_with(transition: jax.Array, states: jax.Array) -> jax.Array:
    return product("bhij,lbhjv->lbhiv", transition, states)
