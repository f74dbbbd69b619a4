"""Which folders ship: `efla_jax` with `efla_jax/kernels`, which has no __init__.py; the rest: pyproject.toml."""
from setuptools import find_namespace_packages, setup

setup(packages=find_namespace_packages(include=["efla_jax*"]))
