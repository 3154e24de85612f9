"""Models that are no classes of transformers: written by hand, and from torch's own encoder layer."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from interp.models.tiny import randomize

D_MODEL, D_MLP, N_HEADS, D_HEAD, D_VOCAB, N_LAYERS, N_CTX = 24, 40, 3, 7, 61, 2, 16


Model = TypeVar("Model", bound=nn.Module)


class Attention(nn.Module):
    def __init__(self, d_model: int = D_MODEL) -> None:
        super().__init__()
        self.qkv = nn.Linear(d_model, 3 * N_HEADS * D_HEAD)
        self.out = nn.Linear(N_HEADS * D_HEAD, d_model)

    def forward(self, x: Tensor) -> Tensor:
        batch, n_pos, _ = x.shape
        q, k, v = self.qkv(x).view(batch, n_pos, 3, N_HEADS, D_HEAD).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / D_HEAD**0.5
        later = torch.ones(n_pos, n_pos, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, n_pos, N_HEADS * D_HEAD))


class Block(nn.Module):
    def __init__(self, d_model: int = D_MODEL) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = Attention(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, D_MLP), nn.GELU(), nn.Linear(D_MLP, d_model))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TorchBlock(nn.TransformerEncoderLayer):
    """torch's own layer, in the pre-norm order, made causal by a mask."""

    def __init__(self) -> None:
        super().__init__(D_MODEL, N_HEADS, D_MLP, norm_first=True, batch_first=True, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return super().forward(x, src_mask=later)


class OwnModel(nn.Module):
    """Token and position embedding, pre-norm blocks, a final norm, a head; `wrap_up` makes the output of the logits."""

    def __init__(self, block: type[nn.Module] = Block, wrap_up: Callable[[Tensor], Any] = lambda logits: logits):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(D_VOCAB, D_MODEL), nn.Embedding(N_CTX, D_MODEL)
        self.blocks = nn.ModuleList(block() for _ in range(N_LAYERS))
        self.norm, self.head = nn.LayerNorm(D_MODEL), nn.Linear(D_MODEL, D_VOCAB, bias=False)
        self.wrap_up = wrap_up

    def forward(self, ids: Tensor) -> Any:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.wrap_up(self.head(self.norm(x)))


class GroupedModel(nn.Module):
    """Groups of two blocks, each of its own width, with an adapter between one and the next."""

    def __init__(self, widths: Sequence[int], adapters: Sequence[nn.Module]) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(D_VOCAB, widths[0]), nn.Embedding(N_CTX, widths[0])
        self.groups = nn.ModuleDict({f"width_{d}": nn.ModuleList(Block(d) for _ in range(N_LAYERS)) for d in widths})
        self.adapters = nn.ModuleDict({str(i): adapter for i, adapter in enumerate(adapters)})
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], D_VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for i, blocks in enumerate(self.groups.values()):
            x = self.adapters[str(i - 1)](x) if i else x
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x)
        return self.head(self.norm(x))


def own_model(block: type[nn.Module] = Block, wrap_up: Callable[[Tensor], Any] = lambda logits: logits) -> OwnModel:
    return _with_random_weights(OwnModel(block, wrap_up))


def grouped_model(widths: Sequence[int], adapters: Sequence[nn.Module]) -> GroupedModel:
    return _with_random_weights(GroupedModel(widths, adapters))


def _with_random_weights(model: Model) -> Model:
    model = model.double().eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        randomize(name, parameter, generator)
    return model
