#!/usr/bin/env bash
# Makes a node ready: an environment with the versions of constraints.txt and the raygnn beside this
# file, once.
#
#     [TORCH_ARGS="--index-url …"] bash setup.sh PYTHON
#
# PYTHON is a command such as python3.11, the same on every node. Where raygnn and the versions it needs
# are on PATH already, nothing is done.
set -euo pipefail
python=$1
here=$(cd "$(dirname "$0")" && pwd)
environment=$HOME/raygnn-env

if python - "$here/constraints.txt" <<'EOF_PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

lines = Path(sys.argv[1]).read_text().split("\n")
try:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = {canonicalize_name(n): v for n, _, v in (line.partition("==") for line in lines) if v}
    needs = [Requirement(text) for text in requires("raygnn")]
    names = [canonicalize_name(need.name) for need in needs if need.marker is None]
    have = {name: version(name) for name in names}
except (ImportError, PackageNotFoundError):
    sys.exit(1)
sys.exit(any(pins.get(name, found) != found.split("+")[0] for name, found in have.items()))
EOF_PYTHON
then
    echo "raygnn and the versions it needs are here"
    exit 0
fi

"$python" -m venv "$environment"
torch=$(grep '^torch==' "$here/constraints.txt")
# shellcheck disable=SC2086  # several arguments
"$environment/bin/pip" install --quiet ${TORCH_ARGS:-} "$torch"
# editable: what a later `ray up` carries here is what runs
"$environment/bin/pip" install --quiet -c "$here/constraints.txt" -e "$here"
line='export PATH="$HOME/raygnn-env/bin:$PATH"'
grep -qxF "$line" "$HOME/.bashrc" 2>/dev/null || echo "$line" >>"$HOME/.bashrc"
