"""Linear models, wide & deep and factorization machines on TorchRec's EmbeddingBagCollection.

Wide & deep: Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016.
Factorization machines: Rendle, "Factorization Machines", ICDM 2010.
"""

from __future__ import annotations

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.train.config import (
    FactorizationMachineModel,
    ModelConfig,
    PairwiseDotsModel,
    WideDeepModel,
)
from torchrec_ext.train.data import Examples


class Linear(nn.Module):
    """Logistic regression: a bias plus, per feature, the sum of the weights of its bag.

    One column is enough. Optimizers of FBGEMM need at least 4: the *mean* of a row's columns is its
    weight. All columns start at zero and receive the same gradient, so they stay equal, and the
    share of zero weights is the share of zero rows. Were one column read instead, the others would
    keep their initial zeros and inflate that share.

    Args:
        rows: Table size by feature name.
        wide_dim: Columns of each table.
    """

    def __init__(self, rows: dict[str, int], wide_dim: int) -> None:
        super().__init__()
        self.wide_dim = wide_dim
        self.wide = _tables("wide", rows, wide_dim)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, sparse: KeyedJaggedTensor, dense: torch.Tensor) -> torch.Tensor:
        """Compute logits.

        Args:
            sparse: Bags of all features, ``batch`` each.
            dense: ``[batch, dense columns]`` float32; a linear model does not read it, data sets
                offer their dense columns as bucketed features too.

        Returns:
            ``[batch]`` float32.
        """
        return self.bias + self.wide(sparse).values().sum(dim=1) / self.wide_dim


class WideDeep(nn.Module):
    """The linear model plus an over-arch on deep embeddings and dense columns.

    Args:
        rows: Table size by feature name.
        crossed: Features that only the wide part reads; the over-arch finds crosses by itself.
        dense_columns: Width of the dense input.
        config: Widths of the tables and of the hidden layers.
    """

    def __init__(
        self,
        rows: dict[str, int],
        crossed: frozenset[str],
        dense_columns: int,
        config: WideDeepModel,
    ) -> None:
        super().__init__()
        self.linear = Linear(rows, config.wide_dim)
        deep_rows = {name: count for name, count in rows.items() if name not in crossed}
        self.deep = _tables("deep", deep_rows, config.deep_dim)
        self.deep_features = list(deep_rows)
        widths = [len(deep_rows) * config.deep_dim + dense_columns, *config.hidden]
        layers: list[nn.Module] = []
        for inputs, outputs in zip(widths, widths[1:], strict=False):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.over_arch = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, sparse: KeyedJaggedTensor, dense: torch.Tensor) -> torch.Tensor:
        """Compute logits; arguments and result as for ``Linear.forward``."""
        deep = self.deep(sparse)
        # A sharded collection orders its keys by shard: without this the layer's inputs would
        # depend on the plan.
        columns = [deep[name] for name in self.deep_features]
        hidden = torch.cat([*columns, dense], dim=1)
        return self.linear(sparse, dense) + self.over_arch(hidden).squeeze(1)


class PairwiseDots(nn.Module):
    """A bias plus the dot products of the factors of every two features.

    A feature's factors are the sum of those of its bag. Rows of one bag are not paired with each
    other: where every bag has one row, this is Rendle's model of degree 2. With n features and k
    factors it takes O(k n) by his identity, ``sum_{i<j} <v_i, v_j> = (|sum v|^2 - sum |v|^2) / 2``.

    Args:
        rows: Table size by feature name.
        crossed: Features that are left out; pairs are what the factors are for.
        factor_dim: Columns of each table.
    """

    def __init__(self, rows: dict[str, int], crossed: frozenset[str], factor_dim: int) -> None:
        super().__init__()
        self.paired = [name for name in rows if name not in crossed]
        self.factors = _tables("factor", {name: rows[name] for name in self.paired}, factor_dim)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, sparse: KeyedJaggedTensor, dense: torch.Tensor) -> torch.Tensor:
        """Compute logits; arguments and result as for ``Linear.forward``."""
        return self.bias + _dots(self.factors, self.paired, sparse)


class FactorizationMachine(nn.Module):
    """The linear model, which has the bias, plus what ``PairwiseDots`` adds up.

    Args:
        rows: Table size by feature name.
        crossed: Features that only the linear part reads.
        config: Widths of the tables.
    """

    def __init__(
        self, rows: dict[str, int], crossed: frozenset[str], config: FactorizationMachineModel
    ) -> None:
        super().__init__()
        self.linear = Linear(rows, config.wide_dim)
        self.paired = [name for name in rows if name not in crossed]
        self.factors = _tables(
            "factor", {name: rows[name] for name in self.paired}, config.factor_dim
        )

    def forward(self, sparse: KeyedJaggedTensor, dense: torch.Tensor) -> torch.Tensor:
        """Compute logits; arguments and result as for ``Linear.forward``."""
        return self.linear(sparse, dense) + _dots(self.factors, self.paired, sparse)


Model = Linear | WideDeep | FactorizationMachine | PairwiseDots


def build_model(config: ModelConfig, examples: Examples) -> Model:
    """Build the model for a data set; tables are on the meta device until they are sharded.

    Args:
        config: The ``model`` section.
        examples: Any part of the data set, for the names and sizes of its features.
    """
    if isinstance(config, WideDeepModel):
        return WideDeep(examples.rows(), examples.crossed, examples.dense.shape[1], config)
    if isinstance(config, FactorizationMachineModel):
        return FactorizationMachine(examples.rows(), examples.crossed, config)
    if isinstance(config, PairwiseDotsModel):
        return PairwiseDots(examples.rows(), examples.crossed, config.factor_dim)
    return Linear(examples.rows(), config.wide_dim)


def wide_tables(model: Model) -> EmbeddingBagCollection | None:
    """Give the collection of wide tables of an unsharded model, if it has them."""
    if isinstance(model, PairwiseDots):
        return None
    return model.wide if isinstance(model, Linear) else model.linear.wide


def deep_tables(model: Model) -> EmbeddingBagCollection | None:
    """Give the collection of deep or factor tables of an unsharded model, if it has them."""
    if isinstance(model, FactorizationMachine | PairwiseDots):
        return model.factors
    return model.deep if isinstance(model, WideDeep) else None


def _dots(
    tables: EmbeddingBagCollection, features: list[str], sparse: KeyedJaggedTensor
) -> torch.Tensor:
    """Sum the dot products of every two features, ``[batch]``."""
    factors = tables(sparse)
    # By name: a sharded collection orders its keys by shard.
    vectors = torch.stack([factors[name] for name in features])
    products = vectors.sum(dim=0).square() - vectors.square().sum(dim=0)
    return 0.5 * products.sum(dim=1)


def _tables(prefix: str, rows: dict[str, int], dim: int) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"{prefix}_{feature}",
                num_embeddings=count,
                embedding_dim=dim,
                feature_names=[feature],
                pooling=PoolingType.SUM,
            )
            for feature, count in rows.items()
        ],
        device=torch.device("meta"),
    )
