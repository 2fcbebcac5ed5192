"""Hostile frames: refused before anything of them is decoded. A million of them: `make fuzz`."""

import random

import pytest

from async_pp.errors import BadFrame, BadSeal, LimitExceeded, StaleEpoch
from async_pp.wire.frames import Direction, Opener
from tests.security import fuzz
from tests.security.mutations import COMMON, COSTLY, EPOCH, KEY, LIMITS, RANK, Mutation, flat, sealer, targets
from tests.security.mutations import TO_RANK as MESSAGES


def test_20_000_hostile_frames_none_accepted_nothing_decoded() -> None:
    refused = fuzz.fuzz(20_000, seed=20_000)
    assert refused.total() == 20_000
    assert set(refused) == {"BadFrame", "BadSeal", "StaleEpoch", "LimitExceeded"}


@pytest.mark.parametrize("mutation", COMMON + COSTLY, ids=lambda mutation: mutation.__name__)
def test_every_mutation_is_one(mutation: Mutation) -> None:
    rng = random.Random(1)
    good = flat(sealer(Direction.TO_RANK).seal(*MESSAGES[0]))
    assert any(mutation(rng, good) != good for _ in range(10))


def test_what_was_made_in_good_order_for_somebody_else_is_refused_by_its_own_name() -> None:
    for target in targets():
        opener = Opener(KEY, epoch=EPOCH, direction=target.direction, rank=RANK, limits=LIMITS)
        for frame in target.before:
            opener.open(frame)
        errors = []
        for frame in target.foreign:
            with pytest.raises((BadFrame, BadSeal, StaleEpoch, LimitExceeded)) as caught:
                opener.open(frame)
            errors.append(caught.type)
        assert errors == [BadSeal, StaleEpoch, StaleEpoch, *[BadFrame] * 5]
        opener.open(target.good)


def test_the_fuzzer_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hmac.compare_digest", lambda ours, theirs: True)
    with pytest.raises(fuzz.Accepted):
        fuzz.fuzz(2000, seed=1)
