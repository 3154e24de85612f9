"""`interp generate MODEL --prompt …`: a continuation, token by token, steered by a file of edits and captured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from interp.scripts.console import check_output, console, say
from interp.scripts.loading import Loading


@dataclass
class Generate(Loading):
    """Continue one prompt; the text appears as it comes."""

    model: Annotated[str, tyro.conf.Positional]
    """Packaged name, checkpoint directory, GGUF file or hub id."""
    prompt: str
    """Text; the tokenizer adds BOS if that is its default."""
    chat: bool = False
    """Take the prompt as a user's message and put it through the tokenizer's chat template."""
    max_new_tokens: int = 64
    """Tokens to generate at most."""
    temperature: float = 0.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Only the k likeliest tokens."""
    top_p: float | None = None
    """Only the smallest set of likeliest tokens whose probabilities reach p."""
    min_p: float | None = None
    """Only tokens at least p times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that occurred, multiplies negative ones; 1 is none."""
    seed: int | None = None
    """Of the draws; one is drawn and told if left out."""
    stop: tuple[str, ...] = ()
    """Texts that end the continuation."""
    steer: Path | None = None
    """JSON file of edits, as interp.edits.to_json writes it."""
    capture: tuple[str, ...] = ()
    """Addresses, or hook names, to capture while decoding, such as resid_post.10."""
    out: Path = Path("acts.safetensors")
    """File for what is captured: one tensor per address, [pos, ...], and the tokens."""
    compile: bool = False
    """Decode by a compiled graph: about a minute before the first token, faster ones after it."""
    engine: str = "auto"
    """auto, eager or nnsight; docs/engines.md says what each serves."""


def run(config: Generate) -> None:
    """Write the text, and the file where something is captured."""
    from interp.edits import from_json
    from interp.engines.base import Request
    from interp.engines.sampling import Sampling
    from interp.errors import UserError
    from interp.names import hooks
    from interp.scripts.capture import save

    for point in config.capture:
        hooks.check(point)
    if config.capture:
        check_output(config.out.parent)
    sampling = Sampling(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        seed=config.seed,
        stop=config.stop,
    )
    edits = []
    if config.steer is not None:
        try:
            edits = from_json(config.steer.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"Cannot read the edits in {config.steer}: {error.strerror}.") from None
    engine = config.load(config.model, engine=config.engine, compile=config.compile)
    tokens = engine.to_chat_tokens([{"role": "user", "content": config.prompt}]) if config.chat else config.prompt
    addresses = [hooks.address(point, engine.model.blocks) for point in config.capture]
    request = Request(tokens, capture=addresses, edits=edits, max_new_tokens=config.max_new_tokens, sampling=sampling)
    result = None
    for step in engine.stream(request):
        console.file.write(step.text)
        console.file.flush()
        result = step.result
    assert result is not None
    say("")
    told = "" if result.provenance.seed is None else f", seed {result.provenance.seed}"
    n_new = len(result.tokens) - result.n_prompt
    say(f"({n_new} tokens, ended by {result.finish_reason}, {len(edits)} edits, {result.provenance.engine}{told})")
    if addresses:
        save(config.out, result, engine.model, config.prompt)
