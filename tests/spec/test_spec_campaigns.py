"""How campaigns launch what they measure: every condition names something that is known, and is met as it is written."""

import msgspec
import pytest

from headrace.plan.deployment import Inputs
from headrace.spec import campaign, engine_facts, hardware, models
from headrace.spec.campaign import Run, campaign_of, campaigns
from headrace.spec.precision import PRECISIONS

LAUNCHES = [(c.name, i, launch) for c in campaigns() for i, launch in enumerate(c.launch)]


@pytest.mark.parametrize(("name", "i", "launch"), LAUNCHES)
def test_conditions_name_what_is_known_and_settings_what_is_asked(name, i, launch):
    """A name that is spelled otherwise than the catalogs' would be met by no run, without a word."""
    assert launch.source
    assert launch.settings()
    assert set(campaign.SETTINGS) <= {f.name for f in msgspec.structs.fields(Inputs)}
    assert all(m in models.catalog() for m in launch.models)
    assert not launch.gpu or launch.gpu in hardware.catalog()
    assert not launch.generation or launch.generation in {g.generation for g in hardware.catalog().values()}
    assert not launch.engine or engine_facts.find(launch.engine).id == launch.engine
    assert not launch.weights or any(p.startswith(launch.weights) for p in PRECISIONS)


def test_campaigns_name_models_of_the_catalog_and_the_last_holds_all():
    *some, last = campaigns()
    assert all(m in models.catalog() for c in campaigns() for m in c.models)
    assert all(c.lengths for c in some)
    assert last.lengths == last.models == ()
    assert campaign_of(run(model="nobody's")).name == last.name


def run(**given) -> Run:
    usual = {
        "model": "deepseek-r1", "engine": "sglang", "version": "0.5.9", "gpu": "b200-sxm-180", "generation": "blackwell",
        "weights": "fp8_block128", "tp": 8, "isl": 1024, "osl": 1024, "concurrency": 16,
    }  # fmt: skip
    return Run(**usual | given)


@pytest.mark.parametrize(
    ("given", "poll_steps"),
    [({}, 30), ({"concurrency": 15}, 10), ({"generation": "hopper"}, 1), ({"osl": 1000}, 1), ({"engine": "vllm"}, 1)],
)
def test_bounds_are_met_at_their_value(given, poll_steps):
    one = run(**given)
    assert campaign_of(one).settings(one).get("poll_steps", 1) == poll_steps


@pytest.mark.parametrize(("version", "mixes"), [("0.5.2", False), ("v0.5.3", True), ("0.5.10", True), ("", True)])
def test_versions_count_as_numbers(version, mixes):
    one = run(version=version, isl=2048)
    assert campaign_of(one).settings(one).get("mixed_chunk", False) is mixes
