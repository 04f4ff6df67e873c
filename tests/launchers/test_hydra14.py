"""The newest pre-release of Hydra 1.4: discovery, runs, and its execution whitelist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.launchers.conftest import table

pytestmark = pytest.mark.launchers

ON = ("+skip=rollout_cache", "skip.dump_dir=dumps")


def test_hydra_1_4_finds_the_plug_in_once(make_app: Callable[..., Any], hydra14: str) -> None:
    app = make_app(python=hydra14)
    shown = app.run("--info", "plugins")
    assert shown.out.count("RlskipSearchPathPlugin") == 1
    version = app.run("--version")
    assert version.said.startswith("Hydra 1.4.")


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_sweep(make_app: Callable[..., Any], hydra14: str, launcher: str) -> None:
    app = make_app(python=hydra14)
    run = app.run("-m", *ON, "a=1,2", f"hydra/launcher={launcher}")
    assert app.generated == [1, 2]
    assert sorted(row[2:] for row in table(run.out)) == [["0", "2"], ["2", "0"]]


def test_an_own_key_can_be_overridden(make_app: Callable[..., Any], hydra14: str) -> None:
    config, task = "record: false\nskip: 4\nmerge: none\n", "print(cfg.skip, cfg.record, cfg.merge)"
    app = make_app(python=hydra14, config=config, task=task)
    run = app.run("-m", "record=true", "merge=all", "skip=5,6")
    assert "5 True all" in run.out
    assert "6 True all" in run.out
    run = app.run("+skip=rolout_cache", fails=True)
    assert "Could not find 'skip/rolout_cache'" in run.err


@pytest.mark.parametrize("override", ["skip.stepz=[1]", "~hydra.callbacks.rlskip"])
def test_a_bad_config_is_refused(make_app: Callable[..., Any], hydra14: str, override: str) -> None:
    app = make_app(python=hydra14)
    run = app.run(*ON, override, fails=True)
    assert "rlskip" in run.err
    assert app.generated == []


@pytest.mark.parametrize(
    ("whitelist", "permitted"), [('["my_app.*"]', False), ('["my_app.*", "rlskip.*"]', True)]
)
@pytest.mark.parametrize("mode", [(), ("-m", "a=1,2")], ids=["single run", "multirun"])
def test_the_execution_whitelist(
    make_app: Callable[..., Any], hydra14: str, whitelist: str, permitted: bool, mode: Any
) -> None:
    """Without an entry for rlskip, Hydra ends the application, so nothing runs unskipped."""
    app = make_app(python=hydra14, hydra_main=f", execution_whitelist={whitelist}")
    run = app.run(*mode, *ON, fails=not permitted)
    if permitted:
        assert "rlskip: role rollout is on" in run.out
        # Hydra 1.4 warns where an application names no whitelist at all; here it did.
        assert "_target_='rlskip" not in run.err
        assert app.generated == [1, 2]
    else:
        assert "'rlskip.hooks.SkipCallback' is not in the Hydra execution whitelist" in run.err
        assert app.generated == []
