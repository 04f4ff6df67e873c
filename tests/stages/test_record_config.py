"""The keys of `record`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlskip.config.record import read_record
from rlskip.errors import ConfigError


def test_a_config_names_every_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        read_record({"record": {"stages": 3, "steps": "x", "values": "some", "keep_last": 0}})
    said = str(caught.value)
    assert all(f"record.{key}" in said for key in ("stages", "steps", "values", "keep_last"))


def test_the_dump_dir_is_that_of_skip(tmp_path: Path) -> None:
    config = {"record": {"enable": True}, "skip": {"dump_dir": str(tmp_path)}}
    assert read_record(config).dump_dir == str(tmp_path)
    assert not read_record({"skip": {"dump_dir": "s3://bucket"}}).enable
