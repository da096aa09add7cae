"""Losses of language model heads, computed through row statistics, without storing logits.

`linear_cross_entropy` is the loss; `linear_row_statistics` gives the statistics for losses of your own, `linear_loss`
reduces such a loss in either backward mode, and `explain` tells how a call will be carried out. DESIGN.md has the idea.
"""

from pallas_ce.cross_entropy import linear_cross_entropy as linear_cross_entropy
from pallas_ce.explain import Explanation as Explanation
from pallas_ce.explain import explain as explain
from pallas_ce.linear_loss import linear_loss as linear_loss
from pallas_ce.losses import Metrics as Metrics
from pallas_ce.row_statistics import linear_row_statistics as linear_row_statistics
from pallas_ce.sharding import MeshAxes as MeshAxes
from pallas_ce.statistics import RowStatistics as RowStatistics

__all__ = [
    "Explanation",
    "MeshAxes",
    "Metrics",
    "RowStatistics",
    "explain",
    "linear_cross_entropy",
    "linear_loss",
    "linear_row_statistics",
]
