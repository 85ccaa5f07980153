"""Prometheus's configuration and rules, checked by Prometheus's own tool."""

from tests.deploy.files import DEPLOY, RULES, load_yaml, run_tool, tool

FOLDER = DEPLOY / "prometheus"


def test_configuration_and_rules_are_valid() -> None:
    out = run_tool(tool("promtool", "Debian's prometheus"), "check", "config", FOLDER / "prometheus.yml")
    assert "rules found" in out


def test_rules_do_what_their_tests_say() -> None:
    run_tool(tool("promtool", "Debian's prometheus"), "test", "rules", FOLDER / "rules_test.yml")


def test_every_rule_is_tested_and_every_alert_says_what_to_do() -> None:
    tests = (FOLDER / "rules_test.yml").read_text(encoding="utf-8")
    rules = [rule for group in load_yaml(RULES)["groups"] for rule in group["rules"]]
    for rule in rules:
        name = rule.get("alert") or rule["record"]
        assert name in tests, f"{name} is in no test of rules_test.yml"
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"warning", "critical"}
            assert rule["for"]
            assert set(rule["annotations"]) == {"summary", "description"}


def test_prometheus_asks_the_server_of_compose() -> None:
    (vllm, _own) = load_yaml(FOLDER / "prometheus.yml")["scrape_configs"]
    (config,) = vllm["static_configs"]
    service, port = config["targets"][0].split(":")
    compose = load_yaml(DEPLOY / "compose.yaml")
    assert any(mapping.endswith(f":{port}") for mapping in compose["services"][service]["ports"])
