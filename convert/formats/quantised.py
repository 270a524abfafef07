"""Hugging Face folders whose weights are quantised (fp8, compressed-tensors, GPTQ, AWQ, MLX): dequantised or refused.

Knows nothing of how a scheme computes a weight (quantised_schemes.py). A stored tensor that no weight was made of, and
that is not plain, stops the conversion: a scale is never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from convert.errors import ConvertError
from convert.formats.compressed_tensors import Fp8, compressed_tensors
from convert.formats.huggingface_config import with_defaults
from convert.formats.huggingface_leftovers import leftovers
from convert.formats.packed_matrices import Awq, Gptq, Mlx
from convert.formats.quantised_scheme import Scheme
from convert.source import Source, SourceTensor

SCHEMES: dict[str, Callable[[Path, Mapping[str, Any]], Scheme]] = {
    "fp8": Fp8, "compressed-tensors": compressed_tensors, "gptq": Gptq, "awq": Awq, "mlx": Mlx,
}  # fmt: skip
KEYS = ("quantization_config", "compression_config", "quantization")
NOT_OF_WEIGHTS = {
    "input_scale": "scale of activations, which stay in full precision",
    "input_zero_point": "zero point of activations, which stay in full precision",
    "k_scale": "scale of a quantised KV cache, which is not part of the weights",
    "v_scale": "scale of a quantised KV cache, which is not part of the weights",
}


def quantised_source(
    folder: Path, config: dict[str, Any], said: Mapping[str, Any], table: dict[str, SourceTensor],
    tokenizer_files: Callable[[], dict[str, str]],
) -> Source:  # fmt: skip
    """said: how it is quantised (canonical.quantisation). ConvertError for a scheme that is not known exactly."""
    plain = {key: value for key, value in config.items() if key not in KEYS}
    entries, method = with_defaults(folder / "config.json", plain), str(said["quant_method"])
    if method not in SCHEMES:
        known = ", ".join(sorted(SCHEMES))
        raise ConvertError(f"weights quantised as {method!r} are not supported (known: {known})", folder)
    scheme = SCHEMES[method](folder / "config.json", said)
    derived = _weights(scheme, table)
    taken = {part for tensor in derived.values() for part in tensor.parts}
    dropped = {name: reason for name in table if (reason := NOT_OF_WEIGHTS.get(name.rsplit(".", 1)[-1]))}
    dropped = {name: reason for name, reason in dropped.items() if name not in taken} | leftovers(folder, config, table)
    return Source(
        path=folder, format=f"huggingface-{method}", architecture=str(config["model_type"]), pairing="split_half",
        config=entries, table=table, raw=plain, derived=derived, dropped=dropped,
        names={name: name for name in table if name not in taken and name not in dropped},
        unused={key: "says how weights were quantised" for key in KEYS if key in config},
        tokenizer_files=tokenizer_files,
    )  # fmt: skip


def _weights(scheme: Scheme, table: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """Hugging Face name -> the weight made of the parts that stand beside each other in `table`."""
    modules: dict[str, dict[str, SourceTensor]] = {}
    for name, tensor in table.items():
        module, _, leaf = name.rpartition(".")
        modules.setdefault(module, {})[leaf] = tensor
    made = {}
    for module, leaves in modules.items():
        values = leaves.get(scheme.values)
        if values is None or values.dtype not in scheme.dtypes:
            continue
        parts = {leaf: tensor for leaf, tensor in leaves.items() if leaf in (scheme.values, *scheme.others)}
        made[f"{module}.weight"] = scheme.weight(f"{module}.weight", parts)
    return made
