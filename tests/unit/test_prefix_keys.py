"""The names of prompts: chained digests from the front side."""

from hashlib import blake2b

import numpy as np

from service.core.block_hash import extend_digests, scope_root, tenant_root
from service.engine.prefix_keys import PrefixKeys

PROMPT = np.arange(1, 11, dtype=np.int32)


def test_a_digest_is_blake2b_of_the_parents_digest_and_the_blocks_tokens():
    digests = extend_digests(b"", b"root", PROMPT, 4)
    first = blake2b(b"root" + np.array([1, 2, 3, 4], "<i4").tobytes(), digest_size=16).digest()
    second = blake2b(first + np.array([5, 6, 7, 8], "<i4").tobytes(), digest_size=16).digest()
    assert digests == first + second  # the last two tokens fill no block


def test_digests_are_the_same_whether_they_are_made_at_once_or_bit_by_bit():
    by_bits = b""
    for end in (1, 2, 5, 5, 10):
        by_bits = extend_digests(by_bits, b"root", PROMPT[:end], 2)
    assert by_bits == extend_digests(b"", b"root", PROMPT, 2)


def test_tenants_models_and_scopes_never_share_a_root():
    roots = [tenant_root("m", "a"), tenant_root("m", "b"), tenant_root("n", "a"), scope_root("m", "a")]
    roots += [tenant_root("", "ma"), tenant_root("ma", ""), tenant_root("m", "")]
    assert len(set(roots)) == len(roots)


def test_keys_are_the_tenants_own_unless_the_operator_names_a_scope():
    private, shared = PrefixKeys("m"), PrefixKeys("m", shared_scope="all")
    assert private.of(PROMPT, "a", 4) != private.of(PROMPT, "b", 4)
    assert shared.of(PROMPT, "a", 4) == shared.of(PROMPT, "b", 4)
    assert shared.of(PROMPT, "all", 4) != private.of(PROMPT, "all", 4)


def test_nothing_is_hashed_while_the_cache_is_off():
    assert PrefixKeys("m", is_on=False).of(PROMPT, "a", 4) == (tenant_root("m", "a"), b"")
