"""Times of NCCL, from statistics of published measurements."""
