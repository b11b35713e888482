"""Threads: any number gives the same bits, calls may overlap, and a forked child works."""

import os
import threading

import pytest
import torch

from tests.kernels.weights import make_weight, run


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_bits_do_not_depend_on_threads(tier, threads, int8, rows):
    # large enough that two threads are used, and not a multiple of what a thread takes at a time
    weight = make_weight(4, 64, True, 1037, 1056)
    x = torch.randn(rows, 1056)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(run(tier, x, weight, None, 4, 64, int8))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_concurrent_calls(tier, threads):
    threads(2)
    cases = [(make_weight(bits, 64, False, 515, 1024, seed), torch.randn(rows, 1024), bits)
             for seed, (bits, rows) in enumerate([(4, 1), (3, 5), (8, 20), (2, 33)])]  # fmt: skip
    want = [run(tier, x, weight, None, bits, 64, True) for weight, x, bits in cases]
    wrong = []

    def work(start):
        for i in range(start, start + 40):
            weight, x, bits = cases[i % 4]
            if not torch.equal(run(tier, x, weight, None, bits, 64, True), want[i % 4]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(start,)) for start in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_after_use(tier, threads):
    threads(2)
    weight, x = make_weight(4, 64, False, 1024, 1024), torch.randn(8, 1024)
    want = run(tier, x, weight, None, 4, 64, True)
    child = os.fork()
    if child == 0:
        # the runtime's threads are not in the child: a product that waited for them would never end
        code = 1
        try:
            code = 0 if torch.equal(run(tier, x, weight, None, 4, 64, True), want) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
