"""``python -m torchrec_ext.train CONFIG.yaml``."""

import sys

from torchrec_ext.train.command import main

if __name__ == "__main__":
    sys.exit(main())
