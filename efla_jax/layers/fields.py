"""The fields of a module, checked when it is built; a ValueError names field, rule and nearest match."""

import dataclasses
import difflib
import numbers
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from efla_jax.shapes import check_shapes

DTYPES = ("float32", "bfloat16", "float16")
MODULE_FIELDS = ("name", "parent")  # every Linen module has them; they are no options


def nearest(name: object, known: Iterable[str]) -> str:
    """' Did you mean ...?' for a name close to a known one, else nothing."""
    matches = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def check_choice(field: str, value: object, choices: Iterable[str]) -> None:
    """Raise ValueError unless value is one of choices."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{field}: {value!r} is not one of {choices}.{nearest(value, choices)}")


def check_least(field: str, value: int, least: int) -> None:
    """Raise ValueError unless value is a whole number of at least `least`."""
    if not isinstance(value, numbers.Integral):
        raise ValueError(f"{field}: {value!r} is not a whole number; write one that is at least {least}.")
    if value < least:
        raise ValueError(f"{field}: {value} is less than {least}.")


def check_dtype(dtype: DTypeLike) -> None:
    """Raise ValueError unless the field dtype is, or names, one of DTYPES."""
    try:
        dtype = jnp.dtype(dtype).name
    except TypeError:  # no dtype of any kind: check_choice says so
        pass
    check_choice("dtype", dtype, DTYPES)


def check_width(x: jax.Array, width: int) -> None:
    """Raise ValueError unless x is [B, T, width]."""
    sizes = check_shapes({"x": (x, "BTD")})
    if sizes["D"] != width:
        raise ValueError(
            f"x: shape {x.shape} has {sizes['D']} channels, but the mixer has width={width}. Give it [B, T, {width}],"
            f" or build it with width={sizes['D']}."
        )


def check_options(owner: str, module: type, options: Mapping) -> None:
    """Raise ValueError unless every key of options is a field of the module class."""
    known = [field.name for field in dataclasses.fields(module) if field.init and field.name not in MODULE_FIELDS]
    for name in options:
        if name not in known:
            raise ValueError(
                f"{owner}: {name!r} is not an option of {module.__name__}.{nearest(name, known)}"
                f" Its options: {', '.join(known)}."
            )


def head_width(width: int, num_heads: int, head_dim: int | None) -> int:
    """head_dim, or (inner) width / num_heads without it. Raises ValueError unless that is a positive whole number."""
    for field, value in (("width", width), ("num_heads", num_heads), ("head_dim", head_dim)):
        if value is not None and not isinstance(value, numbers.Integral):
            raise ValueError(f"{field}: {value!r} is not a whole number; write one that is at least 1.")
    if num_heads < 1:
        raise ValueError(f"num_heads: {num_heads} heads, but at least one is needed.")
    if head_dim is None and width % num_heads:
        raise ValueError(f"width: {width} is not divisible by num_heads={num_heads}. Change one or set head_dim.")
    if head_dim is not None and head_dim < 1:
        raise ValueError(f"head_dim: {head_dim} is not positive.")
    if width < 1:
        raise ValueError(f"width: {width} is less than 1.")
    return width // num_heads if head_dim is None else head_dim
