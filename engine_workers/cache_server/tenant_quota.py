"""How much of a tier one tenant may hold: beyond that its own blocks give way, and no others."""

from __future__ import annotations

import hashlib
from typing import NewType

from engine_workers.blocks.block_header import BlockHeader
from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_server.eviction import S3Fifo

Tenant = NewType("Tenant", bytes)
"""16 bytes that stand for a namespace and a cache salt; the salt cannot be told from them."""


class TenantQuota:
    """Who holds what in one tier.

    A request's salt is known only from its first block; what follows belongs to its parent's
    tenant. A block whose parent is not here belongs to its namespace without a salt.

    Args:
        quota_bytes: What one tenant may hold.
    """

    def __init__(self, quota_bytes: int) -> None:
        self._quota_bytes = quota_bytes
        self._holdings: dict[Tenant, S3Fifo[BlockName]] = {}
        self._owners: dict[BlockName, Tenant] = {}

    def tenant_of(self, header: BlockHeader) -> Tenant:
        """Whose block this is."""
        namespace = header.name.namespace
        if header.parent_hash is None:
            return _tenant(namespace, _salt_of(header))
        owner = self._owners.get(BlockName(namespace, header.parent_hash))
        return owner or _tenant(namespace, "")

    def used_bytes(self, tenant: Tenant) -> int:
        """What a tenant holds."""
        holding = self._holdings.get(tenant)
        return holding.used_bytes if holding else 0

    def add(self, header: BlockHeader, size_bytes: int) -> list[BlockName]:
        """Count a block that is about to be stored and is not counted yet.

        Returns:
            The tenant's blocks that have to be removed for it; they are no longer counted. If it
            has no place in the quota itself, it is the last of them.
        """
        name = header.name
        tenant = self.tenant_of(header)
        holding = self._holdings.get(tenant)
        if holding is None:
            holding = self._holdings[tenant] = S3Fifo(self._quota_bytes)
        self._owners[name] = tenant
        gone = holding.insert(name, size_bytes, header.parent_name)
        for other in gone:
            del self._owners[other]
        self._drop_if_empty(tenant)
        return gone

    def pin(self, name: BlockName) -> None:
        """Keep a block that is counted from being chosen until it is unpinned as often."""
        self._holdings[self._owners[name]].pin(name)

    def unpin(self, name: BlockName) -> None:
        """Undo one `pin`; unknown names are ignored."""
        tenant = self._owners.get(name)
        if tenant is not None:
            self._holdings[tenant].unpin(name)

    def touch(self, name: BlockName) -> None:
        """Note a use; unknown names are ignored."""
        tenant = self._owners.get(name)
        if tenant is not None:
            self._holdings[tenant].touch(name)

    def remove(self, name: BlockName) -> None:
        """Count a block no longer, whoever removed it; unknown names are ignored."""
        tenant = self._owners.pop(name, None)
        if tenant is None:
            return
        self._holdings[tenant].remove(name)
        self._drop_if_empty(tenant)

    def _drop_if_empty(self, tenant: Tenant) -> None:
        if len(self._holdings[tenant]) == 0:
            del self._holdings[tenant]


def _salt_of(header: BlockHeader) -> str:
    """The cache salt of a first block: the text among its extra keys that names no adapter."""
    keys = header.extra_keys
    if header.lora_name is not None and keys and keys[0] == header.lora_name:
        keys = keys[1:]
    return next((key for key in keys if isinstance(key, str)), "")


def _tenant(namespace: bytes, salt: str) -> Tenant:
    # JSON lets a client send half of a surrogate pair; it is only a name here.
    material = namespace + salt.encode("utf-8", "surrogatepass")
    return Tenant(hashlib.blake2b(material, digest_size=16).digest())
