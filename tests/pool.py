"""One persistent pool of worker processes for all multi-rank tests and benchmarks: forked once from the product's own
zygote, each worker runs `module:function(args)` on request and answers with JSON."""

import importlib
import os
import tempfile
import time
from pathlib import Path

from phalanx.runtime.bare import BareClient

STORE = -1
START_S = 300  # a busy machine takes long to import torch
PRELOAD = ["phalanx.train.worker", "phalanx.model.dense", "tests.cases"]


class CaseFailed(AssertionError):
    pass


class Pool:
    def __init__(self, size: int = 8, threads: int = 1):
        self.size, self.threads, self.generation = size, threads, 0
        self._start()

    def _start(self):
        self._logs = tempfile.TemporaryDirectory(prefix="phalanx-pool-")
        self._node = BareClient(PRELOAD, env={"GLOO_SOCKET_IFNAME": "lo"})
        self._broken = False
        self._spawn(STORE, "phalanx.gate.meeting:serve", {"alone": True})
        self.store = self._wait({STORE}, START_S)[STORE]["address"]
        self.store_pid = self._node.running[STORE]
        for worker in range(self.size):
            self._spawn(worker, "tests.pool:serve", {"threads": self.threads})
        self._wait(set(range(self.size)), START_S)

    def run(self, function: str, job, timeout: float = 300, **kwargs) -> list:
        """Run `function(args)` on as many workers as the job has ranks; return their answers, by rank. After a failure
        the next run gets new workers: the old ones are dead, or still in the failed case."""
        if self._broken:
            self.close()
            self._start()
        self.generation += 1
        ranks = set(range(job.layout.world_size))
        assert len(ranks) <= self.size, f"the pool has {self.size} workers"
        for rank in ranks:
            args = dict(job=job.to_dict(), rank=rank, store=self.store, generation=self.generation, **kwargs)
            self._node.send(rank, {"function": function, "args": args})
        answers = self._wait(ranks, timeout)
        return [answers[rank]["value"] for rank in sorted(ranks)]

    def close(self):
        self._node.close()
        self._logs.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _spawn(self, worker, entry, args):
        self._node.spawn(worker, entry, args, Path(self._logs.name) / f"{worker}.log")

    def _wait(self, workers, timeout):
        try:
            return self._gather(workers, timeout)
        except BaseException:
            self._broken = True
            raise

    def _gather(self, workers, timeout):
        answers, deadline = {}, time.monotonic() + timeout
        while set(answers) != workers:
            event = self._node.events(max(0.0, deadline - time.monotonic()))
            if event is None:
                raise CaseFailed(f"no answer from ranks {sorted(workers - set(answers))} in {timeout} s")
            if event["type"] == "message" and event["body"].get("type") != "error":
                answers[event["worker"]] = event["body"]
            elif event["type"] != "started":
                log = Path(self._logs.name) / f"{event.get('worker')}.log"
                raise CaseFailed(f"{event}\n{log.read_text()[-4000:] if log.exists() else ''}")
        return answers


def serve(channel, args):
    import torch

    torch.set_num_threads(args["threads"])
    channel.send({"type": "ready", "pid": os.getpid()})
    while (request := channel.recv()) is not None:
        module, _, name = request["function"].partition(":")
        value = getattr(importlib.import_module(module), name)(request["args"])
        channel.send({"type": "value", "value": value})
