"""Example models, each in a folder made to be forked."""
