"""The dashboard: panels do not overlap, every query uses the variables, and it is provisioned where it is mounted."""

from itertools import combinations
from typing import Any

from tests.deploy.files import COMPOSE, DASHBOARD, DEPLOY, load_dashboard, load_yaml

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
