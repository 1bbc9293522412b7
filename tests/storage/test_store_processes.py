"""What obstore needs around a fork and at the end of the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import warm
from _s3_server import S3Server

pytest.importorskip("obstore")


def run(code: str, server: S3Server) -> subprocess.CompletedProcess[str]:
    setting = f"OPTIONS = {server.options!r}\nBASE = 's3://{server.bucket}/run'\n"
    return warm.run(
        [sys.executable, "-c", setting + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_a_forked_child_is_told(s3: S3Server) -> None:
    done = run(
        """
        import asyncio, os, sys, torch, sidestream
        from sidestream import errors
        state = {"w": torch.ones(1000)}
        asyncio.run(sidestream.save(state, BASE + "/one", storage_options=OPTIONS))
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(sidestream.save(state, BASE + "/two", storage_options=OPTIONS))
            except errors.ForkedProcessError as error:
                os._exit(0 if "spawn" in str(error) else 3)
            os._exit(4)
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status))
        """,
        s3,
    )
    assert done.returncode == 0, done.stderr
    assert not any(name.startswith("run/two") for name in s3.objects)


@pytest.mark.parametrize("ending", ["return", "sys.exit(0)"])
def test_the_interpreter_ends_in_peace(s3: S3Server, ending: str) -> None:
    """Right after a save, and with one in flight that nobody waits for but `blocking`."""
    done = run(
        f"""
        import sys, torch
        from sidestream import blocking
        def main():
            state = {{"w": torch.ones(3 << 20)}}
            blocking.save(state, BASE + "/one", storage_options=OPTIONS)
            blocking.async_save(state, BASE + "/two", storage_options=OPTIONS)
            {ending}
        main()
        """,
        s3,
    )
    assert done.returncode == 0, done.stderr
    assert {"run/one/.metadata", "run/two/.metadata"} <= set(s3.objects)
    assert s3.uploads == {}


def test_the_package_does_without_the_extra(s3: S3Server) -> None:
    """Neither client is imported before it is needed, and without them the error says what to install."""
    done = run(
        """
        import sys
        import sidestream._storage, sidestream.checkpointer
        assert "obstore" not in sys.modules and "s3fs" not in sys.modules
        sys.modules["obstore"] = sys.modules["s3fs"] = None
        from sidestream import errors
        try:
            sidestream._storage.locate_run(BASE)
        except errors.MissingExtraError as error:
            assert error.extra == "cloud" and "sidestream[cloud]" in str(error), error
        else:
            raise SystemExit("no error")
        """,
        s3,
    )
    assert done.returncode == 0, done.stderr


def test_what_the_extra_does_not_bring_is_named(s3: S3Server) -> None:
    """The client of fsspec, where it is asked for, or where only it knows the options."""
    done = run(
        """
        import sys
        sys.modules["s3fs"] = None
        import sidestream
        from sidestream import errors
        for options in ({"engine": "fsspec"}, {}):
            policy = sidestream.StorePolicy(**options)
            storage = sidestream.Storage({**OPTIONS, "client_kwargs": {"verify": "ca.pem"}}, policy=policy)
            try:
                sidestream._storage.locate_run(BASE, storage)
            except errors.MissingExtraError as error:
                assert str(error).endswith("pip install s3fs"), error
            else:
                raise SystemExit("no error")
        """,
        s3,
    )
    assert done.returncode == 0, done.stderr


def test_saves_and_loads_make_one_client(s3: S3Server) -> None:
    """Also uploads in parts: the client of fsspec is not imported, and need not be installed."""
    done = run(
        """
        import asyncio, sys, torch, sidestream
        sys.modules["s3fs"] = None
        def moved(state, name):
            asyncio.run(sidestream.save(state, f"{BASE}/{name}", storage_options=OPTIONS))
            target = {"w": torch.zeros_like(state["w"])}
            asyncio.run(sidestream.load(target, f"{BASE}/{name}", storage_options=OPTIONS))
            assert torch.equal(target["w"], state["w"])
        moved({"w": torch.ones(1000)}, "small")
        moved({"w": torch.ones(9 << 20)}, "large")
        """,
        s3,
    )
    assert done.returncode == 0, done.stderr
    assert s3.count("part")
