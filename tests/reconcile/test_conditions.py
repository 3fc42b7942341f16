"""Conditions as a table: what stands and what is wrong in, the words of the status out."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from mmd_api.spec.exposure import ParentRef
from mmd_api.spec.gateway import AuthSpec, OidcSpec
from mmd_api.status import RolledBack
from mmd_operator.observed.condition_state import ConditionState
from mmd_operator.observed.observed import Observed, ParentReport, child_of, pod_of
from mmd_operator.observed.problems import Problem, default_tenant_missing, gathered
from mmd_operator.rollout.next_step import Step
from mmd_operator.status.conditions import current_conditions, dated
from mmd_operator.status.deployment_status import pools_of, status_of
from mmd_operator.status.facts import Facts, Scaling

from .bodies import NEW, OLD, pod, workload

CRASH = Problem("CrashLoop", "decode", "it ends", "read its log", revision=NEW)
NATS_DOWN = Problem("NatsDown", "nats", "no disk", "make room")
THIRD = Problem("Third", "gateway", "third", "do a third thing")
NO_TENANT = default_tenant_missing("guests", "keys", "gateway-0")


def observed(revision=NEW, nats=1, gateway=1, pods=(), nats_replicas=1, **ready) -> Observed:
    """Pools of two pods each, of which so many are ready, beside a gateway of `revision`."""
    bodies = [("Deployment", workload("Deployment", "gateway", None, template=revision, ready=gateway))]
    bodies.append(("StatefulSet", workload("StatefulSet", "nats", None, replicas=nats_replicas, ready=nats)))
    bodies += [
        ("StatefulSet", workload("StatefulSet", name, revision, replicas=2, ready=ready.get(name, 2)))
        for name in ("encoder", "prefill", "decode")
    ]
    children = [child_of(kind, body) for kind, body in bodies]
    return Observed({c.key: c for c in children}, tuple(pods))


def step(stage="Complete", **more) -> Step:
    return Step(stage, **{"revision": NEW, "serving": NEW, "apply": (), "sizes": {}, "remove": (), **more})


def facts(seen: Observed | None = None, found: Step | None = None, **more) -> Facts:
    pools = ("encoder", "prefill", "decode")
    rest = {"managed_nats": True, "problems": (), **more}
    return Facts("demo", "default", pools, observed=seen or observed(), step=found or step(), **rest)


def condition(name: str, of: Facts) -> ConditionState:
    return {v.type: v for v in current_conditions(of)}[name]


@pytest.mark.parametrize(
    ("seen", "missing"),
    [
        (observed(gateway=0), "no gateway pod is Ready"),
        (observed(nats=0), "the NATS server is not Ready"),
        (observed(nats=1, nats_replicas=3), "NATS has no majority: 1 of 3 servers are Ready, 1 more needed"),
        (observed(encoder=0), "no encoder pod is Ready"),
        (observed(prefill=0, decode=0), "no prefill pod is Ready, no decode pod is Ready"),
        (Observed(), "no gateway pod is Ready, the NATS server is not Ready, no encoder pod is Ready, "
         "no prefill pod is Ready, no decode pod is Ready"),
    ],
)  # fmt: skip
def test_a_deployment_is_not_ready_without(seen, missing):
    found = condition("Ready", facts(seen))
    assert (found.status, found.reason) == ("False", "Starting")
    assert found.message == f"{missing}; check the pods' conditions and logs"


def test_a_deployment_is_ready_while_a_majority_of_its_nats_servers_is():
    assert condition("Ready", facts(observed(nats=2, nats_replicas=3))).status == "True"


def test_a_deployment_is_ready_while_every_component_has_one_ready_pod():
    found = condition("Ready", facts(observed(encoder=1, prefill=1, decode=1), problems=(CRASH,)))
    assert (found.status, found.reason) == ("True", "Serving")
    assert found.message == f"gateway 1/1, encoder 1/2, prefill 1/2, decode 1/2; revision {NEW}"


def test_empty_pools_and_an_external_nats_server_do_not_prevent_ready():
    seen = observed(nats=0)
    zero = child_of("StatefulSet", workload("StatefulSet", "encoder", NEW, replicas=0))
    seen = replace(seen, children={**seen.children, zero.key: zero})
    assert condition("Ready", facts(seen, managed_nats=False)).status == "True"
    scaled = condition("EncoderReady", facts(seen))
    assert (scaled.status, scaled.reason, scaled.message) == ("True", "ScaledToZero", "0 of 0 pods Ready")


def test_what_is_not_ready_names_the_two_worst_problems():
    found = condition("Ready", facts(observed(decode=0), problems=(CRASH, NATS_DOWN, THIRD)))
    assert found.reason == "CrashLoop"
    assert found.message == f"no decode pod is Ready; {CRASH} | {NATS_DOWN}"


def test_a_missing_default_tenant_is_reported_and_keeps_nothing_from_being_ready():
    with_crash = facts(observed(decode=0), problems=gathered([NO_TENANT, CRASH]))
    ready, degraded = (condition(name, with_crash) for name in ("Ready", "Degraded"))
    assert (ready.reason, ready.message) == ("CrashLoop", f"no decode pod is Ready; {CRASH}")
    assert (degraded.reason, degraded.message) == ("CrashLoop", f"{CRASH} | {NO_TENANT}")
    alone = facts(observed(decode=0), problems=(NO_TENANT,))
    assert (condition("Ready", alone).reason, condition("Degraded", alone).reason) == (
        "Starting",
        "DefaultTenantMissing",
    )


def test_what_is_not_ready_names_what_pods_wait_for():
    found = condition("Ready", facts(observed(decode=0), waiting="2 decode pods wait for a node"))
    assert found.message == "no decode pod is Ready; 2 decode pods wait for a node"


ROLLED_BACK = RolledBack(
    generation=2,
    from_revision=NEW,
    to_revision=OLD,
    spec=NEW,
    history_revision=1,
    time=datetime(2027, 1, 1, tzinfo=UTC),
    reason="ProgressDeadlineExceeded",
    message="it failed",
)
BRINGING_UP = step("BringingUp", serving=OLD)
COUNTS = "encoder 2/2, prefill 2/2, decode 2/2"


@pytest.mark.parametrize(
    ("of", "status", "reason", "words"),
    [
        (facts(paused=True), "False", "Paused", "set it to false"),
        (facts(), "False", "Complete", f"revision {NEW} is complete"),
        (facts(problems=(CRASH,)), "False", "Complete", "is complete"),
        (
            facts(found=step("BringingUp", serving=OLD, blocked=True, waits_for="no GPU is free")),
            *("True", "WaitingForGpuBudget", "no GPU is free"),
        ),
        (facts(found=BRINGING_UP), "True", "BringingUp", f"{NEW} next to {OLD}: {COUNTS}"),
        (facts(found=BRINGING_UP, problems=(CRASH,)), "False", "RolloutStuck", f"({COUNTS}): {CRASH}; revision {OLD} keeps"),
        (facts(found=BRINGING_UP, problems=(NATS_DOWN,)), "False", "RolloutStuck", str(NATS_DOWN)),
        (
            facts(found=BRINGING_UP, problems=(CRASH, NATS_DOWN, THIRD)),
            *("False", "RolloutStuck", f"{CRASH} | {NATS_DOWN}; revision"),
        ),
        (facts(found=BRINGING_UP, problems=(replace(CRASH, revision=OLD),)), "True", "BringingUp", COUNTS),
        (facts(found=BRINGING_UP, problems=(NO_TENANT,)), "True", "BringingUp", COUNTS),
        (facts(found=step("Updating"), problems=(NO_TENANT,)), "True", "Updating", COUNTS),
        (facts(found=step("Creating", serving=None)), "True", "Creating", f"revision {NEW}: {COUNTS}"),
        (facts(found=step("Creating", serving=None), problems=(CRASH,)), "False", "CrashLoop", f"{COUNTS}: {CRASH}"),
        (
            facts(found=step("Updating", waits_for="the rest follows"), waiting="a pod waits for a node"),
            *("True", "Updating", f"{COUNTS}; the rest follows; a pod waits for a node"),
        ),
        (
            facts(found=BRINGING_UP, problems=(CRASH,), overdue_seconds=300.0),
            *("False", "ProgressDeadlineExceeded", f"no progress for 300 s ({COUNTS}): {CRASH}; revision {OLD} keeps serving"),
        ),
        (facts(found=step("Updating"), overdue_seconds=300.0), "False", "ProgressDeadlineExceeded", f"({COUNTS}); fix the spec"),
        (
            facts(found=BRINGING_UP, overdue_seconds=300.0, not_rolled_back="no recorded spec makes it"),
            *("False", "ProgressDeadlineExceeded", "keeps serving; not rolled back: no recorded spec makes it; fix the spec"),
        ),
        (facts(rolled_back=ROLLED_BACK), "False", "ProgressDeadlineExceeded", "it failed"),
        (facts(found=BRINGING_UP, overdue_seconds=9.0, paused=True), "False", "Paused", "set it to false"),
        (facts(found=BRINGING_UP, changes_paused=True), "False", "RolloutPaused", "`mmd rollout resume demo`"),
        (facts(found=step("Draining", serving=NEW)), "True", "Draining", f"revision {NEW} receives new requests"),
        (facts(found=step("SwitchingGateway", serving=OLD)), "True", "SwitchingGateway", f"from {OLD}"),
    ],
)  # fmt: skip
def test_progress_is_reported(of, status, reason, words):
    found = condition("Progressing", of)
    assert (found.status, found.reason) == (status, reason)
    assert words in found.message
    stalled = [c for c in current_conditions(of) if c.type == "Stalled"]
    expected = [replace(found, type="Stalled", status="True")] if reason == "ProgressDeadlineExceeded" else []
    assert stalled == expected


def test_without_a_plan_conditions_name_the_problem_and_serving_revision():
    of = replace(facts(observed(OLD), problems=(CRASH,)), step=None)
    found = condition("Progressing", of)
    assert (found.status, found.reason, found.message) == ("False", "CrashLoop", str(CRASH))
    assert condition("Ready", of).message.endswith(f"revision {OLD}")


def test_problems_come_before_fields_that_this_operator_does_not_know():
    assert condition("Degraded", facts()).status == "False"
    newer = facts(unknown_fields=("spec.a", "spec.b"))
    assert condition("Degraded", newer).reason == "UnknownFields"
    assert "spec.a, spec.b;" in condition("Degraded", newer).message
    assert condition("Degraded", replace(newer, problems=(CRASH,))).reason == "CrashLoop"


def test_a_pool_is_ready_with_all_pods_or_names_its_problem():
    assert condition("DecodeReady", facts()).reason == "AllReady"
    short = observed(decode=1)
    starting = condition("DecodeReady", facts(short))
    assert (starting.status, starting.reason) == ("False", "Starting")
    assert starting.message == "1 of 2 pods Ready; 2 updated"
    crashing = condition(
        "DecodeReady", facts(short, problems=(NATS_DOWN, replace(CRASH, revision=OLD), CRASH))
    )
    assert (crashing.reason, crashing.message) == ("CrashLoop", f"1 of 2 pods Ready; {CRASH}")
    elsewhere = (replace(CRASH, component="prefill"), replace(CRASH, revision=OLD))
    assert condition("DecodeReady", facts(short, problems=elsewhere)).reason == "Starting"
    of_any_revision = replace(CRASH, revision=None)
    assert condition("DecodeReady", facts(short, problems=(of_any_revision,))).reason == "CrashLoop"


def test_a_pool_that_is_not_created_yet_reports_it_or_why():
    absent = facts(Observed())
    assert condition("DecodeReady", absent).message == "not created yet"
    why = condition("DecodeReady", replace(absent, problems=(CRASH,)))
    assert (why.reason, why.message) == ("CrashLoop", str(CRASH))


@pytest.mark.parametrize(
    ("scaling", "status", "reason", "words"),
    [
        (Scaling(pools=("encoder", "decode")), "True", "Active", "scaling encoder, decode"),
        (Scaling(pools=("encoder", "decode"), shadow=("decode",)), "True", "Active", "scaling encoder; shadow mode: decode"),
        (Scaling(pools=("decode",), shadow=("decode",)), "False", "Shadow", "decode: decisions are reported but not applied"),
    ],
)  # fmt: skip
def test_whether_the_autoscaler_acts_is_reported(scaling, status, reason, words):
    found = condition("ScalingActive", facts(scaling=scaling))
    assert (found.status, found.reason, found.message) == (status, reason, words)
    assert condition("ScalingActive", facts(scaling=scaling, paused=True)).reason == "Paused"


def test_there_are_no_scaling_conditions_where_no_pool_scales():
    assert "ScalingActive" not in {v.type for v in current_conditions(facts())}


def test_a_limit_comes_with_its_remedy():
    free = Scaling(pools=("decode",))
    assert condition("ScalingLimited", facts(scaling=free)).status == "False"
    held = condition("ScalingLimited", facts(scaling=replace(free, limited=("decode",), limit="GpuBudget")))
    assert (held.status, held.reason) == ("True", "GpuBudget")
    assert held.message == "more replicas needed: decode; raise spec.gpuBudget or reduce other pools"


@pytest.mark.parametrize(
    ("missing", "words"),
    [("a", ": a;"), ("abc", ": a; b; c;"), ("abcd", ": a; b; c and 1 more;"), ("abcde", "and 2 more")],
)  # fmt: skip
def test_at_most_three_silent_pods_are_named_and_the_others_counted(missing, words):
    fresh = condition("MetricsFresh", facts(scaling=Scaling(pools=("decode",), missing=tuple(missing))))
    assert fresh.status == "False"
    assert words in fresh.message
    assert condition("MetricsFresh", facts(scaling=Scaling(pools=("decode",)))).status == "True"


def test_a_condition_keeps_the_time_of_its_last_change_of_status():
    then, now = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    before = [
        {"type": "Ready", "status": "True", "lastTransitionTime": then},
        {"type": "Degraded", "status": "True", "lastTransitionTime": then},
    ]
    found = dated(current_conditions(facts()), before, 3, now)
    times = {c.type: c.last_transition_time for c in found}
    assert (times["Ready"], times["Degraded"], times["Progressing"]) == (then, now, now)
    assert {c.observed_generation for c in found} == {3}


def test_a_message_is_cut_to_what_the_schema_takes():
    (cut,) = dated(
        [ConditionState("Ready", "False", "Long", "x" * 2000)], [], 1, datetime(2026, 1, 1, tzinfo=UTC)
    )
    assert cut.message == "x" * 1024


def test_the_status_of_a_pool_counts_all_revisions_and_draining_pods():
    old = child_of("StatefulSet", workload("StatefulSet", "decode", OLD, replicas=3, ready=1))
    leaving = (
        pod(name="demo-decode-0", deleting=True),
        pod(name="demo-decode-1", drain="2026-01-01T00:00:00Z"),
        pod(name="demo-decode-2"),
        pod(name="demo-decode-3"),
        pod("prefill", name="demo-prefill-0", deleting=True),
    )
    seen = observed(pods=leaving)
    seen = replace(seen, children={**seen.children, old.key: old})
    status = status_of(facts(seen), [], 1)
    assert (status.pools.decode.desired, status.pools.decode.ready, status.pools.decode.draining) == (5, 3, 2)
    assert status.pools.decode.revision == status.pipeline_revision == NEW
    assert status.bottleneck is None
    assert status.endpoint == "http://demo-gateway.default.svc:8000"


@pytest.mark.parametrize(("pool", "shown"), [(None, "None"), ("prefill", "Prefill")])
def test_the_bottleneck_is_named_where_pools_scale(pool, shown):
    assert status_of(facts(scaling=Scaling(pools=("decode",), bottleneck=pool)), [], 1).bottleneck == shown


def test_a_pool_without_the_serving_revision_names_none():
    status = status_of(facts(found=step("BringingUp", serving=OLD)), [], 1)
    assert status.pools.decode.revision is None


def test_a_status_reports_the_pools_that_there_are_and_no_others():
    of = replace(facts(), pools=("prefill", "decode"))
    assert list(pools_of(status_of(of, [], 1))) == ["prefill", "decode"]


def test_progress_names_the_two_worst_problems_outside_a_rollout_too():
    starts = facts(found=step("Creating", serving=None), problems=(CRASH, NATS_DOWN, THIRD))
    assert condition("Progressing", starts).message == f"{COUNTS}: {CRASH} | {NATS_DOWN}"


SHARED = ParentRef(name="shared", namespace="infra", section_name="https")
OWN = ParentRef(name="own")
YES, NO = ("True", "Accepted: "), ("False", "NotAllowedByListeners: namespaces")
BOTH = {"Accepted": YES, "ResolvedRefs": YES}


def routed(*reports: ParentReport) -> Facts:
    """A route for two Gateways, of which controllers have reported so much."""
    body = {
        "metadata": {
            "name": "demo-gateway",
            "namespace": "default",
            "uid": "r",
            "resourceVersion": "1",
            "labels": {},
        },
        "spec": {},
    }
    child = replace(child_of("HTTPRoute", body), parents=reports)
    seen = observed()
    seen = replace(seen, children={**seen.children, child.key: child})
    return facts(seen, route_parents=(SHARED, OWN))


def of_shared(**verdicts: tuple[str, str]) -> ParentReport:
    return ParentReport("infra", "shared", "https", verdicts)


def of_own(**verdicts: tuple[str, str]) -> ParentReport:
    return ParentReport("default", "own", None, verdicts)


@pytest.mark.parametrize(
    ("of", "status", "reason", "words"),
    [
        (facts(route_parents=(OWN,)), "False", "NotCreated", "HTTPRoute demo-gateway does not exist yet"),
        (routed(), "Unknown", "Pending", "for Gateway infra/shared (listener https), Gateway default/own;"),
        (routed(of_shared(**BOTH)), "Unknown", "Pending", "for Gateway default/own;"),
        (routed(of_shared(**BOTH), of_own(Accepted=YES)), "Unknown", "Pending", "for Gateway default/own;"),
        (routed(of_shared(**BOTH), of_own(**BOTH)), "True", "Accepted", "Gateway infra/shared (listener https), Gateway default/own"),
        (routed(of_shared(**BOTH), of_own(**{**BOTH, "Accepted": NO})), "False", "NotAccepted", "Gateway default/own: Accepted is False, NotAllowedByListeners: namespaces;"),
        (routed(of_shared(**{**BOTH, "ResolvedRefs": NO})), "False", "NotAccepted", "ResolvedRefs is False"),
        (routed(ParentReport("other", "own", None, BOTH), of_shared(**BOTH)), "Unknown", "Pending", "default/own"),
    ],
)  # fmt: skip
def test_a_route_is_accepted_when_every_gateway_says_so(of, status, reason, words):
    found = condition("RouteAccepted", of)
    assert (found.status, found.reason) == (status, reason)
    assert words in found.message


def test_two_controllers_may_report_for_one_gateway():
    other = of_own(**{**BOTH, "Accepted": NO})
    assert condition("RouteAccepted", routed(of_shared(**BOTH), of_own(**BOTH), other)).status == "False"


def test_there_is_no_condition_about_a_route_where_none_is_wanted():
    assert "RouteAccepted" not in {v.type for v in current_conditions(facts())}


def test_what_was_reported_about_an_older_route_is_left_out():
    conditions = [
        {"type": "Accepted", "status": "True", "reason": "Accepted", "observedGeneration": 2},
        {"type": "ResolvedRefs", "status": "True", "reason": "ResolvedRefs", "observedGeneration": 1},
        {"type": "example.com/Programmed", "status": "True", "reason": "Yes"},
    ]
    parent = {"parentRef": {"name": "own"}, "controllerName": "example.com/c", "conditions": conditions}
    metadata = {"name": "a", "namespace": "default", "uid": "r", "resourceVersion": "1", "generation": 2}
    (found,) = child_of(
        "HTTPRoute", {"metadata": metadata, "spec": {}, "status": {"parents": [parent]}}
    ).parents
    assert (found.namespace, found.name, found.section) == ("default", "own", None)
    assert found.verdicts.keys() == {"Accepted", "example.com/Programmed"}


KEYS = AuthSpec(keys_secret="api-keys")
TOKENS = AuthSpec(
    keys_secret="api-keys", oidc=OidcSpec(issuer="https://issuer.example.com", audience="models")
)
NO_KEY = "no key is needed, so anyone who can reach the gateway can use it"
SET = "; set spec.gateway.auth.keysSecret to the name of a Secret with API keys"


def gateways(*names: str, keys: str | None = None, **more) -> Observed:
    """Gateway pods beside what stands, that were made with a Secret of keys or without."""
    return observed(pods=[replace(pod("gateway", name=name, **more), keys_secret=keys) for name in names])


@pytest.mark.parametrize(
    ("of", "status", "reason", "message"),
    [
        (facts(), "False", "AuthenticationOff", NO_KEY + SET),
        (facts(gateways("g-0", keys="api-keys")), "False", "AuthenticationOff", NO_KEY + SET),
        (
            facts(exposed_by=("HTTPRoute", "Ingress")),
            *("False", "AuthenticationOff", f"{NO_KEY}, and it is exposed outside the cluster (HTTPRoute, Ingress){SET}"),
        ),
        (facts(auth=KEYS), "True", "ApiKeys", "requests need an API key of Secret api-keys"),
        (
            facts(gateways("g-0", keys="api-keys"), auth=TOKENS, exposed_by=("Ingress",)),
            *("True", "ApiKeysAndTokens", "requests need an API key of Secret api-keys or a token of https://issuer.example.com"),
        ),
        (replace(facts(problems=(CRASH,)), step=None), "Unknown", "InvalidSpec", "the spec is invalid, and gateways keep the settings that they have; see the condition Degraded"),
    ],
)  # fmt: skip
def test_who_may_use_the_gateway_is_reported(of, status, reason, message):
    assert condition("AuthenticationRequired", of) == ConditionState(
        "AuthenticationRequired", status, reason, message
    )


@pytest.mark.parametrize(
    ("pods", "named"),
    [
        (gateways("g-1", "g-0"), ": g-0, g-1;"),
        (gateways("g-3", "g-4", "g-0", "g-1", "g-2"), ": g-0, g-1, g-2 and 2 more;"),
        (gateways("g-0", deleting=True), ": g-0;"),
    ],
    ids=["left", "many", "ending"],
)
def test_authentication_is_off_until_the_last_gateway_without_keys_is_gone(pods, named):
    with_keys = gateways("g-9", keys="api-keys").pods
    found = condition(
        "AuthenticationRequired", facts(replace(pods, pods=(*with_keys, *pods.pods)), auth=KEYS)
    )
    assert (found.status, found.reason) == ("False", "GatewaysWithoutKeys")
    assert named in found.message
    ended = tuple(replace(p, finished=True) for p in pods.pods)
    assert condition("AuthenticationRequired", facts(replace(pods, pods=ended), auth=KEYS)).status == "True"


def test_a_deployment_that_needs_no_key_is_ready_and_not_degraded():
    found = {v.type: (v.status, v.reason) for v in current_conditions(facts(exposed_by=("Ingress",)))}
    assert found["AuthenticationRequired"] == ("False", "AuthenticationOff")
    assert found["Ready"] == ("True", "Serving")
    assert found["Degraded"] == ("False", "NoProblem")
    assert found["Progressing"] == ("False", "Complete")


@pytest.mark.parametrize(("phase", "finished"), [("Failed", True), ("Succeeded", True), ("Running", False), ("Pending", False)])  # fmt: skip
def test_an_evicted_pod_is_finished_and_a_starting_one_is_not(phase, finished):
    metadata = {"name": "g-0", "uid": "u", "namespace": "default", "labels": {}}
    assert pod_of({"metadata": metadata, "status": {"phase": phase}}).finished is finished
