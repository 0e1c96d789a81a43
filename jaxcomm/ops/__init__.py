"""One file per public collective. _shared.py has the arguments that all of them share."""
