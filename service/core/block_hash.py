"""Names of full blocks: chained digests of their tokens and of everything before them."""

import sys
from collections.abc import Iterator
from hashlib import blake2b

from service.core.types import Int32Array

DIGEST_BYTES = 16
TOKEN_BYTES = 4
_IS_LITTLE_ENDIAN = sys.byteorder == "little"


def tenant_root(model_hash: str, tenant: str) -> bytes:
    """What a chain of digests starts from when its blocks belong to one tenant alone."""
    return _root("tenant", model_hash, tenant)


def scope_root(model_hash: str, scope: str) -> bytes:
    """What a chain starts from when its blocks are shared by all tenants of `scope`. No tenant's root equals it."""
    return _root("scope", model_hash, scope)


def extend_digests(digests: bytes, root: bytes, token_ids: Int32Array, block_size: int) -> bytes:
    """`digests`, which are those of the first blocks, and the digests of all other full blocks of `token_ids`.

    One follows the other, DIGEST_BYTES each. A block's digest is BLAKE2b of its parent's digest (for the first block
    `root`) and its tokens as little-endian int32, so that it names the whole prefix up to the block's end, under one
    model and one tenant or scope.
    """
    start, end = len(digests) // DIGEST_BYTES * block_size, len(token_ids) // block_size * block_size
    if start >= end:
        return digests
    parent = digests[-DIGEST_BYTES:] or root
    data = token_bytes(token_ids[start:end])
    return digests + b"".join(chained_digests(parent, data, block_size * TOKEN_BYTES))


def split_digests(digests: bytes) -> Iterator[bytes]:
    """One after the other."""
    for offset in range(0, len(digests), DIGEST_BYTES):
        yield digests[offset : offset + DIGEST_BYTES]


def token_bytes(token_ids: Int32Array) -> bytes:
    """What of tokens is hashed."""
    return token_ids.tobytes() if _IS_LITTLE_ENDIAN else token_ids.byteswap().tobytes()


def chained_digests(parent: bytes, data: bytes, block_bytes: int) -> Iterator[bytes]:
    """The digests of the blocks whose `token_bytes` are `data`, all of `block_bytes`, as they are asked for."""
    for offset in range(0, len(data), block_bytes):
        parent = blake2b(parent + data[offset : offset + block_bytes], digest_size=DIGEST_BYTES).digest()
        yield parent


def _root(kind: str, *names: str) -> bytes:
    # Lengths keep ("ab", "c") and ("a", "bc") apart.
    parts = [name.encode("utf-8", "surrogatepass") for name in (kind, *names)]
    return blake2b(b"".join(b"%d:%b" % (len(part), part) for part in parts), digest_size=DIGEST_BYTES).digest()
