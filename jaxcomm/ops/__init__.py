"""One file per public collective."""
