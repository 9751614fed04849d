"""`raygnn train` for `ray job submit`:

ray job submit --address http://127.0.0.1:8265 --runtime-env jobs/runtime-env.yaml \
    --working-dir . -- python jobs/train.py jobs/cora.yaml

Arguments and exit codes are those of `raygnn train`. Before it starts,
it checks that the run is not written into the copy of the working directory, which Ray deletes.
"""

import sys

from raygnn.cli import submitted

if __name__ == "__main__":
    sys.exit(submitted(sys.argv[1:]))
