"""A job of one process that publishes arrays until its standard input ends. Prints its address.

Arguments: name, secret, listen, then the options of publish: version, elements.
"""

import sys

import numpy as np

from jaxcomm import transfer

name, secret, listen, version, elements = sys.argv[1:]
with transfer.Endpoint(name, secret=secret, listen=listen, shared_memory=False) as endpoint:
    tree = {"w": np.full(int(elements), int(version), np.float32)}
    transfer.publish(endpoint, "weights", tree, int(version))
    print(endpoint.address, flush=True)
    sys.stdin.read()
