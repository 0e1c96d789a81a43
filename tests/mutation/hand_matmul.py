"""Mistakes in collective matmul (jaxcomm/matmul)."""

from mutation.hand import Mutant

LOOPS, RULES, API = (f"jaxcomm/matmul/{name}.py" for name in ("loops", "primitives", "api"))
VALUES, DERIVED = "tests/matmul/test_values.py", "tests/matmul/test_transformations.py"
BITS = f"{VALUES}::test_blocks_have_the_bits_of_one_device"
COUNTS = f"{DERIVED}::test_collectives_of_programs"
SHIFTS = f"{DERIVED}::test_direct_sends_to_all_ranks_and_ring_to_one"
ROUNDED = f"{VALUES}::test_sums_of_bfloat16"

MUTANTS = [
    Mutant(
        "block placed as if it came from the next rank",
        LOOPS,
        "        owner = (me + (n - shift)) % n",
        "        owner = (me + shift) % n",
        f"{VALUES}::test_products",
    ),
    Mutant(
        "ring forwards the last block too",
        LOOPS,
        "if step + 1 < n else None",
        "if step < n else None",
        COUNTS,
    ),
    Mutant(
        "direct passes blocks on",
        LOOPS,
        '    if spec.call.algorithm == "direct":\n        yield',
        "    if False:\n        yield",
        SHIFTS,
    ),
    Mutant(
        "chunks of a block in reverse order",
        LOOPS,
        "start = owner * block + c * chunk",
        "start = owner * block + (spec.chunks - 1 - c) * chunk",
        f"{VALUES}::test_products",
    ),
    Mutant(
        "every chunk of a scatter is the first",
        LOOPS,
        "start = rank * block + c * chunk",
        "start = rank * block",
        f"{VALUES}::test_products",
    ),
    Mutant(
        "parts of direct in the order of arrival",
        LOOPS,
        "(me + (n - rank)) % n, 0",
        "rank, 0",
        BITS,
    ),
    Mutant(
        "sums of direct in the element type",
        LOOPS,
        "total = by_rank[0].astype(wide(dtype))",
        "total = by_rank[0]",
        ROUNDED,
    ),
    Mutant(
        "sums over a ring in the element type",
        LOOPS,
        "wide(dtypes[num_weights + i])",
        "dtypes[num_weights + i]",
        ROUNDED,
    ),
    Mutant(
        "a scatter accumulates in the element type",
        LOOPS,
        "    accumulator = wide(dtype)",
        "    accumulator = dtype",
        ROUNDED,
    ),
    Mutant(
        "ranks of groups numbered as those of the axis",
        LOOPS,
        "    if call.groups is None:\n        return index",
        "    if True:\n        return index",
        f"{VALUES}::test_groups",
    ),
    Mutant(
        "transfers ignore groups",
        LOOPS,
        "groups = call.groups or (",
        "groups = (",
        f"{VALUES}::test_groups",
    ),
    Mutant(
        "no precision",
        LOOPS,
        "precision=spec.precision, preferred",
        "precision=None, preferred",
        f"{VALUES}::test_precision_reaches_every_product",
    ),
    Mutant(
        "default precision read when lowering",
        API,
        "        precision = settings.jax_default_matmul_precision",
        "        precision = None",
        f"{VALUES}::test_precision_reaches_every_product",
    ),
    Mutant(
        "xla runs jaxcomm's collectives",
        LOOPS,
        'algorithm="xla" if self.call.algorithm == "xla" else None',
        "algorithm=None",
        COUNTS,
    ),
    Mutant(
        "saved rows gathered again",
        RULES,
        "    elif moving:",
        "    if moving:",
        COUNTS,
    ),
    Mutant(
        "cotangent of saved rows dropped",
        RULES,
        "        if keep and not _is_zero(kept):",
        "        if False:",
        f"{DERIVED}::test_derivatives_of_saved_rows",
    ),
    Mutant(
        "derivative for weights without cotangent",
        RULES,
        "    found = [i for i, ct in enumerate(products) if not _is_zero(ct)]",
        "    found = list(range(len(products)))",
        f"{DERIVED}::test_gradients_of_several_weights",
    ),
    Mutant(
        "gradient of a gather in the type of the cotangent",
        RULES,
        "spec=spec, dtype=x.aval.dtype)",
        "spec=spec, dtype=jax.typeof(xs[0]).dtype)",
        f"{DERIVED}::test_element_types_of_gradients",
    ),
    Mutant(
        "products of a transpose not reordered",
        RULES,
        "key=lambda i: i < num_weights)",
        "key=lambda i: 0)",
        f"{DERIVED}::test_higher_and_forward_derivatives",
    ),
    Mutant(
        "gradient of the weights of a scatter not transposed",
        RULES,
        "results[i] = grad if i < half else _transposed(grad)",
        "results[i] = grad",
        f"{DERIVED}::test_gradients_are_those_of_one_device",
    ),
    Mutant(
        "batched weights send x once per weight",
        RULES,
        "    if dx is None:  # x is sent once",
        "    if False:  # x is sent once",
        SHIFTS,
    ),
    Mutant(
        "rows of a batch without their dimension",
        RULES,
        "x, dx, at, size), *ys, spec=spec.with_row_dimension()",
        "x, dx, at, size), *ys, spec=spec",
        f"{DERIVED}::test_vmap",
    ),
    Mutant(
        "chunks not compared with the block",
        API,
        "number < 1 or block % number",
        "number < 1",
        "tests/matmul/test_bad_input.py",
    ),
    Mutant(
        "operands typed as varying over the axes of the call only",
        API,
        "frozenset(call.axes).union(*(_compat.varying_axes(a) for a in (x, *weights)))",
        "frozenset(call.axes)",
        f"{DERIVED}::test_weights_shared_over_another_axis",
    ),
    Mutant(
        "choice ignores chunks",
        "jaxcomm/matmul/choice.py",
        "rows = math.prod(x[:-1]) // chunks",
        "rows = math.prod(x[:-1])",
        "tests/matmul/test_choice.py",
    ),
    Mutant(
        "ring inside a node",
        "jaxcomm/matmul/choice.py",
        'return "direct" if one_node else "ring"',
        'return "ring"',
        "tests/matmul/test_choice.py",
    ),
]
