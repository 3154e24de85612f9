"""`interp doctor MODEL`: every equation on every layer, the measured difference, and the verdict.

`interp doctor --families`: the same on a tiny random model of every causal-LM type, as one page.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from interp.scripts.console import bars, console, say
from interp.scripts.loading import Loading


@dataclass
class Doctor(Loading):
    """Check every claim that the names make about a model; exit status 1 if one fails."""

    model: Annotated[str, tyro.conf.Positional] = ""
    """Packaged name, checkpoint directory, GGUF file or hub id; with --families, one type instead of all."""
    families: bool = False
    """Build a tiny random model of every causal-LM type of transformers and prove each."""
    out: Path | None = None
    """With --families: write the table to this file as Markdown."""


def run(config: Doctor) -> int:
    """Print the table of proofs; 1 if a claim fails."""
    from interp.engines.doctor import refuse_unproven
    from interp.engines.echo import echo
    from interp.errors import UserError

    if config.families:
        return _families(config)
    if not config.model:
        raise UserError("Name a model, or ask for --families.")
    if config.out is not None:
        raise UserError("--out belongs to --families; one model's table is printed.")
    engine = config.load(config.model, prove=False)
    claims = refuse_unproven(engine)
    claims += echo(engine)
    print_claims(claims)
    failed = [claim for claim in claims if not claim.holds]
    for claim in failed:
        if claim.proof == "P7":
            where = "" if claim.layer is None else f" at layer {claim.layer}"
            say(f"A write at {claim.points[0]}{where} is none: {claim.equation} is off by {claim.difference:.3g} ε.")
    say(summary(claims))
    return 1 if failed else 0


def _families(config: Doctor) -> int:
    """Print one line per family that is not proven, and the count; 1 if the one that was asked for is not."""
    from interp.engines.families import examine_all, families, page
    from interp.errors import UserError
    from interp.files import atomic_path

    every = families()
    if config.model and config.model not in every:
        raise UserError(f"transformers has no causal-LM type {config.model!r}.")
    chosen = [config.model] if config.model else every
    with bars() as update:
        verdicts = examine_all(chosen, progress=lambda done, total: update("families", done, total, "families"))
    for verdict in verdicts:
        if verdict.status != "proven":
            say(f"{verdict.family}: {verdict.status}, {verdict.reason}.")
    proven = sum(verdict.status == "proven" for verdict in verdicts)
    say(f"{proven} of {len(verdicts)} families proven.")
    if config.out is not None:
        with atomic_path(config.out) as beside:
            beside.write_text(page(verdicts), encoding="utf-8")
        say(f"Table: {config.out}")
    return 1 if config.model and verdicts[0].status != "proven" else 0


def print_claims(claims) -> None:
    """One row per equation, and per point that is written: the worst difference and what rounding explains."""
    from rich.table import Column, Table

    equation = Column("equation", overflow="fold")
    table = Table("proof", equation, "checked", "largest difference", "limit of rounding", "verdict")
    by_equation: dict[tuple[str, str], list] = {}
    for claim in claims:
        written = f"{claim.points[0]} echoes: it reads back as written, and what follows is computed from it"
        text = written if claim.proof == "P7" else claim.equation
        by_equation.setdefault((claim.proof, text), []).append(claim)
    for (proof, equation), group in sorted(by_equation.items()):
        worst = max(group, key=lambda claim: claim.difference / claim.tolerance)
        where = "" if worst.layer is None else f" at layer {worst.layer}"
        bad = sorted({str(claim.layer) for claim in group if not claim.holds})
        verdict = "holds" if not bad else f"FAILS at {', '.join(bad)}"
        table.add_row(
            proof, equation, str(len(group)), f"{worst.difference:.3g} ε{where}", f"{worst.tolerance:.3g} ε", verdict
        )
    console.print(table)


def summary(claims) -> str:
    """How many claims were checked and how far the worst was off."""
    failed = sum(not claim.holds for claim in claims)
    worst = max(claims, key=lambda claim: claim.difference / claim.tolerance)
    verdict = "all hold" if not failed else f"{failed} FAIL"
    return (
        f"{len(claims)} claims checked, {verdict}; nearest to its limit: {worst.equation} with {worst.difference:.3g} "
        f"of {worst.tolerance:.3g} units of rounding (1 unit = epsilon of the dtype times the summands' magnitude)."
    )
