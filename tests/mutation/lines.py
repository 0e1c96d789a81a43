"""Marks the lines of Python that run: a byte each in the file JAXCOMM_MUTANT_COVERAGE.

JAXCOMM_MUTANT_LINES holds {path of a source: number of its line 0} as JSON. Processes that tests start mark theirs too.
"""

import json
import mmap
import os
import sys
import threading


def start():
    first = json.loads(os.environ["JAXCOMM_MUTANT_LINES"])
    with open(os.environ["JAXCOMM_MUTANT_COVERAGE"], "r+b") as file:
        marks = mmap.mmap(file.fileno(), 0)

    def trace(frame, event, argument):
        number = first.get(frame.f_code.co_filename)
        if number is None:
            return None

        def line(frame, event, argument):
            marks[number + frame.f_lineno] = 1
            return line

        return line(frame, event, argument)

    sys.settrace(trace)
    threading.settrace(trace)
