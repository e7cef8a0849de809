"""Converts between PyTorch's distributed checkpoints (DCP) and ours.

    python -m tesserae.convert from-dcp DCP FOLDER [--step N]    makes FOLDER/step-N
    python -m tesserae.convert to-dcp CHECKPOINT DCP             CHECKPOINT: one, or a folder of them (its newest)

For Hugging Face's files: tesserae convert.
"""

from __future__ import annotations

import argparse
import sys

import tesserae


def _main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tesserae.convert", description="Convert between checkpoints of PyTorch's DCP and ours."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    taken = verbs.add_parser("from-dcp", help="make a checkpoint of ours (DCP's files are pickles: trust them)")
    taken.add_argument("dcp", help="the directory with .metadata")
    taken.add_argument("folder", help="the folder of checkpoints in which step-N is made")
    taken.add_argument("--step", type=int, default=0)
    given = verbs.add_parser("to-dcp", help="make a checkpoint of DCP")
    given.add_argument("checkpoint", help="a checkpoint, or a folder of them: the newest")
    given.add_argument("dcp", help="the directory that is made")
    options = parser.parse_args(arguments)
    try:
        if options.verb == "from-dcp":
            print(tesserae.checkpoint.from_dcp(options.dcp, options.folder, step=options.step))
        else:
            tesserae.checkpoint.to_dcp(options.checkpoint, options.dcp)
    except tesserae.Error as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
