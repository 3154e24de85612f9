"""Dictionaries: sparse autoencoders and transcoders, how they are saved, loaded and checked."""

from interp.dictionaries.base import Dictionary
from interp.dictionaries.config import ActivationConfig, DictionaryConfig, ModelReference
from interp.dictionaries.sparse_autoencoder import SparseAutoencoder
from interp.dictionaries.storage import check_model, load_dictionaries, load_dictionary
from interp.dictionaries.transcoder import Transcoder
from interp.edits.coders import register_loader

register_loader("interp", load_dictionary)

__all__ = [
    "ActivationConfig",
    "Dictionary",
    "DictionaryConfig",
    "ModelReference",
    "SparseAutoencoder",
    "Transcoder",
    "check_model",
    "load_dictionaries",
    "load_dictionary",
]
