"""DGL through its door: what we rely on works on this torch, and what is missing says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raygnn.errors import CapabilityError
from raygnn.graph import dgl as door

pytestmark = pytest.mark.dgl

DGL = door.dgl() if door.installed() else None


def run(code: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new process without settings of DGL's backend."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("DGL")} | {"HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )


# --- getting in ------------------------------------------------------------------------------


@pytest.mark.long
def test_the_door_leaves_no_trace_and_gives_every_thread_the_same(tmp_path: Path) -> None:
    result = run(
        "from raygnn.graph.dgl import dgl\n"
        "import threading\n"
        "seen = []\n"
        "threads = [threading.Thread(target=lambda: seen.append(dgl())) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "assert len(seen) == 8 and len(set(map(id, seen))) == 1\n"
        "import dgl, dgl.nn, dgl.distributed, dgl.graphbolt as gb\n"
        "assert dgl is seen[0] and dgl.nn.GraphConv\n"
        "assert not isinstance(dgl.rand_graph(3, 3), gb.FusedCSCSamplingGraph)\n",
        tmp_path,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_the_door_works_where_a_plain_import_has_failed(tmp_path: Path) -> None:
    result = run(
        "import sys\ntry:\n    import dgl\n"
        "except Exception: assert 'dgl.backend' in sys.modules\nelse: sys.exit('it was imported')\n"
        "from raygnn.graph.dgl import dgl\n"
        "module = dgl()\n"
        "assert module.nn and module.data and module.rand_graph(3, 3).num_edges() == 3\n"
        "assert isinstance(module.rand_graph(3, 3), sys.modules['dgl.heterograph'].DGLGraph)\n",
        tmp_path,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.long
def test_a_native_graphbolt_that_does_not_load_is_replaced(tmp_path: Path) -> None:
    result = run(
        "from raygnn.graph import dgl as door\ndoor._no_library = lambda root, name: None\n"
        "print(door.dgl().rand_graph(3, 3).num_edges(), door.missing())\n",
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("3 {'graphbolt': ")
    assert "Error: " in result.stdout


def test_another_module_named_dgl_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dgl.py").write_text("")
    result = run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import dgl\n"
        "from raygnn.errors import CapabilityError\n"
        "from raygnn.graph import dgl as door\ntry: door.dgl()\n"
        "except CapabilityError as error: print(error)\n",
        tmp_path,
    )
    assert str(tmp_path / "dgl.py") in result.stdout
    assert "rename" in result.stdout


# --- what is missing ---------------------------------------------------------------------------


def test_using_a_placeholder_is_a_capability_error() -> None:
    for use in (
        lambda: DGL.graphbolt.FusedCSCSamplingGraph(),
        lambda: DGL.graphbolt.FusedCSCSamplingGraph.load,
        lambda: DGL.graphbolt.expand_indptr(torch.arange(3)),
        lambda: DGL.rand_graph(4, 4).adj(),  # imports dgl.sparse
    ):
        with pytest.raises(CapabilityError, match=r"is not available here: .*torch") as error:
            use()
        assert error.value.remedy
    assert not isinstance(3, DGL.graphbolt.SamplingGraph)
    with pytest.raises(AttributeError):
        _ = DGL.graphbolt.__wrapped__  # doctest and inspect ask for such names


# --- what we rely on ---------------------------------------------------------------------------


def test_sampling_and_blocks() -> None:
    graph = DGL.rand_graph(50, 400)
    seeds = torch.arange(10)
    sampled = DGL.sampling.sample_neighbors(graph, seeds, 3)
    block = DGL.to_block(sampled, seeds)
    assert block.num_dst_nodes() == 10
    assert sampled.in_degrees(seeds).max() <= 3
    assert torch.equal(block.srcdata[DGL.NID][:10], seeds)
    src, dst = (torch.tensor([0, 1, 2, 2]), torch.tensor([0, 0, 1, 0]))
    made = DGL.create_block((src, dst), num_src_nodes=3, num_dst_nodes=2)
    made.srcdata["x"] = torch.tensor([1.0, 2.0, 4.0])
    made.update_all(DGL.function.copy_u("x", "m"), DGL.function.sum("m", "y"))
    assert made.dstdata["y"].tolist() == [7.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["sage", "gat", "gatv2", "graphconv"])
def test_layers_forward_and_backward(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    DGL.seed(0)
    make = {
        "sage": lambda: DGL.nn.SAGEConv(6, 4, "mean"),
        "gat": lambda: DGL.nn.GATConv(6, 4, 2),
        "gatv2": lambda: DGL.nn.GATv2Conv(6, 4, 2),
        "graphconv": lambda: DGL.nn.GraphConv(6, 4, allow_zero_in_degree=True),
    }[kind]
    block = DGL.to_block(DGL.add_self_loop(DGL.rand_graph(30, 90)))
    layer = make().to(dtype)
    features = torch.randn(block.num_src_nodes(), 6, dtype=dtype, requires_grad=True)
    inputs = features if kind == "gatv2" else (features, features[: block.num_dst_nodes()])
    result = layer(block, inputs)
    assert result.dtype == dtype
    assert len(result) == block.num_dst_nodes()
    result.float().square().sum().backward()
    assert features.grad is not None
    assert features.grad.dtype == dtype
    assert features.grad.abs().sum() > 0
    assert torch.isfinite(features.grad).all()
    exact = make()
    exact.load_state_dict(layer.state_dict())
    wide = features.detach().float()
    wide_inputs = wide if kind == "gatv2" else (wide, wide[: block.num_dst_nodes()])
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(result.float(), exact(block, wide_inputs), rtol=0, atol=tolerance)
