"""A cluster with TLS: prompts go on elsewhere, and their KV is encrypted on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import Cluster
from tests.net.certificates import certificate, folder
from tests.rdma.test_workers import check

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_workers_hand_over_by_tcp_under_tls(tmp_path: Path, tiny_model: Path) -> None:
    cert, key = certificate("w", "ca")
    tls = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", str(folder() / "ca.pem"))
    with Cluster(tmp_path, *tls) as cluster:
        check(cluster, tiny_model, "tcp")
