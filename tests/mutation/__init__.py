"""Mutation testing: puts mistakes into the sources and checks that tests fail."""
