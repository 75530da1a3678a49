"""Adapters in a server: files, flags and requests, and the routes that serve them."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire_common.contract.adapters_file import AdapterEntry as Entry
from quire_common.contract.adapters_file import AdapterState, parse_report, render_adapters
from quire_engine.api.adapters import fetch_files
from quire_engine.config import AccessOptions
from quire_engine.errors import AdapterError, NotFound

Make = Callable[..., tuple[Any, Any]]
Serving = Callable[..., Any]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def states(adapters: Any) -> dict[str, AdapterState]:
    return {report.name: report.state for report in adapters.report().adapters}


async def test_adapters_of_flags_are_served(make_adapters: Make) -> None:
    adapters, reader = make_adapters(modules=(("fr", "/fr"), ("de", "/de")))
    await adapters.start()
    await adapters.flags_served()
    assert states(adapters) == {"fr": AdapterState.READY, "de": AdapterState.READY}
    assert reader.loaded == {1: "/fr", 2: "/de"} and adapters.served("de") == 2
    await adapters.close()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("/missing", "--lora-modules fr: DownloadFailed: /missing is not a folder"),
        ("/broken", "--lora-modules fr: RankTooHigh: q_proj has rank 64"),
    ],
)
async def test_an_adapter_of_a_flag_that_fails_stops_the_start(make_adapters: Make, source: str, words: str) -> None:
    adapters, _ = make_adapters(modules=(("fr", source),))
    await adapters.start()
    with pytest.raises(AdapterError, match=words):
        await adapters.flags_served()
    await adapters.close()


async def test_adapters_file_is_watched(make_adapters: Make, tmp_path: Path) -> None:
    file = tmp_path / "adapters.json"
    file.write_text(render_adapters([Entry(name="fr", source="/fr"), Entry(name="x", source="/missing")]))
    adapters, reader = make_adapters(file=file)
    await adapters.start()
    await until(lambda: states(adapters) == {"fr": AdapterState.READY, "x": AdapterState.FAILED})
    file.write_text("no JSON")
    await asyncio.sleep(1.2)
    assert "fr" in states(adapters)
    fresh = tmp_path / "fresh"
    fresh.write_text(render_adapters([Entry(name="fr", source="/fr", generation=2), Entry(name="de", source="/de")]))
    os.replace(fresh, file)
    await until(lambda: states(adapters) == {"fr": AdapterState.READY, "de": AdapterState.READY})
    assert reader.unloaded == [1]
    await adapters.close()


async def test_missing_adapters_file_is_not_an_error(make_adapters: Make, tmp_path: Path) -> None:
    file = tmp_path / "adapters.json"
    adapters, _ = make_adapters(file=file)
    await adapters.start()
    file.write_text(render_adapters([Entry(name="fr", source="/fr")]))
    await until(lambda: adapters.served("fr") is not None)
    await adapters.close()


async def test_models_and_responses_name_the_adapter(serving: Serving, make_adapters: Make) -> None:
    adapters, _ = make_adapters(modules=(("fr", "/fr"),))
    async with serving(says="Bonjour", adapters=adapters) as server:
        await adapters.start()
        cards = (await server.http.get("/v1/models")).json()["data"]
        found = [(card["id"], card["root"], card["parent"]) for card in cards]
        assert found == [("demo", "demo", None), ("alias", "demo", None), ("fr", "/fr", "demo")]
        assert (await server.http.get("/v1/models/fr")).json()["parent"] == "demo"
        assert (await server.http.get("/v1/models/de")).status_code == 404
        for answer in (await server.chat(model="fr"), await server.complete(model="fr")):
            assert answer.json()["model"] == "fr"
        assert (await server.complete(model="alias")).json()["model"] == "demo"
        responses = {"model": "fr", "input": "Hi"}
        messages = {"model": "fr", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
        for route, body in (("/v1/responses", responses), ("/v1/messages", messages)):
            assert (await server.http.post(route, json=body)).json()["model"] == "fr"
        assert [stream.routing["adapter"] for stream in server.engine.streams] == [1, 1, None, 1, 1]
        assert (await server.http.post("/tokenize", json={"model": "fr", "prompt": "Hi"})).status_code == 200
    await adapters.close()


async def test_a_request_waits_for_an_adapter_of_a_flag(serving: Serving, make_adapters: Make) -> None:
    """A server answers its first requests while adapters are still read; none of them is a 404."""
    adapters, reader = make_adapters(modules=(("fr", "/fr"),), fetches=False)
    async with serving(says="Bonjour", adapters=adapters) as server:
        await adapters.start()
        cards = (await server.http.get("/v1/models")).json()["data"]
        assert "fr" in [card["id"] for card in cards]
        asked = asyncio.create_task(server.complete(model="fr"))
        assert (await server.complete()).status_code == 200
        assert not asked.done()
        reader.may_fetch.set()
        assert (await asked).json()["model"] == "fr"
    await adapters.close()


async def test_a_request_waits_for_an_adapter_on_demand(serving: Serving, make_adapters: Make, tmp_path: Path) -> None:
    file = tmp_path / "adapters.json"
    file.write_text(json.dumps({"adapters": [{"name": "fr", "source": "/fr", "placement": "OnDemand"}]}))
    adapters, reader = make_adapters(file=file, fetches=False)
    async with serving(says="Bonjour", adapters=adapters) as server:
        await adapters.start()
        assert states(adapters) == {"fr": AdapterState.KNOWN} and reader.fetched == []
        asked = asyncio.create_task(server.complete(model="fr"))
        await until(lambda: states(adapters) == {"fr": AdapterState.DOWNLOADING})
        assert not server.engine.streams
        reader.may_fetch.set()
        assert (await asked).json()["model"] == "fr" and len(reader.fetched) == 1
    await adapters.close()


async def test_failed_adapter_error_contains_the_reason(serving: Serving, make_adapters: Make, tmp_path: Path) -> None:
    file = tmp_path / "adapters.json"
    file.write_text(render_adapters([Entry(name="fr", source="/broken")]))
    adapters, _ = make_adapters(file=file)
    async with serving(says="Bonjour", adapters=adapters) as server:
        await adapters.start()
        answer = await server.complete(model="fr")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == (
            "model: the adapter 'fr' cannot be served: RankTooHigh: q_proj has rank 64"
        )
        assert (await server.complete(model="nope")).json()["error"]["code"] == "model_not_found"
        assert (await server.complete()).status_code == 200
    await adapters.close()


async def test_an_adapter_is_loaded_and_unloaded_by_requests(
    serving: Serving, make_adapters: Make, tmp_path: Path
) -> None:
    (tmp_path / "fr").mkdir()
    adapters, reader = make_adapters(roots=(tmp_path,))
    async with serving(says="Bonjour", adapters=adapters) as server:

        async def load(**fields: Any) -> Any:
            body = {"lora_name": "fr", "lora_path": str(tmp_path / "fr"), **fields}
            return await server.http.post("/v1/load_lora_adapter", json=body)

        answer = await load()
        assert answer.status_code == 200 and answer.text == "Success: LoRA adapter 'fr' added successfully."
        assert (await server.complete(model="fr")).json()["model"] == "fr"
        assert (await load()).json()["error"]["code"] == "adapter_exists"
        assert (await load(load_inplace=True)).status_code == 200
        assert adapters.served("fr") == 2 and reader.unloaded == [1]
        gone = await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "fr"})
        assert gone.status_code == 200 and reader.unloaded == [1, 2]
        again = await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "fr"})
        assert again.status_code == 404 and again.json()["error"]["param"] == "lora_name"
    await adapters.close()


async def test_load_fails_if_the_adapter_is_unloaded_meanwhile(
    serving: Serving, make_adapters: Make, tmp_path: Path
) -> None:
    adapters, reader = make_adapters(roots=(tmp_path,), fetches=False)
    async with serving(says="Bonjour", adapters=adapters) as server:
        body = {"lora_name": "fr", "lora_path": str(tmp_path)}
        loading = asyncio.create_task(server.http.post("/v1/load_lora_adapter", json=body))
        await until(lambda: "fr" in states(adapters))
        gone = await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "fr"})
        answer = await loading
        assert gone.status_code == 200 and answer.status_code == 400
        assert answer.json()["error"]["code"] == "adapter_unloaded" and reader.loaded == {}
    await adapters.close()


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"lora_path": "/etc"}, 403, "adapter_path_forbidden"),
        ({"lora_path": "{root}/../outside"}, 403, "adapter_path_forbidden"),
        ({"lora_path": "{root}/link"}, 403, "adapter_path_forbidden"),
        ({"lora_path": "{root}/none"}, 400, None),
        ({"lora_path": "{root}/broken"}, 400, "adapter_invalid"),
        ({"lora_name": "demo"}, 400, "adapter_invalid"),
        ({"lora_name": "a b"}, 400, None),
        ({"lora_name": ""}, 400, None),
        ({"lora_path": None}, 400, None),
        ({"base_model_name": "other"}, 404, "model_not_found"),
        ({"unknown": 1}, 400, None),
    ],
)
async def test_bad_loads_are_refused(
    serving: Serving, make_adapters: Make, tmp_path: Path, fields: dict[str, Any], status: int, code: str | None
) -> None:
    root = tmp_path / "root"
    for folder in (root / "fr", root / "broken", tmp_path / "outside"):
        folder.mkdir(parents=True)
    (root / "link").symlink_to(tmp_path / "outside")
    adapters, reader = make_adapters(roots=(root,))
    filled = {key: value.format(root=root) if isinstance(value, str) else value for key, value in fields.items()}
    async with serving(says="Bonjour", adapters=adapters) as server:
        body = {"lora_name": "fr", "lora_path": str(root / "fr"), **filled}
        answer = await server.http.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == status and answer.json()["error"]["code"] == code
        assert adapters.served("fr") is None and reader.loaded.keys() <= {1}
    await adapters.close()


async def test_loading_is_forbidden_without_roots_or_adapters(serving: Serving, make_adapters: Make) -> None:
    adapters, _ = make_adapters()
    body = {"lora_name": "fr", "lora_path": "/"}
    async with serving(says="Bonjour", adapters=adapters) as server:
        answer = await server.http.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 403 and "--adapter-roots" in answer.json()["error"]["message"]
    async with serving(says="Bonjour") as server:
        answer = await server.http.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 403 and "--enable-lora" in answer.json()["error"]["message"]
        assert (await server.http.get("/quire/v1/adapters")).json()["slots"] == {"total": 0, "used": 0}


async def test_each_route_has_its_key(serving: Serving, make_adapters: Make, tmp_path: Path) -> None:
    for name in ("admin", "metrics"):
        (tmp_path / name).write_text(f"{name}-key-1\n")
    access = AccessOptions(
        api_keys=("api-key-1",), admin_key_file=tmp_path / "admin", metrics_key_file=tmp_path / "metrics"
    )
    adapters, _ = make_adapters(roots=(tmp_path,))
    body = {"lora_name": "fr", "lora_path": str(tmp_path)}
    async with serving(says="Bonjour", adapters=adapters, access=access) as server:
        for key, opens in (("api-key-1", False), ("metrics-key-1", False), ("admin-key-1", True)):
            headers = {"authorization": f"Bearer {key}"}
            answer = await server.http.post("/v1/load_lora_adapter", json=body, headers=headers)
            assert (answer.status_code == 200) is opens
        report = await server.http.get("/quire/v1/adapters", headers={"authorization": "Bearer metrics-key-1"})
        found = parse_report(report.json())
        assert found is not None and [adapter.name for adapter in found.adapters] == ["fr"]
        assert (found.slots.total, found.slots.used, found.loads_total) == (2, 0, 5)
        assert (await server.http.get("/quire/v1/adapters")).status_code == 401
    await adapters.close()


async def test_metrics_name_the_adapters(serving: Serving, make_adapters: Make) -> None:
    adapters, _ = make_adapters(modules=(("fr", "/fr"),))
    async with serving(says="Bonjour", adapters=adapters) as server:
        await adapters.start()
        text = (await server.http.get("/metrics")).text
        assert 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""}' in text
        assert 'quire_adapters{engine="0",model_name="demo",state="ready"} 1.0' in text
        assert 'quire_adapter_slots{engine="0",model_name="demo",state="free"} 2.0' in text
    await adapters.close()


async def test_an_adapter_unloaded_while_a_request_waits(make_adapters: Make, tmp_path: Path) -> None:
    file = tmp_path / "adapters.json"
    file.write_text(json.dumps({"adapters": [{"name": "fr", "source": "/fr", "placement": "OnDemand"}]}))
    adapters, _ = make_adapters(file=file, fetches=False)
    await adapters.start()
    asked = asyncio.create_task(adapters.require("fr"))
    await asyncio.sleep(0.01)
    adapters.unload("fr")
    with pytest.raises(NotFound, match="'fr' cannot be served"):
        await asked
    await adapters.close()


@pytest.mark.parametrize(
    ("source", "revision", "words"),
    [
        ("gopher://x", None, "is not a source"),
        ("pvc://claim/fr", None, "cannot mount a claim"),
        ("oci://reg.example/fr:1", None, "cannot mount a claim or an image"),
        ("s3://bucket/fr", "v2", "has no revisions"),
        ("/nowhere/at/all", None, "is not a folder"),
        ("/nowhere/at/all", "v2", "has no revisions"),
    ],
)
async def test_sources_that_cannot_be_fetched(source: str, revision: str | None, words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        await fetch_files(Entry(name="fr", source=source, revision=revision), None)


async def test_folders_are_used_in_place(tmp_path: Path) -> None:
    for source in (str(tmp_path), f"file://{tmp_path}"):
        assert (await fetch_files(Entry(name="fr", source=source), None)).folder == tmp_path
