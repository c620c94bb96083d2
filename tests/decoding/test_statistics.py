"""Rates and their edges."""

from __future__ import annotations

import json

from dropmatch.decoding.statistics import Statistics


def test_nothing_generated() -> None:
    statistics = Statistics()
    assert statistics.acceptance_rate == statistics.acceptance_length == statistics.lossy_share == 0.0
    assert statistics.tokens_per_second == 0.0


def test_rates() -> None:
    statistics = Statistics(rounds=4, proposed=20, accepted=10, generated=14, lossy=7, seconds=2.0)
    statistics.reasons.update(exact=3, js=7)
    assert statistics.acceptance_length == 3.5
    assert statistics.acceptance_rate == 0.5
    assert statistics.lossy_share == 0.5
    assert statistics.tokens_per_second == 7.0
    values = json.loads(json.dumps(statistics.as_dict()))
    assert values["reasons"] == {"exact": 3, "js": 7}
    assert values["acceptance_length"] == 3.5
    assert values["rounds"] == 4
    assert set(values) >= {"rounds", "proposed", "accepted", "generated", "lossy", "judged", "acceptance_rate"}
