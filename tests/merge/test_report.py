import pytest

from rlskip.merge import MergeReport, merge
from tests.merge.batches import merge_config, pack, turns

# A context with an answer: tokens of the system, the user, the model.
SYSTEM = [*range(100, 110)]
ANSWER = [*range(200, 220)]
MORE = [*range(300, 310)]


class Letters:
    def decode(self, token_ids):
        return "".join(chr(ord("a") + token % 26) for token in token_ids)


@pytest.mark.parametrize(
    ("cause", "prompt", "token"),
    [
        # One token of the answer became two.
        ("drift", [*SYSTEM, *ANSWER[:5], 7, 8, *ANSWER[6:], *MORE], 15),
        # Two became one; so did the last of the prompt and the first of the answer.
        ("drift", [*SYSTEM[:9], 7, *ANSWER[1:], *MORE], 9),
        # The answer was rewritten.
        ("drift", [*SYSTEM, 7, 8, 9, *MORE], 10),
        # The answer, or its end, was taken out.
        ("stripped", [*SYSTEM, *ANSWER[12:], *MORE], 10),
        ("stripped", [*SYSTEM, ANSWER[19], *MORE], 10),
        ("stripped", [*SYSTEM, *ANSWER[:7]], 17),
        # So was part of what came before it.
        ("stripped", [*SYSTEM[:2], *SYSTEM[7:], *ANSWER, *MORE], 2),
        # The same prompt again, an earlier one, another one.
        ("branch", SYSTEM, 10),
        ("branch", SYSTEM[:4], 4),
        ("branch", [*SYSTEM[:8], *MORE], 8),
        ("branch", [*SYSTEM[:8], 7, ANSWER[19]], 8),  # the last token alone tells nothing
        ("branch", MORE, 0),
        ("branch", [], 0),
        # The prompts differ, so that no response is in common.
        ("branch", [SYSTEM[0], ANSWER[0], 5], 1),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_why_a_turn_was_not_merged(cause, prompt, token, packed):
    out = turns((SYSTEM, ANSWER), (prompt, [1]))
    _, _, report = merge(pack(out) if packed else out, merge_config())
    (found,) = report.breaks
    context = SYSTEM + ANSWER
    assert (found.row, found.after, found.cause, found.token) == (1, 0, cause, token)
    assert found.was == tuple(context[token : token + 8])
    assert found.now == tuple(prompt[token : token + 8])
    assert report[f"generate/num_merge_breaks_{cause}"] == 1


# An agent and its sub-agent, then the agent again.
AGENTS = (([1], [2]), ([7], [8]), ([1, 2, 3], [4]))
DRIFTED = ([1, 2, 3, 9], [5])


@pytest.mark.parametrize(
    ("pairs", "strategy", "breaks"),
    [
        # Row 2 agrees longest with row 0, and row 3 with row 2, which drifted.
        ((*AGENTS, DRIFTED), "adjacent", [(1, 0, "branch"), (2, 0, "branch"), (3, 2, "drift")]),
        ((*AGENTS, DRIFTED), "chain", [(1, 0, "branch"), (3, 2, "drift")]),
        # A drift is told against the row's own agent.
        ((*AGENTS[:2], ([1, 3], [4])), "chain", [(1, 0, "branch"), (2, 0, "drift")]),
    ],
)
def test_the_breaks_of_interleaved_agents(pairs, strategy, breaks):
    _, _, report = merge(turns(*pairs), merge_config(strategy=strategy))
    assert [(b.row, b.after, b.cause) for b in report.breaks] == breaks


def test_metrics_count_rows_tokens_and_breaks():
    out = turns(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 9], [5]), ([6], [7]))
    merged, uids, report = merge(out, merge_config(), uids=["p", "p'", "q", "r"])
    assert uids == ["p'", "q", "r"]
    assert len(merged["response_ids"]) == len(uids)
    assert dict(report) == {
        "generate/num_seq_before_merge": 4,
        "generate/num_seq_after_merge": 3,
        "generate/num_tokens_before_merge": 12,
        "generate/num_tokens_after_merge": 10,
        "generate/num_merge_breaks_overlong": 0,
        "generate/num_merge_breaks_branch": 2,
        "generate/num_merge_breaks_stripped": 0,
        "generate/num_merge_breaks_drift": 0,
    }


def test_a_break_can_be_read():
    out = turns(([0], [1, 2]), ([0, 1, 25, 25], [3]))
    _, _, report = merge(out, merge_config())
    assert str(report.breaks[0]) == (
        "row 1 does not continue row 0: drift at token 2, [2] became [25, 25]"
    )
    _, _, report = merge(out, merge_config(), tokenizer=Letters())
    assert str(report.breaks[0]) == (
        "row 1 does not continue row 0: drift at token 2, 'c' became 'zz'"
    )


def test_nothing_happens_when_off():
    out = turns(([0], [1]), ([0, 1], [2]))
    same, uids, report = merge(out, merge_config(stepwise_output=False), uids=["p", "p"])
    assert same is out
    assert uids == ["p", "p"]
    assert report == MergeReport()
    assert not report
