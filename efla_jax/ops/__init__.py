"""Pure functions: recurrences, their coefficients, convolution, attention. No parameters, no modules, no configuration."""

from efla_jax.ops.delta_rule import delta_rule as delta_rule
from efla_jax.ops.exact_flow import exact_flow as exact_flow
from efla_jax.ops.exact_flow import gated_exact_flow as gated_exact_flow
from efla_jax.ops.exact_flow import phi as phi
from efla_jax.ops.linear_attention import linear_attention as linear_attention
from efla_jax.ops.normalize import l2_normalize as l2_normalize
