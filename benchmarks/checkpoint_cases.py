"""The ranks' part of the checkpoint benchmarks, and the code that starts the ranks. Every rank is a script of its own
rather than a fork: DCP's process mode spawns from it."""

from common import machine  # isort: skip  (first: it makes tests/ importable)

import contextlib
import json
import logging
import mmap
import multiprocessing
import os
import resource
import secrets
import selectors
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from phalanx.core.checkpoint import Entry, Manifest
from phalanx.core.held import Held
from phalanx.core.layout import Layout
from phalanx.core.store import open_store

__all__ = ["Ranks", "machine"]

KINDS = ("weights", "exp_avg", "exp_avg_sq")
WRITE_BYTES = 8 << 20


# -- the parent's side


class Ranks:
    """Processes that run a function of this module, and answer each line of JSON with one."""

    def __init__(self, function: str, world: int, **args):
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-ranks-")
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        self.processes = []
        for rank in range(world):
            given = {"rank": rank, "world": world, "meet": f"{self._folder.name}/meet", **args}
            command = [sys.executable, __file__, function, json.dumps(given)]
            own = env | {"LOCAL_RANK": str(rank)}
            with open(self._log(rank), "w") as log:
                pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
                self.processes.append(subprocess.Popen(command, **pipes, text=True, env=own))

    def _log(self, rank: int) -> str:
        return f"{self._folder.name}/{rank}.log"

    def tell(self, _only: int | None = None, **order) -> None:
        for process in self.processes if _only is None else [self.processes[_only]]:
            print(json.dumps(order), file=process.stdin, flush=True)

    def answers(self) -> list:
        out = []
        for rank, process in enumerate(self.processes):
            line = process.stdout.readline()
            if not line:
                sys.exit(f"rank {rank} ended with status {process.wait()}\n{Path(self._log(rank)).read_text()[-4000:]}")
            out.append(json.loads(line))
        return out

    def ask(self, **order) -> list:
        self.tell(**order)
        return self.answers()

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            if process.poll() is None:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# -- the state


def entries_of(tensors: int, rows: int, cols: int) -> list[Entry]:
    """Return weights and moments; tensor parallelism cuts them by rows and by columns in turn."""
    return [
        Entry(Held(f"{kind}/layers.{i}.weight", (rows, cols), tp_dim=i % 2), "float32")
        for kind in KINDS
        for i in range(tensors)
    ]


def fill(entry: Entry, number: int, layout: Layout, rank: int, out: Tensor) -> None:
    """Fill a tensor with values that encode which tensor and which place they belong to."""
    out.view(torch.int32).copy_(expected(entry, number, layout, rank))


def expected(entry: Entry, number: int, layout: Layout, rank: int) -> Tensor:
    """Return the expected values as integers: as floats, some would not equal themselves."""
    r0, r1, c0, c1 = entry.held.bounds(layout, layout.coord(rank))
    rows = torch.arange(r0, r1, dtype=torch.int32) * 40503
    cols = torch.arange(c0, c1, dtype=torch.int32) * 97
    return rows[:, None] + (cols + number * 15485863)[None, :]


class Sliced:
    """A rank's slices under a layout, as plain tensors and as DTensors over the same memory."""

    def __init__(self, entries: list[Entry], layout: Layout, rank: int, filled: bool):
        self.entries, self.layout, self.rank = entries, layout, rank
        coord = layout.coord(rank)
        self.local = {e.held.name: torch.zeros(e.held.local_shape(layout, coord)) for e in entries}
        if filled:
            for i, e in enumerate(entries):
                fill(e, i, layout, rank, self.local[e.held.name])

    def dtensors(self, mesh: DeviceMesh) -> dict[str, DTensor]:
        """Wrap the slices, cut by tp first and then by shard like ours, so that both have the same slices."""
        out = {}
        for e in self.entries:
            cut = [Shard(e.held.tp_dim or 0), Shard(0)]
            out[e.held.name] = DTensor.from_local(
                self.local[e.held.name],
                mesh,
                cut,
                run_check=False,
                shape=torch.Size(e.held.shape),
                stride=(e.held.shape[1], 1),
            )
        return out

    def clear(self) -> None:
        for tensor in self.local.values():
            tensor.zero_()

    def wrong(self) -> int:
        """Count the tensors with wrong values."""
        pairs = [(self.local[e.held.name], i, e) for i, e in enumerate(self.entries)]
        return sum(not torch.equal(t.view(torch.int32), expected(e, i, self.layout, self.rank)) for t, i, e in pairs)


def mesh_of(layout: Layout) -> DeviceMesh:
    assert layout.replica == layout.pp == layout.cp == 1
    ranks = torch.arange(layout.world_size).view(layout.shard, layout.tp)
    return DeviceMesh("cpu", ranks.t().contiguous(), mesh_dim_names=("tp", "shard"))


# -- the ranks' side


class Chat:
    """A rank's connection to the parent."""

    def __init__(self):
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # other output must not mix with the answers

    def orders(self):
        for line in sys.stdin:
            yield json.loads(line)

    def answer(self, value) -> None:
        print(json.dumps(value), file=self._answers)


def join(args) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(args["meet"], args["world"])
    dist.init_process_group("gloo", store=store, rank=args["rank"], world_size=args["world"])


def save_small(args, chat: Chat) -> None:
    """Save a small checkpoint with DCP for each order {path, salt}, from the slices that the parent asks for."""
    join(args)
    layout = Layout(shard=args["world"])
    mesh = mesh_of(layout)
    entries = [Entry(Held(n, tuple(shape)), "float32") for n, shape in args["tensors"]]
    for order in chat.orders():
        sliced = Sliced(entries, layout, args["rank"], filled=False)
        for i, e in enumerate(entries):
            local = sliced.local[e.held.name]
            rows = e.held.bounds(layout, layout.coord(args["rank"]))[:2]
            local.copy_(small_values(e, i, order["salt"])[rows[0] : rows[1]])
        state = {
            e.held.name: DTensor.from_local(
                sliced.local[e.held.name],
                mesh["shard"],
                [Shard(0)],
                run_check=False,
                shape=torch.Size(e.held.shape),
                stride=torch.empty(e.held.shape, device="meta").stride(),
            )
            for e in entries
        }
        dcp.save(state, storage_writer=FileSystemWriter(order["path"]))
        chat.answer({})


def small_values(entry: Entry, number: int, salt: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + number)
    return torch.randn(entry.held.shape, generator=generator)


def load_small(args, chat: Chat) -> None:
    """Load with DCP for each order {path, salt}; answer with the outcome: "raises", "wrong values", "harmless"."""
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))  # a flipped bit may request all memory
    torch.set_num_threads(1)
    logging.disable()
    warnings.simplefilter("ignore")
    entries = [Entry(Held(n, tuple(shape)), "float32") for n, shape in args["tensors"]]
    truths = {salt: [small_values(e, i, salt) for i, e in enumerate(entries)] for salt in args["salts"]}
    state = {e.held.name: torch.zeros(e.held.shape) for e in entries}
    for order in chat.orders():
        for tensor in state.values():
            tensor.zero_()
        try:
            dcp.load(state, storage_reader=FileSystemReader(order["path"]), no_dist=True)
        except (Exception, CheckpointException) as error:  # DCP's own error does not derive from Exception
            chat.answer({"found": "raises", "what": type(error).__name__})
            continue
        same = all(torch.equal(t, state[e.held.name]) for t, e in zip(truths[order["salt"]], entries, strict=True))
        chat.answer({"found": "harmless" if same else "wrong values"})


# -- one step of training, and the ways to save beside it


class Trainer:
    """Runs matmuls, a small all-reduce that keeps the ranks in step, and torch's fused AdamW on this rank's slices."""

    def __init__(self, sliced: Sliced, size: int, repeats: int):
        self.a, self.b = torch.randn(size, size), torch.randn(size, size)
        self.out, self.repeats = torch.empty(size, size), repeats
        weights = [e.held.name for e in sliced.entries if e.held.name.startswith("weights/")]
        self.matmuls: list[float] = []
        self.params = {name: torch.nn.Parameter(sliced.local[name]) for name in weights}
        self.optimizer = torch.optim.AdamW(self.params.values(), lr=1e-4, fused=True)
        for name, param in self.params.items():
            param.grad = torch.full_like(param, 1e-3)
            moments = {kind: sliced.local[f"{kind}/{name.partition('/')[2]}"] for kind in KINDS[1:]}
            self.optimizer.state[param] = {"step": torch.tensor(1.0), **moments}

    def step(self, flag: float, before_update, after_update) -> float:
        """Run a step, and return the sum of all ranks' flags."""
        began = time.monotonic()
        for _ in range(self.repeats):
            torch.mm(self.a, self.b, out=self.out)
        self.matmuls.append(time.monotonic() - began)
        said = torch.tensor([flag])
        dist.all_reduce(said)
        before_update()
        self.optimizer.step()
        after_update()
        return float(said)


class Ours:
    name = "ours"

    def __init__(self, args, sliced: Sliced, chat: Chat):
        from phalanx.checkpoint.keeper import Line
        from phalanx.checkpoint.torch_state import Snapshotter
        from phalanx.core.checkpoint import Plan
        from phalanx.parallel.device import Device

        layout, entries = sliced.layout, sliced.entries
        coord = layout.coord(args["rank"])
        plan = Plan.of(entries, layout, coord)
        base = Manifest("", 0, layout, entries, [], 0).to_json()
        line = Line(args["keeper"], args["rank"], plan.image_bytes, plan.own_bytes, base)
        device = Device(torch.device("cpu"), "gloo")
        self.snap = Snapshotter(line, entries, layout, coord, sliced.local.__getitem__, device, args["run"])
        self.is_first, self.told = args["rank"] == 0, threading.Event()
        self.at = 0.0

    def begin(self, step: int) -> None:
        self.told.clear()
        self.snap.begin(step, durable=True, about={"updates": step})

    def wait(self) -> None:
        self.snap.wait()

    def durable(self, at: float) -> None:
        """Note that the parent has reported the commit."""
        self.at = at
        self.told.set()

    def done(self) -> bool:
        return not self.is_first or self.told.is_set()

    def close(self) -> None:
        self.snap.finish()
        self.snap.line.close()


class Dcp:
    """dcp.async_save with plans and staging memory kept from save to save."""

    def __init__(self, sliced: Sliced, folder: str, mode: str, async_staging: bool, threads: int):
        self.state, self.folder, self.threads = sliced.dtensors(mesh_of(sliced.layout)), Path(folder), threads
        self.mode = AsyncCheckpointerType(mode)
        shared = mode == "process"
        self.group = None if shared else dist.new_group()  # its thread's collectives must not mix with the trainer's
        self.stager = DefaultStager(StagingOptions(False, shared, async_staging, False))
        self.at, self.future, self.staged = 0.0, None, None

    def begin(self, step: int) -> None:
        self.future = None
        answer = dcp.async_save(
            self.state,
            storage_writer=FileSystemWriter(self.folder / f"dcp-{step}", thread_count=self.threads, overwrite=False),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            process_group=self.group,
            async_checkpointer_type=self.mode,
            async_stager=self.stager,
        )
        self.staged, self.future = (
            getattr(answer, "staging_completion", None),
            getattr(answer, "upload_completion", answer),
        )
        self.future.add_done_callback(self._durable)

    def _durable(self, _future) -> None:
        self.at = time.monotonic()

    def wait(self) -> None:
        if self.staged is not None:
            self.staged.result()
            self.staged = None

    def done(self) -> bool:
        if self.future.done():
            self.future.result()
            return self.at > 0
        return False

    def close(self) -> None:
        self.stager.close()


class Raw:
    """A process next to the rank that writes as many bytes from its memory, bypassing the page cache if possible."""

    def __init__(self, folder: str, rank: int, size: int):
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=write_raw, args=(theirs, folder, rank, size), daemon=True)
        self.process.start()
        theirs.close()
        self.direct, self.at, self._under_way = self.pipe.recv(), 0.0, False

    def begin(self, step: int) -> None:
        self.pipe.send(step)
        self._under_way = True

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        if self._under_way and self.pipe.poll():
            self.at, self._under_way = self.pipe.recv(), False
        return not self._under_way

    def finish(self) -> None:
        while not self.done():
            time.sleep(0.001)

    def close(self) -> None:
        self.pipe.close()


def write_raw(pipe, folder: str, rank: int, size: int) -> None:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    memory[:] = secrets.token_bytes(1 << 20) * (size >> 20) + bytes(size % (1 << 20))
    data = memoryview(memory)
    direct = os.O_DIRECT
    try:
        os.close(os.open(f"{folder}/.probe-{rank}", os.O_WRONLY | os.O_CREAT | direct))
    except OSError:
        direct = 0
    with contextlib.suppress(OSError):
        os.unlink(f"{folder}/.probe-{rank}")
    pipe.send(bool(direct))
    with contextlib.suppress(EOFError):
        while True:
            step = pipe.recv()
            path = Path(folder) / f"raw-{step}"
            path.mkdir(exist_ok=True)
            fd = os.open(path / f"{rank}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | direct)
            os.posix_fallocate(fd, 0, size)
            done = 0
            while done < size:
                done += os.pwrite(fd, data[done : done + WRITE_BYTES], done)
            os.fsync(fd)
            os.close(fd)
            pipe.send(time.monotonic())


DCP_OPTIONS = {  # mode, staging during the next step, writer threads
    "dcp": ("process", False, 1),
    "dcp async staging": ("process", True, 1),
    "dcp 2 threads": ("process", False, 2),
    "dcp thread mode": ("thread", False, 1),
    "dcp thread mode, async staging": ("thread", True, 1),
}


class Clock:
    """Times one save: when it began, and how long it blocked the training thread."""

    def __init__(self, method):
        self.method, self.began, self.request, self.waited = method, 0.0, 0.0, 0.0

    def begin(self, step: int) -> None:
        self.began = time.monotonic()
        self.method.begin(step)
        self.request = time.monotonic() - self.began

    def wait(self) -> None:
        at = time.monotonic()
        self.method.wait()
        self.waited += time.monotonic() - at


def nothing() -> None: ...


def stall(args, chat: Chat) -> None:
    """Train, save, and train until the save is durable, for each order {method, step, before}. Answer with times."""
    join(args)
    layout = Layout(shard=args["world"])
    sliced = Sliced(entries_of(*args["shape"]), layout, args["rank"], filled=True)
    trainer = Trainer(sliced, *args["matmul"])
    size = sum(t.numel() * t.element_size() for t in sliced.local.values())
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    methods = {}
    for name in args["methods"]:
        if name == "ours":
            methods[name] = Ours(args, sliced, chat)
        elif name == "raw":
            methods[name] = Raw(args["folder"], args["rank"], size)
        else:
            methods[name] = Dcp(sliced, args["folder"], *DCP_OPTIONS[name])
    chat.answer({"size": size, "direct": methods["raw"].direct})
    lines = selectors.DefaultSelector()
    lines.register(sys.stdin, selectors.EVENT_READ)

    while line := sys.stdin.readline():
        order = json.loads(line)
        method = methods.get(order["method"])
        if order["method"] == "raw alone":
            method = methods["raw"]
            dist.barrier()
            began = time.monotonic()
            method.begin(order["step"])
            method.finish()
            chat.answer({"began": began, "durable": method.at})
            continue
        clock, starts = Clock(method), []
        method.at = 0.0
        trainer.matmuls.clear()
        dist.barrier()
        number, saved, all_done = 0, False, False
        while not (saved and all_done):
            starts.append(time.monotonic())
            last = number == order["before"]  # the save follows this step's update
            flag = float(saved and method.done())
            request = partial(clock.begin, order["step"]) if last else nothing
            all_done = trainer.step(flag, clock.wait if saved else nothing, request) == args["world"]
            saved |= last
            number += 1
            if args["rank"] == 0 and order["method"] == "ours":
                while lines.select(0):
                    method.durable(json.loads(sys.stdin.readline())["durable"])
        starts.append(time.monotonic())
        chat.answer(
            {
                "starts": starts,
                "began": clock.began,
                "blocked": clock.request + clock.waited,
                "request": clock.request,
                "durable": method.at,
                "matmuls": statistics.median(trainer.matmuls[1 : order["before"]]),
                "copy": method.snap.copy_ns / 1e9 if order["method"] == "ours" else 0.0,
            }
        )
    for method in methods.values():
        method.close()


# -- restoring


def restore(args, chat: Chat) -> None:
    """Save or load for each order {do: save | load, how: ours | dcp, layout, path, name}. A load answers with its
    seconds, after a barrier."""
    from phalanx.checkpoint import files
    from phalanx.checkpoint.torch_state import load
    from phalanx.core.checkpoint import Plan

    join(args)
    held: dict[str, tuple[Sliced, dict[str, DTensor]]] = {}
    entries = entries_of(*args["shape"])
    for order in chat.orders():
        layout = Layout(**order["layout"])
        if order["layout"] != held.get("layout"):
            held.clear()
            sliced = Sliced(entries, layout, args["rank"], filled=order["do"] == "save")
            held = {"layout": order["layout"], "state": (sliced, sliced.dtensors(mesh_of(layout)))}
        sliced, state = held["state"]
        if order["do"] == "save":
            if order["how"] == "dcp":
                dcp.save(state, storage_writer=FileSystemWriter(order["path"]))
                chat.answer({})
                continue
            coord = layout.coord(args["rank"])
            plan = Plan.of(entries, layout, coord)
            image = memoryview(mmap.mmap(-1, plan.own_bytes))
            for s in plan.own:
                local = sliced.local[entries[s.entry].held.name].view(-1).view(torch.uint8)
                first = entries[s.entry].held.bounds(layout, coord)[0]
                part = local[(s.r0 - first) * s.row_bytes : (s.r1 - first) * s.row_bytes].numpy()
                image[s.offset : s.offset + s.size] = memoryview(part)
            store, name = open_store(order["path"]), order["name"]
            files.make_folder(store, name)
            header = {"checkpoint": name, "rank": args["rank"], "step": order["step"]}
            tail = files.make_tail(header, b"", files.hash_chunks(image, 0, len(image)))
            files.write_file(store, f"{name}/{files.file_name(args['rank'])}", image, tail)
            chat.answer({"size": len(image) + len(tail), "root": files.root_of(tail)})
            continue
        sliced.clear()
        dist.barrier()
        if order["cold"] and args["rank"] == 0:
            drop_cache(Path(order["path"]))
        dist.barrier()
        began, cpu = time.monotonic(), time.process_time()
        if order["how"] == "dcp":
            dcp.load(state, storage_reader=FileSystemReader(order["path"]))
        else:
            reader = files.Reader(open_store(order["path"]), order["name"], layout.world_size)
            load(reader, entries, layout, layout.coord(args["rank"]), sliced.local.__getitem__)
        mine = time.monotonic()
        cpu = time.process_time() - cpu
        dist.barrier()
        chat.answer({"began": began, "ended": mine, "cpu": cpu, "wrong": sliced.wrong() if order["check"] else 0})


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def cached_share(folder: Path) -> float:
    """Return the share of the files in the page cache, by fincore; -1: fincore is not installed."""
    paths = [str(path) for path in folder.rglob("*") if path.is_file()]
    try:
        done = subprocess.run(["fincore", "-b", "-n", "-o", "RES,SIZE", *paths], capture_output=True, text=True)
        rows = [line.split() for line in done.stdout.splitlines()]
        return sum(int(r) for r, _ in rows) / sum(int(s) for _, s in rows)
    except (OSError, ValueError, ZeroDivisionError):
        return -1.0


def main():
    globals()[sys.argv[1]](json.loads(sys.argv[2]), Chat())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
