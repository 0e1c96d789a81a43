"""Tensor parallelism with sequence parallelism and collective matmul; start with README.md."""
