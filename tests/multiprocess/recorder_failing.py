"""Programs of failing.py that hang without an error, for the analysis of the flight recorder."""

import os
import sys

import jax
from attempts import VICTIM, program, say

import jaxcomm

LATE = int(os.environ["JAX_PROCESS_ID"]) == VICTIM


def psum(x):
    return jaxcomm.psum(x, "i")


def crossed_groups():
    """Two processes wait for each other in two groups."""
    programs = [program(psum, devices=[d for d in jax.devices() if d.id % 2 == number]) for number in range(2)]
    for run in programs:
        run()
    say("acts")
    for run in reversed(programs) if LATE else programs:
        run()


def one_iteration_less():
    run = program(psum)
    for _ in range(5 - LATE):
        run()
    say("acts")
    if LATE:
        the_next_part_of_the_program()
    run()


def the_next_part_of_the_program():
    sys.stdin.readline()


SCENARIOS = {f.__name__: f for f in (crossed_groups, one_iteration_less)}
