"""The base of every request body.

Knows no fields.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """Types are strict ("7" is no number, true is no number), and NaN and infinities are refused everywhere."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
