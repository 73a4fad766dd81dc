"""The description of the interface: whole, and of nothing that is not there."""

import re

import pytest
from jsonschema import Draft202012Validator

from acclimate_service.http.routes import feedback


@pytest.fixture(scope="module")
def document(replica):
    return replica.http.get("/openapi.json").json()


@pytest.fixture(scope="module")
def operations(document):
    return {
        operation["operationId"]: operation
        for operations in document["paths"].values()
        for operation in operations.values()
    }


def test_every_operation_has_a_name_a_tag_and_a_description(document, operations):
    assert len(operations) == sum(map(len, document["paths"].values()))
    tags = {each["name"] for each in document["tags"]}
    for name, operation in operations.items():
        assert re.fullmatch("[a-z]+(_[a-z]+)*", name)
        assert set(operation["tags"]) <= tags
        assert operation["description"]


def test_every_reply_and_every_body_has_a_schema_that_is_there(document, operations):
    schemas_ = document["components"]["schemas"]
    assert {"Prediction", "Problem", "Committed"} <= schemas_.keys()
    for schema in schemas_.values():
        Draft202012Validator.check_schema(schema)
    for operation in operations.values():
        contents = [each.get("content", {}) for each in operation["responses"].values()]
        contents.append(operation.get("requestBody", {}).get("content", {}))
        for content in contents:
            for kind, described in content.items():
                assert described["schema"], f"{operation['operationId']}: {kind}"
                named = re.findall("'#/components/schemas/(\\w+)'", str(described))
                assert set(named) <= schemas_.keys()
        problem = operation["responses"]["default"]["content"]["application/problem+json"]
        assert problem == {"schema": {"$ref": "#/components/schemas/Problem"}}
        assert "422" not in operation["responses"], "the framework's own form of errors is never sent"


def test_whether_a_state_changed_is_one_type(document):
    schemas_ = document["components"]["schemas"]
    assert schemas_["Committed"] == {"anyOf": [{"type": "boolean"}, {"type": "string", "enum": ["unknown"]}]}
    for name, member in (("Problem", "state_committed"), ("State", "committed")):
        assert schemas_[name]["properties"][member]["$ref"] == "#/components/schemas/Committed"


@pytest.mark.parametrize(
    ("name", "headers"),
    [
        (
            "predict",
            {
                "Idempotency-Key",
                "X-Request-Timeout-Ms",
                "X-Batch-Number",
                "X-Tensor-Shape",
                "X-Tensor-Layout",
                "X-Tensor-Dtype",
            },
        ),
        (
            "enroll",
            {
                "Idempotency-Key",
                "X-Request-Timeout-Ms",
                "X-Labels",
                "X-Tensor-Shape",
                "X-Tensor-Layout",
                "X-Tensor-Dtype",
            },
        ),
        ("import_state", {"Idempotency-Key", "X-Request-Timeout-Ms", "If-Match"}),
        ("delete_client", {"X-Request-Timeout-Ms"}),
        ("infer_with_model", {"X-Request-Timeout-Ms", "X-Batch-Number", "Inference-Header-Content-Length"}),
    ],
)
def test_headers_that_decide_something_are_named(operations, name, headers):
    assert {each["name"] for each in operations[name]["parameters"] if each["in"] == "header"} == headers


def test_other_models_have_the_same_operations_under_the_name_of_the_model(document, operations):
    assert "/models/{model}/clients/{client_id}/predict" in document["paths"]
    (model, client, *_) = operations["predict_of_model"]["parameters"]
    assert (model["name"], model["schema"]["enum"]) == ("model", ["fashion-cnn"])
    assert client["schema"]["pattern"]


def test_the_bounds_of_bodies_are_those_that_hold(document):
    rows = document["components"]["schemas"]["LabelledRows"]["properties"]["rows"]
    assert rows["maxItems"] == feedback._MOST_ROWS
    row = document["components"]["schemas"]["LabelledRow"]["properties"]["request_id"]
    assert row["maxLength"] == feedback._LONGEST_ID


def test_metrics_and_states_are_no_json(operations):
    assert operations["read_metrics"]["responses"]["200"]["content"].keys() == {
        "text/plain",
        "application/openmetrics-text",
    }
    exported = operations["export_state"]["responses"]["200"]
    assert exported["content"].keys() == {"application/octet-stream"}
    assert "ETag" in exported["headers"]


def test_the_page_for_people_needs_nothing_of_the_internet(replica):
    page = replica.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    needed = re.findall("(?:src|href|url)(?:=|: )[\"']([^\"']+)", page.text)
    assert len(needed) >= 4
    for each in needed:
        assert "//" not in each
        assert replica.http.get(f"/{each}").status_code == 200, each
    assert replica.http.get("/docs/other.js").json()["code"] == "not_found"


def test_every_document_is_used(document):
    text = str(document)
    for name in document["components"]["schemas"]:
        assert f"'#/components/schemas/{name}'" in text, name
