"""Analysis: logit lens, direct logit attribution, activation and attribution patching, contrastive vectors."""

from interp.analysis.activation_patching import activation_patching
from interp.analysis.attribution_patching import attribution_patching
from interp.analysis.contrastive import contrastive_vector
from interp.analysis.direct_logit_attribution import LogitAttribution, direct_logit_attribution
from interp.analysis.frozen_trunk import Contribution
from interp.analysis.lens import LogitLens, logit_lens
from interp.analysis.metrics import LogitDifference, Metric
from interp.analysis.sweep import Patch, Patching

__all__ = [
    "Contribution",
    "LogitAttribution",
    "LogitDifference",
    "LogitLens",
    "Metric",
    "Patch",
    "Patching",
    "activation_patching",
    "attribution_patching",
    "contrastive_vector",
    "direct_logit_attribution",
    "logit_lens",
]
