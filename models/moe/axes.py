"""Names of the mesh axes."""

AXES = ("node", "gpu")  # outermost first; every device is a data-parallel rank and holds experts
