from __future__ import annotations

import random

from engine_workers.blocks.block_header import BlockHeader
from engine_workers.blocks.namespace import Fingerprint
from engine_workers.cache_server.tenant_quota import TenantQuota
from tests.engine_workers.cache_server.block_names import header_of, name_of


def red(number: int, parent: int | None = None) -> BlockHeader:
    return header_of(number, parent, extra_keys=("red",) if parent is None else ())


def test_a_tenant_over_its_quota_loses_its_own_unused_blocks_and_nobody_elses() -> None:
    quota = TenantQuota(quota_bytes=10)
    others = header_of(100, extra_keys=("blue",))
    assert quota.add(others, 10) == []
    for number in range(10):
        assert quota.add(red(number), 1) == []
    quota.touch(name_of(0))
    assert quota.add(red(10), 1) == [name_of(1)]
    assert quota.used_bytes(quota.tenant_of(others)) == 10


def test_a_tenants_prefixes_shrink_from_their_ends() -> None:
    quota = TenantQuota(quota_bytes=3)
    quota.add(red(0), 1)
    quota.add(red(1, parent=0), 1)
    quota.add(red(2, parent=1), 1)
    assert quota.add(red(3), 2) == [name_of(2), name_of(1)]


def test_what_is_pinned_keeps_its_place_and_what_finds_none_is_refused() -> None:
    quota = TenantQuota(quota_bytes=2)
    for number in (0, 1):
        quota.add(red(number), 1)
        quota.pin(name_of(number))
    assert quota.add(red(2), 1) == [name_of(2)]
    assert quota.add(red(3), 3) == [name_of(3)]
    quota.unpin(name_of(0))
    assert quota.add(red(2), 1) == [name_of(0)]
    assert quota.used_bytes(quota.tenant_of(red(0))) == 2


def test_a_block_belongs_to_the_tenant_of_its_parent() -> None:
    quota = TenantQuota(quota_bytes=100)
    quota.add(red(0), 1)
    quota.add(header_of(1, parent=0), 1)
    quota.add(header_of(2, parent=1), 1)
    assert quota.used_bytes(quota.tenant_of(red(0))) == 3


def test_tenants_are_told_apart_by_namespace_and_salt_and_by_nothing_else() -> None:
    quota = TenantQuota(quota_bytes=1)
    tenant = quota.tenant_of(red(0))
    with_adapter = header_of(1, extra_keys=("sql", "red"), lora_name="sql")
    with_image = header_of(2, extra_keys=(("image", 3), "red"))
    assert quota.tenant_of(with_adapter) == tenant
    assert quota.tenant_of(with_image) == tenant
    unsalted = quota.tenant_of(header_of(3))
    assert unsalted != tenant
    assert quota.tenant_of(header_of(4, extra_keys=("sql",), lora_name="sql")) == unsalted
    elsewhere = header_of(0, extra_keys=("red",), namespace=Fingerprint(b"m" * 16))
    assert quota.tenant_of(elsewhere) != tenant


def test_a_block_without_a_known_parent_counts_for_its_namespace() -> None:
    quota = TenantQuota(quota_bytes=10)
    assert quota.tenant_of(header_of(5, parent=4)) == quota.tenant_of(header_of(0))


def test_half_a_surrogate_pair_is_a_salt_like_any_other() -> None:
    quota = TenantQuota(quota_bytes=1)
    assert quota.tenant_of(header_of(0, extra_keys=("\ud800",)))


def test_quotas_hold_and_counts_are_right_whatever_is_stored_used_and_removed() -> None:
    quota, choice = TenantQuota(quota_bytes=20), random.Random(1)
    salts = ("red", "blue", "")
    kept: dict[int, tuple[str, int]] = {}
    for number in range(3_000):
        salt = choice.choice(salts)
        size = choice.randint(1, 20)
        kept[number] = (salt, size)
        for gone in quota.add(header_of(number, extra_keys=(salt,)), size):
            gone_salt, _ = kept.pop(int.from_bytes(gone.block_hash, "little"))
            assert gone_salt == salt
        some = choice.choice(list(kept))
        if choice.random() < 0.3:
            quota.remove(name_of(some))
            del kept[some]
        else:
            quota.touch(name_of(some))
        for salt in salts:
            tenant = quota.tenant_of(header_of(0, extra_keys=(salt,)))
            held = sum(size for whose, size in kept.values() if whose == salt)
            assert quota.used_bytes(tenant) == held <= 20
