"""Answers of models that score links, or predict for the graphs in a request."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from raygnn.errors import InputError
from raygnn.graph.arrays import dtype_name
from raygnn.graph.collection.mapped_collection import Sample
from raygnn.graph.data import EdgeType, GraphData, NodeFrame, etype_str
from raygnn.graph.sources import normalize
from raygnn.models.heads import EdgeModel
