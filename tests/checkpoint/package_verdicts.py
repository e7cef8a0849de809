"""What the Python package `safetensors` says of files: reads a list (8 bytes of length, then the file, again and again)
from the path given and prints one line of 1 (taken) or 0 (refused) for each. Exit status 3: the package is missing."""

import struct
import sys

try:
    from safetensors import SafetensorError, deserialize
except ImportError:
    sys.exit(3)


def takes(file: bytes) -> bool:
    try:
        deserialize(file)
        return True
    except SafetensorError:
        return False


def main(path: str) -> None:
    with open(path, "rb") as cases:
        while size := cases.read(8):
            print(int(takes(cases.read(struct.unpack("<Q", size)[0]))))


if __name__ == "__main__":
    main(sys.argv[1])
