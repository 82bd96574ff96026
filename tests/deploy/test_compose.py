"""docker-compose.yml: its form, what it refers to, and that its commands are ones there are."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import subprocess
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from celery_budget.core.declarations import parse as parse_budgets
from examples.fastapi.front import KEYS, PAGE_SECONDS
from tests.deploy.compose import OURS, ROOT, VARIABLE, project, raw, services, tracked
from tests.docs.commands import check
from tests.monitoring.conftest import promtool  # noqa: F401 - a fixture

CONFIG = ROOT / "examples" / "compose"
#: Images of others that have their own commands, with the programs that are in them.
PROGRAMS = {
    "postgres": {"pg_isready"},
    "rabbitmq": {"rabbitmq-diagnostics"},
    "redis": {"redis-server", "redis-cli"},
    "prometheus": {"promtool"},
    "grafana": {"wget"},
}
LASTING = [name for name, one in services.items() if one.get("restart") != "no"]


def test_it_has_the_form_of_the_compose_specification() -> None:
    schema = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    checker = jsonschema.validators.validator_for(json.loads(schema.read_text("utf-8")))
    errors = checker(json.loads(schema.read_text("utf-8"))).iter_errors(raw)
    assert [f"{list(one.path)}: {one.message}" for one in errors] == []


def test_all_that_is_asked_for_is_there() -> None:
    assert {*services} == {
        "postgres", "rabbitmq", "redis", "setup", "api", "worker", "beat", "dashboard",
        "prometheus", "grafana",
    }  # fmt: skip


@pytest.mark.parametrize("name", services)
def test_what_it_depends_on_can_come(name: str) -> None:
    for other, how in services[name].get("depends_on", {}).items():
        ends = other not in LASTING
        wanted = "service_completed_successfully" if ends else "service_healthy"
        assert how == {"condition": wanted}
        assert ends or services[other]["healthcheck"]["test"]


def test_nothing_depends_on_itself() -> None:
    def below(name: str, path: tuple[str, ...] = ()) -> None:
        assert name not in path
        for other in services[name].get("depends_on", {}):
            below(other, (*path, name))

    for name in services:
        below(name)


def test_what_needs_tables_waits_for_them() -> None:
    for name in set(OURS) - {"setup"}:
        assert set(services[name]["depends_on"]) == {"setup", "postgres", "rabbitmq", "redis"}


@pytest.mark.parametrize("name", services)
def test_a_service_is_no_root_and_may_do_little(name: str) -> None:
    service = services[name]
    assert service["user"].partition(":")[0] not in ("", "0", "root")
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is (name != "rabbitmq")
    assert "privileged" not in service


@pytest.mark.parametrize("name", LASTING)
def test_a_service_is_watched_and_comes_back_and_ends_in_time(name: str) -> None:
    service = services[name]
    assert service["restart"] == "unless-stopped"
    assert re.fullmatch(r"\d+[sm]", service["stop_grace_period"])
    health = service["healthcheck"]
    assert health["test"][0] in ("CMD", "CMD-SHELL")
    assert {"interval", "timeout", "retries", "start_period"} < set(health)


def test_the_one_that_ends_is_not_started_again() -> None:
    assert set(services) - set(LASTING) == {"setup"}
    assert services["setup"]["healthcheck"] == {"disable": True}


def test_ports_are_this_machines_alone_and_each_one_once() -> None:
    ports = [port for one in services.values() for port in one.get("ports", [])]
    assert ports
    for port in ports:
        host, _, inside = port.rpartition(":")
        assert host.startswith("127.0.0.1:"), port
        assert inside.isdigit()
    assert len({port.rpartition(":")[0] for port in ports}) == len(ports)


def test_images_are_pinned() -> None:
    for name, service in services.items():
        if name not in OURS:
            assert re.search(r":v?\d+\.\d+(\.\d+)?$", service["image"]), name


@pytest.mark.parametrize("name", services)
def test_volumes_and_files_are_there(name: str) -> None:
    targets = []
    for volume in services[name].get("volumes", []):
        source, target, *mode = volume.split(":")
        targets.append(target)
        if source.startswith("./"):
            assert source[2:] in tracked()
            assert mode == ["ro"]
        else:
            assert source in project["volumes"]
    assert len(set(targets)) == len(targets)


def test_every_volume_is_used() -> None:
    used = {
        one.split(":")[0] for service in services.values() for one in service.get("volumes", [])
    }
    assert set(project["volumes"]) == {one for one in used if not one.startswith("./")}


def test_secrets_come_by_the_environment() -> None:
    """What opens anything is a variable, with a default for this machine."""
    for name, service in raw["services"].items():
        for key, value in service.get("environment", {}).items():
            opens = "PASS" in key or "TOKEN" in key or "@" in str(value)
            assert not opens or ":-local-only}" in value, (name, key)
    defaults = {found[3] for found in VARIABLE.finditer(json.dumps(raw)) if found[2]}
    assert {one for one in defaults if not one.isdigit()} == {"local-only"}


# What runs.


def lines_of(words: list[str]) -> list[str]:
    """Return the commands of a list of words; those of a shell's script by line."""
    if words[:2] == ["sh", "-ec"]:
        return [line for line in words[2].splitlines() if line]
    return [shlex.join(words)]


def commands() -> list[Any]:
    found = []
    for name, service in services.items():
        test = service["healthcheck"].get("test")
        for words in (service.get("command"), test and test[1:]):
            if words and not (name == "prometheus" and words is service["command"]):
                lines = words if test and words == test[1:] and test[0] == "CMD-SHELL" else None
                found += [(name, line) for line in lines or lines_of(words)]
    return [pytest.param(*one, id=f"{one[0]}-{number}") for number, one in enumerate(found)]


@pytest.mark.parametrize(("name", "command"), commands())
def test_a_command_is_one_there_is(name: str, command: str) -> None:
    program, *rest = shlex.split(command)
    if name not in OURS:
        assert program in PROGRAMS[name]
    elif program == "celery":
        assert rest[:2] == ["-A", "examples.compose.served"]
        check(command)
    elif program == "uvicorn":
        import_module("uvicorn.main").main.make_context("uvicorn", list(rest))
        assert rest[0] == "examples.compose.served:api"
    else:
        assert (program, rest[0]) == ("python", "-m")
        assert importlib.util.find_spec(rest[1])


def test_what_the_application_reads_is_set() -> None:
    tree = ast.parse((CONFIG / "served.py").read_text("utf-8"))
    needed = {
        node.slice.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and ast.unparse(node.value) == "os.environ"
        and isinstance(node.slice, ast.Constant)
    }
    read = needed | {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "os.environ.get"
        and isinstance(node.args[0], ast.Constant)
    }
    assert needed
    for name in OURS:
        given = set(services[name]["environment"])
        assert needed <= given
        assert given <= read | {"CELERY_BUDGET_DASHBOARD_TOKEN"}


def test_the_addresses_are_those_of_services() -> None:
    hosts = {
        "CELERY_BROKER_URL": "rabbitmq:5672", "CELERY_RESULT_BACKEND": "redis:6379",
        "CELERY_BUDGET_DATABASE_URL": "postgres:5432",
    }  # fmt: skip
    for name in OURS:
        for key, host in hosts.items():
            assert re.search(rf"[/@]{host}/", services[name]["environment"][key])
    server, broker = (services[name]["environment"] for name in ("postgres", "rabbitmq"))
    ours = services["api"]["environment"]
    login = f"{server['POSTGRES_USER']}:{server['POSTGRES_PASSWORD']}@"
    assert f"//{login}" in ours["CELERY_BUDGET_DATABASE_URL"]
    assert ours["CELERY_BUDGET_DATABASE_URL"].endswith("/" + server["POSTGRES_DB"])
    login = f"{broker['RABBITMQ_DEFAULT_USER']}:{broker['RABBITMQ_DEFAULT_PASS']}@"
    assert f"//{login}" in ours["CELERY_BROKER_URL"]


def test_the_budgets_are_budgets() -> None:
    text = (CONFIG / "budgets.toml").read_text("utf-8")
    assert {f"tenant:{name}" for name in KEYS.values()} == {
        one.name for one in parse_budgets(text, "default")["default"]
    }


# What watches it.


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def test_prometheus_scrapes_what_serves_metrics() -> None:
    beat = services["beat"]["environment"]
    targets = {
        target: job
        for job in load(CONFIG / "prometheus.yml")["scrape_configs"]
        for one in job["static_configs"]
        for target in one["targets"]
    }
    port = services["dashboard"]["command"][-1]
    assert set(targets) == {f"beat:{beat['CELERY_BUDGET_METRICS_PORT']}", f"dashboard:{port}"}
    token = targets[f"dashboard:{port}"]["authorization"]["credentials_file"]
    assert f"> {token}\n" in services["prometheus"]["entrypoint"][2]
    assert (
        services["prometheus"]["environment"]["DASHBOARD_TOKEN"]
        == services["dashboard"]["environment"]["CELERY_BUDGET_DASHBOARD_TOKEN"]
    )


def test_promtool_finds_the_configuration_right(promtool: str, tmp_path: Path) -> None:  # noqa: F811
    for volume in services["prometheus"]["volumes"]:
        source, target, *_ = volume.split(":")
        if source.startswith("./"):
            assert Path(target).parent == Path("/etc/prometheus")
            text = (ROOT / source).read_text("utf-8")
            (tmp_path / Path(target).name).write_text(
                text.replace("/tmp/dashboard-token", str(tmp_path / "token"))  # noqa: S108
            )
    (tmp_path / "token").write_text("secret")
    done = subprocess.run(
        [promtool, "check", "config", "--lint-fatal", str(tmp_path / "prometheus.yml")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rules found" in done.stdout


def test_grafana_is_given_its_source_and_its_dashboard() -> None:
    [source] = load(CONFIG / "grafana" / "datasources" / "prometheus.yml")["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    assert source["url"] == "http://prometheus:9090"
    assert "--web.listen-address=0.0.0.0:9090" in services["prometheus"]["command"]
    [provider] = load(CONFIG / "grafana" / "dashboards" / "celery_budget.yml")["providers"]
    mounted = {one.split(":")[1]: one.split(":")[0] for one in services["grafana"]["volumes"]}
    folder = ROOT / mounted[provider["options"]["path"]]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (folder / Path(home).name).is_file()
    for kind in ("datasources", "dashboards"):
        assert f"/etc/grafana/provisioning/{kind}" in mounted


def test_a_worker_has_longer_than_its_longest_task() -> None:
    # The largest draft that a budget takes.
    assert services["worker"]["stop_grace_period"] == "5m"
    assert 510 * PAGE_SECONDS < 300
