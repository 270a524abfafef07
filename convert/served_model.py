"""config.json as the server will read it: what it refuses is refused before anything is converted or proven.

Knows nothing of formats or tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.errors import ConvertError
from model.config import ConfigError, ModelConfig


def served_model(config: Mapping[str, Any], path: Path) -> ModelConfig:
    """The model that `config` is. Raises ConvertError about `path` where the server would refuse it."""
    try:
        return ModelConfig.from_dict(config)
    except ConfigError as error:
        raise ConvertError(str(error), path) from None
