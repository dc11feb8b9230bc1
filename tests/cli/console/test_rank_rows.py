from pdserve.cli.console.rank_rows import rank_table
from pdserve.ids import NodeId
from pdserve.messages.status import ClusterStatus, MemberStatus, NodeReport, RankStatus


def test_each_rank_of_each_worker_has_a_row() -> None:
    ranks = (
        RankStatus(rank=0, pid=71, device="cpu", state="running"),
        RankStatus(rank=1, pid=72, device="cpu", state="stopped"),
    )
    members = (
        MemberStatus(node=NodeId("w1"), role="worker", epoch=1, report=NodeReport(ranks=ranks)),
        MemberStatus(node=NodeId("w2"), role="worker", epoch=1, report=NodeReport()),
        MemberStatus(node=NodeId("w3"), role="worker", epoch=1, silence="no answer"),
    )
    table = rank_table(ClusterStatus(cluster="c", asked=NodeId("r"), now=1.0, members=members))
    assert list(table.rows) == [
        ("w1", "0", "71", "cpu", "running"),
        ("w1", "1", "72", "cpu", "stopped"),
    ]
