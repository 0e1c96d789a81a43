"""Removes results of mutants that no longer exist, and duplicates, from record.csv."""

from . import cxx, hand_run, operators, record, schemata, trees


def existing(rows):
    """The keys of the mutants that exist now, of the folders and files that `rows` name."""
    keys = {hand_run.key(mutant) for mutant in hand_run.mutants()}
    generated = [row for row in rows if row.kind != "hand" and (trees.ROOT / row.file).exists()]
    for folder in sorted({row.folder for row in generated}):
        if folder in cxx.TESTS:
            keys |= {mutant.key for mutant in schemata.Sources(folder).mutants}
        else:
            for name in sorted({row.file for row in generated if row.folder == folder}):
                keys |= {mutant.key for mutant in operators.mutants(trees.ROOT, name)}
    return keys


def prune():
    """Keeps the last row of each mutant that exists. Returns the removed rows."""
    rows = record.read()
    keys = existing(rows)
    kept = {row.key: number for number, row in enumerate(rows) if row.key in keys}
    record.write([rows[number] for number in kept.values()])
    return [row for number, row in enumerate(rows) if kept.get(row.key) != number]
