"""Analysis: logit lens, direct logit attribution, activation patching, contrastive vectors."""

from interp.analysis.activation_patching import activation_patching
from interp.analysis.contrastive import contrastive_vector
from interp.analysis.direct_logit_attribution import LogitAttribution, direct_logit_attribution
from interp.analysis.frozen_trunk import Contribution
from interp.analysis.lens import LogitLens, logit_lens
from interp.analysis.metrics import LogitDifference, Metric
from interp.analysis.sweep import Patching

__all__ = [
    "Contribution",
    "LogitAttribution",
    "LogitDifference",
    "LogitLens",
    "Metric",
    "Patching",
    "activation_patching",
    "contrastive_vector",
    "direct_logit_attribution",
    "logit_lens",
]
