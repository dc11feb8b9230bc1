import pytest

from pdserve.errors import HandshakeRefused, NoCommonVersion, WrongCluster, WrongClusterKey
from pdserve.launch.cluster.admin_client import with_remedy


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (WrongClusterKey, "--cluster-key-file"),
        (WrongCluster, "--cluster"),
        (NoCommonVersion, "version of pdserve"),
        (HandshakeRefused, "--join"),
    ],
)
def test_a_refusal_names_what_helps(error, remedy):
    told = with_remedy("host:1", error("the peer says no"))
    assert type(told) is error
    assert told.message.startswith("host:1 turned us away: the peer says no")
    assert remedy in told.message
