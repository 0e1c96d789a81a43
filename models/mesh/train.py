"""Trains with all kinds of parallelism: ``python -m models.mesh.train``, in one process or several."""

import jax
from jax.sharding import NamedSharding

from ..lm import train
from .parallel import Config, build, move


class Run(train.Run):
    """A run that may evaluate in another layout of its devices."""

    def __init__(self, config, build=build, resume=False):
        super().__init__(config, build, resume)
        if config.eval_layout:
            self.eval_mesh = train.make_mesh(config.evaluation())
            self.eval_program = build(config.evaluation(), self.eval_mesh, self.comm)

    def evaluation(self):
        if not self.config.eval_layout:
            return super().evaluation()
        specs, _ = self.eval_program.specs
        shardings = jax.tree.map(lambda spec: NamedSharding(self.eval_mesh, spec), specs)
        return self.eval_program, self.eval_mesh, move(self.state[0], shardings, self.comm)


if __name__ == "__main__":
    train.run_command(Config, build, Run)
