"""A power failure at any moment of a save leaves the old checkpoint or the new one, whole; after the keeper has said
"committed" it leaves the new one.

A save is recorded as its requests to the file system. Then every state that a disk may be in after a crash at any point
is made and loaded. The model is stricter than any real file system: any subset of the writes to a file since its last
fsync may be there, the last of them half; and any subset of the changes to a folder's names since its last fsync. So a
file may be empty, have zeros where nothing arrived, or have no name."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from phalanx.checkpoint import files
from phalanx.checkpoint.catalog import QUARANTINED, Catalog
from phalanx.core import store as stores
from phalanx.core.checkpoint import MANIFEST, file_name
from phalanx.core.store import Folder
from tests.checkpoint import faults

SHM = "/dev/shm" if Path("/dev/shm").is_dir() else None
OLD, NEW = 7, 8
MAX_PENDING = 8  # changes that are pending at once; 2^8 subsets


# -- what a save asks of the file system


class Recorder:
    """Stands in for `os` while a save runs. `ops` has (kind, inode, ...): names of a folder that change at once, bytes
    of a file, its size, a sync, or a mark."""

    REPLACED = "open close write pwrite fsync link rename replace unlink remove mkdir rmdir posix_fallocate ftruncate"

    def __init__(self, root: Path):
        self.root, self.real, self.ops = root, {name: getattr(os, name) for name in self.REPLACED.split()}, []
        self.folders: dict[int, dict[str, int]] = {}
        self.files: dict[int, bytearray] = {}
        self.fds: dict[int, int] = {}
        self._next = itertools.count()
        self._scan(root)
        self.before = (
            {i: dict(names) for i, names in self.folders.items()},
            {i: bytes(d) for i, d in self.files.items()},
        )

    def _scan(self, path: Path) -> int:
        inode = next(self._next)
        if path.is_dir():
            self.folders[inode] = {}
            self.folders[inode].update({p.name: self._scan(p) for p in sorted(path.iterdir())})
        else:
            self.files[inode] = bytearray(path.read_bytes())
        return inode

    def __enter__(self):
        for name in self.real:
            setattr(os, name, getattr(self, name))
        return self

    def __exit__(self, kind, *_):
        for name, function in self.real.items():
            setattr(os, name, function)
        if kind is None:  # nothing bypassed the recorder
            assert _tree(self, 0) == _on_disk(self.root)

    def mark(self, text: str) -> None:
        self.ops.append(("mark", -1, text))

    def _where(self, path, dir_fd=None):
        """Return (folder, name), or None outside the folder that is watched; name "" is the folder itself."""
        if dir_fd is not None and dir_fd in self.fds and not os.path.isabs(path):
            return self.fds[dir_fd], os.fspath(path)
        full = os.path.abspath(path)
        if full == str(self.root):
            return 0, ""
        if not full.startswith(f"{self.root}/"):
            return None
        *parents, name = full.removeprefix(f"{self.root}/").split("/")
        at = 0
        for parent in parents:
            at = self.folders[at][parent]
        return at, name

    def _rename_all(self, folder, changes):
        for name, inode in changes.items():
            if inode is None:
                del self.folders[folder][name]
            else:
                self.folders[folder][name] = inode
        self.ops.append(("names", folder, changes))

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        fd, where = self.real["open"](path, flags, mode, dir_fd=dir_fd), self._where(path, dir_fd)
        if where:
            folder, name = where
            inode = folder if not name else self.folders[folder].get(name)
            if inode is None:
                inode = next(self._next)
                self.files[inode] = bytearray()
                self._rename_all(folder, {name: inode})
            self.fds[fd] = inode
            if flags & os.O_TRUNC:
                self.ftruncate(fd, 0)
        return fd

    def close(self, fd):
        self.fds.pop(fd, None)
        self.real["close"](fd)

    def write(self, fd, data):
        at = os.lseek(fd, 0, os.SEEK_CUR) if fd in self.fds else 0
        return self._wrote(fd, data, at, self.real["write"](fd, data))

    def pwrite(self, fd, data, at):
        return self._wrote(fd, data, at, self.real["pwrite"](fd, data, at))

    def _wrote(self, fd, data, at, size):
        if fd in self.fds:
            self._change(("bytes", self.fds[fd], at, bytes(data[:size])))
        return size

    def _change(self, op):
        _apply(self.files[op[1]], op)
        self.ops.append(op)

    def posix_fallocate(self, fd, at, size):
        self.real["posix_fallocate"](fd, at, size)
        if fd in self.fds:
            self._change(("size", self.fds[fd], max(at + size, len(self.files[self.fds[fd]]))))

    def ftruncate(self, fd, size):
        self.real["ftruncate"](fd, size)
        if fd in self.fds:
            self._change(("size", self.fds[fd], size))

    def fsync(self, fd):
        self.real["fsync"](fd)
        if fd in self.fds:
            self.ops.append(("sync", self.fds[fd]))

    def link(self, source, target, **more):
        self.real["link"](source, target, **more)
        (a, old), (b, new) = self._where(source), self._where(target)
        self._rename_all(b, {new: self.folders[a][old]})

    def rename(self, source, target, **more):
        self.real["rename"](source, target, **more)
        (a, old), (b, new) = self._where(source), self._where(target)
        assert a == b, "a move between folders is two changes"
        self._rename_all(a, {new: self.folders[a][old], old: None})

    replace = rename

    def unlink(self, path, *, dir_fd=None):
        self.real["unlink"](path, dir_fd=dir_fd)
        if where := self._where(path, dir_fd):
            self._rename_all(where[0], {where[1]: None})

    remove = unlink

    def rmdir(self, path, *, dir_fd=None):
        self.real["rmdir"](path, dir_fd=dir_fd)
        if where := self._where(path, dir_fd):
            self._rename_all(where[0], {where[1]: None})

    def mkdir(self, path, mode=0o777, *, dir_fd=None):
        self.real["mkdir"](path, mode, dir_fd=dir_fd)
        if where := self._where(path, dir_fd):
            inode = next(self._next)
            self.folders[inode] = {}
            self._rename_all(where[0], {where[1]: inode})


def _apply(data: bytearray, op) -> None:
    if op[0] == "size":
        del data[op[2] :]
        data.extend(bytes(op[2] - len(data)))
    else:
        data.extend(bytes(max(0, op[2] + len(op[3]) - len(data))))
        data[op[2] : op[2] + len(op[3])] = op[3]


def _tree(recorder, inode):
    """Return a file as bytes, a folder as a tuple of (name, tree)."""
    if inode in recorder.files:
        return bytes(recorder.files[inode])
    return tuple(sorted((name, _tree(recorder, i)) for name, i in recorder.folders[inode].items()))


def _on_disk(path: Path):
    if path.is_dir():
        return tuple(sorted((p.name, _on_disk(p)) for p in path.iterdir()))
    return path.read_bytes()


# -- what of it a disk may hold


def subsets(ops):
    assert len(ops) <= MAX_PENDING, f"{len(ops)} changes are open at once"
    return itertools.chain.from_iterable(itertools.combinations(ops, n) for n in range(len(ops) + 1))


def states(recorder, point):
    """Yield all trees that may be there when the power fails after this many of the ops."""
    before, ops = recorder.before, recorder.ops[:point]
    folders, contents = {i: dict(names) for i, names in before[0].items()}, {i: bytes(d) for i, d in before[1].items()}
    pending: dict[int, list] = {}
    for op in ops:
        if op[0] == "sync":
            done = pending.pop(op[1], [])
            if op[1] in recorder.files:
                contents[op[1]] = _written(contents.get(op[1], b""), done)
            else:
                folders[op[1]] = _named(folders.get(op[1], {}), done)
        elif op[0] != "mark":
            pending.setdefault(op[1], []).append(op)

    known: dict[int, set] = {}

    def trees(inode):
        if inode not in known:
            left = pending.get(inode, [])
            if inode in recorder.files:
                known[inode] = {data for some in subsets(left) for data in _torn(contents.get(inode, b""), some)}
            else:
                known[inode] = set()
                for some in subsets(left):
                    names = sorted(_named(folders.get(inode, {}), some).items())
                    inside = itertools.product(*(trees(i) for _, i in names))
                    known[inode] |= {tuple(zip([n for n, _ in names], of, strict=True)) for of in inside}
        return known[inode]

    return trees(0)


def _named(names, ops):
    names = dict(names)
    for _, _, changes in ops:
        for name, inode in changes.items():
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode
    return names


def _written(data, ops):
    out = bytearray(data)
    for op in ops:
        _apply(out, op)
    return bytes(out)


def _torn(data, ops):
    yield _written(data, ops)
    if ops and ops[-1][0] == "bytes":
        kind, inode, at, written = ops[-1]
        yield _written(data, [*ops[:-1], (kind, inode, at, written[: len(written) // 2])])


def materialise(tree, path: Path) -> None:
    if isinstance(tree, bytes):
        path.write_bytes(tree)
        return
    path.mkdir()
    for name, inside in tree:
        materialise(inside, path / name)


# -- a save, recorded, and every crash of it loaded


class Explorer:
    def __init__(self, tmp_path, known, inside="checkpoints"):
        """`known`: name -> the state that a checkpoint of this name must load as."""
        self.root, self.inside, self.known = tmp_path / "disk", inside, known
        self.root.mkdir()
        self.store = Folder(self.root / inside)
        self.verdicts: dict[tuple, tuple[str, str]] = {}
        self.num_states = self.num_points = 0
        self.bad: list[str] = []
        self.seen: Counter = Counter()

    def record(self, save):
        with Recorder(self.root) as recorder:
            save(recorder)
        return recorder

    def explore(self, recorder, allowed, until=None):
        """Load every state. `allowed(marks)`: what may be loaded once these marks are passed. `until`: stop when it is
        found."""
        for point in range(len(recorder.ops) + 1):
            marks = [op[2] for op in recorder.ops[:point] if op[0] == "mark"]
            self.num_points += 1
            for tree in states(recorder, point):
                self.num_states += 1
                loaded, damage = self._verdict(tree)
                self.seen[loaded] += 1
                if damage or loaded not in allowed(marks):
                    self.bad.append(f"after {point} of {len(recorder.ops)}, {marks}: {loaded} {damage}")
                    if until and until in self.bad[-1]:
                        return self
        return self

    def _verdict(self, tree):
        if tree not in self.verdicts:
            with tempfile.TemporaryDirectory(dir=SHM) as folder:
                place = Path(folder) / "disk"
                materialise(tree, place)
                self.verdicts[tree] = self._load(place / self.inside)
        return self.verdicts[tree]

    def _load(self, place):
        """Return what a run would resume from, and what is wrong with any checkpoint that counts as committed."""
        store, events = Folder(place), []
        damage = "; ".join(w.text for _, wrong in Catalog(store).verify(Catalog(store).good()) for w in wrong)
        got = faults.load_newest(Catalog(store), events.append)
        if got is None:
            return "none", damage
        name, state = got
        return name if state == self.known[name] else f"{name}, but not as it was saved", damage


@pytest.fixture
def small_writes(monkeypatch):
    monkeypatch.setattr(files, "WRITE_BYTES", 4096)


ENTRIES = faults.entries_of(rows=400)  # four pages for each rank
SMALL = faults.entries_of(rows=8)  # one
NAME = {step: f"step-{step:09d}-aa" for step in (OLD, NEW)}


def known(entries):
    return {NAME[step]: faults.state_of(entries, step) for step in (OLD, NEW)}


def explorer_of(tmp_path, entries=ENTRIES, old=True, inside="checkpoints"):
    explorer = Explorer(tmp_path, known(entries), inside)
    if old:
        faults.make(explorer.store, OLD, entries)
    return explorer


def save(explorer, entries=ENTRIES, keep_last=2, order=("drain 0", "drain 1", "commit")):
    """Save as the keeper does: each rank's file, then the manifest, then retention."""
    with faults.a_keeper(explorer.store.path, keep=(keep_last, 0)) as keeper:
        faults.adopt(keeper, entries, NEW)
        shards = _shards(entries)

        def run(recorder):
            keeper.channel.on_send = lambda message: recorder.mark(message["type"])
            for what in order:
                if what == "commit":
                    keeper._commit(faults.order_of(shards, NEW))
                    keeper.retaining.result()
                elif what == "try":  # as it does when the ranks connect
                    keeper._try_folder()
                elif what == "folder":
                    files.make_folder(explorer.store, NAME[NEW])
                else:
                    rank = int(what.split()[1])
                    keeper._drain(rank, keeper.ranks[rank].slots[0])

        recorder = explorer.record(run)
    sent = keeper.channel.sent
    assert not [m for m in sent if m["type"] == "checkpoint_failed"], sent
    said = sorted((m["rank"], m["size"], m["root"]) for m in keeper.channel.of("shard"))
    assert said == [(s["rank"], s["size"], s["root"]) for s in shards]
    return recorder


def _shards(entries):
    """Return what the keeper reports about the files, known beforehand."""
    out = []
    for rank, plan in enumerate(faults.plans_of(entries)):
        own = memoryview(faults.image_of(entries, plan, NEW))[: plan.own_bytes]
        header = {"checkpoint": NAME[NEW], "rank": rank, "step": NEW}
        tail = files.make_tail(header, faults.RNG, files.hash_chunks(own, 0, len(own)))
        out.append({"rank": rank, "size": len(own) + len(tail), "root": files.root_of(tail)})
    return out


def old_then_new(marks):
    return {NAME[NEW]} if "committed" in marks else {NAME[OLD], NAME[NEW]}


def none_then_new(marks):
    return {NAME[NEW]} if "committed" in marks else {"none", NAME[NEW]}


@pytest.mark.parametrize("keep_last", [2, 1])
def test_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path, small_writes, keep_last):
    """With keep_last 1 the old one is removed after it."""
    explorer = explorer_of(tmp_path)
    recorder = save(explorer, keep_last=keep_last)
    explorer.explore(recorder, old_then_new)
    print(f"{explorer.num_points} points, {explorer.num_states} states, {len(explorer.verdicts)} different")
    assert explorer.bad == []
    assert set(explorer.seen) == {NAME[OLD], NAME[NEW]} and explorer.num_states > 300
    assert (explorer.store.path / NAME[OLD]).exists() == (keep_last == 2)


def test_two_ranks_that_are_written_side_by_side(tmp_path):
    explorer = explorer_of(tmp_path, SMALL)
    recorder = save(explorer, SMALL)
    ends = [i for i, op in enumerate(recorder.ops) if op[0] == "mark"]
    first, second = recorder.ops[: ends[0] + 1], recorder.ops[ends[0] + 1 : ends[1] + 1]
    pairs = itertools.zip_longest(first, second)
    recorder.ops[: ends[1] + 1] = [op for pair in pairs for op in pair if op]
    explorer.explore(recorder, old_then_new)
    print(f"{explorer.num_points} points, {explorer.num_states} states, {len(explorer.verdicts)} different")
    assert explorer.bad == [] and explorer.num_states > 300


def test_the_first_checkpoint_of_a_run(tmp_path):
    """Its folder is new, and so is its parent."""
    explorer = explorer_of(tmp_path, SMALL, old=False, inside="runs/quickstart/checkpoints")
    recorder = save(explorer, SMALL, order=("try", "drain 0", "drain 1", "commit"))
    explorer.explore(recorder, none_then_new)
    assert explorer.bad == []
    assert explorer.seen["none"] and explorer.seen[NAME[NEW]]


def test_a_crash_while_a_damaged_one_is_put_aside(tmp_path):
    explorer = explorer_of(tmp_path)
    faults.make(explorer.store, NEW, ENTRIES)
    faults.flip(explorer.store.path / NAME[NEW] / file_name(1), at=100)
    recorder = explorer.record(lambda _: Catalog(explorer.store).judge(NAME[NEW], "a flipped byte"))
    assert (explorer.store.path / NAME[NEW] / QUARANTINED).exists()
    for point in range(len(recorder.ops) + 1):
        for tree in states(recorder, point):
            assert explorer._verdict(tree)[0] == NAME[OLD]
    (names,) = states(recorder, len(recorder.ops))  # only one state is possible once it is done
    assert QUARANTINED in dict(dict(dict(names)["checkpoints"])[NAME[NEW]])


# -- the explorer can fail


def without_folder_sync(monkeypatch):
    def only_files(path):
        if not Path(path).is_dir():
            stores_sync(path)

    stores_sync = stores.sync_folder
    monkeypatch.setattr(files, "sync_folder", only_files)
    monkeypatch.setattr(stores, "sync_folder", only_files)


def without_sync_of_names_before_the_manifest(monkeypatch):
    monkeypatch.setattr(files, "sync_folder", lambda path: None)


def without_file_sync(monkeypatch):
    real = files._write_local

    def write(path, own, tail):
        fsync, os.fsync = os.fsync, lambda fd: None
        try:
            real(path, own, tail)
        finally:
            os.fsync = fsync

    monkeypatch.setattr(files, "_write_local", write)


def retention_before_the_commit(monkeypatch):
    real = files.commit

    def commit(store, manifest):
        shutil.rmtree(store.path / NAME[OLD])
        real(store, manifest)

    monkeypatch.setattr(files, "commit", commit)


def manifest_in_place(monkeypatch):
    """Write the manifest in place instead of aside, so that half of it can be seen."""

    def commit(store, manifest):
        body = manifest.to_json()
        files._write_local(
            store.path / manifest.name / MANIFEST, memoryview(b""), files.root_of(body).encode() + b"\n" + body
        )
        stores.sync_folder(store.path / manifest.name)

    monkeypatch.setattr(files, "commit", commit)


@pytest.mark.parametrize(
    "plant, order, found",
    [
        (without_folder_sync, None, "none"),
        (without_sync_of_names_before_the_manifest, None, "is missing"),
        (None, ("folder", "commit", "drain 0", "drain 1"), "none"),
        (None, ("drain 0", "commit", "drain 1"), "none"),
        (without_file_sync, None, "none"),
        (retention_before_the_commit, None, "none"),
        (manifest_in_place, None, "is torn or damaged"),
    ],
    ids=[
        "commit without a sync of the folder",
        "manifest before the names of the files",
        "manifest before the files",
        "manifest before the last file",
        "file without a sync",
        "retention before the commit",
        "manifest in place",
    ],
)
def test_the_explorer_finds_a_planted_break(tmp_path, monkeypatch, plant, order, found):
    explorer = explorer_of(tmp_path, SMALL)
    if order:
        monkeypatch.setattr(Catalog, "_wrong_at_a_glance", lambda *_: "")  # or retention would refuse
    if plant:
        plant(monkeypatch)
    recorder = save(explorer, SMALL, keep_last=1, order=order or ("drain 0", "drain 1", "commit"))
    monkeypatch.undo()  # restore the loader
    explorer.explore(recorder, old_then_new, until=found)
    print(f"found after {explorer.num_states} states: {explorer.bad[-1:]}")
    assert [bad for bad in explorer.bad if found in bad], explorer.bad[:3]
