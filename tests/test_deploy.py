"""The files in deploy/ agree with the settings, the image and the routes."""

import re
import shlex
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from optpipe_api import Settings, create_app
from optpipe_api.main import server_config
from optpipe_api.protocol import Protocol
from optpipe_api.services import parse_pool
from optpipe_api.services.parse_pool import ParsePool
from optpipe_api.services.render import Charts
from tests.test_packaging import ROOT

COMPOSE = ROOT / "deploy" / "compose.yaml"
KUBERNETES = ROOT / "deploy" / "kubernetes" / "kustomization.yaml"
RESOURCES = [
    KUBERNETES.parent / name for name in yaml.safe_load(KUBERNETES.read_text("utf-8"))["resources"]
]
PROMETHEUS = ROOT / "deploy" / "prometheus.yaml"
CADDY = ROOT / "deploy" / "Caddyfile"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The Compose file."""
    data: dict[str, Any] = yaml.safe_load(COMPOSE.read_text("utf-8"))
    return data


@pytest.fixture(scope="module")
def objects() -> dict[str, dict[str, Any]]:
    """The Kubernetes objects by their kinds."""
    documents = [yaml.safe_load(path.read_text("utf-8")) for path in RESOURCES]
    return {document["kind"]: document for document in documents}


def test_the_base_has_every_file_of_its_folder_and_one_object_of_a_kind(objects) -> None:
    """Nothing stands there that nobody applies."""
    base = yaml.safe_load(KUBERNETES.read_text("utf-8"))
    assert (base["kind"], base["apiVersion"]) == (
        "Kustomization",
        "kustomize.config.k8s.io/v1beta1",
    )
    assert {KUBERNETES, *RESOURCES} == set(KUBERNETES.parent.iterdir())
    assert len(objects) == len(RESOURCES)
    assert {item["metadata"]["name"] for item in objects.values()} == {"optpipe"}


@pytest.fixture(scope="module")
def pod(objects) -> dict[str, Any]:
    """What a replica on Kubernetes is."""
    spec: dict[str, Any] = objects["Deployment"]["spec"]["template"]["spec"]
    return spec


def image_line(word: str) -> str:
    """The last line of the Dockerfile that begins with a word."""
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    return next(line for line in reversed(lines) if line.startswith(f"{word} "))


def settings_of(variables: dict[str, str], monkeypatch) -> Settings:
    """What a server makes of its variables; each of them must be one of ours."""
    names = {f"OPTPIPE_{name.upper()}" for name in Settings.model_fields}
    assert set(variables) <= names
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return Settings.load(host="0.0.0.0")


def test_compose_settings_are_settings(compose, monkeypatch) -> None:
    variables = dict(compose["services"]["service"]["environment"])
    settings = settings_of(variables, monkeypatch)
    assert settings.keys_required
    assert settings.database_url.startswith("postgresql://")
    assert "@database/" in settings.database_url


def test_kubernetes_settings_are_settings(pod, monkeypatch) -> None:
    """The database's URL holds a password, and so comes from a Secret."""
    (container,) = pod["containers"]
    given = {item["name"]: item for item in container["env"]}
    secret = given.pop("OPTPIPE_DATABASE_URL")
    assert "value" not in secret
    assert secret["valueFrom"]["secretKeyRef"] == {"name": "optpipe-database", "key": "url"}
    values = {name: item["value"] for name, item in given.items()}
    assert settings_of(values, monkeypatch).log_format == "json"


def test_both_run_two_replicas_of_the_image_as_it_is(compose, objects, pod) -> None:
    """Neither has a command of its own, and both reach the port that the image listens on."""
    service, (container,) = compose["services"]["service"], pod["containers"]
    assert service["deploy"]["replicas"] == objects["Deployment"]["spec"]["replicas"] == 2
    for runs in (service, container):
        assert not {"command", "args", "entrypoint"} & set(runs)
    port = re.search(r'"--port", "(\d+)"', image_line("CMD"))
    assert port is not None
    assert container["ports"] == [{"name": "http", "containerPort": int(port[1])}]
    assert [mapping.rpartition(":")[2] for mapping in service["ports"]] == [port[1]]
    assert all(mapping.startswith("127.0.0.1:") for mapping in service["ports"])


def test_probes_ask_routes_that_exist_and_want_no_key(pod) -> None:
    """Life by /healthz, readiness by /readyz."""
    (container,) = pod["containers"]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in PROBES}
    assert paths == PROBES
    document = create_app(Settings(host="0.0.0.0")).openapi()
    for path in paths.values():
        assert document["paths"][path]["get"]["security"] == []


SERVER_BYTES = 1024**3
PROBES = {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}


def test_the_pod_runs_as_the_images_user_without_privileges(compose, pod) -> None:
    """And without the variables that would hide the port's."""
    user, group = image_line("USER").split()[1].split(":")
    context = pod["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == (int(user), int(group))
    assert context["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert compose["services"]["service"]["cap_drop"] == ["ALL"]
    assert pod["enableServiceLinks"] is False


def test_memory_suffices_for_all_processes_of_a_pod(pod, monkeypatch) -> None:
    """Solvers, the two pools of two processes, and the one that traces."""
    (container,) = pod["containers"]
    values = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    settings = settings_of(values, monkeypatch)
    assert settings.solver_memory_bytes is not None
    solvers = settings.solver_processes * settings.solver_memory_bytes
    pools = [pool._limits[1] * parse_pool._MAX_RUNNING for pool in (ParsePool(), Charts()._pool)]
    needed = SERVER_BYTES + solvers + sum(pools) + settings.trace_memory_bytes
    limit = container["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    assert int(limit.removesuffix("Gi")) * 1024**3 >= needed


def test_a_drained_node_leaves_a_replica_and_strangers_reach_none(objects) -> None:
    labels = objects["Deployment"]["spec"]["selector"]
    budget, policy = objects["PodDisruptionBudget"]["spec"], objects["NetworkPolicy"]["spec"]
    assert budget["selector"] == policy["podSelector"] == labels
    assert budget["maxUnavailable"] == 1
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    for rule in policy["ingress"]:
        assert all(source["podSelector"]["matchLabels"] for source in rule["from"])
        assert rule["ports"] == [{"protocol": "TCP", "port": "http"}]


def test_prometheus_scrapes_the_pods_with_a_key(objects) -> None:
    """No annotation asks for a scrape without one."""
    template = objects["Deployment"]["spec"]["template"]
    assert "annotations" not in template["metadata"]
    (job,) = yaml.safe_load(PROMETHEUS.read_text("utf-8"))["scrape_configs"]
    assert job["authorization"]["credentials_file"]
    ((name, value),) = template["metadata"]["labels"].items()
    (found,) = job["kubernetes_sd_configs"]
    assert found["selectors"] == [{"role": "pod", "label": f"{name}={value}"}]


def test_the_edge_has_the_limits_of_the_service() -> None:
    text = CADDY.read_text("utf-8")
    settings = Settings()
    assert f"max_size {settings.max_body_bytes // 1024**2}MiB" in text
    assert f"max_header_size {Protocol.HEADER_BYTES // 1024}KiB" in text
    assert f"read_header {Protocol.HEADERS_S:g}s" in text
    assert f"read_body {Protocol.BODY_S:g}s" in text
    (waits,) = re.findall(r"response_header_timeout (\d+)s", text)
    assert int(waits) > settings.max_wait_s
    (path,) = re.findall(r"health_uri (\S+)", text)
    assert path == PROBES["readiness"]
    assert text.count("{") == text.count("}")


def test_no_pod_of_the_old_version_meets_the_tables_of_the_new(objects) -> None:
    """A new pod migrates the database when it starts."""
    assert objects["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}


def test_there_is_time_to_stop(compose, pod) -> None:
    """For requests on their way, for those that wait, and for running jobs to be handed back."""
    (container,) = pod["containers"]
    *_, pause_s = container["lifecycle"]["preStop"]["exec"]["command"]
    app = create_app(Settings())
    graceful_s = server_config(app, Settings()).timeout_graceful_shutdown
    assert graceful_s is not None
    assert pod["terminationGracePeriodSeconds"] >= int(pause_s) + 2 * graceful_s
    grace = compose["services"]["service"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) >= 2 * graceful_s


@pytest.mark.parametrize("path", [COMPOSE, KUBERNETES, *RESOURCES])
def test_no_name_is_given_twice(path) -> None:
    """YAML takes the last of two without a word."""
    for node in yaml.compose_all(path.read_text("utf-8")):
        assert repeated(node) == []


def repeated(node: yaml.Node | None) -> list[str]:
    """The keys that a mapping, here or further in, has twice."""
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value]
        inner = [name for _, value in node.value for name in repeated(value)]
        return sorted({name for name in names if names.count(name) > 1}) + inner
    if isinstance(node, yaml.SequenceNode):
        return [name for item in node.value for name in repeated(item)]
    return []


def test_the_manifest_runs_the_version_of_this_tree() -> None:
    """In the pods and in the command that makes the first key."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for path in (KUBERNETES, RESOURCES[0]):
        tags = set(re.findall(r"\boptpipe:([\w.]+)", path.read_text("utf-8")))
        assert tags - {"PASSWORD"} == {project["version"]}


def test_the_service_leads_to_the_pods(objects) -> None:
    template = objects["Deployment"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"].items() <= labels.items()
    assert objects["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert objects["Service"]["spec"]["ports"][0]["targetPort"] == "http"


@pytest.mark.parametrize("path", [COMPOSE, KUBERNETES, ROOT / "Dockerfile"])
def test_the_command_that_makes_the_first_key_works(
    path, tmp_path, monkeypatch, optpipe: Callable[..., tuple[int, str, str]]
) -> None:
    """Each file says it in a comment; the part after the container's is run here."""
    monkeypatch.setenv("OPTPIPE_DATABASE_URL", f"sqlite:///{tmp_path}/jobs.db")
    found = re.search(r"optpipe (keys create .*)", path.read_text("utf-8"))
    assert found is not None
    code, text, _ = optpipe(*shlex.split(found[1]))
    assert (code, text.startswith("opk_")) == (0, True)


def test_no_password_stands_in_the_files() -> None:
    """They are named, and given elsewhere."""
    for path in (COMPOSE, KUBERNETES, *RESOURCES):
        for user, password in re.findall(r"postgresql://(\w+):([^@]+)@", path.read_text("utf-8")):
            assert (user, password) in {
                ("optpipe", "${POSTGRES_PASSWORD}"),
                ("optpipe", "PASSWORD"),
            }
