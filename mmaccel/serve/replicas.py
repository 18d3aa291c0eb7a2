"""`mmaccel serve --ray`: replicas on Ray Serve, one per GPU, with streams that survive the loss of a replica.

A stream's id names the replica that opened it, and its requests are routed there. Each change of a stream is saved to a
folder shared by all machines before the request is answered. If a replica is gone (crash, drain, scale-in), requests of its
streams go to others, which resume the saved state. A replica that finds a newer state in the folder than its own reloads it.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import pickle
import random
import re
import secrets
import shutil
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.metrics import Gauge
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mmaccel.core.decoding.worker import DRAFT_GPU
from mmaccel.core.errors import RecipeError
from mmaccel.core.streams.live import run_in_thread, tune_python_for_streams
from mmaccel.serve.app import create_app
from mmaccel.serve.messages import SessionRequest
from mmaccel.serve.settings import Refused, Settings
from mmaccel.serve.stream_routes import router
from mmaccel.serve.streams import Stream, Streams, count_bytes

if TYPE_CHECKING:
    from mmaccel.serve.engine import Engine

NAME = "mmaccel"
"""Of the application and of its deployment."""
LIVE = ".live"
"""The folder of open streams, beside the folders of callers."""
NUMBER = re.compile(rf"{router.prefix}/([\w-]{{16,64}}\.[\w-]{{1,64}})(/|$)")
"""The path of a stream. Its id is random characters, a dot, and the replica that opened it."""
SESSION, FACTS = "session", "stream.json"
"""Of each open stream: its saved session; and its owner, recipe, conversation, and a random mark of this state."""
TELLS_S = 5.0
"""Seconds between two reports of a replica's metrics to Ray."""
LISTS_S = 1.0
"""Seconds that a router waits for the list of streams; after that it takes its last one."""
OPENS_S = 60.0
"""Seconds after which a request that opens a stream no longer counts as one at its replica."""
PLACED_S = 60.0
"""Seconds that the cluster has to find room for replicas with drafts' GPUs."""
Make = Callable[[], "Engine"]


class StreamRouter(RequestRouter):
    """Router for Ray Serve: a stream's requests go to the replica that holds it, a new stream to the replica with the fewest
    streams, and other requests to the less busy of two replicas."""

    def initialize_state(self, live: str) -> None:
        """`live`: the folder of open streams."""
        self._live = Path(live)
        self._listed = list[str]()  # the streams there were when the folder could last be read
        # By request that opens a stream: since when, and at which replica.
        self._opening = dict[str, tuple[float, str]]()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            # What the proxy sends to the replica, which reads it the same way.
            scope = pickle.loads(pending_request.args[0]).asgi_scope
            if found := NUMBER.match(scope["path"]):
                return [[_choose_replica(found[1], candidate_replicas, _name)]]
            if scope["path"] == router.prefix and scope.get("method") == "POST":
                request = pending_request.metadata.internal_request_id
                return [[one] for one in await self._by_streams(candidate_replicas, request)]
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

    async def _by_streams(self, replicas: Sequence[RunningReplica], request: str) -> list[RunningReplica]:
        """The replicas by the number of streams that are routed to each, fewest first; `request` opens one at the first."""
        with suppress(
            OSError
        ):  # also where the folder takes longer than `LISTS_S`, or no stream was ever opened
            self._listed = await asyncio.wait_for(asyncio.to_thread(os.listdir, self._live), LISTS_S)
        held = Counter(_name(_choose_replica(number, replicas, _name)) for number in self._listed)
        now = time.monotonic()
        self._opening = {
            key: one for key, one in self._opening.items() if now - one[0] < OPENS_S and key != request
        }
        held.update(name for _, name in self._opening.values())
        found = sorted(random.sample(replicas, len(replicas)), key=lambda one: held[_name(one)])
        self._opening[request] = now, _name(found[0])
        return found

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        """Count a stream that is being opened at the replica which took the request: the first choice may have no room."""
        request = pending_request.metadata.internal_request_id
        if request in self._opening:
            self._opening[request] = self._opening[request][0], str(replica_id.unique_id)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Leave a stream that was opened to its folder, which was made before: meanwhile the stream counted twice."""
        self._opening.pop(internal_request_id, None)


def _name(replica: RunningReplica) -> str:
    return str(replica.replica_id.unique_id)


def _choose_replica(number: str, replicas: Sequence[Any], name: Callable[[Any], str] = str) -> Any:
    """The replica that the stream id `number` names, or if it is gone, one by rendezvous hashing, so that few streams move
    when replicas come or go."""
    home = number.rpartition(".")[2]
    if (named := next((one for one in replicas if name(one) == home), None)) is not None:
        return named
    return max(replicas, key=lambda one: hashlib.sha256(f"{number} {name(one)}".encode()).digest())


class ReplicatedStreams(Streams):
    """The open streams of one replica; each is a copy of a state in the shared folder, which every change updates."""

    def __init__(self, engine: Engine, replica: str) -> None:
        super().__init__(engine)
        assert engine.settings.saves is not None
        self._replica, self._live = replica, engine.settings.saves / LIVE
        self._locks = weakref.WeakValueDictionary[str, asyncio.Lock]()
        self._seen: dict[str, str] = {}  # by stream, the mark of the state that it is a copy of

    async def __aenter__(self) -> None:
        await run_in_thread(self._expire)
        await super().__aenter__()
        self._works = [*map(asyncio.create_task, (self._expiring(), _tell(self.engine.metrics.registry)))]

    async def __aexit__(self, *error: object) -> None:
        for one in self._works:
            one.cancel()
        await super().__aexit__(*error)

    async def open(self, asked: SessionRequest, caller: str, number: str | None = None) -> Stream:
        if number is None:
            await run_in_thread(partial(self._check_own, caller))
        stream = await super().open(asked, caller)
        del self._open[stream.id]
        stream.id = number or f"{stream.id}.{self._replica}"
        self._open[stream.id] = stream
        try:
            if number is None:
                (self._live / stream.id).mkdir(parents=True, mode=0o700)
                await self.on_stream_change(stream)
        except BaseException:
            await self.close(stream, forget=True)
            raise
        return stream

    def _lock(self, number: str) -> asyncio.Lock:
        return self._locks.setdefault(number, asyncio.Lock())

    def saved_stream_folder(self, name: str, caller: str) -> Path:
        # No name that a caller gives has a dot.
        return self._live / name / SESSION if "." in name else super().saved_stream_folder(name, caller)

    async def load_current(self, number: str, caller: str | None) -> None:
        """Load a stream from the shared folder, unless the copy on this replica is up to date."""
        if not NUMBER.fullmatch(f"{router.prefix}/{number}") or await self._is_here(number):
            return
        async with self._lock(number):  # a save of ours ends first
            if await self._is_here(number):
                return
            if (have := self._open.get(number)) is not None:
                await self.close(have)
            facts = await run_in_thread(partial(_read, self._live / number))
            if facts is None or facts["owner"] != caller:
                return  # `get` says that there is none
            saved = number if (self._live / number / SESSION).exists() else None
            asked = SessionRequest.model_construct(recipe=facts["recipe"], resume=saved, fps=None)
            stream = await self.open(asked, facts["owner"], number)
            stream.session.session.history, self._seen[number] = facts["history"], facts["state"]
            stream.promise.fps, stream.promise.seconds = facts.get("promise", (1.0, 900.0))

    async def _is_here(self, number: str) -> bool:
        facts = await run_in_thread(partial(_read, self._live / number))
        return number in self._open and facts is not None and facts["state"] == self._seen.get(number)

    async def on_stream_change(self, stream: Stream) -> None:
        place, session = self._live / stream.id, stream.session
        if not place.is_dir():
            raise Refused(404, "the stream was closed elsewhere; open one.", "not_found")
        async with self._lock(stream.id), _alone(place):
            here = self._open.get(stream.id) is stream
            if not here or (stream.id in self._seen and not await self._is_here(stream.id)):
                if here:
                    await self.close(stream)
                raise Refused(
                    409, "the stream has gone on elsewhere; look at it and send this again.", "moved"
                )
            if session.frames:
                await session.save(place / SESSION)
            facts: dict[str, Any] = {"owner": stream.owner, "recipe": stream.recipe}
            facts["brief"] = stream.brief_json()
            facts |= {
                "history": session.session.history,
                "promise": (stream.promise.fps, stream.promise.seconds),
            }
            state = self._seen[stream.id] = secrets.token_hex(8)
            await run_in_thread(partial(_write, place, facts | {"state": state}))

    async def close(self, stream: Stream, forget: bool = False) -> None:
        self._seen.pop(stream.id, None)
        await super().close(stream)
        if forget:
            await run_in_thread(partial(shutil.rmtree, self._live / stream.id, True))

    def _check_own(self, caller: str) -> None:
        """Raise `Refused` where the streams of a caller in the folder, of all replicas, are too many or too large."""
        own = self._facts_of(caller)
        held = sum(count_bytes(self._live / number) for number in own)
        if len(own) >= self.limits.saves or held >= self.limits.saved_bytes:
            raise Refused(429, "too many streams are open on all replicas; close one.", "too_many_streams")

    def _facts_of(self, caller: str) -> dict[str, dict[str, Any]]:
        """The facts of a caller's streams in the folder, of all replicas, by their ids."""
        found = dict[str, dict[str, Any]]()
        for file in self._live.glob(f"*/{FACTS}"):
            with suppress(OSError):  # another replica deletes it
                facts = json.loads(file.read_text(encoding="utf-8"))
                if facts["owner"] == caller:
                    found[file.parent.name] = facts
        return found

    async def list_streams(self, caller: str) -> list[dict[str, Any]]:
        found = await run_in_thread(partial(self._facts_of, caller))
        return [{"id": number, **facts.get("brief", {})} for number, facts in found.items()]

    async def _expiring(self) -> None:
        while True:
            await asyncio.sleep(min(30.0, self.limits.idle_seconds / 2))
            await run_in_thread(self._expire)

    def _expire(self) -> None:
        """Mark streams at work here as used, and delete those that no replica has used for longer than `idle_seconds`."""
        for number in [number for number, one in list(self._open.items()) if one.busy]:
            with suppress(OSError):
                os.utime(self._live / number / FACTS)
        for place in self._live.glob("*"):
            with suppress(OSError):  # another replica deletes too
                file = place / FACTS
                used = (file if file.exists() else place).stat().st_mtime
                if time.time() - used > self.limits.idle_seconds:
                    shutil.rmtree(place, True)


@asynccontextmanager
async def _alone(place: Path) -> AsyncIterator[None]:
    """No other replica writes the state in `place` meanwhile."""
    with (place / "lock").open("a") as file:
        await run_in_thread(partial(fcntl.flock, file, fcntl.LOCK_EX))
        yield


def _read(place: Path) -> dict[str, Any] | None:
    """Read the facts of a stream, and mark it as used; None if there is no stream."""
    try:
        os.utime(place / FACTS)
        return dict(json.loads((place / FACTS).read_text(encoding="utf-8")))
    except OSError:
        return None


def _write(place: Path, facts: dict[str, Any]) -> None:
    part = place / f"{facts['state']}.part"
    part.write_text(json.dumps(facts), encoding="utf-8")
    part.replace(place / FACTS)


async def _tell(registry: Any) -> None:
    """Report the metrics of a replica to Ray, which exports them as `ray_mmaccel_...` with a label `replica`."""
    gauges = dict[str, Gauge]()
    while True:
        for family in registry.collect():
            for one in (one for one in family.samples if not one.name.endswith("_created")):
                if one.name not in gauges:
                    gauges[one.name] = Gauge(one.name, family.documentation, tuple(one.labels))
                gauges[one.name].set(one.value, one.labels)
        await asyncio.sleep(TELLS_S)


def _check_room(bundles: Sequence[dict[str, float]], count: int) -> None:
    """Raise `RecipeError` if the cluster finds no room for `count` replicas, each with `bundles` on one machine, within
    `PLACED_S`: Ray Serve would wait for ever. An application that is there is replaced, replica by replica, in its own room.
    """
    if NAME in serve.status().applications:
        return
    until = time.monotonic() + PLACED_S
    groups = [placement_group(list(bundles), "STRICT_PACK") for _ in range(count)]
    placed = [one.wait(max(0.0, until - time.monotonic())) for one in groups]
    for one in groups:
        remove_placement_group(one)
    if not all(placed):
        each = " and ".join(f"{one['GPU']:g}" for one in bundles)
        raise RecipeError(
            f"--draft-gpus: within {PLACED_S:g} s the cluster had room for {sum(placed)} of {count} replicas, each with "
            f"{each} GPUs and a CPU of one machine; ask for fewer replicas, add machines, or leave it out."
        )


def _draft_gpu(share: float) -> str:
    """Return the GPU of this replica's second bundle, which is the replica's as long as it lives, as `CUDA_VISIBLE_DEVICES`
    names it."""
    place = PlacementGroupSchedulingStrategy(get_current_placement_group(), placement_group_bundle_index=1)
    tell: Any = ray.remote(num_cpus=0, num_gpus=share, scheduling_strategy=place)(ray.get_gpu_ids)
    (gpu,) = ray.get(tell.remote(), timeout=PLACED_S)
    return str(gpu)


def serve_on_ray(
    make: Make,
    settings: Settings,
    replicas: str = "1",
    gpus: float = 1,
    draft_gpus: float = 0,
    blocking: bool = True,
) -> None:
    """Serve on Ray until stopped. Each replica loads its model by `make` and has `gpus` GPUs; `replicas` is their number, or
    a range for autoscaling ("1-8"). With `draft_gpus`, the draft's process of a replica works on one more GPU of the same
    machine, or has that share of it: a placement group holds both until the replica goes. Raises `RecipeError`."""
    if settings.saves is None:
        raise RecipeError("--ray: streams move by a folder that all machines see; give it by --saves.")
    if not (told := re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", replicas)):
        raise RecipeError(f"--replicas: {replicas!r} is neither a number nor two, as 1-8.")
    least, most = int(told[1]), int(told[2] or told[1])
    if most < least:
        raise RecipeError(f"--replicas: {replicas!r} ends below where it begins; write {most}-{least}.")

    def app() -> Any:
        replica = serve.get_replica_context().replica_id.unique_id
        if draft_gpus:
            os.environ[DRAFT_GPU] = _draft_gpu(draft_gpus)
        made = create_app(make(), partial(ReplicatedStreams, replica=replica))
        made.state.tuned = tuned = ExitStack()  # as long as the process, which is the replica's
        tuned.enter_context(tune_python_for_streams())
        return made

    before = signal.getsignal(signal.SIGTERM)
    scale: dict[str, Any] = {"num_replicas": least}
    if most != least:
        scale = {
            "autoscaling_config": {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": 8}
        }
    if draft_gpus:
        bundles = [{"CPU": 1, "GPU": gpus}, {"GPU": draft_gpus}]
        _check_room(bundles, least)
        scale |= {"placement_group_bundles": bundles, "placement_group_strategy": "STRICT_PACK"}
    serve.start("EveryNode", http_options={"host": settings.host, "port": settings.port})
    if callable(before) and threading.current_thread() is threading.main_thread():
        # Ray's own handler, which it installs as it begins, ends the process with status 15 and a stack.
        signal.signal(signal.SIGTERM, before)
    deployment = serve.deployment(serve.ingress(app)()).options(
        name=NAME,
        ray_actor_options={"num_gpus": gpus},
        max_ongoing_requests=settings.limits.waiting,
        health_check_period_s=2,
        request_router_config=RequestRouterConfig(
            request_router_class=StreamRouter,
            request_router_kwargs={"live": str((settings.saves / LIVE).absolute())},
        ),
        **scale,
    )
    how: dict[str, Any] = {"blocking": blocking, "external_scaler_enabled": most == least}
    serve.run(deployment.bind(), name=NAME, route_prefix="/", **how)
