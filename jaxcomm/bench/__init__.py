"""Compares the collectives with jax.lax on this machine: ``python -m jaxcomm.bench --help``."""

from jaxcomm.bench.cli import main

__all__ = ["main"]
