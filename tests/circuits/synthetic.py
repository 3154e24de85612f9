"""Random attribution edges that are consistent: every row sums to its pre-activation, and edges lead upwards."""

import numpy as np
import scipy.sparse as sp

from interp.circuits.graph import Edges, NodeKind, Nodes

WORDS = ["<bos>", "The", " capital", " of", " France", " is", " a", ' "quoted"', " </script>", "\n", " été", " 東京"]


def synthetic_edges(
    seed: int = 0,
    n_layers: int = 3,
    n_pos: int = 4,
    features_per_cell: int = 2,
    n_logits: int = 3,
    density: float = 0.6,
    positions: bool = True,
    dtype: type = np.float64,
) -> Edges:
    """Features, errors, tokens, positions, biases and logits; no feature at position 0, which is excluded."""
    rng = np.random.default_rng(seed)
    table: list[tuple[int, int, int, int, float]] = []
    for pos in range(n_pos):
        table.append((NodeKind.TOKEN, -1, pos, 100 + pos, 1.0))
        if positions:
            table.append((NodeKind.POSITION, -1, pos, -1, 1.0))
    for layer in range(n_layers):
        for pos in range(n_pos):
            latents = rng.choice(5000, size=features_per_cell, replace=False) if pos else []
            table += [(NodeKind.FEATURE, layer, pos, int(latent), float(rng.gamma(2.0))) for latent in latents]
            table.append((NodeKind.ERROR, layer, pos, -1, 1.0))
            table.append((NodeKind.BIAS, layer, pos, -1, 1.0))
    probabilities = np.sort(rng.dirichlet(np.ones(n_logits + 1))[:n_logits])[::-1]
    vocabulary = rng.choice(30_000, size=n_logits, replace=False)
    table += [(NodeKind.LOGIT, n_layers, n_pos - 1, int(v), p) for v, p in zip(vocabulary, probabilities, strict=True)]
    nodes = Nodes(*(np.array(column) for column in zip(*table, strict=True)))

    targets, sources, weights = [], [], []
    is_bias = nodes.is_kind(NodeKind.BIAS)
    for row in np.flatnonzero(nodes.is_kind(NodeKind.FEATURE, NodeKind.LOGIT)):
        below = np.flatnonzero((nodes.layer < nodes.layer[row] + is_bias) & (nodes.pos <= nodes.pos[row]))
        picked = below[rng.random(len(below)) < density]
        picked = picked if len(picked) else below[:1]
        targets += [row] * len(picked)
        sources += picked.tolist()
        weights += (rng.standard_normal(len(picked)) * rng.gamma(0.5, size=len(picked)) + 0.01).tolist()
    matrix = sp.csr_array((np.array(weights, dtype=dtype), (targets, sources)), shape=(len(nodes), len(nodes)))
    has_row = np.diff(matrix.indptr) > 0
    pre_activation = np.where(has_row, np.asarray(matrix.astype(np.float64).sum(axis=1)).ravel(), np.nan)
    tokens = [WORDS[pos % len(WORDS)] for pos in range(n_pos)]
    return Edges(
        nodes=nodes,
        matrix=matrix,
        pre_activation=pre_activation,
        prompt="".join(tokens[1:]),
        prompt_tokens=tokens,
        token_ids=[100 + pos for pos in range(n_pos)],
        n_layers=n_layers,
        scan="example/model-270m",
        excluded_positions=[0],
        logit_strings={int(v): f' out"{i}' for i, v in enumerate(vocabulary)},
        settings={"max_n_logits": 10, "desired_logit_prob": 0.95, "max_feature_nodes": 2000},
    )


def hand_edges() -> Edges:
    """Two tokens, one feature, one error and one logit; small enough to compute everything on paper.

    feature 0_7_1 = 3·token0 − 1·token1;  logit 5 = 2·feature + 1·error − 1·token1, with probability 0.5
    """
    nodes = Nodes(
        kind=np.array([NodeKind.TOKEN, NodeKind.TOKEN, NodeKind.FEATURE, NodeKind.ERROR, NodeKind.LOGIT]),
        layer=np.array([-1, -1, 0, 1, 2]),
        pos=np.array([0, 1, 1, 1, 1]),
        index=np.array([11, 12, 7, -1, 5]),
        value=np.array([1, 1, 2, 1, 0.5]),
    )
    dense = np.zeros((5, 5))
    dense[2, [0, 1]] = 3, -1
    dense[4, [1, 2, 3]] = -1, 2, 1
    return Edges(
        nodes=nodes,
        matrix=sp.csr_array(dense),
        pre_activation=np.array([np.nan, np.nan, 2, np.nan, 2]),
        prompt="Hello world",
        prompt_tokens=["Hello", " world"],
        token_ids=[11, 12],
        n_layers=2,
        scan="tiny",
        logit_strings={5: "!"},
    )
