"""The contract of route, dispatch and combine, in plain loops of NumPy over all ranks at once."""

import numpy as np

KINDS = ("uniform", "holes", "one expert", "one rank", "silent rank", "duplicates", "none")


def ids_of(kind, rng, n, tokens, choices, experts):
    """(n, T, K) random ids of a kind."""
    ids = rng.integers(0, experts, (n, tokens, choices))
    if kind == "holes":
        ids[rng.random(ids.shape) < 0.3] = rng.integers(-9, 0)
    elif kind == "one expert":
        ids[:] = experts - 1
    elif kind == "one rank":
        ids = ids % (experts // n) + (n - 1) * (experts // n)
    elif kind == "silent rank":
        ids[n // 2] = -1
    elif kind == "duplicates":
        ids[:] = ids[:, :, :1]
    elif kind == "none":
        ids[:] = -1
    return ids.astype(np.int32)


def aligned(count, align):
    return -(-count // align) * align


def counts_of(ids, experts):
    """(n, E), choices of each rank for each expert."""
    return np.stack([np.bincount(own[(own >= 0)].ravel(), minlength=experts)[:experts] for own in ids])


def keep(wanted, capacity, align=1, slots=None):
    """(n, E), the choices that are kept: an equal quota per cell, then one more for the first cells."""
    n, experts = wanted.shape
    local, kept = experts // n, wanted.copy()
    parts = [[e] for e in range(experts)] if slots else [list(range(p * local, (p + 1) * local)) for p in range(n)]
    for part in parts:
        fits = lambda cells: sum(aligned(c, align) for c in cells.sum(0)) <= (slots or capacity)  # noqa: E731
        cells = wanted[:, part]
        quota = max(q for q in range(cells.max(initial=0) + 1) if fits(np.minimum(cells, q)))
        chosen = np.minimum(cells, quota)
        for cell in map(tuple, np.argwhere(cells > chosen)):
            more = chosen.copy()
            more[cell] += 1
            if not fits(more):
                break
            chosen = more
        kept[:, part] = chosen
    return kept


def route(ids, experts, *, capacity=None, align=1, slots=None, drop=False):
    """(n, T, K) ids -> slot, the rows of each expert, C. Slot by slot: rank, then choice, then token."""
    n, tokens, choices = ids.shape
    local = experts // n
    if slots:
        capacity = local * slots
    elif capacity is None:
        capacity = aligned(n * tokens * min(choices, local) + local * (align - 1), align)
    wanted = counts_of(ids, experts)
    kept = keep(wanted, capacity, align, slots) if drop else wanted
    slot = np.full(ids.shape, -1)
    for p in range(n):
        start = 0
        for m in range(local):
            e, row = p * local + m, m * slots if slots else start
            for r in range(n):
                left = kept[r, e]
                for k in range(choices):
                    for t in range(tokens):
                        if ids[r, t, k] == e and left:
                            slot[r, t, k] = row
                            row, left = row + 1, left - 1
            start += aligned(kept[:, e].sum(), align)
    return slot, kept, capacity


def dispatch(x, ids, slot, capacity, experts, per_choice=False):
    """(n, T, ...) -> (n, C, ...)."""
    n = len(ids)
    rows = np.zeros((n, capacity, *x.shape[3 if per_choice else 2 :]), x.dtype)
    for r, t, k in np.argwhere(slot >= 0):
        rows[ids[r, t, k] // (experts // n), slot[r, t, k]] = x[r, t, k] if per_choice else x[r, t]
    return rows


def combine(rows, ids, slot, experts, weights=None, nodes=1):
    """(n, C, ...) -> (n, T, ...). Added in float32 for floats of up to 32 bits, node by node."""
    n, tokens, choices = ids.shape
    wide = np.float32 if rows.dtype.kind in "fV" and rows.dtype.itemsize <= 4 else rows.dtype
    y = np.zeros((n, tokens, *rows.shape[2:]), wide)
    for g in range(nodes):
        part = np.zeros_like(y)
        for k in range(choices):
            for r, t in np.argwhere(slot[:, :, k] >= 0):
                rank = ids[r, t, k] // (experts // n)
                if rank // (n // nodes) == g:
                    row = rows[rank, slot[r, t, k]].astype(wide)
                    part[r, t] += row if weights is None else weights[r, t, k].astype(wide) * row
        y += part.astype(rows.dtype).astype(wide) if nodes > 1 else part
    return y.astype(rows.dtype)
