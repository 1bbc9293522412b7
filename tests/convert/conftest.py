"""Object storage for conversions and copies: memory, and the S3 server of the tests through both clients."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from _places import Place, s3_place
from _s3_server import serving


@pytest.fixture(scope="module", params=["memory", "s3 by obstore", "s3 by fsspec"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "memory":
        yield Place(f"memory://{uuid.uuid4().hex}/run")
        return
    with serving() as server:
        yield s3_place(server, request.param.rpartition(" ")[2])
