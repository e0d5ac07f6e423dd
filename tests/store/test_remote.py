"""Remotes: pushed, found by names, pulled and checked; over S3, http, and other file systems."""

from __future__ import annotations

import fsspec
import pytest
from mlx_lm.models.cache import RotatingKVCache

import vkv
from tests.helpers import servers
from tests.helpers.stores import cache_of
from vkv.errors import DigestError, MissingFileError, VkvError
from vkv.store.remote import keys, transfer, upload
from vkv.store.remote.objects import object_name
from vkv.store.remote.remote import Remote

LONG = [n % 50 for n in range(300)]


@pytest.fixture(scope="module")
def s3():
    with servers.s3() as url:
        yield url


@pytest.fixture(params=["s3", "memory", "file"])
def there(request, tmp_path, s3):
    """An empty remote."""
    name = tmp_path.name
    if request.param == "s3":
        fsspec.filesystem("s3").mkdir(name.replace("_", "-")[:60].strip("-").lower())
        return Remote(f"s3://{name.replace('_', '-')[:60].strip('-').lower()}/some/place")
    if request.param == "memory":
        return Remote(f"memory://{name}/place")
    return Remote((tmp_path / "there").as_uri() + "/")


def saved(path, tokens, model, cls=None, **options):
    """A file of ``tokens``; ``RotatingKVCache`` with a small window cannot be trimmed."""
    cache = cache_of(tokens, cls, **options) if cls else cache_of(tokens)
    vkv.save(path, cache, tokens=tokens, model=model)
    return path


@pytest.fixture
def path(tmp_path, model):
    return saved(tmp_path / "a.vkv", LONG, model)


def objects(there):
    """Names of all objects of a remote."""
    root = there.objects.root.lstrip("/")
    found = there.objects.files.find(there.objects.root)
    return sorted(name.lstrip("/").removeprefix(f"{root}/") for name in found)


def test_push_names_and_pull(there, path, tmp_path, model):
    key = there.push(path)
    info = vkv.inspect(path)
    place = info.header.model.id.hex()[:16]
    chain = keys.chain(info.header.model.id, b"".join(t.to_bytes(4, "little") for t in LONG))
    assert key == info.id
    assert objects(there) == sorted(
        [object_name(key), *(f"keys/{place}/{h}/300-{key}" for h in chain)]
    )
    assert there.ls() == [(key, info.size)]
    (tmp_path / "in").mkdir()
    got = there.pull(key, tmp_path / "in")
    assert got == tmp_path / "in" / f"{key}.vkv"
    assert got.read_bytes() == path.read_bytes()
    assert [p.name for p in (tmp_path / "in").iterdir()] == [got.name]
    assert got.stat().st_mode & 0o777 == 0o600
    assert there.pull(key[:8], tmp_path / "b.vkv").read_bytes() == path.read_bytes()


def test_pushing_again_sends_nothing_and_mends_names(there, path, monkeypatch):
    key = there.push(path)
    before = objects(there)
    there.objects.files.rm_file(f"{there.objects.root}/{before[0]}")
    monkeypatch.setattr(upload, "upload", None)
    assert there.push(path) == key
    assert objects(there) == before


def test_the_longest_prefix_is_found(there, tmp_path, model):
    found = {}
    for n in (40, 100, 300):
        found[n] = there.push(saved(tmp_path / "x.vkv", LONG[:n], model))
    other = [*LONG[:150], *[60] * 100]
    found["other"] = there.push(saved(tmp_path / "x.vkv", other, model))
    for prompt, key, covered in (
        ([*LONG, 1, 2], found[300], 300),
        (LONG, found[300], 299),
        (other, found["other"], 249),
        ([*LONG[:120], 61, 62], found[100], 100),  # others share 120, but no further bound
        ([*LONG[:30], 61, 62], None, None),
    ):
        match = there.find(prompt, model=model)
        assert (match and match.id, match and match.tokens) == (key, covered)
    assert there.find([*LONG, 1], model=model, longer_than=300) is None
    assert there.find([*LONG, 1], model=bytes(32)) is None
    assert there.find([], model=model) is None


def test_what_cannot_be_trimmed_serves_whole_or_not_at_all(there, tmp_path, model):
    window = {"cls": RotatingKVCache, "max_size": 4}
    key = there.push(saved(tmp_path / "x.vkv", LONG[:50], model, **window))
    assert [name.split("/")[0] for name in objects(there)] == ["exact", "objects"]
    assert there.find(LONG[:50], model=model) is None
    assert there.find([*LONG[:49], 60, 61], model=model) is None
    match = there.find(LONG[:60], model=model)
    assert (match.id, match.tokens) == (key, 50)
    longer = there.push(saved(tmp_path / "x.vkv", LONG[:55], model))
    assert there.find(LONG[:60], model=model).id == longer


def test_a_name_without_its_object_is_passed_over(there, tmp_path, model):
    short = there.push(saved(tmp_path / "x.vkv", LONG[:100], model))
    long = there.push(saved(tmp_path / "x.vkv", LONG, model))
    there.objects.files.rm_file(f"{there.objects.root}/{object_name(long)}")
    assert there.find([*LONG, 1], model=model).id == short


def test_a_file_without_model_is_stored_by_its_id_alone(there, tmp_path):
    vkv.save(tmp_path / "x.vkv", cache_of(range(40)))
    key = there.push(tmp_path / "x.vkv")
    assert objects(there) == [object_name(key)]


def test_damage_is_neither_pushed_nor_pulled(there, path, tmp_path):
    good = path.read_bytes()
    bad = good[:-1] + bytes([good[-1] ^ 1])
    (tmp_path / "bad.vkv").write_bytes(bad)
    with pytest.raises(DigestError):
        there.push(tmp_path / "bad.vkv")
    assert objects(there) == []
    key = there.push(path)
    there.objects.files.pipe_file(f"{there.objects.root}/{object_name(key)}", bad)
    with pytest.raises(DigestError):
        there.pull(key, tmp_path / "b.vkv")
    other = "0" * 64
    if not upload.is_flat(there.objects.files):
        there.objects.files.makedirs(f"{there.objects.root}/objects/00", exist_ok=True)
    there.objects.files.pipe_file(f"{there.objects.root}/{object_name(other)}", good)
    with pytest.raises(DigestError, match="expected 0000"):
        there.pull(other, tmp_path / "b.vkv")
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["a.vkv", "bad.vkv"]


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("f" * 64, "not found"),
        ("ffff", "no file with an id that begins with 'ffff'"),
        ("../..", "no file with an id"),
        ("", "no file with an id"),
    ],
)
def test_an_unknown_id(there, path, tmp_path, start, words):
    there.push(path)
    with pytest.raises((VkvError, OSError), match=words):
        there.pull(start, tmp_path / "b.vkv")
    assert not (tmp_path / "b.vkv").exists()


def test_an_upload_that_fails_leaves_no_object(there, path, monkeypatch):
    files = there.objects.files

    def half(lpath, rpath, **_):
        if not upload.is_flat(files):
            files.pipe_file(rpath, b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "put_file", half)
    with pytest.raises(OSError, match="No space left on device"):
        there.push(path)
    assert objects(there) == []


def test_what_did_not_arrive_is_told(there, path, monkeypatch):
    monkeypatch.setattr(upload, "upload", lambda *_: None)
    with pytest.raises(VkvError, match="did not arrive as it was sent"):
        there.push(path)
    assert objects(there) == []


@pytest.fixture
def web(path):
    """An http server with the same layout."""
    info = vkv.inspect(path)
    with servers.web(files={f"/p/{object_name(info.id)}": path.read_bytes()}) as found:
        found.id = info.id
        yield found


def test_over_http_entries_are_pulled_by_id(web, path, tmp_path, model):
    there = Remote(f"{web.url}/p")
    assert there.pull(web.id, tmp_path / "b.vkv").read_bytes() == path.read_bytes()
    for call, words in (
        (lambda: there.find(LONG, model=model), "http has no listings"),
        (lambda: there.pull(web.id[:8], tmp_path), "by their whole id"),
        (lambda: there.push(path), "can be read and not written"),
    ):
        with pytest.raises(VkvError, match=words):
            call()


@pytest.mark.parametrize("junk", [b"", b"junk"], ids=["resumed", "begun anew"])
def test_an_interrupted_pull_is_gone_on_with(web, path, tmp_path, monkeypatch, junk):
    monkeypatch.setattr(transfer, "READ_CHUNK", 1 << 14)
    there, dest = Remote(f"{web.url}/p"), tmp_path / "b.vkv"
    part = tmp_path / f".b.vkv.{web.id[:16]}.vkv-part"
    told = []

    def stop(done, total):
        told.append(done)
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        there.pull(web.id, dest, progress=stop)
    assert not dest.exists()
    assert part.read_bytes() == path.read_bytes()[: told[-1]]
    if junk:
        part.write_bytes(junk + part.read_bytes()[len(junk) :])
    web.asked.clear()
    there.pull(web.id, dest)
    ahead = web.asked[1 : 1 + transfer.RANGES_AT_ONCE]  # under way at once, and in any order
    first = min(int(asked.removeprefix("bytes=").partition("-")[0]) for _, asked in ahead)
    assert first == told[-1]
    assert dest.read_bytes() == path.read_bytes()
    assert not part.exists()


def test_a_server_that_goes_away_leaves_a_part_and_no_file(web, path, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "READ_CHUNK", 1 << 14)
    monkeypatch.setattr(transfer, "RANGES_AT_ONCE", 1)
    there, dest = Remote(f"{web.url}/p"), tmp_path / "b.vkv"

    def gone(done, _):
        web.status = 404 if done > 1 << 16 else None

    with pytest.raises(FileNotFoundError):
        there.pull(web.id, dest, progress=gone)
    assert [p.name for p in tmp_path.iterdir()] == ["a.vkv", f".b.vkv.{web.id[:16]}.vkv-part"]
    web.status, web.cut = None, 1 << 14
    assert there.pull(web.id, dest).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("url", ["bucket/prompts", "nonsense://x"])
def test_no_remote(url):
    with pytest.raises(VkvError):
        Remote(url)


@pytest.fixture
def chain(tmp_path, model):
    """Three files, each of which stands on those before."""
    paths = []
    for n in (100, 150, 200):
        paths.append(tmp_path / f"{n}.vkv")
        parent = paths[-2] if len(paths) > 1 else None
        vkv.save(paths[-1], cache_of(LONG[:n]), tokens=LONG[:n], model=model, parent=parent)
    assert len(vkv.inspect(paths[-1]).dependencies) == 2
    return paths


def test_files_that_others_stand_on_move_with_them(there, chain, tmp_path, model):
    key = there.push(chain[-1])
    assert [k for k, _ in there.ls()] == sorted(vkv.inspect(path).id for path in chain)
    (tmp_path / "in").mkdir()
    got = there.pull(key, tmp_path / "in")
    assert len(list(got.parent.iterdir())) == 3
    whole = [vkv.load(x).cache[1].keys.tolist() for x in (chain[-1], got)]
    assert whole[0] == whole[1]
    assert there.find([*LONG[:200], 1], model=model).id == key


def test_what_a_base_stands_on_is_not_followed(there, tmp_path, model):
    """Only a file whose bytes are needed is named (H11), so a base may lack its own bases."""
    paths, ids = [tmp_path / f"{n}.vkv" for n in range(3)], []
    for path, own in zip(paths, [(0, 0), (0, 1), (2, 1)], strict=True):
        cache = [cache_of([n + x for n in LONG])[0] for x in own]  # a layer is shared
        parent = paths[len(ids) - 1] if ids else None
        ids.append(vkv.save(path, cache, tokens=LONG, model=model, parent=parent).id)
    assert [list(vkv.inspect(path).dependencies) for path in paths] == [[], ids[:1], ids[1:2]]
    paths[0].rename(tmp_path / "hidden")
    there.push(paths[2])
    assert [key for key, _ in there.ls()] == sorted(ids[1:])
    assert there.find([*LONG, 1], model=model).id == ids[2]
    named = [name for name in objects(there) if name.startswith("keys/")]
    assert named, "the base cannot be loaded there, so no name finds it"
    assert all(name.endswith(ids[2]) for name in named)
    (tmp_path / "in").mkdir()
    got = there.pull(ids[2], tmp_path / "in")
    assert {x.name for x in got.parent.iterdir()} == {f"{key}.vkv" for key in ids[1:]}
    assert vkv.load(got).tokens == LONG


def test_a_missing_file_that_another_stands_on_is_told_before_anything_is_sent(there, chain):
    chain[0].unlink()
    with pytest.raises(MissingFileError):
        there.push(chain[-1])
    assert objects(there) == []


def test_files_behind_urls_stand_on_files_there(chain, tmp_path):
    info = [vkv.inspect(path) for path in chain]
    data = {i.id: path.read_bytes() for i, path in zip(info, chain, strict=True)}
    stored = {f"/s/{object_name(key)}": content for key, content in data.items()}
    beside = {f"/b/{key}.vkv": content for key, content in data.items()}
    whole = vkv.load(chain[-1]).cache[1].keys.tolist()
    with servers.web(files=stored | beside | {"/x/c.vkv": chain[-1].read_bytes()}) as web:
        for url in (f"{web.url}/s/{object_name(info[2].id)}", f"{web.url}/b/{info[2].id}.vkv"):
            assert vkv.load(url).cache[1].keys.tolist() == whole
        for place in (f"{web.url}/b", f"{web.url}/s/objects/"):
            found = vkv.load(f"{web.url}/x/c.vkv", search_paths=[place])
            assert found.cache[1].keys.tolist() == whole
        each = [f"{web.url}/b/{i.id}.vkv" for i in info]
        assert vkv.load(chain[-1], search_paths=each).cache[1].keys.tolist() == whole
        with pytest.raises(MissingFileError):
            vkv.load(f"{web.url}/x/c.vkv")
