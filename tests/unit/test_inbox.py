"""The mailbox between front side and engine thread."""

import threading

import numpy as np
import pytest

from service.core.types import Request, SamplingParams
from service.engine.inbox import Commands, Inbox
from service.errors import OverloadedError

DEADLINE_S = 20.0


def request(seq_id: int) -> Request:
    return Request(seq_id, np.array([1], np.int32), SamplingParams(max_tokens=1))


def test_take_yields_commands_once_in_order() -> None:
    inbox = Inbox(max_requests=3)
    requests = tuple(request(seq_id) for seq_id in (1, 2, 3))
    for each in requests:
        inbox.submit(each)
    inbox.cancel(7)
    assert inbox.take() == Commands(requests, (7,), is_closed=False)
    assert inbox.take() == Commands((), (), is_closed=False)


def test_full_inbox_refuses_and_keeps_what_it_has() -> None:
    inbox = Inbox(max_requests=2)
    inbox.submit(request(1))
    inbox.submit(request(2))
    with pytest.raises(OverloadedError) as caught:
        inbox.submit(request(3))
    assert caught.value.retry_after_s > 0
    assert [each.seq_id for each in inbox.take().requests] == [1, 2]
    inbox.submit(request(4))


def test_cancelled_request_leaves_its_place_and_the_engine_never_hears_of_it() -> None:
    inbox = Inbox(max_requests=1)
    inbox.submit(request(1))
    inbox.cancel(1)
    inbox.submit(request(2))
    assert [each.seq_id for each in inbox.take().requests] == [2]
    assert inbox.take() == Commands((), (), is_closed=False)


def test_cancel_is_never_refused_and_idempotent() -> None:
    inbox = Inbox(max_requests=1)
    for _ in range(1000):
        inbox.cancel(1)
    assert inbox.take().cancelled_seq_ids == (1,)


def test_close_is_seen_by_every_later_take() -> None:
    inbox = Inbox(max_requests=1)
    inbox.close()
    inbox.close()
    assert [inbox.take().is_closed, inbox.wait().is_closed] == [True, True]


def test_wait_without_commands_ends_at_its_time_limit() -> None:
    assert Inbox(max_requests=1).wait(timeout_s=0.001) == Commands((), (), is_closed=False)


@pytest.mark.parametrize("command", ["submit", "cancel", "close"])
def test_any_command_wakes_the_waiting_thread(command: str) -> None:
    inbox = Inbox(max_requests=1)
    got: list[Commands] = []
    thread = threading.Thread(target=lambda: got.append(inbox.wait(DEADLINE_S)))
    thread.start()
    {"submit": lambda: inbox.submit(request(1)), "cancel": lambda: inbox.cancel(1), "close": inbox.close}[command]()
    thread.join(DEADLINE_S)
    assert got and got[0] != Commands((), (), is_closed=False)


def test_commands_from_many_threads_all_arrive() -> None:
    inbox = Inbox(max_requests=800)
    threads = [
        threading.Thread(target=lambda start=start: [inbox.submit(request(start + i)) for i in range(100)])
        for start in range(0, 800, 100)
    ]
    for thread in threads:
        thread.start()
    seen: set[int] = set()
    while len(seen) < 800:
        seen |= {each.seq_id for each in inbox.wait(DEADLINE_S).requests}
    assert seen == set(range(800))
