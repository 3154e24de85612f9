"""What each edit computes, against its equation by hand, and what holds for all of them."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.proxy import GraphAppendingTracer

from interp.edits import Ablate, Add, Call, Cap, Context, Edit, Freeze, Patch, Project, Replace, Scale, Swap
from interp.engines.base import Capture
from interp.errors import UserError
from interp.points import Address
from tests.edits.samples import AT, DTYPES, N_POS, PLAIN, WIDTH, Sample, context, noise, samples

F64 = torch.float64
masks = st.lists(st.booleans(), min_size=N_POS, max_size=N_POS)
vectors = st.integers(0, 10**6).map(lambda seed: noise(WIDTH, seed=seed))
X = noise(N_POS, WIDTH, seed=99)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@given(samples(), masks, st.sampled_from(DTYPES))
def test_rows_that_are_not_selected_come_back_bit_for_bit(sample: Sample, mask: list[bool], dtype: torch.dtype) -> None:
    edit = sample.make()
    x = X.to(dtype, copy=True)
    x[1, 2], x[3, 0] = -0.0, float("nan")
    before = x.clone()
    found = edit.apply(x, context(mask, dtype))
    keep = ~torch.tensor(mask)
    assert found.dtype == dtype and found.shape == x.shape
    assert torch.equal(bits(found)[keep], bits(before)[keep]) and torch.equal(bits(x), bits(before))
    everywhere = edit.apply(x, context(None, dtype))
    assert torch.equal(bits(found)[~keep], bits(everywhere)[~keep])


@given(samples())
def test_operands_can_be_exchanged_without_a_new_structure(sample: Sample) -> None:
    """What a compiled step does: the same code over tensors that stand in for vectors and numbers."""
    edit = sample.make()
    operands = [o if isinstance(o, Tensor) else torch.tensor(o, dtype=F64) for o in edit.operands()]
    again = edit.with_operands(operands)
    assert torch.allclose(again.apply(X, context()), edit.apply(X, context()), rtol=1e-12, atol=1e-12)
    assert again == edit and edit.with_operands(edit.operands()).structure == edit.structure
    if operands:
        other = edit.with_operands([o + 0.5 for o in operands])
        assert edit.operands() == edit.operands() and other is not edit
        with pytest.raises(ValueError, match="operands"):
            edit.with_operands([])


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_the_arithmetic_can_be_traced_with_symbols(kind: str, seed: int) -> None:
    """No number is read and no branch taken on a value: torch.fx records it over proxies."""
    edit, full = Sample(kind, F64, None, seed, 1.5).make(), context([True, False, True, True, False])
    numbers = [o if isinstance(o, Tensor) else torch.tensor(o, dtype=F64) for o in edit.operands()]
    names = [f"operand_{i}" for i in range(len(numbers))]
    graph = torch.fx.Graph()
    tracer = GraphAppendingTracer(graph)
    x, positions, selected, mean, *operands = (
        torch.fx.Proxy(graph.placeholder(name), tracer) for name in ("x", "positions", "selected", "mean", *names)
    )
    traced = Context.__new__(Context)
    traced.__dict__.update(positions=positions, selected=selected, mean=mean, held={})
    graph.output(edit.with_operands(operands).apply(x, traced).node)  # type: ignore[arg-type]
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    found = module(X, full.positions, full.selected, full.mean, *numbers)
    assert torch.allclose(found, edit.apply(X, full), rtol=1e-12, atol=1e-12)


def test_structures_differ_where_the_code_does() -> None:
    v, w = noise(WIDTH), noise(WIDTH, seed=1)
    assert Add(AT, v).structure == Add(AT, w, 3.0, positions=2).structure
    kinds = [
        Add(AT, v),
        Add("mlp_out.2", v),
        Add(AT, v.float()),
        Cap(AT, v, 1.0),
        Cap(AT, v, 1.0, min=0.0),
        Ablate(AT),
        Ablate(AT, "mean"),
        Ablate(AT, v),
        Replace(AT, v),
        Replace(AT, noise(N_POS, WIDTH)),
    ]
    assert len({edit.structure for edit in kinds}) == len(kinds)


def test_each_equation_by_hand() -> None:
    v, w = noise(WIDTH, seed=5) * 3, noise(WIDTH, seed=6) * 0.2
    u = v / v.norm()
    p = (X * u).sum(-1, keepdim=True)
    rows = noise(N_POS, WIDTH, seed=8)
    parallel, rest = p * u, X - p * u
    r = u - w / w.norm()
    cells: list[tuple[Edit, Tensor]] = [
        (Add(AT, v, 2.5), X + 2.5 * v),
        (Scale(AT, -3.0), -3.0 * X),
        (Replace(AT, v), v.expand_as(X)),
        (Replace(AT, rows), rows),
        (Freeze(AT, rows), rows),
        (Project(AT, v), rest),
        (Project(AT, v, keep=0.25), rest + 0.25 * parallel),
        (Cap(AT, v, 0.1), rest + p.clamp(max=0.1) * u),
        (Cap(AT, v, 0.1, min=-0.2), rest + p.clamp(-0.2, 0.1) * u),
        (Swap(AT, v, w), X - 2 * (X @ r)[:, None] * r / (r @ r)),
        (Ablate(AT), torch.zeros_like(X)),
        (Ablate(AT, v), v.expand_as(X)),
        (Ablate(AT, "mean"), noise(WIDTH, seed=22).expand_as(X)),
        (Call(AT, lambda x: x.abs()), X.abs()),
    ]
    for edit, right in cells:
        assert (edit.apply(X, context()) - right).abs().max() < 1e-14, edit
    assert torch.equal(Add(AT, v.float(), 2.5).apply(X.float(), context()), X.float() + 2.5 * v.float())


@given(vectors, vectors)
def test_swap_exchanges_the_two_directions_and_twice_is_nothing(v: Tensor, w: Tensor) -> None:
    if (v / v.norm() - w / w.norm()).norm() < 1e-6:
        return
    swap = Swap(AT, v, 4 * w)
    once = swap.apply(X, context())
    assert torch.allclose(swap.apply(once, context()), X, rtol=0, atol=1e-13)
    directions = torch.stack([v / v.norm(), w / w.norm()])
    assert torch.allclose(swap.apply(directions, context()), directions.flip(0), rtol=0, atol=1e-13)
    orthogonal = torch.linalg.svd(directions).Vh[2:]
    assert torch.allclose(swap.apply(orthogonal, context()), orthogonal, rtol=0, atol=1e-13)


@given(vectors, st.floats(-3, 3))
def test_project_and_cap_leave_what_they_promise(v: Tensor, most: float) -> None:
    u = v / v.norm()
    gone = Project(AT, v).apply(X, context())
    assert (gone @ u).abs().max() < 1e-13
    assert torch.allclose(Project(AT, v).apply(gone, context()), gone, rtol=0, atol=1e-13)
    capped = Cap(AT, v, most).apply(X, context())
    below = X @ u <= most
    assert (capped @ u).max() <= most + 1e-12 and torch.equal(capped[below], X[below])
    assert torch.equal(Project(AT, v, keep=1.0).apply(X, context()), X)


@given(st.floats(1e-30, 1e30))
def test_the_length_of_a_direction_does_not_matter(length: float) -> None:
    v, w = noise(WIDTH, seed=1), noise(WIDTH, seed=2)
    for one, other in (
        (Project(AT, v), Project(AT, v * length)),
        (Cap(AT, v, 0.5), Cap(AT, v * length, 0.5)),
        (Swap(AT, v, w), Swap(AT, v * length, w)),
    ):
        assert torch.allclose(one.apply(X, context()), other.apply(X, context()), rtol=1e-12, atol=1e-13)


def test_heads_have_directions_of_their_own() -> None:
    x, v = noise(N_POS, 3, WIDTH, seed=3), noise(3, WIDTH, seed=4)
    u = v / v.norm(dim=-1, keepdim=True)
    right = x - torch.einsum("phw,hw,hv->phv", x, u, u)
    assert torch.allclose(Project("z.1", v).apply(x, context()), right, rtol=0, atol=1e-13)
    masked = Project("z.1", v).apply(x, context([False, True, False, False, True]))
    assert torch.equal(masked[[0, 2, 3]], x[[0, 2, 3]]) and torch.allclose(masked[[1, 4]], right[[1, 4]])
    assert torch.allclose(Project("z.1.head-2", v[2]).apply(x[:, 2], context()), right[:, 2], rtol=0, atol=1e-13)


def test_a_patch_takes_the_rows_of_another_run() -> None:
    z = noise(N_POS, 3, WIDTH, seed=3)
    run = Capture({Address("z", 1): z, Address("attn_probs", 1): noise(3, N_POS, N_POS)})
    assert Patch("z.1", run) == Patch("z.1", z) and Patch("z.1.head-2", run) == Patch("z.1.head-2", z[:, 2])
    assert Patch("attn_probs.1.head-1", run) == Patch("attn_probs.1.head-1", run["attn_probs.1"][1])
    with pytest.raises(UserError, match=r"mlp_out\.1 was not captured.*captured: z\.1, attn_probs\.1"):
        Patch("mlp_out.1", run)


def test_edits_are_equal_and_hash_by_content() -> None:
    v = noise(WIDTH)
    same = [Add(AT, v, 2, positions=(1, 2)), Add(AT, v.clone(), 2.0, positions="1:3")]
    assert len(set(same)) == 1
    others = [
        Add(AT, v),
        Add(AT, v.float()),
        Add("mlp_out.2", v),
        Add(AT, v, positions=2),
        Replace(AT, noise(N_POS, WIDTH)),
        Freeze(AT, noise(N_POS, WIDTH)),
        Patch(AT, noise(N_POS, WIDTH)),
    ]
    assert len({*others, *same}) == len(others) + 1


def test_an_edit_prints_short() -> None:
    v = torch.zeros(WIDTH)
    assert repr(Add(AT, v, 4, positions=("last_prompt", "generated"))) == (
        "Add(mlp_out.1, float32[6], scale=4.0, positions=generated,last_prompt)"
    )
    assert repr(Ablate(AT, "mean")) == "Ablate(mlp_out.1, to=mean)"
    assert repr(Add(AT, v)) == "Add(mlp_out.1, float32[6])"


V = torch.ones(WIDTH)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Add(AT, V, float("nan")), "scale is a finite number"),
        (lambda: Scale(AT, "2"), "factor is a number, not '2'"),  # type: ignore[arg-type]
        (lambda: Project(AT, V * 0), "zero or not finite"),
        (lambda: Project(AT, V * float("inf")), "zero or not finite"),
        (lambda: Cap(AT, V * float("nan"), 1.0), "zero or not finite"),
        (lambda: Cap(AT, V, 1.0, min=2.0), "at most 1.0 and at least 2.0"),
        (lambda: Swap(AT, V, 3 * V), "one and the same"),
        (lambda: Swap(AT, V, V[:3]), "one shape"),
        (lambda: Project(AT, torch.tensor(1.0)), "no axis"),
        (lambda: Project("attn_probs.1", V), "queries and keys"),
        (lambda: Ablate(AT, "men"), "'zero', 'mean' or a tensor, not 'men'"),
        (lambda: Ablate("attn_probs.1", "mean"), "lets tokens see later ones"),
        (lambda: Ablate(AT, torch.ones(N_POS, WIDTH)), "use Replace for a row per position"),
        (lambda: Freeze(AT, V), r"a row per position; this tensor has shape \[6\]"),
        (lambda: Patch("attn_probs.1", torch.ones(4, 4)), "as it is captured"),
        (lambda: Edit("mlp_outt.1"), "No point is called"),
    ],
)
@pytest.mark.usefixtures("unchecked_signatures")
def test_a_mistake_is_found_when_the_edit_is_made(make: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        make()
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_a_function_that_changes_the_shape_is_refused() -> None:
    with pytest.raises(UserError, match=r"returns a tensor of shape \[5\]; it must return shape \[5, 6\]"):
        Call(AT, lambda x: x[:, 0]).apply(X, context())


def test_an_edit_without_arithmetic_says_so() -> None:
    with pytest.raises(UserError, match="give it a method change"):
        Edit(AT).apply(X, context())
