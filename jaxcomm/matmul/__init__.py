"""Collective matmul: products that exchange their rows, one block at a time."""

from jaxcomm.matmul.api import all_gather_matmul, matmul_psum_scatter

__all__ = ["all_gather_matmul", "matmul_psum_scatter"]
