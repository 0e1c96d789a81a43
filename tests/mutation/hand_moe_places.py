"""Mistakes in the places of choices (jaxcomm/moe/places.py, ffi/plan/routing.cc) and in rows between processes."""

from mutation.hand import Mutant

PLACING, CHECK = "jaxcomm/moe/places.py", "ffi/plan/routing.cc"
LISTS, NODE = "ffi/cpu/row_lists.cc", "ffi/transport/node.cc"
SUMS = "ffi/cpu/token_sums.cc"
PLACES = "tests/moe/test_routing.py::test_"

MUTANTS = [
    Mutant(
        "choices of one expert keep no order",
        PLACING,
        "keys * size + jnp.arange(size, dtype=keys.dtype)",
        "keys * size + jnp.arange(size, dtype=keys.dtype)[::-1]",
        f"{PLACES}places",
    ),
    Mutant(
        "places in the order of tokens",
        PLACING,
        "order = ids.T.reshape(-1)",
        "order = ids.reshape(-1)",
        f"{PLACES}places",
    ),
    Mutant(
        "rows of later ranks come first",
        PLACING,
        "dtype=jnp.int32)[:, None] < me, table, 0)",
        "dtype=jnp.int32)[:, None] > me, table, 0)",
        f"{PLACES}places",
    ),
    Mutant(
        "groups start without alignment",
        PLACING,
        "    sizes = aligned(groups, call.align).reshape(-1, local)",
        "    sizes = groups.reshape(-1, local)",
        f"{PLACES}alignment_and_slots",
    ),
    Mutant(
        "the rank that reads for its process moves its own rows only",
        LISTS,
        "    if (buffers_[rank].local) ranks.push_back(rank);",
        "    if (rank == reader) ranks.push_back(rank);",
        "test_row_lists",
    ),
    Mutant(
        "the source reads for the ranks of other nodes of its process",
        LISTS,
        "const bool is_among = NodeOf(from) == node && buffers_[from].local;",
        "const bool is_among = buffers_[from].local;",
        "test_row_lists",
    ),
    Mutant(
        "a row of another process is written once",
        LISTS,
        "write(begin[done] + 1, done,",
        "write(begin[done + 1], done,",
        "test_row_lists",
    ),
    Mutant(
        "the last row of another process is written once",
        LISTS,
        "for (; done <= row; ++done)",
        "for (; done < row; ++done)",
        "test_row_lists",
    ),
    Mutant(
        "numbers of rows of another process are trusted",
        LISTS,
        "if (row >= 0 && row < tokens_.num_rows) visit(",
        "visit(",
        "test_row_lists",
    ),
    Mutant(
        "rows of another process that cannot be read are passed over",
        LISTS,
        "if (!MoveRows(from, ranks)) return buffers_[from].input_pid;",
        "MoveRows(from, ranks);",
        "test_row_lists",
    ),
    Mutant(
        "rows of another process are read at the end only",
        SUMS,
        "if (num_foreign_ > 0 && num_foreign_ + tokens_.choices <= max_foreign_) return",
        "if (num_foreign_ > 0) return",
        "test_row_lists",
    ),
    Mutant(
        "rows of another process are read once there are too many",
        SUMS,
        "num_foreign_ + tokens_.choices <= max_foreign_",
        "num_foreign_ <= max_foreign_",
        "test_row_lists",
    ),
    Mutant(
        "long rows of a token have less room than there are choices",
        SUMS,
        "std::max(tokens_.choices, most)",
        "std::max(most, int64_t{1})",
        "test_row_lists",
    ),
    Mutant(
        "ranges of another process with a gap are one",
        NODE,
        "ranges[*count - 1].iov_len == data)",
        "ranges[*count - 1].iov_len <= data)",
        "test_node test_row_lists",
    ),
    Mutant(
        "streamed zeros end at a cache line",
        "ffi/cpu/copy.cc",
        "    std::memset(dst + body_end, 0, static_cast<size_t>(bytes - body_end));\n",
        "",
        "test_pages",
    ),
    Mutant(
        "custom calls: choices beyond the kept ones have rows",
        CHECK,
        " && next[expert] < end[expert]",
        "",
        "test_plan",
    ),
    Mutant(
        "custom calls: the demand is that of the kept choices",
        CHECK,
        "Places(layout, wanted).demand(own)",
        "Places(layout, wanted == nullptr ? wanted : kept).demand(own)",
        "test_plan",
    ),
    Mutant(
        "custom calls: choices without an expert are dropped",
        CHECK,
        "fields.slot[i] < 0 && expert >= 0 &&",
        "fields.slot[i] < 0 &&",
        "test_plan",
    ),
    Mutant(
        "custom calls: ranks receive what they send",
        CHECK,
        "table[e / local * num_experts + r * local + e % local]",
        "table[r * num_experts + e / local * local + e % local]",
        "test_plan",
    ),
    Mutant(
        "custom calls: rows are numbered by choice",
        CHECK,
        "static_cast<int32_t>(i / choices_per_row)",
        "static_cast<int32_t>(i * choices_per_row / choices_per_row)",
        "test_plan",
    ),
]
