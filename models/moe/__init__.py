"""Byte-level transformer with mixture-of-experts layers; start with README.md."""
