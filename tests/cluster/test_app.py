"""The Serve application as it is built from a configuration, without a cluster."""

from pathlib import Path

import pytest
import ray.util

from cluster import app
from cluster.config import Config, parse_config
from cluster.protocol.errors import InvalidRequest


def with_transport(**values: object) -> Config:
    return parse_config({"transport": values})


def test_the_secret_file_is_read_without_the_newline_that_editors_add(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    assert app._secret(with_transport(secret_file=str(path))) == b"0123456789abcdef"


def test_without_a_secret_file_every_start_has_a_secret_of_its_own() -> None:
    first, second = app._secret(Config()), app._secret(Config())
    assert first != second
    assert len(first) >= app.MIN_SECRET_BYTES


@pytest.mark.parametrize("content", ["", "\n", "0123456789abcde\n"])
def test_a_short_secret_is_refused_and_not_told(tmp_path: Path, content: str) -> None:
    path = tmp_path / "secret"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=r"transport\.secret_file: .* expected at least 16") as caught:
        app.build({"transport": {"secret_file": str(path)}})
    assert caught.value.field == "transport.secret_file"
    assert not content.strip() or content.strip() not in str(caught.value)


def test_a_secret_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"transport\.secret_file: .*absent"):
        app.build({"transport": {"secret_file": str(tmp_path / "absent")}})


def test_a_process_listens_where_the_configuration_says_or_where_ray_knows_its_node() -> None:
    assert app._data_plane_host(Config()) == "127.0.0.1"
    assert app._data_plane_host(with_transport(host="10.0.0.7")) == "10.0.0.7"
    assert app._data_plane_host(with_transport(host="node")) == ray.util.get_node_ip_address()


def test_each_pool_asks_for_the_nodes_that_its_placement_names() -> None:
    def on(pool: str) -> dict[str, object]:
        return {"placement": {"label_selector": {"outrider.dev/pool": pool}}}

    drafter = {"name": "lookup", "kind": "prompt_lookup"} | on("drafter")
    built = app.build({"target": on("verifier"), "router": on("router"), "ingress": on("gate"), "drafters": [drafter]})
    ingress = built._bound_deployment
    others = [other._bound_deployment for other in ingress.init_args[2:]]
    asked = {d.name: d.ray_actor_options["label_selector"]["outrider.dev/pool"] for d in (ingress, *others)}
    assert asked == {"Ingress": "gate", "Verifier": "verifier", "Router": "router", "Drafter-lookup": "drafter"}


def test_without_a_placement_no_node_is_asked_for() -> None:
    assert "label_selector" not in app.build({})._bound_deployment.ray_actor_options
