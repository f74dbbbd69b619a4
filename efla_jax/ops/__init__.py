"""Pure functions: recurrences, their coefficients, convolution, attention. No parameters, modules or configuration."""

from efla_jax.ops.attention import softmax_attention as softmax_attention
from efla_jax.ops.block_sparse_attention import block_sparse_attention as block_sparse_attention
from efla_jax.ops.conv import causal_conv as causal_conv
from efla_jax.ops.delta_flow import delta_flow as delta_flow
from efla_jax.ops.delta_rule import delta_rule as delta_rule
from efla_jax.ops.exact_flow import exact_flow as exact_flow
from efla_jax.ops.exact_flow import gated_exact_flow as gated_exact_flow
from efla_jax.ops.exact_flow import phi as phi
from efla_jax.ops.fenwick import FenwickState as FenwickState
from efla_jax.ops.fenwick import fenwick_level as fenwick_level
from efla_jax.ops.fenwick import init_fenwick_state as init_fenwick_state
from efla_jax.ops.kv_cache import KVCache as KVCache
from efla_jax.ops.kv_cache import init_kv_cache as init_kv_cache
from efla_jax.ops.linear_attention import linear_attention as linear_attention
from efla_jax.ops.log_linear import log_linear_attention as log_linear_attention
from efla_jax.ops.log_linear import log_linear_delta_rule as log_linear_delta_rule
from efla_jax.ops.normalize import l2_normalize as l2_normalize
from efla_jax.ops.rope import apply_rope as apply_rope
from efla_jax.ops.routed_delta_rule import chunk_start_delta_rule as chunk_start_delta_rule
from efla_jax.ops.routed_delta_rule import routed_delta_rule as routed_delta_rule
from efla_jax.ops.routed_recurrent import RoutedState as RoutedState
from efla_jax.ops.routed_recurrent import init_routed_state as init_routed_state
from efla_jax.ops.selected_pages import SelectedKV as SelectedKV
from efla_jax.ops.selected_pages import grow_selected_kv as grow_selected_kv
from efla_jax.ops.selected_pages import init_selected_kv as init_selected_kv
