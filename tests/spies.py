"""What many tests share: spies on calls, operators and refusals, threads beside a test, and products of cases."""

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmaccel.core.errors import MmaccelError


def heard(monkeypatch, owner: Any, name: str, tell: Callable[..., Any], after: bool = False) -> list[Any]:
    """What `tell` makes of the arguments of each call of `owner.name` from now on, which is made all the same; `after` it,
    and of what it gives before them."""
    seen: list[Any] = []
    plain = getattr(owner, name)

    def noted(*given: Any, **named: Any) -> Any:
        if not after:
            seen.append(tell(*given, **named))
        made = plain(*given, **named)
        if after:
            seen.append(tell(made, *given, **named))
        return made

    monkeypatch.setattr(owner, name, noted)
    return seen


returned = partial(heard, after=True)


def always(*_: Any, **__: Any) -> bool:
    return True


def nth(*numbers: int) -> Callable[..., bool]:
    """Says yes when it is asked for the `numbers`-th time, from 1."""
    calls = itertools.count(1)
    return lambda *_, **__: next(calls) in numbers


def broken(monkeypatch, owner: Any, name: str, error: Any, when: Callable[..., bool] = always) -> None:
    """Calls of `owner.name` raise `error` from now on where `when` says yes to their arguments; others are made."""
    plain = getattr(owner, name, None)

    def breaks(*given: Any, **named: Any) -> Any:
        if when(*given, **named):
            raise error
        return plain(*given, **named)  # type: ignore[misc]

    monkeypatch.setattr(owner, name, breaks)


def refusal(work: Callable[[], Any], error: type[MmaccelError] = MmaccelError) -> str:
    """The one sentence in which `work` is refused."""
    with pytest.raises(error) as caught:
        work()
    told = str(caught.value)
    assert told.endswith((".", "?")) and "\n" not in told, told
    return told


def beside(*works: Callable[[], Any]) -> list[threading.Thread]:
    """Threads, one for each of `works`, which are begun."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for one in threads:
        one.start()
    return threads


def finish(threads: Iterable[threading.Thread], seconds: float = 30.0) -> None:
    """Wait until all of them are over, for so long each."""
    for one in threads:
        one.join(seconds)
        assert not one.is_alive()


class Pause:
    """Stops the thread that calls it until `go_on` is set; `reached` is set when it has come."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        self.reached.set()
        assert self.go_on.wait(20)


def until(there: Callable[[], Any], seconds: float = 30.0) -> None:
    """Wait until it is so, for so long at most."""
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.001)


class Ops(TorchDispatchMode):
    """Counts the operators inside it: on a GPU each is a launch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """Remembers the most entries of any result; one that is expanded holds those of its memory."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                held = tensor.untyped_storage().size() // tensor.element_size()
                self.entries = max(self.entries, min(tensor.numel(), held))
        return result


def product(
    *axes: Iterable[Any], together: int = 1, where: Callable[..., bool] = lambda *case: True
) -> list[Any]:
    """Cases of a product for which `where` holds; `slow` but for some that hold every choice of `together` axes."""
    values = [list(axis) for axis in axes]
    numbers = itertools.product(*(range(len(axis)) for axis in values))
    cases = [case for case in numbers if where(*(axis[n] for axis, n in zip(values, case, strict=True)))]
    some = list(itertools.combinations(range(len(values)), together))
    left = {(axes, tuple(case[n] for n in axes)) for case in cases for axes in some}
    kept = set()
    while left:
        gains = {case: left & {(axes, tuple(case[n] for n in axes)) for axes in some} for case in cases}
        best = max(cases, key=lambda case: len(gains[case]))
        kept.add(best)
        left -= gains[best]
    slow = {case: () if case in kept else (pytest.mark.slow,) for case in cases}
    return [
        pytest.param(*(axis[n] for axis, n in zip(values, case, strict=True)), marks=slow[case])
        for case in cases
    ]


def crossed(
    *fixtures: str, together: int = 1, where: Callable[..., bool] = lambda *case: True, **axes: Iterable[Any]
) -> pytest.MarkDecorator:
    """`parametrize` by the `product` of `axes`, each by the name of its argument; of these `fixtures` are fixtures."""
    cases = product(*axes.values(), together=together, where=where)
    return pytest.mark.parametrize(tuple(axes), cases, indirect=list(fixtures))
