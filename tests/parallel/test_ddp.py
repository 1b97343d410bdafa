"""DDP on the toy: three weights of 144 bytes."""

from __future__ import annotations

import numpy as np

from llmem.lifetimes import Category
from llmem.parallel.ddp import ranks
from llmem.spec import make_spec
from tests.parallel.toy import toy_trace

WEIGHT = 144


def spec(**fields: object):  # type: ignore[no-untyped-def]
    return make_spec(model="gpt2", gpus=2, strategy="ddp", **fields)




def test_buckets_beside_gradients() -> None:
    trace = toy_trace()
    table = ranks(trace, spec())[0].lifetimes
    added = table.take((table.category == Category.COMMUNICATION) & (table.birth_op == -1))
    assert added.nbytes.tolist() == [3 * WEIGHT, 3 * WEIGHT]
    # the first bucket dies when the second one is built, at the second forward
    assert added.death[0] < added.birth[1]
    assert np.sum(table.category == Category.GRADIENT) == 6


def test_gradients_as_bucket_views_end_when_ready() -> None:
    trace = toy_trace()
    table = ranks(trace, spec(gradient_as_bucket_view=True))[0].lifetimes
    gradients = table.take((table.category == Category.GRADIENT) & (table.key >= 0))
    lives = gradients.death - gradients.birth
    plain = ranks(trace, spec())[0].lifetimes
    before = plain.take((plain.category == Category.GRADIENT) & (plain.key >= 0))
    assert len(gradients) == 6
    assert (lives < before.death - before.birth).all()
    kept = table.take((table.category == Category.GRADIENT) & (table.key == -1))
    assert kept.nbytes.tolist() == [3 * WEIGHT, 3 * WEIGHT]


def test_states_are_broadcast_once() -> None:
    trace = toy_trace()
    table, named = (lambda r: (r.lifetimes, r.trace))(ranks(trace, spec())[0])
    flats = [i for i in range(len(table)) if named.op_name(int(table.birth_op[i])) == "broadcast"]
    assert table.nbytes[flats].tolist() == [3 * WEIGHT]
    assert (table.death[flats] < trace.phase_ticks[2][0]).all()


def test_all_ranks_are_alike() -> None:
    assert ranks(toy_trace(), spec())[0].ranks == (0, 1)
