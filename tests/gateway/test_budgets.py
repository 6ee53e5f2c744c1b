"""Budgets: how a bucket fills and empties, and what several gateways see of it."""

from __future__ import annotations

import fcntl
import random
import threading
from pathlib import Path

import pytest

from common.errors import RateLimited
from gateway.edge.auth import Key
from gateway.edge.budgets import Budgets

S = 1_000_000_000
BEGIN = 5_000 * S
SIXTY = Key.of("sixty", tokens_per_minute=60)  # one token a second


def wait_s(budgets: Budgets, key: Key, num_tokens: int, now_ns: int) -> float:
    """0 where the charge was taken; else how long to wait."""
    try:
        budgets.charge(key, num_tokens, now_ns)
    except RateLimited as error:
        return error.retry_after_s or 0
    return 0


def test_a_bucket_holds_a_minutes_worth_and_fills_continuously(run_dir: str) -> None:
    budgets = Budgets(run_dir)
    assert wait_s(budgets, SIXTY, 60, BEGIN) == 0
    assert wait_s(budgets, SIXTY, 1, BEGIN) == 1
    assert wait_s(budgets, SIXTY, 1, BEGIN + S // 2) == 0.5
    assert wait_s(budgets, SIXTY, 1, BEGIN + S) == 0
    assert wait_s(budgets, SIXTY, 60, BEGIN + S) == 60


def test_what_is_refused_takes_nothing(run_dir: str) -> None:
    budgets = Budgets(run_dir)
    budgets.charge(SIXTY, 50, BEGIN)
    assert [wait_s(budgets, SIXTY, 40, BEGIN) for _ in range(3)] == [30, 30, 30]
    assert wait_s(budgets, SIXTY, 10, BEGIN) == 0


def test_a_pause_saves_up_no_more_than_a_minutes_worth(run_dir: str) -> None:
    budgets = Budgets(run_dir)
    budgets.charge(SIXTY, 60, BEGIN)
    assert wait_s(budgets, SIXTY, 60, BEGIN + 3600 * S) == 0
    assert wait_s(budgets, SIXTY, 1, BEGIN + 3600 * S) == 1


def test_a_request_of_more_than_a_minutes_worth_runs_from_a_full_bucket_and_leaves_it_owing(run_dir: str) -> None:
    budgets = Budgets(run_dir)
    budgets.charge(SIXTY, 1, BEGIN)
    assert wait_s(budgets, SIXTY, 90, BEGIN) == 1
    assert wait_s(budgets, SIXTY, 90, BEGIN + S) == 0
    assert wait_s(budgets, SIXTY, 1, BEGIN + S) == 31


def test_over_a_long_time_no_more_runs_than_the_budget(run_dir: str) -> None:
    rng, budgets = random.Random(7), Budgets(run_dir)
    now, taken = BEGIN, 0
    for _ in range(1000):
        now += rng.randrange(2 * S)
        num_tokens = rng.randint(1, 20)
        taken += num_tokens if wait_s(budgets, SIXTY, num_tokens, now) == 0 else 0
    elapsed_s = (now - BEGIN) // S
    assert elapsed_s - 20 < taken <= 60 + elapsed_s + 1


def test_keys_have_buckets_of_their_own_and_a_key_without_one_leaves_no_trace(run_dir: str) -> None:
    budgets = Budgets(run_dir)
    budgets.charge(SIXTY, 60, BEGIN)
    assert wait_s(budgets, Key.of("other", tokens_per_minute=60), 60, BEGIN) == 0
    budgets.charge(Key.of("free"), 10**9, BEGIN)
    assert len(list(Path(run_dir, "budgets").iterdir())) == 2


def test_a_bucket_outlives_its_gateway_and_another_gateway_sees_it(run_dir: str) -> None:
    Budgets(run_dir).charge(SIXTY, 45, BEGIN)
    assert wait_s(Budgets(run_dir), SIXTY, 30, BEGIN) == 15


def test_a_budget_that_was_changed_holds_from_then_on(run_dir: str) -> None:
    budgets = Budgets(run_dir)
    budgets.charge(SIXTY, 60, BEGIN)
    tenfold = Key.of("sixty", tokens_per_minute=600)
    assert wait_s(budgets, tenfold, 10, BEGIN) == 1


def test_a_bucket_of_another_boot_is_full(run_dir: str) -> None:
    before = Budgets(run_dir)
    before._boot_id = b"0" * 36
    before.charge(SIXTY, 600, BEGIN)
    assert wait_s(Budgets(run_dir), SIXTY, 60, 10 * S) == 0


def test_a_file_that_was_cut_off_is_a_full_bucket(run_dir: str) -> None:
    budgets = Budgets(run_dir)
    budgets.charge(SIXTY, 60, BEGIN)
    (file,) = Path(run_dir, "budgets").iterdir()
    file.write_bytes(b"")
    assert wait_s(budgets, SIXTY, 60, BEGIN) == 0


def test_a_run_folder_that_was_removed_is_made_again(run_dir: str) -> None:
    budgets = Budgets(run_dir)
    budgets.charge(SIXTY, 60, BEGIN)
    (file,) = Path(run_dir, "budgets").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.unlink()
    file.parent.rmdir()
    assert wait_s(budgets, SIXTY, 60, BEGIN) == 0


def test_a_look_takes_nothing_and_fails_only_where_no_token_is_left(run_dir: str) -> None:
    budgets = Budgets(run_dir)
    budgets.check(SIXTY, BEGIN)
    assert not Path(run_dir, "budgets").exists()
    budgets.charge(SIXTY, 59, BEGIN)
    for _ in range(3):
        budgets.check(SIXTY, BEGIN)
    budgets.charge(SIXTY, 1, BEGIN)
    with pytest.raises(RateLimited) as refused:
        budgets.check(SIXTY, BEGIN)
    assert refused.value.retry_after_s == 1
    budgets.check(SIXTY, BEGIN + S)
    budgets.check(Key.of("free"), BEGIN)


def test_a_budget_that_cannot_be_kept_refuses_nobody_and_is_logged_once(
    run_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    budgets = Budgets(run_dir)
    named = Key.of("sesame", name="nightly", tokens_per_minute=60)
    folder = Path(run_dir, "budgets")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_bytes(b"")  # no folder

    for _ in range(3):
        budgets.check(named, BEGIN)
        budgets.charge(named, 60, BEGIN)

    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert "nightly" in record.getMessage()
    assert named.digest.hex() not in caplog.text
    folder.unlink()
    assert wait_s(budgets, named, 60, BEGIN) == 0
    assert wait_s(budgets, named, 60, BEGIN) == 60
    (file,) = folder.iterdir()
    file.unlink()
    file.mkdir()
    budgets.charge(named, 60, BEGIN)
    assert len(caplog.records) == 2  # it had been kept meanwhile


def test_gateways_that_charge_at_once_lose_nothing(run_dir: str) -> None:
    key = Key.of("busy", tokens_per_minute=1000)
    taken: list[int] = []

    def charge_many() -> None:
        budgets = Budgets(run_dir, lock_timeout_s=30)
        taken.append(sum(wait_s(budgets, key, 1, BEGIN) == 0 for _ in range(500)))

    threads = [threading.Thread(target=charge_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == 1000


def test_a_gateway_that_stopped_with_the_lock_stops_no_other(run_dir: str) -> None:
    budgets = Budgets(run_dir)
    budgets.charge(SIXTY, 30, BEGIN)
    (path,) = Path(run_dir, "budgets").iterdir()
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert wait_s(budgets, SIXTY, 30, BEGIN) == 0
        with pytest.raises(RateLimited):
            budgets.charge(SIXTY, 1, BEGIN)
