"""What templates add to pods, and what they cannot take from them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_api.readers import Component
from mmd_api.spec.pod_parts import (
    OWNED_CONTAINER_FIELDS,
    RESERVED_CONTAINERS,
    RESERVED_MOUNTS,
    RESERVED_VOLUMES,
    keeps_what_is_owned,
    merges,
    stays_restricted,
)
from mmd_operator.resources.plan import plan_objects
from mmd_operator.resources.strategic_merge import merged
from tests.plan.planned import deployment

COMPONENTS: tuple[Component, ...] = ("gateway", "nats", "encoder", "prefill", "decode")
WIDE: dict[str, Any] = {
    "model": {"id": "org/model", "storage": {"type": "Hub"}},
    "encoder": {"gpus": 0, "cache": {"disk": {"sizeMebibytes": 64}}},
    "prefill": {"gpus": 0},
    "decode": {"gpus": 0},
    "transfer": {"kv": {"backend": "Gloo"}},
    "gateway": {"auth": {"keysSecret": "keys"}, "tls": {"secretName": "tls"}},
    "nats": {},
}


def templates(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Pod template by component. `changes`: by component."""
    spec = {name: {**WIDE.get(name, {}), **changes.get(name, {})} for name in WIDE}
    objects = plan_objects(deployment(spec), "somewhere")
    return {
        o["metadata"]["labels"]["app.kubernetes.io/component"]: o["spec"]["template"]
        for o in objects
        if o["kind"] in ("StatefulSet", "Deployment")
    }


def with_template(component: Component, template: dict[str, Any]) -> dict[str, Any]:
    return templates(**{component: {"template": template}})[component]


def test_what_is_reserved_is_what_planned_pods_have():
    claims = templates()
    claims |= {
        "claim": templates(
            model={"id": "/models/a", "storage": {"type": "PersistentVolumeClaim", "claimName": "a"}}
        )["decode"]
    }
    pods = [t["spec"] for t in claims.values()]
    assert {v["name"] for pod in pods for v in pod["volumes"]} == set(RESERVED_VOLUMES)
    assert {c["name"] for pod in pods for c in pod["containers"]} == set(RESERVED_CONTAINERS)
    mounts = {m["mountPath"] for pod in pods for c in pod["containers"] for m in c["volumeMounts"]}
    assert mounts == set(RESERVED_MOUNTS)


@pytest.mark.parametrize("component", COMPONENTS)
def test_planned_pods_stay_within_the_restricted_standard(component: Component):
    pod = with_template(
        component,
        {"sidecars": [{"name": "a", "image": "b"}], "initContainers": [{"name": "c", "image": "d"}]},
    )["spec"]
    assert stays_restricted(pod)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert [c["name"] for c in pod["containers"]][1:] == ["a"]
    for container in (*pod["containers"], *pod["initContainers"]):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


FORBIDDEN: dict[str, dict[str, Any]] = {
    "the host's processes": {"hostPID": True},
    "a path of the host": {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]},
    "root": {"securityContext": {"runAsUser": 0}},
    "perhaps root": {"securityContext": {"runAsNonRoot": False}},
    "no seccomp": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
    "no AppArmor": {
        "containers": [{"name": "a", "securityContext": {"appArmorProfile": {"type": "Unconfined"}}}]
    },
    "a SELinux role": {"securityContext": {"seLinuxOptions": {"role": "a"}}},
    "an unsafe sysctl": {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
    "escalation": {"containers": [{"name": "a", "securityContext": {"allowPrivilegeEscalation": True}}]},
    "a capability": {
        "initContainers": [{"name": "a", "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}]
    },
    "capabilities kept": {
        "containers": [{"name": "a", "securityContext": {"capabilities": {"drop": ["KILL"]}}}]
    },
    "an unmasked /proc": {"containers": [{"name": "a", "securityContext": {"procMount": "Unmasked"}}]},
    "a port of the host": {"containers": [{"name": "a", "ports": [{"containerPort": 1, "hostPort": 1}]}]},
    "a probe of another host": {
        "containers": [{"name": "a", "livenessProbe": {"tcpSocket": {"host": "b", "port": 1}}}]
    },
}


@pytest.mark.parametrize("part", FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_part_that_leaves_the_restricted_standard_is_found(part: dict[str, Any]):
    assert not stays_restricted(part)


@pytest.mark.parametrize(
    "context",
    [
        {"capabilities": {"add": ["NET_BIND_SERVICE"]}},
        {"capabilities": {}},
        {"seccompProfile": {}},
        {"runAsUser": 1000},
    ],
    ids=str,
)
def test_a_context_of_the_users_own_takes_nothing_of_the_standard_away(context: dict[str, Any]):
    template = {
        "sidecars": [{"name": "a", "image": "b", "securityContext": context}],
        "securityContext": {name: value for name, value in context.items() if name != "capabilities"},
    }
    pod = with_template("decode", template)["spec"]
    own = pod["containers"][1]["securityContext"]
    assert own["capabilities"] == {**context.get("capabilities", {}), "drop": ["ALL"]}
    assert own["allowPrivilegeEscalation"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_entries_of_one_key_that_the_api_tells_apart_stay_apart():
    hard = {"topologyKey": "h", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1}
    soft = {**hard, "whenUnsatisfiable": "ScheduleAnyway"}
    other = {**soft, "topologyKey": "z"}
    found = merged([hard, soft], [other], "topologySpreadConstraints")
    assert found == [hard, soft, other]
    tcp, udp = {"containerPort": 53}, {"containerPort": 53, "protocol": "UDP"}
    assert merged([tcp, udp], [{**udp, "name": "dns"}], "ports") == [tcp, {**udp, "name": "dns"}]


def test_a_variables_value_and_source_replace_each_other():
    source = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    value = {"name": "A", "value": "1"}
    assert merged([value], [source], "env") == [source]
    assert merged([source], [value], "env") == [value]


def test_a_privileged_template_may_leave_the_standard():
    patch = {"spec": {"hostNetwork": True}}
    pod = with_template("decode", {"podSecurity": "Privileged", "patch": patch})["spec"]
    assert pod["hostNetwork"]
    with pytest.raises(ValueError, match="set podSecurity: Privileged"):
        with_template("decode", {"patch": patch})


MERGES: dict[str, tuple[Any, Any, Any]] = {
    "objects by field": ({"a": 1, "b": {"c": 1}}, {"b": {"d": 2}}, {"a": 1, "b": {"c": 1, "d": 2}}),
    "lists by key": (
        {"env": [{"name": "A", "value": "1"}, {"name": "B"}]},
        {"env": [{"name": "C"}, {"name": "A", "value": "2"}]},
        {"env": [{"name": "A", "value": "2"}, {"name": "B"}, {"name": "C"}]},
    ),
    "other lists as a whole": (
        {"tolerations": [{"key": "a"}]},
        {"tolerations": [{"key": "b"}]},
        {"tolerations": [{"key": "b"}]},
    ),
    "entries removed": (
        {"volumes": [{"name": "a"}, {"name": "b"}]},
        {"volumes": [{"name": "a", "$patch": "delete"}]},
        {"volumes": [{"name": "b"}]},
    ),
    "entries replaced": (
        {"volumes": [{"name": "a", "emptyDir": {}}]},
        {"volumes": [{"name": "a", "secret": {"secretName": "b"}, "$patch": "replace"}]},
        {"volumes": [{"name": "a", "secret": {"secretName": "b"}}]},
    ),
}


@pytest.mark.parametrize("case", MERGES.values(), ids=MERGES)
def test_a_patch_is_merged_as_the_api_merges(case: tuple[Any, Any, Any]):
    base, patch, expected = case
    assert merged(base, patch) == expected


UNMERGEABLE: list[dict[str, Any]] = [
    {"spec": []},
    {"spec": {"containers": {}}},
    {"spec": {"containers": [{"image": "a"}]}},
    {"spec": {"securityContext": None}},
    {"spec": {"$patch": "replace"}},
    {"spec": {"volumes": [{"name": "a", "$patch": "merge"}]}},
    {"spec": {"$retainKeys": ["containers"]}},
    {"metadata": {"labels": ["a"]}},
]


@pytest.mark.parametrize("patch", UNMERGEABLE, ids=str)
def test_a_patch_of_another_form_is_refused(patch: dict[str, Any]):
    assert not merges(patch)


FIELDS = (*sorted(OWNED_CONTAINER_FIELDS), "resources", "env", "volumeMounts", "securityContext", "$patch")
VALUES = st.sampled_from(
    [
        *(
            "a",
            "delete",
            "replace",
            1,
            True,
            None,
            {},
            [],
            {"claims": [{"name": "a"}]},
            {"limits": {"nvidia.com/gpu": "9"}},
        ),
        *(
            {"limits": {"rdma/hca": "1"}},
            [{"name": "MMD_POD_NAME", "value": "x"}],
            [{"name": "A", "value": "x"}],
        ),
        *(
            [{"mountPath": "/tmp", "name": "a"}],
            [{"mountPath": "/own", "name": "a"}],
            [{"name": "a", "$patch": "delete"}],
        ),
    ]
)
CONTAINERS = st.builds(
    lambda name, rest: {"name": name, **rest},
    st.sampled_from(["worker", "other"]),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
)
PATCHES = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.dictionaries(
            st.sampled_from(["labels", "annotations", "name"]),
            st.dictionaries(
                st.sampled_from(["a", "serving.multimodal.dev/revision", "app.kubernetes.io/component"]),
                st.just("x"),
            ),
        ),
        "spec": st.fixed_dictionaries(
            {},
            optional={
                "containers": st.lists(CONTAINERS, max_size=2),
                "initContainers": st.lists(CONTAINERS, max_size=1),
                "volumes": st.lists(
                    st.fixed_dictionaries(
                        {"name": st.sampled_from(["config", "a"])},
                        optional={"$patch": st.just("delete"), "emptyDir": st.just({})},
                    ),
                    max_size=2,
                ),
                "terminationGracePeriodSeconds": st.just(1),
                "dnsPolicy": st.just("Default"),
            },
        ),
    },
)
PLANNED = templates()["decode"]


@settings(max_examples=300, deadline=None)
@given(PATCHES)
def test_no_accepted_patch_changes_what_the_operator_owns(patch: dict[str, Any]):
    if not (merges(patch) and keeps_what_is_owned(patch)):
        return
    after = merged(PLANNED, patch)
    for kind in ("labels", "annotations"):
        assert PLANNED["metadata"][kind].items() <= after["metadata"][kind].items()
    before, found = PLANNED["spec"]["containers"][0], after["spec"]["containers"][0]
    for field in (OWNED_CONTAINER_FIELDS & before.keys()) | {"name"}:
        assert found[field] == before[field]
    assert all(v in found["env"] for v in before["env"] if v["name"].startswith("MMD_"))
    assert all(m in found["volumeMounts"] for m in before["volumeMounts"])
    assert all(v in after["spec"]["volumes"] for v in PLANNED["spec"]["volumes"])
    assert after["spec"]["terminationGracePeriodSeconds"] == PLANNED["spec"]["terminationGracePeriodSeconds"]
    assert not any("gpu" in name for name in found.get("resources", {}).get("limits", {}))


def test_the_users_own_placement_turns_the_default_off():
    found = templates(prefill={"template": {"affinity": {}, "topologySpreadConstraints": []}})
    assert not {"affinity", "topologySpreadConstraints"} & found["prefill"]["spec"].keys()
    assert found["decode"]["spec"]["topologySpreadConstraints"][0]["whenUnsatisfiable"] == "ScheduleAnyway"
    near = templates()["prefill"]["spec"]["affinity"]["podAffinity"]
    assert list(near) == ["preferredDuringSchedulingIgnoredDuringExecution"]


def test_nats_gets_shared_memory_only_when_it_is_set():
    assert "shm" not in {v["name"] for v in templates()["nats"]["spec"]["volumes"]}
    pod = with_template("nats", {"sharedMemory": "2Gi"})["spec"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}} in pod["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
