"""Predictions as files for other programs."""
