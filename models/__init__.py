"""Example models. Each folder is self-contained, so that it can be forked."""
