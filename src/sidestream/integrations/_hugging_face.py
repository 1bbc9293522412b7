"""What the modules for ``accelerate`` and for ``transformers``, which is built on it, have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from sidestream.errors import InvalidOptionError, UnsupportedError

from ._checks import Framework

ACCELERATE = Framework("accelerate", ">=1.10,<2", "accelerate")

with ACCELERATE.importing():
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType

ACCELERATE.check(Accelerator, unwrap_model=("model", "keep_fp32_wrapper", "keep_torch_compile"))

_REFUSED = {
    DistributedType.DEEPSPEED: "DeepSpeed has checkpoints of its own",
    DistributedType.MEGATRON_LM: "Megatron-LM has checkpoints of its own",
    DistributedType.XLA: "the memory of XLA devices cannot be copied",
}


def check_supported(accelerator: Accelerator) -> None:
    """Raise ``UnsupportedError`` if the accelerator runs DeepSpeed, Megatron-LM, XLA or FSDP1."""
    kind = accelerator.distributed_type
    if kind in _REFUSED:
        raise UnsupportedError(f"{_REFUSED[kind]}: save and load as {kind.value} does without sidestream")
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UnsupportedError("FSDP1 shards flat parameters: choose FSDP2 with fsdp_version=2")


def plain_module(accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
    """Return the module below DDP and ``torch.compile``, whose names do not depend on either."""
    module: torch.nn.Module = accelerator.unwrap_model(model, keep_torch_compile=False)
    return module


def module_state(accelerator: Accelerator, module: torch.nn.Module) -> Any:
    """Return what stands for ``module`` in a state: itself, unless processes may have different buffers."""
    buffers = {name for name, _ in module.named_buffers()} & module.state_dict().keys()
    if accelerator.num_processes == 1 or not buffers:
        return module
    return _ModuleOfRanks(module, frozenset() if accelerator.is_main_process else buffers)


def optimizer_state(models: Iterable[torch.nn.Module], optimizer: torch.optim.Optimizer) -> Any:
    """Return what stands for ``optimizer`` in a state: itself, or its moments by the names of sharded parameters. A new
    optimizer has no moments yet, and only torch can make sharded ones."""
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    sharded = [one for one in models if any(isinstance(parameter, DTensor) for parameter in one.parameters())]
    names = [{id(parameter) for parameter in one.parameters()} for one in sharded]
    found = [(one, own) for one, own in zip(sharded, names, strict=True) if own & optimized]
    if not found:
        return optimizer
    if len(found) > 1 or not optimized <= found[0][1]:
        raise InvalidOptionError("an optimizer has parameters of several sharded models: make one optimizer for each")
    return _ShardedOptimizer(found[0][0], optimizer)


class _ModuleOfRanks:
    """A module of several ranks that leaves its buffers (BatchNorm) to the main process. DDP sends those to the other
    processes before each forward."""

    def __init__(self, module: torch.nn.Module, left_out: Collection[str]) -> None:
        self._module = module
        self._left_out = left_out

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self._module.state_dict().items() if name not in self._left_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._module.load_state_dict(state_dict)


class _ShardedOptimizer:
    """An optimizer over the sharded parameters of one module."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module = module
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self._module, self._optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self._module, self._optimizer, state_dict)
