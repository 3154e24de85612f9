"""What stands between two groups of blocks: found, proven, gone through by the lens, and linear once it is held."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interp.analysis import direct_logit_attribution, logit_lens
from interp.circuits.attribution import AttributionComputer, AttributionConfig
from interp.circuits.certificate import certify
from interp.circuits.replacement_model import ReplacementModel
from interp.dictionaries import Transcoder
from interp.edits import Add
from interp.engines.base import Request
from interp.engines.doctor import prove, refuse_unproven
from interp.engines.eager import EagerEngine
from interp.engines.echo import echo
from interp.engines.load import wrap
from interp.errors import PointRefused, UserError
from interp.models.anatomy import Bridge, Linear, Refusal, Tap
from interp.models.frozen_bridge import frozen, not_linear
from interp.points import Address
from tests.engines.own_modules import N_LAYERS, GroupedModel, grouped_model, own_model

EARLY, LATE = 24, 36
TOKENS = [7, 3, 60, 9, 11]


class Gated(nn.Module):
    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(d_in, 40), nn.Linear(d_in, 40), nn.Linear(40, d_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Factor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.5


class RunningSum(nn.Module):
    """Mixes positions."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(EARLY, LATE)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x).cumsum(1)


class Tripled(GroupedModel):
    """Part of what stands between is no module."""

    def between(self, i: int, x: Tensor) -> Tensor:
        return super().between(i, x) * 3.0


class Rectified(GroupedModel):
    def between(self, i: int, x: Tensor) -> Tensor:
        return F.relu(super().between(i, x))


class Padded(GroupedModel):
    """All of it is none."""

    def between(self, i: int, x: Tensor) -> Tensor:
        return F.pad(x, (0, LATE - EARLY))


def activated(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(EARLY, 40), activation, nn.Linear(40, LATE))


MADE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(EARLY, LATE, bias=False),
    "linear with bias": lambda: nn.Linear(EARLY, LATE),
    "relu": lambda: activated(nn.ReLU()),
    "gelu": lambda: activated(nn.GELU()),
    "norm": lambda: nn.Sequential(nn.LayerNorm(EARLY), nn.Linear(EARLY, LATE)),
    "norm behind": lambda: nn.Sequential(nn.Linear(EARLY, LATE, bias=False), nn.RMSNorm(LATE, eps=1e-6)),
    "sigmoid": lambda: activated(nn.Sigmoid()),
    "gated": lambda: Gated(EARLY, LATE),
    "deep": lambda: nn.Sequential(nn.Linear(EARLY, LATE), *(nn.Linear(LATE, LATE) for _ in range(9))),
}
KINDS = {
    "linear": ["Linear"],
    "linear with bias": ["Linear"],
    "relu": ["Linear", "ReLU", "Linear"],
    "gelu": ["Linear", "GELU", "Linear"],
    "norm": ["Norm", "Linear"],
    "norm behind": ["Linear", "Norm"],
    "sigmoid": ["Linear", "Sigmoid", "Linear"],
    "gated": ["Network"],
    "deep": ["Network"],
}
LINEAR = [name for name in MADE if name not in ("sigmoid", "gated", "deep")]
"""Those that are a linear map once their denominators and activations' factors are held."""


@cache
def engine(name: str) -> EagerEngine:
    return wrap(grouped_model([EARLY, LATE], [MADE[name]()]), name=name)


@cache
def three_groups() -> EagerEngine:
    return wrap(grouped_model([EARLY, LATE, 20], [activated(nn.ReLU()), nn.Linear(LATE, 20)]), name="three")


def adapter(model: EagerEngine, i: int = 0) -> nn.Module:
    return model.module.get_submodule(f"adapters.{i}")


def pieces(model: EagerEngine, layer: int = 1) -> tuple[Any, ...]:
    found = model.anatomy.bridges[layer].pieces
    assert not isinstance(found, Refusal)
    return found


def kinds(model: EagerEngine, layer: int = 1) -> list[str]:
    return [type(piece).__name__ for piece in pieces(model, layer)]


def capture(model: EagerEngine, *points: str) -> dict[str, Tensor]:
    (result,) = model.run([Request(TOKENS, capture=points, return_logits=True)])
    assert result.logits is not None
    return {point: result.capture[point] for point in points} | {"logits": result.logits}


@pytest.mark.parametrize("name", MADE)
def test_the_pieces_are_those_of_the_adapter_and_every_claim_about_it_holds(name: str) -> None:
    model = engine(name)
    assert list(model.anatomy.bridges) == [1] and kinds(model) == KINDS[name]
    bridge = model.anatomy.bridges[1]
    assert (bridge.layer, bridge.d_in, bridge.output.path, bridge.output.side) == (1, EARLY, "adapters.0", "output")
    assert [(g.name, g.start, g.stop, g.d_model) for g in model.model.groups] == [
        ("groups.0", 0, 2, EARLY),
        ("groups.1", 2, 4, LATE),
    ]
    assert [model.model.width(layer) for layer in (0, 1, 2, 3, None)] == [EARLY, EARLY, LATE, LATE, LATE]
    claims = prove(model)
    assert [claim for claim in (*claims, *echo(model)) if not claim.holds] == [] and model.anatomy.refused == {}
    at_the_adapter = {(c.equation, c.layer, c.points) for c in claims if "adapter" in c.equation}
    assert at_the_adapter == {
        ("adapter(resid_post.l) = adapter_out", 1, ("resid_post",)),
        ("adapter(resid_post.(l-1)) = adapter_out", 2, ("resid_pre",)),
        ("adapter(resid_post.l) = adapter_out, at layer 1", None, ("adapter_out",)),
        ("adapter_out = resid_pre.(l+1)", 1, ("resid_post",)),
        ("adapter_out = resid_pre.l", 2, ("resid_pre",)),
        ("adapter_out = resid_pre.(l+1), at layer 1", None, ("adapter_out",)),
    }


@pytest.mark.parametrize("name", MADE)
def test_what_is_captured_there_is_what_the_module_gives(name: str) -> None:
    model = engine(name)
    got = capture(model, "resid_post.1", "adapter_out", "resid_pre.2")
    with torch.no_grad():
        assert torch.equal(adapter(model)(got["resid_post.1"][None])[0], got["adapter_out"])
    assert torch.equal(got["adapter_out"], got["resid_pre.2"]) and got["adapter_out"].shape == (len(TOKENS), LATE)


@pytest.mark.parametrize(("kind", "last"), [(Tripled, "Scale"), (Rectified, "function")])
def test_what_is_no_module_is_followed_to_the_next_block(kind: type[GroupedModel], last: str) -> None:
    """adapter_out and resid_pre.2 are then one tensor: an edit at the first shows at the second, not the other way."""
    model = wrap(grouped_model([EARLY, LATE], [nn.Linear(EARLY, LATE)], kind))
    assert kinds(model) == ["Linear", last] and model.anatomy.refused == {}
    assert [claim for claim in echo(model) if not claim.holds] == []
    plain = capture(model, "resid_post.1", "adapter_out")
    right = adapter(model)(plain["resid_post.1"])
    right = right * 3.0 if kind is Tripled else right.relu()
    assert torch.allclose(plain["adapter_out"], right, rtol=0, atol=1e-14)
    v = torch.linspace(-1, 1, LATE, dtype=torch.float64)
    points = ["adapter_out", "resid_pre.2"]
    (first,) = model.run([Request(TOKENS, capture=points, edits=[Add("adapter_out", v)])])
    (second,) = model.run([Request(TOKENS, capture=points, edits=[Add("resid_pre.2", v)])])
    assert torch.equal(first.capture["resid_pre.2"], plain["adapter_out"] + v)
    assert torch.equal(first.capture["adapter_out"], first.capture["resid_pre.2"])
    assert torch.equal(second.capture["adapter_out"], plain["adapter_out"])
    assert torch.equal(second.capture["resid_pre.2"], plain["adapter_out"] + v)


def test_what_nothing_is_known_of_is_refused_and_the_rest_is_served() -> None:
    model = wrap(grouped_model([EARLY, LATE], [], Padded))
    bridge = model.anatomy.bridges[1]
    assert isinstance(bridge.pieces, Refusal) and "no module and no chain" in bridge.pieces.reason
    assert {str(a) for a in model.anatomy.refused} == {"resid_post.1", "resid_pre.2", "adapter_out"}
    assert model.support("resid_mid.1").writable and model.support("attn_out_post.2").writable
    with pytest.raises(PointRefused, match="no module and no chain"):
        model.unembed(torch.zeros(1, EARLY, dtype=torch.float64), 0)
    with pytest.raises(PointRefused, match=r"The adapter behind layer 1 of .* is not linear: .* no module"):
        direct_logit_attribution(model, TOKENS, 5)


def test_an_adapter_that_mixes_positions_is_refused_with_the_difference() -> None:
    """What it makes of a position is no function of the stream there, so no lens could go through it."""
    model = wrap(grouped_model([EARLY, LATE], [RunningSum()]))
    assert {str(a) for a in model.anatomy.refused} == {"resid_post.1", "resid_pre.2", "adapter_out"}
    with pytest.raises(PointRefused, match=r"adapter\(resid_post\.l\) = adapter_out \(P2\) is off by"):
        model.run([Request(TOKENS, capture=["resid_post.1"])])


def test_of_two_adapters_each_is_proven_and_neither_is_the_adapter() -> None:
    model = three_groups()
    assert list(model.anatomy.bridges) == [1, 3] and kinds(model, 3) == ["Linear"] and model.anatomy.refused == {}
    assert [model.model.width(layer) for layer in range(6)] == [EARLY, EARLY, LATE, LATE, 20, 20]
    claims = prove(model)
    assert all(claim.holds for claim in (*claims, *echo(model)))
    through = {(c.layer, c.points) for c in claims if c.equation == "adapter(resid_post.l) = resid_pre.(l+1)"}
    assert through == {(1, ("resid_post",)), (3, ("resid_post",))}
    through = {(c.layer, c.points) for c in claims if c.equation == "adapter(resid_post.(l-1)) = resid_pre.l"}
    assert through == {(2, ("resid_pre",)), (4, ("resid_pre",))}
    with pytest.raises(PointRefused, match=r"2 adapters stand between.*Nearest: resid_pre\.2, resid_pre\.4\."):
        model.run([Request(TOKENS, capture=["adapter_out"])])
    got = capture(model, "resid_post.1", "resid_pre.2", "resid_post.3", "resid_pre.4")
    with torch.no_grad():
        for i, (left, enters) in enumerate([("resid_post.1", "resid_pre.2"), ("resid_post.3", "resid_pre.4")]):
            assert torch.equal(adapter(model, i)(got[left][None])[0], got[enters])


def test_equal_widths_with_a_factor_between() -> None:
    model = wrap(grouped_model([EARLY, EARLY], [Factor()]))
    assert kinds(model) == ["Scale"] and model.anatomy.refused == {}
    assert all(claim.holds for claim in (*prove(model), *echo(model)))
    got = capture(model, "resid_post.1", "resid_pre.2", "adapter_out", "resid_post.0")
    assert torch.equal(got["resid_post.1"] * 1.5, got["adapter_out"])
    assert torch.equal(got["adapter_out"], got["resid_pre.2"])
    norm, head = (model.module.get_submodule(path) for path in ("norm", "head"))
    with torch.no_grad():
        assert torch.equal(model.unembed(got["resid_post.0"], 0), head(norm(got["resid_post.0"] * 1.5)))
        assert torch.equal(model.unembed(got["resid_post.0"], 2), head(norm(got["resid_post.0"])))
    assert abs(direct_logit_attribution(model, TOKENS, 5, 9).error) <= 1e-12


def test_groups_with_nothing_between_have_no_adapter() -> None:
    model = wrap(grouped_model([EARLY, EARLY], [nn.Identity()]))
    assert model.anatomy.bridges == {} and [g.name for g in model.model.groups] == ["groups.0", "groups.1"]
    got = capture(model, "resid_post.1", "resid_pre.2")
    assert torch.equal(got["resid_post.1"], got["resid_pre.2"])
    with pytest.raises(PointRefused, match="no adapter between them"):
        model.run([Request(TOKENS, capture=["adapter_out"])])


Wrong = Callable[[EagerEngine, Bridge], Bridge]


def other_matrix(model: EagerEngine, bridge: Bridge) -> Bridge:
    other = nn.Linear(EARLY, LATE, bias=False).double()
    return replace(bridge, pieces=(Linear("other", other, False),))


def bias_dropped(model: EagerEngine, bridge: Bridge) -> Bridge:
    bare = nn.Linear(EARLY, LATE, bias=False).double()
    bare.weight = pieces(model)[0].module.weight
    return replace(bridge, pieces=(Linear("bare", bare, False),))


def other_activation(model: EagerEngine, bridge: Bridge) -> Bridge:
    first, _, last = pieces(model)
    return replace(bridge, pieces=(first, F.relu, last))


def norm_left_out(model: EagerEngine, bridge: Bridge) -> Bridge:
    return replace(bridge, pieces=pieces(model)[1:])


def one_module_late(model: EagerEngine, bridge: Bridge) -> Bridge:
    tap = model.anatomy.tap(Address("attn_in", 2))
    assert isinstance(tap, Tap)
    return replace(bridge, output=tap)


FAULTS: list[tuple[str, Wrong, str]] = [
    ("linear", other_matrix, "adapter(resid_post.l) = adapter_out"),
    ("linear with bias", bias_dropped, "adapter(resid_post.l) = adapter_out"),
    ("gelu", other_activation, "adapter(resid_post.l) = adapter_out"),
    ("norm", norm_left_out, "adapter(resid_post.l) = adapter_out"),
    ("relu", one_module_late, "adapter_out = resid_pre.(l+1)"),
]


@pytest.mark.parametrize(("name", "wrong", "equation"), FAULTS)
def test_a_wrong_claim_is_refused_with_the_measured_difference(name: str, wrong: Wrong, equation: str) -> None:
    sound = engine(name)
    anatomy = replace(sound.anatomy, bridges={1: wrong(sound, sound.anatomy.bridges[1])}, refused={})
    faulty = EagerEngine(sound.module, None, anatomy, sound.model)
    claims = [claim for claim in refuse_unproven(faulty) if not claim.holds]
    assert {claim.proof for claim in claims} == {"P2"} and equation in {claim.equation for claim in claims}
    assert all(claim.difference > 1e6 * claim.tolerance for claim in claims)
    assert {str(a) for a in anatomy.refused} == {"resid_post.1", "resid_pre.2", "adapter_out"}
    for point in ("resid_post.1", "resid_pre.2", "adapter_out"):
        with pytest.raises(PointRefused, match=r"\(P2\) is off by .* units of rounding") as refusal:
            faulty.run([Request(TOKENS, capture=[point])])
        assert any(f"{claim.difference:.3g}" in str(refusal.value) for claim in claims)
    assert faulty.support("resid_post.0").readable and faulty.support("resid_mid.2").readable


def test_one_wrong_adapter_of_two_leaves_the_other_proven() -> None:
    sound = three_groups()
    bridges = dict(sound.anatomy.bridges)
    bridges[3] = replace(bridges[3], pieces=(Linear("other", nn.Linear(LATE, 20).double(), False),))
    faulty = EagerEngine(sound.module, None, replace(sound.anatomy, bridges=bridges, refused={}), sound.model)
    refuse_unproven(faulty)
    assert {"resid_post.3", "resid_pre.4"} <= {str(a) for a in faulty.anatomy.refused}
    assert faulty.support("resid_post.1").writable and faulty.support("resid_pre.2").writable


@pytest.mark.parametrize("name", MADE)
def test_the_lens_goes_through_the_real_adapter(name: str) -> None:
    model = engine(name)
    points = [f"resid_post.{layer}" for layer in range(2 * N_LAYERS)]
    got = capture(model, *points)
    norm, head = (model.module.get_submodule(path) for path in ("norm", "head"))
    with torch.no_grad():
        right = [head(norm(adapter(model)(got[p]) if int(p[-1]) < 2 else got[p])) for p in points]
    for layer, (point, expected) in enumerate(zip(points, right, strict=True)):
        assert torch.equal(model.unembed(got[point], layer), expected), layer
    assert torch.equal(model.unembed(got[points[-1]]), right[-1]) and torch.equal(right[-1], got["logits"])
    lens = logit_lens(model, TOKENS, return_logits=True)
    assert lens.logits is not None and (lens.logits - torch.stack(right)).abs().max() <= 1e-13
    assert (right[1] - right[2]).abs().max() > 1e-3


def test_the_lens_goes_through_every_adapter_that_lies_behind() -> None:
    model = three_groups()
    got = capture(model, "resid_post.0", "resid_pre.3")
    norm, head = (model.module.get_submodule(path) for path in ("norm", "head"))
    with torch.no_grad():
        right = head(norm(adapter(model, 1)(adapter(model, 0)(got["resid_post.0"]))))
        assert torch.equal(model.unembed(got["resid_post.0"], 0), right)
        assert torch.equal(model.unembed(got["resid_pre.3"], 3), head(norm(adapter(model, 1)(got["resid_pre.3"]))))


@pytest.mark.parametrize(
    ("width", "layer", "sentence"),
    [
        (EARLY, None, r"unembed takes \[\.\.\., 36\]; .* shape \[2, 24\]; name the layer that it is of\."),
        (EARLY, 2, r"unembed takes \[\.\.\., 36\]; this tensor has shape \[2, 24\]\.$"),
        (LATE, 0, r"unembed takes \[\.\.\., 24\]; this tensor has shape \[2, 36\]\.$"),
        (EARLY, -1, r"linear has layers 0 to 3; there is no layer -1\.$"),
        (LATE, 4, r"linear has layers 0 to 3; there is no layer 4\.$"),
    ],
)
def test_a_stream_of_another_width_is_refused(width: int, layer: int | None, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        engine("linear").unembed(torch.zeros(2, width, dtype=torch.float64), layer)


def test_without_adapters_no_layer_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"this tensor has shape \[2, 36\]\.$"):
        wrap(own_model(), prove=False).unembed(torch.zeros(2, LATE, dtype=torch.float64))


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("name", [*LINEAR, "three groups"])
def test_contributions_of_all_groups_sum_to_the_logit(name: str, heads: bool) -> None:
    model = three_groups() if name == "three groups" else engine(name)
    for position in (-1, 1):
        found = direct_logit_attribution(model, TOKENS, 5, 9, position=position, heads=heads)
        logits = capture(model)["logits"][position]
        assert abs(found.total - float(logits[5] - logits[9])) <= 1e-12
        assert {row.layer for row in found.rows if row.layer is not None} == set(range(model.model.n_layers))
        assert min(abs(found[f"mlp_out_post.{layer}"]) for layer in range(model.model.n_layers)) > 1e-6


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gated", r"adapters\.0 is a network of its own"),
        ("deep", r"adapters\.0 is a network of its own"),
        ("sigmoid", "an activation in the adapter is not 0 at 0"),
    ],
)
def test_what_is_no_linear_map_when_it_is_held_is_refused_with_the_reason(name: str, reason: str) -> None:
    sentence = f"The adapter behind layer 1 of {name} is not linear: {reason}"
    with pytest.raises(PointRefused, match=sentence):
        direct_logit_attribution(engine(name), TOKENS, 5)
    with pytest.raises(PointRefused, match=sentence):
        ReplacementModel(engine(name), transcoders(engine(name)))


def held(name: str, module: Any, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The adapter written out, its nonlinear factors held at x."""
    if name in ("relu", "gelu"):
        u = module[0](x).detach()
        factor = (u > 0).double() if name == "relu" else 0.5 * (1 + torch.erf(u / 2**0.5))
        return lambda y: (y @ module[0].weight.T + module[0].bias) * factor @ module[2].weight.T + module[2].bias
    if name == "norm":
        scale = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        norm, last = module
        return lambda y: last((y - y.mean(-1, keepdim=True)) / scale * norm.weight + norm.bias)
    if name == "norm behind":
        first, norm = module
        scale = (first(x).square().mean(-1, keepdim=True) + 1e-6).sqrt().detach()
        return lambda y: first(y) / scale * norm.weight
    return module


@pytest.mark.parametrize("name", LINEAR)
def test_the_adjoint_is_autograds_through_the_adapter_that_is_held(name: str) -> None:
    model = engine(name)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, EARLY, generator=generator, dtype=torch.float64, requires_grad=True)
    g = torch.randn(3, 4, LATE, generator=generator, dtype=torch.float64)
    function = held(name, adapter(model), x.detach())
    y = function(x)
    with torch.no_grad():
        assert torch.allclose(y, adapter(model)(x), rtol=0, atol=1e-12)
    found, bias = frozen(model.anatomy.bridges[1], x.detach()).adjoint(g)
    assert found.shape == (3, 4, EARLY) and bias.shape == (3, 4) and not found.requires_grad
    constant = (g * function(torch.zeros_like(x))).sum(-1)
    for row in range(3):
        (right,) = torch.autograd.grad((y * g[row]).sum(), [x], retain_graph=True)
        assert (found[row] - right).abs().max() <= 1e-12 * right.abs().max()
    assert (bias - constant).abs().max() <= 1e-12
    assert (bias.abs().max() > 1e-3) == (name not in ("linear", "norm behind"))


def test_where_an_activation_reads_zero_it_has_a_factor_too() -> None:
    module = nn.Sequential(nn.Linear(EARLY, 40, bias=False), nn.GELU(), nn.Linear(40, LATE, bias=False))
    bridge = wrap(grouped_model([EARLY, LATE], [module]), prove=False).anatomy.bridges[1]
    g, bias = frozen(bridge, torch.zeros(2, EARLY, dtype=torch.float64)).adjoint(torch.ones(2, LATE).double())
    assert not_linear(bridge) is None and torch.equal(g, torch.zeros(2, EARLY).double())
    assert torch.equal(bias, torch.zeros(2).double())


def transcoders(model: EagerEngine) -> dict[int, Transcoder]:
    generator = torch.Generator().manual_seed(3)
    made = {}
    for layer in range(model.model.n_layers):
        width = model.model.width(layer)
        made[layer] = Transcoder(d_in=width, d_out=width, n_latents=50, k=6, skip=True)
        with torch.no_grad():
            for parameter in made[layer].parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
        made[layer].double()
    return made


@pytest.mark.parametrize("name", [*LINEAR, "three groups"])
def test_rows_of_an_attribution_graph_sum_through_every_adapter(name: str) -> None:
    model = three_groups() if name == "three groups" else engine(name)
    rm = ReplacementModel(model, transcoders(model))
    state = rm.build(TOKENS)
    edges = AttributionComputer(rm, AttributionConfig(max_logits=3)).compute_full_graph(state, TOKENS)
    assert sorted(state.bridges) == ([1, 3] if name == "three groups" else [1])
    certificate = certify(edges)
    assert certificate.max_relative_error < 1e-13 and certificate.rows > 3 + 6 * model.model.n_layers
    features = edges.nodes.layer[edges.matrix.tocoo().col]
    assert {0, 1, 2, 3} <= set(features.tolist())
