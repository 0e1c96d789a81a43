"""Mistakes put into the sources on purpose, and whether tests notice."""
