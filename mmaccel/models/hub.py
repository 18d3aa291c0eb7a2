"""Why a model's name led to nothing: the hub was not reached, or it gives no such model."""

from __future__ import annotations

from collections.abc import Iterator

from mmaccel.models.shipped import NAMES

UNREACHED = frozenset(
    {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "TimeoutException"}
)
"""Errors of the hub's client, and of what it sends by, that say nothing of the name."""
UNKNOWN = frozenset({"RepositoryNotFoundError", "HFValidationError"})


def absent(name: str, error: BaseException) -> str | None:
    """The sentence for a name that neither a folder nor the hub gave; None for an error of another kind."""
    told = {kind.__name__ for one in _causes(error) for kind in type(one).__mro__}
    if told & UNREACHED:
        return (
            f"model {name!r} is not on this machine, and the hub, which may have it, cannot be reached; go online (and "
            f"leave HF_HUB_OFFLINE unset), or give a folder or one of {', '.join(NAMES)}."
        )
    if told & UNKNOWN:
        return f"model {name!r} is neither a folder here nor a model that the hub gives; check the name."
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def own_code(name: str, error: Exception) -> str | None:
    """What is said of a model whose code comes with it, and is not run; None for another error."""
    if "trust_remote_code" not in str(error):
        return None
    return f"model {name!r} brings code of its own, which is not run; give a model of a family that transformers has."
