"""Data parallelism without redundant states (ZeRO); start with README.md."""
