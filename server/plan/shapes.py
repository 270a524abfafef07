"""The tensors that a config implies, for a plan without weights.

Knows nothing of files or of which tensors a decoder has (model/tensor_shapes.py).
"""

from __future__ import annotations

import math

from model.config import ModelConfig
from model.kv_cost import DTYPE_BYTES
from model.tensor_shapes import tensor_shapes
from server.plan.headers import StoredTensor


def tensors_of(config: ModelConfig) -> tuple[StoredTensor, ...]:
    """Every tensor of the model, stored in the config's dtype."""
    size, shapes = DTYPE_BYTES.get(config.dtype, 2), tensor_shapes(config)
    return tuple(StoredTensor(name, shape, config.dtype, math.prod(shape) * size) for name, shape in shapes.items())
