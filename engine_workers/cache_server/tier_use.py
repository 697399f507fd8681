"""Whether prompts of a namespace use the cache at all: feeds its bypass with what lookups bring."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from prometheus_client import Counter

from cache_router.cost import ARENA
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.namespace import Fingerprint
from engine_workers.cache_server.bypass import Bypass, BypassLimits, Outcome
from engine_workers.cache_server.cache_metrics import CacheMetrics
from engine_workers.cache_server.load_planner import AskedPrefix, LoadPlanner

_MAX_NAMESPACES = 64
_MAX_LEFT_OUT = 262_144


class TierUse:
    """One bypass a namespace, and the blocks of prompts that went by.

    Args:
        planner: Knows what computing takes; without an engine's report nothing is judged.
        metrics: Gets a counter of prompts that went by, and a gauge.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, planner: LoadPlanner, metrics: CacheMetrics, clock: Callable[[], float]
    ) -> None:
        self._planner = planner
        self._clock = clock
        self._bypasses: OrderedDict[Fingerprint, Bypass] = OrderedDict()
        self._save_s: dict[Fingerprint, float] = {}
        self._left_out: OrderedDict[BlockName, None] = OrderedDict()
        self._passed_by = Counter(
            "radixgate_cache_bypassed_lookups",
            "Prompts that went by the cache because it made things slower, by what cost most.",
            ("reason",),
            registry=metrics.registry,
        )
        metrics.watch(
            "radixgate_cache_bypassed_namespaces",
            "Namespaces whose prompts go by the cache, but for a probing share.",
            self._num_bypassed,
        )

    def uses_cache(self, names: Sequence[BlockName]) -> bool:
        """Whether a prompt is looked up and saved; if not, its blocks are remembered as left out.

        Args:
            names: All its full blocks, parent first.
        """
        if not names:
            return True
        bypass = self._bypass(names[0].namespace)
        if bypass.uses_tiers(names[0].block_hash):
            if self._left_out:
                for name in names:
                    self._left_out.pop(name, None)
            return True
        reason = bypass.state.reason
        assert reason is not None, "all prompts use the cache unless it is bypassed"
        self._passed_by.labels(reason).inc()
        for name in names:
            self._left_out[name] = None
            self._left_out.move_to_end(name)
        while len(self._left_out) > _MAX_LEFT_OUT:
            self._left_out.popitem(last=False)
        return False

    def is_saved(self, name: BlockName) -> bool:
        """Whether a block is to be saved: the last prompt that began with it did not go by."""
        return name not in self._left_out

    def note_save(self, namespace: Fingerprint, seconds: float) -> None:
        """Take in what saving held up an engine; it counts with the next lookup."""
        self._bypass(namespace)
        self._save_s[namespace] = self._save_s.get(namespace, 0.0) + seconds

    def now(self) -> float:
        """When a lookup begins, for `report`."""
        return self._clock()

    def report(self, asked: AskedPrefix, num_blocks: int, started: float) -> None:
        """Take in what a lookup brought.

        Args:
            asked: The prompt.
            num_blocks: Staged blocks, beyond the engine's own.
            started: When the lookup began. The engine waits from then until now, unless other
                requests are in front.
        """
        seconds = self._clock() - started
        save_s = self._save_s.pop(asked.namespace, 0.0)
        if not self._planner.knows_prefill(asked.namespace):
            return
        rates = self._planner.rates(asked.namespace)
        num_local_tokens = asked.num_local_blocks * asked.block_size
        num_cached_tokens = num_local_tokens + num_blocks * asked.block_size
        plain_s = rates.prefill.seconds(num_local_tokens, asked.num_tokens - num_local_tokens)
        # The last token is computed even if all blocks are there.
        num_new_tokens = max(1, asked.num_tokens - num_cached_tokens)
        computed_s = rates.prefill.seconds(asked.num_tokens - num_new_tokens, num_new_tokens)
        copy_s = rates.of_tier(ARENA).seconds(num_blocks * asked.block_bytes)
        self._bypass(asked.namespace).report(
            Outcome(
                waited_s=0.0 if num_blocks else seconds,
                load_s=seconds + copy_s if num_blocks else 0.0,
                save_s=save_s,
                saved_s=max(0.0, plain_s - computed_s),
                computed_s=computed_s,
            )
        )

    def _bypass(self, namespace: Fingerprint) -> Bypass:
        bypass = self._bypasses.get(namespace)
        if bypass is None:
            bypass = self._bypasses[namespace] = Bypass(BypassLimits(), self._clock)
            if len(self._bypasses) > _MAX_NAMESPACES:
                oldest, _ = self._bypasses.popitem(last=False)
                self._save_s.pop(oldest, None)
        return bypass

    def _num_bypassed(self) -> float:
        # Read by the metrics page, on the loop that owns this.
        return sum(bypass.state.is_bypassed for bypass in self._bypasses.values())
