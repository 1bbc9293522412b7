"""What a call brings to get at storage goes over the socket, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import sidestream

CONNECTS = True


def test_secrets_reach_no_argument_and_no_file(tmp_path: Path, children: Callable[[], list[int]]) -> None:
    """Nor the environment: what a call brings goes over the socket."""
    secret = "do-not-show-this-4711"
    options = {"key": "user", "secret": secret, "endpoint_url": "http://127.0.0.1:9"}
    policy = sidestream.StorePolicy(retries=0, request_timeout_s=5)
    with pytest.raises(sidestream.errors.SidestreamError) as raised:
        sidestream.blocking.save(
            {"n": 1},
            "s3://bucket/c",
            storage=sidestream.Storage(options, policy=policy),
            options=sidestream.SaveOptions(writer="process", timeout_s=20),
        )
    assert secret not in str(raised.value)
    sidestream.blocking.save({"n": 1}, tmp_path / "c", options=sidestream.SaveOptions(writer="process"))
    (pid,) = children()
    for name in ("cmdline", "environ"):
        assert secret.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
