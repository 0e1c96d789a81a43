"""``python -m jaxcomm.info``."""

import argparse

from jaxcomm.info import info

parser = argparse.ArgumentParser(
    prog="python -m jaxcomm.info", description="Prints what jaxcomm finds on this machine."
)
parser.add_argument(
    "--communicator", action="store_true", help="query an NCCL communicator over the GPUs too; takes seconds"
)
print(info(**vars(parser.parse_args())))
