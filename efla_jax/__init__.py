"""efla_jax: exact-flow and Fenwick-hierarchical linear attention in JAX and Flax Linen."""

__version__ = "0.1.0"
