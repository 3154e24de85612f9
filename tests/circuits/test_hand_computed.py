"""Every edge of one small graph, computed by hand.

One layer, width 4, one head of width 2, vocabulary 3, no epsilon. Prompt A B.

    A = (1, 1, 1, 1)    B = (1, -1, 1, -1)                               both have root mean square 1
    attention norm      gain (2, 1, 1, 1):  reads A' = (2, 1, 1, 1), B' = (2, -1, 1, -1)
    W_Q = 0             uniform pattern: position 0 sees itself, position 1 half of each
    W_V                 the first two channels: v(A) = (2, 1), v(B) = (2, -1);  z0 = (2, 1), z1 = (2, 0)
    W_O                 columns c0 = (1, 2, 1, 2), c1 = (-1, -7, -1, -3)
    stream              mid0 = A + 2 c0 + c1 = (2, -2, 2, 2), scale 2;  mid1 = B + 2 c0 = (3, 3, 3, 3), scale 3
    MLP norm            gain (1, 1, 1, 3):  mlp_in0 = (1, -1, 1, 3), mlp_in1 = (1, 1, 1, 3)
    MLP                 returns 0, so the errors are minus the prediction
    latent 0            encoder (1, 0, 0, 1), bias 1: fires 5 at both;       decoder (1, 0, -1, 0)
    latent 1            encoder (0, 2, 0, 0), bias -1: -3 and 1, fires at B; decoder (0, 3, 0, 0)
    b_dec               (1, 0, 0, 0)
    W_skip              channel 1 gets twice channel 0
    errors              error0 = -(6, 2, -5, 0);  error1 = -(6, 5, -5, 0)
    final norm          of mid1, scale 3, gain (1, 2, 1, 1): (1, 2, 1, 1)
    W_U                 (3, 0, 0, 0), (0, 3, 0, 3), (0, 0, 6, 0): logits 3, 9, 6, mean 6;  mean row (1, 1, 2, 1)
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from interp.circuits.attribution import AttributionComputer, AttributionConfig
from interp.circuits.replacement_model import ReplacementModel
from interp.dictionaries import Transcoder
from interp.engines.load import wrap


def model() -> nn.Module:
    config = LlamaConfig(
        hidden_size=4,
        intermediate_size=5,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        vocab_size=3,
        rms_norm_eps=0.0,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=1,
    )
    made = LlamaForCausalLM(config).double().eval().requires_grad_(False)
    block: Any = made.model.layers[0]
    for weight, rows in (
        (made.model.embed_tokens.weight, [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, 1]]),
        (block.input_layernorm.weight, [2, 1, 1, 1]),
        (block.self_attn.q_proj.weight, [[0, 0, 0, 0], [0, 0, 0, 0]]),
        (block.self_attn.v_proj.weight, [[1, 0, 0, 0], [0, 1, 0, 0]]),
        (block.self_attn.o_proj.weight, [[1, -1], [2, -7], [1, -1], [2, -3]]),
        (block.post_attention_layernorm.weight, [1, 1, 1, 3]),
        (made.model.norm.weight, [1, 2, 1, 1]),
        (made.lm_head.weight, [[3, 0, 0, 0], [0, 3, 0, 3], [0, 0, 6, 0]]),
    ):
        weight.copy_(torch.tensor(rows))
    block.mlp.down_proj.weight.zero_()
    return made


def transcoder() -> Transcoder:
    made = Transcoder(d_in=4, d_out=4, n_latents=2, k=2).double().requires_grad_(False)
    made.W_enc.copy_(torch.tensor([[1, 0, 0, 1], [0, 2, 0, 0]]))
    made.b_enc.copy_(torch.tensor([1, -1]))
    made.W_dec.copy_(torch.tensor([[1, 0, -1, 0], [0, 3, 0, 0]]))
    made.b_dec.copy_(torch.tensor([1, 0, 0, 0]))
    assert made.W_skip is not None
    made.W_skip[1, 0] = 2
    return made


@pytest.fixture(scope="module")
def edges() -> dict[str, dict[str, float]]:
    """Target → source → weight, by node ids."""
    rm = ReplacementModel(wrap(model(), prove=False), {0: transcoder()})
    state = rm.build([0, 1])
    found = AttributionComputer(rm, AttributionConfig(target_tokens=(1,))).compute_full_graph(state, [0, 1])
    coo = found.matrix.tocoo()
    table: dict[str, dict[str, float]] = {}
    for target, source, weight in zip(coo.row, coo.col, coo.data, strict=True):
        table.setdefault(found.node_ids[target], {})[found.node_ids[source]] = float(weight)
    for row in np.flatnonzero(~np.isnan(found.pre_activation)):
        assert sum(table[found.node_ids[row]].values()) == pytest.approx(found.pre_activation[row], abs=1e-14)
    return table


def test_only_these_nodes_have_inputs(edges):
    assert sorted(edges) == ["0_0_0", "0_0_1", "0_1_1", "2_1_1"]


def test_the_inputs_of_a_latent_at_the_first_position(edges):
    """Encoder times gain over scale 2: (1, 0, 0, 3) / 2. Of A that is 2. Through W_O: (7/2, -5), through W_V and the
    attention norm's gain: (7, -5, 0, 0), of A 2 more. The encoder's bias is 1: 5 in all."""
    assert edges["0_0_0"] == pytest.approx({"E_0_0": 4, "0_bias_0": 1}, abs=1e-14)


def test_the_inputs_of_a_latent_at_the_second_position(edges):
    """(1, 0, 0, 3) / 3: of B -2/3. Through W_O (7/3, -10/3), half of it to each position, with the gain
    (14, -10, 0, 0) / 6: of A 2/3, of B 4."""
    assert edges["0_0_1"] == pytest.approx({"E_0_0": 2 / 3, "E_1_1": 10 / 3, "0_bias_1": 1}, abs=1e-14)


def test_the_inputs_of_the_other_latent(edges):
    """(0, 2, 0, 0) / 3: of B -2/3. Through W_O (4/3, -14/3), half, with the gain (4/3, -7/3, 0, 0): of A -1,
    of B 11/3."""
    assert edges["0_1_1"] == pytest.approx({"E_0_0": -1, "E_1_1": 3, "0_bias_1": -1}, abs=1e-14)


def test_the_inputs_of_the_logit(edges):
    """Row less mean row (-1, 2, -2, 2), times gain over scale 3: G = (-1, 4, -2, 2) / 3.

    Latent 0: 5 · (-1 + 2) / 3. Latent 1: 1 · 12 / 3. Error: -(-6 + 20 + 10) / 3. b_dec: -1/3.
    Skip path: (8/3, 0, 0, 0) at mlp_in, (8/9, 0, 0, 0) at mid1, where all is (5, 12, -6, 6) / 9: of B -19/9.
    Through W_O (35, -101) / 9, half, with the gain (70, -101, 0, 0) / 18: of A -31/18, of B 171/18.
    Latent and error of A feed nothing: there is no attention above them. The sum is 9 - 6 = 3.
    """
    assert edges["2_1_1"] == pytest.approx(
        {
            "0_0_1": 5 / 3,
            "0_1_1": 4,
            "0_-1_1": -8,
            "0_bias_1": -1 / 3,
            "E_0_0": -31 / 18,
            "E_1_1": 133 / 18,
        },
        abs=1e-14,
    )
