"""``python -m torchrec_ext.train CONFIG.yaml`` is ``torchrec-ext train CONFIG.yaml``."""

import sys

from torchrec_ext.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
