"""From a model's name, directory or GGUF file to an engine whose points are proven."""

import ctypes
import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from interp.engines.eager import EagerEngine
from interp.engines.nnsight import COMPILED, NNsightEngine
from interp.errors import UserError
from interp.models.anatomy import Anatomy
from interp.models.architectures import registered_for
from interp.models.calling import vocabulary_of
from interp.models.describe import describe
from interp.models.parameters import refuse_shards
from interp.models.resolve import N_POS, resolve

ENGINES = {"auto": EagerEngine, "eager": EagerEngine, "nnsight": NNsightEngine}
"""By name; all of them run the model in this process."""
LOGGER = logging.getLogger("interp")


def tell(text: str) -> None:
    """Say one line to whoever loads a model: through the logger `interp`, on stderr where logging is not set up."""
    if not LOGGER.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
    LOGGER.info(text)


def load_model(
    model: str | Path,
    *,
    engine: str = "auto",
    device: str | None = None,
    dtype: str | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    offload_folder: str | Path | None = None,
    quantization: Any = None,
    compile: bool = False,
    random_init: bool = False,
    prove: bool = True,
    report: Callable[[str], None] = tell,
) -> EagerEngine:
    """An engine for a hub id, a checkpoint directory, a GGUF file or a packaged model such as `gemma-3-270m`.

    The device is CUDA if present, then MPS, else the CPU; the dtype is the checkpoint's unless told or unsafe there;
    `report` hears in one line what was chosen and why. The anatomy is resolved from a short run and, unless `prove` is
    False, every point's equation is checked: points whose claim fails are refused with the measured difference. The
    claims are kept under INTERP_CACHE; they are checked anew where the checkpoint, its dtype, the device, a version or
    the code that proves has changed.

    A model larger than its device is split by `device_map`: "auto", or module paths with devices, "cpu" or "disk", as
    transformers and accelerate take it; what is on disk lies in `offload_folder` where the checkpoint's own files do
    not serve. It takes tokens, and gives every capture, on the device of its embedding, `engine.device`. A checkpoint
    that is quantised loads as it is; `quantization` packs one that is not: "bitsandbytes-4bit", "bitsandbytes-8bit",
    or a `quantization_config` of transformers.

    A directory whose `config.json` names a registered class is read by it (`interp.models.register`), neither split nor
    packed. Weights that no file holds are drawn from a fixed seed, so that two loads give one model, and that is said.
    With `random_init` nothing is said, and a directory of transformers' own that holds a config and no weights, else
    refused, is filled in the same way; weights that are there are loaded.

    The engine "nnsight" runs every pass in a trace of nnsight; it gives what "eager" ("auto") gives, bit for bit, and
    refuses the points that no module takes or gives. `model.nnsight` is the envoy to trace by hand, on either.

    With `compile` new tokens are decoded by a compiled graph that holds the request's captures and edits. It is made
    when a batch of that size, length and set of points first comes (about a minute), and kept under INTERP_CACHE; other
    vectors, scales and positions need no other graph.

    Raises `UserError` for a model that cannot be found or read, or an unknown engine, device or dtype.
    """
    _check_engine(engine)
    if compile and engine == "nnsight":
        raise UserError(COMPILED)
    from interp.models.checkpoint import architecture_in, checkpoint_dtype, fingerprint, parts_of
    from interp.models.checkpoint import resolve as find
    from interp.models.device import choose, first_device
    from interp.models.loading import load_model_and_tokenizer
    from interp.models.quantization import quantization_config

    if compile and (device_map is not None or quantization is not None):
        raise UserError(
            "compile=True needs the whole model on one device, its weights unpacked: leave one of them out."
        )
    if device is not None and device_map is not None:
        raise UserError(f"Both device={device!r} and a device_map are given; leave out one of them.")
    placed = dict(device_map) if isinstance(device_map, Mapping) else device_map
    checkpoint = find(model, report, random_init=random_init)
    first = device if placed is None else first_device(placed)
    chosen_device, chosen_dtype = choose(first, dtype, checkpoint_dtype(checkpoint), report)
    packing = quantization_config(quantization, chosen_dtype)
    module, tokenizer = load_model_and_tokenizer(
        checkpoint,
        chosen_device,
        chosen_dtype,
        placed,
        offload_folder,
        packing,
        random_init=random_init,
        report=report,
    )
    print_of_it = fingerprint(checkpoint.path)
    loaded = wrap(module, tokenizer, name=checkpoint.name, fingerprint=print_of_it, prove=False)
    if prove:
        from interp.engines import doctor
        from interp.engines.proof_cache import key_of, proven

        architecture = architecture_in(checkpoint)
        folders = [checkpoint.path, *parts_of(checkpoint.path, architecture)]
        key = key_of(module, folders, print_of_it, architecture)
        doctor.refuse(loaded, proven(key, lambda: doctor.prove(loaded), report))
    loaded = _through(engine, loaded)
    if compile:
        loaded.compile()
    _return_free_memory()
    return loaded


def _return_free_memory() -> None:
    """What reading a checkpoint has left free goes back to the system, where the C library can do that (glibc)."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return


def _check_engine(name: str) -> None:
    if name not in ENGINES:
        raise UserError(f"Unknown engine {name!r}; choose {' or '.join(ENGINES)}.")


def _through(name: str, proven: EagerEngine) -> EagerEngine:
    """The engine of that name, for a model whose points the eager one, which reaches all of them, has proven."""
    kind = ENGINES[name]
    return proven if kind is EagerEngine else kind(proven.module, proven.tokenizer, proven.anatomy, proven.model)


def wrap(
    module: nn.Module,
    tokenizer: Any = None,
    *,
    engine: str = "auto",
    name: str = "",
    fingerprint: str | None = None,
    d_vocab: int | None = None,
    n_ctx: int | None = None,
    anatomy: Anatomy | None = None,
    prove: bool = True,
) -> EagerEngine:
    """An engine for a causal language model that is already in memory; nothing is kept about it.

    A class of transformers, or any module whose forward takes token ids [batch, pos] (as `input_ids`, or as its first
    argument) and returns logits: a tensor, or something that holds them as `logits`. Where no config says
    them, `d_vocab` is read from the table in which the ids are looked up, and the longest prompt is `n_ctx`. The engine
    is "eager" ("auto") or "nnsight", as `load_model` says.

    `anatomy` says by hand which module plays which role (`interp.models.by_hand` helps to write it); it is proven like
    any other. Without it, a class that is registered with one has that, and any other module's is resolved from a run.

    Raises `UserError` for a module of which this process holds a shard alone, or an anatomy of another module, and
    `InterpError` where a pass shows no trunk of blocks.
    """
    from interp.models.checkpoint import fingerprint as fingerprint_of

    _check_engine(engine)
    module = getattr(module, "_orig_mod", module)  # what torch.compile has wrapped
    refuse_shards(module)
    module.eval()
    d_vocab = vocabulary_of(module, N_POS) if d_vocab is None else d_vocab
    anatomy = _anatomy(module, d_vocab, anatomy)
    info = describe(
        module,
        anatomy,
        name=name or type(module).__name__,
        fingerprint=fingerprint or fingerprint_of(module),
        d_vocab=d_vocab,
        n_ctx=n_ctx,
    )
    loaded = EagerEngine(module, tokenizer, anatomy, info)
    if prove:
        from interp.engines.doctor import refuse_unproven

        refuse_unproven(loaded)
    return _through(engine, loaded)


def _anatomy(module: nn.Module, d_vocab: int, by_hand: Anatomy | None) -> Anatomy:
    """The hand-written one, with a list of refusals that is this engine's own; else the resolved one."""
    architecture = registered_for(module)
    if by_hand is None and architecture is not None and architecture.anatomy is not None:
        by_hand = architecture.anatomy(module)
    if by_hand is None:
        return resolve(module, d_vocab)
    if by_hand.model is not module:
        raise UserError(
            f"This anatomy was written for another module than this {type(module).__name__}: write it for the one that "
            "is wrapped."
        )
    return replace(by_hand, refused=dict(by_hand.refused))
