"""Clusters: levels of links, faults, arrivals, and the files of the package."""
