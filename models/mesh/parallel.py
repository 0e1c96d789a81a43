"""All kinds of parallelism on one mesh, composed of the pieces of the other scripts.

The mesh axes, outermost first:

- "pipe" divides the layers (models/pp).
- "data" divides the sequences.
- "context" divides the positions of every sequence (models/cp).
- "tensor" divides every matrix, and the positions of a rank between the matrices (models/tp).

Experts (models/moe) are divided among the ranks of STATE and "tensor": each of them has other tokens. Matrices and
their optimiser state are kept in parts over STATE (models/zero): they are gathered once per step, because the pipeline
uses each layer in every tick, and their gradients are summed into parts.

Sizes in the docstrings: b sequences of a microbatch, m positions of a rank of "context", t ranks of "tensor", d width.

Sources: those of the other scripts. One set of ranks for experts and for the other layers: MoE parallel folding, Liu et
al., arXiv 2504.14960.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec as P

from ..cp import parallel as cp
from ..lm import config as lm_config
from ..lm import model as lm
from ..lm import step
from ..lm.config import option
from ..moe.model import MoE
from ..pp import parallel as pp
from ..tp import parallel as tp
from ..zero import parallel as zero

STATE = ("data", cp.AXIS)  # ranks with the same matrices
EXPERTS = (*STATE, tp.AXIS)  # ranks with other tokens


@dataclasses.dataclass(frozen=True)
class Config(pp.PipelineConfig, cp.Config, tp.Config):
    """The options of all parts. Each parent checks the sizes along its own axis."""

    name = "mesh"
    axes = (pp.AXIS, *EXPERTS)
    batch_axes = ("data",)
    # All other options change the balancing loss.
    free_on_resume = (*lm_config.Config.free_on_resume, "attention", "matmul", "eval_layout")
    moe = "dropless"  # of models.moe.model.MoE

    layout: str = option("2x1x2x2", "sizes of the mesh axes pipe x data x context x tensor")
    layers: int = option(4, "transformer blocks")
    eval_layout: str = option("", "layout of evaluations, of as many ranks, with pipe 1 and the same tensor")
    microbatches: int = option(4, "parts of the batch of a group, which are in the pipeline at the same time")
    rounds: int = option(1, "times that a microbatch passes all stages, each time with other layers")
    experts: int = option(4, "experts per layer; 0: the feed-forward layers are not mixtures of experts")
    balance: float = option(0.01, "weight of the load-balancing loss of the experts")

    def __post_init__(self):
        super().__post_init__()
        # In a branch that only some ranks take, XLA on CPUs mixes up the ppermutes of jax.lax, without an error.
        mixed_up = self.comm == "lax" and self.ranks(pp.AXIS) > 1 and self.ranks(cp.AXIS) > 1
        self.check(not mixed_up or self.attention != "ring", "attention", "gather or ulysses with --comm lax")
        self.check_divides((cp.AXIS, tp.AXIS), seq="positions")
        if self.attention == "ulysses":
            self.check_divides((cp.AXIS, tp.AXIS), heads="heads")
        self.check(self.balance >= 0, "balance", "at least 0")
        self.check(self.experts != 1 and self.experts >= 0, "experts", "0, or at least 2: each token chooses two")
        self.check_divides(EXPERTS, experts="experts")

        if self.eval_layout:
            to, tensor = self.evaluation(), self.ranks(tp.AXIS)
            self.check(to.ranks(tp.AXIS) == tensor, "eval_layout", f"tensor {tensor}")
            self.check(to.ranks() == self.ranks(), "eval_layout", f"{self.ranks()} ranks")

    def evaluation(self):
        """The configuration of an evaluation: no pipeline, so a batch is not divided."""
        return dataclasses.replace(self, layout=self.eval_layout, eval_layout="", rounds=1, microbatches=1)

    def without_effect(self):
        return super().without_effect() | ({} if self.experts else {"balance": "--experts 0"})


class Block(lm.Block):
    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        if config.experts:
            self.mlp = MoE(config, rngs)


class Transformer(lm.Transformer):
    block = Block


class Group:
    """Parameters that are packed together: those of a layer, of the embedding, or of the head.

    Matrices that "tensor" divides become one vector for each of its ranks, which STATE divides. It has the same size in
    all layouts of as many ranks. The others keep their form: experts, which EXPERTS divides, and small ones, which are
    equal on all ranks of a stage.
    """

    def __init__(self, config, shapes):
        self.tensor = config.ranks(tp.AXIS)
        self.cut = {
            path: tp.SPECS[path[-1]].index(tp.AXIS)
            for path in flatten_dict(shapes)
            if path[-1] in tp.SPECS and not (config.experts and path[0] == "mlp")
        }
        self.packing = zero.Packing(jax.eval_shape(lambda: self.matrices(zeros_like(shapes), 0)), config.ranks())
        self.rest = unflatten_dict({path: x for path, x in flatten_dict(shapes).items() if path not in self.cut})

    def matrices(self, tree, rank):
        """{path: part of a rank of "tensor"}."""
        flat = flatten_dict(tree)
        return {path: jnp.split(flat[path], self.tensor, dim)[rank] for path, dim in self.cut.items()}

    def pack(self, tree):
        """Parameters -> {"parts": (t, size), "rest"}."""
        vectors = [self.packing.pack(self.matrices(tree, rank)) for rank in range(self.tensor)]
        rest = {path: x for path, x in flatten_dict(tree).items() if path not in self.cut}
        return {"parts": jnp.stack(vectors), "rest": unflatten_dict(rest)}

    def unpack(self, packed):
        """{"parts": (size,) of this rank of "tensor", complete, "rest"} -> parameters."""
        return unflatten_dict({**flatten_dict(packed["rest"]), **self.packing.unpack(packed["parts"])})

    def specs(self, *outer):
        """PartitionSpecs of packed parameters behind dimensions that ``outer`` divides."""

        def of_rest(path, _):
            return P(*outer, EXPERTS) if path[-1].key in ("up", "down") else P(*outer)

        rest = jax.tree_util.tree_map_with_path(of_rest, self.rest)
        return {"parts": P(*outer, tp.AXIS, STATE), "rest": rest}


def zeros_like(shapes):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def groups_of(config):
    _, shapes, _ = lm.structure(config, Transformer)
    return {
        "embed": Group(config, {"embed": shapes["embed"]}),
        "blocks": Group(config, shapes["blocks"][0]),
        "head": Group(config, shapes["head"]),
    }


def arrange(config, params):
    """Parameters of the model -> packed parameters; those of the layers are stacked as in models/pp."""
    groups = groups_of(config)
    packed = {
        "embed": groups["embed"].pack({"embed": params["embed"]}),
        "blocks": {i: groups["blocks"].pack(params["blocks"][i]) for i in range(config.layers)},
        "head": groups["head"].pack(params["head"]),
    }
    return pp.arrange(config, packed)


def move(params, shardings, comm):
    """Parameters of a run -> parameters of its evaluations, which have one stage with all layers."""
    moved = comm.reshard(params, shardings)

    def one_stage(blocks):
        return jax.tree.map(lambda x: x.reshape(1, 1, -1, *x.shape[3:]), blocks)

    return {**moved, "blocks": jax.jit(one_stage, out_shardings=shardings["blocks"])(moved["blocks"])}


def layer(config, block, x, attend, comm):
    """(b, m / t, d) -> (b, m / t, d), and the balancing loss of this rank's tokens, if there are experts."""
    x = x + tp.attention(block.attention, block.attention_norm(x), comm, attend)
    normal = block.mlp_norm(x)
    if not config.experts:
        return x + tp.mlp(block.mlp, normal, comm), {}
    y, stats = block.mlp(normal.reshape(-1, x.shape[-1]), None, comm, EXPERTS)
    return x + y.reshape(x.shape), {"balance": stats.balance}


def loss(config, params, tokens, comm):
    """This rank's share of the loss and of the balancing loss."""
    groups = groups_of(config)
    block, _, _ = lm.structure(config, Block)
    head, _, _ = lm.structure(config, lm.Head)
    positions = cp.positions_of(config.order, config.seq, config.ranks(cp.AXIS))
    own = jnp.asarray(positions)[jax.lax.axis_index(cp.AXIS)]
    attend = lm.attend  # a rank with all positions needs no ring
    if config.ranks(cp.AXIS) > 1:
        attend = functools.partial(cp.attend, config, positions=positions, comm=comm)

    # Matrices of this rank of "pipe" and "tensor", complete. Their gradients are summed into parts, once per step. The
    # transfer is in the type --dtype. The result is float32, so microbatches and ranks add gradients in float32.
    complete = zero.gather(comm, config.dtype, STATE)
    params = {
        name: {"parts": complete(jnp.squeeze(group["parts"], -2)), "rest": group["rest"]}
        for name, group in params.items()
    }
    params = lm.at_least_float32(params, config)

    def unpack(name, packed):
        return groups[name].unpack(lm.cast(packed, config))

    def enter(params, tokens):
        table = groups["embed"].unpack(params["embed"])["embed"]
        return tp.embed(table, tokens[:, own], comm, config.dtype)

    def work(x, params):
        return layer(config, nnx.merge(block, unpack("blocks", params)), x, attend, comm)

    def leave(params, x, tokens):
        model = nnx.merge(head, unpack("head", params["head"]))
        (scores,) = comm.all_gather_matmul(model.norm(x), (model.scores[...],), tp.AXIS, axis=1)
        return tp.cross_entropy(scores, tokens[:, own + 1], comm).mean()

    sums = pp.pipeline(
        config, params, tokens, comm, pp.Stages(enter, work, leave),
        loss_axes=(pp.AXIS, *STATE), metrics=("balance",) if config.experts else (),
    )  # fmt: skip
    shares = {"loss": config.ranks(*STATE), "balance": config.ranks(*EXPERTS) * config.layers}
    return {name: x / (shares[name] * config.microbatches) for name, x in sums.items()}


def build(config, mesh, comm):
    """The training step; see models/lm/step.py."""
    groups, loss_axes = groups_of(config), {"loss": (pp.AXIS, *STATE)}
    if config.experts:
        loss_axes["balance"] = config.axes
    specs = {name: groups[name].specs() for name in ("embed", "head")}
    specs["blocks"] = groups["blocks"].specs(None, pp.AXIS, None)

    return step.build(
        config,
        mesh,
        comm,
        loss,
        specs,
        loss_axes,
        module=Transformer,
        arrange=lambda params: arrange(config, params),
        weights={"loss": 1.0, "balance": config.balance},
    )
