"""Finds and loads pyverbs, and says why it cannot be used; the only file that imports it.

Distributions install pyverbs for their own Python. Any interpreter of the same version can load it,
so it is searched for there too. Only pyverbs is taken: the rest of that folder would shadow this
environment's packages. Importing pyverbs configures the root logger, which is undone.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import logging
import struct
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "PACKAGES",
    "PyverbsModules",
    "adapter_names",
    "load_pyverbs",
    "missing_reason",
    "unavailable_reason",
]

PACKAGES: Final = "python3-pyverbs ibverbs-providers"
"""Package names of Debian and Ubuntu; with a real adapter `rdma-core` is needed too."""
SYSTEM: Final = (Path("/usr/lib/python3/dist-packages"), Path("/usr/lib64/python3/site-packages"))
ADAPTERS: Final = Path("/sys/class/infiniband")
_MODULES: Final = ("addr", "base", "cq", "device", "mr", "pd", "pyverbs_error", "qp")


@dataclass(frozen=True, slots=True)
class PyverbsModules:
    """The modules of pyverbs that are used."""

    addr: Any
    base: Any
    cq: Any
    device: Any
    mr: Any
    pd: Any
    pyverbs_error: Any
    qp: Any

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The exceptions of its calls; a device that was removed raises a plain OSError."""
        return (self.pyverbs_error.PyverbsError, OSError, ValueError, OverflowError)


def missing_reason(folders: Sequence[Path] = SYSTEM) -> str | None:
    """Why pyverbs cannot be imported, with a remedy; None: it can."""
    if sys.byteorder != "little" or struct.calcsize("P") != 8 or sys.platform != "linux":
        return "needs Linux on a 64-bit little-endian machine"
    if importlib.util.find_spec("pyverbs") is not None:
        return None
    here = [folder / "pyverbs" for folder in folders if (folder / "pyverbs").is_dir()]
    if not here:
        return f"pyverbs is not installed (Debian, Ubuntu: apt install {PACKAGES})"
    if not any(_fits(folder) for folder in here):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"pyverbs in {here[0].parent} is built for another Python than this {version}"
    return None


def _fits(folder: Path) -> bool:
    return any(
        (folder / f"qp{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES
    )


@cache
def load_pyverbs() -> PyverbsModules:
    """Import pyverbs. Errors: `TransferError`."""
    reason = missing_reason()
    if reason is not None:
        raise TransferError.at("", "this node over rdma", "set-up", reason)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        if importlib.util.find_spec("pyverbs") is None:
            _add_package()
        modules = {name: importlib.import_module(f"pyverbs.{name}") for name in _MODULES}
    except ImportError as error:
        reason = f"pyverbs does not load: {error}"
        raise TransferError.at("", "this node over rdma", "set-up", reason) from error
    finally:
        root.handlers[:], root.level = handlers, level
    return PyverbsModules(**modules)


def _add_package() -> None:
    """Make the system's pyverbs importable, and nothing else in its folder."""
    folder = next(f / "pyverbs" for f in SYSTEM if _fits(f / "pyverbs"))
    spec = importlib.util.spec_from_file_location(
        "pyverbs", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is no package")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = module
    spec.loader.exec_module(module)


def adapter_names() -> list[str]:
    """Names of this machine's adapters. Errors: `TransferError` if the kernel has no verbs."""
    verbs = load_pyverbs()
    try:
        found = verbs.device.get_device_list()
    except verbs.errors as error:
        reason = f"the kernel offers no RDMA (is ib_uverbs loaded?): {error}"
        raise TransferError.at("", "this node over rdma", "set-up", reason) from error
    return sorted(
        device.name.decode() if isinstance(device.name, bytes) else device.name for device in found
    )


def unavailable_reason(adapters: Path = ADAPTERS) -> str | None:
    """Why no adapter can be used; None: one can. A lack of adapters is reported before a lack of
    pyverbs. Quick after the first call; opens nothing."""
    if not adapters.is_dir():
        return "the kernel offers no RDMA: no adapter, or its driver is not loaded"
    try:
        return None if adapter_names() else "there is no RDMA adapter"
    except TransferError as error:
        return error.message
