"""Mistakes in the scripts of parallel training."""

from mutation.hand import Mutant

GRADIENTS = "tests/models/test_scripts.py::test_gradients_equal_those_of_one_device"
TRAINING = "tests/models/test_scripts.py::test_training_follows_that_of_one_device"
OPTIMIZER = "tests/models/test_scripts.py::test_optimizer_is_adamw_with_warm_up_and_cosine"
RUNS = "tests/models/test_scripts.py::test_interrupted_run_continues_where_it_was_saved"
BITS = "tests/models/test_zero.py::test_stages_1_and_2_equal_data_parallelism_in_every_bit"
BESIDE = "tests/models/test_zero.py::test_transfers_of_a_layer_run_beside_another_layer"
OPTIONS = "tests/models/test_scripts.py::test_bad_options_are_named"
IN_FLOAT32 = "tests/models/test_pp.py::test_gradients_of_microbatches_are_added_in_float32"
COMM, CP, RING = "models/lm/comm.py", "models/cp/parallel.py", "models/cp/ring.py"
ATTENTION = "tests/models/test_cp.py::test_attention_equals_that_of_one_device"
PP, MESH = "models/pp/parallel.py", "models/mesh/parallel.py"
F1B = "models/pp/one_forward_one_backward.py"
MESH_COLLECTIVES = "tests/models/test_mesh.py::test_collectives_of_a_step"
BFLOAT16 = "tests/models/test_bfloat16.py"
STEP, TP, ZERO = "models/lm/step.py", "models/tp/parallel.py", "models/zero/parallel.py"


def gradients(script):
    """The tests of the gradients of one script."""
    return f"{GRADIENTS} -k {script}"


MUTANTS = [
    Mutant(
        "gradients of replicated parameters are not summed over the tensor axis", STEP,
        "missing = [missing_axes(spec, axes) for spec in jax.tree.leaves(specs)]",
        "missing = [missing_axes(spec, axes)[:1] for spec in jax.tree.leaves(specs)]", GRADIENTS,
    ),
    Mutant(
        "the norm counts the part of one rank", STEP,
        "comm.psum(value, own) if own else value", "value + 0 * comm.psum(value, own) if own else value", TRAINING,
    ),
    Mutant(
        "the loss is divided by all ranks", TP, '.mean() / config.ranks("data")', ".mean() / config.ranks()", GRADIENTS,
    ),
    Mutant(
        "rows of the vocabulary are shifted by one", TP,
        "    rows = table.shape[0]\n    place = tokens - jax.lax.axis_index(AXIS) * rows",
        "    rows = table.shape[0]\n    place = tokens - jax.lax.axis_index(AXIS) * rows + 1",
        "tests/models/test_tp.py::test_rows_are_looked_up_where_they_are",
    ),
    Mutant(
        "every rank looks up its first row for bytes of others", TP,
        "found = jnp.where(mine[:, :, None], table[jnp.where(mine, place, 0)], 0)",
        "found = table[jnp.where(mine, place, 0)]",
        "tests/models/test_tp.py::test_rows_are_looked_up_where_they_are",
    ),
    Mutant(
        "the largest score is that of the rank", TP,
        "comm.pmax(jax.lax.stop_gradient(scores.max(-1)), AXIS)", "jax.lax.stop_gradient(scores.max(-1))",
        "tests/models/test_tp.py::test_cross_entropy_without_a_gather",
    ),
    Mutant(
        "the target's score is counted on every rank", TP,
        "jnp.where(mine, chosen, 0)])", "chosen])", "tests/models/test_tp.py::test_cross_entropy_without_a_gather",
    ),
    Mutant(
        "weight decay of norm weights", ZERO,
        "return (position >= vectors) & (position < total)", "return position < total", TRAINING,
    ),
    Mutant(
        "every rank decays by the places of the first", ZERO,
        "first = jax.lax.axis_index(AXES) * size if in_parts else 0", "first = 0", TRAINING,
    ),
    Mutant(
        "the backward pass gathers a layer again in place of the one before", ZERO,
        "(inputs[1:], parts[:-2])", "(inputs[1:], parts[1:-1])", gradients("zero"),
    ),
    Mutant(
        "gradients of layers are in the order of the backward pass", ZERO,
        "jnp.concatenate(sums[::-1])", "jnp.concatenate(sums)", gradients("zero"),
    ),
    Mutant(
        "stage 3 gathers and sums synchronously", ZERO,
        "x = prefetched(layer, comm, config.dtype)(x, vectors[\"blocks\"])",
        "x, _ = jax.lax.scan(jax.checkpoint(lambda x, v: (layer(x, use(v)), None)), x, vectors[\"blocks\"])",
        "tests/models/test_zero.py::test_collectives_of_a_step",
    ),
    Mutant(
        "the next layer is gathered after a layer", ZERO,
        "following = start_gather(part, after=x)\n            y = layer(x, vector)",
        "y = layer(x, vector)\n            following = start_gather(part, after=y)", BESIDE,
    ),
    Mutant(
        "gradients are summed after a layer", ZERO,
        "start_gather(part, after=ct), start_sum(later, after=ct)\n            ct, grad = derivative(x, vector, ct)",
        "start_gather(part, after=ct), 0\n            ct, grad = derivative(x, vector, ct)\n"
        "            summed = start_sum(later, after=ct)", BESIDE,
    ),
    Mutant(
        "the ring waits for each transfer", COMM,
        "ppermute_start=jaxcomm.ppermute_start", "ppermute_start=lambda *x, **y: Ended(jaxcomm.ppermute(*x, **y))",
        "tests/models/test_cp.py::test_collectives_of_a_step",
    ),
    Mutant(
        "stage 2 gives each rank the sum of the whole group", ZERO,
        "lambda _, ct: (sum_to_part(ct, comm), None),", "lambda _, ct: (sum_to_part(ct, comm) * 2, None),", BITS,
    ),
    Mutant(
        "positions see the next one of other ranks", RING,
        "return own[:, None] >= positions[source][None, :]",
        "return own[:, None] + 1 >= positions[source][None, :]", ATTENTION,
    ),
    Mutant(
        "blocks of earlier and later ranks change places", RING,
        "jax.lax.cond(source < jax.lax.axis_index", "jax.lax.cond(source > jax.lax.axis_index", ATTENTION,
    ),
    Mutant(
        "gradients of keys stop one rank before their own", RING,
        "d_key, d_value = travelling.done()", "d_key, d_value = d_pair", ATTENTION,
    ),
    Mutant(
        "a merge ignores the weight of the first part", RING,
        "return scaled(output, lse) + scaled(part, part_lse), total", "return output + scaled(part, part_lse), total",
        ATTENTION,
    ),
    Mutant(
        "rotary positions as if the sequence were local", CP,
        "query, key = lm.rotate(query, own), lm.rotate(key, own)",
        "query, key = (lm.rotate(x, jnp.arange(len(own))) for x in (query, key))", ATTENTION,
    ),
    Mutant(
        "the loss predicts the byte itself", CP, "tokens[:, own + 1]", "tokens[:, own]", gradients("cp"),
    ),
    Mutant(
        "chunks of a rank are neighbours", CP, "np.concatenate([chunks[rank], chunks[-1 - rank]])",
        "np.concatenate([chunks[2 * rank], chunks[2 * rank + 1]])",
        "tests/models/test_cp.py::test_ranks_have_equal_work",
    ),
    Mutant(
        "a microbatch waits one place too far", PP,
        "place = (time - num_stages) % count", "place = (time - num_stages + 1) % count", gradients("pp"),
    ),
    Mutant(
        "the loss of every round counts", PP,
        "last = valid & (stage == num_stages - 1) & (number == rounds - 1)", "last = valid & (stage == num_stages - 1)",
        gradients("pp"),
    ),
    Mutant(
        "items before the first count", PP,
        "valid = (item >= 0) & (item < rounds * count)", "valid = item < rounds * count",
        "tests/models/test_pp.py -k loss",
    ),
    Mutant(
        "every round uses the first layers", PP,
        "dynamic_index_in_dim(w, number, keepdims=False)", "dynamic_index_in_dim(w, 0 * number, keepdims=False)",
        gradients("pp"),
    ),
    Mutant(
        "a pipeline of one stage sends to itself", PP, "if num_stages > 1:", "if True:", MESH_COLLECTIVES,
    ),
    Mutant(
        "the first stage embeds in every round", PP,
        "first = valid & (stage == 0) & (number == 0)", "first = valid & (stage == 0)", gradients("pp"),
    ),
    Mutant(
        "a pipeline adds gradients in the type of the activations", PP,
        "    params = lm.at_least_float32(params, config)\n", "    params = lm.cast(params, config)\n", IN_FLOAT32,
    ),
    Mutant(
        "a mesh adds gradients in the type of the activations", MESH,
        "    params = lm.at_least_float32(params, config)\n", "    params = lm.cast(params, config)\n",
        f"{IN_FLOAT32} --size full",
    ),
    Mutant(
        "the embedding adds gradients in the type of the activations", "models/lm/model.py",
        "    return table.astype(jnp.promote_types(dtype, jnp.float32))[tokens].astype(dtype)",
        "    return table.astype(dtype)[tokens]", f"{BFLOAT16} -k equal_tokens",
    ),
    Mutant(
        "a part of the vocabulary adds gradients in the type of the activations", TP,
        "table = table.astype(jnp.promote_types(dtype, jnp.float32))", "table = table.astype(dtype)",
        f"{BFLOAT16} -k equal_tokens",
    ),
    Mutant(
        "the embedding is cast with the other parameters", "models/lm/model.py",
        '"embed": at_least_float32(params["embed"], config)}', '"embed": cast(params["embed"], config)}',
        f"{BFLOAT16} -k lookup_of_a_model",
    ),
    Mutant(
        "the gradient of a gathered vector is rounded before the sum over ranks", ZERO,
        "return complete.astype(jnp.promote_types(dtype, jnp.float32))", "return complete",
        f"{BFLOAT16} -k gathered_vectors",
    ),
    Mutant(
        "parts of gradients are summed in the type of the parameters", ZERO,
        "return comm.psum_scatter(x.astype(precise), axes,", "return comm.psum_scatter(x, axes,",
        f"{BFLOAT16} -k sums_of_bfloat16",
    ),
    Mutant(
        "an input is replaced before its backward pass", F1B, "kept = 2 * (num_stages - 1) + 1",
        "kept = 2 * (num_stages - 1)", gradients("pp"),
    ),
    Mutant(
        "1F1B keeps the inputs of all microbatches", F1B, "kept = 2 * (num_stages - 1) + 1", "kept = count",
        "tests/models/test_pp.py::test_1f1b_keeps_inputs_by_stages_not_by_microbatches --size full",
    ),
    Mutant(
        "backward passes are one tick late", F1B, "item = time - 2 * (num_stages - 1) + stage",
        "item = time - 2 * (num_stages - 1) + stage - 1", gradients("pp"),
    ),
    Mutant(
        "experts are on other ranks than their tokens go to", MESH, "return P(*outer, EXPERTS) if",
        "return P(*outer, EXPERTS[::-1]) if", gradients("mesh"),
    ),
    Mutant(
        "the loss of a mesh is divided by the ranks of tensor too", MESH,
        '"loss": config.ranks(*STATE),', '"loss": config.ranks(*EXPERTS),', gradients("mesh"),
    ),
    Mutant(
        "the balancing loss of a mesh is only reported", MESH,
        '"balance": config.balance}', '"balance": 0.0}', gradients("mesh"),
    ),
    Mutant(
        "attention of a mesh sees its own positions only", MESH, "block.attention_norm(x), comm, attend)",
        "block.attention_norm(x), comm)", gradients("mesh"),
    ),
    Mutant(
        "parts of matrices change places", MESH, "jnp.split(flat[path], self.tensor, dim)[rank]",
        "jnp.split(flat[path], self.tensor, dim)[-1 - rank]",
        "tests/models/test_mesh.py::test_parameters_are_packed_by_ranks_of_tensor",
    ),
    Mutant(
        "only data divides the state", MESH, 'P(*outer, tp.AXIS, STATE)', 'P(*outer, tp.AXIS, "data")',
        "tests/models/test_mesh.py::test_each_rank_holds_its_share_of_the_state",
    ),
    Mutant(
        "the schedule starts at step 0, where the rate is 0", STEP,
        "return lambda count: rate(count + 1)", "return lambda count: rate(count)", OPTIMIZER,
    ),
    Mutant(
        "the scales of norms decay", STEP, 'path[-1].key != "scale"', "len(path) > 0", OPTIMIZER,
    ),
    Mutant(
        "options without effect are accepted", "models/lm/config.py", "        config.check_effect(given)\n", "",
        OPTIONS,
    ),
    Mutant(
        "defaults without effect are refused", "models/lm/config.py",
        "if given.get(name, getattr(type(self), name)) != getattr(type(self), name):", "if name in given:",
        "tests/models/test_scripts.py -k accepted",
    ),
    Mutant(
        "runs with a removed option do not continue", "models/lm/config.py",
        " if name not in config_type.removed}", "}", "tests/models/test_scripts.py -k removed_option",
    ),
    Mutant(
        "sums of one rank have an algorithm", "models/lm/config.py", "if self.ranks() == 1 else {}",
        "if self.ranks() == 0 else {}", OPTIONS,
    ),
    Mutant(
        "options of one rank have an effect", "models/lm/config.py", "if self.ranks(axis) == 1 else {}",
        "if self.ranks(axis) == 0 else {}", OPTIONS,
    ),
    Mutant(
        "a run with an option that lost its effect does not continue", "models/lm/config.py",
        "        config.check_effect(given)\n", "        config.check_effect(dataclasses.asdict(config))\n",
        "tests/models/test_scripts.py::test_options_of_an_earlier_run_may_lose_their_effect",
    ),
    Mutant(
        "a continued run starts with fresh parameters", "models/lm/train.py",
        "            self.restore(shardings)\n",
        "            self.restore(shardings)\n"
        "            self.state = jax.jit(self.program.init, out_shardings=shardings)()\n", RUNS,
    ),
]  # fmt: skip
