"""`outrider check` against servers that are honest, lie in one way, or lack something."""

import json
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from cluster.check.command import check_endpoint
from cluster.check.errors import CouldNotRun
from cluster.check.finding import Finding
from cluster.check.report import Report, print_report, write_json
from cluster.check.run import Options, run_checks
from tests.cluster.check.toy_server import Lie, Toy

URL = "http://toy"
OPTIONS = Options(URL, draws=50)


async def check(toy: Toy, options: Options = OPTIONS, against: Toy | None = None) -> Report:
    return await run_checks(
        options, transport=toy.transport(), against_transport=against.transport() if against else None
    )


def outcomes(report: Report, outcome: str) -> dict[tuple[str, str], str]:
    return {(f.check, f.cell): f.detail for f in report.findings if f.outcome == outcome}


# An honest server fails a run with probability 1e-3 (FALSE_ALARM); keys are counted, so a run repeats itself.
async def test_an_honest_server_passes_every_cell() -> None:
    report = await check(Toy())
    assert {f.outcome for f in report.findings} == {"passed"}, report.findings
    assert report.exit_code == 0
    assert len(report.findings) > 35
    assert report.verdict.startswith("No violation")


@pytest.mark.parametrize(
    ("lie", "found_by"),
    [
        ("another greedy token", "greedy parity"),
        ("stream loses its end", "greedy parity"),
        ("seed ignored", "seeds"),
        ("unseeded is constant", "seeds"),
        ("colder samples", "sampling law"),
        ("stop found late", "parameters in blocks"),
        ("goes past max_tokens", "parameters in blocks"),
        ("penalty counts rounds", "parameters in blocks"),
        ("bans only the first of a block", "parameters in blocks"),
        ("logprobs of the drafter", "logprobs"),
        ("usage counts rounds", "usage"),
    ],
)
async def test_every_lie_is_found_by_the_check_for_it(lie: Lie, found_by: str) -> None:
    # With 200 draws a shift of 0.3 is seen nine times in ten; this lie's is far larger.
    report = await check(Toy(lie), Options(URL, draws=200) if found_by == "sampling law" else OPTIONS)
    violations = outcomes(report, "violation")
    assert found_by in {name for name, _ in violations}, report.findings
    assert report.exit_code == 1
    assert all(violations.values()), "every violation says what is wrong"


async def test_a_lie_is_found_by_a_second_server_too() -> None:
    """Neither server knows the `speculation` field; one of them always speculates, and lies."""
    ignores = frozenset({"speculation"})
    report = await check(
        Toy("another greedy token", ignores=ignores), Options(URL, URL, draws=50), Toy(ignores=ignores)
    )
    assert report.exit_code == 1
    assert ("greedy parity", "copied paragraph") in outcomes(report, "violation")


async def test_an_honest_pair_of_servers_passes() -> None:
    ignores = frozenset({"speculation"})
    report = await check(Toy(ignores=ignores), Options(URL, URL, draws=50), Toy(ignores=ignores))
    assert report.exit_code == 0, report.findings
    assert ("greedy parity", "depths 1, 4, 8") in outcomes(report, "skipped")


async def test_a_near_tie_is_listed_and_is_no_violation() -> None:
    report = await check(Toy("a nearly tied greedy token", tied=True))
    ties = outcomes(report, "near-tie")
    assert ("greedy parity", "copied paragraph") in ties
    assert "a near-tie" in ties["greedy parity", "copied paragraph"]
    assert not any(f.outcome == "violation" for f in report.findings if f.check == "greedy parity")


async def test_a_wide_gap_is_told_with_its_size() -> None:
    report = await check(Toy("another greedy token"))
    assert "no near-tie" in outcomes(report, "violation")["greedy parity", "copied paragraph"]


async def test_a_difference_without_logprobs_is_an_unresolved_violation() -> None:
    report = await check(Toy("a nearly tied greedy token", tied=True, refuses=frozenset({"logprobs"})))
    assert "unresolved" in outcomes(report, "violation")["greedy parity", "copied paragraph"]


REFUSED = {
    "seed": ("seeds", "same seed twice"),
    "stop": ("parameters in blocks", "stop strings"),
    "ignore_eos": ("parameters in blocks", "ignore_eos"),
    "min_tokens": ("parameters in blocks", "min_tokens"),
    "logit_bias": ("parameters in blocks", "logit_bias"),
    "stop_token_ids": ("parameters in blocks", "stop_token_ids"),
    "presence_penalty": ("parameters in blocks", "presence_penalty"),
    "repetition_penalty": ("parameters in blocks", "repetition_penalty"),
    "logprobs": ("logprobs", "chat"),
}


async def test_what_a_server_refuses_is_skipped_with_its_reason() -> None:
    report = await check(Toy(refuses=frozenset(REFUSED)))
    skipped = outcomes(report, "skipped")
    for name, cell in REFUSED.items():
        assert f"{name}: not supported" in skipped[cell]
    assert report.exit_code == 0


async def test_a_parameter_without_effect_is_not_passed() -> None:
    names = ("min_tokens", "logit_bias", "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty")
    skipped = outcomes(await check(Toy(ignores=frozenset(names))), "skipped")
    for name in names:
        assert "changes nothing" in skipped["parameters in blocks", name]


async def test_without_a_way_to_turn_speculation_off_nothing_is_proved() -> None:
    report = await check(Toy(ignores=frozenset({"speculation"})))
    assert report.exit_code == 2
    assert "--against" in outcomes(report, "skipped")["greedy parity", "prose"]
    assert "--against" in outcomes(report, "skipped")["sampling law", "temperature 1"]


async def test_a_server_that_refuses_every_mention_of_speculation_is_not_taken_to_obey_it() -> None:
    report = await check(Toy(refuses=frozenset({"speculation"})))
    assert report.provenance["controlled"] is False
    assert report.exit_code == 2


async def test_a_server_that_never_speculates_proves_nothing() -> None:
    report = await check(Toy("never speculates"))
    assert report.exit_code == 2
    assert "is speculation on?" in outcomes(report, "failed")["speculation", "drafts at work"]
    assert ("parameters in blocks", "stop strings") in outcomes(report, "skipped")


async def test_unreported_acceptance_is_said_and_does_not_fail() -> None:
    report = await check(Toy(reports_acceptance=False))
    assert report.exit_code == 0
    assert "could not be seen" in outcomes(report, "passed")["parameters in blocks", "stop strings"]
    assert ("speculation", "drafts at work") in outcomes(report, "skipped")


async def test_failed_requests_are_no_pass() -> None:
    with pytest.raises(CouldNotRun, match="500"):
        await check(Toy("fails when speculating"))


async def test_a_used_up_budget_skips_the_rest() -> None:
    ticks = iter(range(10**9))
    options = Options(URL, draws=50, budget_s=200.0)
    report = await run_checks(options, transport=Toy().transport(), clock=lambda: float(next(ticks)))
    skipped = outcomes(report, "skipped")
    assert "budget" in skipped["usage", "whole"]
    assert report.exit_code in (0, 2)


async def test_no_server_is_an_error_of_its_own() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    with pytest.raises(CouldNotRun, match="connection refused"):
        await run_checks(OPTIONS, transport=httpx.MockTransport(refuse))


async def test_a_busy_server_is_asked_again() -> None:
    toy, refused = Toy().transport(), 0

    class Busy(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            nonlocal refused
            if refused < 3:
                refused += 1
                return httpx.Response(429, headers={"retry-after": "0"}, json={"error": {"message": "slow down"}})
            return await toy.handle_async_request(request)

    report = await run_checks(OPTIONS, transport=Busy())
    assert refused == 3
    assert report.exit_code == 0


async def test_a_report_needs_a_directory_before_anything_is_asked(tmp_path: Path) -> None:
    assert check_endpoint(OPTIONS, "", tmp_path / "missing" / "report.json") == 2


@pytest.mark.parametrize("url", ["http://[::1", "toy:8000", "ftp://toy"])
async def test_what_is_no_url_is_told(url: str) -> None:
    with pytest.raises(CouldNotRun):
        await run_checks(Options(url))


def finding(outcome: str, check: str = "greedy parity") -> Finding:
    return Finding(check, "cell", outcome, "[bold]detail[/bold]")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([finding("passed")], 0),
        ([finding("near-tie"), finding("skipped")], 0),
        ([finding("passed"), finding("violation", "usage"), finding("failed")], 1),
        ([finding("passed"), finding("failed")], 2),
        ([finding("skipped"), finding("passed", "usage")], 2),
        ([], 2),
    ],
)
def test_the_exit_code_follows_the_gravest_finding(findings: Sequence[Finding], code: int) -> None:
    assert Report(findings).exit_code == code


def test_the_report_shows_the_servers_text_as_it_is(tmp_path: Path) -> None:
    report = Report([finding("violation")], {"outrider": "x"})
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    print_report(report, console)
    shown = console.export_text()
    assert "[bold]detail[/bold]" in shown
    assert "Refuted" in shown
    write_json(report, tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["findings"][0]["outcome"] == "violation"
    assert written["exit_code"] == 1
    assert written["outrider"] == "x"
