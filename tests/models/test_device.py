"""The device policy, on machines made up here."""

import pytest
import torch

from interp.errors import UserError
from interp.models.device import choose, parse_dtype


def quiet(line: str) -> None:
    """A report that nobody reads."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    def make(cuda: int = 0, mps: bool = False, macos14: bool = True, bf16: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation
        )
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: macos14)

    return make


def test_cuda_before_mps_before_cpu(machine) -> None:
    machine(cuda=2, mps=True)
    assert choose(None, None, "float32", quiet)[0] == torch.device("cuda:0")
    machine(mps=True)
    assert choose(None, None, "float32", quiet)[0] == torch.device("mps")
    machine()
    assert choose("auto", None, "float32", quiet)[0] == torch.device("cpu")


@pytest.mark.parametrize(
    ("there", "checkpoint", "expected"),
    [
        ({}, "float32", torch.float32),
        ({}, "bfloat16", torch.bfloat16),
        ({}, torch.bfloat16, torch.bfloat16),
        ({}, "torch.float64", torch.float64),
        ({}, "float16", torch.float32),
        ({}, None, torch.float32),
        ({}, "float8_e4m3fn", torch.float32),
        ({"cuda": 1}, "float16", torch.float16),
        ({"cuda": 1}, "bfloat16", torch.bfloat16),
        ({"cuda": 1, "bf16": False}, "bfloat16", torch.float32),
        ({"mps": True}, "bfloat16", torch.bfloat16),
        ({"mps": True, "macos14": False}, "bfloat16", torch.float32),
        ({"mps": True}, "float64", torch.float32),
    ],
)
def test_the_checkpoints_dtype_is_kept_where_the_device_can_hold_it(machine, there, checkpoint, expected) -> None:
    machine(**there)
    assert choose(None, None, checkpoint, quiet)[1] == expected


def test_a_wish_is_followed(machine) -> None:
    machine(cuda=2)
    assert choose("cuda:1", "bf16", "float32", quiet) == (torch.device("cuda:1"), torch.bfloat16)
    assert choose("cpu", "float16", "float32", quiet) == (torch.device("cpu"), torch.float16)


def test_the_choice_is_said_in_one_line_with_its_reason(machine) -> None:
    machine()
    said: list[str] = []
    choose(None, None, "float16", said.append)
    assert said == [
        "Running on cpu (neither CUDA nor MPS is there) in float32 (not the checkpoint's float16: float16 on the CPU "
        "is slow and its narrow range overflows)."
    ]


@pytest.mark.parametrize(
    ("there", "device", "dtype", "message"),
    [
        ({}, "gpu", None, "Unknown device 'gpu'"),
        ({}, "meta", None, "Unknown device 'meta'"),
        ({}, "cuda", None, "no CUDA device"),
        ({"cuda": 1}, "cuda:3", None, "last CUDA device is cuda:0"),
        ({}, "mps", None, "MPS is not there"),
        ({}, None, "float33", "Unknown dtype 'float33'"),
        ({"mps": True}, None, "float64", "MPS has no float64"),
        ({"mps": True, "macos14": False}, None, "bfloat16", "macOS 14"),
    ],
)
def test_what_is_not_there_is_refused_in_one_sentence(machine, there, device, dtype, message) -> None:
    machine(**there)
    with pytest.raises(UserError, match=message) as error:
        choose(device, dtype, "float32", quiet)
    assert "\n" not in str(error.value)


def test_dtype_names() -> None:
    assert parse_dtype("BF16") == parse_dtype("torch.bfloat16") == torch.bfloat16
    assert parse_dtype("half") == torch.float16
    assert parse_dtype("double") == torch.float64
