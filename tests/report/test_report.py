"""report: the page's figures, that nothing in it runs or is fetched, and how it opens."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from rlskip.dispatch.timeline import Span, write_trace
from rlskip.jobs.records import Recorder
from rlskip.report.figures import look
from rlskip.report.page import render
from rlskip.runs.on_disk import Run
from rlskip.runs.trajectories import lengths_of, rewards_of, rollout_columns, trajectories_of
from rlskip.store import StepStore

EVIL = "</pre><script>document.title='owned'</script><img src=http://192.0.2.1/x onerror=alert(1)>"


@pytest.fixture(scope="session")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no chromium here (Debian package chromium)")
    return found


def open_page(chromium: str, page: Path, *flags: str) -> str:
    """What the browser made of the page, without any network."""
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,2200",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={page.parent / 'profile'}",
        *flags, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def test_the_page_tells_what_the_records_and_dumps_say(
    rlskip: Any, run_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out" / "page.html"
    said = rlskip("report", run_dir, "--html", out, "--json").json
    assert (said["steps"], said["hits"], said["misses"], said["sessions_counted"]) == (3, 3, 3, 24)
    assert said["seconds_saved"] == pytest.approx(42.75)
    page = out.read_text()
    assert "24 of 24 sessions; from 3 to 8" in page
    assert page.count("<details") == 24
    rollouts = StepStore(run_dir).load(1)
    length = int(rollouts["response_mask"][0].sum())
    assert " ".join(map(str, rollouts["responses"][0, :length].tolist())) in page
    few = rlskip("report", run_dir, "--html", out, "--sessions", 4, "--json").json
    assert few["sessions_shown"] == 4


def test_turns_are_told_apart_by_the_mask(rlskip: Any, tmp_path: Path) -> None:
    row = {"prompt_ids": [1], "completion_ids": [5, 6, 7, 8, 9], "completion_mask": [1, 1, 0, 0, 1]}
    StepStore(tmp_path / "e_p" / "s").save(1, [{**row, "reward": 0.25}])
    rlskip("report", tmp_path, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert '<span class="sampled">5 6</span> <span class="other">7 8</span>' in page
    assert "reward 0.25, 5 tokens, 3 of them sampled" in page


def test_calls_of_a_step_are_named_and_have_their_own_hits(rlskip: Any, tmp_path: Path) -> None:
    store = StepStore(tmp_path / "e_p" / "s")
    for step, number in [(1, 0), (2, 0), (2, 1)]:
        rows = [{"prompt_ids": [1], "completion_ids": [5 + number]}]
        store.save(step, rows, info={"seconds": 2.0}, part=number or None)
    recorder = Recorder(tmp_path, "rollout")
    recorder.write("consulted", run="e_p/s")
    for number in (0, 1, 1):
        recorder.write("hit", step=2, part=number, seconds_saved=2.0)
    recorder.write("miss", step=2)
    said = rlskip("report", tmp_path, "--html", tmp_path / "page.html", "--json").json
    assert (said["steps"], said["hits"], said["misses"]) == (2, 3, 1)
    page = (tmp_path / "page.html").read_text()
    assert "<dt>hits</dt><dd>3</dd>" in page
    assert "<dt>misses</dt><dd>1</dd>" in page
    table = page[page.index("<h2>Steps") :]
    cells = [re.findall("<td>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    counted = [(row[0], *row[7:10]) for row in cells]
    saved = [("1", "0", "0", "0.0 s"), ("2/0", "1", "1", "2 s"), ("2/1", "2", "0", "4 s")]
    assert counted == saved
    assert re.findall(r'class="a"[^>]*><title>step (\S+): 2 s', page) == ["1", "2/0", "2/1"]
    assert re.findall(r"<summary>step (\S+), ", page) == ["1", "2/0", "2/1"]


def test_figures_of_whole_columns_are_those_of_the_rows(run_dir: Path) -> None:
    (dump,) = Run(run_dir).dumps(2)
    columns = rollout_columns(dump.load(into="numpy"))
    rows = trajectories_of(columns)
    assert lengths_of(columns) == [len(row.response) for row in rows]
    assert rewards_of(columns) == pytest.approx([row.reward for row in rows])


def test_it_has_a_curve_by_step_and_the_best_and_worst_sessions(
    rlskip: Any, tmp_path: Path
) -> None:
    store = StepStore(tmp_path / "e_p" / "s")
    for step in (1, 2, 10):
        rows = [
            {
                "prompt": group,
                "session": session,
                "turn": turn,
                "prompt_ids": [1],
                "completion_ids": [5] * step,
                "reward": float(turn * session * step),
            }
            for group in range(2)
            for session in range(3)
            for turn in range(2)
        ]
        store.save(step, rows)
    rlskip("report", tmp_path, "--html", tmp_path / "page.html", "--sessions", 6)
    page = (tmp_path / "page.html").read_text()
    points = re.findall(r"<title>(step [^<]*)</title></circle>", page)
    assert points == [
        "step 1: 1 reward", "step 2: 2 reward", "step 10: 10 reward",
        "step 1: 2 tokens", "step 2: 4 tokens", "step 10: 20 tokens",
    ]  # fmt: skip
    assert "<dt>in step 10</dt><dd>10</dd>" in page
    best, worst, drawn = page.partition("The best")[2].split("<h3>")
    titles = [re.findall(r"<summary>(.*?)</summary>", part) for part in (best, worst, drawn)]
    assert sorted(titles[0]) == [
        f"step 10, group {group}, session 2, 2 turns, reward 20, 20 tokens" for group in (0, 1)
    ]
    assert all("session 0, 2 turns, reward 0" in title for title in titles[1])
    assert [len(some) for some in titles] == [2, 2, 2]
    table = page[page.index("<h2>Steps") :]
    assert "<td>1</td><td>6</td><td>2</td><td>1</td><td>2</td>" in table


def test_the_page_says_which_dumps_are_not_counted(
    rlskip: Any, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlskip.report.figures.MAX_VALUES", 9)
    out = tmp_path / "page.html"
    assert rlskip("report", run_dir, "--html", out, "--json").json["sessions_counted"] == 16
    assert "the last 16 sessions; 1 earlier dump is not counted" in out.read_text()


def test_of_many_steps_the_table_has_the_last(run_dir: Path) -> None:
    report = look(Run(run_dir), 0, None, None)
    first = report.steps[0]
    places = [attrs.evolve(first.dump.place, step=i) for i in range(600)]
    steps = [attrs.evolve(first, dump=attrs.evolve(first.dump, place=place)) for place in places]
    page = render(attrs.evolve(report, steps=steps))
    assert "<p>The last 500 of 600.</p>" in page
    assert re.findall(r"<tr><td>(\d+)</td>", page) == [str(i) for i in range(100, 600)]


def test_the_page_fits_a_telephone(
    rlskip: Any, tmp_path: Path, chromium: str, run_dir: Path
) -> None:
    span = Span(0, 0, "uid", 0, 0, 0.0, 0.1, 1.0, tokens=3)
    write_trace([span], tmp_path / "train-1.json")
    rlskip("report", run_dir, "--html", tmp_path / "page.html", "--timeline", tmp_path)
    frame = tmp_path / "frame.html"
    frame.write_text(
        '<iframe src="page.html" style="width:390px;height:800px;border:0" onload="'
        "const page = contentDocument.documentElement;"
        "document.title = 'beyond ' + (page.scrollWidth - page.clientWidth)\"></iframe>"
    )
    seen = open_page(chromium, frame, "--allow-file-access-from-files", "--dump-dom")
    assert "<title>beyond 0</title>" in seen


def test_a_damaged_dump_is_named_and_the_rest_is_shown(
    rlskip: Any, run_dir: Path, tmp_path: Path
) -> None:
    file = run_dir / "2" / "gen_batch.dp"
    file.write_bytes(file.read_bytes()[:-3])
    out = tmp_path / "page.html"
    assert rlskip("report", run_dir, "--html", out, "--json").json["sessions_counted"] == 16
    assert "bytes of" in out.read_text()
    assert file.exists()


def test_damage_that_only_a_checksum_shows_is_named(
    rlskip: Any, run_dir: Path, tmp_path: Path
) -> None:
    file = run_dir / "2" / "gen_batch.dp"
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    out = tmp_path / "page.html"
    assert rlskip("report", run_dir, "--html", out, "--json").json["sessions_counted"] == 16
    (bad,) = re.findall("<tr><td>2</td>.*?</tr>", out.read_text())
    assert not bad.endswith("<td></td></tr>")
    assert "not counted" not in out.read_text()


def test_nothing_in_a_dump_runs_or_is_fetched(rlskip: Any, tmp_path: Path, chromium: str) -> None:
    store = StepStore(tmp_path / "e_p" / "s")
    rows = {
        "responses": torch.ones(2, 3, dtype=torch.int64),
        "uid": NonTensorStack(EVIL, EVIL),
    }
    store.save(1, TensorDict(rows, [2]), info={"seconds": 1.0, "job": EVIL})
    span = Span(0, 0, EVIL, 0, 0, 0.0, 0.1, 1.0, tokens=3)
    write_trace([span], tmp_path / "train-1.json")
    out = tmp_path / "page.html"
    said = rlskip("report", tmp_path, "--html", out, "--timeline", tmp_path, "--json")
    assert said.json["timelines"] == ["train-1"]
    page = out.read_text()
    assert EVIL not in page
    assert not re.findall(r"<(script|img|link|iframe|object)|<[^>]*\b(src|href|on\w+)=", page)
    dom = open_page(chromium, out, "--dump-dom")
    assert "<title>e_p/s</title>" in dom
    assert "owned</title>" not in dom
    assert "<script" not in dom
    assert "alert(1)" in dom, "it is there, as text"


def test_it_opens_at_once_with_ten_thousand_rows(
    rlskip: Any, tmp_path: Path, chromium: str
) -> None:
    rng = np.random.default_rng(0)
    n, width = 10_000, 256
    lengths = torch.from_numpy(rng.integers(10, width, n))
    real = torch.arange(width) < lengths[:, None]
    batch = {
        "prompts": torch.from_numpy(rng.integers(0, 99, (n, 16))),
        "responses": torch.from_numpy(rng.integers(0, 99, (n, width))) * real,
        "response_mask": real.long(),
        "rewards": torch.from_numpy(rng.random(n)),
    }
    StepStore(tmp_path / "e_p" / "s").save(1, TensorDict(batch, [n]), info={"seconds": 60.0})
    out = tmp_path / "page.html"
    began = time.process_time()  # another process may have the processor for long
    said = rlskip("report", tmp_path, "--html", out, "--json").json
    made = time.process_time() - began
    assert said["sessions_counted"] == n
    assert said["sessions_shown"] == 50
    assert said["bytes"] < 300_000
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    picture = tmp_path / "page.png"
    open_page(chromium, out, f"--screenshot={picture}")
    opened = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert picture.stat().st_size > 10_000
    assert made < 20
    assert opened < 30


def test_a_timeline_of_another_program_is_passed_over(
    rlskip: Any, run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "train-1.json").write_text(json.dumps({"other": []}))
    (tmp_path / "train-2.json").write_text("{")
    out = tmp_path / "page.html"
    said = rlskip("report", run_dir, "--html", out, "--timeline", tmp_path, "--json")
    assert (said.code, said.json["timelines"]) == (0, [])


def test_what_is_left_out_of_the_dispatch_is_said(
    rlskip: Any, run_dir: Path, tmp_path: Path
) -> None:
    def trace(name: str, attempts: int) -> None:
        spans = [
            Span(0, 0, "u", i, i % 2, float(i), i + 0.1, i + 0.9, tokens=3) for i in range(attempts)
        ]
        write_trace(spans, tmp_path / f"{name}.json")

    out = tmp_path / "page.html"
    for step in range(1, 7):
        trace(f"train-{step}", 1)
    said = rlskip("report", run_dir, "--html", out, "--timeline", tmp_path, "--json").json
    assert said["timelines"] == [f"train-{step}" for step in range(1, 7)]
    assert "of 6 timelines" not in out.read_text()
    trace("train-10", 5_001)
    trace("train-9", 5_000)
    (tmp_path / "other-11.json").write_text("{")
    endless = (tmp_path / "train-9.json").read_text().replace('"dur": 8', '"dur": Infinity, "x": 8')
    (tmp_path / "other-12.json").write_text(endless)
    said = rlskip("report", run_dir, "--html", out, "--timeline", tmp_path, "--json").json
    assert said["timelines"] == [f"train-{step}" for step in (3, 4, 5, 6, 9, 10)]
    page = out.read_text()
    assert "<p>The last 6 of 8 timelines.</p>" in page
    assert page.count("<p>5000 of its 5001 attempts are shown.</p>") == 1
    assert page.count("attempts are shown") == 1
    assert 'class="r"' in page
    assert set(re.findall(">worker (.*?)</text>", page)) == {"0"}
    assert re.findall("<details open><summary>(train-.*?)</summary>", page) == ["train-3"]


def test_long_texts_and_short_masks_and_losses(rlskip: Any, tmp_path: Path) -> None:
    run = tmp_path / "e_p" / "s"
    row = {
        "prompt_ids": list(range(10_000, 14_000)),
        "completion_ids": [5, 6, 7],
        "completion_mask": [0, 1],
        "reward": 1.0,
    }
    StepStore(run).save(1, [row])
    record = {"role": "r", "event": "hit", "run": "e_p/s", "step": 1, "seconds_saved": -5.0}
    (tmp_path / "records" / "job").mkdir(parents=True)
    (tmp_path / "records" / "job" / "a.jsonl").write_text(json.dumps(record) + "\n")
    rlskip("report", run, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "13999</pre>" in page, "of a long prompt the end is shown"
    assert "10000 " not in page
    assert '<span class="other">5</span>' in page
    assert '<span class="sampled">6 7</span>' in page
    assert "<dt>generation saved</dt><dd>-" not in page
