"""Programs of failing.py that hang without an error, for the analysis of the flight recorder."""

import os
import sys
import time

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


def never_joined():
    """The last process does not know the call."""
    program(psum)()
    say("acts")
    if LATE:
        time.sleep(1000)
    program(lambda x: jaxcomm.pmax(x, "i"))()


def raises_before_the_call():
    run = program(psum)
    run()
    say("acts")
    if LATE:
        raise KeyError("secret")
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


SCENARIOS = {f.__name__: f for f in (crossed_groups, never_joined, raises_before_the_call, one_iteration_less)}
