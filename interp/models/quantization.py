"""How a checkpoint's weights are packed while it is loaded: by name, or as transformers describes it."""

from typing import TYPE_CHECKING, Any

from interp.errors import UserError

if TYPE_CHECKING:
    import torch

BITSANDBYTES = ("bitsandbytes-4bit", "bitsandbytes-8bit")


def quantization_config(wanted: Any, dtype: "torch.dtype") -> Any:
    """What transformers takes as `quantization_config`; None for None.

    Four bits are unpacked to `dtype` for each product. Raises `UserError` for another name, or where bitsandbytes is
    not installed.
    """
    if not isinstance(wanted, str):
        return wanted
    if wanted not in BITSANDBYTES:
        raise UserError(
            f"Unknown quantization {wanted!r}; choose {' or '.join(BITSANDBYTES)}, or give a quantization_config of "
            "transformers."
        )
    from importlib.util import find_spec

    from transformers import BitsAndBytesConfig

    if find_spec("bitsandbytes") is None:
        raise UserError(f"{wanted} needs bitsandbytes, which is not installed: pip install 'interp[quantised]'.")
    if wanted == "bitsandbytes-8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
