from __future__ import annotations

from engine_workers.connector.rank_agreement import CommittedBlocks, RankAgreement


def report(**ranks: str) -> CommittedBlocks:
    return CommittedBlocks(
        {int(name[1:]): tuple(c.encode() for c in hashes) for name, hashes in ranks.items()}
    )


def test_a_block_counts_when_the_last_rank_has_it() -> None:
    agreement = RankAgreement(4)
    assert agreement.add(report(r0="ab", r1="a", r2="a")) == []
    assert agreement.add(report(r3="a")) == [b"a"]
    assert agreement.add(report(r1="b", r2="b", r3="b")) == [b"b"]


def test_one_rank_that_reports_twice_is_not_two_ranks() -> None:
    agreement = RankAgreement(2)
    assert agreement.add(report(r0="a")) == []
    assert agreement.add(report(r0="a")) == []


def test_a_group_of_one_agrees_with_itself() -> None:
    assert RankAgreement(1).add(report(r0="ab")) == [b"a", b"b"]


def test_reports_of_all_ranks_merge_in_any_order() -> None:
    parts = [report(r0="ab"), report(r1="ab"), report(r2="b"), report(r0="c")]
    forward = parts[0].merged(parts[1]).merged(parts[2]).merged(parts[3])
    backward = parts[3].merged(parts[2]).merged(parts[1].merged(parts[0]))
    assert RankAgreement(3).add(forward) == RankAgreement(3).add(backward) == [b"b"]
    assert sorted(forward.by_rank[0]) == [b"a", b"b", b"c"]


def test_what_waits_for_a_rank_is_bounded_and_the_oldest_goes_first() -> None:
    agreement = RankAgreement(2, max_waiting=2)
    agreement.add(report(r0="abc"))
    assert agreement.add(report(r1="abc")) == [b"b", b"c"]


def test_a_server_that_is_gone_stored_nothing() -> None:
    agreement = RankAgreement(2)
    agreement.add(report(r0="a"))
    agreement.forget()
    assert agreement.add(report(r1="a")) == []
