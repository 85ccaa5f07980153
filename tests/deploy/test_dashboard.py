"""The dashboard: panels do not overlap, every query uses the variables, and it is provisioned where it is mounted."""

from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.files import COMPOSE, DASHBOARD, DEPLOY, load_dashboard, load_yaml, run_tool, tool

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = load_dashboard()["panels"]
    return found


def overlap(a: dict[str, int], b: dict[str, int]) -> bool:
    beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
    below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
    return not (beside or below)


def test_panels_have_their_own_id_and_place() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        box = panel["gridPos"]
        assert 0 <= box["x"] < box["x"] + box["w"] <= COLUMNS
    assert not [(a["title"], b["title"]) for a, b in combinations(panels(), 2) if overlap(a["gridPos"], b["gridPos"])]


def test_every_query_uses_the_chosen_source_and_model() -> None:
    for panel in panels():
        if panel["type"] == "row":
            continue
        assert panel["description"], panel["title"]
        assert panel["datasource"] == DATASOURCE
        assert panel["targets"]
        for target in panel["targets"]:
            assert target["datasource"] == DATASOURCE
            assert target["expr"].count("{") == target["expr"].count('{model_name=~"$model"'), target["expr"]
            assert "{" in target["expr"]
            assert target["expr"].count("rate(") == target["expr"].count("[$__rate_interval]")


def test_prometheus_can_parse_every_query(tmp_path: Path) -> None:
    queries = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    rules = [
        {"record": f"panel:query:{number}", "expr": query.replace("$__rate_interval", "5m").replace("$model", ".*")}
        for number, query in enumerate(queries)
    ]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}), encoding="utf-8")
    out = run_tool(tool("promtool", "Debian's prometheus"), "check", "rules", file)
    assert f"{len(queries)} rules found" in out


def test_no_axis_of_a_share_hides_what_is_small() -> None:
    shares = [
        panel for panel in panels() if panel.get("fieldConfig", {}).get("defaults", {}).get("unit") == "percentunit"
    ]
    assert "Attention kept, by estimate" in {panel["title"] for panel in shares}
    for panel in shares:
        assert panel["fieldConfig"]["defaults"].get("min", 0) <= 0, panel["title"]


def test_variables_are_those_of_the_queries() -> None:
    names = [variable["name"] for variable in load_dashboard()["templating"]["list"]]
    assert names == ["datasource", "model"]


def test_grafana_finds_its_source_and_its_dashboard() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = load_yaml(provisioning / "datasources" / "prometheus.yml")["datasources"]
    services = load_yaml(COMPOSE)["services"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert any(mapping.endswith(f":{port}") for mapping in services[host]["ports"])
    (provider,) = load_yaml(provisioning / "dashboards" / "hybrid_sparse.yml")["providers"]
    folder = provider["options"]["path"]
    assert f"./grafana/dashboards:{folder}:ro" in services["grafana"]["volumes"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/{DASHBOARD.name}"
    scrape = load_yaml(DEPLOY / "prometheus" / "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scrape
