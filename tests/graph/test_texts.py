"""Text columns of tables: encoded once, in memory as out of core, and as in the training."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raygnn.config.graph import TablesGraph
from raygnn.errors import CapabilityError, ConfigError, DataError, InputError
from raygnn.graph import texts
from raygnn.graph.outofcore.graph_stages import size_of
from raygnn.graph.outofcore.workspace import in_turn
from raygnn.graph.sources import digest, load_graph
from raygnn.graph.tables.description import TextColumn
from raygnn.graph.texts import needs_model
from raygnn.runs import trust
from raygnn.sampling.exchange import Exchange
from tests.graph.test_outofcore import assert_as_in_memory, contents, out_of_core
from tests.support import own_encoders
from tests.support.own_encoders import Tiny
from tests.support.ranks import run_ranks
from tests.support.tables_builder import SPEC, write_shop

text = pytest.importorskip("sklearn.feature_extraction.text")

WORDS = ["a red bicycle", None, "Ein Fahrrad, ganz rot", "", "自行车"]
OWN = "tests.support.own_encoders:Tiny"
BOUGHT = ("user", "bought", "item")
TABLES: dict[str, Any] = {
    "items": {
        "sku": [1001, 1002, 1003, 1004, 1005],
        "price": [1.0, 2.0, 3.0, 4.0, 5.0],
        "brand": ["a", "b", "a", "b", "a"],
        "words": WORDS,
    },
    "bought": {"note": ["for me", None, "a present"]},
}


def shop(directory: Path, kind: str = "csv", nodes: Any = None, edges: Any = None) -> TablesGraph:
    spec = copy.deepcopy(SPEC)
    spec["nodes"]["item"]["text"] = {"words": nodes or {"dim": 16}}
    spec["edges"]["user:bought:item"] |= {
        "text": {"remark": {"column": "note", "dim": 8, **(edges or {})}},
        "reverse": "bought_by",
    }
    return write_shop(directory, kind, spec, **TABLES)


def hashed(values: list[str | None], dim: int) -> np.ndarray:
    vectorizer = text.HashingVectorizer(n_features=dim)
    return vectorizer.transform([value or "" for value in values]).toarray().astype(np.float32)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_hashing_is_that_of_scikit_learn(kind: str, tmp_path: Path) -> None:
    """Missing texts are empty; edges have the texts of their rows, in both directions."""
    data = load_graph(shop(tmp_path, kind))
    words = data.nodes["item"].data["words"]
    assert words.dtype == np.float32
    assert np.array_equal(words, hashed(WORDS, 16))
    assert not words[1].any()
    remark = data.edges[BOUGHT].data["remark"]
    assert np.array_equal(remark, hashed(["for me", None, "a present"], 8))
    assert np.array_equal(data.edges["item", "bought_by", "user"].data["remark"], remark)
    assert list(data.nodes["item"].data) == ["feat", "words", "brand"]


@pytest.mark.parametrize(("rows", "encoder"), [(1, "hashing"), (2, OWN), (100, OWN)])
def test_out_of_core_as_in_memory(
    rows: int, encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_BATCH", rows)
    monkeypatch.setattr(texts, "_ROWS", rows)
    graph = shop(tmp_path, "parquet", {"encoder": encoder})
    if encoder == OWN:
        words = load_graph(graph).nodes["item"].data["words"]
        wanted = Tiny()([word or "" for word in WORDS])
        assert np.allclose(words, wanted, atol=1e-6)
        assert not texts._loaded.cache_info().currsize  # this process holds no model
    assert needs_model(graph) is (encoder == OWN)
    assert_as_in_memory(graph, tmp_path, 2)
    manifest = json.loads((tmp_path / "disk" / "raygnn.json").read_text())
    made = manifest["transforms"]["item/words"]["text"]
    assert made["encoder"] == encoder
    assert len(made["digest"]) == 64
    assert manifest["transforms"]["user:bought:item/remark"]["text"]["dim"] == 8


def test_edges_that_are_dropped_and_nodes_that_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that edges add have the empty text."""
    monkeypatch.setattr(texts, "_ROWS", 1)
    graph = shop(tmp_path, nodes={"encoder": OWN})
    spec = (tmp_path / "shop.yaml").read_text()
    (tmp_path / "bought.csv").write_text(
        "name,sku,amount,at,note\nzoe,1001,1,1,two\nanna,1002,1,1,one\nben,7,1,1,three\n"
    )
    add = "    fill: 0.5\n    categories:\n      brand: {column: brand, unknown: bucket}\n"
    spec = spec.replace("    categories:\n      brand: brand\n", add)
    for which in ("add", "drop"):
        (tmp_path / "shop.yaml").write_text(
            spec.replace("    reverse:", f"    missing: {which}\n    reverse:")
            if which == "drop"
            else spec.replace("    reverse:", "    missing: add\n    reverse:").replace(
                "  user:\n", "  user:\n    fill: 0.0\n"
            )
        )
        data = load_graph(graph)
        kept = ["two", "one", "three"] if which == "add" else ["one"]
        assert np.array_equal(data.edges[BOUGHT].data["remark"], hashed([*kept], 8))
        words = data.nodes["item"].data["words"]
        assert len(words) == 5 + (which == "add")
        assert np.array_equal(words[-1], words[1]) is (which == "add")
        (tmp_path / which).mkdir()
        assert_as_in_memory(graph, tmp_path / which, 2)


def build(_: Exchange, directory: Path, left: int) -> None:
    """Build the partition, by a process that is killed after so many batches."""
    counts, call = iter(range(left)), own_encoders.Counting.__call__

    def killed(encoder: Any, rows: list[str]) -> Any:
        if next(counts, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(encoder, rows)

    own_encoders.Counting.__call__ = killed  # type: ignore[method-assign]
    graph = TablesGraph(format="tables", path=directory / "shop.yaml")
    out_of_core(graph, directory / "p", 2)


def test_a_killed_build_does_not_encode_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_BATCH", 2)
    calls = tmp_path / "calls"
    monkeypatch.setenv("RAYGNN_TEST_CALLS", str(calls))
    graph = shop(tmp_path, "parquet", {"encoder": "tests.support.own_encoders:Counting"})
    with pytest.raises(RuntimeError, match="exit code -9"):
        run_ranks(1, build, tmp_path, 3, fresh=True)
    assert calls.read_text().split() == ["1", "2", "2"]  # the empty text, and four rows of five
    (vectors,) = tmp_path.glob(".p.stages-*/text-0/0")
    with vectors.open("ab") as file:
        file.write(b"cut")  # short of a row
    out_of_core(graph, tmp_path / "p", 2)
    assert calls.read_text().split()[3:] == ["1", "1"]
    calls.unlink()
    out_of_core(graph, tmp_path / "whole", 2)
    resumed, whole = contents(tmp_path / "p"), contents(tmp_path / "whole")
    del resumed["raygnn.json"], whole["raygnn.json"]  # with its seconds
    assert resumed == whole
    assert not list(tmp_path.glob(".*.stages-*"))


def test_an_encoder_that_ends_its_process_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be tried forever: Ray starts the process again."""
    monkeypatch.setattr(texts, "_ATTEMPTS", 1)
    shop(tmp_path, nodes={"encoder": "tests.support.own_encoders:Dying"})
    for found in ("exit code 1", r"DataError: .*text\.words: the process .* was killed 1 times at"):
        with pytest.raises(RuntimeError, match=found):
            run_ranks(1, build, tmp_path, 0, fresh=True)


def test_attempts_with_progress_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that is killed often, such as on spot instances, is not refused."""
    monkeypatch.setattr(texts, "_BATCH", 2)
    shop(tmp_path, "parquet")
    attempts, counts, call = tmp_path / "0.attempts", [], Tiny.__call__
    attempts.write_text("..")

    def counted(encoder: Tiny, rows: list[str]) -> np.ndarray:
        counts.append(len(attempts.read_text()))
        return call(encoder, rows)

    monkeypatch.setattr(Tiny, "__call__", counted)
    column, file = TextColumn(encoder=OWN), tmp_path / "items.parquet"
    texts.encode(file, None, column, "words", tmp_path / "0", tmp_path / "shop.yaml", "")
    assert counts == [3, 3, 1, 1]


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        ("tests.support.own_encoders:Nan", r"Nan failed: .* or NaN or infinity"),
        ("tests.support.own_encoders:Flat", r"Flat failed: ValueError: it returned shape \[1\]"),
        ("tests.support.own_encoders:Empty", r"returned shape \[1, 0\]"),
        ("tests.support.own_encoders:Ragged", r"returned shape \[5, 5\].* expected .*\[5, 1\]"),
    ],
)
def test_wrong_encoders(encoder: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"shop\.yaml: nodes\.item\.text\.words: .*{message}"):
        load_graph(shop(tmp_path, nodes={"encoder": encoder}))


def test_what_is_no_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"there is no module tests\.support\.mine"):
        load_graph(shop(tmp_path, nodes={"encoder": "tests.support.mine:Tiny"}))
    with pytest.raises(ConfigError, match="expected hashing, sentence-transformers/NAME, or"):
        load_graph(shop(tmp_path, nodes={"encoder": "bert"}))
    with pytest.raises(ConfigError, match="dim 8 would be ignored: the encoder is"):
        load_graph(shop(tmp_path, nodes={"encoder": OWN, "dim": 8}))
    with pytest.raises(
        ConfigError, match=r"num_gpus 1\.0 would be ignored: the encoder is hashing"
    ):
        load_graph(shop(tmp_path, nodes={"num_gpus": 1}))
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(CapabilityError, match=r'(?s)scikit-learn.*pip install "raygnn\[text\]"'):
        load_graph(shop(tmp_path))
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(CapabilityError, match=r'pip install "sentence-transformers"'):
        digest(shop(tmp_path, nodes={"encoder": "sentence-transformers/x"}))


def test_a_column_that_is_no_text(tmp_path: Path) -> None:
    graph = shop(tmp_path, "parquet", {"column": "price"})
    with pytest.raises(DataError, match=r"column 'price': the values are double, not text"):
        load_graph(graph)


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("feat", "features defines"),
        ("brand", "categories defines"),
        ("label", "label and split define"),
    ],
)
def test_names_of_other_arrays(name: str, by: str, tmp_path: Path) -> None:
    graph = shop(tmp_path)
    content = graph.path.read_text().replace(
        "      words:\n", f"      {name}:\n        column: words\n"
    )
    graph.path.write_text(content)
    with pytest.raises(ConfigError, match=rf"{by} an array '{name}' already"):
        load_graph(graph)


def test_the_digest_has_the_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = shop(tmp_path)
    before = digest(graph)
    monkeypatch.setattr(texts, "_version", lambda *_: "scikit-learn 0.1")
    assert digest(graph) != before
    own = shop(tmp_path, nodes={"encoder": OWN})
    before = digest(own)
    monkeypatch.setattr(texts, "sha256", lambda _: "0" * 64)  # of a class's source
    assert digest(own) != before


def test_other_tables_have_the_encoder_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = shop(tmp_path)
    out_of_core(graph, tmp_path / "p", 1)
    later = graph.model_copy(update={"vocabulary": tmp_path / "p" / "raygnn.json"})
    words = load_graph(later).nodes["item"].data["words"]
    assert np.array_equal(words, hashed(WORDS, 16))
    monkeypatch.setattr(texts, "_version", lambda *_: "scikit-learn 0.1")
    with pytest.raises(
        DataError, match=r"(?s)text\.words: the encoder is .*'scikit-learn 0\.1'.*in training"
    ):
        load_graph(later)
    monkeypatch.undo()
    other = shop(tmp_path, nodes={"dim": 32})
    later = other.model_copy(update={"vocabulary": later.vocabulary})
    with pytest.raises(DataError, match=r"'dim': 32.*in training it was .*'dim': 16"):
        out_of_core(later, tmp_path / "q", 1, in_turn)


def test_memory_is_estimated_with_the_vectors(tmp_path: Path) -> None:
    sizes = []
    for dim in (16, 1016):
        size = size_of(shop(tmp_path, "parquet", {"dim": dim}))
        assert size is not None
        sizes.append(size.node_bytes)
    assert sizes[1] - sizes[0] == 5 * 4 * 1000


@pytest.mark.parametrize("encoder", [OWN, "sentence-transformers/all-MiniLM-L6-v2"])
def test_a_run_of_others_imports_no_encoder(
    encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    graph = shop(tmp_path, nodes={"encoder": encoder})
    config = {"graph": {"format": "tables", "path": str(graph.path)}}
    with pytest.raises(InputError, match=f"would import or connect to '{encoder}'"):
        trust.usable(config, "theirs", False)
    assert trust.usable(config, "theirs", True) == config
    shop(tmp_path)
    assert trust.usable(config, "theirs", False) == config


def test_a_model_of_sentence_transformers(tmp_path: Path) -> None:
    """A local directory of one, with random weights; its digest is of its files."""
    sentences = pytest.importorskip("sentence_transformers")
    transformers = pytest.importorskip("transformers")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "rot", "ganz"]
    model = tmp_path / "model"
    model.mkdir()
    (model / "vocab.txt").write_text("\n".join(vocabulary))
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    options = {**sizes, "intermediate_size": 8, "vocab_size": len(vocabulary)}
    transformers.BertModel(transformers.BertConfig(**options)).save_pretrained(model)
    transformers.BertTokenizer(str(model / "vocab.txt")).save_pretrained(model)
    graph = shop(tmp_path, nodes={"encoder": "sentence-transformers/model"})
    words = load_graph(graph).nodes["item"].data["words"]
    wanted = sentences.SentenceTransformer(str(model), device="cpu").encode(
        [word or "" for word in WORDS]
    )
    assert words.shape == (5, 8)
    assert np.allclose(words, wanted, atol=1e-6)
    before = digest(graph)
    (model / "vocab.txt").write_text("\n".join([*vocabulary, "blau"]))
    assert digest(graph) != before
