"""Mistakes in mixtures of experts (jaxcomm/moe, ffi/plan/routing.cc, ffi/cpu)."""

from mutation.hand import Mutant

ROUTING, EXCHANGE = "jaxcomm/moe/routing.py", "jaxcomm/moe/exchange.py"
COMBINE, CHECK = "ffi/cpu/combine_rows.cc", "ffi/plan/routing.cc"
LISTS, SUMS, PLAN = "ffi/cpu/row_lists.cc", "ffi/cpu/token_sums.cc", "ffi/plan/combine.cc"
PLACES = "tests/moe/test_routing.py::test_"
ROWS = "tests/moe/test_payload.py::test_"

MUTANTS = [
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
        LISTS,
        "  filled.emplace_back(tokens_.num_slots, 0);\n",
        "",
        "test_row_lists",
    ),
    Mutant(
        "choices without a row shift the weights",
        LISTS,
        "std::memcpy(weights + n * tokens_.weight_bytes",
        "std::memcpy(weights + c * tokens_.weight_bytes",
        "test_row_lists",
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
        "a message has each row once per choice",
        LISTS,
        "    if (number_of[row] < 0) {",
        "    if (entry >= 0) {",
        "test_row_lists",
    ),
    Mutant(
        "forwarded rows are one off",
        LISTS,
        "CopyBytes(OutputRow(to, slot), rows + number * tokens_.row_bytes",
        "CopyBytes(OutputRow(to, slot), rows + (number > 0 ? number - 1 : 0) * tokens_.row_bytes",
        "test_row_lists",
    ),
    Mutant("rows of all ranks are forwarded to one", LISTS, "    if (rank != to) return;\n", "", "test_row_lists"),
    Mutant(
        "a message has rows before the last number ends",
        LISTS,
        "  char* end = message + number_bytes;",
        "  char* end = message + number_bytes - 64;",
        "test_row_lists",
    ),
    Mutant(
        "slices that do not follow each other are one message",
        LISTS,
        "      if (slice.size > 0 && size > 0 && slice.output_offset != first + size) break;\n",
        "",
        "test_row_lists",
    ),
    Mutant(
        "a list has two tokens as one",
        LISTS,
        "    uint32_t is_first = 1;",
        "    uint32_t is_first = t != 1;",
        "test_row_lists",
    ),
    Mutant("the last entry of a list is dropped", LISTS, "i + 1 < entries", "i + 2 < entries", "test_row_lists"),
    Mutant(
        "a list begins at the slots of the node",
        LISTS,
        "    before += slice.size;\n",
        "",
        "test_row_lists",
    ),
    Mutant(
        "the sum of another node is added once per choice",
        LISTS,
        "          next[node] += bytes;\n          break;\n",
        "          next[node] += bytes;\n",
        "test_row_lists",
    ),
    Mutant(
        "rows come home to the places of their slots",
        LISTS,
        "(slice.input_offset + slot - slice.output_offset) * bytes",
        "(slice.input_offset + slot) * bytes",
        "test_row_lists",
    ),
    Mutant(
        "the sum of the own node comes first",
        SUMS,
        "  parts_.assign(rows, rows + begin);\n",
        "  parts_.clear();\n",
        "test_row_lists",
    ),
    Mutant(
        "the own node uses the weights of the first row",
        SUMS,
        "weights + begin * tokens_.weight_bytes",
        "weights",
        "test_row_lists",
    ),
    Mutant(
        "a node waits for no list",
        PLAN,
        "    plan.Wait(rail(d));\n    plan.Move",
        "    plan.Move",
        "test_plan test_row_lists",
    ),
    Mutant(
        "sums are not announced",
        PLAN,
        "area(kReceivedSums, home, node)), b);\n    plan.Signal(rail(d));\n",
        "area(kReceivedSums, home, node)), b);\n",
        "test_plan test_row_lists",
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
