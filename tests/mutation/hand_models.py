"""Mistakes in models/moe, in the launcher, in the benchmark and in the placement of processes."""

from mutation.hand import Mutant

STEP = "tests/models/test_moe_step.py::test_step_equals_that_of_one_device"
RUNS = "tests/models/test_moe_runs.py"
MODEL, TRAIN = "models/moe/model.py", "models/lm/train.py"
DROPLESS, LAYER = "models/moe/dropless.py", "tests/models/test_moe.py::test_layer_matches_dense_reference"
GENERATE = "tests/models/test_moe_generate.py::test_greedy_text_is_that_of_one_device"
RUN, CASES = "jaxcomm/run.py", "jaxcomm/_measure/collectives.py"
BOOTSTRAP, KV_STORE, PLACED = (
    "jaxcomm/_processes/bootstrap.py",
    "jaxcomm/_processes/kv_store.py",
    "jaxcomm/_processes/placement.py",
)
PLACEMENT = "tests/multiprocess/test_placement.py"

MUTANTS = [
    Mutant(
        "the norm counts replicated gradients once per rank", "models/lm/step.py",
        "comm.psum(value, own) if own else value", "comm.psum(value, own or axes)", STEP,
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
        "weight decay of vectors too", "models/lm/step.py", 'path[-1].key != "scale"', 'path[-1].key != ""',
        "tests/models/test_scripts.py::test_optimizer_is_adamw_with_warm_up_and_cosine",
    ),
    Mutant(
        "parameters are not cast", "models/moe/step.py",
        "nnx.merge(graphdef, lm.cast_model(params, config))", "nnx.merge(graphdef, params)",
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
        "load = (expert[:, :1] == jnp.arange(experts))", "load = (expert[:, 1:] == jnp.arange(experts))",
        "tests/models/test_moe.py::test_route_matches_the_loop",
    ),
    Mutant(
        "angles of rotary positions by token of the batch", MODEL,
        "angle = (first + jnp.arange(x.shape[1], dtype=jnp.float32))[:, None, None] * frequency",
        "angle = jnp.arange(1, x.shape[1] + 1, dtype=jnp.float32)[::-1, None, None] * frequency", STEP,
    ),
    Mutant(
        "attention sees what comes later", MODEL, "value, is_causal=True)", "value, is_causal=False)", STEP,
    ),
    Mutant(
        "a block has the expert before its own", DROPLESS, "(jnp.cumsum(sizes) <= i * block)",
        "(jnp.cumsum(sizes) < i * block)", LAYER,
    ),
    Mutant(
        "weight gradients of the last block only", DROPLESS, "dup.at[expert].add(own_up)", "dup.at[expert].set(own_up)",
        LAYER,
    ),
    Mutant(
        "the last block is not computed", DROPLESS, "return jax.lax.fori_loop(0, sizes.sum() // block, apply, rows)",
        "return jax.lax.fori_loop(0, sizes.sum() // block - 1, apply, rows)", LAYER,
    ),
    Mutant(
        "gradients of the results instead of the rows", DROPLESS,
        "dx = jax.lax.dynamic_update_slice_in_dim(dx, own, start, 0)", "pass", LAYER,
    ),
    Mutant(
        "groups of ragged_dot without padding", DROPLESS, "ragged_dot(hidden, down, routing.group_sizes)",
        "ragged_dot(hidden, down, routing.group_counts[::-1])", "tests/models/test_moe.py::test_layer_with_ragged_dot",
    ),
    Mutant(
        "results come back along the wrong axis", MODEL,
        "comm.all_to_all(slots, axes, split_axis=1, concat_axis=0, tiled=True)",
        "comm.all_to_all(slots, axes[::-1], split_axis=1, concat_axis=0, tiled=True)",
        "tests/models/test_moe.py::test_layer_matches_dense_reference",
    ),
    Mutant(
        "the newest position is not seen", MODEL, "<= place\n", "< place\n", GENERATE,
    ),
    Mutant(
        "keys have the position in the cache", MODEL, "set(rotate(key, place)[:, 0])", "set(rotate(key, row)[:, 0])",
        GENERATE,
    ),
    Mutant(
        "all layers share the first cache", MODEL, "pairs.append(cache)", "pairs.append(pairs[0] if pairs else cache)",
        GENERATE,
    ),
    Mutant(
        "prompts end with the shortest", "models/moe/decode.py", "place + 1 < lengths,", "place + 1 < lengths.min(),",
        GENERATE,
    ),
    Mutant(
        "sequences of all ranks have the same random numbers", "models/moe/decode.py",
        "jax.lax.axis_index(AXES) * len(scores) + jnp.arange", "jnp.arange",
        "tests/models/test_moe_generate.py::test_sampled_text_does_not_depend_on_the_mesh",
    ),
    Mutant(
        "every seed gives the same text", "models/moe/decode.py", "jax.random.key(seed)", "jax.random.key(0)",
        "tests/models/test_moe_generate.py::test_sampled_text_does_not_depend_on_the_mesh",
    ),
    Mutant(
        "a command with the first parameters", "models/moe/generate.py",
        "return state[0], graphdef, specs[0]", "return jax.jit(lambda: init()[0])(), graphdef, specs[0]",
        "tests/models/test_moe_generate.py::test_the_command_continues_a_run_and_prints_the_speed",
    ),
    Mutant(
        "temperature multiplies", "models/moe/decode.py", "scores / config.temperature", "scores * config.temperature",
        f"{RUNS}::test_sample_follows_the_scores_of_the_model",
    ),
    Mutant(
        "every step sees the same batch", TRAIN, "config.seq + 1, config.seed, self.step)",
        "config.seq + 1, config.seed, 0)", f"{RUNS}::test_each_step_uses_other_windows",
    ),
    Mutant(
        "log lines after the checkpoint of an interrupted run are kept", TRAIN, 'if r["step"] <= step]', "]",
        f"{RUNS}::test_interrupted_run_continues_where_it_was_saved",
    ),
    Mutant(
        "a continued run starts with fresh parameters", TRAIN,
        "            self.restore(shardings)\n",
        "            self.restore(shardings)\n"
        "            self.state = (jax.jit(self.program.init, out_shardings=shardings)()[0], self.state[1])\n",
        f"{RUNS}::test_interrupted_run_continues_where_it_was_saved",
    ),
    Mutant(
        "a continued run forgets the optimiser", TRAIN,
        "            self.restore(shardings)\n",
        "            self.restore(shardings)\n"
        "            self.state = (self.state[0], jax.jit(self.program.init, out_shardings=shardings)()[1])\n",
        f"{RUNS}::test_interrupted_run_continues_where_it_was_saved",
    ),
    Mutant(
        "direct sums between nodes", "models/lm/comm.py", 'if algorithm == "direct" and len(ranks) > 1:',
        'if algorithm == "direct" and len(ranks) > 2:', f"{RUNS}::test_direct_sums_need_one_node",
    ),
    Mutant(
        "the last window is never drawn", "models/lm/data.py", "integers(0, len(text) - window + 1, batch)",
        "integers(0, len(text) - window, batch)", f"{RUNS}::test_windows_reach_both_ends_of_the_text",
    ),
    Mutant(
        "training text is held out too", "models/lm/data.py",
        "[name for name in names if name not in held]", "list(names)",
        "tests/models/test_moe_options.py::test_split_is_disjoint_complete_and_stable",
    ),
    Mutant(
        "neighbours are on different nodes", RUN, "str(rank * nodes // processes)", "str(rank % nodes)",
        "tests/test_run.py::test_every_rank_finds_the_others_and_its_node",
    ),
    Mutant(
        "local devices of every rank start at 0", RUN,
        "range(rank * (devices or 1), (rank + 1) * (devices or 1))", "range(0, devices or 1)",
        "tests/test_run.py::test_every_rank_finds_the_others_and_its_node",
    ),
    Mutant(
        "the environment overrules the options", RUN, "defaults | dict(base) | ours", "defaults | ours | dict(base)",
        "tests/test_run.py::test_options_overrule_the_environment_and_that_overrules_defaults",
    ),
    Mutant(
        "signals as negative exit codes", RUN, "return signal.Signals(-code).name, 128 - code",
        "return signal.Signals(-code).name, -code",
        "tests/test_run.py::test_first_failure_ends_all_and_gives_the_exit_code",
    ),
    Mutant(
        "a later failure decides the exit code", RUN, "if code and not status:", "if code:",
        "tests/test_run.py::test_ranks_that_ignore_sigterm_are_killed_after_a_grace_period "
        "tests/test_run.py::test_first_failure_ends_all_and_gives_the_exit_code",
    ),
    Mutant(
        "children of ranks live on", RUN, "            os.killpg(guard.pid, signal.SIGKILL)\n",
        "            guard.kill()\n", "tests/test_run.py::test_children_of_ranks_that_succeed_end_with_the_job",
    ),
    Mutant(
        "an unfinished line stays unfinished", RUN, 'b"" if line.endswith(b"\\n") else b"\\n"', 'b""',
        "tests/test_run.py::test_lines_get_a_prefix_and_keep_their_bytes_and_stream",
    ),
    Mutant(
        "Ctrl-C arrives as SIGTERM", RUN, "signal.SIGTERM if code == signal.SIGPIPE else code", "signal.SIGTERM",
        "tests/test_run.py::test_signals_are_passed_on",
    ),
    Mutant(
        "bytes of the bus as those of the algorithm", CASES,
        "bus_factor=lambda n: 2 * (n - 1) / n,\n            growth",
        "bus_factor=lambda n: (n - 1) / n,\n            growth",
        "tests/test_bench.py::test_sizes_are_those_of_nccl_tests",
    ),
    Mutant(
        "sizes are not rounded to whole blocks", CASES, "max(size_bytes // itemsize // n, 1) * n",
        "max(size_bytes // itemsize, n)", "tests/test_bench.py::test_sizes_are_those_of_nccl_tests",
    ),
    Mutant(
        "wrong elements of the first device only", CASES,
        "        wrong += count_wrong_of_rank(shard.data, expected, rank)",
        "        wrong = wrong or count_wrong_of_rank(shard.data, expected, rank) * (rank == 0)",
        "tests/test_bench.py::test_wrong_data_is_counted",
    ),
    Mutant(
        "a chain's time is not divided", "jaxcomm/_measure/timing.py", "return Times(self.us / chain)", "return self",
        "tests/test_bench.py::test_median_and_p99",
    ),
    Mutant(
        "time of the fastest process", "jaxcomm/_measure/timing.py",
        "Times(np.max([times[name] for times in gathered], axis=0))",
        "Times(np.min([times[name] for times in gathered], axis=0))",
        "tests/test_bench.py::test_times_are_those_of_the_slowest_process",
    ),
    Mutant(
        "the same side always goes first", "jaxcomm/_measure/timing.py", "first = rep % len(contenders)", "first = 0",
        "tests/test_bench.py::test_each_side_goes_first_and_follows_others",
    ),
    Mutant(
        "nodes in the order of their names", PLACED, "return list(by_name.values())",
        "return [by_name[name] for name in sorted(by_name)]",
        f"{PLACEMENT}::test_nodes_come_in_the_order_of_their_first_process",
    ),
    Mutant(
        "ranks of a group in the order of the mesh", PLACED,
        "np.int32)[rows]\n    own", "np.int32)[np.sort(rows)]\n    own", f"{PLACEMENT}::test_placement",
    ),
    Mutant(
        "milliseconds as seconds", KV_STORE,
        "max(math.ceil(limit_s * 1000), 1)",
        "max(math.ceil(limit_s), 1)",
        f"{PLACEMENT}::test_a_process_that_does_not_show_up_is_named",
    ),
    Mutant(
        "versions are not compared", BOOTSTRAP, 'if record["version"] != (ours := _records[own]["version"]):',
        'if (ours := _records[own]["version"]) != _records[own]["version"]:', f"{PLACEMENT}::test_versions_must_agree",
    ),
]  # fmt: skip
