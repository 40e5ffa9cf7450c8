"""The pool's threads beside neighbours: a worker that is kept from its core while all wait for its item is moved."""

import os
import subprocess
import sys
import threading
import time

import headrace_native
import numpy as np
import pytest

DEADLINE_S = 60.0
"""Only a broken pool waits so long."""

linux = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="threads are moved on Linux, on two CPUs or more",
)


@pytest.fixture
def neighbours():
    """Three processes that want one CPU all the time: `neighbours(cpu)`."""
    running = []

    def start(cpu):
        code = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nprint(flush=True)\nwhile True: pass"
        for _ in range(3):
            running.append(subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE))
            running[-1].stdout.readline()

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def in_own_thread(body):
    """Runs body in a thread, so that what it does to its own CPUs ends with it."""
    failures = []

    def guarded():
        try:
            body()
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def new_pool(**options):
    """A pool of two threads and the system's number of its worker."""
    before = set(os.listdir("/proc/self/task"))
    pool = headrace_native.Pool(2, **options)
    (worker,) = set(os.listdir("/proc/self/task")) - before
    return pool, int(worker)


@linux
def test_a_held_up_worker_is_fetched_and_goes_away_again(neighbours):
    theirs, ours = sorted(os.sched_getaffinity(0))[:2]
    data = np.random.default_rng(0).integers(0, 256, 1 << 22, dtype=np.uint8)
    short = data[: (1 << 18) + 1]
    neighbours(theirs)

    def body():
        pool, worker = new_pool()
        allowed = os.sched_getaffinity(worker)
        os.sched_setaffinity(0, {ours})  # so the only other CPU that the worker may have is the neighbours'
        expected = headrace_native.checksum(data, headrace_native.Pool(1))
        until = time.monotonic() + DEADLINE_S
        while pool.pulled < 5 or pool.left < 5 or pool.pushed < 5:
            assert headrace_native.checksum(data, pool) == expected
            for _ in range(
                20
            ):  # one piece for each: the caller is soon through, and a worker without its core misses loops
                headrace_native.checksum(short, pool)
            assert time.monotonic() < until, f"{pool.pulled} workers fetched, {pool.left} gone away, {pool.pushed} sent"
        while (
            os.sched_getaffinity(worker) != allowed
        ):  # it goes to the neighbours' CPU and allows itself the others when its turn comes
            assert time.monotonic() < until, f"the worker may use {os.sched_getaffinity(worker)} only"
            time.sleep(0.001)

    in_own_thread(body)


@linux
def test_pinned_workers_stay(neighbours):
    theirs, ours = sorted(os.sched_getaffinity(0))[:2]
    data = np.zeros(1 << 20, np.uint8)
    neighbours(theirs)

    def body():
        pool, worker = new_pool(pin=[ours, theirs])
        os.sched_setaffinity(0, {ours})
        for _ in range(50):
            headrace_native.checksum(data, pool)
        assert os.sched_getaffinity(worker) == {theirs}
        assert (pool.pulled, pool.left, pool.pushed) == (0, 0, 0)

    in_own_thread(body)
