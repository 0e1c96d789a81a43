"""Small byte-level language model, its data and its training loop, shared by the scripts of parallel training."""
