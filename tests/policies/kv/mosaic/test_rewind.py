"""A clip that breaks off, where the host's memory had to forget older units for it."""

from __future__ import annotations

from tests.policies.kv.mosaic.driven import LAYERS, TOKENS, Driven


def test_what_a_broken_clip_pushed_out_stays_forgotten() -> None:
    unit = LAYERS * 2 * 2 * TOKENS * 8 * 8
    driven = Driven(host_bytes=unit * 24, spill="drop_oldest", frames=20)
    state = driven.state
    driven.watch(31)
    mark, before = state.checkpoint(), int(state.index.absent.sum())
    driven.watch(12)
    state.restore(mark)
    here = set(range(state._first)) - set(state.index.absent.nonzero()[:, 0].tolist())
    assert 0 < before < int(state.index.absent.sum())
    assert all(here == set(state.store.units(layer)) for layer in range(LAYERS))
    driven.ask(driven.scenes[0])
    # What the clip itself pushed out comes anew.
    driven.watch(12)
    here = set(range(state._first)) - set(state.index.absent.nonzero()[:, 0].tolist())
    assert all(here == set(state.store.units(layer)) for layer in range(LAYERS))
