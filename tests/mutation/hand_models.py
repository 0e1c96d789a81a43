"""Mistakes in models/moe, in the launcher, in the benchmark and in the placement of processes."""

from mutation.hand import Mutant

STEP = "tests/models/test_moe_step.py::test_step_is_that_of_one_device"
RUNS = "tests/models/test_moe_runs.py"
MODEL, TRAIN = "models/moe/model.py", "models/moe/train.py"

MUTANTS = [
    Mutant(
        "the norm counts replicated gradients once per rank", "models/moe/step.py",
        "return jnp.sqrt(shared + comm.psum(sum(square for square, spec in pairs if spec != P()), AXES))",
        "return jnp.sqrt(comm.psum(shared + sum(square for square, spec in pairs if spec != P()), AXES))", STEP,
    ),
    Mutant(
        "evaluation with the capacity of training", "models/moe/step.py",
        "loss(params, tokens, config.eval_capacity)", "loss(params, tokens, config.capacity)",
        "tests/models/test_moe_step.py::test_evaluation_has_its_own_capacity",
    ),
    Mutant(
        "gradients are scaled up to the norm", "models/moe/step.py",
        "x * jnp.minimum(1, config.clip / norm)", "x * (config.clip / norm)", STEP,
    ),
    Mutant(
        "the balancing loss is only reported", "models/moe/step.py",
        "total = nll + config.balance * stats.balance", "total = nll", STEP,
    ),
    Mutant(
        "weight decay of vectors too", "models/moe/step.py", "x.ndim > 1, params", "x.ndim > 0, params",
        "tests/models/test_moe_step.py::test_optimizer_is_adamw_with_warm_up_and_cosine",
    ),
    Mutant(
        "the schedule starts at step 0, where the rate is 0", "models/moe/step.py",
        "lambda count: rate(count + 1)", "lambda count: rate(count)",
        "tests/models/test_moe_step.py::test_optimizer_is_adamw_with_warm_up_and_cosine",
    ),
    Mutant(
        "parameters are not cast", "models/moe/step.py",
        "params = jax.tree.map(lambda x: x.astype(config.dtype), params)", "params = jax.tree.map(lambda x: x, params)",
        "tests/models/test_moe_step.py::test_tokens_travel_in_the_type_of_the_activations",
    ),
    Mutant(
        "weights of the choices are not scaled to sum to 1", MODEL,
        "    weight /= weight.sum(-1, keepdims=True)\n", "",
        "tests/models/test_moe.py::test_first_choices_come_before_second_ones",
    ),
    Mutant(
        "places are given token by token, not first choices first", MODEL,
        "order = expert.T.reshape(-1)", "order = expert.reshape(-1)",
        "tests/models/test_moe.py::test_route_matches_the_loop",
    ),
    Mutant(
        "the load counts second choices", MODEL,
        "load = onehot[:num_tokens].mean(0, dtype=jnp.float32)", "load = onehot.mean(0, dtype=jnp.float32)",
        "tests/models/test_moe.py::test_route_matches_the_loop",
    ),
    Mutant(
        "angles of rotary positions by token of the batch", MODEL,
        "angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequency",
        "angle = jnp.arange(1, x.shape[1] + 1, dtype=jnp.float32)[::-1, None, None] * frequency", STEP,
    ),
    Mutant(
        "attention sees what comes later", MODEL, "value, is_causal=True)", "value, is_causal=False)", STEP,
    ),
    Mutant(
        "results come back along the wrong axis", MODEL,
        "comm.all_to_all(slots, AXES, split_axis=1, concat_axis=0, tiled=True)",
        "comm.all_to_all(slots, AXES[::-1], split_axis=1, concat_axis=0, tiled=True)",
        "tests/models/test_moe.py::test_layer_matches_dense_reference",
    ),
    Mutant(
        "temperature multiplies", MODEL, "scores / config.temperature", "scores * config.temperature",
        f"{RUNS}::test_sample_follows_the_scores_of_the_model",
    ),
    Mutant(
        "every step sees the same batch", TRAIN, "config.seq + 1, config.seed, self.step)",
        "config.seq + 1, config.seed, 0)", f"{RUNS}::test_each_step_learns_from_other_windows",
    ),
    Mutant(
        "what an interrupted run logged after its checkpoint stays", TRAIN, 'if r["step"] <= step]', "]",
        f"{RUNS}::test_interrupted_run_continues_where_it_was_saved",
    ),
    Mutant(
        "a continued run starts with fresh parameters", TRAIN,
        "            self.restore(jax.eval_shape(init), shardings)\n",
        "            self.restore(jax.eval_shape(init), shardings)\n"
        "            self.state = (jax.jit(init, out_shardings=shardings)()[0], self.state[1])\n",
        f"{RUNS}::test_interrupted_run_continues_where_it_was_saved",
    ),
    Mutant(
        "a continued run forgets the optimiser", TRAIN,
        "            self.restore(jax.eval_shape(init), shardings)\n",
        "            self.restore(jax.eval_shape(init), shardings)\n"
        "            self.state = (self.state[0], jax.jit(init, out_shardings=shardings)()[1])\n",
        f"{RUNS}::test_interrupted_run_continues_where_it_was_saved",
    ),
    Mutant(
        "direct sums between nodes", TRAIN, 'if algorithm == "direct" and len(ranks) > 1:',
        'if algorithm == "direct" and len(ranks) > 2:', f"{RUNS}::test_direct_sums_need_one_node",
    ),
    Mutant(
        "the last window is never drawn", "models/moe/data.py", "integers(0, len(text) - window + 1, batch)",
        "integers(0, len(text) - window, batch)", f"{RUNS}::test_windows_reach_both_ends_of_the_text",
    ),
    Mutant(
        "training text is held out too", "models/moe/data.py",
        "[name for name in names if name not in held]", "list(names)",
        "tests/models/test_moe_options.py::test_split_is_disjoint_complete_and_stable",
    ),
]  # fmt: skip
