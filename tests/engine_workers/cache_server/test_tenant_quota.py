from __future__ import annotations

import random

from engine_workers.blocks.namespace import Fingerprint
from engine_workers.cache_server.tenant_quota import TenantQuota
from tests.engine_workers.cache_server.block_names import header_of, name_of


def test_a_tenant_over_its_quota_loses_its_own_oldest_blocks_and_nobody_elses() -> None:
    quota = TenantQuota(quota_bytes=3)
    others = header_of(100, extra_keys=("blue",))
    assert quota.add(others, 3) == []
    for number in range(3):
        assert quota.add(header_of(number, extra_keys=("red",)), 1) == []
    quota.touch(name_of(0))
    assert quota.add(header_of(3, extra_keys=("red",)), 1) == [name_of(1)]
    assert quota.used_bytes(quota.tenant_of(others)) == 3


def test_a_block_belongs_to_the_tenant_of_its_parent() -> None:
    quota = TenantQuota(quota_bytes=100)
    red = quota.tenant_of(header_of(0, extra_keys=("red",)))
    quota.add(header_of(0, extra_keys=("red",)), 1)
    quota.add(header_of(1, parent=0), 1)
    quota.add(header_of(2, parent=1), 1)
    assert quota.used_bytes(red) == 3


def test_tenants_are_told_apart_by_namespace_and_salt_and_by_nothing_else() -> None:
    quota = TenantQuota(quota_bytes=1)
    red = quota.tenant_of(header_of(0, extra_keys=("red",)))
    with_adapter = header_of(1, extra_keys=("sql", "red"), lora_name="sql")
    with_image = header_of(2, extra_keys=(("image", 3), "red"))
    assert quota.tenant_of(with_adapter) == red
    assert quota.tenant_of(with_image) == red
    unsalted = quota.tenant_of(header_of(3))
    assert unsalted != red
    assert quota.tenant_of(header_of(4, extra_keys=("sql",), lora_name="sql")) == unsalted
    elsewhere = header_of(0, extra_keys=("red",), namespace=Fingerprint(b"m" * 16))
    assert quota.tenant_of(elsewhere) != red


def test_a_block_without_a_known_parent_counts_for_its_namespace() -> None:
    quota = TenantQuota(quota_bytes=10)
    assert quota.tenant_of(header_of(5, parent=4)) == quota.tenant_of(header_of(0))


def test_a_block_larger_than_the_quota_does_not_fit() -> None:
    assert not TenantQuota(quota_bytes=9).fits(10)
    assert TenantQuota(quota_bytes=9).fits(9)


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
