"""What prompts are called in the prefix cache: computed on the front side, so that steps do not wait for it."""

from dataclasses import dataclass

from service.core.block_hash import extend_digests, scope_root, tenant_root
from service.core.types import Int32Array


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """Derives digests from the tenant, not from a salt that a caller could choose.

    A tenant is who the metadata `x-tenant-id` says it is: where callers are not trusted, a proxy must set it.

    Cached blocks are private to a tenant, unless the operator names a `shared_scope`: then all tenants share them, and
    whoever guesses a prompt can tell from the time to the first token that another has sent it.
    """

    model_hash: str = ""
    shared_scope: str = ""
    is_on: bool = True

    def of(self, token_ids: Int32Array, tenant: str, block_size: int) -> tuple[bytes, bytes]:
        """`Request.cache_root` and `Request.block_digests` of a prompt."""
        if self.shared_scope:
            root = scope_root(self.model_hash, self.shared_scope)
        else:
            root = tenant_root(self.model_hash, tenant)
        return root, extend_digests(b"", root, token_ids, block_size) if self.is_on else b""
