"""`raygnn train` for `ray job submit`:

ray job submit --address http://127.0.0.1:8265 --runtime-env jobs/runtime-env.yaml \
    --working-dir . -- python jobs/train.py jobs/cora.yaml

Arguments and exit codes are those of `raygnn train`. It first sees that what was uploaded is small,
and that the run does not land in the copy of the working directory, which Ray throws away.
"""

import sys

from raygnn.cli.train_entry import submitted

if __name__ == "__main__":
    sys.exit(submitted(sys.argv[1:]))
