"""How much of a tier one tenant may hold: beyond that its own oldest blocks give way, no others."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NewType

from engine_workers.blocks.block_header import BlockHeader
from engine_workers.blocks.block_name import BlockName

Tenant = NewType("Tenant", bytes)
"""16 bytes that stand for a namespace and a cache salt; the salt cannot be told from them."""


@dataclass(slots=True)
class _Holding:
    num_bytes: int = 0
    sizes: OrderedDict[BlockName, int] = field(default_factory=OrderedDict)
    """Bytes of each block, the one longest unused first."""


class TenantQuota:
    """Who holds what in one tier.

    A request's salt is known only from its first block; what follows belongs to its parent's
    tenant. A block whose parent is not here belongs to its namespace without a salt.

    Args:
        quota_bytes: What one tenant may hold.
    """

    def __init__(self, quota_bytes: int) -> None:
        self._quota_bytes = quota_bytes
        self._holdings: dict[Tenant, _Holding] = {}
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
        return holding.num_bytes if holding else 0

    def fits(self, size_bytes: int) -> bool:
        """Whether a block of this size can be within the quota at all."""
        return size_bytes <= self._quota_bytes

    def add(self, header: BlockHeader, size_bytes: int) -> list[BlockName]:
        """Count a block that is being stored and that `fits`.

        Returns:
            The tenant's blocks that have to be removed for it; they are no longer counted.
        """
        if header.name in self._owners:
            return []
        tenant = self.tenant_of(header)
        holding = self._holdings.setdefault(tenant, _Holding())
        gone: list[BlockName] = []
        while holding.sizes and holding.num_bytes + size_bytes > self._quota_bytes:
            name, freed_bytes = holding.sizes.popitem(last=False)
            holding.num_bytes -= freed_bytes
            del self._owners[name]
            gone.append(name)
        holding.sizes[header.name] = size_bytes
        holding.num_bytes += size_bytes
        self._owners[header.name] = tenant
        return gone

    def touch(self, name: BlockName) -> None:
        """Note a use. Touch a prefix from its end, so that its first blocks are the last to go."""
        tenant = self._owners.get(name)
        if tenant is not None:
            self._holdings[tenant].sizes.move_to_end(name)

    def remove(self, name: BlockName) -> None:
        """Count a block no longer, whoever removed it; unknown names are ignored."""
        tenant = self._owners.pop(name, None)
        if tenant is None:
            return
        holding = self._holdings[tenant]
        holding.num_bytes -= holding.sizes.pop(name)
        if not holding.sizes:
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
