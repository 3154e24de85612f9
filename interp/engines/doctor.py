"""Running the proofs on a loaded engine, and refusing what they contradict."""

import torch

from interp.engines.base import Request
from interp.engines.local import LocalEngine
from interp.models.anatomy import Refusal
from interp.models.proofs import Claim, check, needed
from interp.points import Address

PROBE_LENGTHS = (7, 4)
"""Two unequal prompts, so that padding is part of what is proven."""


def prove(engine: LocalEngine) -> list[Claim]:
    """Every claim of the model's points, checked on a batch of two random prompts of unequal length."""
    generator = torch.Generator().manual_seed(1)
    every = needed(engine.anatomy)
    requests = [
        Request(torch.randint(0, engine.model.d_vocab, (n,), generator=generator).tolist(), capture=every)
        for n in PROBE_LENGTHS
    ]
    return check(engine.anatomy, [result.capture for result in engine.run(requests)])


def refuse_unproven(engine: LocalEngine) -> list[Claim]:
    """Run the proofs and take away every point that a failed claim vouched for, or none vouches for; the claims."""
    return refuse(engine, prove(engine))


def refuse(engine: LocalEngine, claims: list[Claim]) -> list[Claim]:
    """Take away what `claims`, which are those of `prove`, contradict or leave out; the same claims."""
    vouched = {(name, claim.layer) for claim in claims for name in claim.points}
    # Where the stream begins is known by what the first block does with it, even if not by what it is made of.
    vouched |= {("resid_pre", 0) for claim in claims if claim.proof == "P1" and claim.layer == 0}
    for address in needed(engine.anatomy):
        if (address.name, address.layer) not in vouched:
            engine.anatomy.refused[address.whole] = Refusal("no equation of this model reads it, so nothing proves it")
    for claim in claims:
        if not claim.holds:
            where = "" if claim.layer is None else f" at layer {claim.layer}"
            reason = (
                f"its equation fails{where}: {claim.equation} ({claim.proof}) is off by {claim.difference:.3g} units "
                f"of rounding where {claim.tolerance:.3g} are explained"
            )
            for name in claim.points:
                engine.anatomy.refused[Address(name, claim.layer)] = Refusal(reason)
    return claims
