"""A plugin of pytest that writes the switches that each test reaches to the file JAXCOMM_MUTANT_TESTS, as JSON."""

import json
import mmap
import os
import time

import pytest


class Recorder:
    def __init__(self, path, output):
        self.output = output
        with open(path, "r+b") as file:
            self.bytes = mmap.mmap(file.fileno(), 0)
        self.tests = []
        self.outside = set()
        self.shared = {}  # {name of a fixture that tests share: switches that its setup reaches}

    def take(self):
        """Returns the switches reached since the last call."""
        reached = {i for i, byte in enumerate(self.bytes[:]) if byte}
        self.bytes[:] = bytes(len(self.bytes))
        return reached

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope == "function":
            return (yield)
        self.own |= self.take()
        result = yield
        self.shared.setdefault(fixturedef.argname, set()).update(self.take())
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.outside |= self.take()
        self.own = set()
        began = time.monotonic()
        result = yield
        reached = self.own.union(self.take(), *(self.shared.get(name, ()) for name in item.fixturenames))
        self.tests.append((item.nodeid, time.monotonic() - began, sorted(reached)))
        return result

    def pytest_sessionfinish(self):
        self.outside |= self.take()
        with open(self.output, "w") as file:
            json.dump({"outside": sorted(self.outside), "tests": self.tests}, file)


def pytest_configure(config):
    if "JAXCOMM_MUTANT_TESTS" in os.environ:
        config.pluginmanager.register(
            Recorder(os.environ["JAXCOMM_MUTANT_COVERAGE"], os.environ.pop("JAXCOMM_MUTANT_TESTS"))
        )
