"""Times of NCCL and RCCL, from statistics of published measurements."""
