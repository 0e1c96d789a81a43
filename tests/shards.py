"""The parts of the full size of tests, for --shard i/n. Each run of continuous integration runs one part."""

import zlib


def part(test, machine_code, parts):
    """The part, from 1 to `parts`, that runs a test.

    Tests of the machine code of all generations of GPUs are in part 1, so that only this part builds it (Makefile). The
    build takes as long as most of the tests of a part: part 1 gets an eighth of the tests that another part gets.
    """
    slot = zlib.crc32(test.encode()) % (8 * parts - 7)
    return 1 if machine_code or slot == 0 else 2 + (slot - 1) // 8
