"""The nnsight engine gives what the eager engine gives, bit for bit, at every point that lies between modules."""

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interp.edits import (
    Ablate,
    Add,
    Call,
    Cap,
    Edit,
    Freeze,
    Patch,
    Project,
    Reconstruct,
    Replace,
    Scale,
    SetFeature,
    Swap,
)
from interp.engines.base import Request, Result
from interp.engines.cache import run_with_cache
from interp.engines.eager import EagerEngine
from interp.engines.load import load_model, wrap
from interp.engines.nnsight import INSIDE, NNsightEngine
from interp.engines.sampling import Sampling
from interp.engines.steering import steer
from interp.errors import InterpError, PointRefused, UserError
from interp.models.anatomy import Tap
from interp.models.resolve import N_POS
from interp.models.weights import BlockWeights
from interp.points import Address
from tests.engines.own_modules import Block, own_model
from tests.families.loaded import F32, F64, PROMPTS, hook_count, readable, writable
from tests.families.tiny import SPLIT_LLAMAS, build

FAMILIES = ["llama", "gpt2", "gemma3", "bloom", "granite", "gpt_neox_parallel", "olmo2", "qwen3_moe", "opt"]
FAMILIES += SPLIT_LLAMAS
TOKENS = [11, 64, 2, 130, 5, 5, 88]
ROOT = Path(__file__).parents[2]


@cache
def engine(family: str, dtype: torch.dtype = F64, name: str = "nnsight") -> EagerEngine:
    """Unproven: whether a name means the tensor is not the question here."""
    return wrap(build(family, dtype), engine=name, prove=False)


def both(family: str, dtype: torch.dtype = F64) -> tuple[EagerEngine, EagerEngine]:
    """nnsight's and the eager one, each on a module of its own."""
    return engine(family, dtype), engine(family, dtype, "eager")


def same(found: Sequence[Result], expected: Sequence[Result]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens and one.capture.keys() == other.capture.keys()
        for address, tensor in one.capture.items():
            assert torch.equal(tensor, other.capture[address]), f"{address} differs"
        if one.logits is not None:
            assert other.logits is not None and torch.equal(one.logits, other.logits)


@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_point_of_a_batch_is_what_eager_captures(family: str, dtype: torch.dtype, new: int) -> None:
    nnsight, eager = both(family, dtype)
    points = readable(nnsight)
    assert len(points) >= 60
    requests = [Request(prompt, points, max_new_tokens=new, return_logits=True) for prompt in PROMPTS]
    found = nnsight.run(requests)
    same(found, eager.run(requests))
    assert found[0].provenance.engine == "nnsight" and "nnsight" in found[0].provenance.versions
    assert hook_count(nnsight.module) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_write_does_what_it_does_on_eager(family: str) -> None:
    """Each writable point: everywhere in a prompt, at a position of one that goes on; a batch beside plain prompts."""
    nnsight, eager = both(family)
    points = writable(nnsight)
    assert {"resid_mid.1", "mlp_out_post.1"} & set(points) and len(points) >= 17
    requests = [Request(TOKENS, [p, "resid_post.2"], [Scale(p, 3.0)], return_logits=True) for p in points]
    requests += [Request(PROMPTS[0], [p], [Ablate(p, positions=(1,))], 2, return_logits=True) for p in points]
    plain = [Request(TOKENS, return_logits=True), Request(PROMPTS[2], ["logits"], max_new_tokens=3)]
    found = nnsight.run([*requests, *plain])
    same(found, eager.run([*requests, *plain]))
    unedited = found[-2].logits
    assert unedited is not None
    for point, result in zip(points, found, strict=False):
        assert result.logits is not None and (result.logits - unedited).abs().max() > 1e-9, f"{point}: no edit"


def edits_of_every_kind(model: EagerEngine) -> list[Edit]:
    v, w = torch.randn(2, 48, generator=torch.Generator().manual_seed(3), dtype=F64)
    early = model.model.width(0)
    (other,) = model.run([Request([7, 3, 99, 5], ["resid_post.1", "attn_out_post.1"])])
    return [
        Add("resid_pre.1", v, scale=2.0, positions="generated"),
        Replace("resid_mid.1", w, positions=(1,)),
        Project("attn_out_post.0", v[:early]),
        Cap("resid_post.0", w[:early], 0.1),
        Patch("resid_post.1", other, positions=range(2)),
        Freeze("attn_out_post.1", other.capture["attn_out_post.1"][:3], positions="prompt"),
        Swap("mlp_out_post.2", v, w, positions="last_prompt"),
        Call("mlp_act.1", lambda x: x.sin()),
    ]


@pytest.mark.parametrize("family", ["llama", "split_llama_mlp"])
def test_edits_of_every_kind_alone_and_together(family: str) -> None:
    nnsight, eager = both(family)
    edits = edits_of_every_kind(eager)
    points = ["resid_mid.1", "mlp_act.1", "resid_post.2", "final_norm"]
    requests = [Request(TOKENS[:3], points, [edit], 3, return_logits=True) for edit in edits]
    requests += [Request(TOKENS[:3], points, [e for e in edits if not isinstance(e, Freeze)], 3)]
    same(nnsight.run(requests), eager.run(requests))


class Halves:
    """A dictionary of two latents per channel: its own reconstruction is what it was given."""

    def encode(self, x: Tensor) -> Tensor:
        return torch.cat([x.relu(), (-x).relu()], -1)

    def decode(self, latents: Tensor) -> Tensor:
        positive, negative = latents.chunk(2, -1)
        return positive - negative


@pytest.mark.parametrize("family", ["gemma3", "split_llama"])
def test_an_edit_that_reads_another_point(family: str) -> None:
    nnsight, eager = both(family)
    dictionary: Any = Halves()
    edits: list[Edit] = [
        Reconstruct("mlp_in.1", "mlp_out_post.1", dictionary, keep_error=False),
        SetFeature("resid_post.0", dictionary, 3, value=5.0),
    ]
    requests = [Request(p, ["mlp_out_post.1", "logits"], edits, 2) for p in PROMPTS]
    same(nnsight.run(requests), eager.run(requests))
    assert not torch.equal(nnsight.run([Request(TOKENS, ["logits"], edits)])[0].capture["logits"],
                           nnsight.run([Request(TOKENS, ["logits"])])[0].capture["logits"])  # fmt: skip


@pytest.mark.parametrize("family", ["olmo2", "split_llama"])
def test_sampling_streams_steering_and_the_batched_convenience(family: str) -> None:
    nnsight, eager = both(family)
    drawn = Request(TOKENS, ["z.1"], max_new_tokens=4, sampling=Sampling(temperature=1.0, seed=5), logprobs=2)
    steps = [list(model.stream(drawn)) for model in (nnsight, eager)]
    assert [s.token for s in steps[0]] == [s.token for s in steps[1]] and len(steps[0]) == 4
    assert all(torch.equal(a.capture["z.1"], b.capture["z.1"]) for a, b in zip(*steps, strict=True))
    edit = Add("resid_post.1", torch.ones(48, dtype=F64))
    tokens, mask = torch.tensor([[7, 3, 99], [1, 11, 64]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    caches = []
    for model in (nnsight, eager):
        with steer(model, edit):
            caches.append(run_with_cache(model, tokens, ["resid_post.1", "mlp_pre.2"], mask))
    assert all(torch.equal(caches[0][a].nan_to_num(9.0), caches[1][a].nan_to_num(9.0)) for a in caches[0])
    resid = caches[0]["resid_post.1"][0]
    assert torch.equal(nnsight.unembed(resid), eager.unembed(resid))
    early = eager.run([Request(TOKENS, ["resid_post.0"])])[0].capture["resid_post.0"]
    assert torch.equal(nnsight.unembed(early, 0), eager.unembed(early, 0))
    one, other = nnsight.weights(1), eager.weights(1)
    assert isinstance(one, BlockWeights) and isinstance(other, BlockWeights)
    assert one.W_V is not None and torch.equal(one.W_V, other.W_V)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "gpt_neox_parallel", "split_llama_mlp"])
def test_gradients_are_those_of_eager(family: str) -> None:
    nnsight, eager = both(family)
    points = [p for p in writable(nnsight) if p not in ("lm_head", "logits")]
    found = []
    for model in (nnsight, eager):
        kept = run_with_cache(model, torch.tensor([TOKENS, TOKENS[::-1]]), [*points, "logits"], grad=True)
        loss = kept["logits"].log_softmax(-1)[..., 5].sum()
        found.append(torch.autograd.grad(loss, [kept[p] for p in points]))
    for point, one, other in zip(points, *found, strict=True):
        assert torch.equal(one, other) and one.abs().max() > 0, point
    cotangent = {"logits": torch.ones(len(TOKENS), 131, dtype=F64)}
    one, other = (model.vjp(Request(TOKENS), cotangent, ["attn_out_post.1"]) for model in (nnsight, eager))
    assert all(torch.equal(one[a], other[a]) for a in one)


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_neox_sequential", "mixtral"])
def test_what_is_refused_lies_inside_a_forward(family: str) -> None:
    nnsight, eager = both(family)
    refused: set[str] = set()
    for point in readable(eager, matrices=True):
        tap = eager.anatomy.tap(Address.parse(point))
        assert isinstance(tap, Tap)
        support = nnsight.support(point)
        assert support.readable == (tap.side not in INSIDE), point
        if not support.readable:
            assert not support.writable and 'engine="eager"' in support.reason and INSIDE[tap.side] in support.reason
            with pytest.raises(PointRefused, match='load the model with engine="eager"'):
                nnsight.run([Request(TOKENS, [point])])
            refused.add(tap.side)
        else:
            assert support.writable == eager.support(point).writable, point
    assert refused and refused <= {"function", "attention", "softmax", "shares"}
    for point in ("attn_probs.1", "query_rot.0"):
        with pytest.raises(PointRefused, match="inside a module's forward"):
            nnsight.run([Request(TOKENS, edits=[Scale(point, 2.0)])])


def test_what_the_short_forms_of_the_door_refuse() -> None:
    with pytest.raises(UserError, match='load the model with engine="eager", or without compile'):
        load_model("a-model-that-nobody-looks-for", engine="nnsight", compile=True)
    with pytest.raises(UserError, match='load the model with engine="eager", or without compile'):
        engine("llama").compile()
    with pytest.raises(UserError, match="Unknown engine 'jax'; choose auto or eager or nnsight"):
        wrap(own_model(), engine="jax")
    with pytest.raises(UserError, match="vocabulary of 131"):
        engine("llama").run([Request([131])])


def test_a_module_that_is_no_class_of_transformers() -> None:
    nnsight, eager = wrap(own_model(), engine="nnsight"), wrap(own_model())
    points = readable(nnsight)
    assert {"resid_mid.1", "z.0", "mlp_act.1", "final_norm"} <= set(points)
    requests = [Request(prompt, points, return_logits=True) for prompt in ([7, 3, 9], [11, 60, 2, 30], [40])]
    same(nnsight.run(requests), eager.run(requests))
    for point in writable(nnsight):
        requests = [Request([11, 60, 2], ["logits"], [Scale(point, -2.0, positions=(1,))])]
        same(nnsight.run(requests), eager.run(requests))


class Boom(Exception):
    pass


def fail(x: Tensor) -> Tensor:
    raise Boom("on purpose")


def test_an_error_inside_leaves_nothing_behind() -> None:
    nnsight, eager = both("llama")
    request = Request(TOKENS, ["resid_post.2"], max_new_tokens=2, return_logits=True)
    for point in ("embeddings", "mlp_act.1", "lm_head"):
        with pytest.raises(Boom, match="on purpose"):
            nnsight.run([Request(TOKENS, ["resid_post.0"], [Call(point, fail)], 2)])
        assert hook_count(nnsight.module) == 0
        same(nnsight.run([request]), eager.run([request]))


class InPlace(Block):
    """A block that adds to its stream in place: what its second norm has read is another tensor when the pass ends."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x += self.mlp(self.norm2(x))
        return x


def test_captures_are_copies() -> None:
    points = ["resid_mid.0", "resid_mid.1", "resid_post.0", "logits"]
    nnsight, apart = (wrap(own_model(block), engine="nnsight", prove=False) for block in (InPlace, Block))
    request = Request([7, 3, 9], points)
    (first,) = nnsight.run([request])
    same([first], apart.run([request]))
    kept = {p: first.capture[p].clone() for p in points}
    (second,) = nnsight.run([Request([9, 3, 7], points, [Scale("resid_mid.1", 2.0)])])
    for p in points:
        second.capture[p].zero_()
    same(nnsight.run([request]), [first])
    assert all(torch.equal(first.capture[p], kept[p]) for p in points)


@pytest.mark.parametrize("name", ["eager", "nnsight"])
def test_tracing_by_hand_reads_the_same_tensors_and_leaves_nothing(name: str) -> None:
    model = wrap(build("llama", F64), engine=name, prove=False)
    request = Request(TOKENS, ["resid_post.1", "z.1", "logits"], return_logits=True)
    (before,) = model.run([request])
    envoy: Any = model.nnsight
    with torch.no_grad(), model.numerics(), envoy.trace(torch.tensor([TOKENS])):
        z = envoy.model.layers[1].self_attn.o_proj.input.clone().save()
        hidden = envoy.model.layers[1].output.clone().save()
        envoy.model.layers[2].output = hidden * 0
        logits = envoy.output.logits.save()
    assert torch.equal(hidden[0], before.capture["resid_post.1"])
    assert torch.equal(z.reshape(len(TOKENS), 6, 10), before.capture["z.1"])
    assert logits.abs().max() < before.capture["logits"].abs().max()
    assert hook_count(model.module) == 0 and model.nnsight is envoy
    same(model.run([request]), [before])


def test_edits_stored_on_the_users_envoy_are_the_users_alone() -> None:
    model = wrap(build("llama", F64), engine="nnsight", prove=False)
    request = Request(TOKENS, ["resid_post.1"], return_logits=True)
    (before,) = model.run([request])
    envoy: Any = model.nnsight
    with envoy.edit(inplace=True):
        envoy.model.layers[1].output = envoy.model.layers[1].output * 0
    same(model.run([request]), [before])


@pytest.mark.parametrize("name", ["eager", "nnsight"])
def test_a_run_inside_a_trace_by_hand_is_refused(name: str) -> None:
    model = wrap(build("llama", F64), engine=name, prove=False)
    envoy: Any = model.nnsight
    with pytest.raises(UserError, match="A trace by hand is running"), envoy.trace(torch.tensor([TOKENS])):
        envoy.model.layers[0].output.clone()
        model.run([Request(TOKENS, ["resid_post.1"])])
    assert len(model.run([Request(TOKENS, ["resid_post.1"])])) == 1


def test_a_run_inside_a_runs_edit_is_refused() -> None:
    model = engine("llama")
    inner = Request(TOKENS, ["resid_post.1"])

    def run_again(x: Tensor) -> Tensor:
        return model.run([inner])[0].capture["resid_post.1"]

    with pytest.raises(UserError, match="A run inside another run's edit"):
        model.run([Request(TOKENS, edits=[Call("resid_post.0", run_again)])])
    assert len(model.run([inner])) == 1


class Turning(Block):
    """A block that calls its second norm before its attention, too, where the prompt is long."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > N_POS:
            self.norm2(x)
        return super().forward(x)


@pytest.mark.parametrize("points", [["resid_mid.0"], ["attn_out_post.0", "resid_mid.0"]])
def test_another_order_of_modules_is_an_error_that_says_so(points: list[str]) -> None:
    model = wrap(own_model(Turning), engine="nnsight", prove=False)
    request = Request([5, 7, 9], points)
    (before,) = model.run([request])
    with pytest.raises(InterpError, match=r'in the order of a short pass.*engine="eager"'):
        model.run([Request([5] * (N_POS + 1), points)])
    with pytest.raises(InterpError, match=r'in the order of a short pass.*engine="eager"'):
        model.run([Request([5] * (N_POS + 1), edits=[Scale("attn_out_post.0", 2.0), Scale("resid_mid.0", 2.0)])])
    same(model.run([request]), [before])


def test_the_engine_named_nnsight_is_one() -> None:
    assert type(engine("llama")) is NNsightEngine and ", nnsight>" in repr(engine("llama"))
    assert type(engine("llama", F64, "eager")) is EagerEngine and isinstance(engine("llama").nnsight._module, nn.Module)


def test_nnsight_is_not_imported_before_it_is_wanted() -> None:
    code = (
        "import sys; from interp.engines.load import wrap; from tests.engines.own_modules import own_model; "
        "model = wrap(own_model(), prove=False); print('nnsight' in sys.modules); "
        "model.nnsight; print('nnsight' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "True"]
