"""What prompts are called in the prefix cache: computed on the front side, so that steps do not wait for it."""

from dataclasses import dataclass
from typing import NamedTuple

from service.core.block_hash import extend_digests, scope_root, tenant_root
from service.core.types import Int32Array


class PromptKeys(NamedTuple):
    """What one prompt is called."""

    cache_root: bytes
    block_digests: bytes  # of its full blocks, in order


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

    def of(self, token_ids: Int32Array, tenant: str, block_size: int) -> PromptKeys:
        """The keys of the tenant's prompt. Any thread."""
        if self.shared_scope:
            root = scope_root(self.model_hash, self.shared_scope)
        else:
            root = tenant_root(self.model_hash, tenant)
        return PromptKeys(root, extend_digests(b"", root, token_ids, block_size) if self.is_on else b"")
