"""SplitLlama: the early layers of one Llama, an adapter, and the late layers of another, wider one.

    logits = lm_head(norm(layers_last(adapter(layers_first(embed_tokens(ids))))))

Each half keeps its own head widths, rotary embedding and attention; the cache counts layers through both. All else is
as in transformers' Llama, bit for bit: two halves of one checkpoint with an identity between them are that checkpoint.
"""

import inspect
import json
import logging
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Int
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from interp.errors import UserError
from interp.files import atomic_dir, atomic_path
from interp.models.architectures import Architecture, Config, Report, register_architecture
from interp.models.checkpoint import fingerprint
from interp.models.loading import load_tokenizer
from interp.models.parameters import dtype_of
from interp.models.split_llama_files import (
    ADAPTER_FILE,
    Half,
    SplitLlamaConfig,
    copy_tokenizer,
    folder_of,
    halves_of,
    has_tokenizer,
    invalid,
    read_adapter,
    read_weights,
    write_checkpoint,
)

LOGGER = logging.getLogger("interp")
NAME = "split_llama"
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""What this transformers calls the keys and values of earlier positions; older ones call them the latter."""
FIRST = {"model.embed_tokens": "embed_tokens", "model.layers": "layers_first"}
LAST = {"model.layers": "layers_last", "model.norm": "norm", "lm_head": "lm_head"}
"""By Llama's own name of a module, ours, for each half."""


class HalvesConfig(PreTrainedConfig):
    """What a SplitLlama says of itself in transformers' terms; setting its attention sets that of both halves."""

    model_type = NAME
    sub_configs: ClassVar[dict[str, Any]] = {"first": LlamaConfig, "last": LlamaConfig}

    first: Any = None
    """`LlamaConfig` of the early layers, with as many layers as are used."""
    last: Any = None
    """`LlamaConfig` of the late layers."""
    mlp: bool = False
    vocab_size: int = 0
    num_hidden_layers: int = 0
    """Of both halves."""
    max_position_embeddings: int = 0
    """As many as both halves take."""
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None


class SplitLlama(nn.Module):
    """A causal language model of two Llama halves, in eval mode, on the CPU.

    `dtype` is by default what the first checkpoint's config states, else float32. `report` hears, in one line each,
    which parts are initialised randomly because no weights are there; they are drawn as transformers draws them, so
    that `torch.manual_seed` decides. Raises `UserError` where a checkpoint or the adapter is missing a part or does not
    fit.
    """

    def __init__(
        self, config: SplitLlamaConfig, *, dtype: torch.dtype | None = None, report: Report = LOGGER.warning
    ) -> None:
        super().__init__()
        first, last = halves_of(config, report)
        if dtype is None:
            dtype = first.config.dtype if isinstance(first.config.dtype, torch.dtype) else torch.float32
        random: list[str] = []

        def say(line: str) -> None:
            random.append(line)
            if not config.random_init:
                report(line)

        n_first, n_last = config.num_layers_8, config.num_layers_70
        early = _filled(first, FIRST, dtype, f"the embedding and the first {n_first} layers", say)
        adapter = _adapter(config, early.config.hidden_size, last.config.hidden_size).to(dtype)
        stored = read_adapter(config, adapter.state_dict())
        late = _filled(last, LAST, dtype, f"the last {n_last} layers, the final norm and the head", say)
        if stored is None:
            say(f"{config.folder} has no {ADAPTER_FILE}: the adapter is initialised randomly.")
            adapter.to_empty(device="cpu").apply(late._init_weights)
        else:
            adapter.load_state_dict({name: tensor.to(dtype) for name, tensor in stored.items()}, assign=True)

        self.embed_tokens = early.model.embed_tokens
        self.layers_first = early.model.layers
        self.adapter = adapter
        self.layers_last = late.model.layers
        self.norm = late.model.norm
        self.lm_head = late.lm_head
        self.rotary_first = LlamaRotaryEmbedding(early.config)
        self.rotary_last = LlamaRotaryEmbedding(late.config)
        for j, layer in enumerate(self.layers_last):
            cast(Any, layer).self_attn.layer_idx = n_first + j
        self.config = _config_of(config, early.config, late.config, dtype)
        self.generation_config = _generation_config(first.folder, early.config)
        self.source, self.first_folder = config, first.folder
        self.eval()
        self._as_loaded = "" if random else fingerprint(self)

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"],
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "_ pos"] | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        *,
        past_key_values: Cache | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits [batch, pos, vocab_size], of the last `logits_to_keep` positions or of those it lists; 0 keeps all.

        `attention_mask` is [batch, all positions], 1 where there is a token, or what the attention takes,
        [batch, 1, pos, all positions]. `past_key_values` is the older name of `cache`.
        """
        cache = past_key_values if cache is None else cache
        x = self.embed_tokens(input_ids)
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        if position_ids is None:
            seen = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(x.shape[1], device=x.device) + seen)[None]
        # Both before the first layer, which lengthens the cache that tells a mask its size.
        given = {"inputs_embeds": x, "attention_mask": attention_mask, "position_ids": position_ids, CACHE: cache}
        masks = [create_causal_mask(config=half, **given) for half in (self.config.first, self.config.last)]
        x = self._through(self.layers_first, self.rotary_first, x, masks[0], position_ids, cache)
        x = self._through(self.layers_last, self.rotary_last, self.adapter(x), masks[1], position_ids, cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(self.norm(x)[:, kept])
        named: dict[str, Any] = {CACHE: cache}
        output = CausalLMOutputWithPast(logits=logits, **named)
        if cache is not None and CACHE != "cache":  # found by either name, as it is taken by either
            output["cache"] = cache
        return output

    def _through(
        self,
        layers: nn.ModuleList,
        rotary: nn.Module,
        x: Tensor,
        mask: Any,
        position_ids: Tensor,
        cache: Cache | None,
    ) -> Tensor:
        angles = rotary(x, position_ids=position_ids)
        given = {"attention_mask": mask, "position_embeddings": angles, "position_ids": position_ids, CACHE: cache}
        for layer in layers:
            x = layer(x, **given)
        return x

    def fingerprint(self) -> str | None:
        """Of the directory, as `load_model` has it; None where these are not its weights: random, or changed since."""
        return fingerprint(self.source.folder) if self._as_loaded == fingerprint(self) else None

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding, of the first model."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The head, of the second model."""
        return self.lm_head

    def tokenizer(self) -> Any:
        """The first model's tokenizer, or the one whose files lie in the SplitLlama directory; None without files.

        Raises `UserError` where they cannot be read.
        """
        folder = self._tokenizer_folder()
        return load_tokenizer(folder, str(folder))

    def _tokenizer_folder(self) -> Path:
        return self.source.folder if has_tokenizer(self.source.folder) else self.first_folder

    def save_adapter(self, folder: str | Path) -> None:
        """Write `adapter.safetensors` into `folder`, whole or not at all."""
        with atomic_path(Path(folder) / ADAPTER_FILE) as file:
            weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.adapter.state_dict().items()}
            save_file(weights, file, metadata={"format": "pt"})

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a SplitLlama directory that needs no other: `first` and `last` hold the layers in use and no more.

        Whole or not at all. Raises `UserError` where `folder` holds something already, which may be what a SplitLlama
        was made of.
        """
        folder = Path(folder).expanduser()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} exists already; give save_pretrained a new folder, or use save_adapter.")
        stated = {
            "architecture": NAME,
            "path8b": "first",
            "path70b": "last",
            "num_layers_8": len(self.layers_first),
            "num_layers_70": len(self.layers_last),
            "vocab_size": self.config.vocab_size,
            "mlp": self.config.mlp,
        }
        with atomic_dir(folder) as work:
            (work / "config.json").write_text(json.dumps(stated, indent=2) + "\n")
            for name, half, modules in (("first", self.config.first, FIRST), ("last", self.config.last, LAST)):
                half.dtype = dtype_of(self)
                write_checkpoint(work / name, half, _named(self, modules))
            self.generation_config.to_json_file(work / "first" / "generation_config.json")
            copy_tokenizer(self._tokenizer_folder(), work / "first")
            self.save_adapter(work)


def _named(model: nn.Module, modules: dict[str, str]) -> dict[str, Tensor]:
    """The weights of some modules, by Llama's own names."""
    return {
        f"{path}.{name}": tensor
        for path, own in modules.items()
        for name, tensor in model.get_submodule(own).state_dict().items()
    }


def _filled(half: Half, modules: dict[str, str], dtype: torch.dtype, what: str, say: Report) -> LlamaForCausalLM:
    """A Llama as deep as the half, in which only the modules that are named hold weights."""
    try:
        with torch.device("meta"):
            llama = LlamaForCausalLM(half.config)
    except (ValueError, KeyError, TypeError) as error:
        raise invalid(half.folder, error) from None
    nn.Module.to(llama, dtype)
    stored = read_weights(half, _named(llama, {path: path for path in modules}))
    if stored is None:
        say(f"{half.folder} ({half.key}) holds no weights: {what} are initialised randomly.")
        for path in modules:
            llama.get_submodule(path).to_empty(device="cpu").apply(llama._init_weights)
    else:
        weights = {name: tensor.to(dtype) for name, tensor in stored.items()}
        llama.load_state_dict(weights, strict=False, assign=True)
    return llama


def _adapter(config: SplitLlamaConfig, d_first: int, d_last: int) -> nn.Module:
    """Without weights yet."""
    with torch.device("meta"):
        if not config.mlp:
            return nn.Linear(d_first, d_last, bias=False)
        return nn.Sequential(nn.Linear(d_first, d_last), nn.ReLU(), nn.Linear(d_last, d_last))


def _config_of(config: SplitLlamaConfig, first: LlamaConfig, last: LlamaConfig, dtype: torch.dtype) -> HalvesConfig:
    attention: Any = {"attn_implementation": first._attn_implementation}
    return HalvesConfig(
        first=first,
        last=last,
        mlp=config.mlp,
        vocab_size=config.vocab_size,
        num_hidden_layers=first.num_hidden_layers + last.num_hidden_layers,
        max_position_embeddings=min(first.max_position_embeddings, last.max_position_embeddings),
        bos_token_id=first.bos_token_id,
        eos_token_id=first.eos_token_id,
        pad_token_id=first.pad_token_id,
        dtype=dtype,
        **attention,
    )


def _generation_config(folder: Path, config: LlamaConfig) -> GenerationConfig:
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(config)


def _load(folder: Path, config: Config, dtype: torch.dtype, report: Report) -> nn.Module:
    return SplitLlama(SplitLlamaConfig(folder), dtype=dtype, report=report).requires_grad_(False)


def _parts(folder: Path, config: Config) -> list[Path]:
    own = SplitLlamaConfig(folder)
    return [folder_of(own, key, LOGGER.info) for key in ("path8b", "path70b")]


register_architecture(
    Architecture(NAME, SplitLlama, _load, None, _parts, lambda config: {"path8b", "path70b"} <= set(config))
)
