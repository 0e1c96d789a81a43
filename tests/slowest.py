"""Prints the slowest tests of JUnit files: slowest.py FILE... (pytest's and CTest's)."""

import sys
import xml.etree.ElementTree as ElementTree

COUNT = 20


def main(paths):
    cases = [case for path in paths for case in ElementTree.parse(path).getroot().iter("testcase")]
    cases.sort(key=lambda case: -float(case.get("time", 0)))
    total_s = sum(float(case.get("time", 0)) for case in cases)
    print(f"\nThe slowest {COUNT} of {len(cases)} tests, which took {total_s:.0f} s:")
    for case in cases[:COUNT]:
        name, where = case.get("name"), case.get("classname")
        print(f"{float(case.get('time', 0)):8.1f} s  {name if where == name else f'{where}::{name}'}")


if __name__ == "__main__":
    main(sys.argv[1:])
