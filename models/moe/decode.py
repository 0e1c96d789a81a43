"""Generation of text with a cache of keys and values, expert parallel, as one jitted function."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..lm import distributed
from ..lm import model as lm
from .config import AXES


def make_decode(config, mesh, program, comm):
    """decode(params, text, lengths, key) -> text, with the bytes from ``lengths`` on replaced by generated ones.

    Sequences are sharded over the ranks, as in training. Each step appends a byte to every sequence. Bytes of a prompt
    take such a step too, so prompts may have different lengths.

    Args of the returned function:
      params: partitioned as those of ``program``, the Program of training.
      text: (batch, length) int32; each sequence starts with its prompt.
      lengths: (batch,) int32, bytes of each prompt, at least 1.
      key: of jax.random. With ``--temperature 0``, the likeliest byte is taken.
    """

    def pick(scores, key, place):
        if config.temperature == 0:
            return jnp.argmax(scores, -1).astype(jnp.int32)
        # The number of a sequence in the whole batch, so that the text does not depend on the mesh.
        numbers = jax.lax.axis_index(AXES) * len(scores) + jnp.arange(len(scores))
        keys = jax.vmap(lambda number: jax.random.fold_in(jax.random.fold_in(key, number), place))(numbers)
        return jax.vmap(jax.random.categorical)(keys, scores / config.temperature).astype(jnp.int32)

    def decode(params, text, lengths, key):
        model = nnx.merge(program.graphdef, lm.cast_model(params, config))

        def append(place, carry):
            text, caches = carry
            scores, caches = model.append(text[:, place], place, caches, comm)
            byte = jnp.where(place + 1 < lengths, text[:, place + 1], pick(scores, key, place))
            return text.at[:, place + 1].set(byte), caches

        caches = model.caches(len(text), config.seq)
        caches = jax.tree.map(lambda x: jax.lax.pcast(x, AXES, to="varying"), caches)
        return jax.lax.fori_loop(0, text.shape[1] - 1, append, (text, caches))[0]

    inputs = (program.specs[0], P(AXES), P(AXES), P())
    return jax.jit(jax.shard_map(decode, mesh=mesh, in_specs=inputs, out_specs=P(AXES)))


def generate(decode, params, prompts, count, mesh, seed):
    """Continues each prompt by ``count`` bytes or more: all texts get the length of the longest.

    All processes must call it. The batch is filled up to a multiple of the number of ranks.

    Args:
      decode: of make_decode().
      params: partitioned parameters.
      prompts: list of bytes.

    Returns:
      A list of bytes, the same in all processes.
    """
    filled = [*prompts, *prompts[:1] * (-len(prompts) % mesh.size)]
    lengths = np.array([len(prompt) for prompt in filled], np.int32)
    text = np.zeros((len(filled), lengths.max() + count), np.int32)
    for row, prompt in zip(text, filled, strict=True):
        row[: len(prompt)] = np.frombuffer(prompt, np.uint8)
    text, lengths = (distributed.put(x, NamedSharding(mesh, P(AXES))) for x in (text, lengths))
    key = distributed.put(np.asarray(jax.random.key_data(jax.random.key(seed))), NamedSharding(mesh, P()))
    text = multihost_utils.process_allgather(decode(params, text, lengths, jax.random.wrap_key_data(key)), tiled=True)
    return [bytes(row.astype(np.uint8)) for row in np.asarray(text)[: len(prompts)]]
