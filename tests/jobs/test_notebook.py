"""The notebook in examples/ runs from top to bottom in a real kernel, and shows what it should."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"
LIMIT = 300  # seconds for a cell


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # not the files of the user who runs the test
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    client = NotebookClient(
        notebook,
        timeout=LIMIT,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    if place := os.environ.get("RAYGNN_NOTEBOOK"):  # to be looked at
        nbformat.write(notebook, place)
    outputs = {
        cell["source"].split("\n")[0]: [output.get("data", {}) for output in cell["outputs"]]
        for cell in notebook.cells
        if cell["cell_type"] == "code"
    }
    (card,) = outputs["job = raygnn.launch(config, graph=graph, overwrite=True)"]
    assert "done" in card["text/html"], "the card of the first cell is kept up to date"
    assert "val/accuracy" in card["text/html"]
    assert "<progress value='1.0000'" in card["text/html"]
    assert "\x1b" not in card["text/html"], "no colours of a terminal, which kernels ask for"
    (page,) = outputs["run.report()  # a page with all curves: its path"]
    assert "report.html" in page["text/plain"]
    (table,) = outputs["predictions = run.predict()"]
    assert "probability" in table["text/html"]
    (accuracy,) = outputs['test = predictions[predictions["split"] == "test"]']
    mean, told = _two(accuracy["text/plain"])
    assert mean == pytest.approx(told, abs=1e-3)
    assert mean > 0.5


def _two(text: str) -> tuple[float, float]:
    """Return the two numbers of ``'0.9000 of 7,000 test nodes, 0.9000 in …'``."""
    words = text.strip("'\"").split()
    return float(words[0]), float(words[5])
