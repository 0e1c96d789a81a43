"""jaxcomm's module for NVIDIA GPUs. jaxcomm loads it; there is nothing to import here."""
