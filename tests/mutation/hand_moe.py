"""Mistakes in mixtures of experts (jaxcomm/moe, ffi/plan/routing.cc, ffi/cpu)."""

from mutation.hand import Mutant

ROUTING, EXCHANGE = "jaxcomm/moe/routing.py", "jaxcomm/moe/exchange.py"
EXECUTOR, COMBINE, CHECK = "ffi/cpu/executor.cc", "ffi/cpu/combine_rows.cc", "ffi/plan/routing.cc"
QUANTIZED, EIGHT = "jaxcomm/moe/quantized.py", "tests/moe/test_quantized.py::test_"
PLACES = "tests/moe/test_routing.py::test_"
ROWS = "tests/moe/test_payload.py::test_"

MUTANTS = [
    Mutant(
        "scales stay at home",
        QUANTIZED,
        "    values, scales = dispatch(payload, routing, algorithm=algorithm, max_sms=max_sms)",
        "    values, scales = dispatch(payload[0], routing), jnp.ones((routing.capacity, payload[1].shape[1]))",
        f"{EIGHT}scales_travel_with_their_rows",
    ),
    Mutant(
        "powers of two are rounded down",
        QUANTIZED,
        "jnp.int32) + 0x7FFFFF) >> 23",
        "jnp.int32) >> 23)",
        f"{EIGHT}values_and_scales",
    ),
    Mutant(
        "infinite elements set the scale",
        QUANTIZED,
        "jnp.where(jnp.isfinite(size), size, np.float32(0))",
        "jnp.where(jnp.isnan(size), np.float32(0), size)",
        f"{EIGHT}zero_infinite_and_tiny_elements",
    ),
    Mutant(
        "the gradient is that of the rounded rows",
        QUANTIZED,
        "    return rows, dispatch(tangents[0], routing, algorithm=algorithm, max_sms=max_sms)",
        "    return rows, _dispatch(tangents[0], routing, dtype, block, scale, algorithm, max_sms)",
        f"{EIGHT}derivatives_are_those_of_dispatch",
    ),
    Mutant(
        "the last block has the scale of the first",
        QUANTIZED,
        "jnp.repeat(scales, block, -1)[..., : x.shape[-1]]",
        "jnp.tile(scales, block)[..., : x.shape[-1]]",
        f"{EIGHT}values_and_scales",
    ),
    Mutant(
        "tiny scales become zero",
        QUANTIZED,
        "jnp.maximum(amax * (1 / largest), SMALLEST)",
        "amax * (1 / largest)",
        f"{EIGHT}zero_infinite_and_tiny_elements",
    ),
    Mutant(
        "places in the order of tokens",
        ROUTING,
        "    order = known.T.reshape(-1)  # first choices of all tokens before second ones",
        "    order = known.reshape(-1)",
        f"{PLACES}places",
    ),
    Mutant(
        "rows of later ranks come first",
        ROUTING,
        "dtype=jnp.int32)[:, None] < me, kept, 0)",
        "dtype=jnp.int32)[:, None] > me, kept, 0)",
        f"{PLACES}places",
    ),
    Mutant(
        "groups start without alignment",
        ROUTING,
        "    sizes = _aligned(groups, align).reshape(-1, local)",
        "    sizes = groups.reshape(-1, local)",
        f"{PLACES}alignment_and_slots",
    ),
    Mutant(
        "the quota is one too small",
        ROUTING,
        "    kept = jnp.minimum(cells, quota[None, :, None])",
        "    kept = jnp.minimum(cells, jnp.maximum(quota - 1, 0)[None, :, None])",
        f"{PLACES}drop",
    ),
    Mutant(
        "a capacity of one row less is enough",
        CHECK,
        "demand <= layout.capacity) continue",
        "demand <= layout.capacity + 1) continue",
        "test_plan",
    ),
    Mutant("the last rank may overflow", CHECK, "r < n && bounded", "r + 1 < n && bounded", "test_plan"),
    Mutant(
        "rows behind the last group keep what they had",
        EXECUTOR,
        "  filled.emplace_back(program_->output.block_count / program_->row_count, 0);\n",
        "",
        f"{ROWS}values",
    ),
    Mutant(
        "choices without a row shift the weights",
        EXECUTOR,
        "std::memcpy(&weights[num * width]",
        "std::memcpy(&weights[k * width]",
        f"{ROWS}values {ROWS}dropped_choices_are_zero",
    ),
    Mutant(
        "sums of nodes are not rounded",
        COMBINE,
        "Codec::Decode(Codec::Encode(part[i]))",
        "part[i]",
        "test_combine_rows",
    ),
    Mutant(
        "the weights of a node begin at those of the first",
        COMBINE,
        "weights != nullptr ? weights + from : nullptr",
        "weights",
        "test_combine_rows",
    ),
    Mutant(
        "the gradient of the rows is not weighted",
        EXCHANGE,
        "results[0] = (sent.astype(adds) * own.astype(adds)).astype(sent.dtype)",
        "results[0] = sent",
        f"{ROWS}combine_is_the_transpose_of_dispatch",
    ),
    Mutant(
        "leaves of different types share their bytes' order only",
        EXCHANGE,
        "        at += size\n",
        "        at += x.shape[1]\n",
        f"{ROWS}pytrees_per_choice_and_sizes",
    ),
]
