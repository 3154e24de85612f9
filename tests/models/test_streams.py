"""Streams that are not plain sums, in models whose classes and module names nobody has seen before."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interp.edits import Add
from interp.engines.base import Request
from interp.engines.doctor import prove
from interp.engines.eager import EagerEngine
from interp.engines.load import wrap

D, HEADS, VOCAB, N_BLOCKS = 24, 3, 53, 3


class Rms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))
        self.epsilon = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.weight


class Mix(nn.Module):
    """Causal attention under a name that says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.fuse, self.back = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        batch, n_pos, _ = x.shape
        q, k, v = self.fuse(x).view(batch, n_pos, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (D // HEADS) ** 0.5
        scores = scores.masked_fill(torch.ones(n_pos, n_pos).triu(1).bool(), float("-inf"))
        return self.back((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, n_pos, D))


class Bend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(D, 40), nn.Linear(40, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(nn.functional.gelu(self.wide(x)))


class Slab(nn.Module):
    """A norm behind one sublayer, residual weights on both; or a stream that is weighed, or normed after each sum."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.mix, self.bend = Mix(), Bend()
        self.before, self.between, self.behind = Rms(), Rms(), Rms()
        self.share = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "normed":
            x = self.before(x + self.mix(x))
            return self.between(x + self.bend(x))
        if self.kind == "channelled":
            x = self.share * x + self.mix(self.before(x))
            return x + self.bend(self.between(x))
        if self.kind == "weighed":
            x = 0.9 * x + self.mix(self.before(x))
            return (0.8 * x + self.bend(self.between(x))) * 1.1
        x = x + 0.4 * self.mix(self.before(x))
        return x + 0.7 * self.behind(self.bend(self.between(x)))


class Unseen(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, D)
        self.slabs = nn.ModuleList([Slab(kind) for _ in range(N_BLOCKS)])
        self.finish, self.out = Rms(), nn.Linear(D, VOCAB, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids: Tensor, use_cache: bool = False, **_: object) -> dict[str, Tensor]:
        x = self.words(input_ids)
        for slab in self.slabs:
            x = slab(x)
        return {"logits": self.out(self.finish(x))}


def unseen(kind: str) -> EagerEngine:
    torch.manual_seed(0)
    model = Unseen(kind).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5) if parameter.ndim > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
    return wrap(model.requires_grad_(False))


EQUATIONS = {
    "sandwich": {"resid_pre + attn_out_post = resid_mid", "resid_mid + mlp_out_post = resid_post"},
    "normed": {"norm(resid_pre + attn_out_post) = resid_mid", "norm(resid_mid + mlp_out_post) = resid_post"},
    "channelled": {"w · (resid_pre) + attn_out_post = resid_mid", "resid_mid + mlp_out_post = resid_post"},
    "weighed": {
        "0.9 · (resid_pre) + attn_out_post = resid_mid",
        "1.1 · (0.8 · (resid_mid) + mlp_out_post) = resid_post",
    },
}


@pytest.mark.parametrize("kind", EQUATIONS)
def test_an_unseen_architecture_is_proven_without_registration(kind: str) -> None:
    engine = unseen(kind)
    claims = prove(engine)
    assert all(claim.holds for claim in claims) and {"P1", "P2", "P4"} <= {claim.proof for claim in claims}
    assert {c.equation for c in claims if c.proof == "P1"} == EQUATIONS[kind]
    assert not engine.anatomy.refused


def test_contributions_carry_their_weights_and_the_norm_behind_them() -> None:
    engine = unseen("sandwich")
    behind = engine.module.get_submodule("slabs.1.behind")
    points = ["attn_out.1", "attn_out_post.1", "mlp_out.1", "mlp_out_post.1", "mlp_act.1"]
    capture = engine.run([Request([5, 7, 11], capture=points)])[0].capture
    torch.testing.assert_close(capture["attn_out_post.1"], 0.4 * capture["attn_out.1"], rtol=0, atol=0)
    torch.testing.assert_close(capture["mlp_out_post.1"], 0.7 * behind(capture["mlp_out.1"]), rtol=1e-14, atol=0)
    assert capture["mlp_act.1"].shape == (3, 40)


class Pack(nn.Module):
    """Norm, sublayer, addition and the next norm in one module, as DBRX packs them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.mix, self.between = Rms(), Mix(), Rms()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.mix(self.before(x))
        return x, self.between(x)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pack, self.bend = Pack(), Bend()

    def forward(self, x: Tensor) -> Tensor:
        x, normed = self.pack(x)
        return x + self.bend(normed)


class Helped(nn.Module):
    """A sublayer whose norm reads the stream with something else added to it, as Zamba 2's hybrid layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.help, self.mix = Rms(), nn.Linear(D, D), Mix()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.before(x + self.help(x)))


def built_of(kind: type[nn.Module]) -> EagerEngine:
    torch.manual_seed(0)
    model = Unseen("sandwich").double()
    model.slabs = nn.ModuleList([kind().double() for _ in range(N_BLOCKS)])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5) if parameter.ndim > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
    return wrap(model.requires_grad_(False))


def test_a_module_that_holds_norm_and_addition_is_not_taken_for_the_sublayer() -> None:
    engine = built_of(Packed)
    block: Any = engine.anatomy.blocks[1]
    assert not block.parallel and (block.attn.path, block.mlp.path) == ("slabs.1.pack.mix", "slabs.1.bend")
    got = engine.run([Request([5, 7, 11], capture=["attn_in.1", "mlp_in.1", "resid_pre.1", "resid_mid.1"])])[0].capture
    pack = block.module.pack
    assert torch.equal(got["attn_in.1"], pack.before(got["resid_pre.1"]))
    assert torch.equal(got["mlp_in.1"], pack.between(got["resid_mid.1"]))


def test_a_sublayer_that_reads_more_than_the_stream_does_not_say_that_it_reads_the_stream() -> None:
    engine = built_of(Helped)
    for point in ("attn_in.1", "attn_normalized.1", "attn_norm_scale.1"):
        assert not engine.support(point).readable
    assert "something else added" in engine.support("attn_in.1").reason
    assert all(engine.support(point).readable for point in ("attn_out_post.1", "resid_post.1"))


def test_a_stream_multiplied_by_something_computed_is_refused_and_not_misread() -> None:
    class Gated(Slab):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(x) + self.mix(self.before(x))

    torch.manual_seed(0)
    model = Unseen("sandwich").double().requires_grad_(False)
    model.slabs = nn.ModuleList([Gated("sandwich").double() for _ in range(N_BLOCKS)])
    engine = wrap(model.requires_grad_(False))
    support = engine.support("attn_out_post.1")
    assert not support.readable and support.reason
    assert engine.support("resid_pre.1").readable


class Odd(nn.Module):
    """No norm that any formula here describes: a share of the stream's own magnitude."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1.0 + x.abs().amax(-1, keepdim=True))


class Oddly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd, self.mix, self.between, self.bend = Odd(), Mix(), Rms(), Bend()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.odd(x))
        return x + self.bend(self.between(x))


class Backwards(nn.Module):
    """The module that ends the MLP also adds the stream to it, which is not what the MLP reads (BERT's layers)."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.mix, self.first, self.second = Rms(), Mix(), Widen(), Ending()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.before(x))
        return self.second(self.first(x), x)


class Widen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(D, 40)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.wide(x))


class Ending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(40, D)

    def forward(self, hidden: Tensor, stream: Tensor) -> Tensor:
        return self.narrow(hidden) + stream


def test_what_the_attention_receives_through_an_unknown_norm_is_not_called_the_stream() -> None:
    engine = built_of(Oddly)
    got = engine.run([Request([5, 7, 11], capture=["attn_in.1", "resid_pre.1"])])[0].capture
    assert torch.equal(got["attn_in.1"], Odd()(got["resid_pre.1"]))  # its projections prove it
    assert "no known norm" in engine.support("attn_normalized.1").reason


def test_a_module_that_only_adds_the_stream_is_not_what_reads_it() -> None:
    engine = built_of(Backwards)
    block: Any = engine.anatomy.blocks[1]
    assert block.mlp.read.path == "slabs.1.first" and block.mid.path == "slabs.1.first"
    vector = torch.linspace(-1, 1, D, dtype=torch.float64)
    edited = engine.run([Request([5, 7], capture=["mlp_out.1", "resid_post.1"], edits=[Add("mlp_in.1", vector)])])[0]
    plain = engine.run([Request([5, 7], capture=["mlp_out.1", "resid_post.1"])])[0]
    moved = edited.capture["mlp_out.1"] - plain.capture["mlp_out.1"]
    assert moved.abs().max() > 1e-3
    assert (edited.capture["resid_post.1"] - plain.capture["resid_post.1"] - moved).abs().max() < 1e-13
