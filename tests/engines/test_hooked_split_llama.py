"""A SplitLlama by hook names does what its modules do with plain hooks, on either engine, wherever an engine goes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import interp
from interp.analysis import (
    LogitDifference,
    activation_patching,
    attribution_patching,
    direct_logit_attribution,
    logit_lens,
)
from interp.circuits.attribution import AttributionComputer
from interp.circuits.certificate import certify
from interp.circuits.graph import AttributionGraph
from interp.circuits.replacement_model import ReplacementModel
from interp.dictionaries import Transcoder, load_dictionaries
from interp.edits import Ablate, Add, Scale
from interp.engines.base import Request
from interp.engines.eager import EagerEngine
from interp.engines.hooked import HookedModel
from interp.engines.hooked_split_llama import HookedSplitLlama
from interp.engines.load import wrap
from interp.engines.nnsight import NNsightEngine
from interp.engines.sampling import Sampling
from interp.engines.steering import steer
from interp.errors import PointRefused, UserError
from interp.models.split_llama import SplitLlama
from interp.models.split_llama_files import SplitLlamaConfig
from interp.names import NameRefused
from interp.points import Address
from interp.training import TranscoderTrainingConfig, train_transcoders
from tests.engines.own_modules import grouped_model
from tests.families.loaded import hook_count
from tests.families.tiny import build
from tests.models.test_split_llama import NARROW, WIDE, adapter, llama, stated
from tests.training.conftest import tiny_tokenizer

IDS = torch.tensor([[11, 94, 30, 52, 7, 61], [45, 2, 83, 9, 9, 70]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
FREE = Sampling(ignore_eos=True)
HOOKS: dict[str, tuple[str, str, int]] = {
    "embed": ("embed_tokens", "output", 48),
    "layers_first.0.attn_out": ("layers_first.0.self_attn", "output", 48),
    "layers_first.0.mlp_in": ("layers_first.0.mlp", "input", 48),
    "layers_first.0.mlp_out": ("layers_first.0.mlp", "output", 48),
    "layers_first.0.resid_post": ("layers_first.0", "output", 48),
    "layers_first.1.attn_out": ("layers_first.1.self_attn", "output", 48),
    "layers_first.1.mlp_in": ("layers_first.1.mlp", "input", 48),
    "layers_first.1.mlp_out": ("layers_first.1.mlp", "output", 48),
    "layers_first.1.resid_post": ("layers_first.1", "output", 48),
    "layers_first.2.attn_out": ("layers_first.2.self_attn", "output", 48),
    "layers_first.2.mlp_in": ("layers_first.2.mlp", "input", 48),
    "layers_first.2.mlp_out": ("layers_first.2.mlp", "output", 48),
    "layers_first.2.resid_post": ("layers_first.2", "output", 48),
    "adapter_out": ("adapter", "output", 66),
    "layers_last.0.attn_out": ("layers_last.0.self_attn", "output", 66),
    "layers_last.0.mlp_in": ("layers_last.0.mlp", "input", 66),
    "layers_last.0.mlp_out": ("layers_last.0.mlp", "output", 66),
    "layers_last.0.resid_post": ("layers_last.0", "output", 66),
    "layers_last.1.attn_out": ("layers_last.1.self_attn", "output", 66),
    "layers_last.1.mlp_in": ("layers_last.1.mlp", "input", 66),
    "layers_last.1.mlp_out": ("layers_last.1.mlp", "output", 66),
    "layers_last.1.resid_post": ("layers_last.1", "output", 66),
    "logits": ("lm_head", "output", 97),
}
"""In the order of the pass: module, side, width."""
Change = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SplitLlama:
    """Three early layers 48 wide, an MLP, two late layers 66 wide."""
    folder = tmp_path_factory.mktemp("hooked")
    llama(NARROW, 1).save_pretrained(folder / "narrow")
    llama(WIDE, 2).save_pretrained(folder / "wide")
    save_file(adapter(True), stated(folder / "own", mlp=True) / "adapter.safetensors")
    return SplitLlama(SplitLlamaConfig(folder / "own"))


@pytest.fixture(scope="module")
def on(model: SplitLlama) -> Mapping[str, HookedSplitLlama]:
    """By the engine inside."""
    return {name: HookedSplitLlama(model, engine=name) for name in ("nnsight", "eager")}


@pytest.fixture(params=["nnsight", "eager"])
def hooked(request: pytest.FixtureRequest, on: Mapping[str, HookedSplitLlama]) -> HookedSplitLlama:
    return on[request.param]


@contextmanager
def plain_hooks(model: nn.Module, seen: dict[str, Tensor], changes: Mapping[str, Change]) -> Iterator[None]:
    handles = []
    for name, (path, side, _) in HOOKS.items():

        def visit(x: Tensor, name: str = name) -> Tensor:
            x = changes[name](x) if name in changes else x
            seen[name] = x.clone()
            return x

        def before(module: Any, args: Any, visit: Change = visit) -> Any:
            return visit(args[0])

        def after(module: Any, args: Any, output: Any, visit: Change = visit) -> Any:
            return visit(output) if isinstance(output, Tensor) else (visit(output[0]), *output[1:])

        module = model.get_submodule(path)
        taken = module.register_forward_pre_hook(before) if side == "input" else module.register_forward_hook(after)
        handles.append(taken)
    yield
    for handle in handles:
        handle.remove()


def by_hand(model: nn.Module, ids: Tensor, **changes: Any) -> dict[str, Tensor]:
    """Every hook of one pass, by the modules' own paths; `changes` by hook name."""
    seen: dict[str, Tensor] = {}
    with torch.no_grad(), plain_hooks(model, seen, changes):
        model(input_ids=ids, use_cache=False)
    return seen


def test_the_topology_is_that_of_the_config(hooked: HookedSplitLlama) -> None:
    topology = hooked.topology
    assert (topology.d_model_first, topology.d_model_last, topology.vocab_size) == (48, 66, 97)
    assert (topology.n_layers_first, topology.n_layers_last) == (3, 2)
    assert [hook.name for hook in topology.hooks] == list(HOOKS)
    assert topology.all_resid_hooks == [name for name in HOOKS if name.endswith(".resid_post")]
    assert topology.all_mlp_in_hooks == [name for name in HOOKS if name.endswith(".mlp_in")]
    assert topology.all_mlp_out_hooks == [name for name in HOOKS if name.endswith(".mlp_out")]
    assert topology.first_group_hooks == list(HOOKS)[1:13] and topology.last_group_hooks == list(HOOKS)[14:22]
    assert {hook.name: hook.width for hook in topology.hooks} == {name: width for name, (_, _, width) in HOOKS.items()}
    modules = {name: "" if name == "logits" else path for name, (path, _, _) in HOOKS.items()}
    assert {hook.name: hook.module for hook in topology.hooks} == modules
    late = topology["layers_last.1.mlp_in"]
    assert (late.group, late.layer, late.site, late.address) == ("last", 1, "mlp_in", Address("mlp_in", 4))
    early = topology["layers_first.2.attn_out"]
    assert (early.group, early.layer, early.site, early.address) == ("first", 2, "attn_out", Address("attn_out", 2))
    embed, between = topology["embed"], topology["adapter_out"]
    assert (embed.group, embed.layer, embed.site, embed.address) == (None, None, "embeddings", Address("embeddings"))
    assert (between.group, between.layer, between.address) == (None, None, Address("adapter_out"))
    with pytest.raises(KeyError, match=r"'layers_last\.2\.mlp_in' is no hook; hooks: embed, layers_first\.0\.attn_out"):
        topology["layers_last.2.mlp_in"]


def test_every_hook_is_what_its_module_takes_or_gives(hooked: HookedSplitLlama) -> None:
    right = by_hand(hooked.module, IDS)
    acts = hooked.run_with_cache(IDS, list(HOOKS))
    assert list(acts) == list(HOOKS)
    for name, (_, _, width) in HOOKS.items():
        assert acts[name].shape == (2, 6, width) and torch.equal(acts[name], right[name]), name


def test_names_of_both_kinds_come_back_as_they_were_asked_for(hooked: HookedSplitLlama) -> None:
    asked = ["layers_last.0.resid_post", "resid_post.3", "layers_last.0.z", "z.3.head-7"]
    acts = hooked.run_with_cache(IDS, asked)
    assert list(acts) == asked and acts["layers_last.0.z"].shape == (2, 6, 11, 14)
    assert torch.equal(acts["layers_last.0.resid_post"], acts["resid_post.3"])
    assert torch.equal(acts["layers_last.0.z"][:, :, 7], acts["z.3.head-7"])


def test_masked_positions_are_nan_and_change_nothing(hooked: HookedSplitLlama) -> None:
    acts = hooked.run_with_cache(IDS, list(HOOKS), MASK)
    alone = by_hand(hooked.module, IDS[1:, 2:])
    for name in HOOKS:
        assert bool(acts[name][1, :2].isnan().all()) and bool(acts[name][0].isfinite().all())
        assert torch.allclose(acts[name][1, 2:], alone[name][0], rtol=1e-4, atol=1e-4), name
    pairs = hooked.get_mlp_pairs(IDS, MASK)
    assert all(bool(x[1, :2].isnan().all()) and bool(x[0].isfinite().all()) for pair in pairs.values() for x in pair)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("name", [name for name in HOOKS if name != "logits"])
def test_an_intervention_is_what_a_plain_hook_does(hooked: HookedSplitLlama, name: str) -> None:
    """A vector for every position, one per position, a function of what is there: logits and what lies behind."""
    width, before = HOOKS[name][2], hook_count(hooked.module)
    vector, rows = noise(width), noise(6, width)
    cells: list[tuple[Any, Change]] = [
        (vector, lambda x: vector.expand_as(x)),
        (rows, lambda x: rows.expand_as(x)),
        (lambda x: x.sin() - 2 * x, lambda x: x.sin() - 2 * x),
    ]
    clean = by_hand(hooked.module, IDS)
    for intervention, change in cells:
        right = by_hand(hooked.module, IDS, **{name: change})
        logits, acts = hooked.run_with_interventions(IDS, {name: intervention}, list(HOOKS))
        assert torch.equal(logits, right["logits"]) and not torch.equal(logits, clean["logits"])
        assert all(torch.equal(acts[other], right[other]) for other in HOOKS)
    assert hook_count(hooked.module) == before
    assert torch.equal(hooked.run_with_cache(IDS, ["logits"])["logits"], clean["logits"])


def test_interventions_at_several_hooks_and_edits(hooked: HookedSplitLlama) -> None:
    vector = noise(66)
    changes: dict[str, Any] = {"layers_first.1.mlp_out": lambda x: x * -2.0, "adapter_out": lambda x: x + 3.0 * vector}
    right = by_hand(hooked.module, IDS, **changes)
    edits = [Scale("mlp_out.1", -2.0), Add("adapter_out", vector, scale=3.0)]
    for interventions in (changes, edits):
        logits, acts = hooked.run_with_interventions(IDS, interventions, ["layers_last.0.mlp_in"])
        assert torch.equal(logits, right["logits"]) and list(acts) == ["layers_last.0.mlp_in"]
        assert torch.equal(acts["layers_last.0.mlp_in"], right["layers_last.0.mlp_in"])


def test_the_late_layers_run_on_what_is_put_behind_the_adapter(hooked: HookedSplitLlama) -> None:
    """The logits depend on the early layers through adapter_out alone."""
    rows = noise(6, 66)
    one, _ = hooked.run_with_interventions(IDS[:1], {"adapter_out": rows})
    other, _ = hooked.run_with_interventions(IDS[1:], {"adapter_out": rows, "embed": noise(48)})
    assert torch.equal(one, other)


def test_a_function_is_given_the_rows_of_one_prompt(hooked: HookedSplitLlama) -> None:
    shapes: list[tuple[int, ...]] = []

    def double(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return 2 * x

    logits, acts = hooked.run_with_interventions(IDS, {"layers_first.0.resid_post": double}, ["adapter_out"], MASK)
    assert sorted(shapes) == [(4, 48), (6, 48)]
    alone, _ = hooked.run_with_interventions(IDS[1:, 2:], {"layers_first.0.resid_post": lambda x: 2 * x})
    assert torch.allclose(logits[1, 2:], alone[0], rtol=1e-4, atol=1e-4)
    assert bool(logits[1, :2].isnan().all()) and bool(acts["adapter_out"][1, :2].isnan().all())


def test_mlp_pairs_are_what_each_mlp_takes_and_gives(hooked: HookedSplitLlama) -> None:
    pairs = hooked.get_mlp_pairs(IDS)
    assert list(pairs) == ["layers_first.0", "layers_first.1", "layers_first.2", "layers_last.0", "layers_last.1"]
    right = by_hand(hooked.module, IDS)
    for block, (x, y) in pairs.items():
        assert torch.equal(x, right[f"{block}.mlp_in"]) and torch.equal(y, right[f"{block}.mlp_out"])
        with torch.no_grad():
            assert torch.equal(hooked.module.get_submodule(f"{block}.mlp")(x), y)


def test_the_engine_and_the_device_are_those_that_were_asked_for(model: SplitLlama) -> None:
    assert interp.HookedSplitLlama is HookedSplitLlama
    assert type(HookedSplitLlama(model, device="cpu", prove=False).inner) is NNsightEngine
    chosen = HookedSplitLlama(model, device=torch.device("cpu"), engine="eager", prove=False)
    assert type(chosen.inner) is EagerEngine and chosen.module is model and chosen.model.name == "own"
    assert chosen.model.device == "cpu"
    with pytest.raises(UserError, match="Unknown engine 'jax'"):
        HookedSplitLlama(model, engine="jax")


def test_it_is_proven_unless_that_is_not_wanted(model: SplitLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that gives another number in a pass than its weights say is found out."""
    forward = model.adapter.forward
    monkeypatch.setattr(model.adapter, "forward", lambda x: forward(x) + x[:, :1, :1])
    with pytest.raises(PointRefused, match="P2"):
        HookedSplitLlama(model, engine="eager").run_with_cache(IDS, ["adapter_out"])
    assert HookedSplitLlama(model, engine="eager", prove=False).run_with_cache(IDS, ["adapter_out"])


def test_generation_and_streams_are_the_plain_engines(on: Mapping[str, HookedSplitLlama], model: SplitLlama) -> None:
    plain = wrap(model, prove=False)
    vector = noise(66)
    requests = [
        Request(prompt, capture=["adapter_out", "resid_post.4"], edits=edits, max_new_tokens=4, sampling=FREE)
        for prompt in ([11, 94, 30], [45, 2, 83, 7, 1])
        for edits in ([], [Add("adapter_out", vector, positions=("last_prompt", "generated")), Ablate("mlp_out.1")])
    ]
    right = plain.run(requests)
    assert right[0].tokens != right[1].tokens
    for hooked in on.values():
        for one, other, request in zip(hooked.run(requests), right, requests, strict=True):
            assert one.tokens == other.tokens
            for address in other.capture:
                assert torch.equal(one.capture[address], other.capture[address])
            assert [s.token for s in hooked.stream(request)] == other.tokens[other.n_prompt :]


def test_steering_holds_for_what_is_built_on_runs(hooked: HookedSplitLlama) -> None:
    vector = noise(48)
    right = by_hand(hooked.module, IDS, **{"layers_first.2.resid_post": lambda x: x + vector})
    with steer(hooked, Add(hooked.address("layers_first.2.resid_post"), vector)):
        acts = hooked.run_with_cache(IDS, ["layers_first.2.resid_post", "logits"])
        cached = interp.run_with_cache(hooked, IDS, ["resid_post.2"])
    assert torch.equal(acts["logits"], right["logits"])
    assert torch.equal(cached["resid_post.2"], right["layers_first.2.resid_post"])


def test_analyses_are_those_of_the_plain_engine(hooked: HookedSplitLlama, model: SplitLlama) -> None:
    plain, clean, corrupted = wrap(model, prove=False), IDS[0].tolist(), [11, 9, 30, 52, 77, 61]
    lens = [logit_lens(one, clean, return_logits=True).logits for one in (hooked, plain)]
    assert lens[0] is not None and lens[1] is not None and torch.equal(lens[0], lens[1])
    rows = [direct_logit_attribution(one, clean, 5, 9, heads=True).per_head for one in (hooked, plain)]
    assert rows[0].shape == (5, 11) and torch.equal(rows[0].nan_to_num(9.0), rows[1].nan_to_num(9.0))
    for analysis in (activation_patching, attribution_patching):
        found = [analysis(one, clean, corrupted, ["resid_post"], LogitDifference(5, 9)) for one in (hooked, plain)]
        assert torch.equal(found[0].metric, found[1].metric)
    early = hooked.run_with_cache(IDS, ["layers_first.0.resid_post"])["layers_first.0.resid_post"]
    assert torch.equal(hooked.unembed(early, 0), plain.unembed(early, 0))


def transcoders(hooked: HookedSplitLlama) -> dict[str, Transcoder]:
    generator = torch.Generator().manual_seed(3)
    made = {}
    for block in hooked.model.blocks:
        width = 48 if block.startswith("layers_first") else 66
        made[block] = Transcoder(d_in=width, d_out=width, n_latents=90, k=6, skip=True)
        with torch.no_grad():
            for parameter in made[block].parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return made


def test_transcoders_are_keyed_by_whatever_names_their_layer(hooked: HookedSplitLlama) -> None:
    given = transcoders(hooked)
    zero, one, two, three, four = given.values()
    keys = ("layers_first.0", "layers_first.1.mlp_in", Address("mlp_in", 2), 3, "mlp_in.4")
    rm = ReplacementModel(hooked, dict(zip(keys, given.values(), strict=True)))
    assert rm.transcoders == {0: zero, 1: one, 2: two, 3: three, 4: four}
    with pytest.raises(UserError, match="Two keys name one layer"):
        ReplacementModel(hooked, {**given, 4: four})
    with pytest.raises(UserError, match=r"mlp_out\.0 is no mlp_in"):
        ReplacementModel(hooked, {"layers_first.0.mlp_out": zero})
    with pytest.raises(UserError, match=r"There is no block 'layers_first\.3'; the model has layers_first\.0 to"):
        ReplacementModel(hooked, {"layers_first.3.mlp_in": zero})


def test_a_graph_is_the_same_on_both_engines(on: Mapping[str, HookedSplitLlama], tmp_path: Path) -> None:
    found = []
    for hooked in on.values():
        rm = ReplacementModel(hooked, transcoders(hooked))
        state = rm.build(IDS[:1])
        found.append(AttributionComputer(rm).compute_full_graph(state, IDS[:1]))
    assert (found[0].matrix != found[1].matrix).nnz == 0 and found[0].matrix.nnz > 1000
    assert 0 < certify(found[0]).max_relative_error < 1e-5
    AttributionGraph.from_edges(found[0]).prune(node_threshold=0.8, edge_threshold=0.98).save(tmp_path / "graph.json")
    kept = AttributionGraph.load(tmp_path / "graph.json")
    assert kept.certificate is not None and kept.certificate.max_relative_error < 1e-5


def test_a_hook_that_is_not_there_is_told_with_those_that_are(hooked: HookedSplitLlama) -> None:
    for call in (
        lambda name: hooked.run_with_cache(IDS, [name]),
        lambda name: hooked.run_with_interventions(IDS, {name: torch.zeros(48)}),
    ):
        with pytest.raises(NameRefused, match=r"the model has layers_first\.0 to layers_first\.2, layers_last\.0 to"):
            call("layers_first.3.resid_post")
        with pytest.raises(NameRefused, match=r"nearest to 'resid_pst': resid_post"):
            call("layers_first.0.resid_pst")
    with pytest.raises(PointRefused, match=r"attn_post_normalized\.0 does not exist here"):
        hooked.run_with_cache(IDS, ["layers_first.0.attn_post_normalized"])
    with pytest.raises(PointRefused, match="logits can be read but not written"):
        hooked.run_with_interventions(IDS, {"logits": torch.zeros(97)})
    with pytest.raises(UserError, match="66 wide, but the point is 48 wide"):
        hooked.run_with_interventions(IDS, {"layers_first.2.resid_post": torch.zeros(66)})


def test_transcoders_of_both_groups_are_trained_together(tmp_path: Path) -> None:
    words = " ".join(f"w{i % 60}" for i in range(7, 700, 3))
    hooked = HookedSplitLlama(build("split_llama"), tokenizer=tiny_tokenizer(), prove=False)  # type: ignore[arg-type]
    config = TranscoderTrainingConfig(
        total_tokens=160, held_out_tokens=40, context_len=20, k=4, epochs=1, batch_size=32, expansion_factor=2
    )
    reports = train_transcoders(hooked, config, [words] * 2, tmp_path)
    assert [report.layer for report in reports] == [0, 1, 2]
    loaded = load_dictionaries(tmp_path, hooked.model)
    sizes = {layer: (one.config.d_in, one.config.d_out, one.config.n_latents) for layer, one in loaded.items()}
    assert sizes == {0: (36, 36, 72), 1: (48, 48, 96), 2: (48, 48, 96)}
    ReplacementModel(hooked, {hooked.model.blocks[layer]: one for layer, one in loaded.items()})


def test_any_model_has_hook_names() -> None:
    module = grouped_model([24, 36], [nn.Linear(24, 36)])
    hooked, plain = HookedModel(module, engine="eager"), wrap(module)
    ids = torch.tensor([[7, 3, 60], [9, 11, 2]])
    acts = hooked.run_with_cache(ids, ["groups.0.1.resid_post", "groups.1.0.mlp_in", "adapter_out"])
    right = interp.run_with_cache(plain, ids, ["resid_post.1", "mlp_in.2", "adapter_out"])
    assert all(torch.equal(a, b) for a, b in zip(acts.values(), right.values(), strict=True))
    assert list(hooked.get_mlp_pairs(ids)) == ["groups.0.0", "groups.0.1", "groups.1.0", "groups.1.1"]


def test_compiled_on_eager_and_refused_on_nnsight(model: SplitLlama, on: Mapping[str, HookedSplitLlama]) -> None:
    with pytest.raises(UserError, match='load the model with engine="eager", or without compile'):
        on["nnsight"].compile()
    folder = stated(model.source.folder.parent / "small", num_layers_8=1, num_layers_70=1)
    small = SplitLlama(SplitLlamaConfig(folder, random_init=True))
    hooked, plain = (HookedSplitLlama(small, engine="eager", prove=False) for _ in range(2))
    hooked.compile()
    request = Request([11, 94, 30], capture=["adapter_out"], max_new_tokens=3, sampling=FREE)
    (found,), (right,) = hooked.run([request]), plain.run([request])
    assert (found.provenance.engine, right.provenance.engine) == ("eager, compiled", "eager")
    assert found.tokens == right.tokens
    assert torch.allclose(found.capture["adapter_out"], right.capture["adapter_out"], rtol=1e-4, atol=1e-4)
