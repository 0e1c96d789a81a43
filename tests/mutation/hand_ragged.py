"""Mistakes in ragged exchanges (jaxcomm/ops/ragged_all_to_all.py, ffi/plan/slices.cc, lists in ffi/cpu)."""

from mutation.hand import Mutant

OP, SLICES, EXECUTOR = "jaxcomm/ops/ragged_all_to_all.py", "ffi/plan/slices.cc", "ffi/cpu/executor.cc"
T = "tests/ops/test_ragged_all_to_all.py::test_"

MUTANTS = [
    Mutant(
        "an offset that a sum overflows is accepted",
        SLICES,
        "size <= num_rows && offset <= num_rows - size",
        "offset + size <= num_rows",
        "test_plan",
    ),
    Mutant(
        "slices that touch count as overlapping",
        SLICES,
        "<= b.slice.output_offset) continue",
        "< b.slice.output_offset) continue",
        "test_plan",
    ),
    Mutant(
        "slices are not sorted before they are compared",
        SLICES,
        "if (!std::is_sorted(",
        "if (std::is_sorted(",
        "test_plan",
    ),
    Mutant("offsets of empty slices are checked", SLICES, "if (slice.size == 0) return OkStatus();", "", "test_plan"),
    Mutant(
        "slices that are contiguous at the sender only are joined",
        EXECUTOR,
        "(next.input_offset != slice.input_offset + slice.size ||",
        "(next.input_offset != slice.input_offset + slice.size &&",
        "test_lists",
    ),
    Mutant(
        "an empty slice ends the list",
        EXECUTOR,
        "if (slice.size == 0) continue;",
        "if (slice.size == 0) break;",
        "test_lists",
    ),
    Mutant(
        "the reversed exchange goes to the rows of the own table",
        OP,
        "return jnp.stack([received[:, 2], table[:, 3], received[:, 0], table[:, 1]], axis=1)",
        "return jnp.stack([table[:, 2], table[:, 3], table[:, 0], table[:, 1]], axis=1)",
        f"{T}derivatives_are_those_of_indexing",
    ),
    Mutant(
        "rows that go to several ranks get the cotangent of one",
        OP,
        "lax.cond(_overlaps(table), slice_by_slice, at_once, ct)",
        "at_once(ct)",
        f"{T}derivatives_are_those_of_indexing {T}one_row_sent_to_all_ranks",
    ),
    Mutant(
        "an empty slice hides an overlap",
        OP,
        "starts = jnp.where(sizes > 0, starts, jnp.iinfo(table.dtype).max)  # empty slices come last",
        "starts = starts + 0",
        f"{T}overlap_behind_an_empty_slice",
    ),
    Mutant(
        "an end is set, not added, in the mask of the output",
        OP,
        "changes.at[starts + sizes].add(-(sizes > 0).astype(table.dtype))",
        "changes.at[starts + sizes].set(-(sizes > 0).astype(table.dtype))",
        f"{T}derivatives_are_those_of_indexing",
    ),
    Mutant(
        "offsets of a batch are not shifted",
        OP,
        "table = jnp.moveaxis(table + shifts, 0, -1)",
        "table = jnp.moveaxis(table + 0 * shifts, 0, -1)",
        f"{T}vmap",
    ),
]
