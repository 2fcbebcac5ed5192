"""The book: every request ends once, in one of four ways, and nothing that is not promised adds up to a promise."""

import pytest

from async_pp.bench.survive.ledger import Ledger, Prompt, prompts, silence, undisturbed

PROMPT = Prompt(0, (7, 8), 3)
LAST = {"choices": [{"token_ids": [12], "finish_reason": "length"}]}
TYPED = {"error": {"message": "lost", "type": "Internal Server Error", "code": 500}}


def tokens(*ids):
    return {"choices": [{"token_ids": list(ids), "finish_reason": None}]}


def book(*events, done=True, ledger=None):
    request = (ledger or Ledger()).open(PROMPT)
    for event in events:
        request.event(event)
    request.stream_ended(done=done)
    return request


@pytest.mark.parametrize(
    ("events", "done", "outcome", "why"),
    [
        ([tokens(10, 11), LAST, {"choices": [], "usage": {}}], True, "completed", ""),
        ([tokens(10, 11), LAST], False, "broken", "3 tokens of 3, end told: False"),
        ([tokens(10), LAST], True, "broken", "2 tokens of 3, end told: True"),
        ([tokens(10)], True, "broken", "the stream stopped"),
        ([{"choices": [{"token_ids": [], "finish_reason": "abort"}]}], True, "broken", "finish reason abort"),
        ([tokens(10), TYPED], True, "failed", "500 Internal Server Error"),
        ([{"error": {"message": "", "type": "x"}}], True, "broken", "an error without message and type"),
        ([{"error": "lost"}], True, "broken", "an error without message and type"),
    ],
)
def test_how_a_stream_ends(events, done, outcome, why):
    request = book(*events, done=done)
    assert (request.outcome, request.why, request.twice) == (outcome, why, False)


@pytest.mark.parametrize(
    "events",
    [
        [tokens(10, 11, 12, 13)],
        [tokens(10, 11), LAST, tokens(12)],
        [tokens(10, 11), LAST, LAST],
        [TYPED, tokens(10)],
        [TYPED, TYPED],
    ],
)
def test_what_is_told_twice(events):
    assert book(*events).twice


def test_a_refusal_is_typed_or_broken():
    ledger = Ledger()
    for content, status in ((TYPED, 503), (None, 502), ({"detail": "no"}, 500)):
        ledger.open(PROMPT).refused(content, status)
    account = ledger.account()
    assert (account.sent, account.failed, account.broken) == (3, 1, 2)
    assert account.wrong == {"status 502": 1, "status 500": 1}


def test_the_account_compares_with_undisturbed_runs_that_agree():
    whole = [tokens(10, 11), LAST]
    first, second = Ledger(), Ledger()
    other = Prompt(1, (9,), 1)
    book(*whole, ledger=first)
    book(*whole, ledger=second)
    for ledger, token in ((first, 1), (second, 2)):
        ledger.open(other).tokens.append(token)
    ledger = Ledger(undisturbed(first, second))
    book(*whole, ledger=ledger)
    book(tokens(10, 99), LAST, ledger=ledger)
    unsteady = ledger.open(other)
    unsteady.event({"choices": [{"token_ids": [3], "finish_reason": "length"}]})
    unsteady.stream_ended(done=True)
    ledger.open(PROMPT).end("hung")
    ledger.open(PROMPT)
    account = ledger.account()
    assert (account.sent, account.completed, account.hung, account.open) == (5, 3, 1, 1)
    assert (account.different, account.unsteady) == (1, 1)
    assert account.faults() == [
        "1 requests hung",
        "1 requests still open",
        "1 requests with other tokens than undisturbed",
    ]


def test_prompts_follow_from_the_seed():
    assert prompts(8, 1)[:3] == prompts(3, 1) != prompts(3, 2)


def test_silence_is_the_longest_time_without_a_token():
    # what was computed before the kill arrives late; request 9 was not open at the kill
    arrivals = [(10.01, 1), (10.02, 2), (12.0, 9), (12.2, 1), (12.5, 2), (12.6, 1)]
    found = silence(10.0, arrivals, {1, 2})
    assert (round(found.first_s, 6), round(found.all_s, 6)) == (2.0, 2.5)
    assert silence(10.0, [(11.0, 9)], {1}).all_s == 1.0
    assert silence(10.0, [], {1}) is None
