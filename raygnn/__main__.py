"""``python -m raygnn`` is ``raygnn``."""

import sys

from raygnn.cli import main

if __name__ == "__main__":
    sys.exit(main())
