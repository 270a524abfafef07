"""Who sends a request, told by the API key: a tenant, who sees its own requests, or an administrator, who sees all.

Knows keys and names only. A key never leaves this module: a tenant's name is a short digest of it.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str = ""
    sees_all: bool = True

    def sees(self, tenant: str) -> bool:
        return self.sees_all or tenant == self.tenant


class Keys:
    """The configured keys. Without any, everybody may do everything."""

    def __init__(self, api_keys: Iterable[str], admin_keys: Iterable[str]) -> None:
        admins = {key.encode(): Caller("admin") for key in admin_keys}
        tenants = {key.encode(): Caller(tenant_name(key), sees_all=False) for key in api_keys}
        self._callers = tenants | admins

    def caller(self, sent: bytes) -> Caller | None:
        """Every key is compared, each in constant time, so that timing tells nothing."""
        if not self._callers:
            return Caller()
        matching = [caller for key, caller in self._callers.items() if hmac.compare_digest(sent, key)]
        return matching[0] if matching else None


def tenant_name(key: str) -> str:
    return f"key-{blake2b(key.encode(), digest_size=4).hexdigest()}"
