"""Molecules as graphs, from SMILES in a CSV file by rdkit, for graph-level tasks.

Atoms and bonds have two categories each, as in Hu et al., "Strategies for pre-training
graph neural networks" (ICLR 2020); so is the split. ``pip install rdkit``, and then

    python -m raygnn train jobs/bbbp-gine.yaml      # one label of each molecule
    python -m raygnn train jobs/tox21-gine.yaml     # twelve labels, many of them unknown
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import dgl
import torch
from rdkit import Chem, RDLogger
from rdkit.Chem.Scaffolds import MurckoScaffold
from torch import Tensor

RDLogger.DisableLog("rdApp.*")  # what it refuses is left out, and counted

ROOT = Path(__file__).resolve().parents[1]  # where relative paths begin: workers run elsewhere

CHIRALITY = (
    Chem.ChiralType.CHI_UNSPECIFIED,
    Chem.ChiralType.CHI_TETRAHEDRAL_CW,
    Chem.ChiralType.CHI_TETRAHEDRAL_CCW,
    Chem.ChiralType.CHI_OTHER,
)
BONDS = (
    Chem.BondType.SINGLE,
    Chem.BondType.DOUBLE,
    Chem.BondType.TRIPLE,
    Chem.BondType.AROMATIC,
)
DIRECTIONS = (Chem.BondDir.NONE, Chem.BondDir.ENDUPRIGHT, Chem.BondDir.ENDDOWNRIGHT)


class Molecules:
    """The molecules of a CSV file that rdkit takes: ``graph.dataset`` in a job.

    Args:
        path: a header, then SMILES and labels, 0 or 1 or nothing where it is not known.

    Attributes:
        splits: train, val, test → numbers of molecules: 80, 10 and 10 % by scaffold.
        refused: how many rdkit does not take.
    """

    def __init__(self, path: str):
        with open(ROOT / path, newline="") as file:
            _, *rows = csv.reader(file)
        molecules = [(Chem.MolFromSmiles(smiles), labels) for smiles, *labels in rows]
        kept = [(molecule, labels) for molecule, labels in molecules if molecule is not None]
        self.refused = len(rows) - len(kept)
        self.splits = scaffold_split([molecule for molecule, _ in kept])
        self._items = [(graph_of(molecule), label_of(labels)) for molecule, labels in kept]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> tuple[dgl.DGLGraph, Tensor]:
        return self._items[number]


def graph_of(molecule: Chem.Mol) -> dgl.DGLGraph:
    """Atoms with ``element`` and ``chirality``; a bond, both ways, with ``bond`` and ``direction``:
    whole numbers from 0."""
    atoms, bonds = list(molecule.GetAtoms()), list(molecule.GetBonds())
    begin = [bond.GetBeginAtomIdx() for bond in bonds]
    end = [bond.GetEndAtomIdx() for bond in bonds]
    graph = dgl.graph((torch.tensor(begin + end).long(), torch.tensor(end + begin).long()),
                      num_nodes=len(atoms))  # fmt: skip
    graph.ndata["element"] = torch.tensor([atom.GetAtomicNum() for atom in atoms]).long()
    chirality = [CHIRALITY.index(atom.GetChiralTag()) for atom in atoms]
    graph.ndata["chirality"] = torch.tensor(chirality).long()
    kinds = [BONDS.index(bond.GetBondType()) for bond in bonds]
    graph.edata["bond"] = torch.tensor(2 * kinds).long()
    directions = [DIRECTIONS.index(bond.GetBondDir()) for bond in bonds]
    graph.edata["direction"] = torch.tensor(2 * directions).long()
    return graph


def label_of(labels: Sequence[str]) -> Tensor:
    """A class, where there is one column; else 0, 1 or NaN, not known, of each."""
    if len(labels) == 1:
        return torch.tensor(int(labels[0]))
    return torch.tensor([float(label) if label else torch.nan for label in labels])


def scaffold_split(molecules: Sequence[Chem.Mol]) -> dict[str, list[int]]:
    """No Bemis-Murcko scaffold is in two splits; the largest groups train, the smallest test.

    Of equally large groups those whose first molecule comes later go first, as with Hu et al.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for number, molecule in enumerate(molecules):
        scaffold = MurckoScaffold.MurckoScaffoldSmiles(mol=molecule, includeChirality=True)
        groups[scaffold].append(number)
    splits: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for group in sorted(groups.values(), key=lambda g: (len(g), g[0]), reverse=True):
        trained = len(splits["train"]) + len(group)
        if trained <= 0.8 * len(molecules):
            splits["train"] += group
        elif trained + len(splits["val"]) <= 0.9 * len(molecules):
            splits["val"] += group
        else:
            splits["test"] += group
    return splits
