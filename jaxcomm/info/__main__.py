"""``python -m jaxcomm.info``."""

import argparse

from jaxcomm.info import info

parser = argparse.ArgumentParser(prog="python -m jaxcomm.info", description="What jaxcomm finds on this machine.")
parser.add_argument(
    "--communicator", action="store_true", help="ask an NCCL communicator over the GPUs too; takes seconds"
)
print(info(**vars(parser.parse_args())))
