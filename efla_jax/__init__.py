"""efla_jax: exact-flow and Fenwick-hierarchical linear attention in JAX and Flax Linen."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what __getattr__ loads, for type checkers and editors
    from efla_jax import generate as generate
    from efla_jax import layers as layers
    from efla_jax import ops as ops
    from efla_jax.model import AutoEncoder as AutoEncoder
    from efla_jax.model import LanguageModel as LanguageModel
    from efla_jax.model import SequenceClassifier as SequenceClassifier

__version__ = "0.1.0"

ROOMS = ("ops", "layers", "model", "generate")
NAMES = dict.fromkeys(("AutoEncoder", "LanguageModel", "SequenceClassifier"), "model")


def __getattr__(name: str) -> Any:
    """Rooms and models on first use: importing the package alone loads neither jax nor flax."""
    if name in ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in NAMES:
        return getattr(importlib.import_module(f"{__name__}.{NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *ROOMS, *NAMES})
