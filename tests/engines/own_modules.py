"""Models that are no classes of transformers: written by hand, and from torch's own encoder layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from interp.models.tiny import randomize

D_MODEL, D_MLP, N_HEADS, D_HEAD, D_VOCAB, N_LAYERS, N_CTX = 24, 40, 3, 7, 61, 2, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D_MODEL, 3 * N_HEADS * D_HEAD)
        self.out = nn.Linear(N_HEADS * D_HEAD, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        batch, n_pos, _ = x.shape
        q, k, v = self.qkv(x).view(batch, n_pos, 3, N_HEADS, D_HEAD).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / D_HEAD**0.5
        later = torch.ones(n_pos, n_pos, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, n_pos, N_HEADS * D_HEAD))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(D_MODEL, D_MLP), nn.GELU(), nn.Linear(D_MLP, D_MODEL))

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


def own_model(block: type[nn.Module] = Block, wrap_up: Callable[[Tensor], Any] = lambda logits: logits) -> OwnModel:
    model = OwnModel(block, wrap_up).double().eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        randomize(name, parameter, generator)
    return model
