"""Case 35: a model split over processes by tensor parallelism is refused; its tensors would be shards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from interp.engines.load import wrap
from interp.errors import UserError
from interp.models.parameters import refuse_shards

TWO_PROCESSES = """
import sys
import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from interp.engines.load import wrap
from interp.errors import UserError

split = AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=DistributedConfig(tp_plan="auto"))
local = split.model.layers[0].self_attn.q_proj.weight.to_local()
try:
    wrap(split)
except UserError as error:
    print(f"{local.shape[0]} rows of 24: {error}", flush=True)
torch.distributed.destroy_process_group()
"""


def test_transformers_split_over_two_processes_is_refused_in_each(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        vocab_size=64,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    (tmp_path / "split.py").write_text(TWO_PROCESSES)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "split.py", "tiny"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))}
    done = subprocess.run(
        [sys.executable, *launch],
        cwd=tmp_path,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    sentence = (
        "12 rows of 24: LlamaForCausalLM is split over processes (tp_size=2), so its points would be shards: load it "
        "without tp_plan, and with device_map='auto' where it is larger than one device."
    )
    assert done.stdout.count(sentence) == 2, done.stderr


def test_a_parameter_that_is_a_dtensor_is_named(tmp_path: Path) -> None:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Sequential(nn.Linear(4, 6))
    refuse_shards(model)
    init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model[0].weight = nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)]))
        with pytest.raises(UserError, match=r"0\.weight is a DTensor"):
            wrap(model)
    finally:
        destroy_process_group()
