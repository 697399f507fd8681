"""Multi-turn conversations to replay: made from a seed, the same for every policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

_WORDS = """
    river stone ledger copper morning signal harbor winter engine garden paper bridge lantern
    market valley circle window forest silver needle orchard thunder velvet compass marble
    anchor basket candle desert feather glacier hammer island jacket kettle ladder mirror
    nectar oxygen pepper quarry ribbon saddle temple urchin violin walnut yellow zephyr
""".split()  # noqa: SIM905 - a list of strings would take a page


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides a workload, all of it."""

    num_conversations: int = 12
    num_turns: int = 4
    num_history_words: int = 1400
    """Words of each conversation's first message; about 1.1 tokens each."""
    num_question_words: int = 25
    max_tokens: int = 16
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the user says, turn by turn; the first turn brings a document."""

    questions: Sequence[str]


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations, and the order in which their turns come."""

    conversations: Sequence[Conversation]
    order: Sequence[int]
    """Index of the conversation whose next turn comes."""


def make_workload(recipe: Recipe) -> Workload:
    """Make the conversations and shuffle their turns, each conversation's own order kept."""
    rng = Random(recipe.seed)
    conversations = [
        _conversation(recipe, number, rng) for number in range(recipe.num_conversations)
    ]
    order = [number for number in range(recipe.num_conversations) for _ in range(recipe.num_turns)]
    rng.shuffle(order)
    return Workload(conversations, order)


def _conversation(recipe: Recipe, number: int, rng: Random) -> Conversation:
    document = _text(rng, recipe.num_history_words)
    first = f"Document {number}.\n{document}\nSummarize it in one sentence."
    later = [
        f"Turn {turn}: what about {_text(rng, recipe.num_question_words)}?"
        for turn in range(1, recipe.num_turns)
    ]
    return Conversation([first, *later])


def _text(rng: Random, num_words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=num_words))
