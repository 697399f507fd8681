from __future__ import annotations

from tests.engine_workers.cache_server.conftest import Serve
from tests.engine_workers.cache_server.wire_client import hashes, namespace


async def test_a_tenant_that_saves_without_end_takes_no_more_than_its_part(serve: Serve) -> None:
    async with serve(num_slots=128, tenant_quota_share=0.5) as running:
        quiet = await running.client(engine_id="quiet")
        greedy = await running.client(engine_id="greedy", space=namespace(tenant_salt="greedy"))
        await quiet.save(range(1, 33))
        await greedy.save(range(1, 400))
        assert (await quiet.look_up(hashes(32))).num_blocks == 32
        kept = [block.name.namespace for block in running.parts.catalog.published()]
        assert kept.count(namespace().fingerprint) == 32
        assert 32 < kept.count(namespace(tenant_salt="greedy").fingerprint) <= 64


async def test_what_is_leased_is_no_victim_of_its_tenants_quota(serve: Serve) -> None:
    async with serve(num_slots=128, tenant_quota_share=0.25) as running:
        client = await running.client()
        await client.save(range(1, 25))
        staged = await client.look_up(hashes(24))
        await client.save(range(101, 201))
        assert (await client.look_up(hashes(24))).offsets == staged.offsets
