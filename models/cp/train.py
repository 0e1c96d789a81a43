"""Trains with context parallelism: ``python -m models.cp.train --attention ring``, in one process or several."""

from ..lm import train
from .parallel import Config, build

if __name__ == "__main__":
    train.run_command(Config, build)
