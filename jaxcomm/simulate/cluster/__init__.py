"""Clusters: levels of links, faults, and the files of the package."""
