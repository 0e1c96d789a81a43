"""Trains with all kinds of parallelism: ``python -m models.mesh.train``, in one process or several."""

from ..lm import train
from .parallel import Config, build

if __name__ == "__main__":
    train.run_command(Config, build)
