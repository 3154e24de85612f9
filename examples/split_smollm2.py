"""A SplitLlama of real weights: SmolLM2's first layers, a trained adapter, and the last layers of a wider SmolLM2.

1. The wider model is SmolLM2 once more, with its stream turned into a space of more channels by an isometry Q. It gives
   the same logits up to rounding, but none of its channels is one of the narrow model's, its norms have other gains,
   and its head is a matrix of its own.
2. A SplitLlama skips the layers between: 10 layers of the narrow model, then the last 10 of the wide one.
3. The adapter starts at the least-squares map from the narrow stream at the cut to the wide one's, and is trained, and
   nothing else, on next tokens of English text.

`python -m examples.split_smollm2` makes it under INTERP_CACHE and prints its loss against the unigram entropy.
"""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import interp
from interp.files import atomic_dir, cache_dir
from interp.models.checkpoint import resolve
from interp.models.split_llama import SplitLlama, SplitLlamaConfig
from interp.training.corpus import read_documents
from interp.training.tokens import cut_rows

NARROW = "smollm2-135m-instruct"
TEXT = Path(interp.__file__).parent / "data" / "sample.txt.gz"


@dataclass(frozen=True)
class Recipe:
    """What is made, and how long it is trained."""

    d_wide: int = 648
    """Channels of the wide model's stream; SmolLM2's has 576, and its 9 heads must divide both."""
    n_first: int = 10
    """Layers of the narrow model."""
    n_last: int = 10
    """Last layers of the wide model."""
    context_len: int = 128
    """Tokens per row of text."""
    batch_rows: int = 4
    """Rows per step."""
    fit_tokens: int = 6_000
    """Tokens from which the least-squares map is computed."""
    train_tokens: int = 24_000
    """Tokens of training text, each seen once."""
    held_out_tokens: int = 4_000
    """Tokens of other documents, on which the loss is measured."""
    lr: float = 5e-4
    """Peak learning rate of Adam."""
    seed: int = 0
    """Of the isometry, the new gains, the text and the adapter."""


class Losses(NamedTuple):
    """Nats per token on held-out text."""

    unigram: float
    """Entropy of the frequencies of the text's tokens: what knowing no context costs at least."""
    start: float
    """With the least-squares adapter."""
    trained: float
    narrow: float
    """SmolLM2's own."""


def widened(narrow: LlamaForCausalLM, d_wide: int, seed: int) -> LlamaForCausalLM:
    """A Llama of another width that gives the same logits up to rounding.

    The stream x becomes Q x, [d_wide]. With |Q x| = |x| the mean square of the wide stream is d/d_wide of the narrow
    one's, and so must be its epsilon; each norm's gain g' is drawn anew, and what reads the norm has W' =
    W diag(g) Qᵀ diag(√(d / d_wide) / g').
    """
    config, d = narrow.config, narrow.config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    isometry = torch.linalg.qr(torch.randn(d_wide, d, generator=generator, dtype=torch.float64)).Q
    shrink = math.sqrt(d / d_wide)
    settings = config.to_dict() | {
        "hidden_size": d_wide,
        "head_dim": d // config.num_attention_heads,
        "rms_norm_eps": config.rms_norm_eps * d / d_wide,
        "tie_word_embeddings": False,
    }
    wide: Any = LlamaForCausalLM(LlamaConfig(**settings))
    wide.to(narrow.dtype)
    old: Any = narrow.model
    new = wide.model

    def behind(norm: str, gain: Tensor, *pairs: tuple[Any, Any]) -> None:
        """Give a norm new gains, and every map behind it the matrix that makes up for them."""
        fresh = 0.5 + torch.rand(d_wide, generator=generator, dtype=torch.float64)
        wide.get_submodule(norm).weight.data.copy_(fresh)
        for source, target in pairs:
            target.weight.data.copy_((source.weight.double() * gain.double()) @ isometry.T * (shrink / fresh))

    with torch.no_grad():
        new.embed_tokens.weight.copy_(old.embed_tokens.weight.double() @ isometry.T)
        for i, (a, b) in enumerate(zip(old.layers, new.layers, strict=True)):
            qkv = [(getattr(a.self_attn, name), getattr(b.self_attn, name)) for name in ("q_proj", "k_proj", "v_proj")]
            behind(f"model.layers.{i}.input_layernorm", a.input_layernorm.weight, *qkv)
            gated = [(getattr(a.mlp, name), getattr(b.mlp, name)) for name in ("gate_proj", "up_proj")]
            behind(f"model.layers.{i}.post_attention_layernorm", a.post_attention_layernorm.weight, *gated)
            b.self_attn.o_proj.weight.copy_(isometry @ a.self_attn.o_proj.weight.double())
            b.mlp.down_proj.weight.copy_(isometry @ a.mlp.down_proj.weight.double())
        behind("model.norm", old.norm.weight, (narrow.lm_head, wide.lm_head))
    return wide.eval().requires_grad_(False)


def make(folder: Path, recipe: Recipe = Recipe(), say: Callable[[str], None] = print) -> Losses:
    """Write the SplitLlama directory, its wide checkpoint beside its `config.json`; whole or not at all."""
    started = time.perf_counter()
    narrow_folder = resolve(NARROW, say).path
    narrow = LlamaForCausalLM.from_pretrained(narrow_folder, dtype=torch.float32).eval().requires_grad_(False)
    stated = {
        "architecture": "split_llama",
        "path8b": NARROW,
        "path70b": "wide",
        "num_layers_8": recipe.n_first,
        "num_layers_70": recipe.n_last,
        "vocab_size": narrow.config.vocab_size,
        "mlp": False,
    }
    with atomic_dir(folder) as work:
        say(f"Widening {NARROW} from {narrow.config.hidden_size} to {recipe.d_wide} channels.")
        wide = widened(narrow, recipe.d_wide, recipe.seed)
        wide.save_pretrained(work / "wide")
        (work / "config.json").write_text(json.dumps(stated, indent=2) + "\n")
        torch.manual_seed(recipe.seed)
        model = SplitLlama(SplitLlamaConfig(work, random_init=True), dtype=torch.float32).requires_grad_(False)
        rows = cut_rows(
            read_documents(TEXT),
            model.tokenizer(),
            context_len=recipe.context_len,
            train_tokens=recipe.train_tokens,
            held_out_tokens=recipe.held_out_tokens,
            seed=recipe.seed,
        )
        train = [row.tokens for row in rows.train if len(row.tokens) == recipe.context_len]
        held_out = [row.tokens for row in rows.held_out]
        say("Fitting the adapter by least squares to the wide model's own stream at the cut.")
        fit(model, narrow, wide, train[: recipe.fit_tokens // recipe.context_len])
        del wide
        start = loss(model, held_out)
        say(f"Training it on {len(train) * recipe.context_len:,} tokens, from a held-out loss of {start:.2f} nats.")
        train_adapter(model, train, recipe, say)
        losses = Losses(
            unigram_entropy([row.tokens for row in rows.train] + held_out),
            start,
            loss(model, held_out),
            loss(narrow, held_out),
        )
        model.save_adapter(work)
        (work / "losses.json").write_text(json.dumps(losses._asdict(), indent=2) + "\n")
    say(
        f"{losses.trained:.2f} nats per token on held-out text ({losses.start:.2f} before training); unigram entropy "
        f"{losses.unigram:.2f}, {NARROW} itself {losses.narrow:.2f}. {time.perf_counter() - started:.0f} s: {folder}"
    )
    return losses


def fit(model: SplitLlama, narrow: LlamaForCausalLM, wide: LlamaForCausalLM, rows: list[list[int]]) -> None:
    """Set the adapter to the linear map from the narrow stream at the cut to the wide one where late layers begin."""
    n_first, n_last = len(model.layers_first), len(model.layers_last)
    xs, ys = [], []
    for ids in batches(rows, 4):
        with torch.no_grad():
            xs.append(narrow.model(ids, output_hidden_states=True).hidden_states[n_first].flatten(0, 1))
            ys.append(wide.model(ids, output_hidden_states=True).hidden_states[-1 - n_last].flatten(0, 1))
    x, y = torch.cat(xs).double(), torch.cat(ys).double()
    ridge = 1e-3 * x.square().mean() * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
    solved = torch.linalg.solve(x.T @ x + ridge, x.T @ y).T
    model.adapter.weight.data.copy_(solved)  # type: ignore[union-attr, operator]


def train_adapter(model: SplitLlama, rows: list[list[int]], recipe: Recipe, say: Callable[[str], None]) -> None:
    """Adam on next-token loss; the early layers run without a graph, and no weight but the adapter's has a gradient."""
    model.adapter.requires_grad_(True)
    optimizer = torch.optim.Adam(model.adapter.parameters(), lr=recipe.lr)
    n_steps = len(rows) // recipe.batch_rows
    for step, ids in enumerate(batches(rows, recipe.batch_rows)):
        rate = recipe.lr * min(1.0, (step + 1) / 5) * (1 - step / n_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        value = next_token_loss(model(ids, use_cache=False).logits, ids)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if step % 10 == 0:
            say(f"  step {step} of {n_steps}: {value.item():.2f} nats")
    model.adapter.requires_grad_(False)


def loss(model: Any, rows: list[list[int]]) -> float:
    """Nats per token over rows of any length."""
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row])
            total += float(next_token_loss(model(ids, use_cache=False).logits, ids)) * (len(row) - 1)
            count += len(row) - 1
    return total / count


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean over every position that has a next token."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def unigram_entropy(rows: list[list[int]]) -> float:
    """Entropy, in nats, of the tokens' own frequencies: no model without context does better on them."""
    counts = Counter(token for row in rows for token in row)
    n = sum(counts.values())
    return -sum(c / n * math.log(c / n) for c in counts.values())


def batches(rows: list[list[int]], size: int) -> Iterator[Tensor]:
    """[size, pos]: full batches of rows of one length, in order."""
    for start in range(0, len(rows) - size + 1, size):
        yield torch.tensor(rows[start : start + size])


def made(say: Callable[[str], None] = print) -> Path:
    """The directory under INTERP_CACHE, made if this very script has not made it yet."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = cache_dir() / "examples" / f"split-smollm2-{version}"
    if not (folder / "losses.json").is_file():
        make(folder, say=say)
    return folder


if __name__ == "__main__":
    where = made()
    print(f"{where}: {(where / 'losses.json').read_text()}")
