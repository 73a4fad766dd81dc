"""What Schemathesis is told about this service, which imports this file; `test_schemathesis.py` has it run."""

import schemathesis

FORM = {"malformed_body", "unsupported_media_type", "method_not_allowed"}
"""Codes of problems that say that a request has not the form which `/openapi.json` describes."""
DEADLINE, HEAD = "X-Request-Timeout-Ms", "Inference-Header-Content-Length"


@schemathesis.hook
def filter_case(context, case):
    """Leave out further headers, which are no violation in HTTP, whatever a schema says of members."""
    return "x-schemathesis-unknown-property" not in (case.headers or {})


@schemathesis.hook
def before_call(context, case, kwargs):
    """Give each the time that it takes: a deadline of 1 ms is sound, too, and is answered by 504."""
    if (case.headers or {}).get(DEADLINE, "").isdecimal() and 1 <= int(case.headers[DEADLINE]) < 30_000:
        case.headers[DEADLINE] = "30000"


@schemathesis.check
def refused_only_for_its_content(ctx, response, case):
    """What the document allows is accepted, or refused for what no document can say: whether bytes are an image.

    Schemathesis' own check of this, `positive_data_acceptance`, goes by the status and takes every 422 for the form.
    """
    sound = case.meta is not None and case.meta.generation.mode.is_positive
    cut = HEAD in (case.headers or {})  # it may lie about any body
    if sound and not cut and case.media_type == "application/json" and response.status_code >= 400:
        problem = response.json()
        assert problem["code"] not in FORM, problem["detail"]
