"""What the engine is measured against: DGL's own ways to train the same model."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
# The peers run on the virtual hosts of the tests.
sys.path.append(str(BENCHMARKS.parent))
