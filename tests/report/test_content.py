"""What a page holds: the figures of `show` and `rlskip.open`, and the sessions that fit."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlskip as package
from rlskip.batch.decoding import Decoder
from rlskip.compare.sides import Dumps
from rlskip.jobs.records import Recorder
from rlskip.report.page import render
from rlskip.report.sessions import GAP, LOG_PROBS, Vocabulary
from rlskip.runs.opened import Run
from rlskip.store import StepStore
from rlskip.store.layout import part_name
from tests.faulty_files import flip


@attrs.frozen
class Content:
    """What a page holds for its script: the index, and the chunks with the sessions."""

    index: dict[str, Any]
    chunks: list[dict[str, Any]]

    @classmethod
    def of(cls, file: Path) -> Content:
        found = re.findall(r'<script type="text/plain" id="(.*?)">(.*?)</script>', file.read_text())
        data = {name: json.loads(gzip.decompress(base64.b64decode(text))) for name, text in found}
        return cls(data["index"], [data[f"chunk-{i}"] for i in range(len(data) - 1)])

    def sessions(self, run: int = 0) -> dict[tuple[int, str, int], dict[str, Any] | None]:
        """The sessions that are listed, by step, group and number; None for those left out."""
        of, groups = self.index["runs"][run]["sessions"], self.index["runs"][run]["groups"]
        found: dict[tuple[int, str, int], dict[str, Any] | None] = {}
        for i, group in enumerate(of["group"]):
            key = groups["step"][group], groups["name"][group], of["number"][i]
            chunk = of["chunk"][i]
            found[key] = None if chunk < 0 else self.chunks[chunk]["sessions"][of["place"][i]]
        return found


def test_the_figures_are_those_of_show_and_of_open(
    rlskip: Any, run_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out" / "page.html"
    said = rlskip("report", run_dir, "--html", out, "--json").json
    assert (said["steps"], said["sessions"], said["shown"]) == (3, 24, 24)
    (run,) = Content.of(out).index["runs"]
    steps = run["steps"]
    assert steps["step"] == [1, 2, 3]
    for i, step in enumerate(steps["step"]):
        (shown,) = rlskip("show", step, "-d", run_dir, "--json").json
        figures = {name: column[i] for name, column in steps.items()}
        assert figures == {**shown["figures"], "step": step}
        groups = list(Run(run_dir)[step].groups())
        rewards = [[one.reward or 0.0 for one in group.sessions] for group in groups]
        lengths = [one.length or 0 for group in groups for one in group.sessions]
        for name, values in (("reward", np.concatenate(rewards)), ("length", lengths)):
            quartiles = [steps[f"{name}_{which}"][i] for which in ("low", "median", "high")]
            assert quartiles == pytest.approx(np.quantile(values, (0.25, 0.5, 0.75)))
            assert steps[name][i] == pytest.approx(np.mean(values))
        assert steps["pass_1"][i] == np.mean([r >= 0.5 for some in rewards for r in some])
        assert steps["pass_k"][i] == np.mean([max(some) >= 0.5 for some in rewards])
        assert steps["no_signal"][i] == np.mean([len({*some}) == 1 for some in rewards])
        own = [g for g, of in enumerate(run["groups"]["step"]) if of == step]
        assert [run["groups"]["reward"][g] for g in own] == pytest.approx(
            [np.mean(some) for some in rewards]
        )


def test_calls_of_a_step_count_together(rlskip: Any, tmp_path: Path) -> None:
    store = StepStore(tmp_path / "e_p" / "s")
    for step, number in [(1, 0), (2, 0), (2, 1)]:
        rows = [{"prompt_ids": [1], "completion_ids": [5 + number]}]
        store.save(step, rows, info={"seconds": 2.0}, call=part_name(number))
    recorder = Recorder(tmp_path, "rollout")
    recorder.write("consulted", run="e_p/s")
    for number in (0, 1, 1):
        recorder.write("hit", step=2, call=part_name(number), seconds_saved=2.0)
    recorder.write("miss", step=2)
    rlskip("report", tmp_path, "--html", tmp_path / "page.html")
    (run,) = Content.of(tmp_path / "page.html").index["runs"]
    names = ("step", "sessions", "seconds")
    assert [run["steps"][name] for name in names] == [[1, 2], [1, 2], [2, 4]]
    facts = dict(run["facts"])
    assert (facts["hits, misses"], facts["generation saved"]) == ("3, 1", "6 s")
    assert run["groups"]["dump"] == ["1", "2/0", "2/1"]
    calls = rlskip("show", 2, "-d", tmp_path, "--json").json
    assert [one["figures"]["sessions"] for one in calls] == [1, 1]


def test_turns_are_told_apart(rlskip: Any, tmp_path: Path) -> None:
    rows = [
        ([1, 2], [5, 6, 7, 8, 9], [1, 1, 0, 0, 1]),
        ([1, 2, 5, 6, 7, 8, 9, 30], [10], [1]),
        ([1, 2, 7, 8, 9, 30, 10, 31], [11], None),
    ]
    names = ("prompt_ids", "completion_ids", "completion_mask", "turn")
    named = [
        {**dict(zip(names, (*row, turn), strict=True)), "prompt": 0, "session": 0}
        for turn, row in enumerate(rows)
    ]
    StepStore(tmp_path / "e_p" / "s").save(1, named)
    rlskip("report", tmp_path, "--html", tmp_path / "page.html")
    (one,) = Content.of(tmp_path / "page.html").sessions().values()
    assert [(part["kind"], part["turn"], part["ids"]) for part in one["parts"]] == [
        ("prompt", 0, [1, 2]), ("sampled", 0, [5, 6]), ("observed", 0, [7, 8]), ("sampled", 0, [9]),
        ("observed", 1, [30]), ("sampled", 1, [10]),
        ("prompt", 2, [1, 2, 7, 8, 9, 30, 10, 31]), ("sampled", 2, [11]),
    ]  # fmt: skip


def test_tokens_have_what_a_job_recorded_of_them(rlskip: Any, tmp_path: Path, job_of: Any) -> None:
    n, width = 4, 3
    batch = {
        "prompts": torch.arange(1, n + 1)[:, None],
        "responses": torch.arange(10, 10 + n * width).reshape(n, width),
        "response_mask": torch.ones(n, width, dtype=torch.int64),
        "rollout_log_probs": torch.full((n, width), -1.0),
    }
    run = tmp_path / "e_p" / "GBS4_N1_in1_out3"
    StepStore(run).save(1, batch)
    order = torch.tensor([2, 0, 3, 1])
    moved = {name: column[order] for name, column in batch.items()}
    values = torch.arange(n * width).reshape(n, width) / 8

    def body(step: int) -> None:
        Recorder(tmp_path, "rollout").write("consulted", run="e_p/GBS4_N1_in1_out3")
        package.record("engine_log_probs", moved["rollout_log_probs"], rows=moved)
        package.record("old_log_probs", -values[order], rows=moved)
        package.record("advantages", values[order, 0], rows=moved)

    job = job_of("job", body, steps=[1]).directory
    page = ("--html", tmp_path / "page.html")
    assert rlskip("report", job.name, "-d", job.parents[1], *page).code == 0, "as compare takes it"
    rlskip("report", run, *page)
    found = Content.of(tmp_path / "page.html").sessions()
    for i, one in enumerate(found.values()):
        expected = values[i].tolist()
        assert one["parts"][1]["values"] == {
            **dict.fromkeys((LOG_PROBS, "engine_log_probs"), [-1.0] * width),
            "old_log_probs": [-v for v in expected],
            "advantages": [expected[0]] * width,
            GAP: [1 - v for v in expected],
        }
    (gap,) = Content.of(tmp_path / "page.html").index["runs"][0]["curves"][f"|{GAP}|"]
    assert gap == pytest.approx((1 - values).abs().mean().item())


def test_a_page_keeps_its_size_and_says_what_is_left_out(rlskip: Any, tmp_path: Path) -> None:
    """Of 2 x 600 sessions in 60 groups, whose tokens take about 1.5 MB of a page."""
    directory = tmp_path / "e_p" / "GBS60_N10_in1_out200"
    rng = np.random.default_rng(0)
    for step in (1, 2):
        rows = {
            "prompts": torch.arange(60).repeat_interleave(10)[:, None] + 60 * step,
            "responses": torch.from_numpy(rng.integers(0, 150_000, (600, 200))),
            "rewards": torch.from_numpy(rng.random(600)),
        }
        StepStore(directory).save(step, rows)
    out = tmp_path / "page.html"
    whole = rlskip("report", tmp_path, "--html", out).out
    assert ": 2 steps, 1200 sessions shown, " in " ".join(whole.split())
    whole_index = Content.of(out).index["runs"][0]
    said = rlskip("report", tmp_path, "--html", out, "--max-mb", 0.6).out
    told = re.search(r"2 steps, (\d+) sessions shown, (\d+) left out", " ".join(said.split()))
    assert told is not None
    n, left = map(int, told.groups())
    assert n + left == 1200
    assert 400_000 < out.stat().st_size <= 600_000
    found = Content.of(out)
    (run,) = found.index["runs"]
    assert run["steps"] == whole_index["steps"], "the figures count all"
    assert run["all"] == {"sessions": 1200, "groups": 120}
    shown = {key for key, one in found.sessions().items() if one is not None}
    assert len(shown) == n < 1200
    assert len({key[:2] for key in shown}) == 120, "every group is there"
    sessions = Run(directory).sessions()
    rewards = {(s.place["step"], s.group, s.number): s.reward for s in sessions}
    by_reward = sorted(rewards, key=lambda key: rewards[key] or 0.0)
    assert {*by_reward[:20], *by_reward[-20:]} <= shown


def test_a_long_line_and_hostile_names_stay_data(rlskip: Any, tmp_path: Path) -> None:
    evil = "</script><script>document.title='owned'</script>"
    rows = [{"prompt": evil, "completions": "x" * (1 << 20)}, {"prompt": evil, "completions": evil}]
    StepStore(tmp_path / "e_p" / "s").save(1, rows)
    out = tmp_path / "page.html"
    said = rlskip("report", tmp_path, "--html", out, "--json").json
    assert said["bytes"] < 300_000
    page = out.read_text()
    assert "owned" not in page
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', page)
    assert policy.startswith("default-src 'none';")
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert len(scripts) == 9
    assert not re.findall(r"<[^>]*\b(?:src|href|on\w+|style)=", page)
    texts = json.dumps(Content.of(out).chunks)
    assert json.dumps(evil)[1:-1] in texts


def test_a_damaged_dump_is_named_and_the_rest_is_shown(
    rlskip: Any, run_dir: Path, tmp_path: Path
) -> None:
    file = run_dir / "2" / "gen_batch.dp"
    flip(file, file.stat().st_size // 3)
    out = tmp_path / "page.html"
    assert rlskip("report", run_dir, "--html", out, "--json").json["shown"] == 16
    (run,) = Content.of(out).index["runs"]
    ((name, problem),) = run["problems"]
    assert name == "dump 2"
    assert problem
    assert file.exists()


class Letters:
    """A tokenizer of bytes: a character may have several tokens."""

    def __len__(self) -> int:
        return 256

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


@settings(max_examples=30)
@given(st.text())
def test_the_texts_of_tokens_make_up_the_whole(said: str) -> None:
    words, ids = Vocabulary(Decoder(Letters())), list(said.encode())
    texts = words.add(ids)
    assert "".join(texts or [words.texts[token] for token in ids]) == said
    assert texts is None or len(texts) == len(ids)


def test_text_of_a_tokenizer_is_in_the_page(run_dir: Path, tmp_path: Path) -> None:
    run = Run(run_dir, decode=Decoder(Letters()))
    page, _ = render([Dumps("run", run)], success=0.5, max_bytes=10**6)
    (tmp_path / "page.html").write_bytes(page)
    found = Content.of(tmp_path / "page.html")
    prompt = next(iter(Run(run_dir).iter_rows(["prompt"])))["prompt"]
    assert found.index["runs"][0]["groups"]["prompt"][0] == bytes(prompt).decode()
    assert found.chunks[0]["texts"][str(prompt[0])] == chr(prompt[0])
