"""The commands that change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .complete import names
from .frame import (
    AsJson,
    StorageOption,
    TargetOption,
    TimeoutS,
    Url,
    UsageError,
    app,
    bar,
    moment,
    options_of,
    print_json,
    say,
    show,
    size,
    verb,
)

if TYPE_CHECKING:
    from sidestream import VerifyReport


@app.command()
@verb
def ls(
    url: Annotated[str, typer.Argument(help="The directory of a run; a path or any URL.")],
    storage_option: StorageOption = None,
    as_json: AsJson = False,
) -> int:
    """List the committed steps of a run, with time, size, metadata and sidecar files."""
    options = options_of(storage_option)
    from .look import steps

    found = steps(url, options)
    if as_json:
        print_json([dataclasses.asdict(one) for one in found])
        return 0
    listed = []
    for one in found:
        about = [*(f"{key}={value}" for key, value in one.metadata.items()), *one.files]
        shown = (moment(one.saved_at), str(one.tensors), size(one.nbytes), ", ".join(about))
        listed.append((str(one.step), *shown, one.damage or one.name))
    show(("step", "saved", "tensors", "bytes", "metadata and files", "name"), listed)
    return 0


@app.command()
@verb
def info(
    url: Url,
    pattern: Annotated[str, typer.Argument(help="Names to show, as in 'model.*'.", autocompletion=names)] = "*",
    values: Annotated[bool, typer.Option("--values", help="Show the values, too.")] = False,
    files: Annotated[
        bool, typer.Option("--files", help="Show the sidecar files that match, and nothing else.")
    ] = False,
    storage_option: StorageOption = None,
    as_json: AsJson = False,
) -> int:
    """Show what is in a checkpoint: names, dtypes, shapes, bytes, files; and when it was saved, with which metadata and
    sidecar files."""
    options = options_of(storage_option)
    from .look import head, rows, value_texts

    about = head(url, options)
    if files:
        sidecars = {name: nbytes for name, nbytes in about.files.items() if fnmatchcase(name, pattern)}
        if as_json:
            print_json(sidecars)
        else:
            show(("name", "bytes"), [(name, size(nbytes)) for name, nbytes in sidecars.items()])
        return 0
    found = rows(url, pattern, options)
    texts = value_texts(url, [one.name for one in found if one.dtype is None], options) if values else {}
    if as_json:
        listed_values = {name: {"value": text} for name, text in texts.items()}
        entries = [{**dataclasses.asdict(one), **listed_values.get(one.name, {})} for one in found]
        print_json({**dataclasses.asdict(about), "entries": entries})
        return 0
    listed = []
    for one in found:
        shape = "" if one.shape is None else "x".join(map(str, one.shape)) or "scalar"
        nbytes = size(one.nbytes) if one.dtype else ""
        listed.append((one.name, one.dtype or "value", shape, nbytes, texts.get(one.name, ", ".join(one.files))))
    show(("name", "dtype", "shape", "bytes", "value or file" if values else "file"), listed)
    tensors = [one for one in found if one.dtype]
    total = size(sum(one.nbytes for one in tensors))
    say(f"{len(tensors)} tensors of {total}, {len(found) - len(tensors)} values")
    if about.step is not None or about.saved_at:
        say(f"{'no step' if about.step is None else f'step {about.step}'}, saved {moment(about.saved_at) or 'unknown'}")
    for key, value in about.metadata.items():
        say(f"metadata {key}: {value}")
    for name, file_bytes in about.files.items():
        say(f"file {name}: {size(file_bytes)}")
    return 0


@app.command()
@verb
def verify(
    url: Url,
    every: Annotated[bool, typer.Option("--all", help="URL is a run: verify all its steps.")] = False,
    key: Annotated[str | None, typer.Option(help="A public key (PEM): the checkpoint has to be signed by it.")] = None,
    storage_option: StorageOption = None,
    as_json: AsJson = False,
    timeout_s: TimeoutS = 86400.0,
) -> int:
    """Read all data and compare it with its checksums and digests. List damage."""
    options = options_of(storage_option)

    def verified(one: str) -> VerifyReport:
        from sidestream import blocking, signing

        with bar("verifying", as_json) as progress:
            if key is None:
                return blocking.verify(one, progress=progress, timeout_s=timeout_s, storage_options=options)
            return blocking.run(
                lambda: signing.verify(one, key, progress=progress, timeout_s=timeout_s, storage_options=options)
            )

    if every:
        return _verify_steps(url, options, verified, as_json=as_json)
    from sidestream.errors import CheckpointNotFoundError

    try:
        report = verified(url)
    except CheckpointNotFoundError as error:
        raise error.reworded(lambda text: f"{text}. --all verifies each step of a run") from None
    if as_json:
        print_json({"ok": report.ok, **dataclasses.asdict(report)})
    else:
        _say_report(report)
    return 0 if report.ok else 1


def _verify_steps(
    url: str, options: dict[str, Any] | None, verified: Callable[[str], VerifyReport], *, as_json: bool
) -> int:
    from sidestream.errors import BadSignatureError, CheckpointNotFoundError, CorruptCheckpointError

    from .look import steps

    reports: list[dict[str, Any]] = []
    for step in steps(url, options):
        error = step.damage
        try:
            report = None if error else verified(f"{url.rstrip('/')}/{step.name}")
        except CheckpointNotFoundError:  # deleted since the run was listed
            continue
        except (CorruptCheckpointError, BadSignatureError) as damage:
            report, error = None, str(damage)
        ok = report is not None and report.ok
        about = {} if report is None else dataclasses.asdict(report)
        reports.append({"step": step.step, "name": step.name, "ok": ok, "error": error, **about})
        if not as_json:
            say(f"{step.name}: {'ok' if ok else 'damaged'}")
            if report is None:
                say(f"damaged: {error}")
            else:
                _say_report(report)
    if as_json:
        print_json(reports)
    return 0 if all(one["ok"] for one in reports) else 1


def _check_local(directory: str) -> None:
    if "://" in directory:
        raise UsageError(f"{directory} is a URL, and this command needs a directory of this machine")


def _say_report(report: VerifyReport) -> None:
    for damage in report.damaged:
        say(f"damaged: {damage.message}")
    if report.unreadable:
        some = ", ".join(report.unreadable[:5])
        say(f"{len(report.unreadable)} of a kind that this version does not read: {some}")
    say(f"{len(report.verified)} verified, {len(report.damaged)} damaged, {len(report.unverified)} without checksum")


@app.command()
@verb
def diff(
    first: Url,
    second: Url,
    storage_option: StorageOption = None,
    target_option: TargetOption = None,
    as_json: AsJson = False,
) -> int:
    """Compare two checkpoints. List where and by how much they differ.

    Entries are the same if their types and bits are: 1, 1.0 and True differ, and a NaN is the same as one with its
    bits. The order of a dict does not count."""
    options, second_options = options_of(storage_option), options_of(target_option)
    from .look import differences

    with bar("comparing", as_json) as progress:
        found = differences(first, second, options, second_options, progress)
    if as_json:
        print_json([dataclasses.asdict(one) for one in found])
        return 1 if found else 0
    listed = [(one.name, one.shown, "" if one.largest is None else f"{one.largest:.6g}") for one in found]
    if found:
        show(("name", "what", "largest difference"), listed)
    else:
        say("no differences")
    return 1 if found else 0


@app.command()
@verb
def doctor(
    directory: Annotated[str, typer.Argument(help="Where checkpoints go; it need not exist yet.")] = ".",
    as_json: AsJson = False,
) -> int:
    """Show what this machine and the disk of a directory offer, with advice: versions, memory, huge pages, NUMA nodes,
    devices, direct I/O."""
    _check_local(directory)
    from .machine import machine

    found = machine(directory)
    if as_json:
        print_json([dataclasses.asdict(one) for one in found])
        return 0
    show(("what", "here", "advice"), [(one.what, one.here, one.advice) for one in found])
    return 0


@app.command()
@verb
def bench(
    directory: Annotated[str, typer.Argument(help="A local directory; what is written there is removed.")] = ".",
    mib: Annotated[int, typer.Option(min=64, help="Size of the state, at least 64.")] = 1024,
    as_json: AsJson = False,
) -> int:
    """Measure staging, saving and loading on this machine, and its disk alone, in turns."""
    _check_local(directory)
    from .measure import measure

    with bar("measuring", as_json) as progress:
        found = measure(directory, mib << 20, progress)
    if as_json:
        print_json([dataclasses.asdict(one) for one in found])
        return 0
    listed = []
    for one in found:
        share = "" if one.of_disk is None else f"{one.of_disk:.0%}"
        listed.append((one.what, f"{one.seconds:.2f}", f"{one.gib_per_s:.2f}", share))
    show(("what", "seconds", "GiB/s", "of the disk"), listed)
    say(f"best of {found[0].rounds}, with a state of {size(found[0].nbytes)}")
    return 0
