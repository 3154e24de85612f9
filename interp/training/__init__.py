"""Training: text → tokens → activations → dictionaries."""

from interp.training.config import TranscoderTrainingConfig
from interp.training.contexts import Contexts, Corpus, Window
from interp.training.corpus import read_documents
from interp.training.progress import Progress, ProgressCallback
from interp.training.trainer import LayerReport, Trainer, train_transcoders

__all__ = [
    "Contexts",
    "Corpus",
    "LayerReport",
    "Progress",
    "ProgressCallback",
    "Trainer",
    "TranscoderTrainingConfig",
    "Window",
    "read_documents",
    "train_transcoders",
]
