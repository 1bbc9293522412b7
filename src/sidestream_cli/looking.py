"""The commands that change nothing."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from .complete import names
from .frame import (
    AsJson,
    StorageOption,
    TargetOption,
    TimeoutS,
    Url,
    app,
    bar,
    options_of,
    print_json,
    say,
    show,
    size,
    verb,
)


@app.command()
@verb
def ls(
    url: Annotated[str, typer.Argument(help="The directory of a run; a path or any URL.")],
    storage_option: StorageOption = None,
    as_json: AsJson = False,
) -> int:
    """List the committed steps of a run."""
    options = options_of(storage_option)
    from .look import steps

    found = steps(url, options)
    if as_json:
        print_json([dataclasses.asdict(one) for one in found])
        return 0
    listed = [(str(one.step), str(one.tensors), size(one.nbytes), one.damage or one.name) for one in found]
    show(("step", "tensors", "bytes", "name"), listed)
    return 0


@app.command()
@verb
def info(
    url: Url,
    pattern: Annotated[str, typer.Argument(help="Names to show, as in 'model.*'.", autocompletion=names)] = "*",
    storage_option: StorageOption = None,
    as_json: AsJson = False,
) -> int:
    """Show what is in a checkpoint, a torch.save file or safetensors: names, dtypes, shapes, bytes, files."""
    options = options_of(storage_option)
    from .look import rows

    found = rows(url, pattern, options)
    if as_json:
        print_json([dataclasses.asdict(one) for one in found])
        return 0
    listed = []
    for one in found:
        shape = "" if one.shape is None else "x".join(map(str, one.shape)) or "scalar"
        nbytes = size(one.nbytes) if one.dtype else ""
        listed.append((one.name, one.dtype or "value", shape, nbytes, ", ".join(one.files)))
    show(("name", "dtype", "shape", "bytes", "file"), listed)
    tensors = [one for one in found if one.dtype]
    total = size(sum(one.nbytes for one in tensors))
    say(f"{len(tensors)} tensors of {total}, {len(found) - len(tensors)} values")
    return 0


@app.command()
@verb
def verify(
    url: Url,
    key: Annotated[str | None, typer.Option(help="A public key (PEM): the checkpoint has to be signed by it.")] = None,
    storage_option: StorageOption = None,
    as_json: AsJson = False,
    timeout_s: TimeoutS = 86400.0,
) -> int:
    """Read all data and compare it with its checksums and digests. List damage, with exit code 1."""
    options = options_of(storage_option)
    from sidestream import blocking, signing

    with bar("verifying", as_json) as progress:
        if key is not None:
            report = blocking.run(
                lambda: signing.verify(url, key, progress=progress, timeout_s=timeout_s, storage_options=options)
            )
        else:
            report = blocking.verify(url, progress=progress, timeout_s=timeout_s, storage_options=options)
    if as_json:
        print_json({"ok": report.ok, **dataclasses.asdict(report)})
        return 0 if report.ok else 1
    for damage in report.damaged:
        say(f"damaged: {damage.message}")
    if report.unreadable:
        some = ", ".join(report.unreadable[:5])
        say(f"{len(report.unreadable)} of a kind that this version does not read: {some}")
    say(f"{len(report.verified)} verified, {len(report.damaged)} damaged, {len(report.unverified)} without checksum")
    return 0 if report.ok else 1


@app.command()
@verb
def diff(
    first: Url,
    second: Url,
    storage_option: StorageOption = None,
    target_option: TargetOption = None,
    as_json: AsJson = False,
) -> int:
    """Compare two checkpoints. List where and by how much they differ, with exit code 1."""
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
    directory: Annotated[str, typer.Argument(help="The directory for checkpoints.")] = ".", as_json: AsJson = False
) -> int:
    """Show what this machine supports, with advice."""
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
    mib: Annotated[int, typer.Option(help="Size of the state.")] = 1024,
    as_json: AsJson = False,
) -> int:
    """Measure staging, saving and loading on this machine, and its disk alone. Takes at most about a minute."""
    from sidestream import blocking

    from .measure import measure

    with bar("measuring", as_json) as progress:
        found = blocking.run(lambda: measure(directory, mib << 20, progress))
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
