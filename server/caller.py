"""Who sends a request, told by the API key: a tenant, who sees its own requests, or an administrator, who sees all.

Knows keys, salts and names only. Neither of the first leaves this module: a tenant's name is a short digest of it.
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

    def tenant_of(self, cache_salt: str | None) -> str:
        """Whose a request is: its key's, else its salt's, which is not told either."""
        return self.tenant or (f"salt-{short_digest(cache_salt)}" if cache_salt else "")

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
    return f"key-{short_digest(key)}"


def short_digest(secret: str) -> str:
    return blake2b(secret.encode(), digest_size=4).hexdigest()
